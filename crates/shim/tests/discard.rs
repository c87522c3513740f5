//! Pages that QEMU discards (balloon, free-page reports) are gone, staged or not.

mod common;

use common::{GRANULE, StandIn, TestWorker};
use protocol::layout::Counter;

const MIB: u32 = 64;
const GRANULES: u32 = MIB * 256 / GRANULE;

#[test]
fn discarded_staged_pages_are_freed_at_once_and_read_as_zeros() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..GRANULES);
    let before = stand_in.anonymous_kib();
    stand_in.expect("discard 0 0 8192");
    assert_eq!(worker.count(Counter::Discarded), 8192);
    let freed = before - stand_in.anonymous_kib();
    assert!(freed > 30 << 10, "{freed} KiB freed of 32 MiB");
    stand_in.expect("zeros 0 0 8192");
    stand_in.expect("touch 0 8192");
    worker.release();
    stand_in.expect("zeros 0 0 8192");
}

#[test]
fn a_discard_of_a_part_of_a_granule_leaves_the_rest() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke([0, 1, 2]);
    // The last 16 pages of granule 0, all of 1, the first 16 of 2.
    stand_in.expect("discard 0 16 64");
    stand_in.expect("zeros 0 16 64");
    assert_eq!(stand_in.expect("touch 0 15"), stand_in.expect("touch 0 80"));
    stand_in.expect("discard 0 0 16384");
    stand_in.expect("zeros 0 0 16384");
}

#[test]
fn a_discarded_granule_stays_revoked_so_that_its_next_touch_is_news() {
    let mut stand_in = StandIn::with_ram(MIB);
    let mut worker = TestWorker::tracking(&stand_in);
    worker.revoke([5]);
    worker.traps();
    stand_in.expect("discard 0 160 32");
    assert!(worker.shared().is_staged(5, GRANULE));
    stand_in.expect("touch 0 170");
    assert_eq!(worker.traps().0, [5]);
}

#[test]
fn a_discard_before_tracking_is_not_undone_by_it() {
    let mut stand_in = StandIn::with_ram(MIB);
    stand_in.expect("discard 0 0 512");
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..GRANULES);
    stand_in.expect("zeros 0 0 512");
    stand_in.expect("fill 0 3");
    worker.release();
    stand_in.expect("check 0 3");
}
