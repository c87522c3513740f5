//! The outside world, as the loop sees it: three narrow traits.
//!
//! The daemon implements them with QMP and `/proc`, the simulator with fake guests. No trait
//! blocks: `Sense` returns the latest known state (each reading has an age), and `Act` only hands
//! the action over. So one stuck QEMU never delays the loop, and daemon and simulator share the
//! loop.

use crate::{Action, HostView, Plan, Time};

/// Returns the current state.
pub trait Sense {
    /// The latest view. Never blocks.
    fn view(&mut self) -> HostView;
}

/// Accepts actions to carry out.
pub trait Act {
    /// Hands over one action. Never blocks; a later view shows a failure.
    fn act(&mut self, action: &Action);

    /// Ends the tick, after its actions: workers and the processes that serve the VMs' disks get
    /// their orders. The plan says how identical pages are scanned, how much is taken of freed
    /// memory, and the sizes of caches. An implementation without such processes does nothing.
    fn finish(&mut self, _plan: &Plan) {}
}

/// A clock.
pub trait Clock {
    /// The current time on the host's boot clock.
    fn now(&self) -> Time;
}
