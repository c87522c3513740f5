//! The outside world, as the loop sees it: three narrow traits.
//!
//! The daemon implements them with QMP and `/proc`, the simulator with fake guests. No trait
//! blocks: `Sense` returns the latest known state (each reading has an age), and `Act` only hands
//! the action over. So one stuck QEMU never delays the loop, and daemon and simulator share the
//! loop.

use std::collections::BTreeMap;

use crate::{Action, GroupName, HostView, Plan, Scan, Take, Time, VmName};

/// Returns the current state.
pub trait Sense {
    /// The latest view. Never blocks.
    fn view(&mut self) -> HostView;
}

/// Accepts actions to carry out.
pub trait Act {
    /// Hands over one action. Never blocks; a later view shows a failure.
    fn act(&mut self, action: &Action);

    /// Hands over how a group's identical pages are scanned from now on, and the group that pays.
    /// An implementation without a scanner does nothing.
    fn scan(&mut self, _group: &GroupName, _scan: &Scan) {}

    /// Hands over how much is taken of the memory that VMs have freed, from now on. From a VM
    /// that is not named, nothing is taken.
    fn take(&mut self, _takes: &BTreeMap<VmName, Take>) {}

    /// Hands the plan to the processes that serve the VMs' disks: cache sizes, and which VMs have
    /// the memory that they were promised.
    fn tell_disks(&mut self, _plan: &Plan) {}
}

/// A clock.
pub trait Clock {
    /// The current time on the host's boot clock.
    fn now(&self) -> Time;
}
