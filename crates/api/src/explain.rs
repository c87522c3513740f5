//! Explains in words why a VM has the memory that it has: a pure function of what the daemon shows.
//!
//! The question is never only about this second. So the text begins with the lasting limits. The
//! present state follows, as host and guest see it, then the decisions and refusals of this tick
//! and the last change that was carried out. It ends with what the operator could change. The
//! reasons are the policy's own words; only the advice ([`remedy`]) is written here.

mod remedy;

use std::fmt::Write;

use model::{
    Bytes, Dedup, DiskReading, FreePages, Link, Millis, Mode, Overload, Reading, Reason, Scan,
    Take, Time, Tracking, VmName, VmView,
    plan::Outcome,
    view::{Mechanism, SWITCHED_OFF},
};

use crate::{
    published::Published,
    shown::{LastChange, change_words},
    wire::{self, ColdStatus, LoanStatus, MemoryLimitStatus, ScanStatus},
};

/// A reading older than this is shown with its age.
const OLD: Millis = Millis::secs(5);

/// Explains `vm`. `last` is the last change that was carried out before this tick.
#[must_use]
pub fn explain(tick: &Published, vm: &VmName, last: Option<&LastChange>) -> String {
    let Some(view) = tick.view.vms.get(vm) else {
        return format!("{vm} is not on this host.\n");
    };
    let mut text = format!("{vm} {}\n\n", situation(tick, vm, view));
    for (label, line) in lines(tick, vm, view, last) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{label:<13}{line}");
    }
    text
}

fn situation(tick: &Published, vm: &VmName, view: &VmView) -> String {
    let has = match view.balloon {
        _ if view.cold.is_some() => {
            format!("may use all of its {} of RAM, and is paged", view.ram)
        }
        Some(balloon) if balloon.value < view.ram => {
            format!("may use {} of its {} of RAM", balloon.value, view.ram)
        }
        _ => format!("may use all of its {} of RAM", view.ram),
    };
    let place = tick.spec.group_of(vm).map_or_else(
        || "it belongs to no group".to_owned(),
        |(name, group)| format!("it belongs to group {name} (policy {})", group.policy),
    );
    format!("{has}; {place}.")
}

type Line = (&'static str, String);

fn lines(tick: &Published, vm: &VmName, view: &VmView, last: Option<&LastChange>) -> Vec<Line> {
    let mut lines = limits(tick, vm, view);
    lines.extend(seen(tick, vm, view));
    lines.extend(decided(tick, vm));
    let last = last.map_or_else(
        || "none is on record".to_owned(),
        |last| {
            let ago = Millis(tick.wall_ms.saturating_sub(last.wall_ms));
            format!("{ago} before this tick: {}", last.text)
        },
    );
    lines.push(("Last change", last));
    lines.extend(advice(tick, vm).into_iter().map(|advice| ("To change it", advice)));
    lines
}

fn limits(tick: &Published, vm: &VmName, view: &VmView) -> Vec<Line> {
    let Some(limits) = tick.plan.vms.get(vm).and_then(|decision| decision.limits) else {
        return Vec::new();
    };
    let written =
        format!("min {}, base {} (guaranteed), max {}", limits.min, limits.base, limits.max);
    let mut lines = vec![("Limits", written)];
    let target = tick.plan.vms.get(vm).and_then(|decision| decision.target);
    let has = target.filter(|_| view.cold.is_some());
    if let Some(has) = has.or(view.balloon.map(|balloon| balloon.value)) {
        let base = limits.base;
        lines.push((
            "Of its base",
            match has.cmp(&base) {
                std::cmp::Ordering::Greater => {
                    format!(
                        "all, and {} above it: a grant, which can be taken back",
                        has.minus(base)
                    )
                }
                std::cmp::Ordering::Equal => "all, and nothing above it".to_owned(),
                std::cmp::Ordering::Less => {
                    format!("{} are lent out while it leaves them unused", base.minus(has))
                }
            },
        ));
    }
    lines
}

fn seen(tick: &Published, vm: &VmName, view: &VmView) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Link::Down { since, why } = &view.link {
        let age = tick.at.since(*since);
        lines.push(("QEMU", format!("no connection for {age}: {why}")));
    }
    if let Some(stats) = view.stats {
        let part = |name: &str, size: Option<Bytes>| {
            size.map_or_else(|| format!("{name} unknown"), |size| format!("{size} {name}"))
        };
        let value = stats.value;
        let parts = [part("available", value.available), part("free", value.free)].join(", ");
        let total = part("in all", value.total);
        let age = stats.age(tick.at);
        lines.push(("Guest says", format!("{parts}, {total} ({age} before this tick)")));
    }
    if !view.devices.is_zero() {
        let devices = view.devices;
        lines.push(("Other memory", format!("{devices} of devices that its balloon cannot reach")));
    }
    if view.deflates_on_oom == Some(true) {
        let words = "its guest takes memory back by itself before its kernel kills a program";
        lines.push(("Balloon", words.to_owned()));
    }
    if let Some(used) = policy::used(view) {
        lines.push(("Host counts", format!("{} occupied by it", used.value)));
    }
    let limits = MemoryLimitStatus::of(view);
    lines.extend(limits.iter().map(|limit| ("Its cgroup", limit.words())));
    lines.extend(view.tracking.iter().map(|reading| ("Working set", tracked(reading, tick.at))));
    let scan = tick.spec.group_of(vm).and_then(|(group, _)| tick.plan.scans.get(group));
    let shared = view.dedup.iter().map(|reading| ("Shared pages", shared(&reading.value, scan)));
    lines.extend(shared);
    let take = tick.plan.takes.get(vm);
    lines.extend(view.free_pages.iter().map(|reading| ("Freed", freed(&reading.value, take))));
    let cold = view.cold.iter().map(|reading| ColdStatus::of(&reading.value).words());
    lines.extend(cold.map(|words| ("Paging", words)));
    let disks = view.disks.iter();
    let wanted = |name: &str| tick.spec.disks.get(name).map_or(0, |disk| disk.repositories.len());
    let words = |name: &str, of: &DiskReading| ("Disk", disk(name, of, wanted(name)));
    lines.extend(disks.map(|(name, reading)| words(name, &reading.value)));
    let overload = tick.plan.overloads.get(vm);
    lines.extend(overload.map(|overload| ("Overload", overloaded(overload))));
    lines.extend(limited(view));
    if let Some(error) = &view.last_error {
        let age = error.age(tick.at);
        lines.push(("QEMU refused", format!("{age} before this tick: {}", error.value)));
    }
    lines
}

/// Mechanisms that the VM cannot take part in, and those that the configuration switches off.
fn limited(view: &VmView) -> Vec<Line> {
    let name = |mechanism: &Mechanism| {
        let name = serde_json::to_value(mechanism).unwrap_or_default();
        name.as_str().unwrap_or_default().replace('_', " ")
    };
    let is_off = |why: &str| why.starts_with(SWITCHED_OFF);
    let (off, cannot): (Vec<_>, Vec<_>) = view.limits.iter().partition(|(_, why)| is_off(why));
    let mut lines: Vec<Line> =
        cannot.iter().map(|(it, why)| ("Unsupported", format!("{}: {why}", name(it)))).collect();
    if !off.is_empty() {
        let names: Vec<String> = off.iter().map(|(mechanism, _)| name(mechanism)).collect();
        lines.push(("Switched off", format!("{}, by its group's configuration", names.join(", "))));
    }
    lines
}

/// The working set, and what tracking costs.
fn tracked(reading: &Reading<Tracking>, now: Time) -> String {
    let tracking = &reading.value;
    let set = match (tracking.working_set, tracking.swapped) {
        (None, _) => "not known yet".to_owned(),
        (Some(set), Bytes::ZERO) => set.to_string(),
        (Some(set), swapped) => format!("{set}, {swapped} of it in its swap"),
    };
    let age = reading.age(now);
    let old = if age > OLD { format!(", as it was {age} before this tick") } else { String::new() };
    let cost = tracking.cost.vcpu_share * 100.0;
    format!("{set}{old}; knowing it took {cost:.2} % of one vCPU in the last half minute")
}

/// The saving that the last move by `balance` was expected to bring, and the actual one.
fn judged(outcome: Outcome, now: Time) -> String {
    let Outcome { at, from, to, expected, saved } = outcome;
    let words = Reason::Saved { expected, saved };
    format!("{} before this tick, from {from} to {to}: {words}", now.since(at))
}

/// Where the pages of a disk lie, and what is wrong with that; `wanted` is the configured number
/// of repositories.
fn disk(name: &str, disk: &DiskReading, wanted: usize) -> String {
    let mut text = format!("{name}: half of its reads take less than {} us", disk.read_us_median);
    if let Some(far) = disk.repositories {
        let of = (far.connected, far.held);
        text += &match of {
            (0, _) => "; no repository is connected: its own file answers".to_owned(),
            (n, held) => format!("; {held} of it lie in {n} repositories"),
        };
        let lost = wanted.saturating_sub(usize::try_from(far.connected).unwrap_or(usize::MAX));
        if lost > 0 && far.connected > 0 {
            text += &format!(", and {lost} of its {wanted} are not connected");
        }
        if !far.admits {
            text += ", which get nothing more while it has all the memory that it was started with";
        }
        if far.forged > 0 {
            text +=
                &format!("; {} pages came back forged, and were read from its file", far.forged);
        }
    }
    if disk.errors > 0 {
        text += &format!("; {} operations failed", disk.errors);
    }
    text
}

/// How badly the VM is overloaded, and why.
fn overloaded(overload: &Overload) -> String {
    format!("{}: {}", wire::overload::name(overload.severity), overload.reason)
}

/// Memory that the VM shares with its group, and how the group is scanned for more.
fn shared(dedup: &Dedup, scan: Option<&Scan>) -> String {
    let scan = scan.map(|scan| format!("; its group is {}", ScanStatus::of(scan).words()));
    let scan = scan.unwrap_or_default();
    format!("{}, which saves {}{scan}", dedup.shared, dedup.saved)
}

/// Memory that the VM has freed, and how much of it is taken.
fn freed(free: &FreePages, take: Option<&Take>) -> String {
    let take = take.map(|take| format!("; all but {} is taken: {}", take.keep, take.reason));
    let nobody =
        || if free.lazy.is_zero() { "" } else { "; it may have it back, for no other VM needs it" };
    let take = take.unwrap_or_else(|| nobody().to_owned());
    format!("{}, of which the host can take {}{take}", free.freed, free.lazy)
}

fn decided(tick: &Published, vm: &VmName) -> Vec<Line> {
    let Some(decision) = tick.plan.vms.get(vm) else {
        return vec![("Now", "nothing was decided about it yet".to_owned())];
    };
    let mut lines = Vec::new();
    if let Some(change) = &decision.change {
        let model::Action::Resize { target, .. } = &change.action;
        let words = change_words(change.is_take, *target, &change.reason.to_string());
        let label = if tick.plan.mode == Mode::Enforce { "Now" } else { "Recommended" };
        lines.push((label, words));
    }
    let label = if decision.change.is_some() { "Not more" } else { "Unchanged" };
    lines.extend(decision.refusals.iter().map(|reason| (label, reason.to_string())));
    lines.extend(decision.outcome.map(|outcome| ("Last balance", judged(outcome, tick.at))));
    lines.extend(loans(tick, vm).map(|loan| ("Lending", loan.words())));
    lines.extend(tick.plan.host.iter().map(|reason| ("Host", reason.to_string())));
    lines
}

/// The loans of its group.
fn loans<'a>(tick: &'a Published, vm: &VmName) -> impl Iterator<Item = LoanStatus> + use<'a> {
    let group = tick.spec.group_of(vm).map(|(group, _)| group);
    let loans = tick.plan.loans.iter();
    let own =
        loans.filter(move |(lender, loan)| group == Some(lender) || group == Some(&loan.borrower));
    own.map(|(lender, loan)| LoanStatus::of(lender, loan))
}

fn advice(tick: &Published, vm: &VmName) -> Vec<String> {
    let refusals = tick.plan.vms.get(vm).map(|d| d.refusals.as_slice()).unwrap_or_default();
    let changes = tick.plan.vms.get(vm).and_then(|d| d.change.as_ref()).map(|c| &c.reason);
    let limits = tick.plan.vms.get(vm).and_then(|decision| decision.limits);
    let mut advice = Vec::new();
    for reason in changes.into_iter().chain(refusals).chain(&tick.plan.host) {
        let new = remedy::remedy(reason, vm, limits).filter(|words| !advice.contains(words));
        advice.extend(new);
    }
    advice
}

#[cfg(test)]
mod tests;
