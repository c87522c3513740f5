//! History: readings and decisions, kept in SQLite and thinned with age.
//!
//! **Problem.** "Why was that VM slow at three?" is asked at nine. The loop must record the
//! answer without waiting for a disk, growing without limit, or losing everything in a crash.
//!
//! **Idea.** The loop hands each tick to a thread through a short queue ([`writer`](self)). The
//! thread makes rows of it ([`sample`](self)) at three resolutions: every tick, means of 10 s and
//! of 60 s. Each resolution has its own age limit ([`store`](self)). So thinning only deletes the
//! oldest rows and recalculates none, and a crash costs at most the open means.
//!
//! **Invariants.** [`History::record`] never waits. A full disk, a missing permission or a
//! damaged file is reported in [`History::error`] until its cause ends. A file that cannot be
//! used is renamed, never deleted. Data that Overbook needs to undo its actions is not kept here
//! (see [`drivers::journal`]).
//!
//! **Cost.** About 55,000 rows or 4 MB per VM when full; 256 MiB in all, after which the oldest
//! rows are deleted. One transaction per tick without fsync (WAL, `synchronous=NORMAL`); 256 KiB
//! of page cache.

mod read;
mod rows;
mod sample;
mod store;
#[cfg(test)]
mod tests;
mod writer;

pub use read::{Entry, HistoryRow, LoanRow, ReadError, last_change, loans, read};
pub use writer::History;

/// The file's name within the state directory.
pub const FILE_NAME: &str = "history.db";
