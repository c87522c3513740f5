//! `dedup-soak`: merging, breaking, unsharing, tracking and ballooning at once, and not a byte is
//! lost.
//!
//! Two guests of the same seed verify memory and a disk that QEMU reads past the host's page
//! cache. Their contents are the same until they rewrite them, so pages merge and break all the
//! time. A third guest sorts, and a fourth takes memory and gives it back. [`Soak`] drives the
//! group's worker, and balloons go up and down. At the end all is unshared, and nothing may be
//! left.

use super::prelude::*;
use crate::soak::Soak;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-soak",
    summary: "half an hour of merging, breaking, unsharing, tracking and ballooning; no byte is lost, nothing is left",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "Merging, breaking, unsharing, tracking and ballooning lose no byte, workers killed \
             at random (30 min)";
        "left_shared_pages" == 0.0 => "pages", "No page is shared once all is unshared";
        "left_in_pools" == 0.0 => "B", "No byte is left in the pools then";
        "left_mappings" == 0.0 => "count", "No mapping of a pool is left then";
        "left_pieces" <= 256.0 => "count", "Writes leave few pieces of mappings in four VMs";
    },
    run,
};

const USUAL_MINUTES: u32 = 30;
const MEMORY: Bytes = Bytes::mib(224);
const LEAST_MEMORY: Bytes = Bytes::mib(176);
const DISK: Bytes = Bytes::mib(64);
const DISK_IOPS: u32 = 400;
/// The longest that a guest may stand still.
const HANG_MS: f64 = 10_000.0;

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_MINUTES);
    let guest =
        |name: &str, workload: &str| context.guest(name, "soak", MEMORY, workload).with_shim(true);
    let witness = |name: &str, native: bool| {
        let guest = guest(name, "verify --mb 64 --disk /dev/data --disk-mb 64");
        guest.with_direct_disk(DISK, native, DISK_IOPS)
    };
    let specs = [
        witness("native", true),
        witness("threads", false),
        guest("sort", "sort --mb 48"),
        guest("memhog", "memhog --mb 80 --hold 3 --rest 2 --rate 60"),
    ];
    let mut lab = context.start(specs)?;
    // The sorting guest ends while the others go on.
    fleet::wait_until_working(&lab)?;
    let mut longest_gap_ms = f64::NAN;
    let mut soak = Soak::new(&lab, "soak", None, context.seed)?;
    soak.run(length, |machine, random| {
        longest_gap_ms = longest_gap_ms.max(machine.told("gap_ms"));
        machine.set_balloon(Bytes(random.between(LEAST_MEMORY.0, MEMORY.0)))
    })?;
    for machine in lab.machines() {
        machine.set_balloon(MEMORY)?;
    }
    let mut figures = context.figures(SCENARIO.name, 1);
    soak.end(&mut figures)?;
    let note = "wrong bytes in memory and disks of the guests";
    figures.tell("bad_bytes", fleet::bad_bytes(&lab)? as f64, "B", note);
    let note = "longest that a guest's work stood still";
    figures.check("stall_ms_max", longest_gap_ms, "ms", note, Target::AtMost(HANG_MS));
    lab.stop()?;
    Ok(figures)
}
