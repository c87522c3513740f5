//! `readings`: Overbook's readings of its guests are true, with everything on and while workers
//! are killed.
//!
//! Four guests start programs and end them, stream over memory, and idle. A daemon tracks them,
//! merges identical pages, takes freed memory, and moves memory between them; their worker is
//! killed again and again. Each second the daemon's readings are compared with this program's own
//! measurements:
//!
//! * **stale**: a value whose digits have not changed since before its own time stamp. So the
//!   stamp is later than the measurement;
//! * **too large**: a working set more than a twentieth above the memory that the VM holds by the
//!   kernel's counters (resident, shared with others, swapped out), at any moment from that of
//!   the reading to now;
//! * **over budget**: a cost above the limit of the group's configuration.
//!
//! A daemon that reports nothing is never wrong. So the share of the time without a working set
//! has a limit, too: a guest that the daemon does not show, and a daemon that does not answer, are
//! silent. Without a single reading there is no figure of them.

use std::collections::{BTreeMap, VecDeque};

use model::{
    DedupSpec, FreePagesSpec, GroupName, PagesPerMs, Policy, Reading, Time, Tracking,
    TrackingBudget, VmName, VmView,
};
use sys::clock::boot_now;
use sys::process::{Identity, Signal};

use super::prelude::*;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "readings",
    summary: "what is said of guests with everything on, while workers are killed: never older than it says, nor above what the VM holds, nor over budget",
    measures: &[&[file!()], measured::MANAGED],
    claims: claims! {
        "stale" == 0.0 => "count",
            "A reading is no older than it says (four guests, 49 workers killed in 15 minutes)";
        "too_large" == 0.0 => "count", "A reading says no more than the VM can hold";
        "over_budget" <= 0.01 => "ratio", "Tracking keeps to its budget in nearly all samples";
        "silent" <= 0.05 => "ratio", "The working set is told in nearly every second";
    },
    run,
};

const USUAL_MINUTES: u32 = 15;
const GROUP: &str = "told";
const BASE: Bytes = Bytes::mib(224);
const MAX: Bytes = Bytes::mib(320);
/// Period of the samples of the guests' memory and of the daemon's readings.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The lifetime of a worker.
const LIFE_MS: (u64, u64) = (2_000, 40_000);
/// The time for which samples of a VM's memory are kept.
const REMEMBERED_MS: u64 = 120_000;
/// A counter that is read a moment later describes a later moment.
const SLACK_MS: u64 = 500;
/// Tolerance, since the kernel's counters are not exact.
const ALLOWED_PERCENT: u64 = 105;
/// The rate of the scan for identical pages.
const RATE: PagesPerMs = PagesPerMs(4);

/// Results over the run.
#[derive(Debug, Default)]
struct ReadingCounts {
    /// Samples: one for each guest and tick, and for each guest where the daemon did not answer.
    samples: u32,
    /// Of these, samples without a working set.
    silent: u32,
    stale: u32,
    too_large: u32,
    /// Readings that were compared with the memory that the VM held.
    compared: u32,
    over_budget: u32,
    kills: u32,
    unread: u32,
    ages_s: Vec<f64>,
    costs: Vec<f64>,
}

/// This program's knowledge of one VM.
#[derive(Debug, Default)]
struct Known {
    pid: u32,
    /// Memory that the VM held, and when.
    held: VecDeque<(Time, Bytes)>,
    own: Option<(Instant, Overhead)>,
    /// The digits that were last read, and when they were first seen.
    digits: Option<(Vec<u64>, Time)>,
    /// The tick that was last judged.
    judged: Option<Time>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_MINUTES);
    let guest = |name: &str, workload: &str| {
        context.guest(name, GROUP, BASE, workload).up_to(MAX).with_shim(true)
    };
    let specs = [
        guest("starts", "memhog --mb 96 --hold 6 --rest 8"),
        guest("changes", "random-array --phases 12:20+96:15+48:20"),
        guest("streams", "verify --mb 72"),
        guest("idles", "idle --common-mb 24"),
    ];
    let mut lab = context.start(specs)?;
    let settings = DaemonSettings {
        mode: Mode::Enforce,
        dedup: DedupSpec::Fixed(RATE),
        free_pages: FreePagesSpec::Lazy,
        policy: Policy::Balance,
        ..Mode::Observe.into()
    };
    let daemon = Daemon::start(&mut lab, settings)?;
    progress::wait_until_working(&lab)?;
    let known = |machine: &crate::lab::Machine| {
        let name = VmName::from(machine.spec().name.as_str());
        (name, Known { pid: machine.process().pid, ..Known::default() })
    };
    let mut known: BTreeMap<VmName, Known> = lab.machines().iter().map(known).collect();
    let mut random = Random::new(context.seed);
    let mut toll = ReadingCounts::default();
    let until = Instant::now() + length;
    let mut kill_due = Instant::now();
    while Instant::now() < until {
        let next = Instant::now() + LOOK_EVERY;
        lab.ensure_alive()?;
        known.values_mut().for_each(|vm| vm.look(MAX));
        if let Some(case) = daemon.latest()? {
            let read = boot_now();
            for (name, known) in &mut known {
                let vm = case.view.vms.get(name);
                known.judge(context, vm, name, (case.now, read), settings.tracking, &mut toll);
            }
            let worker = case.view.workers.get(&GroupName::from(GROUP));
            let worker = worker.and_then(|worker| Identity::of(worker.value.pid?));
            if let Some(worker) = worker.filter(|_| Instant::now() >= kill_due) {
                // The worker may have ended by itself.
                toll.kills += u32::from(worker.signal(Signal::KILL).is_ok());
                kill_due = Instant::now() + random.millis(LIFE_MS);
            }
        } else {
            toll.unread += 1;
            known.values().for_each(|_| toll.silence());
        }
        interrupt::sleep(next.saturating_duration_since(Instant::now()))?;
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(figures(context, &toll, bad_bytes))
}

impl ReadingCounts {
    /// Counts a sample without a working set.
    fn silence(&mut self) {
        self.samples += 1;
        self.silent += 1;
    }
}

impl Known {
    /// Measures the memory that the VM holds.
    fn look(&mut self, ram: Bytes) {
        // QEMU's memory outside guest RAM hardly changes.
        let is_due = self.own.is_none_or(|(at, _)| at.elapsed() > Duration::from_secs(5));
        if is_due && let Ok(own) = Overhead::measure(self.pid, &[ram]) {
            self.own = Some((Instant::now(), own));
        }
        let (Some((_, own)), Ok(counters)) = (&self.own, Counters::of(self.pid)) else { return };
        let Counters { anonymous, shared, swapped, .. } = counters;
        let held = anonymous.plus(shared).plus(swapped).minus(own.own);
        let now = boot_now();
        self.held.push_back((now, held));
        while self.held.front().is_some_and(|(at, _)| now.since(*at).0 > REMEMBERED_MS) {
            self.held.pop_front();
        }
    }

    /// Judges a reading that the daemon made at `said`, and that this program read at `read`;
    /// `None`: the daemon does not show the VM.
    fn judge(
        &mut self,
        context: &Context,
        vm: Option<&VmView>,
        name: &VmName,
        (said, read): (Time, Time),
        budget: TrackingBudget,
        toll: &mut ReadingCounts,
    ) {
        if self.judged.replace(said) == Some(said) {
            return;
        }
        let tracking = vm.and_then(|vm| vm.tracking.as_ref());
        let Some(tracking) = tracking.filter(|tracking| tracking.value.working_set.is_some())
        else {
            toll.silence();
            return;
        };
        toll.samples += 1;
        let cost = tracking.value.cost.vcpu_share;
        toll.ages_s.push(tracking.age(said).0 as f64 / 1e3);
        toll.costs.push(cost);
        if budget.vcpu_share().is_some_and(|budget| cost > budget) {
            toll.over_budget += 1;
            context.say(&format!("{name}: cost {:.2} % of a vCPU", cost * 100.0));
        }
        if let Some(since) = self.unchanged_since(tracking, read)
            && tracking.at > since
        {
            toll.stale += 1;
            let (age, true_age) = (read.since(tracking.at), read.since(since));
            context.say(&format!("{name}: said to be {age} old, and unchanged for {true_age}"));
        }
        let (set, swapped) = (tracking.value.working_set, tracking.value.swapped);
        let inside = set.unwrap_or_default().minus(swapped);
        let held = self.most_held(tracking.at.min(said));
        toll.compared += u32::from(held.is_some());
        if held.is_some_and(|held| inside > held.percent(ALLOWED_PERCENT)) {
            toll.too_large += 1;
            let held = held.unwrap_or_default();
            context.say(&format!("{name}: working set {inside}, and it holds {held} at most"));
        }
    }

    /// The moment since which the digits have not changed; `None`: the VM referenced nothing, so
    /// digits do not show anything.
    fn unchanged_since(&mut self, reading: &Reading<Tracking>, now: Time) -> Option<Time> {
        let Tracking { references_per_s, curve, .. } = &reading.value;
        let ratios = curve.iter().map(|point| point.miss_ratio.to_bits());
        let digits: Vec<u64> = [references_per_s.to_bits()].into_iter().chain(ratios).collect();
        if self.digits.as_ref().is_none_or(|(before, _)| *before != digits) {
            self.digits = Some((digits, now));
        }
        let is_telling = *references_per_s > 0.0;
        self.digits.as_ref().filter(|_| is_telling).map(|(_, since)| *since)
    }

    /// The most that the VM held from that moment on.
    fn most_held(&self, from: Time) -> Option<Bytes> {
        let from = Time(from.0.saturating_sub(SLACK_MS));
        self.held.iter().filter(|(at, _)| *at >= from).map(|(_, held)| *held).max()
    }
}

fn figures(context: &Context, toll: &ReadingCounts, bad_bytes: u64) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    add_counts(&mut figures, toll);
    let figure = Figure::new(bad_bytes as f64, "B", "wrong bytes found by `verify`");
    figures.add("bad_bytes", figure.target(Target::Equals(0.0)));
    figures
}

fn add_counts(figures: &mut Figures, toll: &ReadingCounts) {
    let told = toll.samples.saturating_sub(toll.silent);
    let share = |count: u32, of: u32| f64::from(count) / f64::from(of);
    let most = |values: &[f64]| values.iter().copied().largest();
    // None of nothing is no count.
    let count = |count: u32, of: u32| if of == 0 { f64::NAN } else { f64::from(count) };
    let mut add = |name: &str, figure: Figure| figures.add(name, figure);
    let note = format!("of {told} readings, those found out before the moment that they name");
    add("stale", Figure::new(count(toll.stale, told), "count", note));
    let note = format!(
        "of {} working sets, those above what the VM held by the kernel's counters, and 5 %",
        toll.compared
    );
    add("too_large", Figure::new(count(toll.too_large, toll.compared), "count", note));
    let note = "share of the readings with a cost above the budget";
    let over = share(toll.over_budget, told);
    add("over_budget", Figure::new(over, "ratio", note));
    let note = "share of a vCPU, the most that was said";
    add("cost_max", Figure::new(most(&toll.costs), "ratio", note));
    let note = "the same, median";
    add("cost_median", Figure::new(median(toll.costs.iter().copied()), "ratio", note));
    let note = "share of the time in which no working set was told";
    add("silent", Figure::new(share(toll.silent, toll.samples), "ratio", note));
    let note = "age of a reading, as told, median";
    add("age_s_median", Figure::new(median(toll.ages_s.iter().copied()), "s", note));
    add("age_s_max", Figure::new(most(&toll.ages_s), "s", "the same, most"));
    let note = "workers killed";
    add("kills", Figure::new(toll.kills.into(), "count", note).target(Target::AtLeast(1.0)));
    add("unread", Figure::new(toll.unread.into(), "count", "times that the daemon did not answer"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(toll: &ReadingCounts) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_counts(figures, toll))
    }

    /// A run without a fault: 4 % of its samples are silent.
    fn good() -> ReadingCounts {
        let (ages_s, costs) = (vec![0.5], vec![0.006]);
        ReadingCounts {
            samples: 100,
            silent: 4,
            compared: 96,
            kills: 5,
            ages_s,
            costs,
            ..ReadingCounts::default()
        }
    }

    #[test]
    fn a_daemon_that_tells_little_or_nothing_does_not_pass() {
        assert!(figures(&good()).passed(), "{}", figures(&good()).to_table());
        assert!(!figures(&ReadingCounts { silent: 6, ..good() }).passed());
        let nothing = figures(&ReadingCounts { silent: 100, compared: 0, ..good() });
        let empty = figures(&ReadingCounts { kills: 5, ..ReadingCounts::default() });
        for figures in [nothing, empty] {
            for name in ["stale", "too_large", "over_budget", "silent"] {
                assert!(!figures.met(name), "{name}");
            }
        }
    }

    #[test]
    fn one_wrong_reading_and_working_sets_that_nothing_was_held_against_do_not_pass() {
        for bad in [
            ReadingCounts { stale: 1, ..good() },
            ReadingCounts { too_large: 1, ..good() },
            ReadingCounts { over_budget: 2, ..good() },
            ReadingCounts { kills: 0, ..good() },
            ReadingCounts { compared: 0, ..good() },
        ] {
            assert!(!figures(&bad).passed(), "{bad:?}");
        }
    }

    fn reading(references_per_s: f64, at: u64) -> Reading<Tracking> {
        Reading::new(Tracking { references_per_s, ..Tracking::default() }, Time(at))
    }

    #[test]
    fn digits_that_stay_tell_since_when_and_those_of_nothing_tell_nothing() {
        let mut known = Known::default();
        assert_eq!(known.unchanged_since(&reading(7.5, 900), Time(1_000)), Some(Time(1_000)));
        assert_eq!(known.unchanged_since(&reading(7.5, 4_900), Time(5_000)), Some(Time(1_000)));
        assert_eq!(known.unchanged_since(&reading(7.4, 5_900), Time(6_000)), Some(Time(6_000)));
        assert_eq!(known.unchanged_since(&reading(0.0, 6_900), Time(7_000)), None);
    }

    #[test]
    fn what_was_held_since_a_reading_counts_and_nothing_before() {
        let mut known = Known::default();
        let held = [(1_000, 90), (3_000, 50), (4_000, 60)];
        known.held = held.map(|(at, mib)| (Time(at), Bytes::mib(mib))).into();
        assert_eq!(known.most_held(Time(3_200)), Some(Bytes::mib(60)));
        assert_eq!(known.most_held(Time(1_400)), Some(Bytes::mib(90)));
        assert_eq!(known.most_held(Time(9_000)), None);
    }
}
