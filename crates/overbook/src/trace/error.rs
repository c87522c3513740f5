//! What can be wrong with a trace: where, what stands there, and what would be valid.

use std::{io, path::PathBuf};

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be opened.
    #[error("{path}: {error}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// It cannot be read on.
    #[error("{path}: after {at} bytes: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// How much was read before.
        at: u64,
        /// What the kernel says.
        error: io::Error,
    },
    /// Its compressed data is damaged, or cut off.
    #[error(
        "{path}: its {packing} data cannot be read beyond byte {at} of the file ({error}): it is \
         cut off or damaged"
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// How it is compressed.
        packing: &'static str,
        /// How much of the file was read before.
        at: u64,
        /// What the library says.
        error: io::Error,
    },
    /// It is something else, which is known.
    #[error("{path}: it is {what}, which is not read; {way}")]
    NotRead {
        /// The file.
        path: PathBuf,
        /// The kind of file that it is.
        what: String,
        /// How it can be read all the same.
        way: &'static str,
    },
    /// Its name is that of a compressed file, and it is none.
    #[error(
        "{path}: its name ends in {ending}, but its first bytes are of no compression that is read \
         (gzip, xz, zstd): it is cut off, damaged or not compressed; without that ending it is \
         read as it stands"
    )]
    Misnamed {
        /// The file.
        path: PathBuf,
        /// The end of its name.
        ending: &'static str,
    },
    /// Nothing says what it holds.
    #[error(
        "{path}: it is no text, and its name does not tell its format (*.csv, *.txt, *.tsv, *.bin, \
         *.u64, *oracleGeneral*, each also with .gz, .xz or .zst); say it with --format csv, binary \
         or oracle-general"
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// There is no reference in it.
    #[error("{path}: it holds no reference; a {format} trace has at least one {unit}")]
    Empty {
        /// The file.
        path: PathBuf,
        /// The format.
        format: &'static str,
        /// What one reference takes.
        unit: &'static str,
    },
    /// It ends within a record.
    #[error(
        "{path}: it ends {rest} bytes into record {record}, at byte {at}; {format} records have \
         {bytes} bytes: the trace is cut off, or of another format"
    )]
    CutOff {
        /// The file.
        path: PathBuf,
        /// The format.
        format: &'static str,
        /// Bytes per record.
        bytes: usize,
        /// Which record, from 1.
        record: u64,
        /// Where it begins, decompressed.
        at: u64,
        /// How many of its bytes are there.
        rest: usize,
    },
    /// A record says what none can say.
    #[error(
        "{path}: record {record}, at byte {at}: {found}; {valid}: the trace is damaged or of another \
         format"
    )]
    Record {
        /// The file.
        path: PathBuf,
        /// Which record, from 1.
        record: u64,
        /// Where it begins, decompressed.
        at: u64,
        /// What it says.
        found: String,
        /// What it may say.
        valid: &'static str,
    },
    /// A line says what none can say.
    #[error("{path}: line {line}: {found}; {valid}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// What it says.
        found: String,
        /// What it may say.
        valid: String,
    },
}
