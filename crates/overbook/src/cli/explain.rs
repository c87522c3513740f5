//! `overbook explain VM`: prints the daemon's explanation.

use super::{context::Context, error::CliError, output::Output};
use api::client::path_of;
use api::wire::Explanation;

pub(super) fn run(context: &Context, vm: &str, json: bool) -> Result<Output, CliError> {
    let explanation: Explanation = context.client()?.get(&path_of("explain", vm))?;
    if json { Output::json(&explanation) } else { Ok(Output::text(&explanation.text)) }
}
