//! A simulated host whose guests misbehave, run by the real policy.
//!
//! **Problem.** What a memory manager does on a good day says little; guests that lie, stall,
//! vanish or swap without end cannot be ordered from a real QEMU at will, and not a thousand of
//! them.
//!
//! **Idea.** [`Host`] implements the same three ports as the daemon's drivers ([`model::ports`]),
//! so [`policy::cycle_with`] runs over it unchanged. Its guests are [`Fake`]s, each named for its
//! [`Nature`]. A [`Judge`] watches from outside: it sees what really happens inside the guests and
//! never reads the policy's reasons, so a policy cannot talk its way out of harm.
//!
//! **Invariants.** One seed replays a whole run, second by second. Time is a number that the run
//! advances; nothing here reads a clock, a file or a socket. Memory is conserved: what guests
//! occupy, others occupy and the host has available add up to the host's memory.
//!
//! **Leaves out.** How fast pages really move. Rates are round figures of the right size (a
//! balloon: 200 MiB/s, a swap disk: 20 MiB/s); the scenarios on real guests measure.

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
