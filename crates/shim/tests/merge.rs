//! Shared pages take the place of equal ones without the guest's notice.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::prepared::{MIB, Prepared, SLOTS, prepared};
use common::{GRANULE, StandIn, TestWorker};
use protocol::layout::{Counter, PageState};
use protocol::{Answer, Content, MAX_MERGE, Merge, Merged, Refusal, Request};
use requires::{Requirement, ensure, requires};
use sys::pool_file::PoolFile;

fn shared(pages: u32) -> Merged {
    Merged { shared: pages, ..Merged::default() }
}

#[test]
fn equal_pages_are_replaced_and_their_memory_is_freed() {
    let Prepared { mut stand_in, worker, .. } = prepared(2000);
    let before = stand_in.anonymous_kib();
    assert_eq!(worker.merge(&[(0, 2000, Some(100))]), shared(2000));
    assert_eq!((worker.merged(0..2100), worker.count(Counter::MergedPages)), (2000, 2000));
    let freed = before - stand_in.anonymous_kib();
    assert!((7600..=8000).contains(&freed), "{freed} KiB freed of 8000");
    assert_eq!(
        stand_in.mappings_of(&worker),
        2,
        "what is shared and what is not, whatever the turns"
    );
    stand_in.expect("check 0 1");
    assert_eq!(worker.merge(&[(0, 10, Some(100))]), Merged { kept: 10, ..Merged::default() });
}

#[test]
fn what_is_written_afterwards_is_the_guests_own() {
    let Prepared { mut stand_in, worker, pool } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    let mut before = [0; 4096];
    pool.read(107, &mut before).unwrap();
    stand_in.expect("fill 0 2");
    stand_in.expect("check 0 2");
    let mut after = [0; 4096];
    pool.read(107, &mut after).unwrap();
    assert_eq!(before, after);
    assert_eq!((worker.merged(0..300), worker.count(Counter::MergedPages)), (0, 0));
    assert!(stand_in.mappings_of(&worker) <= 2, "as QEMU had made it, or nearly");
}

#[test]
fn a_written_page_leaves_the_others_shared_and_can_be_merged_again() {
    let Prepared { mut stand_in, worker, pool } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    for (at, page) in [150, 0, 299].into_iter().enumerate() {
        stand_in.expect(&format!("clear 0 {page} 1"));
        assert_eq!((worker.merged(0..300), worker.merged(page..page + 1)), (299 - at, 0));
    }
    assert_eq!(stand_in.mappings_of(&worker), 5, "two runs, and what is around them");
    pool.write(7, &[0; 4096]).unwrap();
    assert_eq!(
        worker.merge(&[(150, 1, Some(7)), (299, 1, None)]),
        Merged { dropped: 1, ..shared(1) }
    );
    stand_in.expect("zeros 0 150 1");
    stand_in.expect("fill 0 1");
    assert_eq!(worker.merge(&[(0, 300, Some(100))]), shared(300));
    stand_in.expect("check 0 1");
}

#[test]
fn when_there_is_no_room_for_more_mappings_the_kernel_makes_the_copy() {
    let stand_in = &mut StandIn::with_ram(192);
    let worker = TestWorker::meet(stand_in);
    let pool = PoolFile::create("overbook-test", SLOTS).unwrap();
    worker.use_pool(&pool, SLOTS);
    stand_in.expect("clear 0 0 49152");
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most = allowed.trim().parse::<u32>().unwrap() / 8;
    let Some(()) = requires(Requirement::FewMappings, ensure(most <= 12_000, allowed)) else {
        return;
    };
    // One run fewer than that, of three pages each. Pool pages that were never written are zero.
    let runs: Vec<_> = (0..most - 1).map(|run| (4 * run, 3, Some(0))).collect();
    runs.chunks(MAX_MERGE).for_each(|runs| assert_eq!(worker.merge(runs).kept, 0));
    let merged = worker.merged(0..49_152);
    stand_in.expect("clear 0 1 1");
    assert_eq!((worker.merged(0..4), worker.merged(0..49_152)), (2, merged - 1));
    stand_in.expect("clear 0 4001 1");
    let all = (worker.merged(4000..4004), worker.merged(0..49_152));
    assert_eq!(all, (3, merged - 1), "the kernel's copy");
    stand_in.expect("clear 0 8000 1");
    assert_eq!(worker.merged(8000..8004), 2, "at an end nothing is cut in two");
    stand_in.expect("zeros 0 0 49152");
}

#[test]
fn what_is_not_equal_or_not_there_stays_as_it_is() {
    let Prepared { mut stand_in, worker, .. } = prepared(10);
    let different = |pages| Merged { different: pages, ..Merged::default() };
    assert_eq!(worker.merge(&[(0, 10, Some(101))]), Merged { shared: 0, ..different(10) });
    assert_eq!(worker.merge(&[(20, 4, Some(SLOTS + 5))]), different(4), "no such slots");
    assert_eq!(worker.merge(&[(20, 4, None)]), different(4), "no zeros");
    stand_in.expect("discard 0 512 1024");
    let kept = |pages| Merged { kept: pages, ..Merged::default() };
    assert_eq!(worker.merge(&[(600, 4, None), (16_384, 7, None)]), kept(11), "holes, no pages");
    assert_eq!(worker.merged(0..2000), 0);
    stand_in.expect("zeros 0 512 1024");
    stand_in.expect("discard 0 0 16384");
    stand_in.expect("fill 0 3");
    stand_in.expect("check 0 3");
}

#[test]
fn pages_of_zeros_are_dropped() {
    let Prepared { mut stand_in, worker, .. } = prepared(0);
    stand_in.expect("discard 0 0 512");
    // Written, so that the pages are populated.
    stand_in.expect("clear 0 0 512");
    let before = stand_in.anonymous_kib();
    let dropped = worker.merge(&[(0, 600, None)]);
    assert_eq!(dropped, Merged { dropped: 512, different: 88, ..Merged::default() });
    let less = before - stand_in.anonymous_kib();
    assert!(less >= 1900, "2048 without the memory that the shim has begun to use: {less}");
    assert_eq!(worker.merged(0..600), 0, "a hole is an ordinary page");
    stand_in.expect("zeros 0 0 512");
    stand_in.expect("fill 0 4");
    stand_in.expect("check 0 4");
}

#[test]
fn a_discarded_page_is_zero_and_ordinary_again() {
    for tracking in [false, true] {
        let Prepared { mut stand_in, worker, .. } = prepared(300);
        if tracking {
            worker.ask(&Request::Track(common::by_name()));
            worker.revoke(0..20);
        }
        // Some of the granules are staged: their pages are kept.
        let merged = worker.merge(&[(0, 300, Some(100))]);
        assert_eq!(merged.shared, if tracking { 0 } else { 300 });
        worker.release();
        worker.merge(&[(0, 300, Some(100))]);
        if tracking {
            worker.ask(&Request::Track(common::by_name()));
        }
        stand_in.expect("discard 0 50 100");
        stand_in.expect("zeros 0 50 100");
        assert_eq!((worker.merged(0..300), worker.merged(50..150)), (200, 0));
        stand_in.expect("discard 0 0 16384");
        stand_in.expect("zeros 0 0 16384");
        assert_eq!((worker.merged(0..300), worker.count(Counter::MergedPages)), (0, 0));
        stand_in.expect("fill 0 5");
        if tracking {
            assert_eq!(worker.revoke(0..20), 20, "fresh memory is tracked like the rest");
        }
        stand_in.expect("check 0 5");
        worker.release();
        stand_in.expect("check 0 5");
        // The kernel does not join two mappings whose pages were both written before they became
        // adjacent.
        assert!(stand_in.mappings_of(&worker) <= 2, "as QEMU had made it, or nearly");
    }
}

#[test]
fn tracking_goes_around_merged_pages() {
    let Prepared { mut stand_in, mut worker, .. } = prepared(100);
    // Merged: a part of granule 0, all of granule 1, the first and the last page of granule 2.
    worker.merge(&[(3, 5, Some(103)), (32, 32, Some(132)), (64, 1, Some(164)), (95, 1, Some(195))]);
    worker.ask(&Request::Track(common::by_name()));
    assert_eq!(worker.revoke(0..4), 3, "of granule 1 nothing can be taken");
    worker.traps();
    assert_eq!(worker.shared().state(4), PageState::Merged);
    stand_in.expect("touch 0 4");
    assert_eq!(worker.traps().0, [0_u32; 0], "a merged page does not trap");
    stand_in.expect("touch 0 9");
    stand_in.expect("touch 0 70");
    assert_eq!(worker.traps().0, [0, 2]);
    stand_in.expect("check 0 1");
    worker.revoke(0..512);
    stand_in.expect("fill 0 6");
    worker.revoke(0..512);
    stand_in.expect("check 0 6");
    worker.revoke(0..512);
    worker.release();
    assert_eq!(worker.count(Counter::StagedPages), 0);
    stand_in.expect("check 0 6");
}

#[test]
fn a_write_to_a_merged_page_is_a_touch_of_what_is_out_of_reach_beside_it() {
    let Prepared { mut stand_in, mut worker, .. } = prepared(100);
    worker.merge(&[(3, 5, Some(103)), (32, 32, Some(132))]);
    worker.ask(&Request::Track(common::by_name()));
    assert_eq!(worker.revoke(0..2), 1);
    worker.traps();
    stand_in.expect("clear 0 4 1");
    assert_eq!((worker.traps().0, worker.count(Counter::StagedPages)), (vec![0], 0));
    stand_in.expect("clear 0 40 1");
    assert_eq!(worker.traps().0, [0_u32; 0], "of granule 1 nothing was out of reach");
    assert_eq!(worker.revoke(0..2), 2, "what is plain again is tracked again");
    stand_in.expect("zeros 0 4 1");
    stand_in.expect("zeros 0 40 1");
    assert_eq!(worker.traps().0, [0, 1]);
}

#[test]
fn holes_beside_merged_pages_are_filled_and_merged_pages_are_not() {
    let Prepared { mut stand_in, worker, .. } = prepared(GRANULE);
    worker.merge(&[(8, 8, Some(108))]);
    stand_in.expect("discard 0 0 8");
    stand_in.expect("discard 0 16 16");
    worker.ask(&Request::Track(common::by_name()));
    stand_in.expect("touch 0 2");
    for page in 8..16 {
        assert_ne!(stand_in.page(&worker, page), [0; 4096]);
    }
    stand_in.expect("zeros 0 0 8");
    stand_in.expect("zeros 0 16 16");
}

#[test]
fn what_is_merged_is_remembered_when_ram_is_plugged_and_the_worker_changes() {
    let Prepared { mut stand_in, worker, .. } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    stand_in.expect("plug 32");
    // Before any worker has seen the new RAM.
    stand_in.expect("discard 0 0 100");
    stand_in.expect("zeros 0 0 100");
    let refusal = worker.refused(&Request::Merge {
        runs: vec![Merge { page: 0, pages: 1, content: Content::Zeros }],
    });
    assert!(refusal.to_string().contains("say Hello again"), "{refusal}");
    drop(worker);
    let worker = TestWorker::meet(&stand_in);
    assert_eq!((worker.regions.len(), worker.merged(0..300), worker.merged(0..100)), (2, 200, 0));
    stand_in.expect("discard 0 100 200");
    stand_in.expect("zeros 0 0 300");
    assert_eq!(worker.merged(0..300), 0);
}

#[test]
fn memory_that_qemu_replaces_or_unplugs_is_forgotten() {
    let Prepared { mut stand_in, worker, .. } = prepared(300);
    worker.merge(&[(0, 300, Some(100))]);
    stand_in.expect("remap 0 7");
    assert_eq!((worker.merged(0..300), worker.merged(7..8)), (299, 0));
    stand_in.expect("zeros 0 7 1");
    stand_in.expect("unplug 0");
    assert_eq!(worker.count(Counter::MergedPages), 0);
}

#[test]
fn pages_that_io_holds_are_kept() {
    let Prepared { mut stand_in, worker, .. } = prepared(64);
    let Some(_) = requires(Requirement::Pinning, stand_in.tell("pin 0 10 4")) else { return };
    let Merged { kept, shared, .. } = worker.merge(&[(0, 64, Some(100))]);
    // A huge page is pinned as a whole.
    assert!([4, 64].contains(&kept) && kept + shared == 64, "{kept} {shared}");
    assert_eq!(worker.merged(10..14), 0);
    stand_in.expect("check 0 1");
}

#[test]
fn a_guest_that_reads_and_writes_meanwhile_loses_nothing() {
    let Prepared { mut stand_in, worker, .. } = prepared(2000);
    let mut merged = Merged::default();
    for round in 0..20 {
        let seed = round % 2 + 1;
        stand_in.begin(&format!("fill 0 {seed}"));
        let more = worker.merge(&[(0, 2000, Some(100))]);
        stand_in.finish().unwrap();
        stand_in.expect(&format!("check 0 {seed}"));
        merged.shared += more.shared;
        merged.different += more.different;
        stand_in.expect("discard 0 0 16384");
    }
    assert!(merged.shared > 0 && merged.different + merged.shared > 1000, "{merged:?}");
}

#[test]
fn pools_that_are_none_are_refused_and_the_old_one_stays() {
    let Prepared { mut stand_in, worker, pool } = prepared(10);
    let refused = |answer: Answer| match answer {
        Answer::Refused(Refusal::NotMerging { why }) => why,
        other => panic!("{other:?}"),
    };
    assert!(refused(worker.ask(&Request::Pool { slots: 7 })).contains("no pool came"));
    let why = refused(worker.use_pool(&pool, SLOTS + 1));
    assert!(why.contains("expected"), "{why}");
    assert_eq!(worker.merge(&[(0, 10, Some(100))]), shared(10));
    stand_in.expect("check 0 1");
}

#[test]
fn without_a_pool_nothing_is_equal() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    assert_eq!(worker.merge(&[(0, 4, Some(1))]), Merged { different: 4, ..Merged::default() });
}
