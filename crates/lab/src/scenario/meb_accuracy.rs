//! `meb-accuracy`: the product's estimates of working sets and miss-ratio curves, compared with
//! every access that the guests made (MEB §5.2.1, Fig. 10).
//!
//! Ten workloads run, each in a guest of its own that has both the shim and the tracer. The
//! worker's own code tracks it within the 1 % budget, while the tracer records each page touched
//! in each tenth of a second. Estimate and truth come from the same run, the same clock and the
//! same definition; the truth is exact and covers all granules. (The paper compares two runs,
//! aligned by instruction counts.) The comparison is by intervals of five seconds, at which the
//! paper samples: the mean working set and the mean curve, of the estimate and of the truth,
//! after the effect of filling memory has aged out. A second figure compares single moments,
//! where a change that is seen a second late counts as one that is not seen.
//!
//! Four of them run once more, each with half of its memory paged out by the same code to the
//! host's compressed memory. The curve must still cover all of its memory, resident and paged
//! out.
//!
//! The true curves are written next to the page, one for each interval. The simulation of the
//! balancer uses them (`crates/sim/benches/fleet.rs`).
//!
//! Left out: the accuracy for a guest at full speed. The tracer slows memory accesses down
//! several times, so the patterns are the workloads' own but sparser in time.

use pages::curve::{MissRatioCurve, Point};
use serde_json::{Value, json};

use super::prelude::*;
use crate::meb::modes;
use crate::meb::page::save;
use crate::meb::watch::{self, Record, Watch};
use crate::meb::workloads::{ALL, MEMORY, SIDE_BY_SIDE, Workload};
use crate::truth::{Definition, Truth};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "meb-accuracy",
    summary: "working sets and miss-ratio curves of ten workloads against every access they made",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::TRACER,
        measured::MEB,
    ],
    claims: claims! {
        "wss_accuracy_mean" >= 0.952 => "ratio",
            "The working set of ten workloads is known, against an exact trace of the same run",
            "0.952";
        "wss_accuracy_min" >= 0.90 => "ratio", "The working set of every workload is known";
        "mrc_mae" <= 0.03 => "ratio", "The whole miss-ratio curve is known";
        "mrc_mae_out" <= 0.03 => "ratio",
            "The curve is that of all memory while half of it is paged out";
    },
    run,
};

/// The way in which guests are tracked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AccuracySource {
    /// By the shim's traps, in granules of 128 KiB.
    Traps,
    /// From outside, in single pages: nothing is loaded into QEMU but the tracer.
    Outside,
}

impl AccuracySource {
    const fn granule_pages(self) -> u32 {
        match self {
            Self::Traps => 32,
            Self::Outside => 1,
        }
    }

    /// The guest of a workload at this place.
    pub(super) fn guest(self, workload: &Workload, place: usize, seed: u64) -> MachineSpec {
        let spec = workload.guest(place, seed);
        match self {
            Self::Traps => spec,
            Self::Outside => MachineSpec { shim: false, small_pages: true, ..spec },
        }
    }

    /// Begins to track a machine.
    pub(super) fn watch(self, machine: &Machine, every: Duration) -> Result<Watch, LabError> {
        let pid = machine.process().pid;
        match self {
            Self::Traps => Watch::start(pid, modes::shipped(), &[], every),
            Self::Outside => Watch::attached(pid, MEMORY, modes::shipped(), &[], every),
        }
    }
}

/// Some time constants of the ageing.
const WARM_UP: Duration = Duration::from_secs(30);
/// The workloads that also run with half of their memory out.
pub(super) const OUT: [&str; 4] = ["kv", "phases", "graph", "sort"];
/// The longest time for half of it to be paged out.
const OUT_LIMIT: Duration = Duration::from_secs(60);
pub(super) const ZRAM: Bytes = Bytes::mib(1024);
const MEASURE: Duration = Duration::from_secs(60);
/// Period in which estimate and truth are sampled; the estimate is renewed twice as often.
const EVERY: Duration = Duration::from_millis(200);
/// Moments in an interval, the unit of comparison.
const INTERVAL: usize = 25;
/// Moments in a second.
const SECOND: usize = 5;
/// Points of a curve in the written file.
const POINTS: usize = 32;
/// Sizes at which the mean curves of an interval are compared.
const SIZES: u32 = 512;

/// A true value and its estimate.
#[derive(Debug, Clone)]
struct Pair<T> {
    exact: T,
    estimated: T,
}

/// Truth and estimate at one moment. Sizes are in bytes.
struct AccuracySample {
    at_s: f64,
    /// The estimate is zero when it was not known.
    size: Pair<f64>,
    curve: Pair<MissRatioCurve>,
    references_per_s: f64,
}

/// Truth and estimate over one interval.
#[derive(Debug)]
struct Interval {
    size: Pair<f64>,
    curve_error: f64,
}

/// All comparisons of one workload.
pub(super) struct Row {
    pub(super) name: &'static str,
    moments: Vec<AccuracySample>,
    intervals: Vec<Interval>,
    /// The share of a vCPU that tracking took in its dearest half minute: the time for which it
    /// held the guest's threads, and CPU time of worker and shim.
    pub(super) vcpu_share: f64,
    /// The tracker's own CPU time, of one CPU.
    pub(super) cpu_share: f64,
    /// The share of its memory that was paged out, in the mean; 0 when none was to be.
    out_share: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let rows = compare_all(context, &ALL, AccuracySource::Traps, false)?;
    let out: Vec<Workload> = ALL.into_iter().filter(|it| OUT.contains(&it.name)).collect();
    let zram = Zram::new(ZRAM)?;
    let rows_out = compare_all(context, &out, AccuracySource::Traps, true)?;
    drop(zram);
    let mut figures = figures(context, &rows);
    add_out(&mut figures, &rows_out);
    page(&rows).write(&context.dir, &mut figures)?;
    let curves: Vec<Value> = rows.iter().map(Row::curves).collect();
    save(&context.dir.join("log").join("curves.json"), Value::from(curves).to_string().as_bytes())?;
    Ok(figures)
}

/// Compares all, some at a time; `is_out`: with half of their memory paged out.
pub(super) fn compare_all(
    context: &Context,
    workloads: &[Workload],
    source: AccuracySource,
    is_out: bool,
) -> Result<Vec<Row>, LabError> {
    let mut rows = Vec::new();
    for workloads in workloads.chunks(SIDE_BY_SIDE) {
        let names: Vec<&str> = workloads.iter().map(|workload| workload.name).collect();
        let how = if is_out { ", half of it paged out" } else { "" };
        context.say(&format!("{}, tracked and recorded{how} ...", names.join(" beside ")));
        let compared = compare(context, workloads, source, is_out)?;
        for row in &compared {
            context.say(&format!(
                "  {}: accuracy {:.3}, curve off by {:.3}, {}",
                row.name,
                row.accuracy(),
                row.curve_error(),
                row.words()
            ));
        }
        rows.extend(compared);
    }
    Ok(rows)
}

fn compare(
    context: &Context,
    workloads: &[Workload],
    source: AccuracySource,
    is_out: bool,
) -> Result<Vec<Row>, LabError> {
    let traced = |(place, workload): (usize, &Workload)| MachineSpec {
        traced: true,
        ..source.guest(workload, place, context.seed)
    };
    let mut lab = context.start(workloads.iter().enumerate().map(traced))?;
    let track = |machine: &Machine| source.watch(machine, EVERY);
    let watches = lab.machines().iter().map(track).collect::<Result<Vec<Watch>, _>>()?;
    watch::wait_until_tracked(&lab, &watches)?;
    progress::wait_until_working(&lab)?;
    if is_out {
        page_half_out(&lab, &watches)?;
    }
    interrupt::sleep(WARM_UP)?;
    let from_us = watch::now_us();
    let mut out_shares = vec![0.0; watches.len()];
    for _ in 0..MEASURE.as_secs() {
        interrupt::sleep(Duration::from_secs(1))?;
        for (machine, share) in lab.machines().iter().zip(&mut out_shares) {
            *share += out_share(machine)? / MEASURE.as_secs_f64();
        }
    }
    let mut rows = Vec::new();
    for (place, watch) in watches.into_iter().enumerate() {
        let (machine, record) = (&lab.machines()[place], watch.stop()?);
        machine.ensure_alive()?;
        let moments = moments(machine, &record, from_us, source)?;
        let shares = record.seen.iter().map(|seen| seen.tracking.cost.vcpu_share);
        let vcpu_share = shares.largest();
        let intervals = moments.chunks_exact(INTERVAL).map(Interval::of).collect();
        let (name, out_share) = (workloads[place].name, out_shares[place]);
        let cpu_share = record.cpu_share();
        rows.push(Row { name, moments, intervals, vcpu_share, cpu_share, out_share });
    }
    lab.stop()?;
    Ok(rows)
}

/// Has half of each guest's memory paged out, and waits until it is, or until [`OUT_LIMIT`].
/// `out_share` measures the result.
fn page_half_out(lab: &Lab, watches: &[Watch]) -> Result<(), LabError> {
    let mut halves = Vec::new();
    for (machine, watch) in lab.machines().iter().zip(watches) {
        let Overhead { own, guest, .. } = machine.overhead()?;
        watch.hold(guest.percent(50), own);
        halves.push(guest.percent(50));
    }
    let waited = lab.wait_for("half of the guests' memory to be paged out", OUT_LIMIT, |lab| {
        let mut is_out = true;
        for (machine, half) in lab.machines().iter().zip(&halves) {
            is_out &= machine.overhead()?.guest <= half.plus(Bytes::mib(8));
        }
        Ok(is_out)
    });
    match waited {
        Err(LabError::Timeout { .. }) => Ok(()),
        done => done,
    }
}

/// The share of a guest's memory that is paged out now.
fn out_share(machine: &Machine) -> Result<f64, LabError> {
    let out = Counters::of(machine.process().pid)?.swapped.as_mib();
    Ok(out / (out + machine.overhead()?.guest.as_mib()))
}

fn moments(
    machine: &Machine,
    record: &Record,
    from_us: u64,
    source: AccuracySource,
) -> Result<Vec<AccuracySample>, LabError> {
    let definition = Definition {
        granule_pages: source.granule_pages(),
        time_constant: pages::probe::AGEING,
        tolerable: pages::probe::TOLERABLE_MISS_RATIO,
    };
    let mut truth = Truth::open(&machine.files().trace, definition)?;
    let mut moments = Vec::new();
    for seen in record.seen.iter().filter(|seen| seen.at_us >= from_us) {
        truth.advance_to(seen.at_us)?;
        let exact = truth.exact();
        let estimated = seen.tracking.working_set.unwrap_or_default();
        moments.push(AccuracySample {
            at_s: (seen.at_us - from_us) as f64 / 1e6,
            size: Pair { exact: exact.working_set_size().0 as f64, estimated: estimated.0 as f64 },
            curve: Pair { exact: exact.curve(), estimated: seen.curve.clone() },
            references_per_s: exact.references_per_s(),
        });
    }
    Ok(moments)
}

impl Pair<f64> {
    /// 1 is right; a missing estimate has accuracy 0.
    fn accuracy(&self) -> f64 {
        1.0 - (self.estimated - self.exact).abs() / self.exact.max(1.0)
    }
}

impl Interval {
    fn of(moments: &[AccuracySample]) -> Self {
        let size = Pair {
            exact: mean(moments.iter().map(|moment| moment.size.exact)),
            estimated: mean(moments.iter().map(|moment| moment.size.estimated)),
        };
        let difference = |i: u32| {
            let size = MEMORY.0 as f64 * f64::from(i) / f64::from(SIZES);
            let exact = moments.iter().map(|moment| moment.curve.exact.miss_ratio(size));
            let estimated = moments.iter().map(|moment| moment.curve.estimated.miss_ratio(size));
            (mean(exact) - mean(estimated)).abs()
        };
        Self { size, curve_error: mean((0..SIZES).map(difference)) }
    }
}

impl Row {
    pub(super) fn accuracy(&self) -> f64 {
        mean(self.intervals.iter().map(|interval| interval.size.accuracy()))
    }

    fn accuracy_of_moments(&self) -> f64 {
        mean(self.moments.iter().step_by(SECOND).map(|moment| moment.size.accuracy()))
    }

    pub(super) fn words(&self) -> String {
        let mib = |of: fn(&Pair<f64>) -> f64| {
            mean(self.intervals.iter().map(|interval| of(&interval.size))) / Bytes::mib(1).0 as f64
        };
        format!(
            "exact {:.1} MiB, estimated {:.1} MiB on average; tracking took at most {:.2} % of a vCPU",
            mib(|size| size.exact),
            mib(|size| size.estimated),
            self.vcpu_share * 100.0
        )
    }

    /// The true curves at the intervals' ends, sizes in MiB.
    fn curves(&self) -> Value {
        let curve = |moment: &AccuracySample| {
            let curve = moment.curve.exact.resampled(POINTS);
            let rounded = |value: f64| (value * 1e3).round() / 1e3;
            let point =
                |point: &Point| [point.size / Bytes::mib(1).0 as f64, point.ratio].map(rounded);
            let points: Vec<[f64; 2]> = curve.points().iter().map(point).collect();
            json!({ "references_per_s": rounded(moment.references_per_s), "points": points })
        };
        let ends = self.moments.iter().skip(INTERVAL - 1).step_by(INTERVAL);
        let curves: Vec<Value> = ends.map(curve).collect();
        json!({ "name": self.name, "every_s": INTERVAL / SECOND, "curves": curves })
    }

    pub(super) fn curve_error(&self) -> f64 {
        mean(self.intervals.iter().map(|interval| interval.curve_error))
    }
}

fn figures(context: &Context, rows: &[Row]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    add_all(&mut figures, rows);
    figures
}

/// Adds the accuracy of working sets and curves.
pub(super) fn add_all(figures: &mut Figures, rows: &[Row]) {
    let accuracies = || rows.iter().map(Row::accuracy);
    let least = accuracies().smallest();
    figures.add(
        "wss_accuracy_mean",
        Figure::new(
            mean(accuracies()),
            "ratio",
            format!(
                "1 - |estimate - exact| / exact, means of 5 s, mean of {} workloads",
                rows.len()
            ),
        ),
    );
    figures.tell("wss_accuracy_min", least, "ratio", "the least accurate workload");
    let note = "the same for one moment in every second instead of means of 5 s";
    figures.tell("wss_accuracy_1s", mean(rows.iter().map(Row::accuracy_of_moments)), "ratio", note);
    let note = "mean absolute error of the miss-ratio curve over all sizes up to the allocation";
    figures.tell("mrc_mae", mean(rows.iter().map(Row::curve_error)), "ratio", note);
    for row in rows {
        let name = row.name;
        figures.tell(&format!("wss_accuracy_{name}"), row.accuracy(), "ratio", row.words());
        let figure = Figure::new(row.curve_error(), "ratio", "of that workload's curve");
        figures.add(&format!("mrc_mae_{name}"), figure);
    }
}

/// The same for guests with half of their memory paged out.
pub(super) fn add_out(figures: &mut Figures, rows: &[Row]) {
    let share = mean(rows.iter().map(|row| row.out_share));
    let note = format!(
        "the same while {:.0} % of what the guest holds is paged out, mean of {} workloads",
        share * 100.0,
        rows.len()
    );
    figures.tell("mrc_mae_out", mean(rows.iter().map(Row::curve_error)), "ratio", note);
    let half = Target::AtLeast(0.45);
    figures.check("out_share", share, "ratio", "what of it is paged out, in the mean", half);
    for row in rows {
        let note = format!("of that workload's curve, {:.0} % out", row.out_share * 100.0);
        figures.tell(&format!("mrc_mae_out_{}", row.name), row.curve_error(), "ratio", note);
        let figure = Figure::new(row.accuracy(), "ratio", row.words());
        figures.add(&format!("wss_accuracy_out_{}", row.name), figure);
    }
}

/// All workloads one after the other: the paper's Figure 10.
pub(super) fn page(rows: &[Row]) -> Page {
    let (mut exact, mut estimated, mut marks) = (Vec::new(), Vec::new(), Vec::new());
    let length_s = MEASURE.as_secs_f64();
    for (number, row) in rows.iter().enumerate() {
        let start_s = f64::from(u32::try_from(number).unwrap_or(0)) * length_s;
        marks.push((start_s, row.name.to_owned()));
        for moment in &row.moments {
            let at_s = start_s + moment.at_s;
            let mib = |bytes: f64| bytes / Bytes::mib(1).0 as f64;
            exact.push((at_s, mib(moment.size.exact)));
            estimated.push((at_s, mib(moment.size.estimated)));
        }
    }
    let line = |name: &str, points: Vec<_>| Line::new(name, points);
    let lines = vec![line("exact", exact), line("estimated", estimated)];
    Page::of(
        "Working set, workload after workload",
        Chart { unit: "MiB", across: "seconds", is_log: false, lines, marks },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(exact: f64, estimated: f64) -> AccuracySample {
        let curve = Pair { exact: MissRatioCurve::unknown(), estimated: MissRatioCurve::unknown() };
        AccuracySample { at_s: 0.0, size: Pair { exact, estimated }, curve, references_per_s: 0.0 }
    }

    #[test]
    fn an_estimate_that_is_missing_is_as_wrong_as_one_of_twice_as_much() {
        let accuracy = |estimated| moment(100.0, estimated).size.accuracy();
        assert!(accuracy(0.0).abs() < 1e-9);
        assert!(accuracy(200.0).abs() < 1e-9);
        assert!((accuracy(95.0) - 0.95).abs() < 1e-9);
    }

    #[test]
    fn an_interval_compares_the_mean_of_its_moments() {
        let interval = Interval::of(&[moment(100.0, 60.0), moment(60.0, 100.0)]);
        assert!((interval.size.accuracy() - 1.0).abs() < 1e-9);
        assert!(interval.curve_error.abs() < 1e-9);
    }
}
