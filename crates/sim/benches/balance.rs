//! Time to find the optimal balance, next to that of the paper's dynamic programming in the same
//! run.
//!
//! Each VM may have from 90 to 130 % of its present size, as in Wang 2016 §4, or from 50 to 200 %.
//! Curves are of three kinds: convex; with the cliffs of programs that need all of their data; and
//! a mix with steps. Figures are medians of several runs. The last line is a whole tick of the
//! policy in which all VMs are balanced.

use std::{hint::black_box, time::Instant};

use fastrand::Rng;
use model::{Bytes, Policy, ports::Clock as _};
use policy::optimum::{Choice, place};
use sim::{Access, Fake, Load, Scenario, SimClock, dynamic_programming::least_misses, limits};

struct Size {
    vms: usize,
    vm_mib: u32,
    unit_mib: u32,
    /// Least and largest size, in percent of the present size.
    range: (u32, u32),
    target_ms: f64,
    /// Runs of the paper's algorithm.
    references: usize,
}

const NARROW: (u32, u32) = (90, 130);
const WIDE: (u32, u32) = (50, 200);
const SIZES: [Size; 4] = [
    Size { vms: 16, vm_mib: 1024, unit_mib: 16, range: NARROW, target_ms: 0.2, references: 5 },
    Size { vms: 16, vm_mib: 1024, unit_mib: 16, range: WIDE, target_ms: 0.2, references: 5 },
    Size { vms: 1000, vm_mib: 4096, unit_mib: 16, range: NARROW, target_ms: 20.0, references: 1 },
    Size { vms: 1000, vm_mib: 4096, unit_mib: 16, range: WIDE, target_ms: 20.0, references: 0 },
];
const RUNS: usize = 25;

fn main() {
    let mut late = Vec::new();
    for size in &SIZES {
        for (kind, curve) in [("convex", convex as Curve), ("cliffs", cliff), ("mixed", mixed)] {
            let (choices, units) = fleet(size, curve);
            let (ms, placed) = median_ms(RUNS, || place(black_box(&choices), units as u64));
            let Size { vms, vm_mib, unit_mib, range: (from, to), target_ms, .. } = size;
            println!(
                "{vms} VMs of {vm_mib} MiB, {from} to {to} %, in units of {unit_mib} MiB, {kind}: {ms:.3} ms (target: under \
                 {target_ms}), off by at most {:.1e}",
                placed.excess / placed.misses,
            );
            if size.references > 0 {
                let (paper_ms, least) = median_ms(size.references, || {
                    least_misses(black_box(&choices), units).unwrap_or_default()
                });
                let (ratio, off) = (paper_ms / ms, placed.misses / least - 1.0);
                println!(
                    "    dynamic programming: {paper_ms:.1} ms, {ratio:.0} times; misses above its: {off:.1e}"
                );
            }
            if ms >= *target_ms {
                late.push(format!("{vms} VMs, {kind}: {ms:.3} ms"));
            }
        }
    }
    let ms = tick_ms();
    println!(
        "policy::tick with a round for 1000 VMs of 4096 MiB in one group: {ms:.3} ms (target: under 20)"
    );
    if ms >= 20.0 {
        late.push(format!("a tick: {ms:.3} ms"));
    }
    assert!(late.is_empty(), "too slow: {late:?}");
}

/// A tick that balances the memory of 1,000 VMs, half of which want more than they have.
fn tick_ms() -> f64 {
    let fakes = (0..1000u32).map(|i| {
        let access =
            if i % 3 == 0 { Access::cyclic(2e3) } else { Access::even(f64::from(i) * 5.0) };
        let load = if i % 2 == 0 { 5_000 } else { 2_500 };
        Fake::busy(format!("{i}"), load)
            .with_ram(8192)
            .standing_at(4096)
            .hoarding()
            .accessing(access)
    });
    let scenario = Scenario::new(1)
        .host(6 << 20, 1024, Load::steady(Bytes::ZERO))
        .group("all", Policy::Balance, limits(1024, 2048, 8192), fakes)
        .paying("all", 4 << 20)
        .paging("all");
    let run = scenario.run(12);
    let Some(view) = run.seconds.last().map(|second| &second.view) else { return f64::NAN };
    let now = SimClock::at(15).now();
    let tick = || policy::tick(view, scenario.spec(), &mut run.memory.clone(), now);
    let (ms, plan) = median_ms(RUNS, tick);
    assert!(plan.vms.values().filter(|decision| decision.change.is_some()).count() > 100);
    ms
}

/// Makes falling misses of one VM for the given number of sizes.
type Curve = fn(usize, &mut Rng) -> Vec<f64>;

fn convex(sizes: usize, rng: &mut Rng) -> Vec<f64> {
    let (height, shrink) = (1e3 * (0.1 + rng.f64()), 1.0 - 4.0 * rng.f64() / sizes as f64);
    (0..sizes).map(|size| height * shrink.powf(size as f64)).collect()
}

fn cliff(sizes: usize, rng: &mut Rng) -> Vec<f64> {
    let (at, height) = (rng.usize(0..sizes), 1e3 * (0.1 + rng.f64()));
    let slope = height / sizes as f64 / 50.0;
    let misses = |size: usize| (sizes - size) as f64 * slope + if size < at { height } else { 0.0 };
    (0..sizes).map(misses).collect()
}

fn mixed(sizes: usize, rng: &mut Rng) -> Vec<f64> {
    let mut misses = convex(sizes, rng);
    for _ in 0..rng.usize(0..4) {
        let step = cliff(sizes, rng);
        misses.iter_mut().zip(step).for_each(|(misses, step)| *misses += step);
    }
    misses
}

/// A host that has room for each VM's present size, and a tenth more.
fn fleet(size: &Size, curve: Curve) -> (Vec<Choice>, usize) {
    let mut rng = Rng::with_seed(1);
    let units = size.vm_mib / size.unit_mib;
    let (least, most) = (units * size.range.0 / 100, units * size.range.1 / 100);
    let sizes = (most - least + 1) as usize;
    let mut choice = || Choice { least, misses: curve(sizes, &mut rng) };
    let choices = (0..size.vms).map(|_| choice()).collect();
    (choices, size.vms * units as usize * 11 / 10)
}

fn median_ms<T>(runs: usize, mut run: impl FnMut() -> T) -> (f64, T) {
    let mut last = None;
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            last = Some(black_box(run()));
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[runs / 2], last.expect("at least one run"))
}
