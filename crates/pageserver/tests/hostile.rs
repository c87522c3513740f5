//! Hostile clients against our server: their input ends their own connection at most, and costs
//! other clients nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::raw::{self, choose, flags, go, greet, hear, option, option_of_length, to_the_end};
use common::{LIMIT, Listening, SingleExport, listen, listen_with};
use pageserver::client::ClientError;
use pageserver::layer::{Answer, Layer, Read, Zeros};
use pageserver::layers::memory::Memory;
use pageserver::nbd::Errno;
use pageserver::nbd::request::Command;
use pageserver::nbd::wire::{self, MAX_OPTION, MAX_PAYLOAD, command_flag, option_reply};
use pageserver::server::Limits;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

const SIZE: u64 = 4 << 20;

fn disk() -> Arc<SingleExport> {
    Arc::new(SingleExport("disk", Arc::new(Memory::new(SIZE))))
}

/// An honest client is still served.
async fn still_serves(server: &Listening) {
    let client = timeout(LIMIT, server.client("disk")).await.unwrap().unwrap();
    client.write(0, Bytes::from_static(b"honest")).await.unwrap();
    assert_eq!(client.read(0, 6).await.unwrap(), b"honest");
}

/// State of a connection before the attack.
#[derive(Clone, Copy, Debug)]
enum ConnectionPhase {
    Flags,
    Options,
    Requests,
}

async fn at(server: &Listening, place: ConnectionPhase) -> UnixStream {
    let mut stream = server.raw().await;
    match place {
        ConnectionPhase::Flags => {}
        ConnectionPhase::Options => greet(&mut stream).await,
        ConnectionPhase::Requests => choose(&mut stream, "disk").await,
    }
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_ends_the_connection_that_it_came_on() {
    let server = listen(disk());
    let mut random = fastrand::Rng::with_seed(7);
    for place in [ConnectionPhase::Flags, ConnectionPhase::Options, ConnectionPhase::Requests] {
        for _ in 0..60 {
            let mut stream = at(&server, place).await;
            let length = random.usize(1..6000);
            let garbage: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
            // The server may close the connection during the write.
            let _ = stream.write_all(&garbage).await;
            let _ = stream.shutdown().await;
            let mut said = Vec::new();
            let _or_reset = timeout(LIMIT, stream.read_to_end(&mut said)).await.unwrap();
        }
        still_serves(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_cut_off_anywhere_is_not_done() {
    let server = listen(disk());
    let mut whole = flags().to_vec();
    whole.extend_from_slice(&option(wire::option::STRUCTURED_REPLY, &[]));
    whole.extend_from_slice(&option(wire::option::LIST, &[]));
    whole.extend_from_slice(&go("disk"));
    whole.extend_from_slice(&raw::request(Command::Write, 1, 4096, 64));
    whole.extend_from_slice(&[7; 64]);
    for cut in 0..whole.len() {
        let mut stream = server.raw().await;
        stream.write_all(&whole[..cut]).await.unwrap();
        stream.shutdown().await.unwrap();
        to_the_end(&mut stream).await;
    }
    let client = server.client("disk").await.unwrap();
    assert_eq!(client.read(4096, 64).await.unwrap(), [0; 64], "half a write was written");
    let mut stream = server.raw().await;
    stream.write_all(&whole).await.unwrap();
    stream.shutdown().await.unwrap();
    assert!(to_the_end(&mut stream).await.ends_with(&raw::simple_reply(0, 1)));
    assert_eq!(client.read(4096, 64).await.unwrap(), [7; 64]);
}

#[tokio::test]
async fn what_claims_to_be_gigantic_is_not_waited_for() {
    let server = listen(disk());
    for length in [MAX_OPTION + 1, 1 << 31, u32::MAX] {
        let mut stream = at(&server, ConnectionPhase::Options).await;
        stream.write_all(&option_of_length(wire::option::GO, length, &[])).await.unwrap();
        assert!(to_the_end(&mut stream).await.is_empty());
    }
    for length in [MAX_PAYLOAD + 1, 1 << 31, u32::MAX] {
        let mut stream = at(&server, ConnectionPhase::Requests).await;
        stream.write_all(&raw::request(Command::Write, 1, 0, length)).await.unwrap();
        assert!(to_the_end(&mut stream).await.is_empty());
    }
    still_serves(&server).await;
}

#[tokio::test]
async fn lengths_inside_an_option_that_are_wrong_are_told_so() {
    let server = listen(disk());
    let mut stream = at(&server, ConnectionPhase::Options).await;
    let texts: [&[u8]; 6] = [
        &[],
        &[0xff; 4],
        &[0, 0, 0, 5, b'd', b'i', b's', b'k'],
        &[0, 0, 0, 4, b'd', b'i', b's', b'k', 0xff, 0xff],
        &[0, 0, 0, 1, 0xff, 0, 0],
        &[0, 0, 0x10, 1],
    ];
    for number in [wire::option::GO, wire::option::INFO] {
        for data in texts {
            stream.write_all(&option(number, data)).await.unwrap();
            let (answered, kind, _) = hear(&mut stream).await;
            assert_eq!((answered, kind), (number, option_reply::INVALID), "{data:?}");
        }
    }
    stream.write_all(&option(wire::option::STRUCTURED_REPLY, &[])).await.unwrap();
    assert_eq!(hear(&mut stream).await.1, option_reply::ACK);
    let disk = &[0, 0, 0, 4, b'd', b'i', b's', b'k'];
    for queries in [&[0xff; 4][..], &[0, 0, 0, 1], &[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff], &[0; 5]] {
        let question = option(wire::option::SET_META_CONTEXT, &[disk, queries].concat());
        stream.write_all(&question).await.unwrap();
        let kind = hear(&mut stream).await.1;
        assert!(kind & option_reply::ERROR != 0, "{queries:?}");
    }
    stream.write_all(&go("disk")).await.unwrap();
    assert_eq!(hear(&mut stream).await.1, option_reply::INFO);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_without_an_end_are_ended() {
    let server = listen(disk());
    let (mut hears, mut says) = at(&server, ConnectionPhase::Options).await.into_split();
    let talking = tokio::spawn(async move {
        let list = option(wire::option::LIST, &[]);
        while says.write_all(&list).await.is_ok() {}
    });
    let mut said = Vec::new();
    let _or_reset = timeout(LIMIT, hears.read_to_end(&mut said)).await.unwrap();
    assert!(said.len() < 64 << 10, "{} bytes of answers", said.len());
    timeout(LIMIT, talking).await.unwrap().unwrap();
    still_serves(&server).await;
}

/// Neither a client that sends nothing keeps a place, nor one that reads nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_choose_loses_the_place() {
    let limits =
        Limits { connections: 2, negotiation: Duration::from_millis(100), ..Limits::default() };
    let server = listen_with(disk(), None, limits);
    let mut silent = server.raw().await;
    let mut deaf = at(&server, ConnectionPhase::Options).await;
    let many = option(wire::option::LIST, &[]).repeat(200);
    deaf.write_all(&many).await.unwrap();
    to_the_end(&mut silent).await;
    let client = loop {
        match server.client("disk").await {
            Ok(client) => break client,
            Err(ClientError::Gone(_)) => sleep(Duration::from_millis(5)).await,
            Err(error) => panic!("{error}"),
        }
    };
    client.read(0, 512).await.unwrap();
    to_the_end(&mut deaf).await;
}

/// Connections come one after the other, and hundreds at once: a client with a place keeps it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_connections_too_many_harm_nobody() {
    const PLACES: usize = 8;
    let limits = Limits { connections: PLACES, ..Limits::default() };
    let server = listen_with(disk(), None, limits);
    let mut clients = Vec::new();
    for _ in 0..PLACES {
        clients.push(server.client("disk").await.unwrap());
    }
    for i in 0..7_000_usize {
        let mut stream = server.raw().await;
        let mut said = Vec::new();
        let _or_reset = timeout(LIMIT, stream.read_to_end(&mut said)).await.unwrap();
        assert!(said.is_empty(), "there is a place too many");
        if i.is_multiple_of(100) {
            clients[i / 100 % PLACES].read(0, 4096).await.unwrap();
        }
    }
    for turn in 0..10 {
        let crowd = (0..300).map(|_| {
            let socket = server.socket.clone();
            tokio::spawn(async move {
                // The socket's backlog may be full.
                let Ok(mut stream) = UnixStream::connect(socket).await else { return };
                let mut said = Vec::new();
                let _or_reset = stream.read_to_end(&mut said).await;
                assert!(said.is_empty(), "there is a place too many");
            })
        });
        let crowd: Vec<_> = crowd.collect();
        clients[turn % PLACES].write(0, vec![1; 512].into()).await.unwrap();
        for one in crowd {
            timeout(LIMIT, one).await.unwrap().unwrap();
        }
    }
    // A place that becomes free goes to the next client.
    clients.pop().unwrap().order(Command::Disconnect, 0, 0, 0).await.unwrap_err();
    while let Err(error) = server.client("disk").await {
        assert!(matches!(error, ClientError::Gone(_)), "{error}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn nothing_beyond_the_end_is_read_or_written() {
    let server = listen(disk());
    let client = server.client("disk").await.unwrap();
    let edges = [
        (SIZE, 1),
        (SIZE - 1, 2),
        (0, u32::MAX),
        (u64::MAX, 1),
        (u64::MAX - 511, 512),
        (1 << 63, 4096),
        (SIZE - 4096, 8192),
    ];
    for (offset, length) in edges {
        let read = client.read(offset, length.min(MAX_PAYLOAD)).await;
        assert!(matches!(read, Err(ClientError::Refused(Errno::Invalid))), "{offset}+{length}");
        let told = client.extents(offset, length).await;
        assert!(matches!(told, Err(ClientError::Refused(Errno::Invalid))), "{offset}+{length}");
        for command in [Command::Trim, Command::WriteZeroes] {
            let done = client.order(command, 0, offset, length).await;
            assert!(matches!(done, Err(ClientError::Refused(Errno::NoSpace))), "{offset}+{length}");
        }
        if length <= 8192 {
            let written = client.write(offset, vec![1; length as usize].into()).await;
            assert!(matches!(written, Err(ClientError::Refused(Errno::NoSpace))));
        }
    }
    for flags in [command_flag::DF, command_flag::REQ_ONE, 1 << 4, 1 << 15] {
        assert!(client.order(Command::Trim, flags, 0, 512).await.is_err(), "{flags}");
    }
    assert!(client.order(Command::Trim, 0, 0, 0).await.is_err(), "nothing was asked for");
    assert_eq!(client.read(SIZE - 1, 1).await.unwrap(), [0]);
}

/// Data comes in chunks, or after one header for clients that do not support chunks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_payloads_go_in_pieces() {
    let size = u64::from(MAX_PAYLOAD) + 4096;
    let server = listen(Arc::new(SingleExport("disk", Arc::new(Memory::new(size)))));
    let content: Vec<u8> = (0..MAX_PAYLOAD).map(|i| (i / 4096 % 251) as u8).collect();
    let client = server.client("disk").await.unwrap();
    assert!(client.session().structured);
    timeout(LIMIT, client.write(4096, content.clone().into())).await.unwrap().unwrap();
    let read = timeout(LIMIT, client.read(4096, MAX_PAYLOAD)).await.unwrap().unwrap();
    assert!(read == content, "something else was read");
    // An invalid write is skipped, and the next request is answered.
    let beyond = client.write(size - 4096, content.clone().into()).await;
    assert!(matches!(beyond, Err(ClientError::Refused(Errno::NoSpace))), "{beyond:?}");
    let mut simple = at(&server, ConnectionPhase::Requests).await;
    simple.write_all(&raw::request(Command::Read, 1, 4096, MAX_PAYLOAD)).await.unwrap();
    simple.write_all(&raw::request(Command::Read, 2, 0, 4)).await.unwrap();
    simple.shutdown().await.unwrap();
    let said = to_the_end(&mut simple).await;
    let (first, second) = said.split_at(16 + content.len());
    assert!(first[..16] == raw::simple_reply(0, 1) && first[16..] == content);
    assert_eq!(second, [raw::simple_reply(0, 2), vec![0; 4]].concat());
}

/// A layer whose reads fail beyond the first half.
struct Half(Memory);

impl Layer for Half {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn describe(&self) -> String {
        "half a disk".to_owned()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        if offset + into.len() as u64 > SIZE / 2 {
            return Read::Later(Box::pin(async { Err(Errno::Io) }));
        }
        self.0.read(offset, into)
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        self.0.write(offset, data)
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        self.0.zero(offset, length, zeros)
    }

    fn flush(&self) -> Answer<'_> {
        self.0.flush()
    }
}

#[tokio::test]
async fn a_long_read_that_fails_in_its_middle_shows_nothing_wrong() {
    let server = listen(Arc::new(SingleExport("disk", Arc::new(Half(Memory::new(SIZE))))));
    let client = server.client("disk").await.unwrap();
    let length = u32::try_from(SIZE).unwrap();
    let read = timeout(LIMIT, client.read(0, length)).await.unwrap();
    assert!(matches!(read, Err(ClientError::Refused(Errno::Io))), "{read:?}");
    assert_eq!(client.read(0, 4).await.unwrap(), [0; 4]);
    // After a header that reports success, closing the connection is the only way to report the
    // error.
    let mut simple = at(&server, ConnectionPhase::Requests).await;
    simple.write_all(&raw::request(Command::Read, 1, 0, length)).await.unwrap();
    assert!(to_the_end(&mut simple).await.len() < 16 + length as usize);
    still_serves(&server).await;
}

#[tokio::test]
async fn a_cookie_that_is_used_twice_is_the_clients_own_trouble() {
    let server = listen(disk());
    let mut stream = at(&server, ConnectionPhase::Requests).await;
    let mut requests = raw::request(Command::Write, 5, 0, 4);
    requests.extend_from_slice(b"once");
    requests.extend_from_slice(&raw::request(Command::Read, 5, 0, 4));
    requests.extend_from_slice(&raw::request(Command::Read, 5, SIZE, 4));
    requests.extend_from_slice(&raw::request(Command::Read, u64::MAX, 0, 4));
    stream.write_all(&requests).await.unwrap();
    stream.shutdown().await.unwrap();
    let expected = [
        raw::simple_reply(0, 5),
        raw::simple_reply(0, 5),
        b"once".to_vec(),
        raw::simple_reply(Errno::Invalid as u32, 5),
        raw::simple_reply(0, u64::MAX),
        b"once".to_vec(),
    ];
    assert_eq!(to_the_end(&mut stream).await, expected.concat());
}

#[tokio::test]
async fn commands_that_nobody_knows_are_refused_and_nothing_else() {
    let server = listen(disk());
    let mut stream = at(&server, ConnectionPhase::Requests).await;
    for number in [5_u16, 8, 99, u16::MAX] {
        let mut request = raw::request(Command::Flush, 3, 0, 0);
        request[6..8].copy_from_slice(&number.to_be_bytes());
        stream.write_all(&request).await.unwrap();
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).await.unwrap();
        assert_eq!(reply[..], raw::simple_reply(Errno::Invalid as u32, 3));
    }
    stream.write_all(&[0; 28]).await.unwrap();
    to_the_end(&mut stream).await;
    still_serves(&server).await;
}
