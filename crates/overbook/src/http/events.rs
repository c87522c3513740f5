//! Differences between two ticks, as a list of events and as a stream of server-sent events.
//!
//! An event is a difference, so a decision that stays the same for an hour is one event. Refusals
//! are compared by kind, because their figures differ in every tick.
//!
//! Each reader has its own position in a ring of [`BUFFER`] events. A reader that falls behind
//! loses the oldest events and is told how many (`lagged`). It never blocks the loop or another
//! reader.

use std::{collections::BTreeSet, convert::Infallible, mem::discriminant, sync::Arc};

use axum::response::sse;
use futures_util::{Stream, stream};
use model::{Action, Decision, Link, Mode, Reason, VmName, plan::Change};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::{self, error::RecvError};
use utoipa::ToSchema;

use api::published::Published;
use api::shown;

/// Events kept for slow readers.
pub const BUFFER: usize = 256;

/// The channel of events.
pub(super) type Events = broadcast::Sender<Arc<Event>>;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A VM's target was changed.
    Change,
    /// A VM's target would have been changed, but the mode does not allow it.
    Recommendation,
    /// There is a new reason not to change a VM's memory.
    Refusal,
    /// QEMU answers.
    LinkUp,
    /// No connection to QEMU.
    LinkDown,
    /// A VM was found.
    Appeared,
    /// A VM has gone.
    Gone,
    /// A VM is moving to or from this host, or a move has ended.
    Move,
    /// A condition of the host has changed.
    Host,
    /// Overbook was paused or resumed.
    Paused,
    /// The configuration on disk became faulty, or good again.
    Config,
    /// The reader was too slow and missed events.
    Lagged,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts from 1 since the daemon started.
    pub id: u64,
    /// Time in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// The kind; also the name of the server-sent event.
    pub kind: EventKind,
    /// The VM, if the event is about one.
    pub vm: Option<String>,
    /// The VM's group.
    pub group: Option<String>,
    /// The event and its reason.
    pub text: String,
}

/// Events between two ticks. Ids continue from `next_id`.
pub(super) fn between(before: &Published, now: &Published, next_id: &mut u64) -> Vec<Event> {
    let mut found = host_events(before, now);
    for name in before.view.vms.keys().filter(|name| !now.view.vms.contains_key(*name)) {
        found.push((EventKind::Gone, Some(name), "it is not there any more".to_owned()));
    }
    for name in now.view.vms.keys() {
        let events = vm_events(before, now, name);
        found.extend(events.into_iter().map(|(kind, text)| (kind, Some(name), text)));
    }
    let known = before.pool.as_ref().map_or(0, |pool| pool.moves.latest());
    for news in now.pool.iter().flat_map(|pool| pool.moves.since(known)) {
        found.push((EventKind::Move, Some(&news.vm), news.progress.to_string()));
    }
    let number = |(kind, vm, text): (EventKind, Option<&VmName>, String)| {
        let id = *next_id;
        *next_id += 1;
        let group = vm.and_then(|vm| now.spec.group_of(vm)).map(|(group, _)| group.to_string());
        Event { id, wall_ms: now.wall_ms, kind, vm: vm.map(ToString::to_string), group, text }
    };
    found.into_iter().map(number).collect()
}

/// The news of a pause by name, which was set before or is set now.
const fn by_name(at: [bool; 2]) -> Option<&'static str> {
    match at {
        [false, true] => Some("paused by the operator"),
        [true, false] => Some("resumed by the operator"),
        _ => None,
    }
}

fn host_events<'a>(
    before: &Published,
    now: &Published,
) -> Vec<(EventKind, Option<&'a VmName>, String)> {
    let mut found = Vec::new();
    for reason in &now.plan.host {
        if !before.plan.host.iter().any(|old| discriminant(old) == discriminant(reason)) {
            found.push((EventKind::Host, None, reason.to_string()));
        }
    }
    if before.paused != now.paused {
        let text = if now.paused { "paused by the operator" } else { "resumed by the operator" };
        found.push((EventKind::Paused, None, text.to_owned()));
    }
    let (was, is) = (&before.memory.pauses, &now.memory.pauses);
    for group in was.groups.keys().chain(is.groups.keys()).collect::<BTreeSet<_>>() {
        let at = [was, is].map(|pauses| pauses.groups.contains_key(group));
        found.extend(
            by_name(at).map(|text| (EventKind::Paused, None, format!("group {group}: {text}"))),
        );
    }
    for vm in was.vms.keys().chain(is.vms.keys()).collect::<BTreeSet<_>>() {
        let at = [was, is].map(|pauses| pauses.vms.contains_key(vm));
        found.extend(by_name(at).map(|text| (EventKind::Paused, None, format!("{vm}: {text}"))));
    }
    if let Some(text) = &now.waits_for_restart
        && before.waits_for_restart != now.waits_for_restart
    {
        found.push((EventKind::Config, None, text.clone()));
    }
    if before.config_error != now.config_error {
        let good = || "the configuration on disk is good again".to_owned();
        let text = now.config_error.clone().unwrap_or_else(good);
        found.push((EventKind::Config, None, text));
    }
    found
}

fn vm_events(before: &Published, now: &Published, name: &VmName) -> Vec<(EventKind, String)> {
    let mut found = Vec::new();
    let old_view = before.view.vms.get(name);
    let Some(view) = now.view.vms.get(name) else { return found };
    if old_view.is_none_or(|old| old.incarnation != view.incarnation) {
        found.push((EventKind::Appeared, format!("found, started with {}", view.ram)));
    }
    let was_up = old_view.map(|old| old.link == Link::Up);
    match &view.link {
        Link::Up if was_up == Some(false) => {
            found.push((EventKind::LinkUp, "QEMU answers again".to_owned()));
        }
        Link::Down { why, .. } if was_up != Some(false) => {
            found.push((EventKind::LinkDown, Reason::Unreachable { why: why.clone() }.to_string()));
        }
        _ => {}
    }
    if let Some(decision) = now.plan.vms.get(name) {
        found.extend(decision_events(before.plan.vms.get(name), decision, now.plan.mode));
    }
    found
}

fn decision_events(
    before: Option<&Decision>,
    now: &Decision,
    mode: Mode,
) -> Vec<(EventKind, String)> {
    let mut found = Vec::new();
    let old = before.and_then(|decision| decision.change.as_ref());
    let is_new = |change: &&Change| {
        let same = |old: &Change| {
            old.action == change.action && discriminant(&old.reason) == discriminant(&change.reason)
        };
        !change.is_repeat && !old.is_some_and(same)
    };
    if let Some(change) = now.change.as_ref().filter(is_new) {
        let carried_out = mode == Mode::Enforce;
        let kind = if carried_out { EventKind::Change } else { EventKind::Recommendation };
        let Action::Resize { target, .. } = &change.action;
        let reason = change.reason.to_string();
        found.push((kind, shown::change_words(change.is_take, *target, &reason)));
    }
    let old_refusals = before.map(|decision| decision.refusals.as_slice()).unwrap_or_default();
    let is_new = |reason: &&Reason| {
        !old_refusals.iter().any(|old| discriminant(old) == discriminant(*reason))
    };
    let fresh = now.refusals.iter().filter(is_new);
    found.extend(fresh.map(|reason| (EventKind::Refusal, reason.to_string())));
    found
}

/// Events from now on, for one reader.
pub(super) fn stream(
    events: broadcast::Receiver<Arc<Event>>,
) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    stream::unfold(events, |mut events| async move {
        let event = match events.recv().await {
            Ok(event) => as_sse(&event),
            Err(RecvError::Lagged(missed)) => as_sse(&lagged(missed)),
            Err(RecvError::Closed) => return None,
        };
        Some((Ok(event), events))
    })
}

fn lagged(missed: u64) -> Event {
    let text = format!("{missed} events were missed: this reader is too slow");
    Event { id: 0, wall_ms: 0, kind: EventKind::Lagged, vm: None, group: None, text }
}

fn as_sse(event: &Event) -> sse::Event {
    let kind = serde_json::to_value(event.kind).unwrap_or_default();
    let data = serde_json::to_string(event).unwrap_or_default();
    let named = sse::Event::default().event(kind.as_str().unwrap_or_default()).data(data);
    if event.id == 0 { named } else { named.id(event.id.to_string()) }
}

#[cfg(test)]
mod tests;
