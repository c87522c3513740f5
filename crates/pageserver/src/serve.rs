//! One connection after its negotiation: requests in, replies out.
//!
//! Problem: a request for a page takes less time than a system call. Idea: one pass reads all that
//! has come, answers it in order into one buffer, and writes that at once. So sixty-four requests
//! take two system calls and one wake-up. What a layer cannot answer at once is kept beside and
//! answered when it is done, in whatever order: cookies tell which is which.
//!
//! Bounds: a client that does not read its replies is not read from either, once [`MOST_OUT`] lie
//! unsent. What is under way holds at most [`MOST_HELD`] bytes and [`MOST_LATER`] requests.

mod patience;

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, Stream};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::buffer::Incoming;
use crate::layer::{Answer, Layer, Read, Zeros};
use crate::nbd::negotiation::Session;
use crate::nbd::reply::{self, Extent};
use crate::nbd::request::{Command, HEADER, Request};
use crate::nbd::wire::command_flag::{FUA, REQ_ONE};
use crate::nbd::{Errno, ProtocolError};
use patience::Patience;

/// More replies are not made while so many bytes wait to be sent.
const MOST_OUT: usize = 1 << 20;
/// How often more is received before replies to what was received are sent.
const MOST_RECEIVED: u32 = 4;
/// A buffer that has grown beyond this is not kept, in bytes.
const KEPT_OUT: usize = 4 << 20;
/// Requests that are under way.
const MOST_LATER: usize = 256;
/// Bytes that these hold; one may always be under way.
const MOST_HELD: usize = 64 << 20;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The client breaks the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// What came of a request that took a while.
enum Late {
    Read(Result<Vec<u8>, Errno>),
    Other(Result<(), Errno>),
}

/// A request that took a while, and what came of it.
type Later<'a> = BoxFuture<'a, (Request, Late)>;

struct Connection<'a, S> {
    stream: S,
    session: &'a Session,
    layer: &'a dyn Layer,
    input: Incoming,
    out: Vec<u8>,
    sent: usize,
    later: FuturesUnordered<Later<'a>>,
    held: usize,
    /// No more requests come: the client has said so, or closed its half.
    is_over: bool,
    patience: Patience,
}

/// Serves requests until the client ends the connection.
///
/// # Errors
///
/// The socket's, and what the client does against the protocol.
pub async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    input: Incoming,
    session: &Session,
    layer: &dyn Layer,
) -> Result<(), ServeError> {
    let mut connection = Connection {
        stream,
        session,
        layer,
        input,
        out: Vec::new(),
        sent: 0,
        later: FuturesUnordered::new(),
        held: 0,
        is_over: false,
        patience: Patience::default(),
    };
    poll_fn(|context| connection.pass(context)).await
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<'_, S> {
    /// Does what can be done without waiting. Ready: the connection has ended.
    fn pass(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ServeError>> {
        let mut received = 0;
        loop {
            self.gather(context);
            let has_answered = self.answer_all()?;
            // What comes meanwhile is answered by the same write.
            let may_receive = received < MOST_RECEIVED;
            if may_receive && self.receive(context)? {
                received += 1;
                continue;
            }
            received = 0;
            let has_sent = self.send(context)?;
            if self.is_over && self.later.is_empty() && self.sent == self.out.len() {
                return Poll::Ready(Ok(()));
            }
            if may_receive && !has_answered && !has_sent {
                if self.later.is_empty() && self.patience.look_again() {
                    // The runtime comes back to this task when it has looked at its sockets.
                    let _ = pin!(tokio::task::yield_now()).poll(context);
                }
                return Poll::Pending;
            }
        }
    }

    /// Answers what has taken a while and is done.
    fn gather(&mut self, context: &mut Context<'_>) {
        while !self.is_full()
            && let Poll::Ready(Some((request, late))) = Pin::new(&mut self.later).poll_next(context)
        {
            self.held -= request.length_held();
            match late {
                Late::Read(Ok(data)) => {
                    self.before_data(request);
                    self.out.extend_from_slice(&data);
                }
                Late::Read(Err(errno)) => self.failed(request, errno),
                Late::Other(result) => reply::simple(&mut self.out, request.cookie, result),
            }
        }
    }

    /// Answers the requests that have come, as far as there is room. Answers whether there were
    /// any.
    fn answer_all(&mut self) -> Result<bool, ProtocolError> {
        let mut answered = false;
        while !self.is_over && !self.is_full() && self.has_room() {
            let Some(request) = Request::parse(self.input.bytes())? else { break };
            let length = HEADER + request.payload();
            if self.input.bytes().len() < length {
                self.input.expect(length);
                break;
            }
            self.patience.came();
            self.answer(request);
            self.input.consume(length);
            answered = true;
        }
        Ok(answered)
    }

    fn answer(&mut self, request: Request) {
        let command = match request.check(self.session.export, self.session.status) {
            Ok(command) => command,
            Err(errno) => {
                // What failed is told in the form that the request's success would have.
                return self.failed(request, errno);
            }
        };
        let layer = self.layer;
        let (offset, length) = (request.offset, u64::from(request.length));
        let done = match command {
            Command::Read => return self.read(request),
            Command::BlockStatus => return self.block_status(request),
            Command::Disconnect => {
                self.is_over = true;
                return;
            }
            Command::Write => {
                layer.write(offset, &self.input.bytes()[HEADER..HEADER + request.payload()])
            }
            Command::Trim => layer.zero(offset, length, Zeros::Trim),
            Command::WriteZeroes => layer.zero(offset, length, Zeros::Write),
            Command::Flush => layer.flush(),
        };
        let done = if request.has(FUA) && command != Command::Flush {
            then_flush(layer, done)
        } else {
            done
        };
        match done {
            Answer::Now(result) => reply::simple(&mut self.out, request.cookie, result),
            Answer::Later(future) => {
                self.wait(request, async move { Late::Other(future.await) });
            }
        }
    }

    fn read(&mut self, request: Request) {
        let mark = self.out.len();
        self.before_data(request);
        let begin = self.out.len();
        self.out.resize(begin + request.length as usize, 0);
        match self.layer.read(request.offset, &mut self.out[begin..]) {
            Read::Now(Ok(())) => {}
            Read::Now(Err(errno)) => {
                self.out.truncate(mark);
                self.failed(request, errno);
            }
            Read::Later(future) => {
                self.out.truncate(mark);
                self.wait(request, async move { Late::Read(future.await) });
            }
        }
    }

    fn block_status(&mut self, request: Request) {
        let mut extents = self.layer.extents(request.offset, request.length);
        if request.has(REQ_ONE) {
            extents.truncate(1);
        }
        debug_assert!(!extents.is_empty(), "a layer knows at least one extent");
        if extents.is_empty() {
            extents.push(Extent { length: request.length, is_hole: false });
        }
        reply::block_status(&mut self.out, request.cookie, &extents);
    }

    fn before_data(&mut self, request: Request) {
        let Request { cookie, offset, length, .. } = request;
        reply::before_data(&mut self.out, self.session.structured, cookie, offset, length);
    }

    fn failed(&mut self, request: Request, errno: Errno) {
        let in_chunks = matches!(request.command, Some(Command::Read | Command::BlockStatus));
        let in_chunks = in_chunks && self.session.structured;
        reply::failed(&mut self.out, in_chunks, request.cookie, errno);
    }

    /// Sends replies. Answers whether any were sent.
    fn send(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        let mut has_sent = false;
        while self.sent < self.out.len() {
            match Pin::new(&mut self.stream).poll_write(context, &self.out[self.sent..])? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(n) => self.sent += n,
                Poll::Pending => return Ok(has_sent),
            }
            has_sent = true;
        }
        if self.out.capacity() > KEPT_OUT {
            self.out = Vec::new();
        }
        self.out.clear();
        self.sent = 0;
        // TLS keeps what it could not send.
        let _ = Pin::new(&mut self.stream).poll_flush(context)?;
        Ok(has_sent)
    }

    /// Receives requests, if there is room for any. Answers whether any have come.
    fn receive(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        if self.is_over || self.is_full() || !self.has_room() {
            return Ok(false);
        }
        match self.input.poll_fill(Pin::new(&mut self.stream), context)? {
            Poll::Ready(0) => {
                self.is_over = true;
                Ok(true)
            }
            Poll::Ready(_) => Ok(true),
            Poll::Pending => Ok(false),
        }
    }

    fn is_full(&self) -> bool {
        self.out.len() - self.sent >= MOST_OUT
    }

    fn has_room(&self) -> bool {
        self.later.len() < MOST_LATER && self.held < MOST_HELD
    }
}

impl<'a, S> Connection<'a, S> {
    fn wait(&mut self, request: Request, future: impl Future<Output = Late> + Send + 'a) {
        self.held += request.length_held();
        self.later.push(Box::pin(async move { (request, future.await) }));
    }
}

impl Request {
    /// What it holds while it is under way, in bytes.
    fn length_held(&self) -> usize {
        let brings = matches!(self.command, Some(Command::Read | Command::Write));
        if brings { self.length as usize } else { 0 }
    }
}

/// What was answered is on stable storage, too.
fn then_flush<'a>(layer: &'a dyn Layer, done: Answer<'a>) -> Answer<'a> {
    match done {
        Answer::Now(Ok(())) => layer.flush(),
        Answer::Now(Err(errno)) => Answer::Now(Err(errno)),
        Answer::Later(future) => Answer::Later(Box::pin(async move {
            future.await?;
            layer.flush().result().await
        })),
    }
}
