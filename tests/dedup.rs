//! Identical pages of real guests are merged, written to and unshared, and no byte is lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::Path;
use std::time::{Duration, Instant};

use lab::accel::Choice;
use lab::ksm::{self, Ksm};
use lab::merger::Merger;
use lab::{Lab, LabError, MachineSpec, Provisions, fleet};
use model::{Bytes, Dedup};
use overbook_tests::{MAX, skip, take_turn};
use pages::dedup::KnownPages;
use pages::offline::{Builder, Sampling, TableRef};
use sys::pool_file::PoolFile;
use sys::pool_maps;
use sys::process::Signal;
use worker::{SLOTS, unshare};

const LIMIT: Duration = Duration::from_secs(180);
/// Part of the 40 MiB that are identical until they are rewritten, and of the kernels' common
/// pages.
const ENOUGH: u64 = 20 << 20;

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A guest; all have the same seed, so their data is identical until they rewrite it. They
/// rewrite an eighth of 16 MB per second, so that a page is merged before it is rewritten, and
/// rewritten soon after.
fn guest(name: &str) -> MachineSpec {
    let work = "verify --mb 40 --rate 16";
    MachineSpec { shim: true, ..MachineSpec::new(name, "shop", MAX, MAX, work) }
}

/// Both guests at work, and their processes.
fn two_guests(dir: &Path) -> (Lab, Vec<u32>) {
    start(dir, &[guest("one"), guest("two")], fleet::wait_until_working)
}

fn start(
    dir: &Path,
    guests: &[MachineSpec],
    ready: impl FnOnce(&Lab) -> Result<(), LabError>,
) -> (Lab, Vec<u32>) {
    let provisions = Provisions::provide(Choice::Auto).unwrap();
    let lab = Lab::start(&dir.join("lab"), &provisions, guests).unwrap();
    ready(&lab).unwrap();
    let pids = lab.machines().iter().map(|machine| machine.process().pid).collect();
    (lab, pids)
}

#[test]
fn what_is_the_same_is_kept_once_what_is_written_is_the_guests_own_and_nothing_is_left_behind() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let (mut lab, pids) = two_guests(dir.path());

    let merger = Merger::start(&pids, None, Some(0.01)).unwrap();
    until("pages are merged", || merger.pool_bytes() > ENOUGH);
    assert_eq!(fleet::bad_bytes(&lab).unwrap(), 0);
    // The guests rewrite merged pages, and the engine scans them again.
    let has_broken = |reading: &Dedup| reading.broken > Bytes::mib(1);
    until("merged pages are written to", || merger.readings().iter().all(has_broken));
    let readings = merger.stop();
    assert_eq!(readings.len(), 2);
    for reading in &readings {
        assert!(reading.merged > Bytes(ENOUGH), "{reading:?}");
        assert!(reading.dropped > Bytes::ZERO && reading.shared <= reading.merged, "{reading:?}");
    }

    // The next engine takes over the merged pages …
    let kept: Bytes = readings.iter().map(|reading| reading.shared).sum();
    let merger = Merger::start(&pids, Some(1), None).unwrap();
    let shared = || merger.readings().iter().map(|reading| reading.shared).sum::<Bytes>();
    until("it is taken over", || shared() > kept.share(1, 2));
    assert!(merger.pool_bytes() > 0);
    let readings = merger.stop();
    let taken: Bytes = readings.iter().map(|reading| reading.shared).sum();
    assert!(taken <= kept, "{taken} of {kept}");
    assert!(readings.iter().all(|reading| reading.merged < reading.shared), "{readings:?}");

    let processes: Vec<_> = lab.machines().iter().map(lab::Machine::process).collect();
    // … until they are unshared. Then nothing is shared, and the pool is empty.
    for copied in unshare(&processes).into_values() {
        let copied = copied.unwrap();
        assert!(copied > kept.share(1, 8) && copied <= kept, "{copied} of {kept}");
    }
    for pid in pids.iter().copied() {
        // The pool's file is still mapped where the guest had written.
        for mapping in pool_maps::mappings(pid).unwrap().into_iter().take(1) {
            assert_eq!(
                pool_maps::sharers(pid, mapping.file, &[pool_maps::EVERYWHERE]).unwrap(),
                []
            );
            assert_eq!(PoolFile::adopt(pid, &mapping, SLOTS).unwrap().bytes(), Ok(0));
        }
    }
    assert_eq!(fleet::bad_bytes(&lab).unwrap(), 0);

    // The copied pages are merged again.
    let merger = Merger::start(&pids, None, None).unwrap();
    until("pages are merged again", || merger.pool_bytes() > ENOUGH);
    assert_eq!(fleet::bad_bytes(&lab).unwrap(), 0);
    for machine in lab.machines() {
        machine.process().signal(Signal::KILL).unwrap();
    }
    until("guests that have ended leave nothing in the pool", || merger.pool_bytes() == 0);
    drop(merger);
    // The lab reports that its guests are dead.
    let _ = lab.stop();
}

/// Waits until more than `passes` passes went over both guests.
fn until_seen(merger: &Merger, passes: u64) {
    let is_seen = |reading: &Dedup| reading.passes > passes;
    until("everything was looked at", || {
        merger.readings().iter().filter(|reading| is_seen(reading)).count() == 2
    });
}

/// Two guests that have the same 60 MB and no longer touch them, and their processes.
fn two_cold_guests(dir: &Path) -> (Lab, Vec<u32>) {
    let cold = |name: &str, seed| MachineSpec {
        shim: true,
        seed,
        ..MachineSpec::new(name, "shop", MAX, MAX, "copies --same-mb 60 --own-mb 4 --rest")
    };
    start(dir, &[cold("one", 1), cold("two", 2)], |lab| fleet::wait_until_filled(lab, 64))
}

#[test]
fn what_nobody_touches_is_merged_although_tracking_has_put_it_out_of_reach() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let (mut lab, pids) = two_cold_guests(dir.path());
    // At this low rate, all cold pages are protected by tracking long before the scan gets to them.
    let merger = Merger::start(&pids, Some(1), Some(0.1)).unwrap();
    std::thread::sleep(Duration::from_secs(8));
    merger.set_rate(500);
    until("what is cold is merged", || merger.pool_bytes() > 50 << 20);
    drop(merger);
    lab.stop().unwrap();
}

#[test]
fn what_a_table_names_is_shared_before_all_else_was_looked_at() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let (mut lab, pids) = two_cold_guests(dir.path());
    // Pages as in a memory dump of the first guest.
    let seen = match lab::alike::pages(&pids[..1]) {
        Ok(seen) => seen,
        Err(error) => return skip(&error.to_string()),
    };
    let mut builder = Builder::new(Sampling::default());
    for page in &seen {
        builder.add(&page.content, false).unwrap();
    }
    let bytes = builder.finish().to_bytes("one").unwrap();
    let known = KnownPages::of(&TableRef::parse(&bytes).unwrap());
    let merger = Merger::start_knowing(&pids, Some(4), known).unwrap();
    until("what the table names is merged", || merger.pool_bytes() > 50 << 20);
    let readings = merger.stop();
    assert!(readings.iter().all(|reading| reading.passes == 0), "{readings:?}");
    lab.stop().unwrap();
}

#[test]
fn what_the_kernel_has_merged_stays_so_while_it_is_looked_at() {
    let Some(_turn) = take_turn() else { return };
    let kernels = sys::ksm::Ksm::of_host();
    if !kernels.settings().is_ok_and(|settings| kernels.check_writable(&settings).is_ok()) {
        return skip("needs root, and a kernel with KSM");
    }
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let (mut lab, pids) = two_cold_guests(dir.path());
    let ksm = Ksm::start(ksm::FLAT_OUT).unwrap();
    until("the kernel merges", || Ksm::saved_mib().unwrap() > 50.0);
    ksm.stop().unwrap();
    let before = Ksm::saved_mib().unwrap();
    let merger = Merger::start(&pids, None, None).unwrap();
    until_seen(&merger, 2);
    drop(merger);
    let after = Ksm::saved_mib().unwrap();
    assert!(after > before * 0.95, "{after} of {before}");
    drop(ksm);
    lab.stop().unwrap();
}

#[test]
fn where_most_hashes_collide_no_guest_finds_a_wrong_byte() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let (mut lab, pids) = two_guests(dir.path());
    let merger = Merger::start_colliding(&pids).unwrap();
    until("what is the same is merged", || merger.pool_bytes() > 0);
    until_seen(&merger, 3);
    drop(merger);
    assert_eq!(fleet::bad_bytes(&lab).unwrap(), 0);
    lab.stop().unwrap();
}
