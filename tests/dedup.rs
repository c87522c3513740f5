//! Identical pages of real guests are merged, written to and unshared, and no byte is lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use lab::accel::Choice;
use lab::ksm::{self, Ksm};
use lab::merger::Merger;
use lab::{Lab, LabError, MachineSpec, Provisions, fleet};
use model::{Bytes, Dedup};
use overbook_tests::{MAX, Requirement, assert_unshared, requires, take_turn};
use pages::dedup::KnownPages;
use pages::offline::{Builder, Sampling, TableRef};
use sys::memory_map::Range;
use sys::memory_of::staged;
use sys::pool_maps::{self, FileId, Mapping};
use sys::process::Signal;
use worker::unshare;

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
    until_both(&merger, "merged pages are written to", |it| it.broken > Bytes::mib(1));
    let readings = both(&merger.stop());
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
    let readings = both(&merger.stop());
    let taken: Bytes = readings.iter().map(|reading| reading.shared).sum();
    assert!(taken <= kept, "{taken} of {kept}");
    assert!(readings.iter().all(|reading| reading.merged < reading.shared), "{readings:?}");

    let processes: Vec<_> = lab.machines().iter().map(lab::Machine::process).collect();
    let mapped = pids.iter().flat_map(|pid| pool_maps::mappings(*pid).unwrap());
    let files: BTreeSet<FileId> = mapped.map(|mapping| mapping.file).collect();
    assert_eq!(files.len(), 1, "not one pool: {files:?}");
    let file = *files.first().unwrap();
    // A descriptor that could write would keep the next worker from taking the pool over. A write
    // of the guest may have split a mapping since it was listed.
    let opened = |Mapping { range: Range { start, len }, .. }| {
        File::open(format!("/proc/{}/map_files/{start:x}-{:x}", pids[0], start + len)).ok()
    };
    let pool = pool_maps::mappings(pids[0]).unwrap().into_iter().find_map(opened).unwrap();
    let pool_bytes = || pool.metadata().unwrap().blocks() * 512;
    assert!(pool_bytes() > 0);
    // … until they are unshared. Then nothing is shared, and the pool is empty.
    let unshared = unshare(&processes);
    assert_eq!(unshared.len(), 2, "{unshared:?}");
    for copied in unshared.into_values() {
        let copied = copied.unwrap();
        assert!(copied > kept.share(1, 8) && copied <= kept, "{copied} of {kept}");
    }
    for pid in pids.iter().copied() {
        assert_eq!(pool_maps::sharers(pid, file, &[pool_maps::EVERYWHERE]).unwrap(), []);
        assert_unshared(pid);
    }
    assert_eq!(pool_bytes(), 0);
    drop(pool);
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
    lab.stop().unwrap();
}

/// The readings of both guests.
fn both(readings: &[Dedup]) -> [Dedup; 2] {
    readings.try_into().unwrap_or_else(|_| panic!("not of two guests: {readings:?}"))
}

/// Waits until both guests' readings are so.
fn until_both(merger: &Merger, what: &str, is_so: impl Fn(&Dedup) -> bool) {
    until(what, || merger.readings().iter().filter(|reading| is_so(reading)).count() == 2);
}

/// Waits until more than `passes` passes went over both guests.
fn until_seen(merger: &Merger, passes: u64) {
    until_both(merger, "everything was looked at", |reading| reading.passes > passes);
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
    // Nothing is scanned until tracking has revoked the cold pages.
    let merger = Merger::start(&pids, Some(0), Some(0.1)).unwrap();
    let is_away = |pid: &u32| staged(*pid).unwrap() > Bytes::mib(50);
    until("cold pages are revoked", || pids.iter().all(is_away));
    assert_eq!(merger.pool_bytes(), 0);
    merger.set_rate(500);
    until("what is cold is merged", || merger.pool_bytes() > 50 << 20);
    let merged = both(&merger.stop()).map(|reading| reading.merged);
    assert!(merged.iter().all(|merged| *merged > Bytes::mib(50)), "{merged:?}");
    lab.stop().unwrap();
}

#[test]
fn what_a_table_names_is_shared_before_all_else_was_looked_at() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let (mut lab, pids) = two_cold_guests(dir.path());
    // Pages as in a memory dump of the first guest.
    let Some(seen) = requires(Requirement::Frames, lab::alike::pages(&pids[..1])) else { return };
    let mut builder = Builder::new(Sampling::default());
    for page in &seen {
        builder.add(&page.content, false).unwrap();
    }
    let bytes = builder.finish().to_bytes("one").unwrap();
    let known = KnownPages::of(&TableRef::parse(&bytes).unwrap());
    let merger = Merger::start_knowing(&pids, Some(4), known).unwrap();
    until("what the table names is merged", || merger.pool_bytes() > 50 << 20);
    let readings = both(&merger.stop());
    assert!(readings.iter().all(|reading| reading.passes == 0), "{readings:?}");
    lab.stop().unwrap();
}

#[test]
fn what_the_kernel_has_merged_stays_so_while_it_is_looked_at() {
    let Some(_turn) = take_turn() else { return };
    let kernels = sys::ksm::Ksm::of_host();
    let settings = kernels.settings().and_then(|settings| kernels.check_writable(&settings));
    let Some(()) = requires(Requirement::IdleKsm, settings) else { return };
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
