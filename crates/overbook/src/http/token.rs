//! The bearer token that clients of the TCP listener need.
//!
//! A client with the token may release every VM of the host. So a token that other users can
//! read, or that can be guessed, is refused at the start. The comparison takes constant time.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use axum::http::{HeaderMap, header::AUTHORIZATION};
use subtle::ConstantTimeEq;

/// A token shorter than this can be guessed.
const MIN_LEN: usize = 16;
/// A token file longer than this is not a token file.
const MAX_LEN: u64 = 4096;
/// Permission bits of other users.
const OTHERS: u32 = 0o007;

/// The token.
#[derive(Clone)]
pub struct Token(String);

/// Why a file holds no usable token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error("api.token_file {path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// Other users may read or change the file.
    #[error("api.token_file {path} has mode {mode:04o}: others may read it; chmod o= {path}")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file is too long to be a token file.
    #[error(
        "api.token_file {path} holds {len} bytes, more than the {MAX_LEN} that a token may have"
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its size.
        len: u64,
    },
    /// The token can be guessed.
    #[error(
        "api.token_file {path} holds a token of {len} characters; at least {MIN_LEN} are needed"
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The token's length.
        len: usize,
    },
    /// The token cannot be sent in a header.
    #[error("api.token_file {path} must hold one word of printable ASCII characters")]
    NotPrintable {
        /// The file.
        path: PathBuf,
    },
}

impl Token {
    /// Reads the token from `path`.
    ///
    /// # Errors
    /// The file cannot be read, other users may read it, or it holds no usable token.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let io = |error| TokenError::Io { path: path.into(), error };
        let file = fs::File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        let mode = meta.mode() & 0o7777;
        if mode & OTHERS != 0 {
            return Err(TokenError::Exposed { path: path.into(), mode });
        }
        if meta.len() > MAX_LEN {
            return Err(TokenError::TooLong { path: path.into(), len: meta.len() });
        }
        let text = io::read_to_string(file).map_err(io)?;
        let token = text.trim();
        if token.len() < MIN_LEN {
            return Err(TokenError::TooShort { path: path.into(), len: token.len() });
        }
        if !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(TokenError::NotPrintable { path: path.into() });
        }
        Ok(Self(token.to_owned()))
    }

    /// A token that was read earlier ([`Self::text`]).
    pub(crate) const fn known(text: String) -> Self {
        Self(text)
    }

    /// The token's text.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Whether the request has this token.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let sent = headers.get(AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
        let Some((scheme, sent)) = sent.split_at_checked("Bearer ".len()) else { return false };
        scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(sent.ct_eq(self.0.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn written(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    fn error(text: &str, mode: u32) -> String {
        let (_dir, path) = written(text, mode);
        Token::read(&path).err().unwrap().to_string()
    }

    #[test]
    fn a_token_that_others_may_read_is_refused() {
        assert!(error("0123456789abcdef", 0o604).contains("mode 0604: others may read it"));
    }

    #[test]
    fn a_short_or_unprintable_or_endless_token_is_refused() {
        assert!(error("0123456789abcde\n", 0o600).contains("15 characters; at least 16"));
        assert!(error("0123456789 abcdef", 0o600).contains("printable"));
        assert!(error(&"x".repeat(5000), 0o600).contains("5000 bytes"));
    }

    #[test]
    fn a_missing_token_file_is_named() {
        let error = Token::read(Path::new("/nonexistent/token")).err().unwrap().to_string();
        assert!(error.contains("/nonexistent/token: No such file"), "{error}");
    }

    #[test]
    fn only_the_whole_token_opens() {
        let (_dir, path) = written("0123456789abcdef\n", 0o640);
        let token = Token::read(&path).unwrap();
        let opens = |value: &str| {
            let headers = [(AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            token.is_in(&headers)
        };
        assert!(opens("Bearer 0123456789abcdef"));
        assert!(opens("bearer 0123456789abcdef"));
        for wrong in
            ["", "Bearer ", "Bearer 0123456789abcde", "Bearer 0123456789abcdefg", "Basic x"]
        {
            assert!(!opens(wrong), "{wrong}");
        }
        assert!(!token.is_in(&HeaderMap::new()));
    }
}
