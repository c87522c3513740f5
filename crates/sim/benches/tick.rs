//! Time of one decision: `policy::tick` over a host of 1,000 VMs in 50 groups.
//!
//! The host is simulated for a minute first. The policy's memory is then warm, and a tenth of the
//! guests is short of memory. The bench is a plain loop instead of a benchmark library: the
//! promise covers the median and the 95th percentile of single ticks, and the loop prints just
//! these.

use std::{hint::black_box, time::Instant};

use model::{Policy, ports::Clock as _};
use sim::{Fake, Scenario, SimClock, limits};

const GROUPS: usize = 50;
const VMS_PER_GROUP: usize = 20;
const WARM_UP_S: u64 = 60;
const TICKS: u64 = 300;
const TARGET_MS: f64 = 5.0;

fn main() {
    let policies = [Policy::Fair, Policy::Entitlement, Policy::Demand];
    let mut scenario = Scenario::new(1);
    for group in 0..GROUPS {
        let fakes = (0..VMS_PER_GROUP).map(|i| match i {
            0 | 1 => Fake::busy(format!("{i}"), 300).standing_at(128),
            _ => Fake::idle(format!("{i}")).standing_at(128).hoarding(),
        });
        let (name, policy) = (format!("group{group}"), policies[group % policies.len()]);
        scenario = scenario.group(&name, policy, limits(64, 128, 384), fakes);
    }
    let run = scenario.run(WARM_UP_S);
    let Some(view) = run.seconds.last().map(|second| &second.view) else { return };
    let (spec, mut memory) = (scenario.spec(), run.memory.clone());

    let mut times_ms: Vec<f64> = (0..TICKS)
        .map(|tick| {
            let now = SimClock::at(WARM_UP_S + tick / 100).now();
            let start = Instant::now();
            black_box(policy::tick(black_box(view), spec, &mut memory, now));
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times_ms.sort_by(f64::total_cmp);
    let (median, p95) = (times_ms[times_ms.len() / 2], times_ms[times_ms.len() * 95 / 100]);
    println!(
        "policy::tick, {} VMs in {GROUPS} groups, {TICKS} ticks: median {median:.3} ms, \
         p95 {p95:.3} ms (target: under {TARGET_MS} ms)",
        view.vms.len()
    );
    assert!(p95 < TARGET_MS, "one tick took {p95:.3} ms, more than {TARGET_MS} ms");
}
