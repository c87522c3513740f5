//! The options after `-plugin file.so,`.

use std::borrow::Cow;
use std::path::PathBuf;

use crate::layout::PAGE_BYTES;

/// Above this, page numbers would not fit 32 bits.
const MOST_RAM_BYTES: u64 = 1 << 43;

/// Why the tracer does not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OptionError {
    /// The tracer numbers pages as on an x86 PC.
    #[error("only qemu-system-x86_64 can be traced")]
    Target,
    /// The option is not `name=value`, or the name is unknown.
    #[error("option {0:?}: there are out=FILE and ram=BYTES")]
    Unknown(String),
    /// Both options are needed.
    #[error("option {0} is missing: there must be out=FILE and ram=BYTES")]
    Missing(&'static str),
    /// The size of RAM is invalid.
    #[error("ram={0}: must be whole pages of {PAGE_BYTES} bytes, at most {MOST_RAM_BYTES} in all")]
    Ram(String),
    /// The trace file cannot be created.
    #[error("cannot create the trace: {0}")]
    Create(#[from] std::io::Error),
}

/// The tracer's options.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// The trace file, which is created or truncated.
    pub(crate) out: PathBuf,
    /// The size of the guest's RAM, as given by `-m`.
    pub(crate) ram_bytes: u64,
}

impl Options {
    /// Parses QEMU's words; `traceable`: whether this QEMU emulates a whole x86 machine.
    pub(crate) fn parse<'a>(
        words: impl Iterator<Item = Cow<'a, str>>,
        traceable: bool,
    ) -> Result<Self, OptionError> {
        if !traceable {
            return Err(OptionError::Target);
        }
        let (mut out, mut ram) = (None, None);
        for word in words {
            match word.split_once('=') {
                Some(("out", path)) if !path.is_empty() => out = Some(PathBuf::from(path)),
                Some(("ram", bytes)) => ram = Some(ram_bytes(bytes)?),
                _ => return Err(OptionError::Unknown(word.into_owned())),
            }
        }
        Ok(Self {
            out: out.ok_or(OptionError::Missing("out"))?,
            ram_bytes: ram.ok_or(OptionError::Missing("ram"))?,
        })
    }
}

fn ram_bytes(text: &str) -> Result<u64, OptionError> {
    let whole =
        |bytes: &u64| (1..=MOST_RAM_BYTES).contains(bytes) && bytes.is_multiple_of(PAGE_BYTES);
    text.parse().ok().filter(whole).ok_or_else(|| OptionError::Ram(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options, String> {
        let words = text.split(' ').filter(|word| !word.is_empty()).map(Cow::from);
        Options::parse(words, true).map_err(|error| error.to_string())
    }

    #[test]
    fn both_options_in_any_order() {
        let expected = Options { out: "/tmp/t".into(), ram_bytes: 8192 };
        assert_eq!(parse("out=/tmp/t ram=8192").unwrap(), expected);
        assert_eq!(parse("ram=8192 out=/tmp/t").unwrap(), expected);
    }

    #[test]
    fn bad_options_are_named() {
        for (text, named) in [
            ("out=x", "ram is missing"),
            ("ram=4096", "out is missing"),
            ("out=x ram=4096 tick=1", "\"tick=1\""),
            ("out= ram=4096", "\"out=\""),
            ("out=x ram=0", "ram=0"),
            ("out=x ram=4097", "ram=4097"),
            ("out=x ram=400M", "ram=400M"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn another_machine_is_refused() {
        assert!(Options::parse(std::iter::empty(), false).is_err());
    }
}
