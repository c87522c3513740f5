//! `overbook daemon`: runs the daemon.

use super::{context::Context, error::CliError, output::Output};
use crate::daemon;

pub(super) fn run(context: &Context) -> Result<Output, CliError> {
    daemon::run(&context.config).map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}
