//! The worker connects, misbehaves, is silent, or leaves: the guest never notices.

mod common;

use std::time::{Duration, Instant};

use common::{GRANULE, StandIn, TestWorker, by_name, connect, receive};
use protocol::layout::{Counter, GiveBack};
use protocol::{Answer, Refusal, Request, State, Tracking, VERSION, VERSIONS, most_revoked};

const MIB: u32 = 64;
const GRANULES: u32 = MIB * 256 / GRANULE;

#[test]
fn everything_comes_back_when_the_connection_closes() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..GRANULES);
    let gone = worker.hang_up();
    let took = gone.until_all_back();
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(gone.shared().last_given_back(), Some(GiveBack::WorkerGone));
    stand_in.expect("check 0 1");
    let next = TestWorker::tracking(&stand_in);
    assert_eq!(next.revoke(0..GRANULES), GRANULES, "a new worker starts afresh");
    stand_in.expect("check 0 1");
}

#[test]
fn everything_comes_back_when_the_worker_is_silent_for_two_seconds() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..GRANULES);
    let silent = Instant::now();
    // Until then nothing comes back; a look that came late tells nothing.
    while silent.elapsed() < Duration::from_millis(1900) {
        let staged = worker.count(Counter::StagedPages);
        let is_early = silent.elapsed() < Duration::from_millis(1900);
        assert!(!is_early || staged == u64::from(MIB * 256), "after {:?}", silent.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
    worker.until_all_back();
    assert!(silent.elapsed() < Duration::from_millis(3500), "{:?}", silent.elapsed());
    assert_eq!(worker.shared().last_given_back(), Some(GiveBack::WorkerSilent));
    assert_eq!(worker.status().0, State::Off);
    stand_in.expect("check 0 1");
}

#[test]
fn a_status_now_and_then_is_sign_of_life_enough() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke([1]);
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(worker.status().0, State::On(by_name()));
    }
    assert_eq!(worker.count(Counter::StagedPages), u64::from(GRANULE));
}

#[test]
fn the_fuse_gives_everything_back_until_tracking_is_asked_for_again() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    worker.ask(&Request::Track(Tracking { max_traps_per_s: 50, ..by_name() }));
    worker.revoke(0..GRANULES);
    stand_in.expect("check 0 1");
    worker.until_all_back();
    assert_eq!(worker.shared().last_given_back(), Some(GiveBack::Fuse));
    let why = GiveBack::Fuse.to_string();
    assert_eq!(worker.status().0, State::Suspended { why: why.clone() });
    let refusal = worker.refused(&Request::Revoke { granules: vec![1] });
    assert_eq!(refusal, Refusal::NotTracking { why });
    assert_eq!(worker.ask(&Request::Track(by_name())), Answer::Done { count: 0 });
    assert_eq!(worker.revoke([1]), 1);
}

#[test]
fn a_second_worker_is_turned_away_and_the_first_not_disturbed() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke([7]);
    let second = connect(&stand_in);
    let busy = Refusal::Busy { pid: std::process::id() };
    assert_eq!(receive(&second).unwrap().0, Answer::Refused(busy));
    assert!(receive(&second).is_err(), "and hung up");
    assert_eq!(worker.status().0, State::On(by_name()));
    assert!(worker.shared().is_staged(7, GRANULE));
}

#[test]
fn traps_that_nobody_reads_are_counted_as_lost() {
    let mut stand_in = StandIn::with_ram(MIB);
    let mut worker = TestWorker::meet(&stand_in);
    worker.ask(&Request::Track(Tracking { granule_pages: 1, ..by_name() }));
    worker.traps();
    let began = worker.count(Counter::Traps);
    let at_once = most_revoked(1);
    for _ in 0..10 {
        for first in (0..at_once).step_by(2048) {
            worker.revoke(first..first + 2048);
        }
        stand_in.expect_beside(&worker, "check 0 1");
    }
    let made = worker.count(Counter::Traps) - began;
    let (read, drained) = worker.traps();
    assert_eq!(made, 10 * u64::from(at_once));
    assert_eq!(read.len() as u64 + drained.lost, made);
    assert!(drained.lost > 0);
}

#[test]
fn messages_that_make_no_sense_are_refused_and_change_nothing() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke([9]);
    for packet in [&[255][..], &[0], &[2, 255, 255, 255, 255, 15], &[3, 3], &[1; 300]] {
        let answer = worker.send_raw(packet).unwrap();
        assert!(matches!(answer, Answer::Refused(Refusal::Malformed { .. })), "{answer:?}");
    }
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..2000 {
        let packet: Vec<u8> = (0..random.usize(1..40)).map(|_| random.u8(5..)).collect();
        assert!(matches!(worker.send_raw(&packet).unwrap(), Answer::Refused(_)));
    }
    assert_eq!(worker.status().0, State::On(by_name()));
    assert_eq!(worker.count(Counter::StagedPages), u64::from(GRANULE));
    stand_in.expect("check 0 1");
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    let wrong = Tracking { granule_pages: 3, ..by_name() };
    let refusal = worker.refused(&Request::Track(wrong)).to_string();
    assert!(refusal.starts_with("granule_pages: 3"), "{refusal}");
    let wrong = Tracking { hot_set: Some(2), ..by_name() };
    assert!(worker.refused(&Request::Track(wrong)).to_string().starts_with("hot_set: 2"));
    assert_eq!(worker.revoke([GRANULES, u32::MAX, 5, 5]), 1, "what does not exist is skipped");
    assert_eq!(worker.status().0, State::On(by_name()));
}

#[test]
fn a_packet_that_is_too_long_ends_the_connection() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke([1]);
    assert!(worker.send_raw(&vec![0; 40_000]).is_err());
    worker.until_all_back();
}

#[test]
fn another_version_is_told_both_numbers_and_may_try_again() {
    let stand_in = StandIn::with_ram(MIB);
    let connection = connect(&stand_in);
    let hello = |version| Request::Hello { version }.encode(1).unwrap();
    let status = Request::Status.encode(1).unwrap();
    connection.send(&status, None).unwrap();
    let answer = receive(&connection).unwrap().0;
    assert!(matches!(answer, Answer::Refused(Refusal::NotTracking { .. })), "{answer:?}");
    for other in [VERSIONS.oldest - 1, VERSION + 1] {
        connection.send(&hello(other), None).unwrap();
        let refusal = Refusal::Version { shim: VERSION, worker: other };
        assert_eq!(receive(&connection).unwrap().0, Answer::Refused(refusal));
    }
    for spoken in (VERSIONS.oldest..=VERSION).rev() {
        connection.send(&hello(spoken), None).unwrap();
        let answer = receive(&connection).unwrap().0;
        assert!(
            matches!(answer, Answer::Welcome { version, .. } if version == spoken),
            "{answer:?}"
        );
    }
    // It speaks version 9 now, in which no shim tells its release.
    connection.send(&Request::About.encode(1).unwrap(), None).unwrap();
    let answer = receive(&connection).unwrap().0;
    assert!(matches!(answer, Answer::Refused(Refusal::Malformed { .. })), "{answer:?}");
    connection.send(&hello(VERSION), None).unwrap();
    receive(&connection).unwrap();
    connection.send(&Request::About.encode(1).unwrap(), None).unwrap();
    let release = env!("CARGO_PKG_VERSION").to_owned();
    assert_eq!(receive(&connection).unwrap().0, Answer::About { release });
}

#[test]
fn a_worker_that_reads_nothing_holds_nobody_up() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::tracking(&stand_in);
    worker.revoke(0..GRANULES);
    let connection = worker.flood(&Request::Status);
    let began = Instant::now();
    stand_in.expect("check 0 1");
    assert!(began.elapsed() < Duration::from_secs(10));
    drop(connection);
    TestWorker::tracking(&stand_in);
}

#[test]
#[cfg(not(feature = "hot-set"))]
fn the_shim_that_ships_has_no_hot_set() {
    let stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    let wanted = Tracking { hot_set: Some(64), ..by_name() };
    let refusal = worker.refused(&Request::Track(wanted)).to_string();
    assert!(refusal.contains("hot_set: 64: this shim was built without"), "{refusal}");
}
