//! A whole connection after its negotiation, over a stream in memory.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use pageserver::budget::{Account, Budget};
use pageserver::buffer::Incoming;
use pageserver::layer::{Answer, Layer, Read, Zeros};
use pageserver::nbd::Errno;
use pageserver::nbd::in_flight::{Brought, InFlight};
use pageserver::nbd::negotiation::Session;
use pageserver::nbd::reply::Extent;
use pageserver::nbd::request::{Command, Export, Request};
use pageserver::serve::{ServeError, serve};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Choices;

const SIZE: usize = 4096;
/// Longer requests are divided.
const PIECE: usize = 256;
/// Reads that begin here fail.
const FAILS: [u64; 2] = [13, 3333];
const EXPORT: Export = Export { size: SIZE as u64, read_only: false, block: 1 };

/// A small disk. Answers about its second half take a while.
struct Slow(Mutex<Vec<u8>>);

impl Slow {
    fn range(offset: u64, length: u64) -> std::ops::Range<usize> {
        usize::try_from(offset).unwrap()..usize::try_from(offset + length).unwrap()
    }

    fn answer(offset: u64) -> Answer<'static> {
        if offset < SIZE as u64 / 2 {
            return Answer::Now(Ok(()));
        }
        Answer::Later(Box::pin(async move {
            rest(offset % 3).await;
            Ok(())
        }))
    }
}

/// Becomes ready after it was polled `times` times.
async fn rest(mut times: u64) {
    poll_fn(|context| {
        if times == 0 {
            return Poll::Ready(());
        }
        times -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl Layer for Slow {
    fn size(&self) -> u64 {
        SIZE as u64
    }

    fn describe(&self) -> String {
        "a slow disk".to_owned()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let data = self.0.lock().unwrap();
        into.copy_from_slice(&data[Self::range(offset, into.len() as u64)]);
        if offset < SIZE as u64 / 2 {
            return Read::Now(if offset == FAILS[0] { Err(Errno::Io) } else { Ok(()) });
        }
        let into = into.to_vec();
        Read::Later(Box::pin(async move {
            rest(offset % 5).await;
            if offset == FAILS[1] { Err(Errno::Io) } else { Ok(into) }
        }))
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let range = Self::range(offset, data.len() as u64);
        self.0.lock().unwrap()[range].copy_from_slice(&data);
        let answer = Self::answer(offset);
        if let Answer::Now(result) = answer {
            return Answer::Now(result);
        }
        let copy = data.to_vec();
        Answer::Later(Box::pin(async move {
            let result = answer.result().await;
            assert!(data == copy, "the payload changes while it is in use");
            result
        }))
    }

    fn zero(&self, offset: u64, length: u64, _: Zeros) -> Answer<'_> {
        self.0.lock().unwrap()[Self::range(offset, length)].fill(0);
        Self::answer(offset)
    }

    fn flush(&self) -> Answer<'_> {
        Self::answer(SIZE as u64 - 1)
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        let half = u32::try_from(SIZE as u64 / 2 - offset.min(SIZE as u64 / 2)).unwrap();
        if half == 0 || half >= length {
            return vec![Extent { length, is_hole: false }];
        }
        [(half, true), (length - half, false)]
            .map(|(length, is_hole)| Extent { length, is_hole })
            .to_vec()
    }
}

/// A stream that delivers `input` in pieces and takes output in pieces; every third time it makes
/// the server wait.
struct Tape<'a> {
    input: &'a [u8],
    out: &'a mut Vec<u8>,
    piece: usize,
    turn: usize,
}

impl Tape<'_> {
    fn waits(&mut self, context: &mut Context<'_>) -> bool {
        self.turn += 1;
        let waits = self.turn.is_multiple_of(3);
        if waits {
            context.waker().wake_by_ref();
        }
        waits
    }
}

impl AsyncRead for Tape<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.waits(context) {
            return Poll::Pending;
        }
        assert!(into.remaining() > 0, "no room to receive anything");
        let n = self.piece.min(self.input.len()).min(into.remaining());
        into.put_slice(&self.input[..n]);
        self.input = &self.input[n..];
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tape<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.waits(context) {
            return Poll::Pending;
        }
        let n = bytes.len().min(self.piece);
        self.out.extend_from_slice(&bytes[..n]);
        Poll::Ready(Ok(n))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Serves the requests in `bytes`, to the end of the stream.
fn play(session: &Session, bytes: &[u8], piece: usize) -> (Result<(), ServeError>, Vec<u8>) {
    let mut out = Vec::new();
    let layer = Slow(Mutex::new(vec![0; SIZE]));
    let tape = Tape { input: bytes, out: &mut out, piece, turn: 0 };
    // The budget is empty: only the memory that each connection may always hold is left.
    let account = Account::new(Arc::new(Budget::new(0, PIECE)));
    let result = poll_to_the_end(serve(tape, Incoming::default(), session, &layer, &account));
    (result, out)
}

fn poll_to_the_end<T>(future: impl Future<Output = T>) -> T {
    let mut context = Context::from_waker(Waker::noop());
    let mut future = pin!(future);
    for _ in 0..1_000_000 {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result;
        }
    }
    panic!("serving never ends");
}

/// Tests a server with requests, and its replies with a client that expects them.
pub(crate) fn serving(data: &[u8]) {
    let mut choices = Choices(data);
    let choice = choices.byte();
    let (structured, status) = (choice & 2 != 0, choice & 6 == 6);
    let session = Session { name: "disk".to_owned(), export: EXPORT, structured, status };
    let piece = 1 + usize::from(choice >> 3) * 64;
    if choice & 1 == 0 {
        let _any_error = play(&session, choices.0, piece);
        return;
    }
    let (mut copy, mut bytes, mut in_flight) = (vec![0; SIZE], Vec::new(), InFlight::default());
    let mut expected = HashMap::new();
    while !choices.is_empty() {
        let request = next(&mut choices, &mut in_flight);
        request.encode(&mut bytes);
        let begin = bytes.len();
        bytes.resize(begin + request.payload(), choices.byte());
        let result = is_answered(&request, status, &mut copy, &bytes[begin..]);
        expected.insert(request.cookie, result);
    }
    let (result, out) = play(&session, &bytes, piece);
    assert!(result.is_ok(), "{result:?}");
    let mut rest = &out[..];
    while let Some((length, finished)) = in_flight.advance(rest).unwrap() {
        rest = &rest[length..];
        let Some(finished) = finished else { continue };
        let expected = expected.remove(&finished.cookie).unwrap();
        match (expected, finished.result) {
            (Err(expected), Err(found)) => assert_eq!(expected, found),
            (Ok(Some(expected)), Ok(Brought::Data(found))) => assert!(expected == found, "wrong"),
            (Ok(None), Ok(Brought::Done | Brought::Extents(_))) => {}
            (expected, found) => panic!("{found:?} instead of {expected:?}"),
        }
    }
    assert!(rest.is_empty() && expected.is_empty(), "a request has no answer");
}

/// Chooses the next request.
fn next(choices: &mut Choices<'_>, in_flight: &mut InFlight) -> Request {
    const COMMANDS: [Command; 7] = [
        Command::Read,
        Command::Write,
        Command::Flush,
        Command::Trim,
        Command::WriteZeroes,
        Command::BlockStatus,
        Command::Read,
    ];
    let command = choices.of(&COMMANDS);
    let flags = u16::from(choices.byte() & 0x1f);
    let mut offset = u64::from(choices.short() % 5000);
    let length = u32::from(choices.short() % 1000);
    // A read that fails after a part of its data was sent ends the connection, unless it is in
    // chunks.
    let tears = |offset: u64| FAILS.iter().any(|at| at % PIECE as u64 == offset % PIECE as u64);
    offset += u64::from(tears(offset) && !FAILS.contains(&offset) && length as usize > PIECE);
    let cookie = in_flight.ask(command, offset, length);
    Request { flags, command: Some(command), cookie, offset, length }
}

/// The expected answer to a request: an error, data, or success without data.
fn is_answered(
    request: &Request,
    status: bool,
    copy: &mut [u8],
    payload: &[u8],
) -> Result<Option<Vec<u8>>, Errno> {
    let command = request.check(EXPORT, status)?;
    let range = Slow::range(request.offset, request.length.into());
    match command {
        Command::Read if FAILS.contains(&request.offset) => return Err(Errno::Io),
        Command::Read => return Ok(Some(copy[range].to_vec())),
        Command::Write => copy[range].copy_from_slice(payload),
        Command::Trim | Command::WriteZeroes => copy[range].fill(0),
        _ => {}
    }
    Ok(None)
}
