//! Events while one of the shim's kernel calls is under way, or fails again and again. No thread
//! waits for a slow operation, nothing happens in between, and every page keeps its content.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::prepared::{Prepared, prepared_in};
use common::{GRANULE, StandIn, by_name};
use protocol::layout::Counter;
use protocol::{Merged, Request};
use rustix::io::Errno;
use sys::faults::{Call, Fault, Faults, How, PLAN_ENV};

/// A busy machine has finished everything by then.
const LONG: Duration = Duration::from_secs(30);
/// A thread that has not finished by then waits, or the machine is busy and the test checks less.
const A_WHILE: Duration = Duration::from_millis(300);

/// A stand-in whose kernel calls go as planned, with `pages` pages that can be merged.
fn planned(pages: u32) -> (Prepared, Faults) {
    let plan = tempfile::NamedTempFile::new().unwrap();
    let faults = Faults::create(plan.path()).unwrap();
    let stand_in = StandIn::start(|command| {
        command.env(PLAN_ENV, plan.path());
    });
    // The stand-in has mapped the plan by the time it has memory.
    (prepared_in(stand_in, pages), faults)
}

/// Holds `ask` at its next call of this kind while `meanwhile` runs.
fn meanwhile<T: Send>(
    faults: &Faults,
    call: Call,
    ask: impl FnOnce() -> T + Send,
    meanwhile: impl FnOnce(),
) -> T {
    faults.plan(0, Fault::once(call, How::HoldBefore));
    std::thread::scope(|scope| {
        let asked = scope.spawn(ask);
        assert!(faults.wait_until_held(0, LONG), "no such call");
        meanwhile();
        faults.forget(0);
        asked.join().unwrap()
    })
}

#[test]
fn a_file_for_direct_io_is_opened_when_the_turn_that_merges_is_over() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(300);
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), [0; 4096]).unwrap();
    let read = format!("read-direct 0 400 {}", file.path().display());
    let merged = meanwhile(
        &faults,
        Call::Move,
        || worker.merge(&[(0, 64, Some(100))]),
        || {
            stand_in.begin(&read);
            assert!(!stand_in.has_answer_within(A_WHILE), "it was opened while pages were aside");
        },
    );
    assert_eq!(merged, Merged { shared: 64, ..Merged::default() });
    if let Err(error) = stand_in.finish() {
        eprintln!("not read: {error}");
    }
    stand_in.expect("fill 0 1");
    stand_in.expect("check 0 1");
}

#[test]
fn the_watchdog_does_not_wait_for_the_lock() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(0);
    worker.ask(&Request::Track(by_name()));
    assert_eq!(worker.revoke([2, 3]), 2);
    meanwhile(
        &faults,
        Call::Move,
        || worker.revoke([4]),
        || {
            stand_in.begin("touch 0 70");
            // Three times as long as a fault may wait.
            assert!(!stand_in.has_answer_within(A_WHILE));
        },
    );
    stand_in.finish().unwrap();
    worker.status();
    assert!(worker.count(Counter::Stalls) > 0, "it waited for the lock, and counted nothing");
    assert!(worker.count(Counter::LongestHoldNs) > 200_000_000);
    worker.until_all_back();
    stand_in.expect("check 0 1");
}

#[test]
fn while_the_kernel_drops_what_was_freed_faults_are_served() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(0);
    worker.ask(&Request::Track(by_name()));
    worker.hand_over(true);
    stand_in.expect("report 0 0 512");
    assert_eq!(worker.revoke([20]), 1);
    let taken = meanwhile(
        &faults,
        Call::PageOut,
        || worker.take(0, 512),
        || {
            stand_in.expect(&format!("touch 0 {}", 20 * GRANULE));
            stand_in.expect("discard 0 512 1");
            stand_in.expect("zeros 0 512 1");
        },
    );
    assert_eq!(taken.taken + taken.gone, 512, "{taken:?}");
    assert_eq!(worker.freed(0..512), 0);
    stand_in.expect("zeros 0 0 513");
}

#[test]
fn qemu_begins_to_watch_its_writes_after_a_copy_or_before_and_not_in_between() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(300);
    worker.merge(&[(0, 200, Some(100))]);
    // This makes the kernel copy the pages.
    stand_in.expect("register 0");
    stand_in.expect("unregister 0");
    stand_in.expect("write 0 1 10 10");
    let shared = meanwhile(
        &faults,
        Call::PopulateWrite,
        || worker.unshare(0, 512),
        || {
            stand_in.begin("watch-writes 0");
            assert!(!stand_in.has_answer_within(A_WHILE), "it watches what is being written");
        },
    );
    assert_eq!(shared, 200);
    stand_in.finish().unwrap();
    stand_in.expect("write-seen 0 5");
    stand_in.expect("unregister 0");
    stand_in.expect("check 0 1");
}

#[test]
fn what_is_discarded_without_room_for_a_mapping_is_zero_and_nobody_hangs() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(300);
    worker.merge(&[(0, 300, Some(100))]);
    let always = |call| Fault { times: u64::MAX, ..Fault::once(call, How::Refuse(Errno::NOMEM)) };
    faults.plan(0, always(Call::MapFresh));
    // Nor can writes be let through.
    faults.plan(1, always(Call::Unprotect));
    stand_in.expect("discard 0 50 10");
    assert!(faults.met(0) > 0);
    faults.forget(0);
    faults.forget(1);
    stand_in.expect("zeros 0 50 10");
    assert_eq!(worker.unshare(0, 512), 300, "those are the kernel's copies");
    stand_in.expect("zeros 0 50 10");
    stand_in.expect("fill 0 1");
    stand_in.expect("check 0 1");
}

#[test]
fn a_page_that_will_not_come_home_is_tried_until_it_does() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(0);
    for errno in [Errno::AGAIN, Errno::NOMEM] {
        for command in ["touch 0 70", "discard 0 64 4", "check 0 1"] {
            worker.ask(&Request::Track(by_name()));
            assert_eq!(worker.revoke([2]), 1);
            let refuse = Fault { times: 200, ..Fault::once(Call::Move, How::Refuse(errno)) };
            faults.plan(0, refuse);
            // Nor can the page be copied.
            faults.plan(1, Fault { call: Call::Copy, ..refuse });
            stand_in.expect_beside(&worker, command);
            worker.release();
            assert_eq!(worker.count(Counter::StagedPages), 0);
            faults.forget(0);
            faults.forget(1);
            if command.starts_with("discard") {
                stand_in.expect("zeros 0 64 4");
                stand_in.expect("fill 0 1");
            }
            stand_in.expect("check 0 1");
        }
    }
}

#[test]
fn a_page_that_was_put_aside_and_will_not_go_back_is_nobodys_but_the_guests() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(64);
    for command in ["check 0 1", "discard 0 0 64", "register 0"] {
        // All are different, and none can be moved back for a while.
        let refuse =
            Fault { place: 1, times: 100, ..Fault::once(Call::Move, How::Refuse(Errno::AGAIN)) };
        faults.plan(0, refuse);
        let merged = worker.merge(&[(0, 64, Some(101))]);
        assert_eq!(merged.shared, 0);
        stand_in.expect(command);
        faults.forget(0);
        match command {
            "register 0" => drop(stand_in.expect("unregister 0")),
            "discard 0 0 64" => drop(stand_in.expect("zeros 0 0 64")),
            _ => {}
        }
        stand_in.expect("fill 0 1");
        stand_in.expect("check 0 1");
        assert_eq!(worker.merge(&[(0, 64, Some(100))]).shared, 64);
        worker.unshare(0, 64);
        stand_in.expect("check 0 1");
    }
}

#[test]
fn a_move_that_is_done_and_denied_loses_nothing() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(64);
    let deny = Fault { times: u64::MAX, ..Fault::once(Call::Move, How::Deny(Errno::EXIST)) };
    faults.plan(0, deny);
    worker.ask(&Request::Track(by_name()));
    assert_eq!(worker.revoke(0..8), 8);
    stand_in.expect_beside(&worker, "check 0 1");
    worker.release();
    assert_eq!(worker.merge(&[(0, 64, Some(100))]).shared, 64);
    worker.unshare(0, 64);
    assert!(faults.met(0) > 10);
    stand_in.expect("check 0 1");
}

#[test]
fn who_gives_everything_back_does_not_wait_for_ever_for_page_tables_that_do_not_answer() {
    let (Prepared { mut stand_in, worker, .. }, faults) = planned(0);
    worker.ask(&Request::Track(by_name()));
    let never = How::Refuse(Errno::NOMEM);
    faults.plan(0, Fault { times: u64::MAX, ..Fault::once(Call::Scan, never) });
    // Nothing is away, but the page tables do not confirm that staging may be unmapped.
    stand_in.begin("register 0");
    assert!(stand_in.has_answer_within(LONG), "it neither went on nor ended");
    assert!(stand_in.finish().is_err(), "staging was unmapped on a guess");
}
