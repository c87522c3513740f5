//! A simulated host whose guests misbehave, run by the real policy.
//!
//! **Problem.** A memory manager's behaviour on a good day proves little. A real QEMU cannot
//! produce on demand guests that lie, stall, vanish or swap without end, let alone a thousand of
//! them.
//!
//! **Idea.** [`Host`] implements the same three ports as the daemon's drivers ([`model::ports`]),
//! so [`policy::cycle_with`] runs over it unchanged. Its guests are [`Fake`]s, whose misbehaviour
//! is a list of [`Nature`]s. A [`Judge`] watches from outside: it sees the real state of the
//! guests and never reads the policy's reasons, so a false reason cannot hide harm.
//!
//! **Invariants.** One seed replays a whole run, second by second. Time is a number that the run
//! advances; nothing here reads a clock, a file or a socket. Memory is conserved: the memory that
//! guests occupy, the memory that others occupy and the host's available memory add up to the
//! host's total.
//!
//! **Leaves out.** The real speed of moving pages. Rates are round figures of the right size (a
//! balloon: 200 MiB/s, a swap disk: 20 MiB/s); the lab's scenarios measure them on real guests.

pub mod dynamic_programming;
mod fake;
mod guest;
mod harm;
mod host;
pub mod pool;
mod scenario;

pub use fake::{Access, Fake, Lie, Load, Nature, TURN};
pub use guest::Guest;
pub use harm::{Harm, Judge};
pub use host::{Host, SimClock};
pub use scenario::{Run, Scenario, Second, limits};
