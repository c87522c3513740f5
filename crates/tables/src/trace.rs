//! Files of references, read in batches of object ids.
//!
//! There are three formats, each plain or compressed by gzip, xz or zstd: text with columns
//! ([`Format::Csv`]), consecutive 64-bit ids ([`Format::Binary`]), and libCacheSim's
//! [`Format::OracleGeneral`]. The file's name or the user tells the format; text is recognised by
//! itself. The first bytes tell the compression. Files of any length are read in constant memory.
//!
//! A trace that is cut off, empty, or of another format is an error with its place, never a shorter
//! trace: a curve from half a trace looks like any other curve. Only text can be cut at a place
//! that does not show; a last line without its newline is then reported by [`Trace::warning`].

mod columns;
mod error;
mod fixed;
mod packing;
mod source;
#[cfg(test)]
mod tests;
mod text;

use std::path::Path;

use clap::ValueEnum;

pub use error::TraceError;
use source::TraceInput;

/// The format of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Lines of text with an id each, in one of their columns
    Csv,
    /// Ids of 64 bits, little-endian, without anything between them
    Binary,
    /// libCacheSim's oracleGeneral: records of 24 bytes with time, id, size and next access
    OracleGeneral,
}

impl Format {
    /// The format that a file's name tells, if any.
    fn of_name(path: &Path) -> Option<Self> {
        let name = packing::bare_name(path)?;
        let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
        if name.contains("oraclegeneral") {
            Some(Self::OracleGeneral)
        } else if ends(&[".csv", ".txt", ".tsv"]) {
            Some(Self::Csv)
        } else {
            ends(&[".bin", ".u64"]).then_some(Self::Binary)
        }
    }

    /// The format's name, as the user writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Csv => "csv",
            Self::Binary => "binary",
            Self::OracleGeneral => "oracle-general",
        }
    }
}

/// A trace being read.
pub struct Trace {
    source: TraceInput,
    format: Format,
    decoder: Decoder,
}

enum Decoder {
    Text(text::Text),
    Fixed(fixed::Fixed),
}

impl Trace {
    /// Opens a file; `-` is standard input. Without a format, the file's name decides, and text
    /// is csv. A column is given by name or by number, from 1; several are separated by commas.
    /// Without a column the header decides; an ambiguous header is an error.
    ///
    /// # Errors
    /// The file cannot be opened, or nothing tells its format.
    pub fn open(
        path: &Path,
        format: Option<Format>,
        column: Option<&str>,
    ) -> Result<Self, TraceError> {
        let mut source = TraceInput::open(path)?;
        source.advance(0)?;
        let is_text = || {
            let buffer = source.buffer();
            (text::is_text(buffer) || text::is_utf16(buffer)).then_some(Format::Csv)
        };
        let unknown = || TraceError::UnknownFormat { path: path.into() };
        let said = format.or_else(|| Format::of_name(path));
        let format = said.or_else(is_text).ok_or_else(unknown)?;
        let decoder = match format {
            Format::Csv => Decoder::Text(text::Text::new(column)),
            Format::Binary => Decoder::Fixed(fixed::Fixed::ids()),
            Format::OracleGeneral => Decoder::Fixed(fixed::Fixed::oracle_general()),
        };
        Ok(Self { source, format, decoder })
    }

    /// Replaces the contents of `ids` with the next batch, which is empty at the end.
    ///
    /// # Errors
    /// The file cannot be read on; the error has the place and what would be valid there.
    pub fn next_batch(&mut self, ids: &mut Vec<u64>) -> Result<(), TraceError> {
        ids.clear();
        match &mut self.decoder {
            Decoder::Text(text) => text.next_batch(&mut self.source, ids),
            Decoder::Fixed(fixed) => fixed.next_batch(&mut self.source, ids),
        }
    }

    /// The trace's format.
    #[must_use]
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The column that was read, as `--column` takes it, and in words. It is known once ids were
    /// read, and only for text.
    #[must_use]
    pub fn column(&self) -> Option<(&str, String)> {
        match &self.decoder {
            Decoder::Text(text) => text.shape().map(|shape| (shape.name(), shape.described())),
            Decoder::Fixed(_) => None,
        }
    }

    /// The file's length in bytes, as stored; 0 for a pipe.
    #[must_use]
    pub const fn file_bytes(&self) -> u64 {
        self.source.file_bytes()
    }

    /// Number of bytes read so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }

    /// A peculiarity that is no error; known at the end.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        match &self.decoder {
            Decoder::Text(text) => text.warning(),
            Decoder::Fixed(_) => None,
        }
    }
}
