//! Errors of a trace: the place, what was found, and what would be valid.

use std::{io, path::PathBuf};

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("{path}: {error}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The file cannot be read on.
    #[error("{path}: after {at} bytes: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Bytes that were read before.
        at: u64,
        /// The kernel's error.
        error: io::Error,
    },
    /// The compressed data is damaged or cut off.
    #[error(
        "{path}: its {packing} data cannot be read beyond byte {at} of the file ({error}): it is \
         cut off or damaged"
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// The compression.
        packing: &'static str,
        /// Bytes of the file that were read before.
        at: u64,
        /// The library's error.
        error: io::Error,
    },
    /// The file has a known format that cannot be read.
    #[error("{path}: it is {what}, which is not read; {way}")]
    NotRead {
        /// The file.
        path: PathBuf,
        /// The kind of file that it is.
        what: String,
        /// Another way to read it.
        way: &'static str,
    },
    /// The name is that of a compressed file, but the file is not compressed.
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
    /// Nothing tells the format.
    #[error(
        "{path}: it is no text, and its name does not tell its format (*.csv, *.txt, *.tsv, *.bin, \
         *.u64, *oracleGeneral*, each also with .gz, .xz or .zst); say it with --format csv, binary \
         or oracle-general"
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// The trace has no reference.
    #[error("{path}: it holds no reference; a {format} trace has at least one {unit}")]
    Empty {
        /// The file.
        path: PathBuf,
        /// The format.
        format: &'static str,
        /// The unit of one reference.
        unit: &'static str,
    },
    /// The file ends within a record.
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
        /// The number of the record, from 1.
        record: u64,
        /// The place of its beginning, decompressed.
        at: u64,
        /// The number of its bytes that are there.
        rest: usize,
    },
    /// A record has an impossible value.
    #[error(
        "{path}: record {record}, at byte {at}: {found}; {valid}: the trace is damaged or of another \
         format"
    )]
    Record {
        /// The file.
        path: PathBuf,
        /// The number of the record, from 1.
        record: u64,
        /// The place of its beginning, decompressed.
        at: u64,
        /// The value that was found.
        found: String,
        /// The values that are valid.
        valid: &'static str,
    },
    /// A line has an impossible value.
    #[error("{path}: line {line}: {found}; {valid}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: u64,
        /// The value that was found.
        found: String,
        /// The values that are valid.
        valid: String,
    },
}
