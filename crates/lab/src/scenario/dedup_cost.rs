//! `dedup-cost`: what a guest that works feels of its pages being merged and scanned.
//!
//! A guest reads all over memory that is in part the same as a resting guest's, and writes to what is its own. It is
//! measured for some seconds before, while its pages are merged and scanned on, and after; each round has fresh
//! guests, for a page is merged only once. The guest has a CPU of its own, on which QEMU's threads and the shim's
//! run as well; the worker has the other one.

use std::time::Duration;

use model::Bytes;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::fleet;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::meb::pairs::{Median, Pairs};
use crate::meb::progress::Lines;
use crate::merger::Merger;
use crate::pinning;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-cost",
    summary: "what a working guest feels of its pages being merged: its speed, and its longest pauses",
    run,
};

const ROUNDS: u64 = 8;
const MEMORY: Bytes = Bytes::mib(256);
const SAME_MB: u32 = 60;
const OWN_MB: u32 = 60;
const ZERO_MB: u32 = 20;
const SETTLE: Duration = Duration::from_secs(3);
/// Lines of a window, one second each. At [`RATE`] half of it is merging, and half is scanning what is merged.
const WINDOW: usize = 6;
const WINDOW_LIMIT: Duration = Duration::from_secs(30);
/// Pages in a millisecond: the fastest that the controller has.
const RATE: u32 = 50;
/// Where the worker runs; the guest that works has the other CPU.
const WORKER_CPU: usize = 1;

/// What one guest felt.
struct Round {
    overhead: f64,
    /// The 99.99th percentile of what an access took, in microseconds, in the worst second of each window.
    pause_us_with: f64,
    pause_us_without: f64,
    merged: Bytes,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, u32::try_from(ROUNDS).unwrap_or(u32::MAX));
    let mut rounds = Vec::new();
    for number in 0..ROUNDS {
        let round = round(context, number)?;
        context.say(&format!(
            "round {}: {:+.2} %, pauses {:.0} us ({:.0} without), {} merged",
            number + 1,
            round.overhead * 100.0,
            round.pause_us_with,
            round.pause_us_without,
            round.merged
        ));
        rounds.push(round);
    }
    let slowdown = Median::of(rounds.iter().map(|round| round.overhead).collect());
    let note = format!(
        "time for each operation while pages are merged, to that before and after, - 1; {}",
        slowdown.interval_percent()
    );
    let figure = Figure::new(slowdown.value, "ratio", note).target(Target::AtMost(0.02));
    figures.add("guest_slowdown", figure);
    let of = |what: fn(&Round) -> f64| Median::of(rounds.iter().map(what).collect());
    let (with, without) = (of(|round| round.pause_us_with), of(|round| round.pause_us_without));
    let worst = rounds.iter().map(|round| round.pause_us_with).fold(f64::NAN, f64::max);
    let note = format!(
        "of what an access took, in the worst second of each round, the median; the worst round's {worst:.0}; \
         without merging {:.0}",
        without.value
    );
    let figure = Figure::new(with.value, "us", note).target(Target::AtMost(2000.0));
    figures.add("pause_us_p9999", figure);
    let least = rounds.iter().map(|round| round.merged).min().unwrap_or_default();
    let note = "of the guest that worked, in the round with the least: it was really merged";
    let figure = Figure::new(least.as_mib(), "MiB", note);
    figures.add("merged_mib", figure.target(Target::AtLeast(f64::from(SAME_MB) * 0.9)));
    Ok(figures)
}

fn round(context: &Context, number: u64) -> Result<Round, LabError> {
    let fill = format!("copies --same-mb {SAME_MB} --own-mb {OWN_MB} --zero-mb {ZERO_MB}");
    let guest = |place: u64, name: &str, work: &str| MachineSpec {
        seed: context.seed + 2 * number + place,
        shim: true,
        cpus: vec![if place == 0 { 0 } else { WORKER_CPU }],
        ..MachineSpec::new(name, "dedup", MEMORY, MEMORY, work)
    };
    let specs = [guest(0, "working", &fill), guest(1, "resting", &format!("{fill} --rest"))];
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    fleet::wait_until_filled(&lab, SAME_MB + OWN_MB + ZERO_MB)?;
    interrupt::sleep(SETTLE)?;
    let pids: Vec<u32> = lab.machines().iter().map(|machine| machine.process().pid).collect();
    let before = window(&lab)?;
    let merger = pinning::on_cpu(WORKER_CPU, || Merger::start(&pids, Some(RATE), None))?;
    let with = window(&lab)?;
    let readings = merger.stop();
    let after = window(&lab)?;
    lab.stop()?;
    let mut pairs = Pairs::default();
    pairs.add_without(before.rate);
    pairs.add_with(with.rate);
    pairs.add_without(after.rate);
    Ok(Round {
        overhead: pairs.overhead().value,
        pause_us_with: with.pause_us,
        pause_us_without: before.pause_us.max(after.pause_us),
        merged: readings.first().map_or(Bytes::ZERO, |reading| reading.merged),
    })
}

struct Window {
    rate: f64,
    pause_us: f64,
}

/// How the first guest gets on from now on.
fn window(lab: &Lab) -> Result<Window, LabError> {
    let mut lines = Lines::of(lab);
    let is_over = |lines: &Lines| lines.guest(0).len() > WINDOW;
    lines.look_until(lab, "a guest to report", WINDOW_LIMIT, is_over)?;
    let lines = lines.guest(0);
    let rate = match lines {
        [first, .., last] => last.rate_since(first),
        _ => f64::NAN,
    };
    let pauses = lines.iter().skip(1).filter_map(|line| line.number("p9999_us"));
    Ok(Window { rate, pause_us: pauses.fold(f64::NAN, f64::max) })
}
