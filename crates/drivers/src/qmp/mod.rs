//! QMP, QEMU's management protocol, for a client that trusts no peer.
//!
//! **Problem.** QEMU may be stopped, dead, busy with another client, or not QEMU at all. Its
//! answers may be late, enormous or garbage. None of that may cost the daemon more than this one
//! connection.
//!
//! **Idea.** Every step has the same deadline ([`DEADLINE`]), and every line has a limit
//! ([`MAX_LINE`], or [`MAX_LARGE`] if a large answer is expected). The only data kept from events
//! is the balloon's size, and events have an allowance ([`allowance`]): a flood ends the
//! connection. Commands carry IDs. An answer that comes after its deadline is recognised by its
//! ID and dropped. Until it has come no further command is sent. So a stopped QEMU finds at most
//! one batch of stale commands when it continues, and both buffers stay small.
//!
//! **Cost.** A batch of commands is one write and, because QEMU answers fast, few reads. The
//! answers are kept as text until all have arrived, because parsed JSON of that size can take
//! eighty times the memory. So only one batch at a time is parsed.
//!
//! Source: QEMU's docs/interop/qmp-spec.rst. Leaves out: out-of-band commands, file descriptors.

mod allowance;
mod client;
mod error;
mod framing;
mod message;

pub use client::{DEADLINE, QmpClient, connect};
pub use error::QmpError;
pub use framing::{MAX_LARGE, MAX_LINE};
pub use message::{Command, Message, check_greeting, outcome, parse};
