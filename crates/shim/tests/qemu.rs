//! Calls of QEMU about its memory: the shim gives guest RAM back in time.

mod common;

use common::{GRANULE, StandIn, TestWorker, by_name};
use protocol::layout::{Counter, GiveBack};
use protocol::{Answer, Refusal, Request, State};
use requires::{Requirement, requires};

const MIB: u32 = 64;
const GRANULES: u32 = MIB * 256 / GRANULE;

fn tracked() -> (StandIn, TestWorker) {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    assert_eq!(worker.revoke(0..GRANULES), GRANULES);
    (stand_in, worker)
}

#[test]
fn qemu_registers_its_memory_itself_and_tracking_comes_back_after() {
    let (mut stand_in, worker) = tracked();
    stand_in.expect("register 0");
    let why = GiveBack::QemuRegisters.to_string();
    assert_eq!(worker.status().0, State::Suspended { why: why.clone() });
    assert_eq!(worker.refused(&Request::Track(by_name())), Refusal::NotTracking { why });
    // No thread reads the stand-in's own userfaultfd: a missing page would block it for ever.
    stand_in.expect("check 0 1");
    stand_in.expect("unregister 0");
    assert_eq!(worker.status().0, State::Off);
    assert_eq!(worker.ask(&Request::Track(by_name())), Answer::Done { count: 0 });
    assert_eq!(worker.revoke(0..GRANULES), GRANULES);
    stand_in.expect("check 0 1");
}

#[test]
fn a_descriptor_that_is_closed_behind_our_back_stays_open() {
    let (mut stand_in, worker) = tracked();
    stand_in.expect("close-all");
    stand_in.expect("check 0 1");
    assert_eq!(worker.revoke(0..GRANULES), GRANULES, "the connection is there too");
    stand_in.expect("check 0 1");
}

#[test]
fn a_forked_child_does_nothing_and_harms_nobody() {
    let (mut stand_in, worker) = tracked();
    stand_in.expect("fork");
    assert_eq!(worker.status().0, State::On(by_name()));
    assert_eq!(worker.count(Counter::StagedPages), u64::from(MIB * 256));
    stand_in.expect("check 0 1");
}

#[test]
fn locked_memory_is_given_back_first_and_not_tracked_again() {
    let (mut stand_in, worker) = tracked();
    let Some(_) = requires(Requirement::LockedMemory, stand_in.tell("mlockall")) else { return };
    assert_eq!(worker.count(Counter::StagedPages), 0);
    assert!(matches!(worker.status().0, State::Unsupported { why } if why.contains("mem-lock")));
    stand_in.expect("check 0 1");
}

#[test]
fn a_block_that_is_unplugged_takes_its_tracking_along() {
    let (mut stand_in, worker) = tracked();
    stand_in.expect("plug 32");
    stand_in.expect("fill 1 2");
    let worker = {
        drop(worker);
        TestWorker::tracking(&stand_in)
    };
    assert_eq!(worker.regions.len(), 2);
    assert_eq!(worker.revoke(0..GRANULES + 256), GRANULES + 256);
    stand_in.expect("unplug 0");
    let (state, generation) = worker.status();
    assert_eq!((state, generation), (State::Off, 3));
    let refusal = worker.refused(&Request::Track(by_name())).to_string();
    assert!(refusal.contains("Hello again"), "{refusal}");
    stand_in.expect("check 1 2");
    drop(worker);
    let worker = TestWorker::tracking(&stand_in);
    assert_eq!(worker.regions.len(), 1);
    assert_eq!(worker.revoke(0..GRANULES), 256);
    stand_in.expect("check 1 2");
}

#[test]
fn a_block_that_is_plugged_later_is_seen_and_tracked() {
    let (mut stand_in, worker) = tracked();
    stand_in.expect("plug 32");
    stand_in.expect("fill 1 2");
    assert_eq!(worker.status(), (State::Off, 2));
    assert_eq!(worker.shared().last_given_back(), Some(GiveBack::RegionsChanged));
    let Answer::Welcome { regions, .. } =
        worker.ask(&Request::Hello { version: protocol::VERSION })
    else {
        panic!("no welcome");
    };
    let numbers: Vec<_> = regions.iter().map(|region| (region.first_page, region.pages)).collect();
    assert_eq!(numbers, [(0, 16384), (16384, 8192)]);
    drop(worker);
    let worker = TestWorker::tracking(&stand_in);
    assert_eq!(worker.revoke(0..768), 768);
    stand_in.expect("check 0 1");
    stand_in.expect("check 1 2");
}

#[test]
fn a_page_that_qemu_maps_anew_is_zero_and_the_rest_stays() {
    let (mut stand_in, worker) = tracked();
    stand_in.expect("remap 0 40");
    stand_in.expect("zeros 0 40 1");
    assert_eq!(worker.count(Counter::StagedPages), 0);
    assert_eq!(worker.ask(&Request::Track(by_name())), Answer::Done { count: 0 });
    assert_eq!(worker.revoke(0..GRANULES), GRANULES);
    stand_in.expect("zeros 0 40 1");
    stand_in.expect("touch 0 41");
    worker.release();
    stand_in.expect("zeros 0 40 1");
}

#[test]
fn a_disk_reads_past_the_page_cache_into_a_revoked_page() {
    let (mut stand_in, worker) = tracked();
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), vec![0; 8192]).unwrap();
    let path = file.path().display();
    let read = stand_in.tell(&format!("read-direct 0 70 {path}"));
    let Some(_) = requires(Requirement::DirectIo, read) else { return };
    stand_in.expect("zeros 0 70 1");
    assert_eq!(worker.count(Counter::Traps), 1);
}

#[test]
fn pages_that_are_pinned_stay_where_they_are() {
    let mut stand_in = StandIn::with_ram(MIB);
    let Some(_) = requires(Requirement::Pinning, stand_in.tell("pin 0 512 512")) else { return };
    let worker = TestWorker::tracking(&stand_in);
    assert_eq!(worker.revoke(0..GRANULES), GRANULES - 16, "16 granules are pinned whole");
    assert_eq!(worker.count(Counter::Pinned), 512);
    assert!(!worker.shared().is_staged(16, GRANULE));
    stand_in.expect("check 0 1");
}
