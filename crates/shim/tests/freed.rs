//! Memory that the guest frees: handed over to the kernel, kept while memory is plentiful, and
//! taken on request.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::prepared::prepared;
use common::{GRANULE, StandIn, TestWorker};
use protocol::layout::Counter;
use protocol::{Pages, Refusal, Request, Taken};
use requires::{Requirement, ensure, requires};

const MIB: u32 = 64;
const PAGES: u32 = MIB * 256;

/// A stand-in with full memory, and a worker that has freed memory handed over.
fn lazy() -> (StandIn, TestWorker) {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    worker.hand_over(true);
    (stand_in, worker)
}

/// The memory that the kernel may take by itself.
fn lazily_free_kib(stand_in: &StandIn) -> u64 {
    rollup_kib(stand_in, "LazyFree:")
}

fn rollup_kib(stand_in: &StandIn, field: &str) -> u64 {
    let path = format!("/proc/{}/smaps_rollup", stand_in.pid());
    let smaps = std::fs::read_to_string(path).unwrap();
    let line = smaps.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Whether the kernel frees page tables that a discard leaves empty: from Linux 6.14 on.
fn drops_page_tables() -> Result<(), String> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|part| part.parse().unwrap_or(0));
    let is_new = (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 14);
    ensure(is_new, format!("Linux {}", release.trim()))
}

#[test]
fn what_is_freed_stays_until_it_is_taken_and_then_all_of_it_goes() {
    let (mut stand_in, worker) = lazy();
    let before = stand_in.anonymous_kib();
    stand_in.expect(&format!("discard 0 0 {}", PAGES / 2));
    assert_eq!(lazily_free_kib(&stand_in), u64::from(PAGES / 2) * 4);
    assert_eq!((worker.freed(0..PAGES), worker.count(Counter::HandedOver)), (8192, 8192));
    assert!(worker.shared().freed_at_ms(0).is_some());
    assert_eq!(
        worker.shared().freed_at_ms(PAGES / 2 / 512),
        None,
        "nothing of that block was freed"
    );
    stand_in.expect("check 0 1");
    let all = (0..PAGES / 2).step_by(4096).map(|page| worker.take(page, 4096));
    let all = all.fold(Taken::default(), |mut all, taken| {
        all += taken;
        all
    });
    assert_eq!(all, Taken { taken: PAGES / 2, gone: 0, kept: 0 });
    // The shim's threads have started meanwhile, each with its stack, and its heap has grown.
    let gone_kib = before - stand_in.anonymous_kib();
    assert!(gone_kib + 256 >= u64::from(PAGES / 2) * 4, "{gone_kib} KiB");
    assert_eq!((worker.freed(0..PAGES), worker.shared().freed_at_ms(0)), (0, None));
    stand_in.expect(&format!("zeros 0 0 {}", PAGES / 2));
    assert_eq!(worker.take(0, 4096), Taken::default(), "it is the guest's again");
    stand_in.expect("fill 0 2");
    stand_in.expect("check 0 2");
}

#[test]
fn what_the_guest_has_taken_back_is_not_taken_from_it() {
    let (mut stand_in, worker) = lazy();
    stand_in.expect("discard 0 0 1024");
    // The guest writes to its first 256 pages what they hold.
    stand_in.expect("write 0 1 256 20");
    let taken = worker.take(0, 1024);
    // The kernel keeps a huge page whole.
    assert!([256, 512].contains(&taken.kept), "{taken:?}");
    assert_eq!((taken.taken, taken.gone), (1024 - taken.kept, 0));
    stand_in.expect("zeros 0 512 512");
    let first = stand_in.page(&worker, 0);
    assert!(first.iter().any(|&byte| byte != 0));
    assert_eq!(worker.take(0, 1024), Taken::default());
    assert_eq!(stand_in.page(&worker, 0), first);
}

#[test]
fn what_was_taken_comes_back_in_huge_pages() {
    let (mut stand_in, worker) = lazy();
    let before = rollup_kib(&stand_in, "AnonHugePages:");
    let are_huge = ensure(before >= u64::from(PAGES) * 2, format!("{before} KiB in huge pages"));
    let has_both = are_huge.and_then(|()| drops_page_tables());
    let Some(()) = requires(Requirement::HugePagesAgain, has_both) else { return };
    for track in [false, true] {
        if track {
            worker.ask(&Request::Track(common::by_name()));
        }
        stand_in.expect("discard 0 0 4096");
        assert_eq!(worker.take(0, 4096).taken, 4096);
        stand_in.expect("fill 0 3");
        assert_eq!(rollup_kib(&stand_in, "AnonHugePages:"), before, "tracked: {track}");
    }
    stand_in.expect("check 0 3");
}

#[test]
fn what_the_kernel_has_dropped_by_itself_is_told_apart() {
    let (mut stand_in, worker) = lazy();
    stand_in.expect("discard 0 0 512");
    stand_in.expect("drop 0 0 100");
    assert_eq!(worker.take(0, 512), Taken { taken: 412, gone: 100, kept: 0 });
}

#[test]
fn a_balloon_s_page_is_discarded_at_once() {
    let (mut stand_in, worker) = lazy();
    for page in 0..16 {
        stand_in.expect(&format!("discard 0 {page} 1"));
    }
    stand_in.expect("zeros 0 0 16");
    assert_eq!((worker.freed(0..PAGES), worker.count(Counter::HandedOver)), (0, 0));
    // Freed memory is discarded too: it is no longer there to be taken.
    stand_in.expect("discard 0 0 512");
    stand_in.expect("discard 0 100 1");
    stand_in.expect("zeros 0 100 1");
    assert_eq!(worker.freed(0..512), 511);
}

#[test]
fn nothing_is_handed_over_unasked_nor_without_a_worker() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    stand_in.expect("discard 0 0 512");
    stand_in.expect("zeros 0 0 512");
    worker.hand_over(true);
    worker.hand_over(false);
    stand_in.expect("discard 0 512 512");
    stand_in.expect("zeros 0 512 512");
    worker.hand_over(true);
    let worker = worker.hang_up();
    // The shim notices later that the worker is gone.
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let before = worker.count(Counter::HandedOver);
        stand_in.expect("discard 0 1024 512");
        if worker.count(Counter::HandedOver) == before {
            break;
        }
        assert!(Instant::now() < deadline, "it still hands over");
        stand_in.expect("write 0 1024 512 20");
    }
    stand_in.expect("zeros 0 1024 512");
}

#[test]
fn where_qemu_watches_its_memory_a_discard_is_one() {
    let (mut stand_in, worker) = lazy();
    stand_in.expect("register 0");
    stand_in.expect("discard 0 0 512");
    assert_eq!((worker.freed(0..PAGES), lazily_free_kib(&stand_in)), (0, 0));
    let refusal = worker.refused(&Request::Take { runs: vec![Pages { page: 0, pages: 1 }] });
    assert!(matches!(refusal, Refusal::NotTaking { .. }), "{refusal}");
    stand_in.expect("unregister 0");
    stand_in.expect("discard 0 512 512");
    assert_eq!(worker.freed(0..PAGES), 512);
}

#[test]
fn copies_aside_and_shared_pages_are_given_up_at_once() {
    let mut it = prepared(64);
    it.worker.hand_over(true);
    assert_eq!(it.worker.merge(&[(0, 64, Some(100))]).shared, 64);
    it.stand_in.expect("discard 0 0 512");
    assert_eq!(it.worker.merged(0..512), 0);
    assert_eq!(it.worker.freed(0..512), 512);
    it.stand_in.expect("zeros 0 0 64");
    // Reading mapped zeros where pages were merged. Of the rest the kernel keeps a few that are
    // on their way between its lists.
    let Taken { taken, gone, kept } = it.worker.take(0, 512);
    assert!(
        (384..=448).contains(&taken) && gone == 0 && kept == 512 - taken,
        "{taken} {gone} {kept}"
    );
    drop(it);

    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.hand_over(true);
    worker.revoke([0, 1]);
    stand_in.expect("discard 0 0 512");
    assert_eq!(worker.count(Counter::Discarded), u64::from(2 * GRANULE));
    assert_eq!(worker.freed(0..512), 512 - 2 * GRANULE as usize);
    stand_in.expect(&format!("zeros 0 0 {}", 2 * GRANULE));
}

#[test]
fn what_is_freed_is_not_taken_out_of_reach_until_the_guest_finds_it_gone() {
    let (mut stand_in, worker) = lazy();
    assert_eq!(worker.ask(&Request::Track(common::by_name())), protocol::Answer::Done { count: 0 });
    stand_in.expect("discard 0 0 1024");
    assert_eq!(worker.revoke(0..1024 / GRANULE), 0);
    assert_eq!(lazily_free_kib(&stand_in), 4096);
    stand_in.expect("drop 0 0 512");
    // A hole in an empty block is filled with a huge page, or with the zeros of its granule.
    stand_in.expect("touch 0 7");
    let plain = 1024 - worker.freed(0..1024);
    assert!(plain == 512 || plain == GRANULE as usize, "{plain}");
    assert_eq!(worker.revoke([0]), 1);
    stand_in.expect("zeros 0 0 64");
    worker.release();
    stand_in.expect("zeros 0 0 64");
}
