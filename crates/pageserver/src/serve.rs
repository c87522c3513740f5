//! One connection after its negotiation: requests in, replies out.
//!
//! Problem: a request for a page takes less time than a system call. Idea: one pass reads all
//! requests that have arrived, answers them in order into one buffer, and sends that buffer at
//! once. So sixty-four requests cost two system calls and one wake-up. Requests that a layer
//! cannot answer at once are kept in a separate set and answered when they are done, in any
//! order: cookies match replies to requests.
//!
//! Bounds: a request that is longer than a piece is [`divided`]. While a client does not read its
//! replies, no requests are read from it. All data in flight or waiting to be sent is charged to
//! the process' [`Budget`](crate::budget::Budget) before it is allocated, except one piece of
//! each.

mod divided;
mod out;
mod patience;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, Stream};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::budget::{Account, BudgetCharge};
use crate::buffer::Incoming;
use crate::layer::{Answer, Layer, Read, Zeros};
use crate::nbd::negotiation::Session;
use crate::nbd::reply::{self, Extent};
use crate::nbd::request::{Command, HEADER, Request};
use crate::nbd::wire::command_flag::{FUA, REQ_ONE};
use crate::nbd::{Errno, ProtocolError};
use divided::{Dividing, Piece, Wholes, is_chunked};
use out::Out;
use patience::Patience;

/// Number of receives before the replies to the received requests are sent.
const MOST_RECEIVED: u32 = 4;
/// Maximum number of requests and pieces in flight.
const MOST_LATER: usize = 256;
/// Maximum number of bytes that the reads among them hold: QEMU has sixteen requests in flight, of
/// at most 1 MiB each.
const MOST_HELD: usize = 16 << 20;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The client violates the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// A part of the data of a read was sent and the rest cannot be read; the protocol has no way
    /// to tell the client.
    #[error("a read failed after a part of it was sent: {0}")]
    Torn(Errno),
}

/// Result of a request that took a while.
enum Late {
    Read(Result<Vec<u8>, Errno>),
    Other(Result<(), Errno>),
}

/// A request or a piece that takes a while, and its result.
type Later<'a> = BoxFuture<'a, (Piece, Late)>;

struct Transmission<'a, S> {
    stream: S,
    session: &'a Session,
    layer: &'a dyn Layer,
    account: &'a Account,
    input: Incoming,
    out: Out,
    later: FuturesUnordered<Later<'a>>,
    /// Requests of `later` that are done and wait for room for their replies.
    done: VecDeque<(Piece, Late)>,
    /// Bytes that the requests in `later` and `done` hold.
    held: BudgetCharge,
    /// Longest read among them, in bytes.
    longest: usize,
    dividing: Option<Dividing>,
    wholes: Wholes,
    /// Whether the request at the front has to wait until another one has ended.
    is_held_up: bool,
    /// Whether the client takes no reply now.
    is_waiting: bool,
    /// No more requests will come: the client has said so, or has closed its side.
    is_over: bool,
    patience: Patience,
}

/// Serves requests until the client ends the connection. Its memory is counted in `account`.
///
/// # Errors
///
/// Errors of the socket, and violations of the protocol by the client.
pub async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    input: Incoming,
    session: &Session,
    layer: &dyn Layer,
    account: &Account,
) -> Result<(), ServeError> {
    let budget = account.budget();
    let mut connection = Transmission {
        stream,
        session,
        layer,
        account,
        input,
        out: Out::new(budget.clone()),
        later: FuturesUnordered::new(),
        done: VecDeque::new(),
        held: BudgetCharge::new(budget.clone(), budget.piece()),
        longest: 0,
        dividing: None,
        wholes: Wholes::default(),
        is_held_up: false,
        is_waiting: false,
        is_over: false,
        patience: Patience::default(),
    };
    connection.input.charge_to(budget);
    poll_fn(|context| connection.pass(context)).await
}

impl<S: AsyncRead + AsyncWrite + Unpin> Transmission<'_, S> {
    /// Does everything that needs no waiting. Ready: the connection has ended.
    fn pass(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ServeError>> {
        let mut received = 0;
        loop {
            self.gather(context)?;
            let has_answered = self.answer_all()?;
            // Requests that arrive meanwhile are answered by the same write.
            let may_receive = received < MOST_RECEIVED;
            if may_receive && self.receive(context)? {
                received += 1;
                continue;
            }
            received = 0;
            let has_sent = self.send(context)?;
            if self.is_over && self.is_idle() && self.out.is_empty() {
                return Poll::Ready(Ok(()));
            }
            if may_receive && !has_answered && !has_sent {
                if self.is_idle() && self.patience.look_again() {
                    // The runtime polls its sockets before it runs this task again.
                    let _ = pin!(tokio::task::yield_now()).poll(context);
                }
                return Poll::Pending;
            }
        }
    }

    /// Sends replies. Returns whether any were sent.
    fn send(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        let mut has_sent = false;
        let stream = Pin::new(&mut self.stream);
        let waits = self.out.send(stream, context, &mut has_sent)?.is_pending();
        if self.is_waiting && (has_sent || !waits) {
            self.account.waits(false);
        }
        self.is_waiting = waits && self.out.is_charged();
        if self.is_waiting {
            self.account.waits(true);
        }
        Ok(has_sent)
    }

    /// Receives requests, if there is room for any. Returns whether any have arrived.
    fn receive(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        if self.is_over || self.is_held_up {
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
}

impl<'a, S> Transmission<'a, S> {
    /// Whether no request is in flight.
    fn is_idle(&self) -> bool {
        self.later.is_empty() && self.done.is_empty()
    }

    /// Answers requests that took a while and are done. They end in the layer even while the
    /// client takes no replies, because requests of other connections may wait for them.
    fn gather(&mut self, context: &mut Context<'_>) -> Result<(), ServeError> {
        loop {
            while let Poll::Ready(Some(done)) = Pin::new(&mut self.later).poll_next(context) {
                self.done.push_back(done);
            }
            let mut has_ended = false;
            while !self.done.is_empty()
                && self.out.has_room(self.longest)
                && let Some((piece, late)) = self.done.pop_front()
            {
                has_ended = true;
                self.end_late(&piece, late)?;
            }
            // The end of a divided write begins its flush, which has to be polled once.
            if !has_ended {
                break;
            }
        }
        self.input.reclaim(self.is_idle());
        Ok(())
    }

    fn end_late(&mut self, piece: &Piece, late: Late) -> Result<(), ServeError> {
        self.held.give(piece.request.length_held());
        let result = match late {
            Late::Read(Ok(data)) => {
                self.before_data(piece);
                self.out.buffer.extend_from_slice(&data);
                Ok(())
            }
            Late::Read(Err(errno)) => Err(errno),
            Late::Other(result) => result,
        };
        if self.is_idle() {
            self.longest = 0;
        }
        self.ended(piece, result)
    }

    /// Answers the requests that have arrived while there is room. Returns whether there were
    /// any.
    fn answer_all(&mut self) -> Result<bool, ServeError> {
        let mut answered = false;
        self.is_held_up = false;
        while !self.is_over {
            answered |= self.divide()?;
            if self.dividing.is_some() {
                break;
            }
            let Some(request) = Request::parse(self.input.bytes())? else { break };
            if self.is_long(&request) {
                self.patience.came();
                self.input.consume(HEADER);
                let failed = request.check(self.session.export, self.session.status).err();
                let structured = self.session.structured;
                self.dividing = Some(self.wholes.divide(request, structured, failed));
                continue;
            }
            let payload = request.payload();
            if self.input.bytes().len() < HEADER + payload {
                self.input.expect(HEADER + payload);
                break;
            }
            let checked = request.check(self.session.export, self.session.status);
            // An invalid request holds no memory.
            let request = if checked.is_ok() { request } else { Request { length: 0, ..request } };
            if !self.has_room(&request) {
                break;
            }
            self.patience.came();
            self.input.consume(HEADER);
            let payload = self.input.take(payload);
            self.answer(request, payload, checked)?;
            answered = true;
        }
        Ok(answered)
    }

    /// Whether the request is to be divided. That is a write with a long payload, which must be
    /// skipped even if the request is invalid, or a long valid read.
    fn is_long(&self, request: &Request) -> bool {
        if request.length as usize <= self.account.budget().piece() {
            return false;
        }
        let checked = request.check(self.session.export, self.session.status);
        request.payload() > 0 || matches!(checked, Ok(Command::Read))
    }

    /// Passes pieces of the request that is being divided to the layer. Returns whether there
    /// were any.
    fn divide(&mut self) -> Result<bool, ServeError> {
        let mut has_done = false;
        while let Some(dividing) = &mut self.dividing {
            let is_idle = self.later.is_empty() && self.done.is_empty();
            if dividing.is_in_one && !is_idle {
                self.is_held_up = true;
                break;
            }
            let (number, is_write) = (dividing.number, dividing.is_write());
            let has_failed = self.wholes.has_failed(number);
            let next = dividing.next(self.account.budget().piece());
            let Some(piece) = next.filter(|_| is_write || !has_failed) else {
                self.dividing = None;
                self.wholes.divided(number);
                self.finish(number)?;
                return Ok(true);
            };
            let length = piece.request.length as usize;
            if is_write && self.input.bytes().len() < length {
                self.input.expect(length);
                break;
            }
            if !has_failed && !self.has_room(&piece.request) {
                break;
            }
            if let Some(dividing) = &mut self.dividing {
                dividing.done += piece.request.length;
            }
            match (has_failed, is_write) {
                (true, true) => self.input.consume(length),
                (true, false) => {}
                (false, true) => {
                    self.wholes.begun(number);
                    let payload = self.input.take(length);
                    let done = self.layer.write(piece.request.offset, payload);
                    self.done(piece, done)?;
                }
                (false, false) => {
                    self.wholes.begun(number);
                    self.read(piece)?;
                }
            }
            has_done = true;
        }
        Ok(has_done)
    }

    /// Whether there is room for the memory that a request holds and for its reply. If so, the
    /// memory is taken.
    fn has_room(&mut self, request: &Request) -> bool {
        let holds = request.length_held();
        let brings = match request.command {
            Some(Command::Read) => holds,
            Some(Command::BlockStatus) => self.account.budget().piece(),
            _ => 0,
        };
        let has_room = self.later.len() + self.done.len() < MOST_LATER
            && self.held.bytes() + holds <= MOST_HELD
            && self.out.has_room(brings)
            && self.held.take(holds);
        self.is_held_up = !has_room;
        has_room
    }

    fn answer(
        &mut self,
        request: Request,
        payload: Bytes,
        checked: Result<Command, Errno>,
    ) -> Result<(), ServeError> {
        let piece = Piece { request, of: None };
        let command = match checked {
            Ok(command) => command,
            Err(errno) => return self.done(piece, Answer::Now(Err(errno))),
        };
        let layer = self.layer;
        let (offset, length) = (request.offset, u64::from(request.length));
        let done = match command {
            Command::Read => return self.read(piece),
            Command::BlockStatus => {
                self.block_status(request);
                return Ok(());
            }
            Command::Disconnect => {
                self.is_over = true;
                return Ok(());
            }
            Command::Write => layer.write(offset, payload),
            Command::Trim => layer.zero(offset, length, Zeros::Trim),
            Command::WriteZeroes => layer.zero(offset, length, Zeros::Write),
            Command::Flush => layer.flush(),
        };
        let done = if request.has(FUA) && command != Command::Flush {
            then_flush(layer, done)
        } else {
            done
        };
        self.done(piece, done)
    }

    fn read(&mut self, piece: Piece) -> Result<(), ServeError> {
        let mark = self.out.buffer.len();
        let had_begun = self.before_data(&piece);
        let begin = self.out.buffer.len();
        self.out.buffer.resize(begin + piece.request.length as usize, 0);
        let read = self.layer.read(piece.request.offset, &mut self.out.buffer[begin..]);
        if matches!(read, Read::Now(Ok(()))) {
            return self.done(piece, Answer::Now(Ok(())));
        }
        self.out.buffer.truncate(mark);
        if let Some(dividing) = &mut self.dividing {
            dividing.has_begun = had_begun;
        }
        match read {
            Read::Now(result) => self.done(piece, Answer::Now(result)),
            Read::Later(future) => {
                self.longest = self.longest.max(piece.request.length as usize);
                self.wait(piece, async move { Late::Read(future.await) });
                Ok(())
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
        reply::block_status(&mut self.out.buffer, request.cookie, &extents);
    }

    /// Handles the layer's answer to any request except a read that takes a while.
    fn done(&mut self, piece: Piece, answer: Answer<'a>) -> Result<(), ServeError> {
        match answer {
            Answer::Now(result) => {
                self.held.give(piece.request.length_held());
                self.ended(&piece, result)
            }
            Answer::Later(future) => {
                self.wait(piece, async move { Late::Other(future.await) });
                Ok(())
            }
        }
    }

    fn wait(&mut self, piece: Piece, future: impl Future<Output = Late> + Send + 'a) {
        self.later.push(Box::pin(async move { (piece, future.await) }));
    }

    /// Answers a request that has ended; the data of a successful read is already in the buffer.
    fn ended(&mut self, piece: &Piece, result: Result<(), Errno>) -> Result<(), ServeError> {
        let request = &piece.request;
        let Some(number) = piece.of else {
            match (request.command, result) {
                (Some(Command::Read), Ok(())) => {}
                // An error is sent in the same form as the reply to a success.
                (_, Err(errno)) => self.failed(request, errno),
                (_, result) => reply::simple(&mut self.out.buffer, request.cookie, result),
            }
            return Ok(());
        };
        if let (Some(Dividing { has_begun: true, .. }), Err(errno)) = (&self.dividing, result) {
            return Err(ServeError::Torn(errno));
        }
        self.wholes.ended(number, result);
        self.finish(number)
    }

    /// Answers a divided request if all its pieces have ended.
    fn finish(&mut self, number: u64) -> Result<(), ServeError> {
        let Some((request, result)) = self.wholes.finish(number) else { return Ok(()) };
        match (request.command, result) {
            (_, Err(errno)) => self.failed(&request, errno),
            (Some(Command::Read), Ok(())) => {
                if is_chunked(&request, self.session.structured) {
                    reply::last_chunk(&mut self.out.buffer, request.cookie);
                }
            }
            (_, Ok(())) => {
                // The request holds no memory any more.
                let request = Request { length: 0, ..request };
                let layer = self.layer;
                let done = if request.has(FUA) { layer.flush() } else { Answer::Now(Ok(())) };
                return self.done(Piece { request, of: None }, done);
            }
        }
        Ok(())
    }

    /// Appends the header of a read's data. Returns whether the single header of a divided read
    /// was already there.
    fn before_data(&mut self, piece: &Piece) -> bool {
        let Request { cookie, offset, length, .. } = piece.request;
        let (out, structured) = (&mut self.out.buffer, self.session.structured);
        match self.dividing.as_mut().filter(|d| d.is_in_one && piece.of == Some(d.number)) {
            Some(dividing) => {
                let Request { offset, length, .. } = dividing.request;
                if !dividing.has_begun {
                    reply::before_data(out, structured, cookie, offset, length);
                }
                return std::mem::replace(&mut dividing.has_begun, true);
            }
            None if piece.of.is_some() => reply::before_piece(out, cookie, offset, length),
            None => reply::before_data(out, structured, cookie, offset, length),
        }
        false
    }

    fn failed(&mut self, request: &Request, errno: Errno) {
        let in_chunks = matches!(request.command, Some(Command::Read | Command::BlockStatus));
        let in_chunks = in_chunks && self.session.structured;
        reply::failed(&mut self.out.buffer, in_chunks, request.cookie, errno);
    }
}

impl Request {
    /// Memory that the request holds while it is in flight, in bytes. The payload of a write stays
    /// in the buffer into which it was received.
    fn length_held(&self) -> usize {
        if self.command == Some(Command::Read) { self.length as usize } else { 0 }
    }
}

/// Flushes the layer after `done`, so that the request's data is on stable storage.
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
