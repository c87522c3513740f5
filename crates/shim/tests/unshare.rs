//! Unshared pages are the guest's own again, with its mappings, without the guest's notice.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::prepared::{MIB, Prepared, SLOTS, prepared, prepared_in};
use common::{StandIn, TestWorker};
use protocol::layout::Counter;
use protocol::{MAX_UNSHARE, Merged, Refusal, Request};
use requires::{Requirement, requires};
use sys::faults::{Call, Fault, Faults, How, PLAN_ENV};
use sys::memory_map::{PAGE_BYTES, Range};

const PAGES: u32 = MIB * 256;
/// Maximum time of a wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// Has all pages of the block unshared; returns how many were merged.
fn unshare_all(worker: &TestWorker) -> u32 {
    let windows = (0..PAGES).step_by(MAX_UNSHARE as usize);
    windows.map(|page| worker.unshare(page, MAX_UNSHARE)).sum()
}

/// Merges runs of many lengths, with gaps; returns the number of merged pages.
fn merge_scattered(worker: &TestWorker, pages: u32) -> u32 {
    let (mut runs, mut page) = (Vec::new(), 0);
    for len in [1, 2, 3, 5, 8, 40, 64, 70, 200].into_iter().cycle() {
        if page + len > pages {
            break;
        }
        runs.push((page, len, Some(100 + page)));
        page += len + 1 + len % 3;
    }
    worker.merge(&runs).shared
}

#[test]
fn memory_and_mappings_are_as_before_and_no_pool_is_needed() {
    let Prepared { mut stand_in, worker, pool } = prepared(2000);
    let (anonymous, mappings) = (stand_in.anonymous_kib(), stand_in.mappings_of(&worker));
    let merged = merge_scattered(&worker, 2000);
    assert!(merged > 1500 && stand_in.mappings_of(&worker) > 50);
    assert_eq!(unshare_all(&worker), merged);
    assert_eq!(stand_in.mappings_of(&worker), mappings, "nothing of the pool is left");
    assert!(anonymous.abs_diff(stand_in.anonymous_kib()) < 1024);
    assert_eq!((worker.merged(0..PAGES), worker.count(Counter::MergedPages)), (0, 0));
    (0..2000).for_each(|page| pool.empty(100 + page).unwrap());
    stand_in.expect("check 0 1");
    stand_in.expect("fill 0 2");
    stand_in.expect("check 0 2");
    assert_eq!(worker.unshare(u32::MAX - 512, 512), 0, "no such pages");
}

#[test]
fn what_is_merged_as_a_whole_comes_back_as_one_mapping_or_nearly() {
    let Prepared { mut stand_in, worker, .. } = prepared(3000);
    worker.merge(&[(0, 3000, Some(100))]);
    assert_eq!(unshare_all(&worker), 3000);
    assert!(stand_in.mappings_of(&worker) <= 2);
    stand_in.expect("check 0 1");
}

#[test]
fn what_is_unshared_can_be_merged_and_tracked_again() {
    let Prepared { mut stand_in, mut worker, .. } = prepared(300);
    for _ in 0..3 {
        assert_eq!(
            worker.merge(&[(0, 300, Some(100))]),
            Merged { shared: 300, ..Merged::default() }
        );
        assert_eq!(worker.unshare(0, 512), 300);
    }
    worker.ask(&Request::Track(common::by_name()));
    assert_eq!(worker.revoke(0..9), 9);
    worker.traps();
    stand_in.expect("touch 0 70");
    assert_eq!(worker.traps().0, [2]);
    stand_in.expect("check 0 1");
}

#[test]
fn of_what_the_guest_has_written_nothing_is_left() {
    let Prepared { mut stand_in, worker, pool } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    stand_in.expect("clear 0 50 10");
    assert!((200..=290).contains(&unshare_all(&worker)));
    assert_eq!((worker.merged(0..300), stand_in.mappings_of(&worker)), (0, 1));
    (100..400).for_each(|slot| pool.empty(slot).unwrap());
    stand_in.expect("zeros 0 50 10");
    for page in (0..50).chain(60..300) {
        assert_ne!(stand_in.page(&worker, page), [0; 4096]);
    }
}

#[test]
fn what_was_written_here_and_there_becomes_one_mapping_again() {
    for tracking in [false, true] {
        let Prepared { mut stand_in, worker, .. } = prepared(2000);
        // A mapping larger than a huge page stays separate when it was merged as a whole.
        let most = stand_in.mappings_of(&worker) + 1;
        worker.merge(&[(0, 2000, Some(100))]);
        if tracking {
            worker.ask(&Request::Track(common::by_name()));
        }
        // The pages are far apart.
        for page in (50..2000).step_by(70) {
            stand_in.expect_beside(&worker, &format!("clear 0 {page} 1"));
        }
        stand_in.expect_beside(&worker, "discard 0 1000 1");
        assert!(stand_in.mappings_of(&worker) > 50);
        let unshared = unshare_all(&worker);
        assert_eq!((unshared, worker.merged(0..PAGES)), (2000 - 28 - 1, 0));
        stand_in.expect_beside(&worker, "zeros 0 1000 1");
        stand_in.expect_beside(&worker, "fill 0 1");
        worker.release();
        assert!(stand_in.mappings_of(&worker) <= most, "tracking: {tracking}");
        stand_in.expect("check 0 1");
        // The same by writes alone.
        worker.merge(&[(0, 2000, Some(100))]);
        for page in (50..2000).step_by(70) {
            stand_in.expect(&format!("clear 0 {page} 1"));
        }
        stand_in.expect("fill 0 2");
        assert_eq!(worker.merged(0..PAGES), 0);
        assert!(stand_in.mappings_of(&worker) <= most, "tracking: {tracking}");
        stand_in.expect("check 0 2");
    }
}

#[test]
fn what_the_kernel_has_copied_stays_in_its_place_with_its_content() {
    let Prepared { mut stand_in, worker, pool } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    // After QEMU has registered guest RAM for itself, writes no longer trap.
    stand_in.expect("register 0");
    stand_in.expect("unregister 0");
    stand_in.expect("clear 0 50 10");
    assert_eq!(worker.merged(0..300), 300);
    assert_eq!(worker.unshare(0, 512), 300);
    assert_eq!((worker.merged(0..300), worker.merged(50..60)), (10, 10));
    (100..400).for_each(|slot| pool.empty(slot).unwrap());
    stand_in.expect("zeros 0 50 10");
    stand_in.expect("discard 0 50 10");
    stand_in.expect("zeros 0 50 10");
    assert_eq!(worker.merged(0..300), 0);
    for page in (0..50).chain(60..300) {
        assert_ne!(stand_in.page(&worker, page), [0; 4096]);
    }
}

#[test]
fn while_tracking_is_on_it_goes_on() {
    let Prepared { mut stand_in, worker, .. } = prepared(2000);
    let merged = merge_scattered(&worker, 2000);
    worker.ask(&Request::Track(common::by_name()));
    worker.revoke(0..PAGES / common::GRANULE);
    assert_eq!(unshare_all(&worker), merged);
    assert_eq!(worker.merged(0..PAGES), 0);
    stand_in.expect_beside(&worker, "check 0 1");
    worker.revoke(0..PAGES / common::GRANULE);
    stand_in.expect_beside(&worker, "fill 0 2");
    worker.release();
    assert_eq!(stand_in.mappings_of(&worker), 1);
    stand_in.expect("check 0 2");
}

#[test]
fn a_guest_that_reads_and_writes_meanwhile_loses_nothing() {
    let Prepared { mut stand_in, worker, .. } = prepared(2000);
    for round in 0..8 {
        let merged = merge_scattered(&worker, 2000);
        stand_in.begin(if round % 2 == 0 { "check 0 1" } else { "fill 0 1" });
        // Some may be written before.
        assert!(unshare_all(&worker) <= merged);
        stand_in.finish().unwrap();
        stand_in.expect("check 0 1");
        assert_eq!(worker.merged(0..PAGES), 0);
    }
}

#[test]
fn discards_meanwhile_are_discards() {
    let Prepared { mut stand_in, worker, .. } = prepared(2000);
    for _ in 0..5 {
        merge_scattered(&worker, 2000);
        stand_in.begin("discard 0 300 900");
        unshare_all(&worker);
        stand_in.finish().unwrap();
        stand_in.expect("zeros 0 300 900");
        assert_eq!(worker.merged(0..PAGES), 0);
        stand_in.expect("fill 0 1");
        stand_in.expect("check 0 1");
    }
}

/// A fault plan for a stand-in that [`prepared_in`] takes.
fn planned() -> (Faults, StandIn, tempfile::TempDir) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("plan");
    let faults = Faults::create(&path).unwrap();
    let stand_in = StandIn::start(|command| {
        command.env(PLAN_ENV, &path);
    });
    (faults, stand_in, dir)
}

#[test]
fn what_a_disk_reads_in_meanwhile_is_there() {
    let (faults, stand_in, _dir) = planned();
    let Prepared { mut stand_in, worker, .. } = prepared_in(stand_in, 2000);
    stand_in.expect("fill 0 2");
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let load = format!("load-direct 0 {}", file.path().display());
    let loaded: Vec<_> = (0..2000).map(|page| stand_in.page(&worker, page)).collect();
    std::fs::write(file.path(), loaded.concat()).unwrap();
    let Some(_) = requires(Requirement::DirectIo, stand_in.tell(&load)) else { return };
    let start = worker.regions[0].address + 1000 * PAGE_BYTES;
    let within = Some(Range { start, len: 64 * PAGE_BYTES });
    for is_held in [true, false, false, true] {
        stand_in.expect("discard 0 0 16384");
        stand_in.expect("fill 0 1");
        merge_scattered(&worker, 2000);
        if is_held {
            faults.plan(0, Fault { within, ..Fault::once(Call::Move, How::HoldBefore) });
        }
        std::thread::scope(|scope| {
            let unshare = scope.spawn(|| unshare_all(&worker));
            if is_held {
                // The first half is unshared, and the disk waits for a page of the rest.
                assert!(faults.wait_until_held(0, PATIENCE));
                stand_in.begin(&load);
                let began = Instant::now();
                while stand_in.page(&worker, 0) != loaded[0] {
                    assert!(began.elapsed() < PATIENCE, "nothing is read");
                    std::thread::yield_now();
                }
                assert!(worker.merged(1064..2000) > 0 && worker.merged(0..900) == 0);
                assert!(!stand_in.has_answer_within(Duration::from_millis(50)));
                faults.go_on(0);
            } else {
                stand_in.begin(&load);
            }
            unshare.join().unwrap();
        });
        assert_eq!(stand_in.finish().unwrap(), "2000");
        let is_there = |page: u32| stand_in.page(&worker, page) == loaded[page as usize];
        assert!((0..2000).all(is_there));
        assert_eq!(worker.merged(0..PAGES), 0);
    }
}

#[test]
fn pages_that_io_holds_stay_in_its_hands() {
    for kernel_copies in [false, true] {
        let Prepared { mut stand_in, worker, .. } = prepared(64);
        worker.merge(&[(0, 64, Some(100))]);
        if kernel_copies {
            stand_in.expect("register 0");
            stand_in.expect("unregister 0");
        }
        // To pin a page for writing is to write to it.
        let Some(_) = requires(Requirement::Pinning, stand_in.tell("pin 0 10 4")) else { return };
        let shared = worker.unshare(0, 64);
        assert!(if kernel_copies { shared == 64 } else { (40..=60).contains(&shared) }, "{shared}");
        let left = if kernel_copies { 4 } else { 0 };
        assert_eq!((worker.merged(0..64), worker.merged(10..14)), (left, left));
        stand_in.expect("check 0 1");
        let again = worker.merge(&[(0, 64, Some(100))]);
        assert_eq!(again, Merged { shared: 60, kept: 4, ..Merged::default() });
        stand_in.expect("check 0 1");
    }
}

#[test]
fn what_qemu_watches_itself_is_neither_copied_nor_let_write() {
    let Prepared { mut stand_in, worker, pool } = prepared(300);
    worker.merge(&[(0, 200, Some(100))]);
    stand_in.expect("watch-writes 0");
    let refusal = worker.refused(&Request::Unshare { page: 100, pages: 512 });
    assert!(matches!(refusal, Refusal::NotMerging { why } if why.contains("QEMU watches")));
    for page in [50, 150, 250] {
        stand_in.expect(&format!("write-seen 0 {page}"));
    }
    stand_in.expect("unregister 0");
    assert_eq!(worker.unshare(0, 512), 200);
    assert_eq!(worker.merged(0..300), 2, "which the kernel has copied");
    (200..300).for_each(|slot| pool.empty(slot).unwrap());
    stand_in.expect("check 0 1");
}

#[test]
fn where_the_guest_writes_no_write_slips_in_while_pages_are_merged() {
    let Prepared { mut stand_in, worker, .. } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    stand_in.expect("write 0 1 300 300");
    assert_eq!(worker.merged(0..300), 0);
    // Repeated as often as needed: pages that the guest writes again at once cannot be merged.
    let (began, mut merged) = (Instant::now(), 0);
    while merged < 1000 {
        assert!(began.elapsed() < Duration::from_secs(120), "only {merged}");
        stand_in.begin("write 0 2 300 500");
        while !stand_in.has_answer_within(Duration::ZERO) {
            merged += worker.merge(&[(0, 300, Some(100))]).shared;
        }
        stand_in.finish().unwrap();
    }
    unshare_all(&worker);
    assert_eq!(worker.merged(0..300), 0, "what the kernel had copied would be left");
    stand_in.expect("check 0 1");
}

#[test]
fn what_is_written_while_tracking_ends_is_the_guests_own_too() {
    let Prepared { mut stand_in, worker, .. } = prepared(1000);
    for _ in 0..20 {
        assert_eq!(worker.merge(&[(0, 1000, Some(100))]).shared, 1000);
        worker.ask(&Request::Track(common::by_name()));
        worker.revoke(1024 / common::GRANULE..PAGES / common::GRANULE);
        stand_in.begin("write 0 1 1000 20");
        worker.release();
        stand_in.finish().unwrap();
        unshare_all(&worker);
        assert_eq!(worker.merged(0..1000), 0, "what the kernel had copied would be left");
    }
    stand_in.expect("check 0 1");
}

#[test]
fn qemu_is_not_refused_because_of_a_write_that_waits() {
    let Prepared { mut stand_in, worker, .. } = prepared(300);
    for _ in 0..60 {
        assert_eq!(worker.merge(&[(0, 300, Some(100))]).shared, 300);
        stand_in.expect("register-beside-writes 0 8 300");
        stand_in.expect("unregister 0");
        // Pages that the kernel has copied are merged again only after a discard.
        stand_in.expect("discard 0 0 300");
        stand_in.expect("fill 0 1");
    }
}

#[test]
fn a_worker_that_goes_in_the_middle_leaves_every_page_with_its_content() {
    let Prepared { mut stand_in, worker, pool } = prepared(512);
    drop(worker);
    let (mut replaced, mut rounds) = (0, 0);
    // On a busy machine a worker may be gone before any work has begun, again and again.
    while rounds < 10 || (replaced == 0 && rounds < 200) {
        rounds += 1;
        let worker = TestWorker::meet(&stand_in);
        worker.use_pool(&pool, SLOTS);
        merge_scattered(&worker, 512);
        let merged = worker.merged(0..512);
        let worker = worker.flood(&Request::Unshare { page: 0, pages: MAX_UNSHARE }).hang_up();
        stand_in.expect("check 0 1");
        replaced += merged - worker.merged(0..512);
    }
    assert!(replaced > 0);
}

#[test]
fn what_is_staged_beside_what_is_unshared_keeps_its_content() {
    let Prepared { mut stand_in, worker, .. } = prepared(300);
    worker.ask(&Request::Track(common::by_name()));
    worker.merge(&[(112, 64, Some(212))]);
    for _ in 0..3 {
        worker.revoke(3..7);
        stand_in.expect("write 0 1 300 5");
        worker.revoke(3..7);
        worker.unshare(0, 512);
        stand_in.expect_beside(&worker, "check 0 1");
        worker.merge(&[(112, 64, Some(212))]);
    }
    worker.release();
    stand_in.expect("check 0 1");
}
