//! Log lines of the daemon's loop, in the same words as everywhere.
//!
//! There is one line for every change of a VM's memory, with its reason, and one when a condition
//! of a VM or of the host begins or ends (QEMU does not answer, the VM is uncooperative, the host
//! is short). A lasting condition is not logged again.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};

use api::moves::Moves;
use api::shown::change_words;
use api::wire::{LoanStatus, Words};
use drivers::is_first_contact;
use model::plan::Change;
use model::{Action, Bytes, GroupName, HostView, Link, Mode, Plan, Reason, VmName};
use sys::log;

use crate::loan_news::LoanNews;
pub(super) use sys::log::{info, warn};

/// State as of the last log lines, so that only news is logged.
#[derive(Debug, Default)]
pub(super) struct Log {
    recommended: BTreeMap<VmName, Recommended>,
    troubles: BTreeMap<VmName, KnownTrouble>,
    host: Option<String>,
    loans: LoanNews,
    /// The number of the latest logged news of a move between hosts.
    moves: u64,
}

/// A VM's recommendation as last logged. A recommendation is not carried out, so every tick makes
/// it again with slightly different figures.
#[derive(Debug)]
struct Recommended {
    is_take: bool,
    reason: Discriminant<Reason>,
    target: Bytes,
}

impl Recommended {
    fn of(change: &Change) -> Self {
        let Action::Resize { target, .. } = &change.action;
        Self { is_take: change.is_take, reason: discriminant(&change.reason), target: *target }
    }

    /// Whether the other recommendation is no news: its figure differs by at most an eighth.
    fn says(&self, other: &Self) -> bool {
        let (low, high) = (self.target.min(other.target), self.target.max(other.target));
        (self.is_take, self.reason) == (other.is_take, other.reason)
            && high.minus(low) <= Bytes(self.target.0 / 8)
    }
}

impl Log {
    /// Logs the news of a tick.
    pub(super) fn tell(&mut self, plan: &Plan, view: &HostView) {
        if plan.mode != Mode::Recommend {
            self.recommended.clear();
        }
        for (vm, decision) in &plan.vms {
            if let Some(change) = decision.change.as_ref().filter(|change| !change.is_repeat)
                && self.is_news(vm, change, plan.mode)
            {
                let code = Words::of(&change.reason).code;
                let group = decision.group.as_ref().map_or("", GroupName::as_str);
                let fields = [("VM", vm.as_str()), ("GROUP", group), ("REASON", &*code)];
                log::info_with(&format!("{vm}: {}", words(change, plan.mode)), &fields);
            }
        }
        self.recommended.retain(|vm, _| view.vms.contains_key(vm));
        for (lender, loan) in self.loans.of(plan, plan.at.0) {
            let verb = if plan.mode == Mode::Enforce { "" } else { "recommended: " };
            let text = format!("{verb}{}", LoanStatus::of(lender, loan).words());
            log::info_with(&text, &[("GROUP", lender.as_str())]);
        }
        for (vm, seen) in &view.vms {
            let refusals = plan.vms.get(vm).map_or(&[][..], |d| &d.refusals[..]);
            self.tell_trouble(vm, seen.incarnation, trouble(&seen.link, refusals));
        }
        let gone: Vec<VmName> =
            self.troubles.keys().filter(|vm| !view.vms.contains_key(*vm)).cloned().collect();
        for vm in gone {
            self.troubles.remove(&vm);
            log::info_with(&format!("{vm}: gone"), &[("VM", vm.as_str())]);
        }
        let host = plan.host.first().map(ToString::to_string);
        if host != self.host {
            match &host {
                Some(text) => warn(text),
                None => info("the host has its reserve again"),
            }
            self.host = host;
        }
    }

    fn is_news(&mut self, vm: &VmName, change: &Change, mode: Mode) -> bool {
        if mode == Mode::Enforce {
            return true;
        }
        let now = Recommended::of(change);
        if self.recommended.get(vm).is_some_and(|said| said.says(&now)) {
            return false;
        }
        self.recommended.insert(vm.clone(), now);
        true
    }

    /// Logs the news of VMs that change hosts.
    pub(super) fn tell_moves(&mut self, moves: &Moves) {
        for news in moves.since(self.moves) {
            let text = format!("{}: {}", news.vm, news.progress);
            log::info_with(&text, &[("VM", news.vm.as_str())]);
        }
        self.moves = moves.latest();
    }

    fn tell_trouble(
        &mut self,
        vm: &VmName,
        incarnation: u64,
        trouble: Option<(&'static str, String)>,
    ) {
        let (kind, text) = trouble.unwrap_or(("", "in good order".to_owned()));
        let now = KnownTrouble { kind, incarnation };
        let known = self.troubles.insert(vm.clone(), now);
        let known = known
            .filter(|known| [0, incarnation].contains(&known.incarnation))
            .map(|known| known.kind);
        let fields = [("VM", vm.as_str())];
        for line in news_of(vm, known, kind, &text) {
            match kind {
                "" => log::info_with(&line, &fields),
                _ => log::warn_with(&line, &fields),
            }
        }
    }
}

/// A change in words.
fn words(change: &Change, mode: Mode) -> String {
    let Action::Resize { target, .. } = &change.action;
    let prefix = if mode == Mode::Enforce { "" } else { "recommended: " };
    let words = change_words(change.is_take, *target, &change.reason.to_string());
    format!("{prefix}{words}")
}

/// A VM's trouble that was told last.
#[derive(Clone, Copy, Debug)]
struct KnownTrouble {
    kind: &'static str,
    /// Another incarnation of this name is another VM. 0: it was not known.
    incarnation: u64,
}

/// The lines about a VM whose trouble was `known` and is of this `kind` now.
fn news_of(
    vm: &VmName,
    known: Option<&'static str>,
    kind: &'static str,
    text: &str,
) -> Vec<String> {
    let is_new = matches!(known, None | Some(NEW));
    match kind {
        NEW => Vec::new(),
        _ if known == Some(kind) => Vec::new(),
        "" if is_new => vec![format!("{vm}: found")],
        "" | DOWN => vec![format!("{vm}: {text}")],
        _ if is_new => vec![format!("{vm}: found; {text}")],
        _ => vec![format!("{vm}: {text}")],
    }
}

/// A VM that was discovered but not yet contacted: no news.
const NEW: &str = "new";
/// A VM whose QEMU does not answer.
const DOWN: &str = "down";

/// A lasting trouble of a VM: its kind and its words. The kind tells news from repetition,
/// because the words hold figures that change every second.
fn trouble(link: &Link, refusals: &[Reason]) -> Option<(&'static str, String)> {
    if is_first_contact(link) {
        return Some((NEW, String::new()));
    }
    if let Link::Down { why, .. } = link {
        return Some((DOWN, Reason::Unreachable { why: why.clone() }.to_string()));
    }
    refusals.iter().find_map(|reason| {
        let kind = match reason {
            Reason::Uncooperative { .. } => "uncooperative",
            Reason::NoBalloon { .. } => "no balloon",
            Reason::ImplausibleStats { .. } => "implausible",
            Reason::NoStats => "no statistics",
            Reason::MovedByOthers { .. } => "moved by others",
            Reason::ManagersBalloon { .. } => "moved by its manager",
            _ => return None,
        };
        Some((kind, reason.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(target_mib: u64, is_take: bool, free_mib: u64) -> Change {
        let target = Bytes::mib(target_mib);
        let by = model::Means::Balloon;
        Change {
            action: Action::Resize { vm: "web".into(), incarnation: 1, target, by },
            is_take,
            is_repeat: false,
            reason: Reason::Idle { free: Bytes::mib(free_mib), needed_by: "db".into() },
        }
    }

    #[test]
    fn a_vm_is_found_also_where_something_is_wrong_with_it() {
        let vm = VmName::from("web");
        let news = |known, kind| news_of(&vm, known, kind, "its guest is silent");
        assert!(news(None, NEW).is_empty());
        assert_eq!(news(Some(NEW), ""), ["web: found"]);
        assert_eq!(news(Some(NEW), "no statistics"), ["web: found; its guest is silent"]);
        assert_eq!(news(None, DOWN), ["web: its guest is silent"], "nothing of it is known");
        assert_eq!(news(Some(""), "no statistics"), ["web: its guest is silent"]);
        assert!(news(Some("no statistics"), "no statistics").is_empty());
    }

    #[test]
    fn a_take_is_told_as_one() {
        let told = |is_take, mode| words(&change(435, is_take, 77), mode);
        let why = change(435, true, 77).reason.to_string();
        assert_eq!(told(true, Mode::Enforce), format!("target lowered to 435 MiB: {why}"));
        assert_eq!(told(false, Mode::Enforce), format!("target raised to 435 MiB: {why}"));
        let expected = format!("recommended: target lowered to 435 MiB: {why}");
        assert_eq!(told(true, Mode::Recommend), expected);
    }

    #[test]
    fn a_recommendation_is_said_once_and_a_change_of_memory_each_time() {
        let (mut log, vm) = (Log::default(), VmName::from("web"));
        let mut is_news = |change: &Change, mode| log.is_news(&vm, change, mode);
        assert!(is_news(&change(400, true, 90), Mode::Recommend));
        for second in 0..100 {
            let same = change(395 + second % 10, true, 80 + second);
            assert!(!is_news(&same, Mode::Recommend), "second {second}");
        }
        assert!(is_news(&change(300, true, 190), Mode::Recommend), "another figure");
        assert!(is_news(&change(300, false, 190), Mode::Recommend), "another direction");
        for _ in 0..3 {
            assert!(is_news(&change(300, true, 190), Mode::Enforce), "memory moves");
        }
    }
}
