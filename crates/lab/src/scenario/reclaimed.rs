//! `reclaimed`: the kernel pages out half of a guest's memory by request, and not a byte is lost.
//!
//! The smallest experiment with the host's own paging: one guest verifies its memory in a memory
//! cgroup, with a swap device in compressed memory. It runs once with a stock QEMU, once with a
//! managed one. It needs root.

use super::prelude::*;
use crate::accel::Accel;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "reclaimed",
    summary: "the kernel pages out half of a guest's memory by request, and no byte is lost",
    measures: &[&[file!()], measured::SHIM, measured::SYS],
    claims: &[],
    run,
};

const MEMORY: Bytes = Bytes::mib(160);
const SWAP: Bytes = Bytes::mib(256);
/// The guest verifies this much, slowly enough that most of it is cold.
const VERIFIED_MB: u32 = 64;
const WORKLOAD: &str = "verify --mb 64 --rate 16";
/// Half of the verified memory; pages that the kernel finds elsewhere count as well.
const ENOUGH_MIB: f64 = 32.0;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let is_kvm = f64::from(u8::from(context.provisions.accel == Accel::Kvm));
    figures.tell("kvm", is_kvm, "bool", "the guest runs under KVM");
    let _swap = Zram::new(SWAP)?;
    for (prefix, shim) in [("", false), ("managed_", true)] {
        let (out, bad_bytes) = page_out(context, shim)?;
        let note = "of QEMU in swap after one request for half";
        let figure = Figure::new(out.as_mib(), "MiB", note).target(Target::AtLeast(ENOUGH_MIB));
        figures.add(&format!("{prefix}paged_out_mib"), figure);
        let figure = Figure::new(bad_bytes as f64, "B", "wrong bytes in the guest's memory");
        figures.add(&format!("{prefix}bad_bytes"), figure.target(Target::Equals(0.0)));
    }
    Ok(figures)
}

/// Pages out half of a guest; returns the memory in swap, and the number of wrong bytes then.
fn page_out(context: &Context, shim: bool) -> Result<(Bytes, u64), LabError> {
    let group = MemoryGroup::new(SCENARIO.name)?;
    let spec = context
        .guest("guest", "reclaimed", MEMORY, WORKLOAD)
        .with_shim(shim)
        .in_cgroup(group.dir());
    let mut lab = context.start([spec])?;
    fleet::wait_until_filled(&lab, VERIFIED_MB)?;
    group.reclaim(Bytes(group.usage()?.0 / 2))?;
    let pid = lab.machine("guest")?.process().pid;
    let out = Counters::of(pid)?.swapped;
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok((out, bad_bytes))
}
