//! The worker: one process per group, which measures what its VMs' memory is worth to them.
//!
//! ```text
//!   daemon ──orders, JSON lines on stdin────►  worker  ◄──socket, shared memory──►  shim in QEMU
//!          ◄─reports, JSON lines on stdout──     a Tracked per VM, one step in 100 ms
//! ```
//!
//! **Problem.** Tracking runs a step for each guest ten times a second, and the guests' group
//! must pay for it. One hostile guest must neither crash the tracking nor disturb another
//! group's.
//!
//! **Idea.** Each group has its own process: its CPU time, its memory and its faults concern only
//! that group. Killing it does no harm, because the shims give all memory back as soon as the
//! connection closes. It holds no state that matters: a new worker learns within seconds.
//!
//! **Parts.** [`Tracked`] is one VM: its connection (`link`, `linked`), its granules
//! (`granules`), how they are chosen and how their touches are interpreted (`strategy`: `probes`
//! in the product, `lru` for comparison), its costs for the VM (`cost`), the memory it holds
//! (`holdings`), the memory that the guest frees (`freed`), and the memory that is paged out
//! (`pager`). A VM without the shim is tracked by `outside`. [`Dedup`] keeps identical pages of
//! many VMs once. If no worker runs, [`unshare()`] gives VMs private copies of their shared pages,
//! and [`read_back()`] reads back their memory that is paged out. `process` drives many of them by
//! orders; experiments drive one directly:
//!
//! ```no_run
//! use worker::{Mode, STEP, Settings, Tracked};
//! use sys::process::Identity;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let qemu = Identity::of(4711).ok_or("it has ended")?;
//! let mut tracked = Tracked::connect(qemu, Settings::new(Mode::Probes { budget: 0.01 }))?;
//! loop {
//!     tracked.step();
//!     if let Some(now) = tracked.reading() {
//!         let cost = now.value.cost.vcpu_share * 100.0;
//!         println!("{:?} at {cost:.2} % of a vCPU", now.value.working_set);
//!     }
//!     std::thread::sleep(STEP);
//! }
//! # }
//! ```
//!
//! Source: MEB §3 (Wang et al. 2016). Leaves out: acting on the results, which the policy does.

mod clock;
mod cost;
mod dedup;
#[cfg(test)]
mod fake_shim;
mod fault_thread;
mod freed;
mod granule_table;
mod granules;
mod holdings;
mod link;
mod linked;
mod lru;
mod messages;
mod mode;
mod outside;
mod pager;
mod paging;
mod probes;
mod process;
mod read_back;
mod sentinels;
mod shim_of;
mod strategy;
mod tables;
mod tracked;
mod unshare;
mod words;

#[cfg(test)]
mod tests;

pub use dedup::{Dedup, Hash, SLOTS, Task};
pub use freed::FreedOrder;
pub use granules::TooLarge;
pub use link::LinkError;
pub use messages::{Order, Orders, Report, VmReport};
pub use mode::{HotSet, Intermittent, Lru, Mode, Settings, Structure};
pub use process::run;
pub use read_back::{Held, held, read_back};
pub use sentinels::INTERVAL;
pub use shim_of::shim_of;
pub use tracked::{STEP, State, Tracked};
pub use unshare::{StillShares, unshare};
