//! A pool of hosts: the time of one decision, and a day under three strategies.
//!
//! The decision covers 10,000 hosts with 20 VMs each, a fiftieth of which is in sustained
//! overload. The day covers 1,000 hosts, a twentieth of which misbehaves, from one seed.

use std::time::Instant;

use model::cluster::{ClusterView, HostReport, VmReport};
use model::{Bytes, OverloadSpec, Reading, Severity, Time};
use policy::cluster::{ClusterMemory, decide};
use sim::pool::{Excess, Pool, Setting, Strategy};

const HOSTS: u32 = 10_000;
const VMS: u32 = 20;
const ROUNDS: usize = 5;
const HOURS: u64 = 24;

fn main() {
    decisions();
    days();
}

fn decisions() {
    let mut random = fastrand::Rng::with_seed(1);
    let now = Time(10_000_000);
    let mut host = |i: u32| {
        let vms = (0..VMS).map(|j| {
            let is_hot = random.u32(0..50) == 0;
            let severity = if is_hot { Severity::Sustained } else { Severity::None };
            let (promised, given) = (Bytes::mib(1024), Bytes::mib(random.u64(640..=1024)));
            let vm = VmReport {
                group: "pool".into(),
                promised,
                given,
                severity,
                paged: 1 << 20,
                rates: None,
                immovable: None,
                saved: Bytes::ZERO,
            };
            (format!("vm-{i}-{j}").into(), vm)
        });
        let report = HostReport {
            memory: Bytes::mib(20 * 1024),
            receives: true,
            vms: vms.collect(),
            ..HostReport::default()
        };
        (format!("host-{i}").into(), Reading::new(report, now))
    };
    let hosts = (0..HOSTS).map(&mut host).collect();
    let view = ClusterView { hosts, ..ClusterView::default() };
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            // Its first look was long ago, so it may move VMs.
            let mut memory = ClusterMemory::default();
            let _ = decide(&ClusterView::default(), &mut memory, Time(0));
            let begun = Instant::now();
            let plan = decide(&view, &mut memory, now);
            let took = begun.elapsed().as_secs_f64() * 1e3;
            println!("{} moves, {} refusals", plan.moves.len(), plan.refusals.len());
            took
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let (median, longest) = (times[ROUNDS / 2], times[ROUNDS - 1]);
    println!(
        "a decision for {HOSTS} hosts and {} VMs takes {median:.0} ms, at most {longest:.0}",
        HOSTS * VMS
    );
}

fn days() {
    for strategy in [Strategy::Both, Strategy::Migrate, Strategy::Swap] {
        let setting = Setting {
            hosts: 1000,
            vms_per_host: 20,
            memory: Bytes::mib(16 * 1024),
            promised: Bytes::mib(1024),
            given: Bytes::mib(640),
            overloaded: 0.05,
            pages_per_s: 2_000,
            overload: OverloadSpec::default(),
            learns: true,
            misbehaving: 0.05,
            calm_s: 600,
            strategy,
            excess: Excess::Idle,
        };
        let begun = Instant::now();
        let mut pool = Pool::new(1, setting);
        let found = pool.run(HOURS);
        pool.check().expect("no host holds more than it has");
        let share = |s: u64| s as f64 * 100.0 / found.overloaded_s.max(1) as f64;
        println!(
            "{strategy:?}: of {} VM hours of overload {:.1} % short and {:.1} % long in other \
             hosts' memory, {:.1} % on disks; {} moves, {} failed; {} sent, at most {} swapped; \
             {HOURS} hours took {:.1} s",
            found.overloaded_s / 3600,
            share(found.short_s),
            share(found.long_s),
            share(found.disk_s),
            found.moves,
            found.failed,
            found.traffic,
            found.most_swapped,
            begun.elapsed().as_secs_f64(),
        );
    }
}
