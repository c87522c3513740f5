//! Sends requests to the running daemon over its unix socket.
//!
//! One request, one connection, one deadline: the CLI never hangs with the daemon. The error
//! messages are for operators: "connection refused" does not tell them that the daemon is off.

use std::{
    convert::Infallible,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Method, Request, StatusCode, body, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use model::{Bytes, Scope};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use tokio::{net::UnixStream, runtime, time};

use crate::published::Lender;
use crate::wire::{Done, Failure, MayHold, ReleasePreview};

/// Timeout of a read.
const READ_LIMIT: Duration = Duration::from_secs(5);
/// How long the daemon may take to carry out a request; longer than its own limit.
const WRITE_LIMIT: Duration = Duration::from_secs(35);
/// Maximum size of an answer: a host with thousands of VMs needs a few MiB.
const MAX_BODY: usize = 256 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens.
    #[error(
        "no daemon answers at {0} (is `overbook daemon` running? `overbook check` finds faults in \
         its configuration)"
    )]
    NoDaemon(PathBuf),
    /// This user may not open the socket.
    #[error("not permitted to open {0}: only root and the socket's group may ask the daemon")]
    NotPermitted(PathBuf),
    /// The socket cannot be used for another reason.
    #[error("{socket}: {error}")]
    Io {
        /// The socket.
        socket: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The daemon listens but does not answer.
    #[error("the daemon at {socket} did not answer within {} s", limit.as_secs())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// The timeout.
        limit: Duration,
    },
    /// The listener is not the daemon.
    #[error("what answers at {socket} does not speak this version's API: {why}")]
    Garbled {
        /// The socket.
        socket: PathBuf,
        /// The error in its answer.
        why: String,
    },
    /// The daemon answered with an error.
    #[error("{0}")]
    Refused(String),
}

/// A client of the daemon's API.
#[derive(Debug)]
pub struct ApiClient {
    socket: PathBuf,
    runtime: runtime::Runtime,
}

impl ApiClient {
    /// Prepares requests to `socket`. Only a request connects.
    ///
    /// # Errors
    /// The process can open no more file descriptors.
    pub fn new(socket: &Path) -> Result<Self, ClientError> {
        let io = |error| ClientError::Io { socket: socket.into(), error };
        let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
        Ok(Self { socket: socket.into(), runtime })
    }

    /// Reads an object.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.parse(&self.ask(Method::GET, path, READ_LIMIT)?)
    }

    /// Finds out what a release would give back. VMs that do not answer take their time.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub fn release_preview(&self) -> Result<ReleasePreview, ClientError> {
        self.parse(&self.ask(Method::GET, "/v1/release", WRITE_LIMIT)?)
    }

    /// Reads an object as text.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub fn get_text(&self, path: &str) -> Result<String, ClientError> {
        let body = self.ask(Method::GET, path, READ_LIMIT)?;
        String::from_utf8(body.to_vec()).map_err(|error| self.garbled(&error))
    }

    /// Requests an action.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub fn post(&self, path: &str) -> Result<Done, ClientError> {
        self.parse(&self.ask(Method::POST, path, WRITE_LIMIT)?)
    }

    /// Tells of the host's repository, and asks how much it may hold.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses.
    pub fn may_hold(&self, lender: Lender) -> Result<Bytes, ClientError> {
        let Lender { holds, most } = lender;
        let path = format!("/v1/lender?holds_bytes={}&most_bytes={}", holds.0, most.0);
        let answer: MayHold = self.parse(&self.ask(Method::POST, &path, READ_LIMIT)?)?;
        Ok(Bytes(answer.may_hold_bytes))
    }

    /// The process that listens at the socket; `None`: there is none, or it is not visible.
    #[must_use]
    pub fn peer(&self) -> Option<u32> {
        let connected =
            async { time::timeout(READ_LIMIT, UnixStream::connect(&self.socket)).await };
        let stream = self.runtime.block_on(connected).ok()?.ok()?;
        u32::try_from(stream.peer_cred().ok()?.pid()?).ok()
    }

    fn parse<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body).map_err(|error| self.garbled(&error))
    }

    fn garbled(&self, why: &dyn ToString) -> ClientError {
        ClientError::Garbled { socket: self.socket.clone(), why: why.to_string() }
    }

    fn ask(&self, method: Method, path: &str, limit: Duration) -> Result<body::Bytes, ClientError> {
        let is_read = method == Method::GET;
        let answer = async { time::timeout(limit, self.exchange(method, path)).await };
        let silent = |()| ClientError::Silent { socket: self.socket.clone(), limit };
        let (status, body) = self.runtime.block_on(answer).map_err(|_| silent(()))??;
        if status.is_success() {
            return Ok(body);
        }
        // An action may take longer; the daemon is still carrying it out then.
        if status == StatusCode::GATEWAY_TIMEOUT && is_read {
            return Err(silent(()));
        }
        let failure: Failure = self.parse(&body)?;
        Err(ClientError::Refused(failure.error))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
    ) -> Result<(StatusCode, body::Bytes), ClientError> {
        let connected = UnixStream::connect(&self.socket).await;
        let stream = connected.map_err(|error| self.not_connected(error))?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.garbled(&error))?;
        let request = Request::builder().method(method).uri(path).header(HOST, "overbook");
        let request =
            request.body(Empty::<body::Bytes>::new()).map_err(|error| self.garbled(&error))?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(|e| self.garbled(&e))?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_BODY).collect().await;
            Ok((head.status, body.map_err(|e| self.garbled(&e))?.to_bytes()))
        };
        // The answer ends first; the connection is dropped with this function.
        let drive = async {
            let _: hyper::Result<()> = connection.await;
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            answer = answer => answer,
            never = drive => match never {},
        }
    }

    fn not_connected(&self, error: io::Error) -> ClientError {
        let socket = self.socket.clone();
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ClientError::NoDaemon(socket)
            }
            io::ErrorKind::PermissionDenied => ClientError::NotPermitted(socket),
            _ => ClientError::Io { socket, error },
        }
    }
}

/// The path of an object whose name may contain any character.
#[must_use]
pub fn path_of(collection: &str, name: &str) -> String {
    format!("/v1/{collection}/{}", utf8_percent_encode(name, NON_ALPHANUMERIC))
}

/// The path of an order for a part of the host.
#[must_use]
pub fn order_path(order: &str, scope: &Scope) -> String {
    let name = |name: &str| utf8_percent_encode(name, NON_ALPHANUMERIC).to_string();
    match scope {
        Scope::Host => format!("/v1/{order}"),
        Scope::Group(group) => format!("/v1/{order}?group={}", name(group.as_str())),
        Scope::Vm(vm) => format!("/v1/{order}?vm={}", name(vm.as_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place_in_the_path() {
        assert_eq!(path_of("vms", "web-1"), "/v1/vms/web%2D1");
        assert_eq!(path_of("vms", "../host?x#ü"), "/v1/vms/%2E%2E%2Fhost%3Fx%23%C3%BC");
        let path = order_path("pause", &Scope::Vm("a&group=b".into()));
        assert_eq!(path, "/v1/pause?vm=a%26group%3Db");
    }

    #[test]
    fn a_daemon_that_is_off_is_named_with_its_socket() {
        let client = ApiClient::new(Path::new("/nonexistent/s")).unwrap();
        let error = client.get_text("/v1/host").unwrap_err();
        assert!(matches!(error, ClientError::NoDaemon(_)));
        assert!(error.to_string().starts_with("no daemon answers at /nonexistent/s (is `overbook"));
    }

    #[test]
    fn a_listener_that_is_no_daemon_is_called_one() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            use io::Write;
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"220 smtp ready\r\n").unwrap();
        });
        let error = ApiClient::new(&socket).unwrap().get_text("/v1/host").unwrap_err();
        assert!(matches!(error, ClientError::Garbled { .. }), "{error}");
        server.join().unwrap();
    }
}
