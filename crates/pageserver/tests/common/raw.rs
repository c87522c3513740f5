//! Encoded messages, for peers that violate the protocol.

use pageserver::nbd::dialogue::{self, Dialogue, Wanted};
use pageserver::nbd::negotiation::{self, Exports, Negotiation, Tls};
use pageserver::nbd::request::{Command, Export, Request};
use pageserver::nbd::wire::{self, chunk, option};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::LIMIT;

/// An option of a client.
pub(crate) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    option_of_length(number, u32::try_from(data.len()).unwrap(), data)
}

/// An option whose header claims this length.
pub(crate) fn option_of_length(number: u32, length: u32, data: &[u8]) -> Vec<u8> {
    let mut message = wire::IHAVEOPT.to_be_bytes().to_vec();
    message.extend_from_slice(&number.to_be_bytes());
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(data);
    message
}

/// A server's reply to an option.
pub(crate) fn option_reply(number: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut message = wire::OPTION_REPLY.to_be_bytes().to_vec();
    message.extend_from_slice(&number.to_be_bytes());
    message.extend_from_slice(&kind.to_be_bytes());
    message.extend_from_slice(&u32::try_from(data.len()).unwrap().to_be_bytes());
    message.extend_from_slice(data);
    message
}

/// A client's flags: fixed newstyle, and no zeros.
pub(crate) fn flags() -> [u8; 4] {
    3_u32.to_be_bytes()
}

/// Chooses an export.
pub(crate) fn go(name: &str) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&[0, 0]);
    option(option::GO, &data)
}

/// A request without its payload.
pub(crate) fn request(command: Command, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut message = Vec::new();
    Request { flags: 0, command: Some(command), cookie, offset, length }.encode(&mut message);
    message
}

/// A simple reply without data.
pub(crate) fn simple_reply(error: u32, cookie: u64) -> Vec<u8> {
    let mut message = wire::SIMPLE_REPLY.to_be_bytes().to_vec();
    message.extend_from_slice(&error.to_be_bytes());
    message.extend_from_slice(&cookie.to_be_bytes());
    message
}

/// The last chunk of a reply, whose header claims this length.
pub(crate) fn chunk_of_length(kind: u16, cookie: u64, length: u32, content: &[u8]) -> Vec<u8> {
    let mut message = wire::STRUCTURED_REPLY.to_be_bytes().to_vec();
    message.extend_from_slice(&chunk::DONE.to_be_bytes());
    message.extend_from_slice(&kind.to_be_bytes());
    message.extend_from_slice(&cookie.to_be_bytes());
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(content);
    message
}

/// The last chunk of a reply.
pub(crate) fn chunk(kind: u16, cookie: u64, content: &[u8]) -> Vec<u8> {
    chunk_of_length(kind, cookie, u32::try_from(content.len()).unwrap(), content)
}

/// Data, or a number, after its offset.
pub(crate) fn behind(offset: u64, content: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes(), content].concat()
}

/// Reads a server's greeting, and answers it.
pub(crate) async fn greet(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).await.unwrap();
    stream.write_all(&flags()).await.unwrap();
}

/// The next reply to an option: the option's number, its type, its data.
pub(crate) async fn hear(stream: &mut (impl AsyncRead + Unpin)) -> (u32, u32, Vec<u8>) {
    let mut header = [0; 20];
    timeout(LIMIT, stream.read_exact(&mut header)).await.unwrap().unwrap();
    let number = |at| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut data = vec![0; number(16) as usize];
    timeout(LIMIT, stream.read_exact(&mut data)).await.unwrap().unwrap();
    (number(8), number(12), data)
}

/// Negotiates until requests can be sent.
pub(crate) async fn choose(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), name: &str) {
    greet(stream).await;
    stream.write_all(&go(name)).await.unwrap();
    while hear(stream).await.1 != wire::option_reply::ACK {}
}

/// Reads until the peer ends the connection, which it must do.
pub(crate) async fn to_the_end(stream: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut all = Vec::new();
    let ended = timeout(LIMIT, stream.read_to_end(&mut all)).await;
    assert!(ended.is_ok(), "the connection goes on");
    all
}

struct DiskExport;

/// The disk of a simulated server.
pub(crate) const DISK: Export = Export { size: 1 << 20, read_only: false, block: 1 };

impl Exports for DiskExport {
    fn list(&self) -> Vec<String> {
        Vec::new()
    }

    fn find(&self, name: &str) -> Option<Export> {
        (name == "disk").then_some(DISK)
    }
}

/// All messages of an honest server to a client that wants its disk and block status.
pub(crate) fn server_says() -> Vec<u8> {
    let (mut says, mut hears) = (Vec::new(), Vec::new());
    let mut negotiation = Negotiation::new(Tls::Absent, &mut says);
    let wanted = Wanted { name: "disk".to_owned(), tls: false, status: true };
    let mut dialogue = Dialogue::new(wanted);
    let (mut said, mut heard) = (0, 0);
    loop {
        while let Some((length, step)) = dialogue.advance(&says[said..], &mut hears).unwrap() {
            said += length;
            if matches!(step, dialogue::Step::Ready(_)) {
                return says;
            }
        }
        while let Some((length, step)) =
            negotiation.advance(&hears[heard..], &DiskExport, &mut says).unwrap()
        {
            heard += length;
            if matches!(step, negotiation::Step::Chosen(_)) {
                break;
            }
        }
    }
}
