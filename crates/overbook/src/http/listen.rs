//! Opening the sockets: a unix socket for the operator's group, TCP only together with a token.
//!
//! A socket file outlives a killed daemon. It is replaced only when nobody answers at it, so a
//! second daemon never takes the first one's place silently, and a path that is no socket is never
//! removed. The file gets its mode between `bind` and `listen`: at no moment can a stranger
//! connect.
//!
//! A file can be deleted or replaced while the daemon runs (somebody cleans up `/run`), and the
//! kernel does not tell. So it is looked at once a second ([`Doors::look`]), and made again under
//! the same rules as at the start: what another daemon answers at is left to it.

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
use tokio::net;

use super::{
    connection,
    token::{Token, TokenError},
};
use crate::log;

/// `sun_path` holds 108 bytes, the last of which is zero.
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
    /// Somebody answers at the path.
    #[error("api.socket {0}: another daemon answers there already")]
    InUse(PathBuf),
    /// The path holds something else.
    #[error("api.socket {0} exists and is no socket: it is left alone")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("api.socket {path}: {error}")]
    Unix {
        /// The path.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// TCP without a token.
    #[error(
        "api.tcp = \"{0}\" needs api.token_file: without a token anybody could release your VMs"
    )]
    NoToken(SocketAddr),
    /// The token cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The port cannot be opened.
    #[error("api.tcp = \"{address}\": {error}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// What the kernel says.
        error: io::Error,
    },
}

/// The API's sockets, and the file that leads to the unix one.
pub struct Doors {
    path: PathBuf,
    /// Removed at the end if it is still the same one.
    file: SocketFile,
    listeners: Listeners,
    /// Where TCP is to listen, and could not yet.
    missing: Option<(SocketAddr, Token)>,
    /// Why the file could not be made again, as it was last said.
    trouble: Option<String>,
}

/// The open sockets.
pub struct Listeners {
    /// For users that may open its file.
    pub unix: UnixListener,
    /// For clients that have the token.
    pub tcp: Option<(TcpListener, Token)>,
}

/// The unix socket's file, removed at the end if it is still the same one.
struct SocketFile {
    path: PathBuf,
    /// Device and inode; not used for another file while somebody listens.
    identity: (u64, u64),
}

impl Doors {
    /// Opens what `spec` asks for. An address on TCP that cannot be had now is said, and tried
    /// again ([`Self::look`]): it may be that of a network which is not up yet.
    ///
    /// # Errors
    /// When the unix socket cannot be opened, or one could be but would not be safe.
    pub fn open(spec: &ApiSpec) -> Result<Self, ListenError> {
        let missing = spec.tcp.map(|address| token_for(address, spec.token_file.as_deref()));
        let missing = missing.transpose()?;
        let (unix, file) = bind_unix(&spec.socket)?;
        let (path, listeners) = (spec.socket.clone(), Listeners { unix, tcp: None });
        let mut doors = Self { path, file, listeners, missing, trouble: None };
        if let Err(error) = doors.open_tcp() {
            log::warn(&format!("{error}; until then the API answers on its unix socket only"));
        }
        Ok(doors)
    }

    /// Answers whether TCP listens now, and has not before.
    fn open_tcp(&mut self) -> Result<bool, ListenError> {
        let Some((address, token)) = &self.missing else { return Ok(false) };
        let error = |error| ListenError::Tcp { address: *address, error };
        let listener = TcpListener::bind(address).map_err(error)?;
        self.listeners.tcp = Some((listener, token.clone()));
        self.missing = None;
        Ok(true)
    }

    /// All for which [`Self::open`] would fail, without opening anything for long; what the daemon
    /// that runs has open is no fault.
    #[must_use]
    pub fn check(spec: &ApiSpec) -> Vec<ListenError> {
        let mut faults = Vec::new();
        if let Some(address) = spec.tcp {
            let token = spec.token_file.as_deref().ok_or(ListenError::NoToken(address));
            let token = token.and_then(|file| Ok(Token::read(file)?));
            faults.extend(token.err());
            // Whether the address is one of this host's: the port may be the running daemon's.
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

    /// Where TCP listens; the port is the real one where the configuration says 0.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.listeners.tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }

    /// The sockets that are to be served.
    #[must_use]
    pub const fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Makes the unix socket's file again if it leads elsewhere or nowhere, and tries TCP again.
    /// Answers whether there is another listener now; while what stands there is another daemon's
    /// or no socket, there is none, and the next look tries again.
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
    /// They are no sockets that this runtime can wait for.
    pub(super) async fn serve(self, router: Router) -> io::Result<()> {
        self.unix.set_nonblocking(true)?;
        let unix = net::UnixListener::from_std(self.unix)?;
        let unix = connection::serve_unix(unix, router.clone());
        match self.tcp {
            None => unix.await,
            Some((listener, token)) => {
                listener.set_nonblocking(true)?;
                let listener = net::TcpListener::from_std(listener)?;
                let tcp = connection::serve_tcp(listener, router, token);
                tokio::join!(unix, tcp);
            }
        }
        Ok(())
    }
}

fn token_for(
    address: SocketAddr,
    token_file: Option<&Path>,
) -> Result<(SocketAddr, Token), ListenError> {
    Ok((address, Token::read(token_file.ok_or(ListenError::NoToken(address))?)?))
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
        // Whoever listens and does not answer lives, too.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.into())),
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(unix),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(unix(error.into())),
    }
}

/// Connects without waiting, and hangs up again.
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
            // Nothing is left to be done about a failure: the next start replaces the file.
            let _: io::Result<()> = fs::remove_file(&self.path);
        }
    }
}
