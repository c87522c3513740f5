//! How a VM changes hosts: who writes what down, and does what, so that it runs on exactly one.
//!
//! **Problem.** Two daemons move one guest, and either may die at any instant, and so may the
//! network between them. A guest that runs twice destroys its disks; one that waits for a dead
//! daemon is lost as well. **Idea.** Each host writes steps of its own, ahead of what they mean,
//! and neither remembers anything else: what comes next follows from the steps and from what its
//! QEMU says. So whoever comes back goes on.
//!
//! ```text
//! target  starts a QEMU that waits, paused       ─► Prepared
//! source  sees Prepared                          ─► Moving, then has QEMU migrate
//! source  sees its QEMU done for good            ─► Switched: it never runs again by itself
//! target  sees Switched                          ─► Runs, then lets its QEMU run
//! source  sees Runs                              ─► Left, then ends its QEMU
//! ```
//!
//! The source's QEMU alone knows whether it has handed the guest over: it says `completed` or
//! `failed`, once, and runs on by itself after the latter. The target's QEMU is started paused, so
//! it runs only when `Switched` is written. Where it dies before `Runs` is, the source takes the
//! guest back. A source's QEMU that is gone does not run, so the target may try.
//!
//! Neither host waits for one that is not heard of any more. A step is written only if the other
//! host's step is still the one that was seen when it was decided: so where both decide at once,
//! one of them is refused and looks again. (The source may take back what it has switched only
//! before the target says `Runs`, and the target may say `Runs` only before that.)
//!
//! A guest that leaves before all of it is there (postcopy) can only go on. While it is in both,
//! the death of either QEMU loses it, and where the network breaks it waits: that is not mended
//! here.

use core::net::IpAddr;

use model::words::{of_others, plain};
use model::{GroupName, NamePattern, VmName};
use serde::{Deserialize, Serialize};

/// What the source has written down.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum SourceStep {
    /// QEMU is told to migrate after this.
    Moving,
    /// The guest leaves before all of it is there (postcopy); QEMU is told so after this.
    Hastening,
    /// The guest does not run here any more.
    Switched,
    /// The target runs it; the QEMU here is ended after this.
    Left,
    /// Nothing came of it, and it never ran there: it runs here again after this, if its QEMU has
    /// it.
    Stayed {
        /// Why.
        #[serde(deserialize_with = "of_others")]
        why: String,
    },
}

/// What the target has written down.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum TargetStep {
    /// A QEMU waits for the guest.
    Prepared {
        /// Where, as QEMU's `migrate` has it.
        #[serde(deserialize_with = "of_others")]
        address: String,
    },
    /// The guest runs here after this.
    Runs,
    /// It never ran here, and never will by this intent; the QEMU here is ended after this.
    Refused {
        /// Why.
        #[serde(deserialize_with = "of_others")]
        why: String,
    },
}

/// What the source's QEMU says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceQemu {
    /// No migration was begun in this life of it.
    Untouched,
    /// It sends the guest, which runs here.
    Sending {
        /// It has done so for too long: the guest writes faster than it is sent.
        is_slow: bool,
    },
    /// The guest has left for the target, which still gets pages from here (postcopy).
    Serving,
    /// The guest was handed over.
    Completed,
    /// It failed or was called off, and the guest runs here.
    Failed(String),
    /// There is no such QEMU any more.
    Gone,
    /// It was not found yet, and nothing was written of it.
    Unknown,
}

/// What the target's QEMU says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetQemu {
    /// It was not started yet.
    Absent,
    /// It waits for a guest, or gets it.
    Waiting {
        /// Where it listens.
        address: String,
    },
    /// It has the guest, paused.
    Received,
    /// The guest runs in it.
    Running,
    /// It could not be started, or has ended.
    Gone(String),
}

/// What the source does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceDeed {
    /// Nothing: it waits for the other, or for QEMU.
    Wait,
    /// Nothing, ever: this intent has ended.
    Nothing,
    /// Writes this down.
    Write(SourceStep),
    /// Has everything given back that the guest has elsewhere, and QEMU send it there.
    Send(String),
    /// Has the guest leave at once, and what it lacks there follow (postcopy).
    Hasten,
    /// Calls the migration off.
    CallOff,
    /// Lets the guest run again.
    Resume,
    /// Ends QEMU.
    End,
}

/// What the target does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetDeed {
    /// Nothing: it waits for the other, or for QEMU.
    Wait,
    /// Nothing, ever: this intent has ended.
    Nothing,
    /// Writes this down.
    Write(TargetStep),
    /// Starts a QEMU that waits for the guest, paused.
    Start,
    /// Lets the guest run.
    Run,
    /// Ends QEMU.
    End,
}

/// What a host sees of an intent, beside its own QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen<'a> {
    /// What the source has written; on the target it may be old.
    pub source: Option<&'a SourceStep>,
    /// What the target has written; on the source it may be old.
    pub target: Option<&'a TargetStep>,
    /// The intent was withdrawn.
    pub is_late: bool,
    /// The other host has not been heard of for a while.
    pub is_alone: bool,
    /// Why this host's own configuration forbids it ([`barred`]); `None`: it does not.
    pub bar: Option<&'a str>,
}

/// Why this host takes no part in moving `vm`, which the intent says is in `group`; `None`: it
/// does. Neither the other host nor a controller is trusted with that: `movable` and `own`, the
/// group that the VM has here, come from this host's own configuration.
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

/// Whether it is `tcp:` with an IP address and a port: QEMU runs commands and writes files for
/// other words, and the address is another host's.
fn is_address(address: &str) -> bool {
    let parts = address.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':'));
    parts.is_some_and(|(host, port)| {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        bare.unwrap_or(host).parse::<IpAddr>().is_ok()
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

/// Why an intent comes to nothing.
const LATE: &str = "it took too long";
/// The same.
const NOWHERE: &str = "the other host names no address to send it to";
/// The same.
const ALONE: &str = "the other host is not heard of";

/// What the source does next.
#[must_use]
pub fn source(seen: Seen<'_>, qemu: &SourceQemu) -> SourceDeed {
    use SourceDeed::{CallOff, End, Hasten, Nothing, Resume, Send, Wait, Write};
    let stayed = |why: &str| Write(SourceStep::Stayed { why: plain(why) });
    let Seen { source, target, is_late, is_alone, bar } = seen;
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
        // What is gone cannot run: whether the target has it all, its QEMU knows.
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

/// What the target does next.
#[must_use]
pub fn target(seen: Seen<'_>, qemu: &TargetQemu) -> TargetDeed {
    use TargetDeed::{End, Nothing, Run, Start, Wait, Write};
    let refused = |why: &str| Write(TargetStep::Refused { why: plain(why) });
    let Seen { source, target, is_late, is_alone, bar } = seen;
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
            // What it has received may be all that there is of the guest (postcopy).
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
