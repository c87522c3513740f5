//! Files of certificates and keys.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::PkiError;

/// The kind of a file's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Is {
    /// A key, which only its owner may read.
    Key,
    /// Any user may read it.
    Public,
}

pub(super) fn read(path: &Path) -> Result<String, PkiError> {
    fs::read_to_string(path).map_err(|error| PkiError::File { path: path.to_owned(), error })
}

/// Writes a new file; with `replaces` it atomically replaces an existing one.
pub(super) fn write(path: &Path, text: &str, is: Is, replaces: bool) -> Result<(), PkiError> {
    let mode = if is == Is::Key { 0o600 } else { 0o644 };
    let new = path.with_extension("new");
    let to = if replaces { &new } else { path };
    let written = || {
        if replaces {
            // A killed call may have left this file behind.
            let _ = fs::remove_file(to);
        }
        let mut file = fs::File::options().write(true).create_new(true).mode(mode).open(to)?;
        file.write_all(text.as_bytes())?;
        if replaces { fs::rename(to, path) } else { Ok(()) }
    };
    written().map_err(|error| PkiError::File { path: path.to_owned(), error })
}
