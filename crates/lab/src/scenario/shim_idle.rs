//! `shim-idle`: what the shim costs a guest that nobody tracks.
//!
//! Two guests that differ in nothing but the preloaded shim run the same workload side by side, each on a CPU of
//! its own, and change CPUs every few seconds, so that neither the CPU nor what else runs on the host favours
//! one. Each pair of windows gives one ratio; the median over all pairs, workloads and boots counts. Who boots
//! first takes turns, too.

use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::{Context, Scenario};
use crate::chart::{Chart, Line};
use crate::figures::{Figure, Figures, Target};
use crate::lab::{Lab, LabError, Machine};
use crate::machine::MachineSpec;
use crate::meb::page::Page;
use crate::meb::pairs::Median;
use crate::meb::progress;
use crate::meb::workloads::{ALL, MEMORY, Workload, cpu_of};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "shim-idle",
    summary: "a guest with the shim and no daemon against one without",
    run,
};

const ROUNDS: usize = 8;
/// Pairs of windows in each round.
const PAIRS: usize = 4;
/// Lines of a window, one second each.
const WINDOW: usize = 3;
const FILL_LIMIT: Duration = Duration::from_secs(60);
const WITH: &str = "with";
const WITHOUT: &str = "without";

/// What one pair of guests showed.
struct Round {
    workload: &'static str,
    /// How much longer the guest with the shim took, for each pair of windows: 0.01 is one percent.
    slowdowns: Vec<f64>,
    boot_s_with: f64,
    boot_s_without: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut rounds = Vec::new();
    for number in 0..ROUNDS {
        let workload = &ALL[number % ALL.len()];
        context.say(&format!("{}, with the shim and without ...", workload.name));
        rounds.push(round(context, number, workload)?);
    }
    let mut figures = figures(context, &rounds);
    page(&rounds).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn round(context: &Context, number: usize, workload: &Workload) -> Result<Round, LabError> {
    let guest = |name: &str, place| MachineSpec {
        seed: context.seed,
        shim: name == WITH,
        cpus: cpu_of(place),
        ..MachineSpec::new(name, "idle", MEMORY, MEMORY, workload.command)
    };
    let names = if number.is_multiple_of(2) { [WITH, WITHOUT] } else { [WITHOUT, WITH] };
    let specs = [guest(names[0], 0), guest(names[1], 1)];
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    progress::wait_until_working(&lab, FILL_LIMIT)?;
    let (with, without) = (place(&lab, WITH), place(&lab, WITHOUT));
    let mut slowdowns = Vec::new();
    for _ in 0..PAIRS {
        let mut product = 1.0;
        for swapped in [0, 1] {
            for (place, machine) in lab.machines().iter().enumerate() {
                move_to(machine, &cpu_of(place + swapped))?;
            }
            // In the first line it has moved.
            let rates = progress::rates(&lab, 1, WINDOW)?;
            product *= rates[without] / rates[with];
        }
        slowdowns.push(product.sqrt() - 1.0);
    }
    let boot_s = |place: usize| lab.machines()[place].boot_time().as_secs_f64();
    let (boot_s_with, boot_s_without) = (boot_s(with), boot_s(without));
    lab.stop()?;
    Ok(Round { workload: workload.name, slowdowns, boot_s_with, boot_s_without })
}

fn place(lab: &Lab, name: &str) -> usize {
    lab.machines().iter().position(|machine| machine.spec().name == name).unwrap_or(0)
}

/// Moves all threads of a QEMU; one that begins later follows the one that began it.
fn move_to(machine: &Machine, cpus: &[usize]) -> Result<(), LabError> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    let tasks = format!("/proc/{}/task", machine.process().pid);
    for task in std::fs::read_dir(tasks)? {
        let id = task?.file_name().to_string_lossy().parse::<i32>().ok().and_then(Pid::from_raw);
        // A thread that has ended meanwhile needs no CPU.
        let _ = id.map(|id| sched_setaffinity(Some(id), &set));
    }
    Ok(())
}

fn figures(context: &Context, rounds: &[Round]) -> Figures {
    let runs = u32::try_from(rounds.len()).unwrap_or(u32::MAX);
    let mut figures = context.figures(SCENARIO.name, runs);
    let all = Median::of(rounds.iter().flat_map(|round| round.slowdowns.clone()).collect());
    figures.add(
        "slowdown",
        Figure::new(
            all.value,
            "ratio",
            format!("rate without / with - 1, {}", all.interval_percent()),
        )
        .target(Target::AtMost(0.01)),
    );
    let boots = Median::of(rounds.iter().map(|r| r.boot_s_with / r.boot_s_without - 1.0).collect());
    let note = format!(
        "boot with / without - 1, {}; {:.2} s against {:.2} s",
        boots.interval_percent(),
        Median::of(rounds.iter().map(|round| round.boot_s_with).collect()).value,
        Median::of(rounds.iter().map(|round| round.boot_s_without).collect()).value,
    );
    figures.add("boot_slowdown", Figure::new(boots.value, "ratio", note));
    for round in rounds {
        let median = Median::of(round.slowdowns.clone());
        let name = format!("slowdown_{}", round.workload);
        figures.add(&name, Figure::new(median.value, "ratio", median.interval_percent()));
    }
    figures
}

fn page(rounds: &[Round]) -> Page {
    let all = rounds.iter().flat_map(|round| &round.slowdowns).zip(0_u32..);
    let points = all.map(|(slowdown, pair)| (f64::from(pair), (1.0 + slowdown) * 100.0)).collect();
    let marks = rounds.iter().zip(0_u32..).map(|(round, number)| {
        let pairs = u32::try_from(PAIRS).unwrap_or(1);
        (f64::from(number * pairs), round.workload.to_owned())
    });
    let lines = vec![Line { name: "time with shim".to_owned(), points }];
    let mut page = Page::default();
    page.add(
        "Time for the same work with the shim, in percent of the time without",
        Chart { unit: "%", across: "pairs", is_log: false, lines, marks: marks.collect() },
    );
    page
}
