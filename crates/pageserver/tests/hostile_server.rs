//! Hostile servers against our client. It never returns data that was not asked for, never waits
//! for replies that cannot come, and tells all waiting callers when the connection ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::raw::{self, DISK, behind, chunk, chunk_of_length, server_says, simple_reply};
use common::{LIMIT, listen};
use pageserver::client::{self, Client, ClientError};
use pageserver::nbd::dialogue::Wanted;
use pageserver::nbd::request::{Command, HEADER};
use pageserver::nbd::wire::{self, MAX_PAYLOAD, option, option_reply};
use pageserver::nbd::{Errno, ProtocolError};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::timeout;

/// The client's result with a server that sends `says` and hangs up, without regard to its input.
async fn connects(says: Vec<u8>) -> Result<Client, ClientError> {
    let (ours, mut theirs) = duplex(1 << 20);
    tokio::spawn(async move {
        // The client may hang up first.
        let _ = theirs.write_all(&says).await;
        let _ = theirs.shutdown().await;
        let _ = theirs.read_to_end(&mut Vec::new()).await;
    });
    let wanted = Wanted { name: "disk".to_owned(), tls: false, status: true };
    timeout(LIMIT, client::connect(ours, wanted)).await.unwrap().map(|(client, _)| client)
}

#[tokio::test]
async fn an_honest_server_is_understood() {
    let client = connects(server_says()).await.unwrap();
    assert_eq!(client.session().export, DISK);
    assert!(client.session().status && client.session().structured);
}

#[tokio::test]
async fn a_negotiation_that_is_cut_off_anywhere_fails() {
    let says = server_says();
    for cut in 0..says.len() {
        let error = connects(says[..cut].to_vec()).await.map(|_| ()).unwrap_err();
        assert!(matches!(error, ClientError::Gone(_)), "{cut}: {error}");
    }
}

#[tokio::test]
async fn a_negotiation_with_a_wrong_bit_never_hangs() {
    let says = server_says();
    for bit in 0..says.len() * 8 {
        let mut wrong = says.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        // A flipped bit in a size or a flag changes the export; any other one is an error.
        let _either = connects(wrong).await;
    }
}

#[tokio::test]
async fn garbage_instead_of_a_negotiation_is_an_error() {
    let mut random = fastrand::Rng::with_seed(3);
    for begin in [0, 18, 38] {
        for _ in 0..50 {
            let mut says = server_says()[..begin].to_vec();
            says.extend((0..random.usize(30..3000)).map(|_| random.u8(..)));
            assert!(connects(says).await.is_err());
        }
    }
}

#[tokio::test]
async fn answers_of_the_wrong_kind_length_or_number_are_errors() {
    let greeting = &server_says()[..18];
    let reply = raw::option_reply;
    let mut gigantic = reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]);
    gigantic[16..20].fill(0xff);
    let ack = reply(option::STRUCTURED_REPLY, option_reply::UNSUPPORTED, &[]);
    let info = |data: &[u8]| [&ack[..], &reply(option::GO, option_reply::INFO, data)].concat();
    let wrong = [
        gigantic,
        reply(option::GO, option_reply::ACK, &[]),
        reply(option::STRUCTURED_REPLY, option_reply::INFO, &[]),
        reply(option::STRUCTURED_REPLY, 0, &[]),
        [&ack[..], &reply(option::GO, option_reply::ACK, &[])].concat(),
        [&ack[..], &reply(option::GO, option_reply::UNKNOWN, b"\x1b[2Jno")].concat(),
        [&ack[..], &reply(option::GO, option_reply::SERVER, &[])].concat(),
        info(&[]),
        info(&[0, 0, 1, 2, 3]),
        info(&[0, 3, 0, 0, 0, 3]),
        info(&[0, 3, 0x80, 0, 0, 0]),
        info(&[0, 3, 0, 0, 0, 0]),
        info(&[0, 1, 0xff, 0xfe]),
        info(&[&[0, 1][..], &[b'x'; 5000]].concat()),
    ];
    for says in wrong {
        let error = connects([greeting, &says].concat()).await.map(|_| ()).unwrap_err();
        assert!(!matches!(error, ClientError::Gone(_)), "{says:?} is waited for: {error}");
        assert!(!error.to_string().contains('\x1b'), "a terminal is written to");
    }
    let mut old = greeting.to_vec();
    old[8..16].copy_from_slice(&0x0000_4202_8186_1253_u64.to_be_bytes());
    assert!(matches!(connects(old).await, Err(ClientError::Protocol(_))));
}

#[tokio::test]
async fn replies_without_an_end_are_ended() {
    let mut says = server_says()[..18].to_vec();
    says.extend_from_slice(&raw::option_reply(
        option::STRUCTURED_REPLY,
        option_reply::UNSUPPORTED,
        &[],
    ));
    says.extend_from_slice(
        &raw::option_reply(option::GO, option_reply::INFO, &[0, 9]).repeat(5000),
    );
    assert!(matches!(connects(says).await, Err(ClientError::Protocol(_))));
}

/// A client, and the server's end of its connection, after an honest negotiation.
async fn connected() -> (Client, DuplexStream) {
    let (ours, mut theirs) = duplex(1 << 20);
    let negotiating = async {
        let says = server_says();
        theirs.write_all(&says[..18]).await.unwrap();
        theirs.read_exact(&mut [0; 4]).await.unwrap();
        let mut rest = &says[18..];
        while !rest.is_empty() {
            let mut header = [0; 16];
            theirs.read_exact(&mut header).await.unwrap();
            let length = u32::from_be_bytes(header[12..].try_into().unwrap());
            theirs.read_exact(&mut vec![0; length as usize]).await.unwrap();
            // All replies to this option, whose number follows their magic number.
            while rest.get(8..12) == Some(&header[8..12]) {
                let length = u32::from_be_bytes(rest[16..20].try_into().unwrap());
                let (reply, after) = rest.split_at(20 + length as usize);
                theirs.write_all(reply).await.unwrap();
                rest = after;
            }
        }
    };
    let wanted = Wanted { name: "disk".to_owned(), tls: false, status: true };
    let both = async { tokio::join!(client::connect(ours, wanted), negotiating) };
    let (connected, ()) = timeout(LIMIT, both).await.unwrap();
    let (client, connection) = connected.unwrap();
    tokio::spawn(connection.run());
    (client, theirs)
}

/// The client's result when `says` answers its first request, whose cookie is 0: a read of 8
/// bytes at 4096 or, with `status`, a block status request.
async fn answered(says: &[u8], status: bool) -> Result<(), ClientError> {
    let (client, mut theirs) = connected().await;
    let asking = async {
        if status {
            client.extents(4096, 8).await.map(|_| ())
        } else {
            client.read(4096, 8).await.map(|data| assert_eq!(data, b"contents"))
        }
    };
    let answering = async {
        theirs.read_exact(&mut [0; HEADER]).await.unwrap();
        theirs.write_all(says).await.unwrap();
    };
    let (result, ()) = timeout(LIMIT, async { tokio::join!(asking, answering) }).await.unwrap();
    result
}

#[tokio::test]
async fn replies_that_are_no_answer_end_the_connection() {
    use wire::chunk::{BLOCK_STATUS, ERROR, NONE, OFFSET_DATA, OFFSET_HOLE};
    let data = |offset, data: &[u8]| chunk(OFFSET_DATA, 0, &behind(offset, data));
    let hole = |offset, length: u32| chunk(OFFSET_HOLE, 0, &behind(offset, &length.to_be_bytes()));
    let goes_on = |mut chunk: Vec<u8>| {
        chunk[5] = 0;
        chunk
    };
    let right = [data(4096, b"contents"), [&simple_reply(0, 0)[..], b"contents"].concat()];
    for says in right {
        answered(&says, false).await.unwrap();
    }
    answered(&[goes_on(data(4100, b"ents")), data(4096, b"cont")].concat(), false).await.unwrap();
    let extents = |numbers: &[u32]| {
        let content: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
        chunk(BLOCK_STATUS, 0, &content)
    };
    answered(&extents(&[1, 4, 3, 1 << 20, 0]), true).await.unwrap();
    let wrong = [
        (vec![0; 64], false),
        (simple_reply(0, 1), false),
        (simple_reply(0, u64::MAX), false),
        (chunk(NONE, 0, &[]), false),
        (chunk(NONE, 0, &[1]), false),
        (chunk(9, 0, &[]), false),
        (data(4096, b"content"), false),
        (data(4096, b"contents too long"), false),
        (data(4095, b"contents"), false),
        (data(4097, b"contents"), false),
        (data(u64::MAX, b"contents"), false),
        (data(0, b"contents"), false),
        (data(4096, b""), false),
        (chunk(OFFSET_DATA, 0, &[1, 2, 3]), false),
        (hole(4096, 9), false),
        (hole(4096, u32::MAX), false),
        (hole(4096, 0), false),
        (chunk(OFFSET_HOLE, 0, &[0; 13]), false),
        ([goes_on(data(4096, b"contents")), data(4096, b"contents")].concat(), false),
        ([goes_on(data(4096, b"cont")), simple_reply(0, 0)].concat(), false),
        (extents(&[1, 8, 0]), false),
        (chunk(ERROR, 0, &[1]), false),
        (chunk_of_length(OFFSET_DATA, 0, u32::MAX, &[]), false),
        (chunk_of_length(OFFSET_DATA, 0, MAX_PAYLOAD, &[]), false),
        (chunk_of_length(ERROR, 0, 1 << 20, &[]), false),
        (simple_reply(0, 0), true),
        (data(4096, b"contents"), true),
        (extents(&[1]), true),
        (extents(&[1, 8]), true),
        (extents(&[1, 0, 0]), true),
        (extents(&[1, 8, 0, 8, 0]), true),
        ([goes_on(extents(&[1, 4, 0])), extents(&[1, 4, 0])].concat(), true),
        (chunk(BLOCK_STATUS, 0, &[1]), true),
    ];
    for (says, status) in wrong {
        let error = answered(&says, status).await.unwrap_err();
        assert!(matches!(error, ClientError::Protocol(_)), "{says:?}: {error}");
    }
    let refused = answered(&chunk(ERROR, 0, &[0, 0, 0, 5, 0, 0]), false).await;
    assert!(matches!(refused, Err(ClientError::Refused(Errno::Io))));
    let odd = answered(&simple_reply(77, 0), false).await;
    assert!(matches!(odd, Err(ClientError::Refused(Errno::Invalid))), "an error nobody knows");
}

#[tokio::test]
async fn an_answer_that_comes_twice_ends_the_connection_and_all_who_wait_are_told() {
    let (client, mut theirs) = connected().await;
    let (first, second) = (client.clone(), client.clone());
    let first = tokio::spawn(async move { first.read(0, 4).await });
    theirs.read_exact(&mut [0; HEADER]).await.unwrap();
    let second = tokio::spawn(async move { second.read(4, 4).await });
    theirs.read_exact(&mut [0; HEADER]).await.unwrap();
    let once = [&simple_reply(0, 0)[..], b"once"].concat();
    theirs.write_all(&once).await.unwrap();
    theirs.write_all(&once).await.unwrap();
    assert_eq!(timeout(LIMIT, first).await.unwrap().unwrap().unwrap(), b"once");
    let told = timeout(LIMIT, second).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(told, ClientError::Protocol(ProtocolError::Broken(_))), "{told}");
    assert!(client.order(Command::Flush, 0, 0, 0).await.is_err(), "it is asked again");
}

/// Callers give up, but their requests stay in flight and are bounded.
#[tokio::test]
async fn a_server_that_takes_nothing_is_asked_no_more_than_so_much() {
    const MOST: usize = 16 << 20;
    let (client, mut theirs) = connected().await;
    let data = vec![1; 1 << 20];
    let mut ask = async |cookie: usize| {
        let asked = timeout(Duration::from_millis(1), client.write(0, data.clone().into())).await;
        // The server reports a write as done that it has not even read.
        theirs.write_all(&simple_reply(0, cookie as u64)).await.unwrap();
        match asked {
            Err(_) | Ok(Ok(())) => true,
            Ok(Err(ClientError::Owes(owes))) => {
                assert!(owes <= MOST + (1 << 20), "{owes}");
                false
            }
            Ok(Err(error)) => panic!("{error}"),
        }
    };
    let mut asked = 0;
    while asked < 64 && ask(asked).await {
        asked += 1;
    }
    assert!((8..=17).contains(&asked), "{asked} MiB wait for a server that takes nothing");
}

#[tokio::test]
async fn a_server_that_hangs_up_is_told_to_all_who_wait() {
    let (client, mut theirs) = connected().await;
    let asks = (0..50).map(|i| {
        let client = client.clone();
        tokio::spawn(async move { client.read(i * 512, 512).await })
    });
    let asks: Vec<_> = asks.collect();
    theirs.read_exact(&mut [0; HEADER * 50]).await.unwrap();
    theirs.write_all(&simple_reply(0, 7)[..9]).await.unwrap();
    drop(theirs);
    for ask in asks {
        let told = timeout(LIMIT, ask).await.unwrap().unwrap();
        assert!(matches!(told, Err(ClientError::Gone(_))), "{told:?}");
    }
}

/// Control characters in an error message do not get to a terminal. A client may ask for a name
/// that the server does not have.
#[tokio::test]
async fn a_name_that_is_not_there_is_refused() {
    let server =
        listen(std::sync::Arc::new(pageserver::repository::Repository::new(0, 1).unwrap()));
    let long = "x".repeat(4096);
    for name in ["", "\0", "lease/1", "\u{7f}\u{1b}", &long] {
        let error = server.client(name).await.map(|_| ()).unwrap_err();
        let refused = matches!(error, ClientError::Protocol(ProtocolError::Refused { .. }));
        assert!(refused, "{name:?}: {error}");
    }
    assert!(server.client(&"x".repeat(5000)).await.is_err());
}
