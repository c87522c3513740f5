//! The worker: one process per group, which finds out what its VMs' memory is worth to them.
//!
//! ```text
//!   daemon ──orders (JSON lines on standard input)──►  worker  ◄──socket, shared memory──►  shim in QEMU
//!          ◄─reports (JSON lines on standard output)─     a Tracked per VM, one step in 100 ms
//! ```
//!
//! **Problem.** Tracking follows guests fifty times a second, with the guests' group to pay for it,
//! and must neither fall over one hostile guest nor take another group's with it.
//!
//! **Idea.** A process of its own for each group: its CPU time and memory are the group's, a fault
//! in it is the group's, and killing it harms nobody, because the shims give everything back as
//! soon as the connection closes. It holds no state that matters: a new worker learns within
//! seconds.
//!
//! **Parts.** [`Tracked`] is one VM: connection (`link`, `linked`), which granules (`granules`),
//! how they are chosen and what their touches tell (`strategy`: `probes` in the product, `lru` for
//! comparison), what it takes from the VM (`cost`), what it holds (`holdings`), what becomes of
//! what the guest frees (`freed`), and what is paged out (`cold`). [`Dedup`] keeps identical pages
//! of many once. Where no worker runs, [`unshare()`] gives VMs copies of what they share, and
//! [`read_back()`] what is paged out of them. `process` drives many of them by orders; experiments
//! drive one directly:
//!
//! ```no_run
//! use overbook::worker::{Mode, STEP, Settings, Tracked};
//! use sys::process::Identity;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let qemu = Identity::of(4711).ok_or("it has ended")?;
//! let mut tracked = Tracked::connect(qemu, Settings::new(Mode::Probes { budget: 0.01 }))?;
//! loop {
//!     tracked.step();
//!     if let Some(now) = tracked.reading() {
//!         println!("{:?} at {:.2} % of a vCPU", now.value.working_set, now.value.cost.vcpu_share * 100.0);
//!     }
//!     std::thread::sleep(STEP);
//! }
//! # }
//! ```
//!
//! Source: MEB §3 (Wang et al. 2016). Leaves out: acting on what it finds, which is the policy's.

mod clock;
mod cold;
mod cost;
mod dedup;
#[cfg(test)]
mod fake_shim;
mod freed;
mod granules;
mod holdings;
mod link;
mod linked;
mod lru;
mod messages;
mod mode;
mod outside;
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
pub use read_back::read_back;
pub use sentinels::INTERVAL;
pub use shim_of::shim_of;
pub use tracked::{STEP, State, Tracked};
pub use unshare::{StillShares, unshare};
