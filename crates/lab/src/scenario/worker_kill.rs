//! `worker-kill`: a group's worker is killed fifty times at random moments while granules of its
//! guests are unmapped.
//!
//! Only the daemon may notice, which starts another: the shim gives everything back by itself, no
//! guest stands still for long, no byte is lost, and tracking goes on. The guest itself reports
//! how long it stands still: the longest time between two pages that `verify` checks (some tens
//! of microseconds apart), or two hundred accesses of `random-array`. The same is measured before
//! the first kill: a guest on a busy machine stands still at times for other reasons.

use model::GroupName;
use sys::process::{Identity, Signal};

use super::prelude::*;
use crate::meb::progress::Lines;
use crate::meb::workloads::cpu_of;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "worker-kill",
    summary: "a worker is killed 50 times at random while it tracks, and no guest is harmed",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "The worker may be killed at any moment, and no byte is lost (50 kills)";
        "stall_ms_max" <= 100.0 => "ms", "Guests of a killed worker stand still for a moment only";
    },
    run,
};

const KILLS: u32 = 50;
/// Lifetimes of a worker: from its first revocations to well into its work.
const LIFE_MS: (u64, u64) = (300, 3_000);
const MEMORY: Bytes = Bytes::mib(256);
const GROUP: &str = "killed";
/// The window without kills, for comparison.
const BASELINE: Duration = Duration::from_secs(40);
const RESUME_LIMIT: Duration = Duration::from_secs(60);

fn run(context: &Context) -> Result<Figures, LabError> {
    let guest = |place: usize, workload: &str| {
        let name = workload.split(' ').next().unwrap_or_default();
        let spec = MachineSpec::new(name, GROUP, MEMORY, MEMORY, workload);
        MachineSpec { seed: context.seed, shim: true, cpus: cpu_of(place), ..spec }
    };
    let mut lab =
        context.start([guest(0, "verify --mb 140"), guest(1, "random-array --mb 140")])?;
    let daemon = Daemon::start(&mut lab, Mode::Observe)?;
    progress::wait_until_working(&lab)?;
    wait_until_tracked(&lab, &daemon, None)?;

    let mut lines = Lines::of(&lab);
    lines.look_for(&lab, BASELINE)?;
    let baseline = Gaps::of(&lab, &lines);
    context.say(&format!("The worker is killed {KILLS} times ..."));
    lines.clear();
    let mut random = Random::new(context.seed);
    let mut resumed_s = Vec::new();
    for _ in 0..KILLS {
        let life = random.millis(LIFE_MS);
        lines.look_for(&lab, life)?;
        let worker =
            worker(&daemon)?.ok_or_else(|| LabError::Daemon("no worker runs".to_owned()))?;
        worker.signal(Signal::KILL)?;
        let killed = Instant::now();
        while !is_tracked(&lab, &daemon, Some(worker))? {
            if killed.elapsed() > RESUME_LIMIT {
                let what = "tracking to go on".to_owned();
                return Err(LabError::Timeout { what, limit: RESUME_LIMIT });
            }
            lines.look_for(&lab, Duration::from_millis(20))?;
        }
        resumed_s.push(killed.elapsed().as_secs_f64());
    }
    lines.look_for(&lab, Duration::from_secs(2))?;
    let killed = Gaps::of(&lab, &lines);
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    let mut figures = figures(context, &baseline, &killed, &resumed_s, bad_bytes);
    page(&killed).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// The group's worker, if one runs.
fn worker(daemon: &Daemon) -> Result<Option<Identity>, LabError> {
    let Some(case) = daemon.latest()? else { return Ok(None) };
    let reading = case.view.workers.get(&GroupName::from(GROUP));
    Ok(reading.and_then(|reading| reading.value.pid).and_then(Identity::of))
}

/// Whether every guest is tracked by another worker than `dead`: its working set is known again.
fn is_tracked(lab: &Lab, daemon: &Daemon, dead: Option<Identity>) -> Result<bool, LabError> {
    let Some(case) = daemon.latest()? else { return Ok(false) };
    let reading = case.view.workers.get(&GroupName::from(GROUP));
    let pid = reading.and_then(|reading| reading.value.pid);
    if pid.is_none() || pid == dead.map(|dead| dead.pid) {
        return Ok(false);
    }
    let known = case.view.vms.values().filter(|vm| {
        let fresh = vm.tracking.as_ref().filter(|t| t.age(case.now) < model::Millis::secs(2));
        fresh.is_some_and(|tracking| tracking.value.working_set.is_some())
    });
    Ok(known.count() == lab.machines().len())
}

fn wait_until_tracked(lab: &Lab, daemon: &Daemon, dead: Option<Identity>) -> Result<(), LabError> {
    lab.wait_for("every guest to be tracked", RESUME_LIMIT, |lab| is_tracked(lab, daemon, dead))
}

/// The guests' longest standstills: name, then milliseconds by second.
struct Gaps(Vec<(String, Vec<(f64, f64)>)>);

impl Gaps {
    fn of(lab: &Lab, lines: &Lines) -> Self {
        let guest = |(place, machine): (usize, &crate::lab::Machine)| {
            let lines = lines.guest(place);
            let gaps = lines.iter().filter_map(|line| Some((line.t_s, line.number("gap_ms")?)));
            (machine.spec().name.clone(), gaps.skip(1).collect())
        };
        Self(lab.machines().iter().enumerate().map(guest).collect())
    }

    fn all(&self) -> impl Iterator<Item = f64> {
        self.0.iter().flat_map(|guest| &guest.1).map(|gap| gap.1)
    }

    fn longest(&self) -> f64 {
        self.all().largest()
    }
}

fn figures(
    context: &Context,
    baseline: &Gaps,
    killed: &Gaps,
    resumed_s: &[f64],
    bad_bytes: u64,
) -> Figures {
    let mut figures = context.figures(SCENARIO.name, KILLS);
    let seconds = |gaps: &Gaps| {
        format!("longest that a guest stood still, of {} guest seconds", gaps.all().count())
    };
    figures.tell("stall_ms_max", killed.longest(), "ms", seconds(killed));
    let note = format!("the same without kills: {}", seconds(baseline));
    figures.tell("stall_ms_max_before", baseline.longest(), "ms", note);
    for (name, gaps) in [("stall_ms_median", killed), ("stall_ms_median_before", baseline)] {
        let note = "median over seconds of the longest in each second";
        figures.tell(name, median(gaps.all()), "ms", note);
    }
    let slowest = resumed_s.iter().copied().largest();
    let note = "kill to a new worker that knows every guest's working set, worst";
    figures.check("resume_s_max", slowest, "s", note, Target::AtMost(RESUME_LIMIT.as_secs_f64()));
    figures.tell("resume_s_median", median(resumed_s.iter().copied()), "s", "the same, median");
    figures.tell("bad_bytes", bad_bytes as f64, "B", "wrong bytes found by `verify`");
    figures
}

fn page(killed: &Gaps) -> Page {
    let line = |(name, gaps): &(String, Vec<(f64, f64)>)| Line::new(name, gaps.clone());
    let chart = Chart::linear("ms", "seconds", killed.0.iter().map(line));
    Page::of("Longest standstill in each second, while the worker is killed", chart)
}
