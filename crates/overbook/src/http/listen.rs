//! Opens the sockets: a unix socket for the operator's group, and TCP only with a token.
//!
//! A socket file outlives a killed daemon. It is replaced only when no process answers at it, so
//! a second daemon never silently takes over the first one's path. A path that is not a socket is
//! never removed. The file gets its mode between `bind` and `listen`, so no other user can ever
//! connect.
//!
//! The file can be deleted or replaced while the daemon runs (for example when `/run` is cleaned
//! up), and the kernel does not report it. So the daemon checks the file once a second
//! ([`Doors::look`]) and makes it again under the same rules as at the start. It never replaces a
//! socket that another daemon answers at.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener},
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
};

use axum::Router;
use model::spec::ApiSpec;
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with},
};
use sys::log;
use tokio::net;

use super::{
    connection,
    token::{TokenError, Tokens},
};

/// `sun_path` holds 108 bytes; the last one is zero.
const MAX_PATH: usize = 107;
/// Owner and group may connect.
const MODE: u32 = 0o660;
const BACKLOG: i32 = 64;

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path does not fit into a socket address.
    #[error("api.socket {path} has {len} bytes; a unix socket's path may have {MAX_PATH}")]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
    },
    /// Another process answers at the path.
    #[error("api.socket {0}: another daemon answers there already")]
    InUse(PathBuf),
    /// The path is not a socket.
    #[error("api.socket {0} exists and is no socket: it is left alone")]
    NotASocket(PathBuf),
    /// The socket cannot be created.
    #[error("api.socket {path}: {error}")]
    Unix {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// TCP has no token.
    #[error(
        "api.tcp = \"{0}\" needs api.token_file: without a token anybody could release your VMs"
    )]
    NoToken(SocketAddr),
    /// The token cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The TCP address cannot be bound.
    #[error("api.tcp = \"{address}\": {error}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// The kernel's error.
        error: io::Error,
    },
}

/// The API's sockets, and the unix socket's file.
pub struct Doors {
    path: PathBuf,
    /// Removed at the end if it is still the same file.
    file: SocketFile,
    listeners: Listeners,
    /// The TCP address that could not be bound yet.
    missing: Option<(SocketAddr, Tokens)>,
    /// The last logged reason why the file could not be made again.
    trouble: Option<String>,
}

/// The open sockets.
pub struct Listeners {
    /// For users that may open its file.
    pub unix: UnixListener,
    /// For clients that have a token.
    pub tcp: Option<(TcpListener, Tokens)>,
}

/// The unix socket's file, removed at the end if it is still the same file.
struct SocketFile {
    path: PathBuf,
    /// Device and inode. The kernel does not reuse them while the socket is open.
    identity: (u64, u64),
}

impl Doors {
    /// Opens the sockets of `spec`. A TCP address that cannot be bound now is logged and retried
    /// ([`Self::look`]), because its network may not be up yet.
    ///
    /// # Errors
    /// The unix socket cannot be opened, or a socket would be unsafe.
    pub fn open(spec: &ApiSpec) -> Result<Self, ListenError> {
        let missing = spec.tcp.map(|address| tokens_for(address, spec));
        let missing = missing.transpose()?;
        let (unix, file) = bind_unix(&spec.socket)?;
        let (path, listeners) = (spec.socket.clone(), Listeners { unix, tcp: None });
        let mut doors = Self { path, file, listeners, missing, trouble: None };
        if let Err(error) = doors.open_tcp() {
            log::warn(&format!("{error}; until then the API answers on its unix socket only"));
        }
        Ok(doors)
    }

    /// Tries to open TCP. Returns whether it listens now and did not before.
    fn open_tcp(&mut self) -> Result<bool, ListenError> {
        let Some((address, tokens)) = &self.missing else { return Ok(false) };
        let error = |error| ListenError::Tcp { address: *address, error };
        let listener = TcpListener::bind(address).map_err(error)?;
        self.listeners.tcp = Some((listener, tokens.clone()));
        self.missing = None;
        Ok(true)
    }

    /// All faults for which [`Self::open`] would fail. It opens nothing for long, and the sockets
    /// of a running daemon are no fault.
    #[must_use]
    pub fn check(spec: &ApiSpec) -> Vec<ListenError> {
        let mut faults = Vec::new();
        if let Some(address) = spec.tcp {
            faults.extend(tokens_for(address, spec).err());
            // The port may be the running daemon's, so only the address is tried.
            let any_port = SocketAddr::new(address.ip(), 0);
            let bound = TcpListener::bind(any_port);
            faults.extend(bound.err().map(|error| ListenError::Tcp { address, error }));
        }
        if let Ok(meta) = fs::symlink_metadata(&spec.socket)
            && !meta.file_type().is_socket()
        {
            faults.push(ListenError::NotASocket(spec.socket.clone()));
        }
        faults
    }

    /// The TCP address; it has the real port if the configuration says 0.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.listeners.tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }

    /// The sockets to serve.
    #[must_use]
    pub const fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Makes the unix socket's file again if it is missing or another one, and retries TCP.
    /// Returns whether there is a new listener. While the path belongs to another daemon or is
    /// not a socket, there is none, and the next call tries again.
    pub fn look(&mut self) -> bool {
        let has_tcp = self.open_tcp().unwrap_or(false);
        if has_tcp && let Some(address) = self.tcp_address() {
            log::info(&format!("the API answers on {address} now"));
        }
        self.look_at_file() || has_tcp
    }

    fn look_at_file(&mut self) -> bool {
        if self.file.is_in_place() {
            return false;
        }
        let trouble = match bind_unix(&self.path) {
            Ok((listener, file)) => {
                (self.listeners.unix, self.file) = (listener, file);
                log::warn(&format!(
                    "the API's socket {} was gone or another one; it was made again",
                    self.path.display()
                ));
                None
            }
            Err(error) => Some(format!("no client can ask this daemon: {error}")),
        };
        if let Some(news) = trouble.as_ref().filter(|_| trouble != self.trouble) {
            log::warn(news);
        }
        let is_new = trouble.is_none();
        self.trouble = trouble;
        is_new
    }
}

impl Listeners {
    /// Serves on these sockets.
    ///
    /// # Errors
    /// The runtime cannot poll a socket.
    pub(super) async fn serve(self, router: Router) -> io::Result<()> {
        self.unix.set_nonblocking(true)?;
        let unix = net::UnixListener::from_std(self.unix)?;
        let unix = connection::serve_unix(unix, router.clone());
        match self.tcp {
            None => unix.await,
            Some((listener, tokens)) => {
                listener.set_nonblocking(true)?;
                let listener = net::TcpListener::from_std(listener)?;
                let tcp = connection::serve_tcp(listener, router, tokens);
                tokio::join!(unix, tcp);
            }
        }
        Ok(())
    }
}

fn tokens_for(address: SocketAddr, spec: &ApiSpec) -> Result<(SocketAddr, Tokens), ListenError> {
    Ok((address, Tokens::read(spec)?.ok_or(ListenError::NoToken(address))?))
}

fn bind_unix(path: &Path) -> Result<(UnixListener, SocketFile), ListenError> {
    let len = path.as_os_str().len();
    if len > MAX_PATH {
        return Err(ListenError::PathTooLong { path: path.into(), len });
    }
    let unix = |error| ListenError::Unix { path: path.into(), error };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(unix)?;
    }
    remove_stale(path)?;
    let errno = |error: Errno| unix(error.into());
    let flags = SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(errno)?;
    let address = SocketAddrUnix::new(path).map_err(errno)?;
    rustix::net::bind(&socket, &address).map_err(errno)?;
    fs::set_permissions(path, fs::Permissions::from_mode(MODE)).map_err(unix)?;
    let identity = identity(path).map_err(unix)?;
    rustix::net::listen(&socket, BACKLOG).map_err(errno)?;
    Ok((UnixListener::from(socket), SocketFile { path: path.into(), identity }))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let unix = |error| ListenError::Unix { path: path.into(), error };
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unix(error)),
    };
    if !meta.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.into()));
    }
    match connect(path) {
        // With a full backlog a process still listens.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.into())),
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(unix),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(unix(error.into())),
    }
}

/// Connects without waiting, and closes the connection.
fn connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

impl SocketFile {
    fn is_in_place(&self) -> bool {
        identity(&self.path).is_ok_and(|found| found == self.identity)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            // A failure is ignored: the next start replaces the file.
            let _: io::Result<()> = fs::remove_file(&self.path);
        }
    }
}
