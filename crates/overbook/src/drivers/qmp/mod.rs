//! QMP, QEMU's management protocol, for a client that trusts nobody.
//!
//! **Problem.** QEMU may be stopped, dead, busy with another client, or not QEMU at all; its
//! answers may be late, enormous or garbage. None of that may cost the daemon more than this one
//! connection.
//!
//! **Idea.** Every step has the same deadline ([`DEADLINE`]); every line has a limit
//! ([`MAX_LINE`], or [`MAX_LARGE`] where a large answer was asked for). Of an event nothing is kept
//! but a balloon's size, and what comes unasked has an allowance ([`allowance`]): a flood ends the
//! connection. Commands carry ids. An answer that comes after its deadline is recognised by its
//! id and dropped; until it has come nothing more is asked, so a stopped QEMU finds at most one
//! batch of stale questions when it goes on, and both buffers stay small.
//!
//! **Cost.** A batch of commands is one write and, as QEMU answers fast, few reads. The answers are
//! kept as text until all are there: JSON of that size can take eighty times the memory once it is
//! read, so one batch at a time is.
//!
//! Source: QEMU's docs/interop/qmp-spec.rst. Leaves out: out-of-band commands, file descriptors.

mod allowance;
mod client;
mod error;
mod framing;
mod message;

pub use client::{Client, DEADLINE, connect};
pub use error::QmpError;
pub use framing::{MAX_LARGE, MAX_LINE};
pub use message::Command;
