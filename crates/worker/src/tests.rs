//! Tests of a worker's end of the connection, with a correct shim and with a faulty one.

use std::thread::sleep;
use std::time::{Duration, Instant};

use model::{Bytes, Millis, Reading};
use protocol::layout::{GiveBack, PageState};
use protocol::{
    Answer, HELLO, Refusal, Region, Request, State as ShimState, Trap, VERSION, VERSIONS,
};
use sys::clock::boot_now;
use sys::process::Identity;

use super::fake_shim::{FakeShim, Lie};
use super::*;

const PROBES: Settings = Settings::new(Mode::Probes { budget: 0.05 });
/// 64 MiB in granules of 128 KiB.
const PAGES: u32 = 16_384;

fn connect() -> Tracked {
    Tracked::connect(Identity::own().unwrap(), PROBES).unwrap()
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
            "not in time: {:?} {:?}",
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

/// The state of the connection after the first answer to a greeting.
fn after(lie: impl Fn(&Request) -> Option<Vec<u8>> + 'static) -> State {
    let mut shim = FakeShim::new(PAGES);
    shim.lie = Box::new(move |_, request| lie(request));
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, |_, t| *t.state() != State::Connecting);
    tracked.state().clone()
}

fn welcome(version: u16, regions: Vec<Region>, state: ShimState) -> Option<Vec<u8>> {
    Some(Answer::Welcome { version, regions, state }.encode(HELLO).unwrap())
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
    let begun = Instant::now();
    let deadline = begun + Duration::from_secs(6);
    until(&mut shim, &mut tracked, guest, |_, _| Instant::now() > deadline);
    let Reading { value: reading, at } = tracked.reading().unwrap();
    assert!(at <= boot_now() && boot_now().since(at) < Millis::secs(2), "{at:?}");
    let set = reading.working_set.unwrap().as_mib();
    assert!((21.0..26.0).contains(&set), "16 + 7 MiB are used: {set}");
    assert_eq!(reading.swapped, Bytes::mib(7));
    assert!(reading.curve.len() <= model::tracking::MOST_CURVE_POINTS);
    let held = Duration::from_micros(reading.cost.held_us);
    let is_cheap = held < begun.elapsed().mul_f64(0.05);
    assert!(reading.cost.traps > 0 && is_cheap, "{:?}", reading.cost);
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
fn where_nothing_is_known_of_qemus_own_memory_nothing_is_paged_out() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    tracked.set_resident(Some(Bytes::ZERO));
    let deadline = Instant::now() + Duration::from_secs(2);
    until(&mut shim, &mut tracked, |_| {}, |_, _| Instant::now() > deadline);
    assert!(tracked.cold().is_none());
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
    let refusal = Refusal::Version { shim: VERSION + 1, worker: VERSION };
    let state = after(move |_| Some(Answer::Refused(refusal.clone()).encode(HELLO).unwrap()));
    assert!(matches!(state, State::Unsupported { .. }));
    assert!(why(&state).contains("restart the VM to load the new shim"), "{state:?}");
    let state = after(|_| welcome(VERSION + 1, vec![], ShimState::Off));
    let other = format!("version {}", VERSION + 1);
    assert!(why(&state).contains(&other), "{state:?}");
}

#[test]
fn an_older_shim_is_spoken_to_in_its_version_and_a_newer_one_tells_its_release() {
    let mut shim = FakeShim::new(PAGES);
    shim.newest = VERSIONS.oldest;
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, is_on);
    let known = tracked.shim().unwrap();
    assert_eq!((known.protocol, known.release), (VERSIONS.oldest, None));
    assert!(known.differs.unwrap().contains("speaks version 9"));
    drop((tracked, shim));
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    let has_told = |_: &FakeShim, tracked: &Tracked| {
        tracked.shim().is_some_and(|known| known.release.as_deref() == Some("1.2.3"))
    };
    until(&mut shim, &mut tracked, |_| {}, has_told);
    assert_eq!(tracked.shim().unwrap().protocol, VERSION);
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
        ("makes no sense", Box::new(|_, _| Some(vec![0xff; 40]))),
        ("makes no sense", Box::new(move |_, _| welcome(VERSION, vec![region(0)], ShimState::Off))),
        ("expected", Box::new(move |_, _| welcome(VERSION, vec![region(512)], ShimState::Off))),
        ("not in flight", Box::new(|_, _| Some(Answer::Done { count: 1 }.encode(7).unwrap()))),
        (
            "no word",
            Box::new(|_, _| {
                Some(
                    Answer::Refused(Refusal::NotTracking { why: "no word".into() })
                        .encode(HELLO)
                        .unwrap(),
                )
            }),
        ),
    ];
    for (words, lie) in lies {
        let state = after(move |request| lie(HELLO, request));
        assert!(why(&state).contains(words), "{words}: {state:?}");
    }
}

#[test]
fn a_shim_that_never_answers_does_not_hold_the_worker_up() {
    let mut shim = FakeShim::new(PAGES);
    shim.lie = Box::new(|_, _| Some(Vec::new()));
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

/// A shim named by a process must belong to that process, or it is refused.
#[test]
fn an_address_that_belongs_to_another_process_is_not_talked_to() {
    let nonce = sys::random::word();
    // The thread of `sh` names the address, but this process listens there.
    let script =
        format!("printf {} > /proc/$$/comm; echo; read end", protocol::listener_name(nonce));
    let mut sh = std::process::Command::new("sh")
        .args(["-c", &script])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(sh.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    let victim = Identity::of(sh.id()).unwrap();
    let address = protocol::address(sh.id(), nonce);
    let listener = sys::seqpacket::Listener::bind(&address).unwrap();
    let error = Tracked::connect(victim, PROBES).unwrap_err();
    assert!(matches!(error, LinkError::Impostor { found, .. } if found == std::process::id()));
    drop(listener);
    let error = Tracked::connect(victim, PROBES).unwrap_err();
    assert!(error.to_string().contains("without Overbook's shim"), "{error}");
    let later = Identity { start_ticks: victim.start_ticks + 1, ..victim };
    let error = Tracked::connect(later, PROBES).unwrap_err();
    assert!(matches!(error, LinkError::Gone { .. }), "{error}");
    drop(sh.stdin.take());
    sh.wait().unwrap();
}

#[test]
fn of_what_is_freed_the_oldest_goes_until_as_much_is_left_as_is_to_be_kept() {
    let mut shim = FakeShim::new(PAGES);
    let now_ms = super::clock::now_us() / 1_000;
    for (block, age_ms) in [(0, 10), (1, 3_000), (2, 2_000)] {
        shim.free(block, 0..64, now_ms - age_ms);
    }
    // Its pages are no longer freed.
    shim.free(3, 0..0, now_ms - 5_000);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: None });
    until(&mut shim, &mut tracked, |_| {}, |shim, t| shim.hands_over && t.freed().is_some());
    let freed = |tracked: &Tracked| tracked.freed().map(|free| free.value.freed);
    until(&mut shim, &mut tracked, |_| {}, |_, t| freed(t) == Some(Bytes::kib(3 * 256)));
    assert_eq!(shim.freed().len(), 3 * 64, "nothing is taken unasked");
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::kib(256)) });
    until(&mut shim, &mut tracked, |_| {}, |_, t| freed(t) == Some(Bytes::kib(256)));
    assert_eq!(shim.freed(), (0..64).collect::<Vec<_>>());
    assert_eq!(tracked.freed().map(|free| free.value.taken), Some(Bytes::kib(512)));
    assert_eq!(shim.shared().freed_at_ms(3), None);
    tracked.set_freed(FreedOrder::default());
    until(&mut shim, &mut tracked, |_| {}, |shim, _| !shim.hands_over);
}

#[test]
fn what_was_freed_long_ago_is_taken_although_nobody_needs_it() {
    let now_ms = super::clock::now_us() / 1_000;
    if now_ms < 700_000 {
        // The machine has not been up for that long.
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
    shim.lie = Box::new(|id, request| {
        let refusal = Refusal::NotTaking { why: "QEMU migrates the VM".to_owned() };
        let is_take = matches!(request, Request::Take { .. });
        is_take.then(|| Answer::Refused(refusal).encode(id).unwrap())
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
    shim.lie = Box::new(|id, request| {
        let all = protocol::Taken { taken: u32::MAX, gone: u32::MAX, kept: u32::MAX };
        let is_take = matches!(request, Request::Take { .. });
        is_take.then(|| Answer::Taken(all).encode(id).unwrap())
    });
    shim.free(0, 0..64, 1);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::kib(255)) });
    let counts = |t: &Tracked| {
        t.freed().map(|free| (free.value.taken, free.value.dropped, free.value.taken_back))
    };
    let is_taken = |t: &Tracked| counts(t).is_some_and(|(taken, ..)| !taken.is_zero());
    until(&mut shim, &mut tracked, |_| {}, |_, t| is_taken(t));
    assert_eq!(counts(&tracked), Some((Bytes::kib(256), Bytes::ZERO, Bytes::ZERO)));
}

/// The state of a tracking connection after a request of this kind gets this answer.
fn after_status(lie: impl Fn(u32) -> Vec<u8> + 'static) -> State {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, is_on);
    shim.lie = Box::new(move |id, request| matches!(request, Request::Status).then(|| lie(id)));
    until(&mut shim, &mut tracked, |_| {}, |_, t| *t.state() != State::Tracking);
    tracked.state().clone()
}

#[test]
fn an_answer_to_nothing_or_of_another_kind_ends_the_connection() {
    let done = |id| Answer::Done { count: 1 }.encode(id).unwrap();
    let state = after_status(move |id| done(id + 1_000));
    assert!(why(&state).contains("which is not in flight"), "{state:?}");
    let state = after_status(done);
    assert!(why(&state).contains("an answer of another kind"), "{state:?}");
    let state = after_status(|_| welcome(VERSION, vec![], ShimState::Off).unwrap());
    assert!(why(&state).contains("which is not in flight"), "{state:?}");
    let refusal = || Answer::Refused(Refusal::Malformed { length: 9 });
    let state = after_status(move |_| refusal().encode(HELLO).unwrap());
    assert!(why(&state).contains("malformed message of 9 bytes"), "{state:?}");
}

#[test]
fn answers_belong_to_the_requests_that_they_name_in_whatever_order_they_come() {
    let mut shim = FakeShim::new(PAGES);
    let now_ms = super::clock::now_us() / 1_000;
    shim.free(0, 0..64, now_ms - 2_000);
    shim.free(1, 0..0, now_ms - 5_000);
    let mut tracked = connect();
    until(&mut shim, &mut tracked, |_| {}, is_on);
    // Now it revokes, asks for the status, and takes and keeps freed memory.
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::ZERO) });
    let deadline = Instant::now() + Duration::from_secs(20);
    while shim.waiting() < 4 {
        assert!(Instant::now() < deadline, "{} requests", shim.waiting());
        tracked.step();
        shim.collect();
        sleep(Duration::from_millis(2));
    }
    shim.answer_backwards();
    let taken = |t: &Tracked| t.freed().map(|free| free.value.taken);
    until(&mut shim, &mut tracked, |_| {}, |_, t| taken(t) == Some(Bytes::kib(256)));
    assert_eq!(*tracked.state(), State::Tracking);
}

#[test]
fn a_shim_that_is_busy_for_a_while_is_not_asked_the_same_again_and_again() {
    let mut shim = FakeShim::new(PAGES);
    shim.free(0, 0..64, 1);
    let mut tracked = connect();
    tracked.set_freed(FreedOrder { is_lazy: true, keep: Some(Bytes::kib(128)) });
    until(&mut shim, &mut tracked, |_| {}, is_on);
    let busy = Instant::now();
    while busy.elapsed() < Duration::from_millis(2_500) {
        tracked.step();
        shim.collect();
        sleep(Duration::from_millis(2));
    }
    assert_eq!(*tracked.state(), State::Tracking);
    let mut kinds: Vec<_> = shim.requests().map(std::mem::discriminant).collect();
    let all = kinds.len();
    kinds.dedup();
    assert!((1..=6).contains(&all) && kinds.len() == all, "{all} requests, {} kinds", kinds.len());
}

#[test]
fn what_is_known_grows_older_while_nothing_new_is() {
    let mut shim = FakeShim::new(PAGES);
    let mut tracked = connect();
    let guest = |shim: &mut FakeShim| (0..512).for_each(|granule| shim.touch(granule));
    until(&mut shim, &mut tracked, guest, |_, t| t.reading().is_some());
    // From now on tracking is impossible, and there are no new results.
    shim.lie = Box::new(|id, request| {
        let refusal = Refusal::NotTracking { why: "QEMU migrates the VM".to_owned() };
        let is_track = matches!(request, Request::Track(_));
        is_track.then(|| Answer::Refused(refusal).encode(id).unwrap())
    });
    shim.give_back(Some(GiveBack::Migrating));
    until(&mut shim, &mut tracked, |_| {}, |_, t| *t.state() != State::Tracking);
    let is_old = |t: &Tracked| t.reading().is_some_and(|r| r.age(boot_now()) > Millis::secs(3));
    let before = tracked.reading().unwrap();
    until(&mut shim, &mut tracked, |_| {}, |_, t| is_old(t));
    let after = tracked.reading().unwrap();
    assert!(after.at.since(before.at) < Millis::secs(2), "{before:?} {after:?}");
}

#[test]
fn what_shares_all_of_its_pages_is_asked_for_once_and_not_taken_to_be_in_use() {
    let mut shim = FakeShim::new(PAGES);
    // All but a sixteenth is merged; the rest is all in use.
    let merged = 32 * 32..PAGES;
    merged.for_each(|page| shim.shared().set_state(page, PageState::Merged));
    let mut tracked = connect();
    let guest = |shim: &mut FakeShim| (0..32).for_each(|granule| shim.touch(granule));
    let deadline = Instant::now() + Duration::from_secs(8);
    until(&mut shim, &mut tracked, guest, |_, _| Instant::now() > deadline);
    let set = tracked.reading().unwrap().value.working_set.unwrap().as_mib();
    assert!((3.0..6.0).contains(&set), "4 MiB are in use: {set}");
    let needless = shim.asked.iter().filter(|granule| **granule >= 32).count();
    assert!((1..=2 * 480).contains(&needless), "{needless} revocations of 480 unused granules");
}
