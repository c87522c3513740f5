//! A server of exports: listens, negotiates, serves.
//!
//! Everybody may connect, so nothing is given before a client has shown that it may: what a
//! connection holds before is small, its negotiation has a deadline, and there are no more than
//! [`Limits::connections`] at a time.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::buffer::Incoming;
use crate::dead_peers;
use crate::layer::Layer;
use crate::nbd::ProtocolError;
use crate::nbd::negotiation::{Exports, Negotiation, Session, Step, Tls};
use crate::nbd::request::Export;
use crate::serve::{ServeError, serve};
use crate::tls::Acceptor;

/// How long a listener rests that cannot accept: there are no descriptors left, most likely.
const REST: Duration = Duration::from_millis(100);

/// What a unix socket is to take at once, in bytes; half of what the kernel then counts, which is
/// more than the data. A write that does not fit waits until the client has read nearly all of it.
const AT_ONCE: usize = 512 << 10;

/// What a server has.
pub trait Catalogue: Send + Sync {
    /// The names that any client may know.
    fn list(&self) -> Vec<String>;
    /// What the export of this name is for this client; nothing changes.
    fn find(&self, name: &str, who: &Who) -> Option<Export>;
    /// The export of this name, for a client that wants it; it has it until it drops it.
    fn open(&self, name: &str, who: &Who) -> Option<Opened>;
}

/// A client, as far as it can be told from others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// Of this host.
    User(u32),
    /// The name in a certificate. It stays the same when the key changes, and so do its leases.
    Certificate(String),
    /// Whoever is there.
    Address(IpAddr),
    /// Nobody knows.
    Anybody,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(id) => write!(f, "user {id}"),
            Self::Certificate(name) => write!(f, "host {name}"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Anybody => write!(f, "anybody"),
        }
    }
}

/// An export that a client has.
pub struct Opened {
    /// The name that it is known by from now on.
    pub name: String,
    /// What it is made of.
    pub layer: Arc<dyn Layer>,
}

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// How long the negotiation may take.
    pub negotiation: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 256, negotiation: Duration::from_secs(10) }
    }
}

/// Why a connection came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum RefusedError {
    /// It was served, and then not.
    #[error(transparent)]
    Served(#[from] ServeError),
    /// TLS failed: no certificate, or one of another authority.
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// The client took too long to choose an export.
    #[error("the client chose no export within {0:?}")]
    Slow(Duration),
}

impl From<io::Error> for RefusedError {
    fn from(error: io::Error) -> Self {
        Self::Served(error.into())
    }
}

impl From<ProtocolError> for RefusedError {
    fn from(error: ProtocolError) -> Self {
        Self::Served(error.into())
    }
}

/// A server of what a catalogue has.
pub struct Server {
    catalogue: Arc<dyn Catalogue>,
    tls: Option<Acceptor>,
    limits: Limits,
    free: Semaphore,
}

/// The catalogue, as one client's negotiation sees it.
struct Shown<'a> {
    catalogue: &'a dyn Catalogue,
    who: Who,
    chosen: Mutex<Option<Opened>>,
}

impl Exports for Shown<'_> {
    fn list(&self) -> Vec<String> {
        self.catalogue.list()
    }

    fn find(&self, name: &str) -> Option<Export> {
        self.catalogue.find(name, &self.who)
    }

    fn choose(&self, name: &str) -> Option<(String, Export)> {
        let opened = self.catalogue.open(name, &self.who)?;
        let found = (opened.name.clone(), of_layer(&*opened.layer));
        *self.chosen.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Some(found)
    }
}

/// What an export that is made of this layer is.
#[must_use]
pub fn of_layer(layer: &dyn Layer) -> Export {
    Export { size: layer.size(), read_only: false, block: layer.block() }
}

/// A stream of either kind.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

impl Server {
    /// Serves what `catalogue` has; with `tls`, nobody without a certificate that it trusts.
    #[must_use]
    pub fn new(catalogue: Arc<dyn Catalogue>, tls: Option<Acceptor>, limits: Limits) -> Arc<Self> {
        Arc::new(Self { catalogue, tls, limits, free: Semaphore::new(limits.connections) })
    }

    /// Accepts clients for ever, each on a task of its own.
    pub async fn listen_unix(self: Arc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    // As much of it as the host allows (`net.core.wmem_max`).
                    let _ = set_socket_send_buffer_size(&stream, AT_ONCE);
                    let user = stream.peer_cred().map(|peer| peer.uid());
                    self.clone().welcome(stream, user.map_or(Who::Anybody, Who::User));
                }
                Err(_) => sleep(REST).await,
            }
        }
    }

    /// Accepts clients for ever, each on a task of its own.
    pub async fn listen_tcp(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                // A reply must not wait for the acknowledgement of the one before it.
                Ok((stream, from)) if stream.set_nodelay(true).is_ok() => {
                    dead_peers::notice(&stream);
                    self.clone().welcome(stream, Who::Address(from.ip()));
                }
                Ok(_) => {}
                Err(_) => sleep(REST).await,
            }
        }
    }

    fn welcome(self: Arc<Self>, stream: impl Stream + 'static, who: Who) {
        tokio::spawn(async move {
            // One too many is closed: it may come again.
            if let Ok(_place) = self.free.try_acquire() {
                let _ = self.handle(stream, who).await;
            }
        });
    }

    /// Negotiates with one client, and serves it until it ends the connection. `who` it is as long
    /// as it shows no certificate.
    ///
    /// # Errors
    ///
    /// Why the connection came to nothing.
    pub async fn handle<S>(&self, mut stream: S, who: Who) -> Result<(), RefusedError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let limit = self.limits.negotiation;
        let mut input = Incoming::default();
        let tls = if self.tls.is_some() { Tls::Required } else { Tls::Absent };
        let mut out = Vec::new();
        let mut negotiation = Negotiation::new(tls, &mut out);
        let mut shown = Shown { catalogue: &*self.catalogue, who, chosen: Mutex::new(None) };
        let agreed = negotiate(&mut stream, &mut input, &mut out, &mut negotiation, &shown);
        match timeout(limit, agreed).await.map_err(|_| RefusedError::Slow(limit))?? {
            Agreed::Nothing => Ok(()),
            Agreed::On(session) => shown.serve(stream, input, &session).await,
            Agreed::Tls => {
                let Some(acceptor) = &self.tls else { return Ok(()) };
                input.clear();
                let agreed = async {
                    let mut stream = acceptor.accept(stream).await.map_err(RefusedError::Tls)?;
                    shown.who = Who::Certificate(stream.peer().to_owned());
                    negotiation.secured();
                    let agreed =
                        negotiate(&mut stream, &mut input, &mut out, &mut negotiation, &shown);
                    Ok::<_, RefusedError>((agreed.await?, stream))
                };
                match timeout(limit, agreed).await.map_err(|_| RefusedError::Slow(limit))?? {
                    (Agreed::On(session), stream) => shown.serve(stream, input, &session).await,
                    _ => Ok(()),
                }
            }
        }
    }
}

impl Shown<'_> {
    /// Serves what was chosen.
    async fn serve(
        self,
        stream: impl Stream,
        input: Incoming,
        session: &Session,
    ) -> Result<(), RefusedError> {
        let chosen = self.chosen.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Some(Opened { layer, .. }) = chosen else { return Ok(()) };
        Ok(serve(stream, input, session, &*layer).await?)
    }
}

/// What came of a negotiation.
enum Agreed {
    Nothing,
    Tls,
    On(Session),
}

async fn negotiate(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    input: &mut Incoming,
    out: &mut Vec<u8>,
    negotiation: &mut Negotiation,
    exports: &(dyn Exports + Sync),
) -> Result<Agreed, RefusedError> {
    loop {
        let step = negotiation.advance(input.bytes(), exports, out)?;
        if let Some((length, step)) = step {
            input.consume(length);
            let agreed = match step {
                Step::Next => None,
                Step::StartTls => Some(Agreed::Tls),
                Step::Chosen(session) => Some(Agreed::On(session)),
                Step::End => Some(Agreed::Nothing),
            };
            // Whoever asks for much is answered bit by bit.
            if agreed.is_some() || out.len() > 64 << 10 {
                stream.write_all(out).await?;
                stream.flush().await?;
                out.clear();
            }
            match agreed {
                Some(agreed) => return Ok(agreed),
                None => continue,
            }
        }
        stream.write_all(out).await?;
        stream.flush().await?;
        out.clear();
        if poll_fn(|context| input.poll_fill(Pin::new(&mut *stream), context)).await? == 0 {
            return Ok(Agreed::Nothing);
        }
    }
}
