//! A server of exports: listens, negotiates, serves.
//!
//! Every client may connect, so a connection gets little before its client has identified itself.
//! Its memory is small until then, its negotiation has a deadline that includes TLS, and it loses
//! its place as soon as another connection needs it ([`places`](crate::places)).

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
use tokio::time::{Instant, sleep, timeout_at};

use crate::budget::{Account, Budget};
use crate::buffer::Incoming;
use crate::dead_peers;
use crate::layer::Layer;
use crate::nbd::ProtocolError;
use crate::nbd::negotiation::{Exports, Negotiation, Refusal, Session, Step, Tls};
use crate::nbd::request::Export;
use crate::places::{ConnectionSlot, Guard, OF_PROCESS, Owner, Places, Process};
use crate::serve::{ServeError, serve};
use crate::tls::Acceptor;

/// Pause of a listener that cannot accept, most likely because no descriptors are left.
const REST: Duration = Duration::from_millis(100);

/// Interval of the search for stuck clients.
const LOOK: Duration = Duration::from_secs(1);

/// Size of a unix socket's send buffer, in bytes. The kernel doubles the value, because it also
/// counts its overhead. A write that does not fit waits until the client has read nearly all of
/// the buffer.
const AT_ONCE: usize = 512 << 10;

/// The exports of a server.
pub trait Catalogue: Send + Sync {
    /// Names that any client may know.
    fn list(&self) -> Vec<String>;
    /// The export of this name as this client would see it, without opening it.
    fn find(&self, name: &str, who: &Who) -> Option<Export>;
    /// Opens the export of this name for a client, until the client drops it.
    fn open(&self, name: &str, who: &Who) -> Option<Opened>;
}

/// Identity of a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// A user of this host.
    User(u32),
    /// The name in a certificate. It stays the same when the key changes, and so do the client's
    /// leases.
    Certificate(String),
    /// Any client at this address.
    Address(IpAddr),
    /// An unknown client.
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

/// An export that a client has opened.
pub struct Opened {
    /// The name of the export from now on.
    pub name: String,
    /// The layer that serves it.
    pub layer: Arc<dyn Layer>,
}

/// Limits of the number of connections, and of the negotiation's time.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections whose client has shown a certificate or asked for an export, at a time.
    pub connections: usize,
    /// Connections of one client: a certificate, a user, an address.
    pub each: usize,
    /// Connections whose client has neither shown a certificate nor asked for an export yet.
    pub unknown: usize,
    /// Such connections of one address, or of one network of IPv6, or of one process.
    pub unknown_each: usize,
    /// How long the negotiation may take, TLS included.
    pub negotiation: Duration,
}

impl Default for Limits {
    /// Limits for a server of many clients: a host has a connection for each of its disks.
    fn default() -> Self {
        let negotiation = Duration::from_secs(10);
        Self { connections: 512, each: 128, unknown: 128, unknown_each: 32, negotiation }
    }
}

impl Limits {
    /// Limits for an export of one VM. Its owner can reconnect while all places are taken.
    pub(crate) fn of(owner: Owner) -> Self {
        let connections = (owner.processes + 1) * OF_PROCESS;
        Self {
            connections,
            each: connections,
            unknown: 16,
            unknown_each: OF_PROCESS,
            ..Self::default()
        }
    }
}

/// Why a connection was refused or ended.
#[derive(Debug, thiserror::Error)]
pub enum RefusedError {
    /// Serving it failed.
    #[error(transparent)]
    Served(#[from] ServeError),
    /// TLS failed: no certificate, or one of another authority.
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// The client took too long to choose an export.
    #[error("the client chose no export within {0:?}")]
    Slow(Duration),
    /// Another connection has taken its place, or needs its memory.
    #[error("the connection had to make room")]
    Ended,
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

/// A server of the exports of a catalogue.
pub struct Server {
    catalogue: Arc<dyn Catalogue>,
    tls: Option<Acceptor>,
    limits: Limits,
    places: Places,
}

/// The catalogue as one client's negotiation sees it.
struct CatalogueView<'a> {
    catalogue: &'a dyn Catalogue,
    who: Who,
    places: &'a Places,
    place: &'a ConnectionSlot,
    chosen: Mutex<Option<Opened>>,
}

impl Exports for CatalogueView<'_> {
    fn list(&self) -> Vec<String> {
        self.catalogue.list()
    }

    fn find(&self, name: &str) -> Option<Export> {
        self.catalogue.find(name, &self.who)
    }

    fn choose(&self, name: &str) -> Result<(String, Export), Refusal> {
        self.places.know(self.place, &self.who).map_err(Refusal::Policy)?;
        let opened = self.catalogue.open(name, &self.who).ok_or(Refusal::Unknown)?;
        let found = (opened.name.clone(), of_layer(&*opened.layer));
        *self.chosen.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(found)
    }
}

/// The export that this layer serves.
#[must_use]
pub fn of_layer(layer: &dyn Layer) -> Export {
    Export { size: layer.size(), read_only: false, block: layer.block() }
}

/// A stream of either kind.
trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for S {}

impl Server {
    /// Serves the exports of `catalogue`; with `tls`, only to clients with a trusted certificate.
    #[must_use]
    pub fn new(catalogue: Arc<dyn Catalogue>, tls: Option<Acceptor>, limits: Limits) -> Arc<Self> {
        let places = Places::new(limits, None, Arc::default());
        Arc::new(Self { catalogue, tls, limits, places })
    }

    /// Serves exports that belong to one VM, on a unix socket. The memory of its connections is
    /// charged to `budget`, which other servers of this process share.
    #[must_use]
    pub fn of_one(catalogue: Arc<dyn Catalogue>, owner: Owner, budget: Arc<Budget>) -> Arc<Self> {
        let limits = Limits::of(owner);
        let places = Places::new(limits, Some(owner), budget);
        Arc::new(Self { catalogue, tls: None, limits, places })
    }

    /// Accepts clients for ever, each on a task of its own.
    pub async fn listen_unix(self: Arc<Self>, listener: UnixListener) {
        self.look_for_stuck();
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    // The kernel limits the size (`net.core.wmem_max`).
                    let _ = set_socket_send_buffer_size(&stream, AT_ONCE);
                    let peer = stream.peer_cred().ok();
                    let who = peer.map_or(Who::Anybody, |peer| Who::User(peer.uid()));
                    let pid = peer.and_then(|peer| peer.pid());
                    let process = pid.and_then(|pid| Process::of(pid.try_into().ok()?));
                    self.clone().welcome(stream, who, process);
                }
                Err(_) => sleep(REST).await,
            }
        }
    }

    /// Accepts clients for ever, each on a task of its own.
    pub async fn listen_tcp(self: Arc<Self>, listener: TcpListener) {
        self.look_for_stuck();
        loop {
            match listener.accept().await {
                // A reply must not wait for the acknowledgement of the previous one.
                Ok((stream, from)) if stream.set_nodelay(true).is_ok() => {
                    dead_peers::notice(&stream);
                    self.clone().welcome(stream, Who::Address(from.ip()), None);
                }
                Ok(_) => {}
                Err(_) => sleep(REST).await,
            }
        }
    }

    /// Ends stuck connections, for as long as this server exists.
    fn look_for_stuck(self: &Arc<Self>) {
        let server = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(server) = server.upgrade() {
                server.places.end_stuck();
                drop(server);
                sleep(LOOK).await;
            }
        });
    }

    fn welcome(self: Arc<Self>, stream: impl ByteStream + 'static, who: Who, of: Option<Process>) {
        tokio::spawn(async move {
            // A connection without a place is closed; the client may retry.
            if let Some(guard) = self.places.enter(&who, of) {
                let _ = self.keep(stream, who, guard).await;
            }
        });
    }

    /// Negotiates with one client, and serves it until it ends the connection. `who` identifies
    /// the client unless it shows a certificate.
    ///
    /// # Errors
    ///
    /// Why the connection was refused or ended.
    pub async fn handle<S>(&self, stream: S, who: Who) -> Result<(), RefusedError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let guard = self.places.enter(&who, None).ok_or(RefusedError::Ended)?;
        self.keep(stream, who, guard).await
    }

    async fn keep<S>(&self, stream: S, who: Who, guard: Guard<'_>) -> Result<(), RefusedError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        tokio::select! {
            served = self.talk(stream, who, &guard.place) => served,
            () = guard.place.ended() => Err(RefusedError::Ended),
        }
    }

    async fn talk<S>(
        &self,
        mut stream: S,
        who: Who,
        place: &ConnectionSlot,
    ) -> Result<(), RefusedError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let limit = self.limits.negotiation;
        let end = Instant::now() + limit;
        let mut input = Incoming::default();
        let tls = if self.tls.is_some() { Tls::Required } else { Tls::Absent };
        let mut out = Vec::new();
        let mut negotiation = Negotiation::new(tls, &mut out);
        let (catalogue, places) = (&*self.catalogue, &self.places);
        let mut shown = CatalogueView { catalogue, who, places, place, chosen: Mutex::new(None) };
        let agreed = negotiate(&mut stream, &mut input, &mut out, &mut negotiation, &shown);
        match timeout_at(end, agreed).await.map_err(|_| RefusedError::Slow(limit))?? {
            Agreed::Nothing => Ok(()),
            Agreed::On(session) => shown.serve(stream, input, &session).await,
            Agreed::Tls => {
                let Some(acceptor) = &self.tls else { return Ok(()) };
                input.clear();
                let agreed = async {
                    let mut stream = acceptor.accept(stream).await.map_err(RefusedError::Tls)?;
                    shown.who = Who::Certificate(stream.peer().to_owned());
                    places.know(place, &shown.who).map_err(|_| RefusedError::Ended)?;
                    negotiation.secured();
                    let agreed =
                        negotiate(&mut stream, &mut input, &mut out, &mut negotiation, &shown);
                    Ok::<_, RefusedError>((agreed.await?, stream))
                };
                match timeout_at(end, agreed).await.map_err(|_| RefusedError::Slow(limit))?? {
                    (Agreed::On(session), stream) => shown.serve(stream, input, &session).await,
                    _ => Ok(()),
                }
            }
        }
    }
}

impl CatalogueView<'_> {
    /// Serves the export that was chosen.
    async fn serve(
        self,
        stream: impl ByteStream,
        input: Incoming,
        session: &Session,
    ) -> Result<(), RefusedError> {
        let account: &Account = &self.place.account;
        let chosen = self.chosen.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Some(Opened { layer, .. }) = chosen else { return Ok(()) };
        Ok(serve(stream, input, session, &*layer, account).await?)
    }
}

/// Result of a negotiation.
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
            // A long answer, such as the list of all exports, is sent in parts.
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
