//! Evidence: claims, their results, and whether the code is still the one that was measured.
//!
//! **Problem.** A number in a document says neither when it was measured nor on which code, and a
//! limit in a document drifts from the limit in the code.
//!
//! **Idea.** A [`Claim`](claim::Claim) stands in its scenario's file: a sentence, a target, the
//! paper's value. A [`RunRecord`](record::RunRecord) is a file `results/<scenario>.json` with every
//! round's value and the hashes of the sources that were measured. CLAIMS.md and the tables of
//! the page on the papers are written from both. Decision 051.
//!
//! **Invariants.** A missing reading is a missing figure, never a number. A record with a source
//! that differs is stale. A claim without a record, or with a miss, is never dropped.

pub mod bench;
pub mod claim;
pub mod host;
pub mod page;
pub mod papers;
pub mod queue;
pub mod record;
pub mod recorder;
pub mod tree;

use std::path::PathBuf;

/// A fault of records or sources.
#[derive(Debug, thiserror::Error)]
pub enum EvidenceError {
    /// The command was not run in Overbook's source tree.
    #[error(
        "{0} and the directories above it are not Overbook's source tree: run this command in it"
    )]
    NoTree(PathBuf),
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    /// A scenario names sources that do not exist.
    #[error("{0}: a scenario measures it, and it does not exist")]
    NoSource(PathBuf),
    /// A record does not hold what it must.
    #[error("{path}: {fault}")]
    Faulty { path: PathBuf, fault: String },
    /// The program is not what its sources say.
    #[error("{file} is newer than {program}: run `make build` first")]
    OldProgram {
        file: PathBuf,
        /// The program that was built from it.
        program: PathBuf,
    },
    /// A run without a figure.
    #[error("{0} has no figure: nothing to record")]
    NoFigure(String),
}
