//! `attached-large`: a guest of 16 GiB without code loaded into its QEMU. The scenario measures
//! the time until its working set is known, and the speed at which most of its memory is paged out
//! and read back.
//!
//! The guest fills 14 GiB, frees them, and touches 2 GiB from then on. It does not report freed
//! memory, so the host keeps all of it. The worker's own code tracks the guest, has all but 4 GiB
//! paged out to compressed memory, and reads everything back at its release. The memory is in huge
//! pages.
//!
//! The scenario needs root, and 20 GiB of the host's memory.

use super::prelude::*;
use crate::meb::modes;
use crate::meb::watch::{Watch, wait_until_tracked};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "attached-large",
    summary: "a guest of 16 GiB, from outside: its working set, and its memory out and back",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SYS],
    claims: claims! {
        "release_s" <= 5.0 => "s", "Paged-out memory of a guest of 16 GiB comes back soon";
        "off_20s" <= 0.1 => "ratio", "Its working set of 2 GiB is known after 20 s";
        "cost" <= 0.01 => "vCPU", "It costs no more than the budget";
    },
    run,
};

const MEMORY: Bytes = Bytes::mib(16 << 10);
const SWAP: Bytes = Bytes::mib(14 << 10);
const HOT: Bytes = Bytes::mib(2 << 10);
/// Less memory than the guest has touched.
const FILLED: Bytes = Bytes::mib(13 << 10);
/// The guest has 14 GiB for one second after filling them.
const WORKLOAD: &str = "random-array --phases 14000:1+2048:86400";
const KEPT: Bytes = Bytes::mib(4 << 10);
/// Tolerance, since QEMU's own memory grows a little and the guest's kernel works.
const SLACK: Bytes = Bytes::mib(64);
const FILL_LIMIT: Duration = Duration::from_secs(240);
const KNOWN_BY: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_secs(60);
/// At least 30 MiB a second, for 12 GiB.
const OUT_LIMIT: Duration = Duration::from_secs(400);
const EVERY: Duration = Duration::from_secs(1);

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let _zram = Zram::new(SWAP)?;
    let spec = MachineSpec {
        reporting_order: None,
        ..context.guest("large", "attached", MEMORY, WORKLOAD)
    };
    let mut lab = context.start([spec])?;
    context.say("14 GiB are filled, then 2 GiB touched ...");
    let pid = lab.machine("large")?.process().pid;
    let counters = || Counters::of(pid);
    lab.wait_for(
        "the guest to have filled its memory, and to be back at 2 GiB",
        FILL_LIMIT,
        |lab| {
            let mb = lab.machine("large")?.reported("mb");
            Ok(counters()?.anonymous > FILLED && (mb - HOT.as_mib()).abs() < 1.0)
        },
    )?;

    let began = Instant::now();
    let watch = Watch::attached(pid, MEMORY, modes::shipped(), &[], EVERY)?;
    wait_until_tracked(&lab, std::slice::from_ref(&watch))?;
    let (mut at, mut after_20_s, mut readings) = (f64::NAN, f64::NAN, Vec::new());
    while began.elapsed() < LOOK {
        interrupt::sleep(EVERY)?;
        let Some(seen) = watch.latest() else { continue };
        let ratio = seen.tracking.working_set.unwrap_or_default().as_mib() / HOT.as_mib();
        if at.is_nan() && (0.9..=1.1).contains(&ratio) {
            at = began.elapsed().as_secs_f64();
        }
        if began.elapsed() >= KNOWN_BY {
            after_20_s = if after_20_s.is_nan() { ratio } else { after_20_s };
            readings.push(ratio);
        }
    }
    context.say(&format!("  {after_20_s:.3} of 2 GiB after 20 s; within 10 % after {at:.1} s"));
    let cost = watch.latest().map_or(f64::NAN, |seen| seen.tracking.cost.vcpu_share);
    let cpu = watch.cpu().as_secs_f64() / began.elapsed().as_secs_f64();
    let off = |ratio: f64| (ratio - 1.0).abs();
    figures.tell("known_s", at, "s", "until the working set is first within 10 %");
    figures.tell("off_20s", off(after_20_s), "ratio", "how far the working set is off after 20 s");
    let worst = readings.iter().copied().map(off).largest();
    figures.tell("off_worst", worst, "ratio", "the same, at worst until 60 s");
    figures.tell("cost", cost, "vCPU", "prober and touches");
    figures.tell("prober_cpu", cpu, "CPU", "the prober's own part");

    context.say("all but 4 GiB are paged out ...");
    let overhead = lab.machines()[0].overhead()?;
    let began = Instant::now();
    watch.hold(KEPT, overhead.own);
    // Resident memory is the criterion: from Linux 6.12 on, a split of a huge page drops its pages
    // of zeros, so they never reach swap.
    let most = KEPT.plus(overhead.own).plus(SLACK);
    lab.wait_for("all but 4 GiB to be paged out", OUT_LIMIT, |_| Ok(counters()?.anonymous < most))?;
    let out = counters()?.swapped;
    let out_gib_s = out.as_mib() / 1024.0 / began.elapsed().as_secs_f64();
    figures.tell("out_mib", out.as_mib(), "MiB", "paged out");
    figures.tell("out_gib_s", out_gib_s, "GiB/s", "paged out, in the mean");
    interrupt::sleep(KNOWN_BY)?;

    context.say("all is read back ...");
    let out = counters()?.swapped;
    let began = Instant::now();
    watch.stop()?;
    let took = began.elapsed().as_secs_f64();
    figures.tell("release_s", took, "s", format!("until {out} are back"));
    let back = out.minus(counters()?.swapped).as_mib() / 1024.0;
    figures.check("recall_gib_s", back / took, "GiB/s", "read back", Target::AtLeast(1.0));
    figures.tell("left_out_mib", counters()?.swapped.as_mib(), "MiB", "not read back");
    lab.stop()?;
    Ok(figures)
}
