//! `coop-swap`: a guest that swaps to a disk, to a local file, and to a disk with a repository
//! that keeps its pages in memory.
//!
//! The disk answers one read in five milliseconds, like one with moving heads. The same disk is
//! behind the repository: all pages are written to it, too, so the guest loses nothing when the
//! repository dies. The three ways differ in the source of reads.

use super::prelude::*;
use crate::remote_swap::{Disk, RemoteSwap, near_share};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "coop-swap",
    summary: "a guest that swaps, on a disk, on a local file, and into another host's memory",
    measures: &[&[file!()], measured::DISKS, measured::ARMS],
    claims: claims! {
        "network_vs_disk" >= 2.0 => "ratio",
            "A guest that swaps is faster on another process' memory than on a disk that reads \
             in 5 ms (a unix socket between them)";
        "near" >= 0.9 => "ratio", "Its reads come from there";
    },
    run,
};

const GUEST: &str = "swaps";
const MEMORY: Bytes = Bytes::mib(96);
const WORKLOAD: &str = "random-array --mb 128";
const SWAP: Bytes = Bytes::mib(256);
/// The time of a read on a disk with moving heads, in microseconds.
const READ_US: u32 = 5_000;
const SETTLE: Duration = Duration::from_secs(5);
const MEASURE: Duration = Duration::from_secs(25);

const PLAIN: Disk = Disk { size: SWAP, read_delay_us: 0, lent: Bytes::ZERO, cache: false };
const NETWORK: &str = "network_memory";
const WAYS: [(&str, Disk); 3] = [
    ("disk", Disk { read_delay_us: READ_US, ..PLAIN }),
    ("file", PLAIN),
    (NETWORK, Disk { read_delay_us: READ_US, lent: SWAP, ..PLAIN }),
];

/// Measurements of one way.
struct SwapFigures {
    /// Accesses per second, second by second.
    rates: Vec<f64>,
    read_us_median: u64,
    /// Share of the reads that a repository answered.
    near: f64,
    forged: u64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let seen = Arms::once(context, &WAYS, |_, disk| course(context, *disk))?;
    let lines = seen.iter().map(|(name, seen)| {
        Line::new(name, (0_u32..).map(f64::from).zip(seen.rates.iter().copied()))
    });
    let chart = Chart::linear("accesses per second", "seconds", lines);
    let mut figures = figures(context, &seen);
    let page =
        Page::of("Accesses of a guest that lacks 32 of 128 MiB", Chart { is_log: true, ..chart });
    page.write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn course(context: &Context, disk: Disk) -> Result<SwapFigures, LabError> {
    let swap = RemoteSwap::start(&context.dir.with_extension("swap"), GUEST, disk)?;
    let guest = context.guest(GUEST, "swapping", MEMORY, WORKLOAD);
    let mut lab = context.start([swap.given_to(guest)])?;
    progress::wait_until_working(&lab)?;
    interrupt::sleep(SETTLE)?;
    let before = swap.counts()?;
    let mut rates = Vec::new();
    let (begun, mut last) = (Instant::now(), sample(&lab)?);
    while begun.elapsed() < MEASURE {
        interrupt::sleep(Duration::from_secs(1))?;
        let now = sample(&lab)?;
        rates.push(((now.1 - last.1) / (now.0 - last.0).as_secs_f64()).max(1.0));
        last = now;
    }
    let status = swap.counts()?;
    lab.stop()?;
    swap.end()?;
    let near = near_share(&before, &status);
    let forged = status.repositories.unwrap_or_default().forged;
    let read_us_median = status.read_us_median;
    Ok(SwapFigures { rates, read_us_median, near, forged })
}

/// The time, and the guest's operations until then.
fn sample(lab: &Lab) -> Result<(Instant, f64), LabError> {
    Ok((Instant::now(), lab.machine(GUEST)?.reported("ops")))
}

fn figures(context: &Context, all: &Arms<SwapFigures>) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let rate = |way: &str| all.number(way, |seen| median(seen.rates.clone()));
    let note = "accesses per second, medians";
    figures.tell("network_vs_disk", rate(NETWORK) / rate("disk"), "ratio", note);
    let note = "the same, to a file on this machine's own disk";
    figures.tell("network_vs_file", rate(NETWORK) / rate("file"), "ratio", note);
    for (name, seen) in all.iter() {
        let note = "accesses of the guest, median second";
        figures.tell(&format!("rate_{name}"), rate(name), "1/s", note);
        let us = seen.read_us_median as f64;
        let note = "half of the disk's reads took less, to a power of two";
        figures.tell(&format!("read_us_{name}"), us, "us", note);
    }
    let near = all.number(NETWORK, |seen| seen.near);
    figures.tell("near", near, "ratio", "of the reads: answered by the repository");
    let forged = all.number(NETWORK, |seen| seen.forged as f64);
    let note = "pages that were not what had been written";
    figures.check("forged", forged, "count", note, Target::Equals(0.0));
    figures
}
