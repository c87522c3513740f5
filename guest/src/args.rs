//! The command line: common options and the value parsers that the workloads share.
//!
//! Every value has a range. A value outside it gets one error that names option, value and range,
//! and exit status 2. Each workload's own options are in its file.

use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser};

use crate::workloads::Workload;

/// Largest memory or file size that a lab guest could want.
pub(crate) const MAX_MB: usize = 65_536;
const MAX_RATE: f64 = 1e9;
const MIN_RATE: f64 = 0.001;
const MAX_SECONDS: f64 = 1e7;

/// Real work for lab guests; prints one JSON line per second.
#[derive(Debug, Parser)]
#[command(name = "overbook-guest", version, disable_help_subcommand = true)]
pub(crate) struct GuestCli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) workload: Workload,
}

/// Options of every workload.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Stop after this many seconds [0 = run on, or until the work is done]
    #[arg(long, global = true, value_name = "S", default_value = "0", value_parser = seconds)]
    seconds: f64,
    /// Seed of everything random in the work
    #[arg(long, global = true, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Target operations per second (memhog, verify: MB/s) [default: unpaced; idle: 10]
    #[arg(long, global = true, value_name = "OPS", value_parser = rate)]
    pub(crate) rate: Option<f64>,
    /// Begin the work this many seconds late
    #[arg(long, global = true, value_name = "S", default_value = "0", value_parser = seconds)]
    after: f64,
    /// First fill this much memory with content that every guest has, and hold it
    #[arg(long, global = true, value_name = "N", value_parser = megabytes)]
    pub(crate) common_mb: Option<usize>,
    /// Then read this much of the system's files once, as a nightly job does
    #[arg(long, global = true, value_name = "N", value_parser = megabytes)]
    pub(crate) read_mb: Option<usize>,
    /// Write the use of each page frame to the data disk at this interval [0 = never]
    #[arg(long, global = true, value_name = "S", default_value = "0", value_parser = seconds)]
    census_s: f64,
}

impl Common {
    /// The run time; `None` = no limit.
    pub(crate) fn time_limit(&self) -> Option<Duration> {
        (self.seconds > 0.0).then(|| Duration::from_secs_f64(self.seconds))
    }

    /// The interval between records of the page frames' uses; `None` = never.
    pub(crate) fn census(&self) -> Option<Duration> {
        (self.census_s > 0.0).then(|| Duration::from_secs_f64(self.census_s))
    }

    /// The moment at which the work begins, counted from the start.
    pub(crate) fn beginning(&self) -> Duration {
        Duration::from_secs_f64(self.after)
    }
}

/// `--mb` of the workloads that hold memory: 1 to [`MAX_MB`].
pub(crate) fn megabytes(text: &str) -> Result<usize, String> {
    ranged(text, 1, MAX_MB)
}

/// `--mb` of the workloads on text, whose lines are found by 32-bit offsets: 1 to 4095.
pub(crate) fn text_megabytes(text: &str) -> Result<usize, String> {
    ranged(text, 1, 4095)
}

/// A duration in seconds, from 0.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    ranged(text, 0.0, MAX_SECONDS)
}

fn rate(text: &str) -> Result<f64, String> {
    ranged(text, MIN_RATE, MAX_RATE)
}

/// Parses a number and checks `low <= number <= high`; NaN is outside every range.
pub(crate) fn ranged<T>(text: &str, low: T, high: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + std::fmt::Display,
{
    match text.parse::<T>() {
        Ok(value) if value >= low && value <= high => Ok(value),
        _ => Err(format!("valid is {low} to {high}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(line: &str) -> (String, i32) {
        let words = std::iter::once("overbook-guest").chain(line.split_whitespace());
        let error = GuestCli::try_parse_from(words).expect_err(line);
        (error.to_string(), error.exit_code())
    }

    #[test]
    fn the_command_table_is_consistent() {
        use clap::CommandFactory;
        GuestCli::command().debug_assert();
    }

    #[test]
    fn bad_values_name_option_value_and_range_and_exit_2() {
        let cases = [
            ("random-array --mb 0", "--mb", "'0'", "1 to 65536"),
            ("random-array --mb 10MB", "--mb", "'10MB'", "1 to 65536"),
            ("random-array --phases 10:1,x:2", "--phases", "'10:1,x:2'", "'x:2'"),
            ("random-array --phases 10", "--phases", "'10'", "mb:secs"),
            ("memhog --mb 1 --hold nan", "--hold", "'nan'", "0 to 10000000"),
            ("sort --mb 4096", "--mb", "'4096'", "1 to 4095"),
            ("wordcount --mb 99999", "--mb", "'99999'", "1 to 4095"),
            ("pi --common-mb 0", "--common-mb", "'0'", "1 to 65536"),
            ("pi --rate 0", "--rate", "'0'", "0.001 to 1000000000"),
            ("pi --rate inf", "--rate", "'inf'", "0.001 to 1000000000"),
            ("pi --seconds=-1", "--seconds", "'-1'", "0 to 10000000"),
            ("pi --after nan", "--after", "'nan'", "0 to 10000000"),
            ("web --mb 1 --rate 5 --burst 2:1", "--burst", "'2:1'", "factor:on_s:off_s"),
            ("web --mb 1 --rate 5 --burst 0:1:1", "--burst", "'0:1:1'", "0.01 to 1000"),
            ("verify --mb 18446744073709551616", "--mb", "'18446744073709551616'", "1 to 65536"),
        ];
        for (line, option, value, range) in cases {
            let (message, code) = refusal(line);
            for part in [option, value, range] {
                assert!(message.contains(part), "{line}: no {part} in {message}");
            }
            assert_eq!(code, 2, "{line}");
        }
    }

    #[test]
    fn options_that_do_not_fit_together_are_refused() {
        assert!(refusal("random-array").0.contains("--mb"));
        assert!(refusal("random-array --mb 1 --phases 1:1").0.contains("cannot be used with"));
        assert!(refusal("web --mb 1 --burst 2:1:1").0.contains("--rate"));
        assert!(refusal("fileio --mb 1").0.contains("--path"));
        assert_eq!(refusal("nonsense").1, 2);
    }

    #[test]
    fn common_options_may_stand_before_or_after_the_workload() {
        for line in ["x --seconds 2 --seed 7 pi --rate 5", "x pi --rate 5 --seed 7 --seconds 2"] {
            let cli = GuestCli::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(cli.common.time_limit(), Some(Duration::from_secs(2)));
            assert_eq!((cli.common.seed, cli.common.rate), (7, Some(5.0)));
        }
    }
}
