//! The outside world, as the loop sees it: three narrow traits.
//!
//! The daemon implements them with QMP and `/proc`, the simulator with fake guests. None of them
//! waits: `Sense` answers with the latest that is known (each reading has an age), `Act` only hands
//! the deed over. So one stuck QEMU never delays the loop, and the loop is the same everywhere.

use std::collections::BTreeMap;

use crate::{Action, GroupName, HostView, Plan, Scan, Take, Time, VmName};

/// Answers with what is known now.
pub trait Sense {
    /// The latest view. Never waits.
    fn view(&mut self) -> HostView;
}

/// Takes deeds to be done.
pub trait Act {
    /// Hands over one action. Never waits; failure shows in a later view.
    fn act(&mut self, action: &Action);

    /// Hands over how a group's identical pages are looked for from now on, and at whose cost. A
    /// world that has nobody to look for them has nothing to do.
    fn scan(&mut self, _group: &GroupName, _scan: &Scan) {}

    /// Hands over what is taken of what VMs have freed, from now on: from those that are not named
    /// nothing is.
    fn take(&mut self, _takes: &BTreeMap<VmName, Take>) {}

    /// Hands the plan over to who serves the VMs' disks: what their caches may hold, and who has
    /// what it was promised.
    fn tell_disks(&mut self, _plan: &Plan) {}
}

/// Tells the time.
pub trait Clock {
    /// Now, on the host's boot clock.
    fn now(&self) -> Time;
}
