//! What the daemon's loop says in its log: the same words as everywhere.
//!
//! One line for every change of a VM's memory with its reason, and one when something about a VM or
//! the host begins or ends (it cannot be reached, it is uncooperative, the host is short). What
//! stays as it is is not said again: a log that repeats itself is not read.

use std::collections::BTreeMap;

use model::{Action, HostView, Link, Mode, Plan, Reason, VmName};

pub(super) use crate::log::{info, warn};
use crate::{
    drivers::is_first_contact, http::wire::LoanStatus, loan_news::LoanNews, pool::moves::Moves,
};

/// What was said last, so that only news is said.
#[derive(Debug, Default)]
pub(super) struct Log {
    troubles: BTreeMap<VmName, &'static str>,
    host: Option<String>,
    loans: LoanNews,
    /// The number of the last news of a move between hosts.
    moves: u64,
}

impl Log {
    /// Says what is new.
    pub(super) fn tell(&mut self, plan: &Plan, view: &HostView) {
        for (vm, decision) in &plan.vms {
            if let Some(change) = decision.change.as_ref().filter(|change| !change.is_repeat) {
                let Action::Resize { target, .. } = &change.action;
                let verb = if plan.mode == Mode::Enforce { "gets" } else { "would get" };
                info(&format!("{vm} {verb} {target}: {}", change.reason));
            }
        }
        for (lender, loan) in self.loans.of(plan, plan.at.0) {
            let verb = if plan.mode == Mode::Enforce { "" } else { "recommended: " };
            info(&format!("{verb}{}", LoanStatus::of(lender, loan).words()));
        }
        for (vm, seen) in &view.vms {
            let refusals = plan.vms.get(vm).map_or(&[][..], |d| &d.refusals[..]);
            self.tell_trouble(vm, trouble(&seen.link, refusals));
        }
        let gone: Vec<VmName> =
            self.troubles.keys().filter(|vm| !view.vms.contains_key(*vm)).cloned().collect();
        for vm in gone {
            self.troubles.remove(&vm);
            info(&format!("{vm}: gone"));
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

    /// Says what is new of VMs that change hosts.
    pub(super) fn tell_moves(&mut self, moves: &Moves) {
        for news in moves.since(self.moves) {
            info(&format!("{}: {}", news.vm, news.progress));
        }
        self.moves = moves.latest();
    }

    fn tell_trouble(&mut self, vm: &VmName, trouble: Option<(&'static str, String)>) {
        let (kind, text) = trouble.unwrap_or(("", "in good order".to_owned()));
        let known = self.troubles.insert(vm.clone(), kind);
        match (known, kind) {
            (_, NEW) => {}
            (Some(before), now) if before == now => {}
            (None | Some(NEW), "") => info(&format!("{vm}: found")),
            (_, "") => info(&format!("{vm}: {text}")),
            _ => warn(&format!("{vm}: {text}")),
        }
    }
}

/// Discovered, and nothing is known yet: no news.
const NEW: &str = "new";

/// What is wrong with a VM for longer than a moment: its kind, which tells news from repetition
/// (the text holds figures that change every second), and its words.
fn trouble(link: &Link, refusals: &[Reason]) -> Option<(&'static str, String)> {
    if is_first_contact(link) {
        return Some((NEW, String::new()));
    }
    if let Link::Down { why, .. } = link {
        return Some(("down", format!("QEMU does not answer: {why}")));
    }
    refusals.iter().find_map(|reason| {
        let kind = match reason {
            Reason::Uncooperative { .. } => "uncooperative",
            Reason::NoBalloon { .. } => "no balloon",
            Reason::ImplausibleStats { .. } => "implausible",
            Reason::NoStats => "no statistics",
            Reason::MovedByOthers { .. } => "moved by others",
            _ => return None,
        };
        Some((kind, reason.to_string()))
    })
}
