//! `overbook capacity`: how many VMs fit, with which certainty, and what that is limited by.

use clap::Args;

use super::{context::Context, error::CliError, output::Output};
use crate::http::wire::CapacityStatus;

/// What is asked.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// With which certainty overloads that come at once are to find room, 0.5 to 0.9999
    #[arg(long, default_value_t = 0.97)]
    certainty: f64,
    /// What each VM is given of what it was promised, 0.1 to 1; without it: as they are given now
    #[arg(long, value_name = "RATIO")]
    given: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let mut path = format!("/v1/capacity?certainty={}", arguments.certainty);
    if let Some(given) = arguments.given {
        path += &format!("&given={given}");
    }
    let capacity: CapacityStatus = context.client()?.get(&path)?;
    if arguments.json { Output::json(&capacity) } else { Ok(Output::text(&capacity.words())) }
}
