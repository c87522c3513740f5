//! Pressure stall information: the share of time in which work waited for memory.
//!
//! `some` counts moments in which at least one task waited, `full` those in which all did. A kernel
//! without PSI (`CONFIG_PSI=n`, or `psi=0` at boot) has no file, or one that cannot be read.
//!
//! Source: Documentation/accounting/psi.rst.

use std::path::Path;

use crate::procfs::{ProcError, read};

const HOST: &str = "/proc/pressure/memory";

/// The content of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: Stall,
    /// All tasks waited.
    pub full: Stall,
}

/// One line: averages in percent, and the total.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stall {
    /// Over the last 10 s.
    pub avg10: f32,
    /// Over the last minute.
    pub avg60: f32,
    /// Over the last five minutes.
    pub avg300: f32,
    /// Since boot, in microseconds.
    pub total_us: u64,
}

/// The host's memory pressure; `None` if the kernel has no PSI.
///
/// # Errors
/// When the file is malformed.
pub fn of_host() -> Result<Option<Pressure>, ProcError> {
    of_file(Path::new(HOST))
}

fn of_file(path: &Path) -> Result<Option<Pressure>, ProcError> {
    match read(path) {
        Ok(text) => parse(path, &text).map(Some),
        Err(ProcError::Gone { .. }) => Ok(None),
        // With psi=0 the file exists, but every read of it fails.
        Err(ProcError::Io { source, .. })
            if source.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn parse(path: &Path, text: &str) -> Result<Pressure, ProcError> {
    Ok(Pressure { some: stall(path, text, "some")?, full: stall(path, text, "full")? })
}

fn stall(path: &Path, text: &str, kind: &'static str) -> Result<Stall, ProcError> {
    let missing = || ProcError::Missing { path: path.to_owned(), field: kind };
    let line = text.lines().find_map(|line| line.strip_prefix(kind)).ok_or_else(missing)?;
    let malformed =
        || ProcError::malformed(path, kind, line.trim(), "`avg10=… avg60=… avg300=… total=…`");
    let field = |name: &str| {
        let mut words = line.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)).ok_or_else(malformed)
    };
    let percent = |name: &str| {
        let value: f32 = field(name)?.parse().map_err(|_| malformed())?;
        if (0.0..=100.0).contains(&value) { Ok(value) } else { Err(malformed()) }
    };
    Ok(Stall {
        avg10: percent("avg10=")?,
        avg60: percent("avg60=")?,
        avg300: percent("avg300=")?,
        total_us: field("total=")?.parse().map_err(|_| malformed())?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Pressure, ProcError> {
        parse(Path::new(HOST), text)
    }

    #[test]
    fn both_lines_are_read() {
        let text = "some avg10=1.53 avg60=0.87 avg300=0.20 total=1234567\n\
                    full avg10=0.50 avg60=0.00 avg300=0.00 total=99\n";
        let pressure = parse_text(text).unwrap();
        assert_eq!((pressure.some.avg10, pressure.full.total_us), (1.53, 99));
    }

    #[test]
    fn what_is_no_share_of_time_is_refused() {
        for value in ["-1", "101", "NaN", "inf", "x", ""] {
            let text = format!("some avg10={value} avg60=0 avg300=0 total=0\nfull avg10=0");
            let error = parse_text(&text).unwrap_err();
            assert!(matches!(error, ProcError::Malformed { .. }), "{value}: {error}");
        }
        assert!(matches!(parse_text(""), Err(ProcError::Missing { .. })));
    }

    #[test]
    fn a_kernel_without_psi_is_no_error() {
        assert_eq!(of_file(Path::new("/proc/pressure/nothing")).unwrap(), None);
        of_host().unwrap();
    }
}
