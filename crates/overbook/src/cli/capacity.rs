//! `overbook capacity`: how many VMs fit, with which certainty, and what limits that number.

use api::wire::CapacityStatus;
use clap::Args;

use super::{context::Context, error::CliError, output::Output};

/// Arguments of `overbook capacity`.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Probability that all overloads that come at once find room, 0.5 to 0.9999
    #[arg(long, default_value_t = 0.97)]
    certainty: f64,
    /// Share of its promised memory that each VM is given, 0.1 to 1; by default, as it is now
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
