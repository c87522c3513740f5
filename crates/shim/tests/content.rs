//! The content of guest memory stays, regardless of moves of its pages.

mod common;

use std::time::{Duration, Instant};

use common::{GRANULE, StandIn, TestWorker, by_name};
use protocol::layout::Counter;
use protocol::{Request, State, Tracking, most_revoked};

const MIB: u32 = 64;
const GRANULES: u32 = MIB * 256 / GRANULE;

#[test]
fn a_touch_brings_the_whole_granule_back_and_is_logged() {
    let mut stand_in = StandIn::with_ram(MIB);
    let mut worker = TestWorker::tracking(&stand_in);
    assert_eq!(worker.revoke([3, 4]), 2);
    assert_eq!(worker.revoke([3]), 0, "it is revoked already");
    assert!(worker.shared().is_staged(3, GRANULE));
    worker.traps();
    stand_in.expect("touch 0 100");
    assert_eq!(worker.traps().0, [3]);
    stand_in.expect("touch 0 101");
    assert_eq!(worker.traps().0, []);
    assert!(!worker.shared().is_staged(3, GRANULE) && worker.shared().is_staged(4, GRANULE));
    assert_eq!(worker.count(Counter::StagedPages), u64::from(GRANULE));
}

#[test]
fn a_recalled_granule_is_back_and_no_trap_tells_of_it() {
    let mut stand_in = StandIn::with_ram(MIB);
    let mut worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..9);
    worker.traps();
    assert_eq!(worker.recall([2, 3, 9, u32::MAX]), 2, "one is within reach, one is none");
    assert!(!worker.shared().is_staged(2, GRANULE) && worker.shared().is_staged(4, GRANULE));
    assert_eq!(worker.count(Counter::StagedPages), 7 * u64::from(GRANULE));
    stand_in.expect("touch 0 70");
    assert_eq!(worker.traps().0, []);
    assert_eq!(worker.revoke([2]), 1);
    stand_in.expect("touch 0 70");
    assert_eq!(worker.traps().0, [2]);
    stand_in.expect("check 0 1");
}

#[test]
fn every_page_has_its_content_after_all_were_revoked() {
    for granule_pages in [1, 32, 512] {
        let mut stand_in = StandIn::with_ram(MIB);
        let worker = TestWorker::meet(&stand_in);
        worker.ask(&Request::Track(Tracking { granule_pages, ..by_name() }));
        let granules = (MIB * 256 / granule_pages).min(most_revoked(granule_pages));
        let all: Vec<u32> = (0..granules).collect();
        let revoked: u32 = all.chunks(2000).map(|part| worker.revoke(part.iter().copied())).sum();
        assert_eq!(revoked, granules);
        assert_eq!(worker.count(Counter::Pinned), 0);
        stand_in.expect_beside(&worker, "check 0 1");
        assert_eq!(worker.count(Counter::StagedPages), 0);
    }
}

#[test]
fn the_kernel_reads_a_revoked_page_on_qemus_behalf() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke([2]);
    let stamp = (64 + 1) << 20 | 1;
    assert_eq!(stand_in.expect("write-out 0 64"), stamp.to_string());
    assert_eq!(worker.count(Counter::Traps), 1);
}

#[test]
fn only_sampled_granules_are_revoked() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    let sample = u32::MAX / 4;
    worker.ask(&Request::Track(Tracking { sample, ..by_name() }));
    let sampled = |granule: &u32| protocol::layout::is_sampled(*granule, sample);
    let expected = (0..GRANULES).filter(sampled).count();
    assert_eq!(worker.revoke(0..GRANULES) as usize, expected);
    assert!(
        (0..GRANULES)
            .all(|granule| worker.shared().is_staged(granule, GRANULE) == sampled(&granule))
    );
}

#[test]
fn another_granule_size_begins_afresh() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..GRANULES);
    worker.ask(&Request::Track(Tracking { granule_pages: 512, ..by_name() }));
    assert_eq!(worker.count(Counter::StagedPages), 0);
    assert_eq!(worker.revoke([0]), 1);
    assert_eq!(worker.count(Counter::StagedPages), 512);
    stand_in.expect("check 0 1");
}

#[test]
fn release_leaves_nothing_behind() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.release();
    // From here on the threads and the page on which traps are measured exist.
    let began = Instant::now();
    while worker.count(Counter::RoundTripNs) == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "no trap is measured");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (mappings, anonymous) = (stand_in.mappings(), stand_in.anonymous_kib());
    worker.ask(&Request::Track(by_name()));
    assert!(stand_in.mappings() > mappings);
    worker.revoke(0..GRANULES);
    assert_eq!(worker.release(), GRANULES);
    assert_eq!(worker.status().0, State::Off);
    assert_eq!(worker.count(Counter::StagedPages), 0);
    let traps = worker.count(Counter::Traps);
    stand_in.expect("check 0 1");
    assert_eq!(worker.count(Counter::Traps), traps, "no fault is taken any more");
    assert_eq!(stand_in.mappings(), mappings);
    assert!(stand_in.anonymous_kib() < anonymous + 1024);
    assert_eq!(worker.release(), 0, "a second time changes nothing");
}

#[test]
fn memory_that_was_never_touched_is_zero_and_comes_two_megabytes_at_a_time() {
    let mut stand_in = StandIn::new();
    stand_in.expect("plug 64");
    let mut worker = TestWorker::tracking(&stand_in);
    stand_in.expect("zeros 0 0 16384");
    let (granules, _) = worker.traps();
    let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let has_huge = huge.is_ok_and(|modes| !modes.contains("[never]"));
    // One trap per huge page, unless the kernel has no huge page to give because memory is
    // fragmented.
    let most = if has_huge { GRANULES / 2 } else { GRANULES };
    assert!(granules.len() <= most as usize, "{} traps", granules.len());
    stand_in.expect("fill 0 1");
    stand_in.expect("check 0 1");
    worker.release();
    stand_in.expect("check 0 1");
}

#[test]
fn a_revoked_hole_stays_a_hole_until_it_is_touched() {
    let mut stand_in = StandIn::new();
    stand_in.expect("plug 64");
    let mut worker = TestWorker::tracking(&stand_in);
    let before = stand_in.anonymous_kib();
    assert_eq!(worker.revoke(0..GRANULES), GRANULES);
    worker.traps();
    stand_in.expect("zeros 0 32 32");
    assert_eq!(worker.traps().0, [1]);
    assert!(stand_in.anonymous_kib() < before + 256);
    stand_in.expect("fill 0 7");
    stand_in.expect("check 0 7");
}

#[test]
fn the_cost_of_a_trap_is_measured() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    let round_trip = worker.count(Counter::RoundTripNs);
    assert!((1_000..50_000_000).contains(&round_trip), "{round_trip} ns");
    assert_eq!(worker.count(Counter::Traps), 0, "its own traps do not count");
}
