//! `overbook capacity`: how many VMs fit, with which certainty, and what limits that number.

use api::wire::CapacityStatus;
use std::ops::RangeInclusive;

use clap::Args;

use super::{context::Context, error::CliError, output::Output};

/// Arguments of `overbook capacity`.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Probability that all overloads that come at once find room, 0.5 to 0.9999
    #[arg(long, default_value_t = 0.97, value_parser = |text: &str| within(text, 0.5..=0.9999))]
    certainty: f64,
    /// Share of its promised memory that each VM is given, 0.1 to 1; by default, as it is now
    #[arg(long, value_name = "RATIO", value_parser = |text: &str| within(text, 0.1..=1.0))]
    given: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reads a number between two others. The daemon has the same limits for every client.
fn within(text: &str, limits: RangeInclusive<f64>) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| limits.contains(number));
    number.ok_or_else(|| format!("write a number from {} to {}", limits.start(), limits.end()))
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let mut path = format!("/v1/capacity?certainty={}", arguments.certainty);
    if let Some(given) = arguments.given {
        path += &format!("&given={given}");
    }
    let capacity: CapacityStatus = context.client()?.get(&path)?;
    if arguments.json { Output::json(&capacity) } else { Ok(Output::text(&capacity.words())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_a_number_within_its_limits() {
        assert_eq!(within("0.6", 0.1..=1.0), Ok(0.6));
        for wrong in ["60%", "2", "0", "NaN", ""] {
            let why = within(wrong, 0.1..=1.0).unwrap_err();
            assert_eq!(why, "write a number from 0.1 to 1", "{wrong}");
        }
    }
}
