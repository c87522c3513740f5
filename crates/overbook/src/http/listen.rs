//! Opening the sockets: a unix socket for the operator's group, TCP only together with a token.
//!
//! A socket file outlives a killed daemon. It is replaced only when nobody answers at it, so a second
//! daemon never takes the first one's place silently, and a path that is no socket is never removed.
//! The file gets its mode between `bind` and `listen`: at no moment can a stranger connect.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::UnixStream as StdUnixStream,
    },
    path::{Path, PathBuf},
};

use axum::Router;
use model::spec::ApiSpec;
use tokio::net::{TcpListener, UnixListener, UnixSocket};

use super::{
    connection,
    token::{Token, TokenError},
};

/// `sun_path` holds 108 bytes, the last of which is zero.
const MAX_PATH: usize = 107;
/// Owner and group may connect.
const MODE: u32 = 0o660;
const BACKLOG: u32 = 64;

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

/// The open sockets.
pub struct Listeners {
    unix: UnixListener,
    tcp: Option<(TcpListener, Token)>,
    /// Dropped with the listeners.
    _file: SocketFile,
}

/// The unix socket's file, removed at the end if it is still the same one.
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Listeners {
    /// Opens what `spec` asks for. Needs a tokio runtime.
    ///
    /// # Errors
    /// When a socket cannot be opened, or could be but would not be safe.
    pub fn bind(spec: &ApiSpec) -> Result<Self, ListenError> {
        let tcp = spec.tcp.map(|address| bind_tcp(address, spec.token_file.as_deref()));
        let tcp = tcp.transpose()?;
        let (unix, file) = bind_unix(&spec.socket)?;
        Ok(Self { unix, tcp, _file: file })
    }

    /// Where TCP listens; the port is the real one where the configuration says 0.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }

    pub(super) async fn serve(self, router: Router) {
        let unix = connection::serve_unix(&self.unix, router.clone());
        match &self.tcp {
            None => unix.await,
            Some((listener, token)) => {
                let tcp = connection::serve_tcp(listener, router, token.clone());
                tokio::join!(unix, tcp);
            }
        }
    }
}

fn bind_tcp(
    address: SocketAddr,
    token_file: Option<&Path>,
) -> Result<(TcpListener, Token), ListenError> {
    let token = Token::read(token_file.ok_or(ListenError::NoToken(address))?)?;
    let error = |error| ListenError::Tcp { address, error };
    let listener = std::net::TcpListener::bind(address).map_err(error)?;
    listener.set_nonblocking(true).map_err(error)?;
    Ok((TcpListener::from_std(listener).map_err(error)?, token))
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
    let socket = UnixSocket::new_stream().map_err(unix)?;
    socket.bind(path).map_err(unix)?;
    fs::set_permissions(path, fs::Permissions::from_mode(MODE)).map_err(unix)?;
    let inode = fs::symlink_metadata(path).map_err(unix)?.ino();
    let listener = socket.listen(BACKLOG).map_err(unix)?;
    Ok((listener, SocketFile { path: path.into(), inode }))
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
    match StdUnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(unix)
        }
        Err(error) => Err(unix(error)),
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode);
        if same {
            // Nothing is left to be done about a failure: the next start replaces the file.
            let _: io::Result<()> = fs::remove_file(&self.path);
        }
    }
}
