//! Figures of synthetic recordings, without guests: 30 s of `observe`, 70 s of `enforce`.

use super::*;
use crate::recording::RecordingProgress;

const OBSERVE_S: f64 = 0.0;
const ENFORCE_S: f64 = 30.0;
const END_S: f64 = 100.0;

/// A recording that meets all targets: the hungry guest gets four times as fast, and no
/// other guest loses.
fn good() -> Recording {
    let mut recording = Recording::begin();
    for guest in [HUNGRY].into_iter().chain(OTHERS) {
        let moment = |second: u32| {
            let at_s = f64::from(second);
            let is_faster = guest == HUNGRY && at_s >= ENFORCE_S;
            Moment {
                at_s,
                ops_per_s: Some(if is_faster { 40.0 } else { 10.0 }),
                progress: Some(RecordingProgress { at_s, ops: u64::from(second) * 10 }),
                balloon: Some(fleet::BASE),
                used: Some(Bytes::mib(100)),
                swapped: Some(Bytes::mib(u64::from(second))),
            }
        };
        recording.guests.insert(guest.to_owned(), (0..100).map(moment).collect());
    }
    recording
}

fn outcome(recording: &Recording) -> QuickstartResult<'_> {
    QuickstartResult { recording, observe_s: OBSERVE_S, enforce_s: ENFORCE_S, end_s: END_S }
}

fn figures_of(recording: &Recording) -> Figures {
    outcome(recording).figures(Figures::new("quickstart", "m".into(), 1, 1), 0)
}

/// The same with the moments of one guest changed from some second on.
fn with(guest: &str, from: usize, change: impl Fn(&mut Moment)) -> Recording {
    let mut recording = good();
    recording.guests.get_mut(guest).unwrap()[from..].iter_mut().for_each(change);
    recording
}

fn misses(recording: &Recording, figure: &str) -> bool {
    let figures = figures_of(recording);
    !figures.met(figure) && !figures.passed()
}

#[test]
fn what_is_as_it_should_be_passes() {
    assert!(figures_of(&good()).passed(), "{}", figures_of(&good()).to_table());
}

#[test]
fn nothing_recorded_is_nothing_passed() {
    let nothing = Recording::begin();
    for figure in ["hungry_speedup", "others_ratio", "leaked_bytes"] {
        assert!(misses(&nothing, figure), "{figure}");
    }
}

#[test]
fn memory_that_could_not_be_read_is_not_zero() {
    let one_second = |m: &mut Moment| m.used = m.used.filter(|_| m.at_s != 50.0);
    assert!(misses(&with("shop-3", 0, one_second), "leaked_bytes"));
}

#[test]
fn a_second_beyond_the_budget_is_a_leak() {
    let burst = |m: &mut Moment| m.used = Some(Bytes::mib(300));
    let recording = with(HUNGRY, 99, burst);
    assert!(misses(&recording, "leaked_bytes"));
    assert_eq!(outcome(&recording).leaked(), Some(Bytes::mib(300 + 3 * 100 - 4 * 128)));
}

#[test]
fn a_guest_that_falls_silent_has_lost() {
    let frozen = RecordingProgress { at_s: 60.0, ops: 600 };
    let stalled = with("research-1", 60, |m| {
        (m.ops_per_s, m.progress) = (None, Some(frozen));
    });
    assert!(misses(&stalled, "others_ratio"));
    assert!(misses(&with("shop-2", 0, |m| m.progress = None), "others_ratio"));
}

#[test]
fn a_guest_that_gets_slower_by_as_much_fails() {
    let slower = with(HUNGRY, 30, |m| m.ops_per_s = Some(2.5));
    assert!(misses(&slower, "hungry_speedup"));
    let others = with("research-2", 30, |m| {
        m.progress = m.progress.map(|it| RecordingProgress { ops: 300 + (it.ops - 300) / 2, ..it });
    });
    assert!(misses(&others, "others_ratio"));
}

#[test]
fn a_guest_that_is_missing_or_no_number_fails() {
    for guest in [HUNGRY, "shop-2", "research-2"] {
        let mut recording = good();
        recording.guests.remove(guest);
        assert!(!figures_of(&recording).passed(), "without {guest}");
    }
    assert!(misses(&with(HUNGRY, 0, |m| m.ops_per_s = Some(f64::NAN)), "hungry_speedup"));
}

#[test]
fn a_hungry_guest_that_falls_silent_is_not_fast() {
    assert!(misses(&with(HUNGRY, 40, |m| m.ops_per_s = None), "hungry_speedup"));
}

#[test]
fn three_times_of_nothing_is_no_speedup() {
    let idle =
        with(HUNGRY, 0, |m| m.ops_per_s = m.ops_per_s.filter(|ops| *ops > 10.0).or(Some(0.0)));
    assert!(misses(&idle, "hungry_speedup"));
}

#[test]
fn swap_traffic_is_per_second_and_unknown_when_it_was_not_seen() {
    let rate = |recording: &Recording| outcome(recording).swap_rate(HUNGRY, ENFORCE_S, END_S);
    assert_eq!(rate(&good()), Some(Bytes::mib(1)));
    assert_eq!(rate(&with(HUNGRY, 0, |m| m.swapped = None)), None);
}
