//! The bearer tokens that clients of the TCP listener need.
//!
//! A client with the token of `token_file` may release every VM of the host. So a token that other
//! users can read, or that can be guessed, is refused at the start. A client that only watches,
//! such as Prometheus, gets the token of `read_token_file`: with it the API answers, and changes
//! nothing. Comparisons take constant time.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use axum::http::{HeaderMap, header::AUTHORIZATION};
use model::spec::ApiSpec;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// A token shorter than this can be guessed.
const MIN_LEN: usize = 16;
/// A token file longer than this is not a token file.
const MAX_LEN: u64 = 4096;
/// Permission bits of other users.
const OTHERS: u32 = 0o007;

/// The tokens of the TCP listener.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tokens {
    change: Token,
    read: Option<Token>,
}

/// The rights of a client on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenRight {
    /// To read.
    Read,
    /// To read, and to change the state of the daemon and its VMs.
    Change,
}

/// One token. Its text stands in no message.
#[derive(Clone, Serialize, Deserialize)]
struct Token(String);

/// Why a file holds no usable token.
#[derive(Debug, thiserror::Error)]
#[error("api.{key} {path}{fault}")]
pub struct TokenError {
    /// The key of the configuration.
    pub key: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The fault.
    pub fault: TokenFault,
}

/// A fault of a token file.
#[derive(Debug, thiserror::Error)]
pub enum TokenFault {
    /// The file cannot be read.
    #[error(": {0}")]
    Io(#[from] io::Error),
    /// Other users may read or change the file; its permission bits.
    #[error(" has mode {0:04o}: others may read it; take their rights away with chmod o=")]
    Exposed(u32),
    /// The file is too long to be a token file; its size in bytes.
    #[error(" holds {0} bytes, more than the {MAX_LEN} that a token may have")]
    TooLong(u64),
    /// The token can be guessed; its length in bytes.
    #[error(" holds a token of {0} characters; at least {MIN_LEN} are needed")]
    TooShort(usize),
    /// The token cannot be sent in a header.
    #[error(" must hold one word of printable ASCII characters")]
    NotPrintable,
    /// Both files hold the same token.
    #[error(" holds the token of api.token_file; with it a client may change everything")]
    Same,
}

impl Tokens {
    /// Reads the tokens. `None`: the configuration has no `token_file`.
    ///
    /// # Errors
    /// A file cannot be read, other users may read it, or it holds no usable token.
    pub fn read(spec: &ApiSpec) -> Result<Option<Self>, TokenError> {
        let Some(path) = &spec.token_file else { return Ok(None) };
        let change = Token::read("token_file", path)?;
        let Some(path) = &spec.read_token_file else {
            return Ok(Some(Self { change, read: None }));
        };
        let key = "read_token_file";
        let read = Token::read(key, path)?;
        if read.0 == change.0 {
            return Err(TokenError { key, path: path.clone(), fault: TokenFault::Same });
        }
        Ok(Some(Self { change, read: Some(read) }))
    }

    /// The right of a request's token. `None`: no token, or a wrong one.
    pub(super) fn right(&self, headers: &HeaderMap) -> Option<TokenRight> {
        if self.change.is_in(headers) {
            return Some(TokenRight::Change);
        }
        self.read.as_ref().is_some_and(|token| token.is_in(headers)).then_some(TokenRight::Read)
    }
}

impl Token {
    fn read(key: &'static str, path: &Path) -> Result<Self, TokenError> {
        let token = Self::in_file(path);
        token.map_err(|fault| TokenError { key, path: path.into(), fault })
    }

    fn in_file(path: &Path) -> Result<Self, TokenFault> {
        let file = fs::File::open(path)?;
        let meta = file.metadata()?;
        let mode = meta.mode() & 0o7777;
        if mode & OTHERS != 0 {
            return Err(TokenFault::Exposed(mode));
        }
        if meta.len() > MAX_LEN {
            return Err(TokenFault::TooLong(meta.len()));
        }
        let text = io::read_to_string(file)?;
        let token = text.trim();
        if token.len() < MIN_LEN {
            return Err(TokenFault::TooShort(token.len()));
        }
        if !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(TokenFault::NotPrintable);
        }
        Ok(Self(token.to_owned()))
    }

    fn is_in(&self, headers: &HeaderMap) -> bool {
        let sent = headers.get(AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
        let Some((scheme, sent)) = sent.split_at_checked("Bearer ".len()) else { return false };
        scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(sent.ct_eq(self.0.as_bytes()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
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
        Token::read("token_file", &path).err().unwrap().to_string()
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
        let error =
            Token::read("token_file", Path::new("/nonexistent/token")).err().unwrap().to_string();
        assert!(error.contains("/nonexistent/token: No such file"), "{error}");
    }

    #[test]
    fn only_the_whole_token_opens() {
        let (_dir, path) = written("0123456789abcdef\n", 0o640);
        let token = Token::read("token_file", &path).unwrap();
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

    #[test]
    fn the_two_tokens_differ_in_their_rights() {
        let (_dir, change) = written("0123456789abcdef\n", 0o640);
        let (_dir, read) = written("fedcba9876543210\n", 0o640);
        let spec = |read: &Path| ApiSpec {
            socket: "/x/s".into(),
            tcp: None,
            token_file: Some(change.clone()),
            read_token_file: Some(read.into()),
        };
        let tokens = Tokens::read(&spec(&read)).unwrap().unwrap();
        let right = |token: &str| {
            let value = format!("Bearer {token}").parse().unwrap();
            tokens.right(&[(AUTHORIZATION, value)].into_iter().collect())
        };
        assert_eq!(right("0123456789abcdef"), Some(TokenRight::Change));
        assert_eq!(right("fedcba9876543210"), Some(TokenRight::Read));
        assert_eq!(right("fedcba987654321"), None);
        assert!(!format!("{tokens:?}").contains("0123"));
        let error = Tokens::read(&spec(&change)).unwrap_err().to_string();
        assert!(error.starts_with("api.read_token_file "), "{error}");
        assert!(error.contains("holds the token of api.token_file"), "{error}");
    }
}
