//! `kim-fig1`: the slowdown of a CPU-bound guest while its CPU also scans for identical pages, by
//! scan rate (Kim 2014, Figure 1).
//!
//! A guest computes pi on a CPU of its own. Two others, on the other CPU, hold memory that is the
//! same in part, and write to their private part. Each case has fresh guests. The speed of pi is
//! measured before, while Overbook's engine or `ksmd` runs on its CPU at one rate, and after. The
//! execution time is compared with the mean of before and after.
//!
//! The engine has the usual priority (nice 0), `ksmd` the kernel's (nice 5), as in the paper's
//! NICE-5. Where guest and scanner both want all of the CPU, `ksmd` gets a quarter of it and the
//! engine half. The shims merge on the others' CPU; their time is in the engine's CPU use. Unlike
//! in the paper, guests write meanwhile, so there is always something to hash.

use super::prelude::*;
use crate::ksm::{self, Ksm};
use crate::merger::{COPIES, Merger, Merging};
use crate::pinning::{self, Pinned};
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig1",
    summary: "what looking for identical pages takes from a CPU-bound guest, by scan rate: ours and kernel KSM's",
    measures: &[&[file!()], measured::PAGES, measured::SHIM, measured::KIM, measured::MERGER],
    claims: &[],
    run,
};

const ROUNDS: u64 = 2;
/// Pages in a millisecond; the last rate is unlimited.
const RATES: [Option<u32>; 5] = [Some(5), Some(20), Some(50), Some(100), None];
const MEMORY: Bytes = Bytes::mib(256);
const SETTLE: Duration = Duration::from_secs(2);
/// Lines of pi to skip when something begins or ends, and lines in a window; one line a second.
const BEGINNING: usize = 1;
const WINDOW: usize = 4;
/// The CPU of pi and of the scanner; the other guests have the next one.
const CPU: usize = 0;
const PI: usize = 0;
const OURS: &str = "ours";
const KSM: &str = "ksm";

/// Results of one case.
struct Case {
    way: &'static str,
    rate: Option<u32>,
    /// Extra time of pi.
    overhead: f64,
    /// CPUs that scanning took.
    cpus: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    // `ksmd` stays on this CPU over all cases; its affinity from before returns at the end.
    let _ksmd = Pinned::to(CPU, Ksm::thread()?)?;
    let mut cases = Vec::new();
    for round in 0..ROUNDS {
        for rate in RATES {
            for way in [OURS, KSM] {
                let case = case(context, context.seed + round, way, rate)?;
                context.say(&case.in_words());
                cases.push(case);
            }
        }
    }
    let mut figures = figures(context, &cases);
    page(&cases).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn case(
    context: &Context,
    seed: u64,
    way: &'static str,
    rate: Option<u32>,
) -> Result<Case, LabError> {
    let guest = |name: &str, work: &str, cpu: usize| MachineSpec {
        seed,
        ..MachineSpec::new(name, "kim", MEMORY, MEMORY, work).with_shim(true).on_cpus(vec![cpu])
    };
    let specs = [
        guest("pi", "pi", CPU),
        guest("one", COPIES, CPU + 1),
        MachineSpec { seed: seed + 1, ..guest("two", COPIES, CPU + 1) },
    ];
    let mut lab = context.start(specs)?;
    progress::wait_until_working(&lab)?;
    interrupt::sleep(SETTLE)?;
    let all = lab.machines().iter().map(|machine| machine.process().pid);
    let others: Vec<u32> = all.skip(PI + 1).collect();

    let mut pairs = Pairs::default();
    pairs.add_without(speed(&lab)?);
    let at = match way {
        OURS => Merging::Ours(pinning::on_cpu(CPU, || Merger::start(&others, rate, None))?),
        _ => Merging::Kernel(Ksm::start(rate.map_or(ksm::FLAT_OUT, ksm::pages_per_ms))?),
    };
    let (began, before) = (Instant::now(), cpu_s(&at, &others)?);
    pairs.add_with(speed(&lab)?);
    let cpus = (cpu_s(&at, &others)? - before) / began.elapsed().as_secs_f64();
    drop(at);
    pairs.add_without(speed(&lab)?);
    lab.stop()?;
    Ok(Case { way, rate, overhead: pairs.overhead().value, cpus })
}

/// The speed of pi in operations per second, from now on.
fn speed(lab: &Lab) -> Result<f64, LabError> {
    let rates = progress::rates(lab, BEGINNING, WINDOW)?;
    Ok(rates.get(PI).copied().unwrap_or(f64::NAN))
}

/// CPU time that scanning has taken so far.
fn cpu_s(at: &Merging, others: &[u32]) -> Result<f64, LabError> {
    match at {
        Merging::Ours(merger) => Ok(merger.cpu_s() + threads::shims_cpu_s(others)),
        Merging::Kernel(_) => Ksm::cpu_s(),
    }
}

impl Case {
    fn in_words(&self) -> String {
        let Self { overhead, cpus, .. } = self;
        let (way, rate) = (self.way, named(self.rate));
        format!(
            "{way} {rate}: pi takes {:.3} of its time, {:.1} % CPU",
            1.0 + overhead,
            cpus * 100.0
        )
    }
}

fn named(rate: Option<u32>) -> String {
    rate.map_or_else(|| "max".to_owned(), |rate| rate.to_string())
}

/// The median over the rounds.
fn median_of(
    cases: &[Case],
    way: &'static str,
    rate: Option<u32>,
    what: fn(&Case) -> f64,
) -> Median {
    let same = cases.iter().filter(|case| (case.way, case.rate) == (way, rate));
    Median::of(same.map(what).collect())
}

fn figures(context: &Context, cases: &[Case]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, u32::try_from(ROUNDS).unwrap_or(u32::MAX));
    for way in [OURS, KSM] {
        for rate in RATES {
            let overhead = median_of(cases, way, rate, |case| case.overhead);
            let cpus = median_of(cases, way, rate, |case| case.cpus);
            let name = format!("{way}_{}", named(rate));
            let note = format!("pi's time to that without; {} longer", overhead.interval_percent());
            let time = Figure::new(1.0 + overhead.value, "ratio", note);
            let time =
                time.paper("grows gradually with the scan rate and the priority (no number)");
            figures.add(&format!("time_{name}"), time);
            let cpu = Figure::new(cpus.value, "ratio", "CPU time of who looks, to time passed");
            figures.add(&format!("cpu_{name}"), cpu.paper("grows with the scan rate (no number)"));
        }
    }
    figures
}

fn page(cases: &[Case]) -> Page {
    let line = |way: &'static str, what: fn(&Case) -> f64| {
        let point = |rate: &u32| (f64::from(*rate), median_of(cases, way, Some(*rate), what).value);
        Line::new(way, RATES.iter().flatten().map(point))
    };
    let chart = |unit, what: fn(&Case) -> f64| {
        Chart::linear(unit, "pages/ms", [OURS, KSM].map(|way| line(way, what)))
    };
    let mut page = Page::default();
    page.add("Time that pi takes", chart("to without", |case| 1.0 + case.overhead));
    page.add("CPU use of who looks", chart("CPUs", |case| case.cpus));
    page
}
