//! `meb-accuracy`: working sets and miss-ratio curves as the product estimates them, against every access
//! that the guests made (MEB §5.2.1, Fig. 10).
//!
//! Ten workloads, each in a guest of its own that has both the shim and the tracer. The worker's own code
//! tracks it within the 1 % budget, while the tracer records each page touched in each tenth of a second:
//! estimate and truth come from the same run, the same clock and the same definition, the truth exactly
//! and over all granules. (The paper compares two runs, aligned by instruction counts.) They are compared every
//! five seconds, after a time in which the filling of memory is forgotten.
//!
//! Left out: how well a guest is tracked at full speed. The tracer slows memory accesses down several times, so
//! the patterns are the workloads' own but sparser in time.

use std::time::Duration;

use model::Bytes;

use super::{Context, Scenario};
use crate::chart::{Chart, Line};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::{Lab, LabError, Machine};
use crate::machine::MachineSpec;
use crate::meb::page::Page;
use crate::meb::watch::{self, Record, Watch};
use crate::meb::workloads::{ALL, MEMORY, SIDE_BY_SIDE, Workload};
use crate::meb::{modes, progress};
use crate::truth::{Definition, Truth};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "meb-accuracy",
    summary: "working sets and miss-ratio curves of ten workloads against every access they made",
    run,
};

/// Filling memory takes long when every access is recorded.
const FILL_LIMIT: Duration = Duration::from_secs(180);
/// Some time constants of the ageing.
const WARM_UP: Duration = Duration::from_secs(30);
const MEASURE: Duration = Duration::from_secs(60);
const EVERY: Duration = Duration::from_secs(5);

/// One comparison.
#[derive(Debug, Clone, Copy)]
struct Moment {
    at_s: f64,
    exact: Bytes,
    /// `None`: nothing was known.
    estimated: Option<Bytes>,
    curve_error: f64,
}

/// All comparisons of one workload.
struct Row {
    name: &'static str,
    moments: Vec<Moment>,
    vcpu_share: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut rows = Vec::new();
    for workloads in ALL.chunks(SIDE_BY_SIDE) {
        let names: Vec<&str> = workloads.iter().map(|workload| workload.name).collect();
        context.say(&format!("{}, tracked and recorded ...", names.join(" beside ")));
        let compared = compare(context, workloads)?;
        for row in &compared {
            context.say(&format!(
                "  {}: accuracy {:.3}, {}",
                row.name,
                row.accuracy(),
                row.words()
            ));
        }
        rows.extend(compared);
    }
    let mut figures = figures(context, &rows);
    page(&rows).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn compare(context: &Context, workloads: &[Workload]) -> Result<Vec<Row>, LabError> {
    let traced = |(place, workload): (usize, &Workload)| MachineSpec {
        traced: true,
        ..workload.guest(place, context.seed)
    };
    let specs: Vec<MachineSpec> = workloads.iter().enumerate().map(traced).collect();
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    let track = |m: &Machine| Watch::start(m.process().pid, modes::shipped(), &[], EVERY);
    let watches = lab.machines().iter().map(track).collect::<Result<Vec<Watch>, _>>()?;
    watch::wait_until_tracked(&lab, &watches)?;
    progress::wait_until_working(&lab, FILL_LIMIT)?;
    interrupt::sleep(WARM_UP)?;
    let from_us = watch::now_us();
    interrupt::sleep(MEASURE)?;
    let mut rows = Vec::new();
    for (place, watch) in watches.into_iter().enumerate() {
        let (machine, record) = (&lab.machines()[place], watch.stop()?);
        if !machine.alive() {
            return Err(machine.death());
        }
        let moments = moments(machine, &record, from_us)?;
        let shares = record.seen.iter().map(|seen| seen.tracking.cost.vcpu_share);
        let vcpu_share = shares.fold(0.0, f64::max);
        rows.push(Row { name: workloads[place].name, moments, vcpu_share });
    }
    lab.stop()?;
    Ok(rows)
}

fn moments(machine: &Machine, record: &Record, from_us: u64) -> Result<Vec<Moment>, LabError> {
    let definition = Definition {
        granule_pages: 32,
        time_constant: pages::probe::AGEING,
        tolerable: pages::probe::TOLERABLE_MISS_RATIO,
    };
    let mut truth = Truth::open(&machine.files().trace, definition)?;
    let mut moments = Vec::new();
    for seen in record.seen.iter().filter(|seen| seen.at_us >= from_us) {
        truth.advance_to(seen.at_us)?;
        let exact = truth.exact();
        let error = exact.curve().mean_absolute_error(&seen.curve, MEMORY.0 as f64);
        moments.push(Moment {
            at_s: (seen.at_us - from_us) as f64 / 1e6,
            exact: exact.working_set_size(),
            estimated: seen.tracking.working_set,
            curve_error: error,
        });
    }
    Ok(moments)
}

impl Moment {
    /// 1 is right; nothing known is as wrong as can be.
    fn accuracy(&self) -> f64 {
        let Some(estimated) = self.estimated else { return 0.0 };
        1.0 - (estimated.0 as f64 - self.exact.0 as f64).abs() / self.exact.0.max(1) as f64
    }
}

impl Row {
    fn accuracy(&self) -> f64 {
        mean(self.moments.iter().map(Moment::accuracy))
    }

    fn words(&self) -> String {
        let sizes = |of: fn(&Moment) -> f64| mean(self.moments.iter().map(of));
        format!(
            "exact {:.1} MiB, estimated {:.1} MiB on average; traps took at most {:.2} % of the vCPU",
            sizes(|moment| moment.exact.as_mib()),
            sizes(|moment| moment.estimated.map_or(f64::NAN, Bytes::as_mib)),
            self.vcpu_share * 100.0
        )
    }

    fn curve_error(&self) -> f64 {
        mean(self.moments.iter().map(|moment| moment.curve_error))
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

fn figures(context: &Context, rows: &[Row]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let accuracies = || rows.iter().map(Row::accuracy);
    let least = accuracies().fold(f64::INFINITY, f64::min);
    figures.add(
        "wss_accuracy_mean",
        Figure::new(
            mean(accuracies()),
            "ratio",
            format!("1 - |estimate - exact| / exact, every 5 s, mean of {} workloads", rows.len()),
        )
        .target(Target::AtLeast(0.952))
        .paper("0.952"),
    );
    figures.add(
        "wss_accuracy_min",
        Figure::new(least, "ratio", "the least accurate workload")
            .target(Target::AtLeast(0.90))
            .paper("errors of 1 to 8 %"),
    );
    figures.add(
        "mrc_mae",
        Figure::new(
            mean(rows.iter().map(Row::curve_error)),
            "ratio",
            "mean absolute error of the miss-ratio curve over all sizes up to the allocation",
        )
        .target(Target::AtMost(0.03)),
    );
    for row in rows {
        let name = row.name;
        let accuracy = Figure::new(row.accuracy(), "ratio", row.words());
        figures.add(&format!("wss_accuracy_{name}"), accuracy);
        figures.add(
            &format!("mrc_mae_{name}"),
            Figure::new(row.curve_error(), "ratio", "of that workload's curve"),
        );
    }
    figures
}

/// All workloads one after the other: the paper's Figure 10.
fn page(rows: &[Row]) -> Page {
    let (mut exact, mut estimated, mut marks) = (Vec::new(), Vec::new(), Vec::new());
    let length_s = MEASURE.as_secs_f64();
    for (number, row) in rows.iter().enumerate() {
        let start_s = f64::from(u32::try_from(number).unwrap_or(0)) * length_s;
        marks.push((start_s, row.name.to_owned()));
        for moment in &row.moments {
            let at_s = start_s + moment.at_s;
            exact.push((at_s, moment.exact.as_mib()));
            estimated.extend(moment.estimated.map(|size| (at_s, size.as_mib())));
        }
    }
    let line = |name: &str, points| Line { name: name.to_owned(), points };
    let lines = vec![line("exact", exact), line("estimated", estimated)];
    let mut page = Page::default();
    page.add(
        "Working set, workload after workload",
        Chart { unit: "MiB", across: "seconds", is_log: false, lines, marks },
    );
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_that_is_missing_is_as_wrong_as_one_of_nothing_or_of_twice_as_much() {
        let accuracy = |estimated: Option<u64>| {
            let estimated = estimated.map(Bytes::mib);
            Moment { at_s: 0.0, exact: Bytes::mib(100), estimated, curve_error: 0.0 }.accuracy()
        };
        assert!(accuracy(None).abs() < 1e-9);
        assert!(accuracy(Some(0)).abs() < 1e-9);
        assert!(accuracy(Some(200)).abs() < 1e-9);
        assert!((accuracy(Some(95)) - 0.95).abs() < 1e-9);
    }
}
