//! Files of references, read as batches of object ids.
//!
//! Three formats, each plain or compressed by gzip, xz or zstd: text with columns
//! ([`Format::Csv`]), 64-bit ids one after the other ([`Format::Binary`]), and libCacheSim's
//! [`Format::OracleGeneral`]. The name says which, or the user; text is known without. How it is
//! compressed, the first bytes say. Files of any length are read in constant memory.
//!
//! A trace that is cut off, empty, or of another format than was said is an error with its place,
//! never a shorter trace: a curve from half a trace looks like any other curve. Text alone can be
//! cut where nothing shows; a last line without its end is then reported by [`Trace::warning`].

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
use source::Source;

/// How references are written down.
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
    /// What a file's name tells; nothing when it tells nothing.
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

    /// Its name, as the user writes it.
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
    source: Source,
    format: Format,
    decoder: Decoder,
}

enum Decoder {
    Text(text::Text),
    Fixed(fixed::Fixed),
}

impl Trace {
    /// Opens a file; `-` is standard input. Without a format its name decides, and text is csv. A
    /// column is given by name or by number, from 1, several of them with commas; without one, a
    /// header decides, and where there is a doubt it is an error.
    ///
    /// # Errors
    /// When it cannot be opened, or nothing says what it holds.
    pub fn open(
        path: &Path,
        format: Option<Format>,
        column: Option<&str>,
    ) -> Result<Self, TraceError> {
        let mut source = Source::open(path)?;
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

    /// The next ids, in place of what `ids` held; none at the end.
    ///
    /// # Errors
    /// When the file cannot be read on, with the place and what would be valid there.
    pub fn next_batch(&mut self, ids: &mut Vec<u64>) -> Result<(), TraceError> {
        ids.clear();
        match &mut self.decoder {
            Decoder::Text(text) => text.next_batch(&mut self.source, ids),
            Decoder::Fixed(fixed) => fixed.next_batch(&mut self.source, ids),
        }
    }

    /// What it is.
    #[must_use]
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The column that was read, as `--column` takes it, and for people; known once ids were read,
    /// and of a text alone.
    #[must_use]
    pub fn column(&self) -> Option<(&str, String)> {
        match &self.decoder {
            Decoder::Text(text) => text.shape().map(|shape| (shape.name(), shape.described())),
            Decoder::Fixed(_) => None,
        }
    }

    /// The file's length in bytes as it lies there; 0 for a pipe.
    #[must_use]
    pub const fn file_bytes(&self) -> u64 {
        self.source.file_bytes()
    }

    /// How many of them were read.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }

    /// What is odd, though not wrong; known at the end.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        match &self.decoder {
            Decoder::Text(text) => text.warning(),
            Decoder::Fixed(_) => None,
        }
    }
}
