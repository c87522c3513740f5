//! Reads the small text files of `/proc` and `/sys`, with precise errors.
//!
//! A file under `/proc/<pid>` vanishes with its process, at any moment. That is
//! [`ProcError::Gone`], which callers expect; it is not a fault to report to the user.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use model::Bytes;

/// The largest file that is read as a whole; a larger one is not the expected file.
const MAX_LEN: u64 = 1 << 20;
/// Nearly all of these files fit into it, and need a single read. They claim a size of zero.
const USUAL_LEN: usize = 4096;

/// The reason why a file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// The process has ended, or the kernel has no such file.
    #[error("{path}: it does not exist (any more)")]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file lacks an expected line.
    #[error("{path}: no line `{field}`")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The missing line.
        field: &'static str,
    },
    /// The file has a malformed value.
    #[error("{path}: {field} is {value:?}, which is not {expected}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// The value found.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
}

impl ProcError {
    /// The meaning of `error` for `path`.
    pub(crate) fn from_io(path: &Path, error: io::Error) -> Self {
        let path = path.to_owned();
        let gone = error.kind() == io::ErrorKind::NotFound
            || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error());
        if gone { Self::Gone { path } } else { Self::Io { path, source: error } }
    }

    /// The error for a `value` of `field` that was not expected.
    pub(crate) fn malformed(
        path: &Path,
        field: &'static str,
        value: &str,
        expected: &'static str,
    ) -> Self {
        let value = value.chars().take(40).collect();
        Self::Malformed { path: path.to_owned(), field, value, expected }
    }
}

/// The whole of a small file. A process may give itself a name of any bytes, so bytes that are no
/// text are replaced.
pub(crate) fn read(path: &Path) -> Result<String, ProcError> {
    let failed = |error| ProcError::from_io(path, error);
    let mut bytes = Vec::with_capacity(USUAL_LEN);
    File::open(path).map_err(failed)?.take(MAX_LEN).read_to_end(&mut bytes).map_err(failed)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// `field` (written with its colon) among lines such as `MemFree:   1234 kB`; `None` if there is
/// no such line.
pub(crate) fn kib_field(
    path: &Path,
    text: &str,
    field: &'static str,
) -> Result<Option<Bytes>, ProcError> {
    let Some(value) = text.lines().find_map(|line| line.strip_prefix(field)) else {
        return Ok(None);
    };
    parse_kib(value)
        .map(Some)
        .ok_or_else(|| ProcError::malformed(path, field, value.trim(), "a number of kB"))
}

/// As [`kib_field`], for a field that every kernel has.
pub(crate) fn required_kib_field(
    path: &Path,
    text: &str,
    field: &'static str,
) -> Result<Bytes, ProcError> {
    kib_field(path, text, field)?.ok_or_else(|| ProcError::Missing { path: path.to_owned(), field })
}

/// `   1234 kB`
pub(crate) fn parse_kib(value: &str) -> Option<Bytes> {
    let kib: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(Bytes)
}

/// The program that a process runs: the base name of its executable, or the kernel's short name
/// of the process if the executable is not visible.
///
/// # Errors
/// When the process is gone.
pub fn program_of(pid: u32) -> Result<String, ProcError> {
    if let Ok(exe) = std::fs::read_link(format!("/proc/{pid}/exe"))
        && let Some(name) = exe.file_name().and_then(|name| name.to_str())
    {
        // After a package upgrade, running programs are left without their file.
        return Ok(name.trim_end_matches(" (deleted)").to_owned());
    }
    let path = PathBuf::from(format!("/proc/{pid}/comm"));
    Ok(read(&path)?.trim_end().to_owned())
}

/// The owner of the file of a process's program, who can write another program into it; `None`:
/// it is not visible.
#[must_use]
pub fn owner_of_program(pid: u32) -> Option<u32> {
    // The link leads to the running file itself, independent of the file at its path now.
    Some(std::fs::metadata(format!("/proc/{pid}/exe")).ok()?.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vanished_process_is_told_from_a_fault() {
        let error = read(Path::new("/proc/4294967295/status")).unwrap_err();
        assert!(matches!(error, ProcError::Gone { .. }), "{error}");
    }

    #[test]
    fn sizes_that_are_no_sizes_are_refused_with_their_text() {
        let path = Path::new("x");
        for bad in ["A: 12", "A: -1 kB", "A: 99999999999999999999 kB", "A: kB", "A: 1e3 kB"] {
            let error = kib_field(path, bad, "A:").unwrap_err();
            assert!(matches!(error, ProcError::Malformed { .. }), "{bad}: {error}");
        }
        assert_eq!(kib_field(path, "A:\t 12 kB\n", "A:").unwrap(), Some(Bytes::kib(12)));
        assert_eq!(kib_field(path, "AB: 12 kB", "A:").unwrap(), None);
    }

    #[test]
    fn a_process_is_known_by_its_executable() {
        let name = program_of(std::process::id()).unwrap();
        assert!(name.starts_with("sys"), "{name}");
        assert!(program_of(u32::MAX).is_err());
    }
}
