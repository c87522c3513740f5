//! DECIDE: a pure function from observed state, configuration and memory to actions with reasons.
//!
//! [`tick()`] makes all of Overbook's decisions. It runs once a second on the host, in the
//! simulator over fake guests, and in `overbook plan --from` over exported state, always as the
//! same function. It touches no outside world, so it cannot fail: it returns a [`model::Plan`],
//! never an error.
//!
//! The steps of one tick, for each group by itself:
//!
//! 1. [`member`]: check each guest's statistics, the progress of its balloon, and the rate at
//!    which it takes memory ([`allocation`]).
//! 2. [`ledger`]: budget, used, promised, surplus, deficit, in physical bytes.
//! 3. [`lending`]: between groups that consent, one group's idle memory serves another that is
//!    short.
//! 4. Safety first: a guest under pressure below its base gets all of its base back at once. A
//!    guest without swap gets back the taken memory that it turns out to need ([`returning`]).
//! 5. A host short of memory, or a group over its budget, takes grants back ([`revoke`]).
//! 6. Otherwise the group's policy hands out the surplus ([`reprovision`]), and if a VM is short,
//!    idle memory is taken from other VMs ([`idle`]); or memory goes where it saves the most
//!    waiting ([`balancing`], by the [`optimum`]).
//!
//! A VM that pages because it was given less than it was promised is overloaded ([`overload`]).
//! [`excess`] computes the memory to keep free for overloads.
//!
//! Freed memory of guests is taken when it is needed ([`reclaim`]). Memory that no VM needs at
//! the moment serves as a cache of disks ([`cache`]), or is lent to other hosts ([`lent`]).
//!
//! In addition to memory, each group has a scan rate for identical pages ([`scan_rate`]). [`ksm`]
//! decides whether the kernel may merge pages of VMs without the shim.
//!
//! All taking passes through one gate ([`guard`]), which holds the safety rules. Memory taken in
//! one tick is handed out in a later one, once the host has it: memory is never in two places.
//!
//! Architecture invariant: no clock, file, socket, thread or random number here; groups that do
//! not both consent to lending meet only in the host's headroom, never in each other's ledgers.

mod allocation;
mod balancing;
mod cache;
mod case;
mod ceilings;
pub mod cluster;
mod cold;
pub mod excess;
mod foresee;
mod grace;
mod group;
mod guard;
pub mod handover;
mod headroom;
mod idle;
pub mod ksm;
mod ledger;
mod lending;
pub mod lent;
mod member;
mod memory;
pub mod optimum;
pub mod overload;
mod reclaim;
mod reprovision;
mod returning;
mod revoke;
mod rules;
pub mod scan_rate;
mod statistics;
mod tick;
pub mod tuning;
mod used;
mod withheld;

pub use case::Case;
pub use cold::waits;
pub use foresee::ForeseenChange;
pub use headroom::{Kept, host_reserve};
pub use memory::Memory;
pub use rules::{Rule, Rules};
pub use tick::{cycle, cycle_with, tick, tick_with};
pub use used::used;
