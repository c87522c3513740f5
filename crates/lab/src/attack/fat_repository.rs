//! `fat_repository SOCKET`: a repository that claims to lend 1 TiB, and reads no request.
//!
//! Of two connections, it sends no reply on one. On the other it reports success for requests
//! that it has not read.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use pageserver::nbd::negotiation::{Exports, Negotiation, Step, Tls};
use pageserver::nbd::reply;
use pageserver::nbd::request::Export;

use super::has_gone;
use crate::lab::LabError;

/// The size that it claims to lend, in bytes.
const SAYS: u64 = 1 << 40;
/// Replies in one batch, to requests that were not read, and the pause between two batches.
const ANSWERS: u64 = 64;
const REST: Duration = Duration::from_millis(20);

struct Lends;

impl Exports for Lends {
    fn list(&self) -> Vec<String> {
        Vec::new()
    }

    fn find(&self, _: &str) -> Option<Export> {
        Some(Export { size: SAYS, read_only: false, block: 1 })
    }
}

pub(super) fn attack(args: &[String]) -> Result<(), LabError> {
    let [socket] = args else {
        return Err(io::Error::other("fat_repository takes the path of a socket").into());
    };
    let listener = UnixListener::bind(Path::new(socket))?;
    println!("saw: {socket} is there");
    for (number, stream) in listener.incoming().enumerate() {
        let stream = stream?;
        std::thread::spawn(move || {
            let name = serve(stream, number % 2 == 1).unwrap_or_else(|error| error.to_string());
            println!("saw: {name}");
        });
    }
    Ok(())
}

/// Negotiates, and then reads no request until the client has closed the connection.
fn serve(mut stream: UnixStream, answers: bool) -> io::Result<String> {
    let name = negotiate(&mut stream)?;
    println!("saw: a client wants {name} and is told of {SAYS} bytes");
    let mut cookie = 0;
    loop {
        let mut out = Vec::new();
        for _ in 0..ANSWERS {
            reply::simple(&mut out, cookie, Ok(()));
            cookie += 1;
        }
        std::thread::sleep(REST);
        if answers && stream.write_all(&out).is_err() || has_gone(&stream) {
            return Ok(format!("the client of {name} has gone"));
        }
    }
}

fn negotiate(stream: &mut UnixStream) -> io::Result<String> {
    let (mut input, mut out, mut room) = (Vec::new(), Vec::new(), [0; 4096]);
    let mut negotiation = Negotiation::new(Tls::Absent, &mut out);
    loop {
        while let Some((length, step)) =
            negotiation.advance(&input, &Lends, &mut out).map_err(io::Error::other)?
        {
            input.drain(..length);
            if let Step::Chosen(session) = step {
                stream.write_all(&out)?;
                return Ok(session.name);
            }
        }
        stream.write_all(&out)?;
        out.clear();
        match stream.read(&mut room)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => input.extend_from_slice(&room[..n]),
        }
    }
}
