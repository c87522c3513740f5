//! `meb-overhead`: the cost to the guest of each way to track (MEB §5.2.2 and §5.2.3, Table I).
//!
//! Each workload runs in a guest of its own while tracking is switched off and on. Guest, fault
//! handler and tracker share one CPU, so the workload pays for all that tracking costs (traps,
//! moves, updates of the LRU stack). Expensive ways show in the workload's own rate with and
//! without tracking ([`pairs`](crate::meb::pairs)), which has a noise of several percent. Ways
//! that are off most of the time or cost a percent are measured by the CPU time that tracking
//! takes ([`taken`](crate::meb::taken)); their speeds are shown, too.
//!
//! In the paper the trap handler makes the updates, and the guest waits for them. Here the
//! tracker makes them asynchronously, from a ring, and a linked list cannot keep up with that.
//! Updates that were lost because traps came too fast are added at the cost of those that were
//! made.
//!
//! The paper's guests of 4 GB have 32 k tags of 128 KiB. These guests of 256 MB have as many,
//! with tags of 8 KiB, for all ways but the budget: it uses the product's 128 KiB.
//!
//! Tracking begins anew in each window, and its warm-up does not count: a dynamic hot set grows
//! first, intermittent tracking learns and then pauses for up to two minutes, and a budget has to
//! measure the cost of a trap. Each way defines the length of its warm-up and of its windows
//! ([`Schedule`]). A window without tracking stands between each two with tracking. It is the
//! neighbour of both, also where one is the last of a way and the other the first of the next.
//! The whole run takes 35 minutes.
//!
//! A way that moves pieces of memory splits the huge pages that contain them. These stay split
//! when tracking ends, until the kernel's khugepaged collapses them again. No pair shows that.
//! The guests' speed without tracking after all ways, compared with their speed before all ways,
//! does (`huge_pages_lost`).

use super::prelude::*;
use crate::meb::modes::{self, CHANGE, Instrument, ModeArm, Schedule};
use crate::meb::taken::{Account, Moment, Taken};
use crate::meb::watch::{self, Record, Watch};
use crate::meb::workloads::{ALL, SIDE_BY_SIDE, Workload, cpu_of};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "meb-overhead",
    summary: "what seven ways to track take from eight workloads, the product's way among them",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM, measured::MEB],
    claims: claims! {
        "overhead_budget_max" <= 0.01 => "ratio",
            "Tracking costs each workload at most its budget, the worker and the shim included";
        "overhead_budget_by_speed" => "ratio",
            "The guests' speed shows the same cost, within its noise";
        "overhead_imt_adaptive" <= 0.02 => "ratio",
            "The paper's phase detection with a tree costs as little here", "0.02";
        "out_of_order" == 0.0 => "count",
            "Each refinement of the paper's costs less than the one before it";
    },
    run,
};

/// Granules of 8 KiB: as many tags in 256 MB as the paper has in 4 GB.
const GRANULE_PAGES: u32 = 2;
const WORKLOADS: usize = 8;
/// Lines without tracking before all ways and after them.
const AROUND: usize = 10;

/// One workload under one way.
struct Cell {
    workload: &'static str,
    way: &'static str,
    /// Extra time of the guest's code, by the way's instrument: 0.01 is one percent.
    overhead: f64,
    taken: Taken,
    /// The guest's speeds, and the extra time of each operation by them.
    pairs: Pairs,
    speed: Median,
    traps_per_s: f64,
    up_ratio: f64,
    /// The highest share of the vCPU that tracking took in any half minute, including tracker and
    /// shim.
    vcpu_share: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let (mut cells, mut lost) = (Vec::new(), Vec::new());
    for workloads in ALL[..WORKLOADS].chunks(SIDE_BY_SIDE) {
        lost.extend(measure(context, workloads, &mut cells)?);
    }
    let mut figures = figures(context, &cells, &lost);
    page(&cells).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// Adds the cells of these workloads; returns the slowdown that each of their guests keeps when
/// tracking has ended.
fn measure(
    context: &Context,
    workloads: &[Workload],
    cells: &mut Vec<Cell>,
) -> Result<Vec<f64>, LabError> {
    let guest =
        |(n, w): (usize, &Workload)| MachineSpec { hot_set: true, ..w.guest(n, context.seed) };
    let mut lab = context.start(workloads.iter().enumerate().map(guest))?;
    progress::wait_until_working(&lab)?;
    let names: Vec<&str> = workloads.iter().map(|workload| workload.name).collect();
    let mut bench = Bench::start(&lab)?;
    for way in modes::all(GRANULE_PAGES) {
        context.say(&format!("{} under {} ...", names.join(" beside "), way.name));
        let cell =
            |(workload, measured): (&Workload, Measured)| Cell::new(workload.name, &way, &measured);
        for cell in workloads.iter().zip(bench.measure(&way)?).map(cell) {
            context.say(&format!("  {}: {}", cell.workload, cell.words()));
            cells.push(cell);
        }
    }
    let lost = bench.lost()?;
    lab.stop()?;
    Ok(lost)
}

/// The guests of one lab, and the speed of each without tracking.
struct Bench<'a> {
    lab: &'a Lab,
    /// The speeds before any tracking.
    before: Vec<f64>,
    /// The last window without tracking, which is the neighbour of the next one with tracking,
    /// too.
    latest: OverheadWindow,
}

/// A stretch of time: each guest's speed, and the clocks at both ends.
struct OverheadWindow {
    rates: Vec<f64>,
    begin: Moment,
    end: Moment,
}

/// Measurements of one guest under one way.
#[derive(Default)]
struct Measured {
    pairs: Pairs,
    with: Account,
    without: Account,
    /// The trackers' records.
    records: Vec<Record>,
}

impl OverheadWindow {
    /// Skips `beginning` lines of each guest, then measures over `lines` lines.
    fn new(lab: &Lab, watches: &[Watch], beginning: usize, lines: usize) -> Result<Self, LabError> {
        progress::rates(lab, 0, beginning)?;
        let begin = Moment::now(lab, watches)?;
        let rates = progress::rates(lab, 0, lines)?;
        Ok(Self { rates, begin, end: Moment::now(lab, watches)? })
    }
}

impl<'a> Bench<'a> {
    fn start(lab: &'a Lab) -> Result<Self, LabError> {
        let latest = OverheadWindow::new(lab, &[], CHANGE, AROUND)?;
        Ok(Self { lab, before: latest.rates.clone(), latest })
    }

    /// Windows with and without tracking in turn. The last window of the way before is the first
    /// one without.
    fn measure(&mut self, way: &ModeArm) -> Result<Vec<Measured>, LabError> {
        let mut all: Vec<Measured> = self.before.iter().map(|_| Measured::default()).collect();
        self.add_without(&mut all);
        for _ in 0..way.schedule.pairs {
            self.with(&mut all, way)?;
            self.latest = OverheadWindow::new(self.lab, &[], CHANGE, way.schedule.without)?;
            self.add_without(&mut all);
        }
        Ok(all)
    }

    /// Extra time of each operation without tracking now, compared with before any tracking.
    fn lost(&self) -> Result<Vec<f64>, LabError> {
        let after = progress::rates(self.lab, CHANGE, AROUND)?;
        Ok(self.before.iter().zip(after).map(|(before, after)| before / after - 1.0).collect())
    }

    fn add_without(&self, all: &mut [Measured]) {
        for (place, (rate, measured)) in self.latest.rates.iter().zip(all).enumerate() {
            measured.pairs.add_without(*rate);
            measured.without.add(&self.latest.begin, &self.latest.end, place, None);
        }
    }

    fn with(&self, all: &mut [Measured], way: &ModeArm) -> Result<(), LabError> {
        let track = |(place, machine): (usize, &crate::lab::Machine)| {
            let every = Duration::from_secs(1);
            Watch::start(machine.process().pid, way.settings, &cpu_of(place), every)
        };
        let machines = self.lab.machines().iter().enumerate();
        let watches = machines.map(track).collect::<Result<Vec<Watch>, _>>()?;
        watch::wait_until_tracked(self.lab, &watches)?;
        let Schedule { beginning, with, .. } = way.schedule;
        let window = OverheadWindow::new(self.lab, &watches, beginning, with)?;
        for (place, (watch, measured)) in watches.into_iter().zip(all).enumerate() {
            let record = watch.stop()?;
            measured.pairs.add_with(window.rates[place] / (1.0 + unmade_updates(&record)));
            measured.with.add(&window.begin, &window.end, place, Some(&record));
            measured.records.push(record);
        }
        Ok(())
    }
}

/// The time that the lost updates would have taken, as a share of the time passed, at the cost of
/// the others.
fn unmade_updates(record: &Record) -> f64 {
    let made = record.traps().saturating_sub(record.lost);
    if made == 0 { 0.0 } else { record.cpu_share() * record.lost as f64 / made as f64 }
}

impl Cell {
    fn new(workload: &'static str, way: &ModeArm, measured: &Measured) -> Self {
        let records = &measured.records;
        let mean = |of: &dyn Fn(&Record) -> f64| mean(records.iter().map(of));
        let shares = records.iter().flat_map(|record| &record.seen);
        let taken = Taken::of(&measured.with, &measured.without);
        let speed = measured.pairs.overhead();
        let overhead = match way.instrument {
            Instrument::Speed => speed.value,
            Instrument::Clock => taken.overhead(),
        };
        Self {
            workload,
            way: way.name,
            overhead,
            taken,
            pairs: measured.pairs.clone(),
            speed,
            traps_per_s: mean(&|r| r.traps() as f64 / r.lasted.as_secs_f64()),
            up_ratio: mean(&|record| record.up_ratio),
            vcpu_share: shares.map(|s| s.tracking.cost.vcpu_share).largest(),
        }
    }

    fn words(&self) -> String {
        let percent = |share: f64| format!("{:.2}", share * 100.0);
        format!(
            "{:+.2} %; CPU time: the tracker {} %, the shim {} %, traps {} %; by speed {:+.2} %, {}; \
             {:.0} traps/s, in half a minute at most {} % of the vCPU, tracker and shim included, on for {:.0} % of the time",
            self.overhead * 100.0,
            percent(self.taken.tracker),
            percent(self.taken.shim),
            percent(self.taken.traps),
            self.speed.value * 100.0,
            self.speed.interval_percent(),
            self.traps_per_s,
            percent(self.vcpu_share),
            self.up_ratio * 100.0
        )
    }
}

fn figures(context: &Context, cells: &[Cell], lost: &[f64]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let of = |way: &'static str| cells.iter().filter(move |cell| cell.way == way);
    let mean_of = |way, value: &dyn Fn(&Cell) -> f64| mean(of(way).map(value));
    let mean_overhead = |way| mean_of(way, &|cell| cell.overhead);
    let ways = modes::all(GRANULE_PAGES);
    for way in ways.iter().filter(|way| way.paper.is_some()) {
        let note = format!(
            "mean of {} workloads, the tracker's work included; by speed {:+.1} %",
            of(way.name).count(),
            mean_of(way.name, &|cell| cell.speed.value) * 100.0
        );
        let figure = Figure::new(mean_overhead(way.name), "ratio", note)
            .paper(way.paper.unwrap_or_default());
        figures.add(&format!("overhead_{}", way.name), figure);
    }
    let worst = of("budget").max_by(|a, b| a.overhead.total_cmp(&b.overhead));
    let (value, note) = worst.map_or((f64::NAN, ""), |cell| (cell.overhead, cell.workload));
    let note = format!("the dearest workload, {note}, by the clock");
    figures.tell("overhead_budget_max", value, "ratio", note);
    figures.tell("overhead_budget", mean_overhead("budget"), "ratio", "mean of the workloads");
    let speed = Median::of(of("budget").flat_map(|cell| cell.pairs.overheads()).collect());
    let note = format!(
        "rate without / rate with - 1, median of all workloads' pairs: {}",
        speed.interval_percent()
    );
    figures.tell("overhead_budget_by_speed", speed.value, "ratio", note);
    let order: Vec<f64> =
        ways.iter().filter(|w| w.paper.is_some()).map(|w| mean_overhead(w.name)).collect();
    let wrong = order.windows(2).filter(|pair| pair[0] <= pair[1]).count();
    let note = "neighbours in the paper's order of which the latter is dearer";
    figures.tell("out_of_order", wrong as f64, "count", note);
    let note = "mean over the workloads of rate before any tracking / rate without tracking at the end of all \
                ways - 1: what moving pieces out of huge pages leaves behind, as guests run on small pages \
                until the kernel's khugepaged has mended them";
    figures.tell("huge_pages_lost", mean(lost.iter().copied()), "ratio", note);
    for cell in cells {
        let name = format!("overhead_{}_{}", cell.way, cell.workload);
        figures.tell(&name, cell.overhead, "ratio", cell.words());
    }
    figures
}

/// Normalised execution times, as in Table I.
fn page(cells: &[Cell]) -> Page {
    let workloads: Vec<&str> = ALL[..WORKLOADS].iter().map(|workload| workload.name).collect();
    let line = |way: &ModeArm| {
        Line::new(
            way.name,
            cells
                .iter()
                .filter(|cell| cell.way == way.name)
                .zip(0_u32..)
                .map(|(cell, place)| (f64::from(place), (1.0 + cell.overhead).max(1.0))),
        )
    };
    Page::of(
        &format!("Normalised execution time of {}", workloads.join(", ")),
        Chart {
            unit: "times",
            across: "workloads in that order",
            is_log: true,
            lines: modes::all(GRANULE_PAGES).iter().map(line).collect(),
            marks: Vec::new(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_at_most_thirty_five_minutes() {
        // Seconds to boot, fill and stop.
        let around = 10 + 2 * (CHANGE + AROUND);
        let lines = |Schedule { pairs, beginning, with, without }| {
            pairs * (beginning + with + CHANGE + without)
        };
        let ways: usize = modes::all(GRANULE_PAGES).iter().map(|way| lines(way.schedule)).sum();
        let seconds = WORKLOADS.div_ceil(SIDE_BY_SIDE) * (around + ways);
        assert!(seconds <= 35 * 60, "{seconds} s");
    }

    #[test]
    fn updates_that_were_not_made_are_priced_as_those_that_were() {
        let second = Duration::from_secs(1);
        let record = |lost| {
            let cost = model::tracking::TrackingCost { traps: 1000, ..Default::default() };
            let tracking = model::Tracking { cost, ..Default::default() };
            let curve = pages::curve::MissRatioCurve::unknown();
            let seen = vec![watch::TrackingSample { at_us: 0, tracking, curve, event: None }];
            Record { seen, lasted: second, cpu: second / 2, lost, up_ratio: 1.0 }
        };
        assert!(unmade_updates(&record(0)).abs() < 1e-9);
        // 200 updates took half a second; 800 more would have taken two seconds in one.
        assert!((unmade_updates(&record(800)) - 2.0).abs() < 1e-9);
        assert!(unmade_updates(&record(1000)).abs() < 1e-9);
    }
}
