//! `quickstart`: the main job on six real guests, without Overbook's help and with it.
//!
//! There are two tenants. In `shop` one guest works on about 100 MB more than it has and swaps to
//! a disk as slow as a hard disk, while its three neighbours idle; `research` computes and checks
//! its memory. The load stays the same; only the daemon's mode changes from `observe` to
//! `enforce`, by a reload, as an operator would do it. Each tenant's guests run on a CPU of their
//! own where there are two, and the other guests' work is paced, so that the figures show memory
//! and not CPU shares.

use model::spec::HostSpec;

use super::prelude::*;
use crate::fleet::HUNGRY;
use crate::recording::{Moment, Recording};
use crate::report::{self, Row};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "quickstart",
    summary: "a swapping guest gets the memory that its group's idle guests leave unused",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON],
    claims: claims! {
        "hungry_speedup" >= 3.0 => "ratio",
            "A swapping guest is served from its group's unused memory",
            "up to 1.4 (Kim 2014, Adaptive-CSD)";
        "hungry_speedup_steady" => "ratio",
            "In the last 20 s, when balloons have reached their targets, it is as much faster";
        "others_ratio" >= 0.95 => "ratio", "The other five guests keep their pace";
        "leaked_bytes" == 0.0 => "B", "No byte of another group's budget is used";
        "bad_bytes" == 0.0 => "B", "No guest's memory is damaged by the taking";
    },
    run,
};

const OTHERS: [&str; 5] = ["shop-2", "shop-3", "shop-4", "research-1", "research-2"];
const GROUP: [&str; 4] = [HUNGRY, "shop-2", "shop-3", "shop-4"];

const SETTLE: Duration = Duration::from_secs(5);
const OBSERVED: Duration = Duration::from_secs(30);
const ENFORCED: Duration = Duration::from_secs(70);

fn run(context: &Context) -> Result<Figures, LabError> {
    let fleet = fleet::quickstart(context.seed);
    context.say("Booting six guests in two groups ...");
    let mut lab = context.start(fleet.clone())?;
    let settings = DaemonSettings { grace: HostSpec::GRACE, ..Mode::Observe.into() };
    let daemon = Daemon::start(&mut lab, settings)?;
    context.say(&format!("{HUNGRY} fills a working set larger than its memory ..."));
    fleet::wait_until_working(&lab)?;

    let mut recording = Recording::begin();
    let case = || daemon.latest();
    recording.record(&lab, SETTLE, case)?;
    let observe_s = recording.phase("observe");
    context.say(&format!("Overbook observes for {} s ...", OBSERVED.as_secs()));
    recording.record(&lab, OBSERVED, case)?;
    daemon.set_mode(&lab, Mode::Enforce)?;
    context.say(&format!("Overbook takes nothing yet, for {} ...", HostSpec::GRACE));
    recording.record(&lab, Duration::from_millis(HostSpec::GRACE.0), case)?;
    let enforce_s = recording.phase("enforce");
    context.say(&format!("Overbook enforces for {} s ...", ENFORCED.as_secs()));
    recording.record(&lab, ENFORCED, case)?;
    let end_s = recording.now_s();
    let bad_bytes = fleet::bad_bytes(&lab)?;
    let report_dir = lab.dir().join("log");
    lab.stop()?;

    let outcome = QuickstartResult { recording: &recording, observe_s, enforce_s, end_s };
    let mut figures = outcome.figures(context.figures(SCENARIO.name, 1), bad_bytes);
    let rows: Vec<Row> = fleet.iter().map(|spec| outcome.row(spec)).collect();
    let table = report::table(&rows);
    let page = report::write(&report_dir, &figures, &recording, &table)?;
    figures.preface = format!("\n{table}\nReport with plots: {}\n\n", page.display());
    Ok(figures)
}

/// The recording, cut at the change of mode. Seconds in which a guest was silent count against
/// Overbook: they are left out under `observe`, and count as no work under `enforce`.
struct QuickstartResult<'a> {
    recording: &'a Recording,
    observe_s: f64,
    enforce_s: f64,
    end_s: f64,
}

impl QuickstartResult<'_> {
    fn before(&self, guest: &str) -> Vec<f64> {
        let moments = self.recording.between(guest, self.observe_s, self.enforce_s);
        moments.filter_map(|moment| moment.ops_per_s).collect()
    }

    fn after(&self, guest: &str) -> Vec<f64> {
        self.after_from(self.enforce_s, guest)
    }

    fn after_from(&self, from_s: f64, guest: &str) -> Vec<f64> {
        let moments = self.recording.between(guest, from_s, self.end_s);
        moments.map(|moment| moment.ops_per_s.unwrap_or(0.0)).collect()
    }

    /// Bytes swapped per second between two moments; `None`: known at fewer than two.
    fn swap_rate(&self, guest: &str, from_s: f64, until_s: f64) -> Option<Bytes> {
        let moments = self.recording.between(guest, from_s, until_s);
        let mut known = moments.filter_map(|moment| Some((moment.at_s, moment.swapped?)));
        let ((first_s, first), (last_s, last)) = (known.next()?, known.last()?);
        let millis = Duration::try_from_secs_f64(last_s - first_s).ok()?.as_millis();
        Some(last.minus(first).share(1000, u64::try_from(millis).ok()?))
    }

    fn row(&self, spec: &crate::machine::MachineSpec) -> Row {
        let guest = spec.name.as_str();
        let last = |from_s, until_s| self.recording.between(guest, from_s, until_s).last().copied();
        let (before, after) =
            (last(self.observe_s, self.enforce_s), last(self.enforce_s, self.end_s));
        Row {
            guest: guest.to_owned(),
            workload: spec.workload.first().cloned().unwrap_or_default(),
            memory: [before, after].map(|moment| moment.and_then(|moment| moment.balloon)),
            used: [before, after].map(|moment| moment.and_then(|moment| moment.used)),
            swap_per_s: [
                self.swap_rate(guest, self.observe_s, self.enforce_s),
                self.swap_rate(guest, self.enforce_s, self.end_s),
            ],
            ops_per_s: [median(self.before(guest)), median(self.after(guest))],
        }
    }

    /// The most that the group held beyond its budget, at any second under `enforce`; `None` when
    /// it could not be read for every guest in every second.
    fn leaked(&self) -> Option<Bytes> {
        let budget = Bytes(fleet::BASE.0 * GROUP.len() as u64);
        // A recording holds one moment of every guest per second.
        let enforced = |guest| self.recording.between(guest, self.enforce_s, self.end_s);
        let seconds = enforced(HUNGRY).count();
        let used = |guest, second| enforced(guest).nth(second).and_then(|m: &Moment| m.used);
        let beyond = |second| {
            let total: Option<Bytes> = GROUP.into_iter().map(|guest| used(guest, second)).sum();
            total.map(|total| total.minus(budget))
        };
        (0..seconds).map(beyond).collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    fn figures(&self, mut figures: Figures, bad_bytes: u64) -> Figures {
        let (before, after) = (self.before(HUNGRY), self.after(HUNGRY));
        let speedup = median(after) / median(before.clone());
        let note = "median ops/s, whole enforce phase / observe";
        figures.tell("hungry_speedup", speedup, "ratio", note);
        let steady = median(self.after_from(self.end_s - 20.0, HUNGRY)) / median(before);
        let note = "the same over the last 20 s, converged";
        figures.tell("hungry_speedup_steady", steady, "ratio", note);
        let ratios = OTHERS.map(|guest| {
            let rate = |from_s, until_s| self.recording.rate(guest, from_s, until_s);
            rate(self.enforce_s, self.end_s) / rate(self.observe_s, self.enforce_s)
        });
        let note = "mean ops/s enforce / observe, worst of the other five";
        figures.tell("others_ratio", ratios.into_iter().smallest(), "ratio", note);
        let (leaked, bad) = (self.leaked().map_or(f64::NAN, |l| l.0 as f64), bad_bytes as f64);
        let note = "most that `shop` occupied beyond its own budget, by smaps";
        figures.tell("leaked_bytes", leaked, "B", note);
        figures.tell("bad_bytes", bad, "B", "wrong bytes found by `verify`");
        figures
    }
}

#[cfg(test)]
mod tests;
