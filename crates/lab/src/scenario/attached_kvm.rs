//! `attached-kvm`: a guest under KVM without code loaded into its QEMU, tracked and paged from
//! outside.
//!
//! The scenario is made for the virtual host. One guest at a time verifies its memory in a memory
//! cgroup of its own, above a swap device in compressed memory: first in small pages, then in huge
//! ones. The worker's own code tracks it, has half of its memory paged out, and reads it back. The
//! scenario needs root.
//!
//! The guest sweeps through the memory that it verifies. Its working set is that size, plus the
//! memory that its kernel touches.

use sys::outside::private_pieces;

use super::prelude::*;
use crate::accel::Accel;
use crate::meb::modes;
use crate::meb::watch::{Watch, wait_until_tracked};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "attached-kvm",
    summary: "a guest under KVM is tracked and paged from outside, and no byte is lost",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SYS],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "Under KVM with nested paging no byte is lost when half of a guest is paged out and \
             read back";
        "huge_bad_bytes" == 0.0 => "B", "A guest in huge pages loses no byte either";
        "huge_kept" >= 0.9 => "ratio", "A guest in huge pages keeps them";
        "working_set" >= 0.9 => "ratio", "The working set is right under KVM";
    },
    run,
};

const MEMORY: Bytes = Bytes::mib(160);
const SWAP: Bytes = Bytes::mib(256);
const VERIFIED_MB: u32 = 64;
const WORKLOAD: &str = "verify --mb 64 --rate 16";
/// Time for tracking to learn the working set.
const LEARNS: Duration = Duration::from_secs(25);
const OUT_LIMIT: Duration = Duration::from_secs(60);
const EVERY: Duration = Duration::from_secs(1);
/// Less than the half that is to be paged out.
const ENOUGH: Bytes = Bytes::mib(24);

struct KvmFigures {
    working_set: Bytes,
    huge_kept: f64,
    vcpu_share: f64,
    out: Bytes,
    left_out: Bytes,
    bad_bytes: u64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let is_kvm = f64::from(u8::from(context.provisions.accel == Accel::Kvm));
    figures.tell("kvm", is_kvm, "bool", "the guest runs under KVM");
    let _swap = Zram::new(SWAP)?;
    for (prefix, small_pages) in [("", true), ("huge_", false)] {
        let seen = look(context, small_pages)?;
        let named = |name: &str| format!("{prefix}{name}");
        let ratio = seen.working_set.as_mib() / f64::from(VERIFIED_MB);
        // Of a guest in huge pages, tracking samples only one block in sixteen: that is no claim.
        let note = "working set, of what the guest verifies";
        figures.tell(&named("working_set"), ratio, "ratio", note);
        figures.tell(&named("cost"), seen.vcpu_share, "vCPU", "prober and touches");
        if !small_pages {
            let note = "of its huge pages, after it was tracked";
            figures.tell(&named("kept"), seen.huge_kept, "ratio", note);
        }
        let note = "of QEMU in swap when half of its memory was to be";
        let enough = Target::AtLeast(ENOUGH.as_mib());
        figures.check(&named("paged_out_mib"), seen.out.as_mib(), "MiB", note, enough);
        let note = "still in swap after everything was read back";
        let (left, most) = (seen.left_out.as_mib(), Target::AtMost(4.0));
        figures.check(&named("left_out_mib"), left, "MiB", note, most);
        let note = "wrong bytes in the guest's memory";
        figures.tell(&named("bad_bytes"), seen.bad_bytes as f64, "B", note);
    }
    Ok(figures)
}

fn look(context: &Context, small_pages: bool) -> Result<KvmFigures, LabError> {
    let group = MemoryGroup::new(SCENARIO.name)?;
    let spec = MachineSpec {
        small_pages,
        ..context.guest("guest", "attached", MEMORY, WORKLOAD).in_cgroup(group.dir())
    };
    let mut lab = context.start([spec])?;
    fleet::wait_until_filled(&lab, VERIFIED_MB)?;
    let machine = lab.machine("guest")?;
    let pid = machine.process().pid;
    let huge_before = huge(machine)?;
    let watch = Watch::attached(pid, MEMORY, modes::shipped(), &[], EVERY)?;
    wait_until_tracked(&lab, std::slice::from_ref(&watch))?;
    interrupt::sleep(LEARNS)?;
    let latest = watch.latest();
    let tracking = latest.as_ref().map(|seen| &seen.tracking);
    let working_set = tracking.and_then(|it| it.working_set).unwrap_or_default();
    let vcpu_share = tracking.map_or(f64::NAN, |it| it.cost.vcpu_share);
    let huge_kept = huge(machine)?.as_mib() / huge_before.as_mib();
    let Overhead { own, guest, .. } = machine.overhead()?;
    watch.hold(guest.percent(50), own);
    let swapped = || Counters::of(pid).map(|now| now.swapped);
    let most_of_half = guest.percent(40);
    lab.wait_for(
        "half of the guest to be paged out",
        OUT_LIMIT,
        |_| Ok(swapped()? > most_of_half),
    )?;
    let out = swapped()?;
    watch.stop()?;
    let left_out = swapped()?;
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(KvmFigures { working_set, huge_kept, vcpu_share, out, left_out, bad_bytes })
}

/// The guest's memory in huge pages.
fn huge(machine: &Machine) -> Result<Bytes, LabError> {
    let pieces = private_pieces(machine.process().pid)?;
    Ok(pieces.iter().map(|piece| piece.huge).sum())
}
