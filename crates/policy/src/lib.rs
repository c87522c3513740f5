//! DECIDE: a pure function from what is seen, wanted and remembered to what is done, and why.
//!
//! [`tick()`] is the whole of Overbook's judgement. It runs once a second on the host, in the
//! simulator over fake guests, and in `overbook plan --from` over exported state, and it is the
//! same function. With no outside world there is nothing to fail: it answers a [`model::Plan`],
//! never an error.
//!
//! One tick, for each group by itself:
//!
//! 1. [`member`]: believe or doubt each guest's statistics, see how its balloon follows, and how
//!    fast it takes memory ([`allocation`]).
//! 2. [`ledger`]: budget, used, promised, surplus, deficit, in physical bytes.
//! 3. [`lending`]: between groups that consent, what one leaves idle serves one that is short.
//! 4. Safety first: a guest under pressure below its base gets all of it back at once, and one
//!    without swap what was taken from it and it turns out to need ([`returning`]).
//! 5. A host short of memory, or a group over its budget, takes grants back ([`revoke`]).
//! 6. Otherwise the group's policy hands out the surplus ([`reprovision`]), and idle memory is
//!    taken from those who leave it unused, if somebody is short ([`idle`]); or memory goes where
//!    it saves the most waiting ([`balancing`], by the [`optimum`]).
//!
//! Who pages because it was given less than it was promised is overloaded ([`overload`]); and what
//! is to be kept free for that, says [`excess`].
//!
//! What guests have freed is taken when it is needed ([`reclaim`]). What nobody needs at the moment
//! serves as a cache of disks ([`cache`]).
//!
//! Beside its memory each group has its scan rate: how fast its identical pages are looked for
//! ([`scan_rate`]), and whether the kernel may do that for VMs without the shim ([`ksm`]).
//!
//! Taking passes through one gate ([`guard`]), which holds the safety rules. What is taken in one
//! tick is handed out in a later one, once the host has it: memory is never in two places.
//!
//! Architecture invariant: no clock, file, socket, thread or random number here; groups that do not
//! both consent to lending meet only in the host's headroom, never in each other's ledgers.

mod allocation;
mod balancing;
mod cache;
mod case;
mod ceilings;
pub mod cluster;
mod cold;
pub mod excess;
mod group;
mod guard;
pub mod handover;
mod headroom;
mod idle;
pub mod ksm;
mod ledger;
mod lending;
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
mod withheld;

pub use case::Case;
pub use memory::Memory;
pub use rules::{Rule, Rules};
pub use tick::{cycle, cycle_with, tick, tick_with};
