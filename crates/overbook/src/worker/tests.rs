//! A worker's end of the connection against a shim that behaves, and one that does not.

use std::thread::sleep;
use std::time::{Duration, Instant};

use model::Bytes;
use protocol::layout::GiveBack;
use protocol::{Answer, Refusal, Region, Request, State as ShimState, Trap, VERSION};

use super::fake_shim::{FakeShim, Lie};
use super::*;

const PROBES: Settings = Settings::new(Mode::Probes { budget: 0.05 });
/// 64 MiB in granules of 128 KiB.
const PAGES: u32 = 16_384;

fn connect() -> Tracked {
    Tracked::connect(std::process::id(), PROBES).unwrap()
}

/// Steps both until `is_so`.
fn until(
    shim: &mut FakeShim,
    tracked: &mut Tracked,
    mut each: impl FnMut(&mut FakeShim),
    is_so: impl Fn(&FakeShim, &Tracked) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so(shim, tracked) {
        assert!(
            Instant::now() < deadline,
            "in vain: {:?} {:?}",
            tracked.state(),
            tracked.reading()
        );
        tracked.step();
        shim.serve();
        each(shim);
        sleep(Duration::from_millis(2));
    }
}

fn is_on(_: &FakeShim, tracked: &Tracked) -> bool {
    *tracked.state() == State::Tracking
}

/// The first answer to a greeting, and what becomes of the connection.
fn after(lie: impl Fn(&Request) -> Option<Vec<u8>> + 'static) -> State {
    let mut shim = FakeShim::new(PAGES);
    shim.lie = Box::new(lie);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, |_, t| *t.state() != State::Connecting);
    tracked.state().clone()
}

fn welcome(version: u16, regions: Vec<Region>, state: ShimState) -> Option<Vec<u8>> {
    Some(Answer::Welcome { version, regions, state }.encode().unwrap())
}

fn why(state: &State) -> String {
    match state {
        State::Waiting { why } | State::Unsupported { why } => why.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_working_set_of_a_guest_is_found_and_its_swap_added() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    tracked.set_swapped(Bytes::mib(7));
    tracked.set_memory(Bytes::mib(20));
    // A quarter of the memory, all of it all the time.
    let guest = |shim: &mut FakeShim| (0..128).for_each(|granule| shim.touch(granule));
    let deadline = Instant::now() + Duration::from_secs(6);
    until(&mut shim, &mut tracked, guest, |_, _| Instant::now() > deadline);
    let reading = tracked.reading().unwrap();
    let set = reading.working_set.unwrap().as_mib();
    assert!((21.0..26.0).contains(&set), "16 + 7 MiB are used: {set}");
    assert_eq!(reading.swapped, Bytes::mib(7));
    assert!(reading.curve.len() <= model::tracking::MOST_CURVE_POINTS);
    assert!(reading.cost.traps > 0 && reading.cost.vcpu_share < 0.05, "{:?}", reading.cost);
    assert_eq!(tracked.ram(), Some(Bytes::mib(64)));
}

#[test]
fn what_the_shim_gives_back_is_taken_up_again_after_a_rest() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, |shim, _| shim.revoked() > 0);
    shim.give_back(Some(GiveBack::QemuRegisters));
    until(&mut shim, &mut tracked, |_| {}, |_, t| *t.state() != State::Tracking);
    assert!(why(tracked.state()).contains("QEMU watches its memory itself"));
    until(&mut shim, &mut tracked, |_| {}, is_on);
    assert_eq!(shim.tracks, 2);
}

#[test]
fn a_shim_that_went_away_is_found_again() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, is_on);
    drop(shim);
    tracked.step();
    assert_ne!(*tracked.state(), State::Tracking);
    let mut shim = FakeShim::new(PAGES);
    until(&mut shim, &mut tracked, |_| {}, is_on);
}

#[test]
fn a_release_leaves_nothing_out_of_reach() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, |shim, _| shim.revoked() > 0);
    tracked.release();
    shim.serve();
    assert_eq!((shim.revoked(), shim.is_connected()), (0, false));
}

#[test]
fn a_shim_of_another_release_is_named() {
    let refusal = Refusal::Version { shim: 9, worker: VERSION };
    let state = after(move |_| Some(Answer::Refused(refusal.clone()).encode().unwrap()));
    assert!(matches!(state, State::Unsupported { .. }));
    assert!(why(&state).contains("restart the VM to load the new shim"), "{state:?}");
    let state = after(|_| welcome(9, vec![], ShimState::Off));
    assert!(why(&state).contains("version 9"), "{state:?}");
}

#[test]
fn a_vm_that_cannot_be_tracked_keeps_the_shims_reason() {
    let why_not = "its memory is huge pages";
    let state = after(move |_| {
        welcome(VERSION, vec![], ShimState::Unsupported { why: why_not.to_owned() })
    });
    assert_eq!(state, State::Unsupported { why: why_not.to_owned() });
}

#[test]
fn answers_that_make_no_sense_end_the_connection() {
    let region = |pages| Region { first_page: 0, pages, address: 0 };
    let lies: [(&str, Lie); 5] = [
        ("makes no sense", Box::new(|_| Some(vec![0xff; 40]))),
        ("makes no sense", Box::new(move |_| welcome(VERSION, vec![region(0)], ShimState::Off))),
        ("expected", Box::new(move |_| welcome(VERSION, vec![region(512)], ShimState::Off))),
        ("something else", Box::new(|_| Some(Answer::Done { count: 1 }.encode().unwrap()))),
        (
            "no word",
            Box::new(|_| {
                Some(
                    Answer::Refused(Refusal::NotTracking { why: "no word".into() })
                        .encode()
                        .unwrap(),
                )
            }),
        ),
    ];
    for (words, lie) in lies {
        let state = after(lie);
        assert!(why(&state).contains(words), "{words}: {state:?}");
    }
}

#[test]
fn a_shim_that_never_answers_does_not_hold_the_worker_up() {
    let mut shim = FakeShim::new(PAGES);
    shim.lie = Box::new(|_| Some(Vec::new()));
    let mut tracked = connect();
    let mut longest = Duration::ZERO;
    while *tracked.state() == State::Connecting {
        let before = Instant::now();
        tracked.step();
        longest = longest.max(before.elapsed());
        shim.serve();
        sleep(Duration::from_millis(10));
    }
    assert!(longest < Duration::from_millis(100), "{longest:?}");
    assert!(why(tracked.state()).contains("not answered for 3 s"));
}

#[test]
fn a_ring_full_of_nonsense_does_no_harm() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, is_on);
    for number in 0..200_000 {
        shim.push(Trap { granule: number % 700, at_us: number });
        shim.push(Trap { granule: u32::MAX - number, at_us: u32::MAX });
    }
    let before = Instant::now();
    tracked.step();
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    until(&mut shim, &mut tracked, |_| {}, is_on);
}

#[test]
fn an_address_that_belongs_to_somebody_else_is_not_talked_to() {
    let listener = sys::seqpacket::Listener::bind(&protocol::address(u32::MAX - 1)).unwrap();
    let error = Tracked::connect(u32::MAX - 1, PROBES).unwrap_err();
    assert!(matches!(error, LinkError::Impostor { found, .. } if found == std::process::id()));
    drop(listener);
    let error = Tracked::connect(u32::MAX - 1, PROBES).unwrap_err();
    assert!(error.to_string().contains("without Overbook's shim"), "{error}");
}

#[test]
fn of_what_is_freed_the_oldest_goes_until_as_much_is_left_as_is_to_be_kept() {
    let mut shim = FakeShim::new(PAGES);
    let now_ms = super::clock::now_us() / 1_000;
    for (block, age_ms) in [(0, 10), (1, 3_000), (2, 2_000)] {
        shim.free(block, 0..64, now_ms - age_ms);
    }
    // Its pages are not freed any more.
    shim.free(3, 0..0, now_ms - 5_000);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: None });
    until(&mut shim, &mut tracked, |_| {}, |shim, t| shim.hands_over && t.freed().is_some());
    let freed = |tracked: &Tracked| tracked.freed().map(|free| free.freed);
    until(&mut shim, &mut tracked, |_| {}, |_, t| freed(t) == Some(Bytes::kib(3 * 256)));
    assert_eq!(shim.freed().len(), 3 * 64, "nothing is taken unasked");
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::kib(256)) });
    until(&mut shim, &mut tracked, |_| {}, |_, t| freed(t) == Some(Bytes::kib(256)));
    assert_eq!(shim.freed(), (0..64).collect::<Vec<_>>());
    assert_eq!(tracked.freed().map(|free| free.taken), Some(Bytes::kib(512)));
    assert_eq!(shim.shared().freed_at_ms(3), None);
    tracked.set_freed(FreedOrder::default());
    until(&mut shim, &mut tracked, |_| {}, |shim, _| !shim.hands_over);
}

#[test]
fn what_was_freed_long_ago_is_taken_although_nobody_needs_it() {
    let now_ms = super::clock::now_us() / 1_000;
    if now_ms < 700_000 {
        // The machine has not been up for as long as that.
        return;
    }
    let mut shim = FakeShim::new(PAGES);
    shim.free(0, 0..64, now_ms - 600_001);
    shim.free(1, 0..64, now_ms);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: None });
    until(&mut shim, &mut tracked, |_| {}, |shim, _| shim.freed().len() == 64);
    assert_eq!(shim.freed()[0], 512);
}

#[test]
fn a_shim_that_takes_nothing_now_is_left_alone_for_a_while() {
    let mut shim = FakeShim::new(PAGES);
    shim.lie = Box::new(|request| {
        let refusal = Refusal::NotTaking { why: "QEMU migrates the VM".to_owned() };
        let is_take = matches!(request, Request::Take { .. });
        is_take.then(|| Answer::Refused(refusal).encode().unwrap())
    });
    shim.free(0, 0..64, 1);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::ZERO) });
    until(&mut shim, &mut tracked, |_| {}, |_, t| t.why_not_taken().is_some());
    assert_eq!(tracked.why_not_taken(), Some("not taking: QEMU migrates the VM"));
    assert_eq!(*tracked.state(), State::Tracking, "the connection holds");
}

#[test]
fn a_shim_is_not_believed_to_have_taken_more_than_it_was_asked_for() {
    let mut shim = FakeShim::new(PAGES);
    shim.lie = Box::new(|request| {
        let all = protocol::Taken { taken: u32::MAX, gone: u32::MAX, kept: u32::MAX };
        let is_take = matches!(request, Request::Take { .. });
        is_take.then(|| Answer::Taken(all).encode().unwrap())
    });
    shim.free(0, 0..64, 1);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::kib(255)) });
    let counts = |t: &Tracked| t.freed().map(|free| (free.taken, free.dropped, free.taken_back));
    let is_taken = |t: &Tracked| counts(t).is_some_and(|(taken, ..)| !taken.is_zero());
    until(&mut shim, &mut tracked, |_| {}, |_, t| is_taken(t));
    assert_eq!(counts(&tracked), Some((Bytes::kib(256), Bytes::ZERO, Bytes::ZERO)));
}
