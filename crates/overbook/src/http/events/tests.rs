//! Differences between ticks that become events, and those that do not.

use api::moves::{Moves, Progress};
use api::published::MemberState;
use model::{Bytes, Millis, Time};

use super::*;
use crate::fixture;

fn kinds(before: &Published, now: &Published) -> Vec<(EventKind, Option<String>)> {
    let events = between(before, now, &mut 1);
    events.into_iter().map(|event| (event.kind, event.vm)).collect()
}

fn only(kind: EventKind, vm: &str) -> Vec<(EventKind, Option<String>)> {
    vec![(kind, Some(vm.to_owned()))]
}

#[test]
fn nothing_new_is_no_event() {
    let tick = fixture::published();
    assert_eq!(kinds(&tick, &tick), []);
}

#[test]
fn a_refusal_whose_figures_differ_is_no_event() {
    let before = fixture::published();
    let mut now = before.clone();
    let stale = |age| Reason::StaleStats { age: Millis(age), limit: Millis::secs(5) };
    let refusals = |tick: &mut Published, reason| {
        tick.plan.vms.get_mut(&"db-1".into()).unwrap().refusals = vec![reason];
    };
    refusals(&mut now, stale(6_000));
    assert_eq!(kinds(&before, &now), only(EventKind::Refusal, "db-1"));
    let mut later = now.clone();
    refusals(&mut later, stale(7_000));
    assert_eq!(kinds(&now, &later), []);
}

#[test]
fn a_changed_target_is_an_event_with_its_reason() {
    let before = fixture::published();
    let mut now = before.clone();
    let change = now.plan.vms.get_mut(&"web-1".into()).unwrap().change.as_mut().unwrap();
    let model::Action::Resize { target, .. } = &mut change.action;
    *target = Bytes::mib(212);
    let events = between(&before, &now, &mut 7);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].id, 7);
    assert_eq!(events[0].kind, EventKind::Change);
    assert_eq!(events[0].group.as_deref(), Some("web"));
    assert!(events[0].text.starts_with("target raised to 212 MiB: it is short"));
}

#[test]
fn a_vm_that_has_left_for_another_host_is_one_event() {
    let before = fixture::published();
    let mut moves = Moves::default();
    moves.add("web-9".into(), Progress::Left { to: "b".into() });
    let pool = Some(MemberState { moves, ..MemberState::default() });
    let now = Published { pool, ..before.clone() };
    assert_eq!(kinds(&before, &now), only(EventKind::Move, "web-9"));
    assert_eq!(between(&before, &now, &mut 1)[0].text, "it has moved to host b");
    assert_eq!(kinds(&now, &now), []);
}

#[test]
fn what_is_not_carried_out_is_a_recommendation() {
    let mut before = fixture::published();
    before.plan.vms.get_mut(&"web-1".into()).unwrap().change = None;
    let mut now = fixture::published();
    now.plan.mode = Mode::Recommend;
    assert_eq!(kinds(&before, &now), only(EventKind::Recommendation, "web-1"));
}

#[test]
fn a_link_that_goes_down_and_up_is_two_events() {
    let before = fixture::published();
    let mut down = before.clone();
    let link = Link::Down { since: Time(1), why: "no greeting".to_owned() };
    down.view.vms.get_mut(&"web-1".into()).unwrap().link = link;
    assert_eq!(kinds(&before, &down), only(EventKind::LinkDown, "web-1"));
    assert_eq!(kinds(&down, &before), only(EventKind::LinkUp, "web-1"));
}

#[test]
fn a_vm_that_leaves_and_returns_is_two_events() {
    let before = fixture::published();
    let mut gone = before.clone();
    gone.view.vms.remove(&"web-1".into());
    gone.plan.vms.remove(&"web-1".into());
    assert_eq!(kinds(&before, &gone), only(EventKind::Gone, "web-1"));
    let back = kinds(&gone, &before);
    assert_eq!(back[0], (EventKind::Appeared, Some("web-1".to_owned())));
}

#[test]
fn pausing_and_a_bad_configuration_are_events_of_the_host() {
    let before = fixture::published();
    let mut now = before.clone();
    now.paused = true;
    now.config_error = Some("line 3: unknown key".to_owned());
    assert_eq!(kinds(&before, &now), [(EventKind::Paused, None), (EventKind::Config, None)]);
    let mut alone = before.clone();
    alone.memory.pauses.add(&model::Scope::Group("web".into()), model::Hold::Kept);
    alone.memory.pauses.add(&model::Scope::Vm("db-1".into()), model::Hold::Kept);
    assert_eq!(kinds(&before, &alone), [(EventKind::Paused, None), (EventKind::Paused, None)]);
    assert_eq!(kinds(&alone, &before).len(), 2, "both are resumed");
}
