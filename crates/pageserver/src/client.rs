//! A client of one export: many requests in flight on one connection.
//!
//! Callers append requests to a buffer and wake the connection's task, which sends everything
//! that was appended since its last run. So requests that are made together are sent together.
//!
//! The server is not trusted. The number of bytes in requests that it does not answer, or does
//! not take, is bounded ([`MOST_OWED`]), even if the callers have given up meanwhile.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio_rustls::client::TlsStream;

use crate::buffer::Incoming;
use crate::nbd::dialogue::{Dialogue, Step, Wanted};
use crate::nbd::in_flight::{Brought, InFlight};
use crate::nbd::negotiation::Session;
use crate::nbd::reply::Extent;
use crate::nbd::request::{Command, Export, HEADER, Request};
use crate::nbd::{Errno, ProtocolError};
use crate::tls::{Connector, HandshakeError, Trusted};

/// Upper bound of the data in requests that a server has not answered or not taken, in bytes. One
/// request is always allowed.
const MOST_OWED: usize = 16 << 20;
/// Number of headers and payloads that one write sends.
const PARTS_AT_ONCE: usize = 64;

/// Why a request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// The server refuses it.
    #[error("the server answers: {0}")]
    Refused(#[from] Errno),
    /// There is no connection any more.
    #[error("no connection: {0}")]
    Gone(String),
    /// The server does not keep up.
    #[error("the server owes answers to {0} bytes of requests")]
    Owes(usize),
    /// A certificate is not accepted, or TLS fails for another reason.
    #[error(transparent)]
    Tls(#[from] HandshakeError),
    /// The server breaks the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        match HandshakeError::of(&error) {
            Some(error) => Self::Tls(error),
            None => Self::Gone(error.to_string()),
        }
    }
}

/// Sends requests to an export. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    shared: Arc<ClientShared>,
    session: Session,
}

/// Carries the requests of all clones of a [`Client`]. Nothing happens unless it is polled.
pub struct Connection<S> {
    shared: Arc<ClientShared>,
    stream: S,
    input: Incoming,
    /// Requests that are being sent.
    out: Outgoing,
}

#[derive(Default)]
struct ClientShared {
    state: Mutex<ClientState>,
    waker: AtomicWaker,
}

#[derive(Default)]
struct ClientState {
    in_flight: InFlight,
    waiting: HashMap<u64, Waiting>,
    /// Bytes of data that the waiting requests read or write.
    owed: usize,
    /// Requests to be sent next.
    out: Outgoing,
    /// The number of bytes being sent.
    sending: usize,
    /// Time since which the server owes an answer and has given none.
    owes_since: Option<Instant>,
    /// Why there is no connection any more.
    gone: Option<ClientError>,
}

/// A request that waits for its answer.
struct Waiting {
    sender: oneshot::Sender<Result<Brought, ClientError>>,
    bytes: usize,
}

/// Requests that wait to be sent. Payloads are not copied.
#[derive(Default)]
struct Outgoing {
    parts: VecDeque<OutgoingPart>,
    /// Number of all their bytes.
    bytes: usize,
}

enum OutgoingPart {
    Header { header: [u8; HEADER], sent: usize },
    Payload(Bytes),
}

impl OutgoingPart {
    /// Its bytes that are not sent yet.
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Header { header, sent } => &header[*sent..],
            Self::Payload(data) => data,
        }
    }

    fn consume(&mut self, n: usize) {
        match self {
            Self::Header { sent, .. } => *sent += n,
            Self::Payload(data) => data.advance(n),
        }
    }
}

impl Outgoing {
    fn push(&mut self, header: [u8; HEADER], payload: Bytes) {
        self.bytes += header.len() + payload.len();
        self.parts.push_back(OutgoingPart::Header { header, sent: 0 });
        if !payload.is_empty() {
            self.parts.push_back(OutgoingPart::Payload(payload));
        }
    }

    /// Sends as many bytes as the stream takes by one write; ready with their number.
    fn poll_send(
        &mut self,
        stream: Pin<&mut impl AsyncWrite>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let mut slices = [IoSlice::new(&[]); PARTS_AT_ONCE];
        let parts = self.parts.len().min(PARTS_AT_ONCE);
        for (slice, part) in slices.iter_mut().zip(&self.parts) {
            *slice = IoSlice::new(part.bytes());
        }
        let sent = ready!(stream.poll_write_vectored(context, &slices[..parts]))?;
        let mut rest = sent;
        self.bytes -= sent;
        while rest > 0
            && let Some(part) = self.parts.front_mut()
        {
            let n = rest.min(part.bytes().len());
            part.consume(n);
            rest -= n;
            if part.bytes().is_empty() {
                self.parts.pop_front();
            }
        }
        Poll::Ready(Ok(sent))
    }
}

impl ClientShared {
    fn state(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: ClientError) {
        let waiting = {
            let mut state = self.state();
            state.gone.get_or_insert_with(|| why.clone());
            std::mem::take(&mut state.waiting)
        };
        for Waiting { sender, .. } in waiting.into_values() {
            // The caller may have given up.
            let _ = sender.send(Err(why.clone()));
        }
    }
}

/// Chooses an export of the server at the other end of `stream`. It sets up no TLS: with
/// [`Wanted::tls`] it fails.
///
/// # Errors
///
/// Errors of the stream, the server's refusals, and violations of the protocol.
pub async fn connect<S>(
    mut stream: S,
    wanted: Wanted,
) -> Result<(Client, Connection<S>), ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut dialogue = Dialogue::new(wanted);
    let mut input = Incoming::default();
    match talk(&mut stream, &mut dialogue, &mut input, Vec::new()).await? {
        Some(session) => Ok(ready(stream, session, input)),
        None => Err(UNWANTED_TLS.into()),
    }
}

/// As [`connect`], but with TLS to the server `host`.
///
/// # Errors
///
/// As for [`connect`], and those of TLS.
pub async fn connect_tls<S>(
    stream: S,
    name: String,
    status: bool,
    (connector, host): (&Connector, &str),
) -> Result<(Client, Connection<Trusted<TlsStream<S>>>), ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let dialogue = Dialogue::new(Wanted { name, tls: true, status });
    let (stream, session, input) = talk_tls(stream, dialogue, (connector, host)).await?;
    Ok(ready(stream, session, input))
}

/// Asks about the export `name` without choosing it: nothing changes at the server. With `tls`,
/// it asks only after a TLS handshake with a server of that name.
///
/// # Errors
///
/// As [`connect_tls`].
pub async fn inquire<S>(
    mut stream: S,
    name: &str,
    tls: Option<(&Connector, &str)>,
) -> Result<Export, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let wanted = Wanted { name: name.to_owned(), tls: tls.is_some(), status: false };
    let mut dialogue = Dialogue::about(wanted);
    if let Some(tls) = tls {
        return Ok(talk_tls(stream, dialogue, tls).await?.1.export);
    }
    let session = talk(&mut stream, &mut dialogue, &mut Incoming::default(), Vec::new()).await?;
    Ok(session.ok_or(UNWANTED_TLS)?.export)
}

const UNWANTED_TLS: ProtocolError =
    ProtocolError::Broken("TLS is wanted, but no TLS client is configured");

/// Negotiates, with TLS, until there is a session.
async fn talk_tls<S>(
    mut stream: S,
    mut dialogue: Dialogue,
    (connector, host): (&Connector, &str),
) -> Result<(Trusted<TlsStream<S>>, Session, Incoming), ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    const ODD: ProtocolError = ProtocolError::Broken("the server goes on without TLS");
    let mut input = Incoming::default();
    if talk(&mut stream, &mut dialogue, &mut input, Vec::new()).await?.is_some() {
        return Err(ODD.into());
    }
    input.clear();
    let mut stream = connector.connect(host, stream).await?;
    let mut out = Vec::new();
    dialogue.secured(&mut out);
    let session = talk(&mut stream, &mut dialogue, &mut input, out).await?.ok_or(ODD)?;
    Ok((stream, session, input))
}

/// Negotiates until there is a session, or until TLS is the next step.
async fn talk(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    dialogue: &mut Dialogue,
    input: &mut Incoming,
    mut out: Vec<u8>,
) -> Result<Option<Session>, ClientError> {
    loop {
        let mut came = Step::Next;
        while matches!(came, Step::Next)
            && let Some((length, step)) = dialogue.advance(input.bytes(), &mut out)?
        {
            input.consume(length);
            came = step;
        }
        stream.write_all(&out).await?;
        stream.flush().await?;
        out.clear();
        match came {
            Step::Next => {}
            Step::StartTls => return Ok(None),
            Step::Ready(session) => return Ok(Some(session)),
        }
        if poll_fn(|context| input.poll_fill(Pin::new(&mut *stream), context)).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}

fn ready<S>(stream: S, session: Session, input: Incoming) -> (Client, Connection<S>) {
    let shared = Arc::new(ClientShared::default());
    let connection = Connection { shared: shared.clone(), stream, input, out: Outgoing::default() };
    (Client { shared, session }, connection)
}

impl Client {
    /// The result of the negotiation.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Reads `length` bytes.
    ///
    /// # Errors
    ///
    /// The server's errors, and those of the connection.
    pub async fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>, ClientError> {
        match self.ask(Command::Read, 0, (offset, length), Bytes::new()).await? {
            Brought::Data(data) => Ok(data),
            _ => Err(ODD_KIND.into()),
        }
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    ///
    /// As [`Client::read`].
    pub async fn write(&self, offset: u64, data: Bytes) -> Result<(), ClientError> {
        let length = u32::try_from(data.len()).map_err(|_| Errno::Overflow)?;
        self.ask(Command::Write, 0, (offset, length), data).await.map(|_| ())
    }

    /// Sends another `command`, with `flags`, for `length` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// As [`Client::read`].
    pub async fn order(
        &self,
        command: Command,
        flags: u16,
        offset: u64,
        length: u32,
    ) -> Result<(), ClientError> {
        self.ask(command, flags, (offset, length), Bytes::new()).await.map(|_| ())
    }

    /// Asks which parts of a range are holes.
    ///
    /// # Errors
    ///
    /// As [`Client::read`].
    pub async fn extents(&self, offset: u64, length: u32) -> Result<Vec<Extent>, ClientError> {
        match self.ask(Command::BlockStatus, 0, (offset, length), Bytes::new()).await? {
            Brought::Extents(extents) => Ok(extents),
            _ => Err(ODD_KIND.into()),
        }
    }

    /// Number of requests that are not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.state().in_flight.len()
    }

    /// How long the server has owed answers without giving one.
    #[must_use]
    pub fn silent_for(&self) -> Duration {
        self.shared.state().owes_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    async fn ask(
        &self,
        command: Command,
        flags: u16,
        (offset, length): (u64, u32),
        data: Bytes,
    ) -> Result<Brought, ClientError> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut state = self.shared.state();
            if let Some(gone) = &state.gone {
                return Err(gone.clone());
            }
            let reads = if command == Command::Read { length as usize } else { 0 };
            let bytes = reads + data.len();
            // A server may answer a request whose data it has not read.
            let owes = state.owed.max(state.out.bytes + state.sending);
            if owes > 0 && owes + bytes > MOST_OWED {
                return Err(ClientError::Owes(owes));
            }
            state.owed += bytes;
            let cookie = state.in_flight.ask(command, offset, length);
            let request = Request { flags, command: Some(command), cookie, offset, length };
            state.out.push(request.header(), data);
            state.waiting.insert(cookie, Waiting { sender, bytes });
            state.owes_since.get_or_insert_with(Instant::now);
        }
        self.shared.waker.wake();
        receiver.await.unwrap_or_else(|_| Err(ClientError::Gone("it has ended".to_owned())))
    }
}

const ODD_KIND: ProtocolError = ProtocolError::Broken("a reply is of another kind than asked for");

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Carries requests and replies until the connection ends. Callers that wait then, and later
    /// ones, get the reason as their error.
    pub async fn run(mut self) -> ClientError {
        let error = poll_fn(|context| {
            self.shared.waker.register(context.waker());
            match self.pass(context) {
                Ok(()) => Poll::Pending,
                Err(error) => Poll::Ready(error),
            }
        })
        .await;
        self.shared.end(error.clone());
        error
    }

    /// Does everything that needs no waiting.
    fn pass(&mut self, context: &mut Context<'_>) -> Result<(), ClientError> {
        loop {
            self.send(context)?;
            match self.input.poll_fill(Pin::new(&mut self.stream), context)? {
                Poll::Pending => return Ok(()),
                Poll::Ready(0) => {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                }
                Poll::Ready(_) => self.hear()?,
            }
        }
    }

    fn send(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        loop {
            if self.out.bytes == 0 {
                let mut state = self.shared.state();
                std::mem::swap(&mut self.out, &mut state.out);
                state.sending = self.out.bytes;
                drop(state);
                if self.out.bytes == 0 {
                    let _ = Pin::new(&mut self.stream).poll_flush(context)?;
                    return Ok(());
                }
            }
            match self.out.poll_send(Pin::new(&mut self.stream), context)? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(_) => {}
                Poll::Pending => return Ok(()),
            }
        }
    }

    fn hear(&mut self) -> Result<(), ClientError> {
        let mut state = self.shared.state();
        while let Some((length, finished)) = state.in_flight.advance(self.input.bytes())? {
            self.input.consume(length);
            let Some(finished) = finished else { continue };
            state.owes_since = (!state.in_flight.is_empty()).then(Instant::now);
            if let Some(Waiting { sender, bytes }) = state.waiting.remove(&finished.cookie) {
                state.owed -= bytes;
                // The caller may have given up.
                let _ = sender.send(finished.result.map_err(ClientError::from));
            }
        }
        self.input.expect(state.in_flight.expects(self.input.bytes()));
        Ok(())
    }
}

impl<S> Drop for Connection<S> {
    fn drop(&mut self) {
        self.shared.end(ClientError::Gone("it has ended".to_owned()));
    }
}
