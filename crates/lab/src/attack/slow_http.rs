//! `slow_http ADDRESS`: a client of the API over TCP, without the token. It takes all connections
//! with half requests and never sends the rest.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread::sleep;
use std::time::Duration;

use crate::lab::LabError;

/// Connections that are held at once, unless the daemon ends them.
const HELD: usize = 200;

pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let [address] = args else { return Err(super::usage("slow_http ADDRESS")) };
    let mut held: Vec<TcpStream> = Vec::new();
    loop {
        while held.len() < HELD {
            let mut stream = TcpStream::connect(address)?;
            // A connection that is cut off at once counts as cut off, too.
            let _ = stream.write_all(b"POST /v1/release HTTP/1.1\r\nHost: x\r\n");
            held.push(stream);
        }
        sleep(Duration::from_millis(500));
        let before = held.len();
        held.retain(is_open);
        println!("saw: of {before} halves of requests {} were cut off", before - held.len());
    }
}

fn is_open(mut stream: &TcpStream) -> bool {
    let is_silent = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    stream.set_nonblocking(true).is_ok()
        && stream.read(&mut [0; 1]).err().is_some_and(|error| is_silent(&error))
}
