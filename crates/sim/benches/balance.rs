//! What the optimal balance costs, and the paper's dynamic programming beside it in the same run.
//!
//! Each VM may have from 90 to 130 % of what it has (Wang 2016 §4). Curves are of three kinds: convex; with the cliffs of programs
//! that need all of their data; and a mix with steps. Medians of several runs.

use std::{hint::black_box, time::Instant};

use fastrand::Rng;
use policy::optimum::{Choice, place};
use sim::dynamic_programming::least_misses;

struct Size {
    vms: usize,
    vm_mib: u32,
    unit_mib: u32,
    target_ms: f64,
    /// How often the paper's is run.
    references: usize,
}

const SIZES: [Size; 3] = [
    Size { vms: 16, vm_mib: 1024, unit_mib: 16, target_ms: 0.2, references: 5 },
    Size { vms: 16, vm_mib: 1024, unit_mib: 1, target_ms: 0.2, references: 3 },
    Size { vms: 1000, vm_mib: 4096, unit_mib: 16, target_ms: 20.0, references: 1 },
];
const RUNS: usize = 25;

fn main() {
    let mut late = Vec::new();
    for size in &SIZES {
        for (kind, curve) in [("convex", convex as Curve), ("cliffs", cliff), ("mixed", mixed)] {
            let (choices, units) = fleet(size, curve);
            let (ms, placed) = median_ms(RUNS, || place(black_box(&choices), units as u64));
            let (paper_ms, least) = median_ms(size.references, || {
                least_misses(black_box(&choices), units).unwrap_or_default()
            });
            let Size { vms, vm_mib, unit_mib, target_ms, .. } = size;
            println!(
                "{vms} VMs of {vm_mib} MiB in units of {unit_mib} MiB, {kind}: {ms:.3} ms (target: under {target_ms}), \
                 dynamic programming {paper_ms:.1} ms, ratio {:.0}; misses above the least: {:.1e} (bound {:.1e})",
                paper_ms / ms,
                placed.misses / least - 1.0,
                placed.excess / least,
            );
            if ms >= *target_ms {
                late.push(format!("{vms} VMs, {kind}: {ms:.3} ms"));
            }
        }
    }
    assert!(late.is_empty(), "too slow: {late:?}");
}

/// Falling misses of one VM for so many sizes.
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

/// A host that has room for what each VM has, and a tenth more.
fn fleet(size: &Size, curve: Curve) -> (Vec<Choice>, usize) {
    let mut rng = Rng::with_seed(1);
    let units = size.vm_mib / size.unit_mib;
    let (least, most) = (units * 9 / 10, units * 13 / 10);
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
