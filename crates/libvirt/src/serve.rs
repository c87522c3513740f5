//! Serves the daemon: a unix socket, lines of JSON both ways ([`model::libvirt`]).
//!
//! Each client has a thread that sends and one that receives. Each request has a thread and a
//! connection to libvirt of its own: a call that does not come back delays no other one.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use model::libvirt::{DomainChange, FromLibvirt, ToLibvirt};
use virt::connect::Connect;
use virt::domain::Domain;

use crate::board::{Board, line};
use crate::places::CallPlaces;
use crate::wake::WAKE;
use crate::{raw, said, watch};

/// Maximum number of clients: the daemon, and a release.
const MOST_CLIENTS: usize = 8;
/// Maximum number of requests in flight: libvirt has 20 workers for all its clients.
const MOST_REQUESTS: usize = 8;
/// Maximum length of a request.
const MOST_BYTES: u64 = 4096;
/// Timeout of a write to a client that does not read.
const PATIENCE: Duration = Duration::from_secs(5);

/// Watches libvirt's domains and answers on `socket`, until the process is killed.
///
/// # Errors
/// The socket cannot be made.
pub(crate) fn run(uri: &str, socket: &Path) -> io::Result<()> {
    // A socket that an earlier process has left has no listener.
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    virt::error::clear_error_callback();
    raw::start_events();
    let server = Arc::new(LibvirtServer {
        uri: uri.to_owned(),
        board: Board::default(),
        clients: CallPlaces::new(MOST_CLIENTS),
        requests: CallPlaces::new(MOST_REQUESTS),
    });
    let watched = Arc::clone(&server);
    thread::spawn(move || watch::run(&watched.uri, &watched.board));
    for stream in listener.incoming() {
        let (stream, server) = (stream?, Arc::clone(&server));
        if let Some(place) = server.clients.take() {
            thread::spawn(move || {
                // A client that has gone, or does not read, has no use for an error.
                let _ = server.attend(&stream);
                drop(place);
            });
        }
    }
    Ok(())
}

struct LibvirtServer {
    uri: String,
    board: Board,
    clients: CallPlaces,
    requests: CallPlaces,
}

impl LibvirtServer {
    /// Sends a client the news, and answers its requests, until it goes.
    fn attend(self: &Arc<Self>, stream: &UnixStream) -> io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let writer = Arc::new(Mutex::new(stream.try_clone()?));
        let (server, to_client) = (Arc::clone(self), Arc::clone(&writer));
        thread::spawn(move || {
            let mut seen = 0;
            loop {
                let (number, line) = server.board.after(seen);
                seen = number;
                if send(&to_client, &line).is_err() {
                    return;
                }
            }
        });
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if (&mut reader).take(MOST_BYTES).read_line(&mut line)? == 0 {
                return Ok(());
            }
            let request: ToLibvirt = serde_json::from_str(&line)?;
            self.begin(request, &writer);
        }
    }

    fn begin(self: &Arc<Self>, request: ToLibvirt, writer: &Arc<Mutex<UnixStream>>) {
        let (server, writer) = (Arc::clone(self), Arc::clone(writer));
        let id = request.id;
        let answer = move |refusal: Option<String>| {
            // The client may have gone.
            let _ = send(&writer, &line(&FromLibvirt::Answer { id, refusal }));
        };
        let Some(place) = self.requests.take() else {
            return answer(Some(format!("{MOST_REQUESTS} calls of libvirt do not come back")));
        };
        thread::spawn(move || {
            answer(change(&server.uri, &request).err());
            drop(place);
        });
    }
}

/// Sends a whole line; a client that does not take it in time is let go.
fn send(to: &Mutex<UnixStream>, line: &[u8]) -> io::Result<()> {
    let mut stream = to.lock().unwrap_or_else(PoisonError::into_inner);
    stream.write_all(line).inspect_err(|_| {
        // It is gone already, or half a line has reached it.
        let _ = stream.shutdown(Shutdown::Both);
    })
}

/// Changes a running domain. Its persistent description stays as it is.
fn change(uri: &str, request: &ToLibvirt) -> Result<(), String> {
    let is_uuid = |text: &str| text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    if !is_uuid(&request.uuid) {
        return Err("no UUID".to_owned());
    }
    let change = || {
        let connect = Connect::open(Some(uri))?;
        let domain = Domain::lookup_by_uuid_string(&connect, &request.uuid)?;
        match request.change {
            DomainChange::Memory(size) => {
                if raw::is_job(&domain.get_job_info()?) {
                    return Ok(Err("a job of libvirt is under way (a migration?)".to_owned()));
                }
                domain.set_memory_flags(size.0 >> 10, virt_sys::VIR_DOMAIN_MEM_LIVE)?;
            }
            DomainChange::StatsPeriod(seconds) => {
                let seconds = i32::try_from(seconds).unwrap_or(i32::MAX);
                domain.set_memory_stats_period(seconds, virt_sys::VIR_DOMAIN_MEM_LIVE)?;
                // libvirt announces no such change.
                WAKE.wake(true);
            }
        }
        Ok(Ok(()))
    };
    change().unwrap_or_else(|error| Err(said(&error)))
}
