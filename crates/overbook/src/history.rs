//! History: what was read and what was decided, kept in SQLite and thinned with age.
//!
//! **Problem.** "Why was that VM slow at three?" is asked at nine. The loop must answer it without
//! ever waiting for a disk, without growing for ever, and without losing all of it in a crash.
//!
//! **Idea.** The loop hands each tick to a thread through a short queue ([`writer`](self)). That
//! thread makes rows of it ([`sample`](self)) at three resolutions at once: every tick, means of 10
//! s and of 60 s; each resolution has its own age limit ([`store`](self)). So thinning is deleting
//! the oldest rows, never recalculating any, and a crash costs at most the open means.
//!
//! **Invariants.** [`History::record`] never waits. A full disk, a missing permission or a damaged
//! file is a sentence in [`History::error`], and ends by itself when its cause does. A file that
//! cannot be used is renamed, never deleted. What Overbook must undo is not kept here (see
//! [`crate::journal`]).
//!
//! **Cost.** About 55,000 rows or 4 MB per VM when full, 256 MiB in all (then the oldest go first);
//! one transaction per tick without fsync (WAL, `synchronous=NORMAL`), 256 KiB of page cache.

mod read;
mod sample;
mod store;
#[cfg(test)]
mod tests;
mod writer;

pub use read::{Entry, HistoryRow, LoanRow, ReadError, last_change, loans, read};
pub use writer::History;

/// The file's name within the state directory.
pub const FILE_NAME: &str = "history.db";
