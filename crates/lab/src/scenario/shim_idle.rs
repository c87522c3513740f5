//! `shim-idle`: the cost of the shim to a guest that is not tracked.
//!
//! Two guests differ in nothing but the preloaded shim. They write, read and copy memory, change
//! it at random places, call their kernel, and read a disk, each for some seconds, at the same
//! time. The placement of QEMU's memory differs from boot to boot, and a guest's speed with it.
//! So each pair of boots gives one ratio for each kind of work, and the median over the pairs
//! counts.
//!
//! The figure compares the work for the CPU time of all threads of the QEMU, including the
//! shim's. Other processes on the host take part of the wall time, but not of that. CPU and order
//! of the boots change from pair to pair.

use super::prelude::*;
use crate::meb::workloads::{MEMORY, cpu_of};
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "shim-idle",
    summary: "a guest with the shim and no daemon against one without",
    measures: &[&[file!()], measured::SHIM],
    claims: claims! {
        "slowdown_max" <= 0.01 => "ratio",
            "The shim costs nothing while nothing is tracked: memory, system calls, disk (28 \
             paired boots)";
    },
    run,
};

/// Pairs of guests.
const PAIRS: usize = 28;
const WORKLOAD: &str = "kinds --mb 96 --each 3 --path /dev/data --disk-mb 64";
const DISK: Bytes = Bytes::mib(64);
/// The kinds of work, in the guest's order.
const KINDS: [&str; 6] = ["write", "read", "copy", "random", "system_calls", "disk"];
/// Some multiples of the guest's time on a quiet machine.
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(3);
const WITH: &str = "with";
const WITHOUT: &str = "without";

/// Results of one pair of guests.
struct IdlePair {
    /// Extra time of the guest with the shim for each kind of work: 0.01 is one percent.
    slowdowns: [f64; KINDS.len()],
    boot_s_with: f64,
    boot_s_without: f64,
}

/// A guest's line, and the CPU time of its QEMU at that moment.
#[derive(Clone, Copy)]
struct Mark {
    phase: usize,
    t_s: f64,
    ops: f64,
    cpu_s: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut pairs = Vec::new();
    for number in 0..PAIRS {
        context.say(&format!("pair {} of {PAIRS} ...", number + 1));
        pairs.push(pair(context, number)?);
    }
    let mut figures = figures(context, &pairs);
    page(&pairs).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn pair(context: &Context, number: usize) -> Result<IdlePair, LabError> {
    let guest = |name: &str, place| MachineSpec {
        data_disk: Some(DISK),
        ..context
            .guest(name, "idle", MEMORY, WORKLOAD)
            .with_shim(name == WITH)
            .on_cpus(cpu_of(place))
    };
    let names = if number.is_multiple_of(2) { [WITH, WITHOUT] } else { [WITHOUT, WITH] };
    // The CPUs change after every two pairs.
    let turned = number / 2 % 2;
    let mut lab = context.start([guest(names[0], turned), guest(names[1], 1 - turned)])?;
    progress::wait_until_working(&lab)?;
    let (with, without) = (place(&lab, WITH), place(&lab, WITHOUT));
    let marks = marks(&lab)?;
    let speed = |place: usize, kind| speed(&marks[place], kind);

    let slowdowns = std::array::from_fn(|kind| speed(without, kind) / speed(with, kind) - 1.0);
    let boot_s = |place: usize| lab.machines()[place].boot_time().as_secs_f64();
    let (boot_s_with, boot_s_without) = (boot_s(with), boot_s(without));
    lab.stop()?;
    Ok(IdlePair { slowdowns, boot_s_with, boot_s_without })
}

fn place(lab: &Lab, name: &str) -> usize {
    lab.machines().iter().position(|machine| machine.spec().name == name).unwrap_or(0)
}

/// Each guest's lines until it has done all kinds of work.
fn marks(lab: &Lab) -> Result<Vec<Vec<Mark>>, LabError> {
    let deadline = Instant::now() + LIMIT;
    let mut marks: Vec<Vec<Mark>> = lab.machines().iter().map(|_| Vec::new()).collect();
    while marks.iter().any(|marks| marks.last().is_none_or(|last| last.phase < KINDS.len())) {
        if Instant::now() > deadline {
            let what = "the guests to do all kinds of work".to_owned();
            return Err(LabError::Timeout { what, limit: LIMIT });
        }
        for (machine, marks) in lab.machines().iter().zip(&mut marks) {
            machine.ensure_alive()?;
            let newest = progress::Line::newest(machine);
            let Some(line) = newest.filter(|line| marks.last().is_none_or(|m| m.t_s < line.t_s))
            else {
                continue;
            };
            let phase = line.value["phase"].as_u64().and_then(|phase| usize::try_from(phase).ok());
            let Some(phase) = phase else { continue };
            marks.push(Mark {
                phase,
                t_s: line.t_s,
                ops: line.ops,
                cpu_s: threads::cpu_s(&[machine.process().pid], ""),
            });
        }
        interrupt::sleep(POLL)?;
    }
    Ok(marks)
}

/// Work of one kind for each second of CPU time; NaN when fewer than two lines report it.
fn speed(marks: &[Mark], kind: usize) -> f64 {
    let mut of_kind = marks.iter().filter(|mark| mark.phase == kind);
    match (of_kind.next(), of_kind.next_back()) {
        (Some(first), Some(last)) => (last.ops - first.ops) / (last.cpu_s - first.cpu_s),
        _ => f64::NAN,
    }
}

fn figures(context: &Context, pairs: &[IdlePair]) -> Figures {
    let runs = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
    let mut figures = context.figures(SCENARIO.name, runs);
    let medians = KINDS.iter().enumerate().map(|(kind, name)| (*name, median(pairs, kind)));
    let medians: Vec<(&str, Median)> = medians.collect();
    // NaN sorts as the largest.
    let worst = medians.iter().max_by(|a, b| a.1.value.total_cmp(&b.1.value));
    if let Some((name, median)) = worst {
        let note =
            format!("{name}: work for CPU time, without / with - 1, {}", median.interval_percent());
        figures.tell("slowdown_max", median.value, "ratio", note);
    }
    for (name, median) in &medians {
        figures.tell(&format!("slowdown_{name}"), median.value, "ratio", median.interval_percent());
    }
    let boots = Median::of(pairs.iter().map(|p| p.boot_s_with / p.boot_s_without - 1.0).collect());
    let note = format!(
        "boot with / without - 1, {}; {:.2} s against {:.2} s",
        boots.interval_percent(),
        Median::of(pairs.iter().map(|pair| pair.boot_s_with).collect()).value,
        Median::of(pairs.iter().map(|pair| pair.boot_s_without).collect()).value,
    );
    figures.tell("boot_slowdown", boots.value, "ratio", note);
    figures
}

fn median(pairs: &[IdlePair], kind: usize) -> Median {
    Median::of(pairs.iter().map(|pair| pair.slowdowns[kind]).filter(|s| s.is_finite()).collect())
}

fn page(pairs: &[IdlePair]) -> Page {
    let line = |(kind, name): (usize, &&str)| {
        let points = pairs.iter().zip(0_u32..);
        let points = points.map(|(p, n)| (f64::from(n), (1.0 + p.slowdowns[kind]) * 100.0));
        Line::new(name, points)
    };
    let lines = KINDS.iter().enumerate().map(line);
    Page::of(
        "CPU time for the same work with the shim, in percent of that without",
        Chart::linear("%", "pairs", lines),
    )
}
