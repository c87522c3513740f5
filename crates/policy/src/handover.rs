//! The handover of a VM between hosts: the steps of either host, such that the VM runs exactly
//! once.
//!
//! **Problem.** Two daemons move one guest. Either may die at any instant, and so may the network
//! between them. A guest that runs twice destroys its disks; one that waits for a dead daemon is
//! lost as well. **Idea.** Each host persists its own steps before it acts on them, and neither
//! keeps other state: the next action follows from the steps and from the state of its QEMU. So a
//! daemon that comes back continues.
//!
//! ```text
//! target  starts a QEMU that waits, paused       ─► Prepared
//! source  sees Prepared                          ─► Moving, then has QEMU migrate
//! source  sees that its QEMU has handed over     ─► Switched: it never runs again by itself
//! target  sees Switched                          ─► Runs, then lets its QEMU run
//! source  sees Runs                              ─► Left, then ends its QEMU
//! ```
//!
//! Only the source's QEMU knows whether it has handed the guest over: it reports `completed` or
//! `failed`, once, and runs on by itself after the latter. The target's QEMU is started paused,
//! so it runs only when `Switched` is written. If it dies before `Runs` is written, the source
//! takes the guest back. A source's QEMU that is gone does not run, so the target may try.
//!
//! Neither host waits for a peer that has gone silent. A step is written by compare-and-swap
//! against the other host's step: if that has changed since the decision, the write is refused
//! and the host looks again. (The source may take back a switched guest only before the target
//! writes `Runs`, and the target may write `Runs` only before that.)
//!
//! A guest that leaves before all of it has arrived (postcopy) can only go forward. While it is
//! on both hosts, the death of either QEMU loses it, and a network failure makes it wait. This
//! module does not handle that.

use core::net::IpAddr;

use model::words::{of_others, plain};
use model::{GroupName, NamePattern, VmName};
use serde::{Deserialize, Serialize};

/// The source's persisted step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum SourceStep {
    /// QEMU is told to migrate after this step.
    Moving,
    /// The guest leaves before all of it has arrived (postcopy); QEMU is told so after this step.
    Hastening,
    /// The guest no longer runs here.
    Switched,
    /// The target runs the guest; the QEMU here is ended after this step.
    Left,
    /// The move has failed, and the guest never ran on the target: it runs here again after this
    /// step, if the QEMU here has it.
    Stayed {
        /// Why.
        #[serde(deserialize_with = "of_others")]
        why: String,
    },
}

/// The target's persisted step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum TargetStep {
    /// A QEMU waits for the guest.
    Prepared {
        /// The address, in the form of QEMU's `migrate`.
        #[serde(deserialize_with = "of_others")]
        address: String,
    },
    /// The guest runs here after this step.
    Runs,
    /// The guest never ran here, and never will by this intent; the QEMU here is ended after this
    /// step.
    Refused {
        /// Why.
        #[serde(deserialize_with = "of_others")]
        why: String,
    },
}

/// The state of the source's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceQemu {
    /// No migration was started in this QEMU process.
    Untouched,
    /// It sends the guest, which still runs here.
    Sending {
        /// The guest dirties memory faster than it is sent, and sending takes too long.
        is_slow: bool,
    },
    /// The guest runs on the target, which still fetches pages from here (postcopy).
    Serving,
    /// The guest was handed over.
    Completed,
    /// The migration failed or was cancelled, and the guest runs here.
    Failed(String),
    /// The QEMU has ended.
    Gone,
    /// The QEMU was not found yet, and nothing was recorded about it.
    Unknown,
}

/// The state of the target's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetQemu {
    /// It is not started yet.
    Absent,
    /// It waits for a guest, or receives one.
    Waiting {
        /// The address at which it listens.
        address: String,
    },
    /// It has the guest, paused.
    Received,
    /// The guest runs in it.
    Running,
    /// It could not be started, or has ended.
    Gone(String),
}

/// The source's next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceDeed {
    /// Wait for the other host, or for QEMU.
    Wait,
    /// Nothing: this intent has ended.
    Nothing,
    /// Write this step.
    Write(SourceStep),
    /// Have all memory of the guest that is elsewhere brought back, and have QEMU send the guest
    /// to this address.
    Send(String),
    /// Switch the guest over at once; the remaining pages follow (postcopy).
    Hasten,
    /// Cancel the migration.
    CallOff,
    /// Let the guest run again.
    Resume,
    /// End QEMU.
    End,
}

/// The target's next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetDeed {
    /// Wait for the other host, or for QEMU.
    Wait,
    /// Nothing: this intent has ended.
    Nothing,
    /// Write this step.
    Write(TargetStep),
    /// Start a QEMU that waits for the guest, paused.
    Start,
    /// Let the guest run.
    Run,
    /// End QEMU.
    End,
}

/// A host's knowledge of an intent, in addition to the state of its own QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntentView<'a> {
    /// The source's step; on the target it may be old.
    pub source: Option<&'a SourceStep>,
    /// The target's step; on the source it may be old.
    pub target: Option<&'a TargetStep>,
    /// Whether the intent was withdrawn.
    pub is_late: bool,
    /// Whether the other host has been silent for a while.
    pub is_alone: bool,
    /// Why this host's own configuration forbids the move ([`barred`]); `None`: it is allowed.
    pub bar: Option<&'a str>,
}

/// Why this host takes no part in moving `vm`, which the intent places in `group`; `None`: it
/// takes part. Neither the other host nor a controller is trusted with that decision: `movable`
/// and `own`, the VM's group here, come from this host's own configuration.
#[must_use]
pub fn barred(
    vm: &VmName,
    group: &GroupName,
    movable: &[NamePattern],
    own: Option<&GroupName>,
) -> Option<String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:+@".contains(c);
    if vm.as_str().starts_with('-') || !vm.as_str().chars().all(fits) {
        return Some("its name has characters that `incoming` is not given".to_owned());
    }
    if !movable.iter().any(|pattern| pattern.matches(vm)) {
        return Some("`movable` of this host's [pool] does not name it".to_owned());
    }
    match own {
        None => Some("it is in no group of this host".to_owned()),
        Some(own) if own != group => {
            Some(format!("it is in group {own} of this host, and was sent as one of {group}"))
        }
        Some(_) => None,
    }
}

/// Whether `address` is `tcp:` with an IP address and a port. QEMU runs commands and writes files
/// for other schemes, and the address comes from another host.
fn is_address(address: &str) -> bool {
    let parts = address.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':'));
    parts.is_some_and(|(host, port)| {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        bare.unwrap_or(host).parse::<IpAddr>().is_ok()
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

/// A reason to abandon an intent.
const LATE: &str = "it took too long";
/// A reason to abandon an intent.
const NOWHERE: &str = "the other host names no address to send it to";
/// A reason to abandon an intent.
const ALONE: &str = "the other host is not heard of";

/// Decides the source's next action.
#[must_use]
pub fn source(seen: IntentView<'_>, qemu: &SourceQemu) -> SourceDeed {
    use SourceDeed::{CallOff, End, Hasten, Nothing, Resume, Send, Wait, Write};
    let stayed = |why: &str| Write(SourceStep::Stayed { why: plain(why) });
    let IntentView { source, target, is_late, is_alone, bar } = seen;
    let is_off = is_late || is_alone || matches!(target, Some(TargetStep::Refused { .. }));
    match (source, qemu) {
        (None, SourceQemu::Gone) => stayed("its QEMU has ended"),
        (None, _) => match target {
            Some(TargetStep::Refused { why }) => stayed(why),
            _ if let Some(why) = bar => stayed(why),
            _ if is_late => stayed(LATE),
            _ if is_alone => stayed(ALONE),
            Some(TargetStep::Prepared { address }) if !is_address(address) => stayed(NOWHERE),
            Some(TargetStep::Prepared { .. }) if *qemu != SourceQemu::Unknown => {
                Write(SourceStep::Moving)
            }
            _ => Wait,
        },
        (Some(_), SourceQemu::Unknown) => Wait,
        (Some(SourceStep::Moving | SourceStep::Hastening), SourceQemu::Untouched) => match target {
            Some(TargetStep::Prepared { address }) if !is_address(address) => stayed(NOWHERE),
            Some(TargetStep::Prepared { address }) if !is_off => Send(address.clone()),
            Some(TargetStep::Refused { why }) => stayed(why),
            _ if is_alone => stayed(ALONE),
            _ => stayed(LATE),
        },
        (Some(SourceStep::Moving | SourceStep::Hastening), SourceQemu::Sending { .. })
            if is_off =>
        {
            CallOff
        }
        (Some(SourceStep::Moving), SourceQemu::Sending { is_slow: true }) => {
            Write(SourceStep::Hastening)
        }
        (Some(SourceStep::Hastening), SourceQemu::Sending { .. }) => Hasten,
        (Some(SourceStep::Moving), SourceQemu::Sending { is_slow: false }) => Wait,
        (Some(SourceStep::Moving | SourceStep::Hastening), SourceQemu::Failed(why)) => stayed(why),
        // A QEMU that is gone cannot run the guest. Only the target's QEMU knows whether it has
        // all of it.
        (
            Some(SourceStep::Moving | SourceStep::Hastening),
            SourceQemu::Serving | SourceQemu::Completed | SourceQemu::Gone,
        ) => Write(SourceStep::Switched),
        (Some(SourceStep::Switched), qemu) => match target {
            Some(TargetStep::Runs) if *qemu != SourceQemu::Serving => Write(SourceStep::Left),
            Some(TargetStep::Refused { why }) => stayed(why),
            _ if is_alone && *qemu == SourceQemu::Completed => stayed(ALONE),
            _ => Wait,
        },
        (Some(SourceStep::Stayed { .. }), SourceQemu::Completed) => Resume,
        (Some(SourceStep::Left), SourceQemu::Gone) => Nothing,
        (Some(SourceStep::Left), _) => End,
        (Some(SourceStep::Stayed { .. }), _) => Nothing,
    }
}

/// Decides the target's next action.
#[must_use]
pub fn target(seen: IntentView<'_>, qemu: &TargetQemu) -> TargetDeed {
    use TargetDeed::{End, Nothing, Run, Start, Wait, Write};
    let refused = |why: &str| Write(TargetStep::Refused { why: plain(why) });
    let IntentView { source, target, is_late, is_alone, bar } = seen;
    match target {
        None => match (source, qemu) {
            (Some(SourceStep::Stayed { why }), _) => refused(why),
            _ if let Some(why) = bar => refused(why),
            (_, TargetQemu::Gone(why)) => refused(why),
            _ if is_late => refused(LATE),
            _ if is_alone => refused(ALONE),
            (_, TargetQemu::Absent) => Start,
            (_, TargetQemu::Waiting { address }) => {
                Write(TargetStep::Prepared { address: address.clone() })
            }
            (_, TargetQemu::Received | TargetQemu::Running) => refused("its QEMU is not ours"),
        },
        Some(TargetStep::Prepared { .. }) => match (source, qemu) {
            (_, TargetQemu::Gone(why)) => refused(why),
            (_, TargetQemu::Absent) => refused("its QEMU has ended"),
            (Some(SourceStep::Switched), TargetQemu::Received) => Write(TargetStep::Runs),
            (Some(SourceStep::Stayed { why }), _) => refused(why),
            // After postcopy has started, the target's QEMU may hold the only complete guest.
            (None | Some(SourceStep::Moving), TargetQemu::Waiting { .. }) if is_alone => {
                refused(ALONE)
            }
            _ => Wait,
        },
        Some(TargetStep::Runs) => match qemu {
            TargetQemu::Received => Run,
            _ => Nothing,
        },
        Some(TargetStep::Refused { .. }) => match qemu {
            TargetQemu::Waiting { .. } | TargetQemu::Received => End,
            TargetQemu::Absent | TargetQemu::Running | TargetQemu::Gone(_) => Nothing,
        },
    }
}

#[cfg(test)]
mod tests;
