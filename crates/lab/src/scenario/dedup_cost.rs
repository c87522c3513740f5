//! `dedup-cost`: the cost to a working guest while its pages are merged and scanned.
//!
//! A guest reads all over memory that is in part the same as a resting guest's, and writes to its
//! private part. It is measured for some seconds before its pages are merged and scanned, while
//! they are, and afterwards. Each round has fresh guests, because a page is merged only once.
//! Both ways are compared over the same time: the twelve seconds that the kernel's KSM needs at
//! this rate. Overbook merges for two or three of them, and scans for the rest. KSM comes second.
//!
//! The guest has a CPU of its own, on which QEMU's threads and the shim's run as well. The worker
//! and `ksmd` have the other one, in their turns.

use super::prelude::*;
use crate::ksm::{self, Ksm};
use crate::meb::progress::Lines;
use crate::merger::{COPIES, COPIES_MB, Merger, SAME_MB};
use crate::pinning::{self, Pinned};
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-cost",
    summary: "what a working guest feels of its pages being merged: its speed, and its longest pauses",
    measures: &[&[file!()], measured::PAGES, measured::SHIM, measured::MERGER],
    claims: claims! {
        "guest_slowdown" <= 0.02 => "ratio",
            "A guest that works does not feel that its pages are merged";
        "guest_slowdown_ksm_50" => "ratio",
            "KSM at 50 pages/ms on the same CPU as our worker slows the same guest";
        "taken" <= 0.02 => "ratio", "The shim's threads take little of the guest's CPU";
        "pause_us_p9999" <= 2000.0 => "us",
            "A guest's longest pauses stay short while its pages are merged";
    },
    run,
};

/// Rounds of ours; KSM has half as many, which still have an interval.
const ROUNDS: u64 = 12;
const MEMORY: Bytes = Bytes::mib(256);
const SETTLE: Duration = Duration::from_secs(3);
/// Lines, one a second, of the window in which pages are merged, and of the windows before and
/// after it.
const WITH: usize = 12;
const WITHOUT: usize = 6;
const WINDOW_LIMIT: Duration = Duration::from_secs(30);
/// Pages in a millisecond: the controller's highest rate.
const RATE: u32 = 50;
/// The worker's CPU, and `ksmd`'s; the working guest has the other one.
const WORKER_CPU: usize = 1;

/// The way of merging.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CostArm {
    Ours,
    Kernel,
}

/// The measurements of one guest.
struct Round {
    overhead: f64,
    /// The 99.99th percentile of an access's time, in microseconds, in the worst second of each
    /// window.
    pause_us_with: f64,
    pause_us_without: f64,
    merged_mib: f64,
    /// Share of the guest's CPU that the shim's threads took.
    taken: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, u32::try_from(ROUNDS).unwrap_or(u32::MAX));
    let (mut ours, mut kernels) = (Vec::new(), Vec::new());
    for number in 0..ROUNDS {
        ours.push(round(context, number, CostArm::Ours)?);
        if number % 2 == 0 {
            kernels.push(round(context, number, CostArm::Kernel)?);
        }
    }
    add_figures(&mut figures, &ours, &kernels);
    Ok(figures)
}

fn add_figures(figures: &mut Figures, ours: &[Round], kernels: &[Round]) {
    let slowdown = |rounds: &[Round]| {
        let each = rounds.iter().map(|round| round.overhead).collect();
        let note = "time for each operation while pages are merged, to that before and after, - 1";
        Figure::of_rounds(each, "ratio", note)
    };
    figures.add("guest_slowdown", slowdown(ours));
    figures.add("guest_slowdown_ksm_50", slowdown(kernels));
    let note = "of the guest's CPU, by the kernel's count: what the shim's threads took";
    let taken = ours.iter().map(|round| round.taken).collect();
    figures.tell_rounds("taken", taken, "ratio", note);
    let under_ksm = median(kernels.iter().map(|round| round.pause_us_with));
    let without = median(ours.iter().map(|round| round.pause_us_without));
    let with: Vec<f64> = ours.iter().map(|round| round.pause_us_with).collect();
    let worst = with.iter().copied().largest();
    let note = format!(
        "of what an access took, in the worst second of each round; the worst round's {worst:.0}; \
         without merging {without:.0}, under KSM {under_ksm:.0}"
    );
    figures.tell_rounds("pause_us_p9999", with, "us", note);
    let least = ours.iter().map(|round| round.merged_mib).smallest();
    let note = "of the guest that worked, in the round with the least: it was really merged";
    figures.check("merged_mib", least, "MiB", note, Target::AtLeast(f64::from(SAME_MB) * 0.9));
}

fn round(context: &Context, number: u64, way: CostArm) -> Result<Round, LabError> {
    let guest = |place: u64, name: &str, work: &str| {
        context
            .guest(name, "dedup", MEMORY, work)
            .seeded(2 * number + place)
            .with_shim(true)
            .on_cpus(vec![if place == 0 { 0 } else { WORKER_CPU }])
    };
    let mut lab = context
        .start([guest(0, "working", COPIES), guest(1, "resting", &format!("{COPIES} --rest"))])?;
    fleet::wait_until_filled(&lab, COPIES_MB)?;
    interrupt::sleep(SETTLE)?;
    let before = window(&lab, WITHOUT)?;
    let pids = lab.pids();
    let shim_before = threads::shims_cpu_s(&pids[..1]);
    let (with, merged_mib, after);
    match way {
        CostArm::Ours => {
            let merger = pinning::on_cpu(WORKER_CPU, || Merger::start(&pids, Some(RATE), None))?;
            with = window(&lab, WITH)?;
            merged_mib = merger.stop().first().map_or(f64::NAN, |reading| reading.merged.as_mib());
            after = window(&lab, WITHOUT)?;
        }
        CostArm::Kernel => {
            // As far away from the working guest as our worker is.
            let _ksmd = Pinned::to(WORKER_CPU, Ksm::thread()?)?;
            let ksm = Ksm::start(ksm::FAST)?;
            with = window(&lab, WITH)?;
            merged_mib = Ksm::saved_mib()?;
            ksm.stop()?;
            after = window(&lab, WITHOUT)?;
        }
    }
    let taken = (threads::shims_cpu_s(&pids[..1]) - shim_before) / WITH as f64;
    lab.stop()?;
    let mut pairs = Pairs::default();
    pairs.add_without(before.rate);
    pairs.add_with(with.rate);
    pairs.add_without(after.rate);
    let round = Round {
        overhead: pairs.overhead().value,
        pause_us_with: with.pause_us,
        pause_us_without: before.pause_us.max(after.pause_us),
        merged_mib,
        taken,
    };
    context.say(&format!(
        "round {} of {}: {:+.2} %, taken {:.2} %, pauses {:.0} us ({:.0} without), {:.0} MiB merged",
        number + 1,
        if way == CostArm::Ours { "ours" } else { "KSM" },
        round.overhead * 100.0,
        round.taken * 100.0,
        round.pause_us_with,
        round.pause_us_without,
        round.merged_mib
    ));
    Ok(round)
}

struct CostWindow {
    rate: f64,
    pause_us: f64,
}

/// Measures the first guest over its next `lines`.
fn window(lab: &Lab, lines: usize) -> Result<CostWindow, LabError> {
    let mut seen = Lines::of(lab);
    let is_over = |seen: &Lines| seen.guest(0).len() > lines;
    seen.look_until(lab, "a guest to report", WINDOW_LIMIT, is_over)?;
    let rate = seen.rate(0);
    let pauses = seen.guest(0).iter().skip(1).filter_map(|line| line.number("p9999_us"));
    Ok(CostWindow { rate, pause_us: pauses.largest() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(overhead: f64) -> Round {
        let (pause_us_with, pause_us_without) = (60.0, 50.0);
        Round { overhead, pause_us_with, pause_us_without, merged_mib: 60.0, taken: 0.015 }
    }

    fn figures(ours: &[Round], kernels: &[Round]) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, ours, kernels))
    }

    #[test]
    fn our_rounds_and_the_kernels_are_not_mixed_up_and_all_are_kept() {
        let figures = figures(&[round(0.01), round(0.02), round(0.01)], &[round(0.5)]);
        let figure = |name: &str| figures.get(name).unwrap().clone();
        assert!((figure("guest_slowdown").value - 0.01).abs() < 1e-9);
        assert_eq!(figure("guest_slowdown").rounds.len(), 3);
        assert!((figure("guest_slowdown_ksm_50").value - 0.5).abs() < 1e-9);
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn a_window_that_was_not_read_and_a_guest_that_was_not_merged_miss() {
        let met = |ours: &[Round], name: &str| figures(ours, &[]).met(name);
        assert!(!met(&[round(0.01), round(f64::NAN)], "guest_slowdown"));
        assert!(!met(&[], "guest_slowdown") && !met(&[], "merged_mib") && !met(&[], "taken"));
        let unread = Round { pause_us_with: f64::NAN, ..round(0.01) };
        assert!(!met(&[round(0.01), unread], "pause_us_p9999"));
        let unmerged = Round { merged_mib: 0.0, ..round(0.01) };
        assert!(!met(&[round(0.01), unmerged], "merged_mib"));
    }
}
