//! Identical pages end to end: real guests of two groups, the daemon and its workers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;

use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, assert_unshared, text};
use sys::memory_of::Counters;
use sys::pool_maps::{self, FileId};

const VMS: [(&str, &str); 4] = [("a1", "shop"), ("a2", "shop"), ("b1", "cafe"), ("b2", "cafe")];
/// The saving of each VM: part of the 40 MiB that are identical until they are rewritten, and of
/// the kernels' common pages.
const ENOUGH: Bytes = Bytes::mib(12);
/// Maximum difference between the ledger's count and the kernel's. QEMUs' own memory is measured
/// some seconds before, and the guests rewrite pages between two readings. A count without the
/// savings differs by [`ENOUGH`] for each VM.
const BLUR: Bytes = Bytes::mib(8);

/// Guests with the same seed, so their data is identical until they rewrite it.
fn guests() -> Vec<MachineSpec> {
    let guest = |(name, group)| MachineSpec {
        shim: true,
        ..MachineSpec::new(name, group, MAX, MAX, "verify --mb 40")
    };
    VMS.into_iter().map(guest).collect()
}

fn dedup(stage: &Stage, vm: &str, field: &str) -> Bytes {
    Bytes(stage.vm(vm)["dedup"][field].as_u64().unwrap_or(0))
}

fn until_merged(stage: &Stage, vms: &[&str]) {
    stage.until("the VMs share pages", |stage| {
        vms.iter().all(|vm| dedup(stage, vm, "saved_bytes") > ENOUGH)
    });
}

fn pid(stage: &Stage, vm: &str) -> u32 {
    stage.guest(vm).process().pid
}

fn pools(stage: &Stage, vm: &str) -> BTreeSet<FileId> {
    pool_maps::mappings(pid(stage, vm)).unwrap().iter().map(|mapping| mapping.file).collect()
}

fn shares(stage: &Stage, vm: &str, pool: FileId) -> usize {
    pool_maps::sharers(pid(stage, vm), pool, &[pool_maps::EVERYWHERE]).unwrap().len()
}

/// All guests' private memory by the kernel's count: private pages of mappings that QEMU keeps
/// from its children, as it keeps guest RAM.
fn private(stage: &Stage, vms: &[&str]) -> Bytes {
    let of = |vm: &&str| {
        let smaps = format!("/proc/{}/smaps", pid(stage, vm));
        let (mut sum, mut newest) = (0, 0);
        for line in std::fs::read_to_string(smaps).unwrap().lines() {
            if let Some(kib) = line.strip_prefix("Anonymous:") {
                newest = kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            } else if line.starts_with("VmFlags:") && line.contains(" dc") {
                sum += newest;
            }
        }
        Bytes::kib(sum)
    };
    vms.iter().map(of).sum()
}

fn page_tables(stage: &Stage, vms: &[&str]) -> Bytes {
    vms.iter().map(|vm| Counters::of(pid(stage, vm)).unwrap().page_tables).sum()
}

fn used(stage: &Stage, vms: &[&str]) -> Bytes {
    vms.iter().map(|vm| Bytes(stage.vm(vm)["used_bytes"].as_u64().unwrap())).sum()
}

#[test]
fn groups_share_among_themselves_and_never_with_each_other_whoever_dies() {
    let Some(mut stage) = Stage::start(Mode::Observe, &guests()) else { return };
    fleet::wait_until_working(&stage.lab).unwrap();
    let all = VMS.map(|(vm, _)| vm);
    stage.until("the memory is counted", |stage| {
        all.iter().all(|vm| stage.vm(vm)["used_bytes"].as_u64().is_some())
    });
    stage.configure(&[("dedup = \"off\"", "dedup = 200")]);
    until_merged(&stage, &all);

    // The ledger's count equals the kernel's: the guests' private pages, and each pool once.
    stage.until("used is counted truly", |stage| {
        let pool =
            |group: &str| stage.json(&["group", group])["dedup"]["pool_bytes"].as_u64().unwrap();
        let pools = Bytes(pool("shop") + pool("cafe"));
        let expected = private(stage, &all).plus(page_tables(stage, &all)).plus(pools);
        used(stage, &all).0.abs_diff(expected.0) < BLUR.0
    });

    // Each group has its own pool.
    let own: Vec<_> = all.iter().map(|vm| pools(&stage, vm)).collect();
    assert!(own.iter().all(|pools| pools.len() == 1), "{own:?}");
    assert!(own[0] == own[1] && own[2] == own[3] && own[0] != own[2], "{own:?}");
    let (shop, cafe) = (*own[0].first().unwrap(), *own[2].first().unwrap());

    // A new worker takes over the pool of a killed one, also with a new daemon.
    stage.kill_worker("shop");
    until_merged(&stage, &all);
    assert_eq!(pools(&stage, "a1"), BTreeSet::from([shop]));
    stage.daemon.kill(&mut stage.lab).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    until_merged(&stage, &all);
    assert_eq!(pools(&stage, "a1"), BTreeSet::from([shop]));
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);

    // A VM that changes its group gets copies of all its shared pages before it shares any with
    // the new group.
    stage.configure(&[
        ("[\"a1\", \"a2\"]", "[\"a1\"]"),
        ("[\"b1\", \"b2\"]", "[\"a2\", \"b1\", \"b2\"]"),
    ]);
    stage.until("a2 has left its group", |stage| {
        shares(stage, "a2", shop) == 0 && pools(stage, "a2").contains(&cafe)
    });
    assert!(shares(&stage, "a1", cafe) == 0 && shares(&stage, "b1", shop) == 0);

    // After the release nothing is shared, and the pools are empty.
    let said = stage.overbook(&["release"]);
    assert!(text(&said).contains("that it shared are its own"), "{}", text(&said));
    for vm in all {
        let left = (shares(&stage, vm, shop), shares(&stage, vm, cafe));
        assert_eq!(left, (0, 0), "{vm}: {}", text(&said));
    }
    for vm in all {
        assert_unshared(pid(&stage, vm));
    }
    stage.until("the pools are empty", |stage| {
        let bytes = |group| stage.json(&["group", group])["dedup"]["pool_bytes"].as_u64();
        ["shop", "cafe"].into_iter().all(|group| bytes(group).unwrap_or(0) == 0)
    });
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
}
