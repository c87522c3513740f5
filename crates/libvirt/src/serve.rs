//! Serves the daemon: a unix socket, lines of JSON both ways ([`model::libvirt`]).
//!
//! Each client has a thread that sends and one that receives. Both end with the connection, and so
//! does the client's place. Each request has a thread and a connection to libvirt of its own: a
//! call that does not come back delays no call about another domain.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use model::libvirt::{DomainChange, DomainProcess, FromLibvirt, ToLibvirt};
use sys::clock::boot_now;
use virt::domain::Domain;

use crate::board::{Board, line};
use crate::calls::DomainCalls;
use crate::connection::OpenConnection;
use crate::places::{CallPlace, CallPlaces};
use crate::qemu::process_of;
use crate::wake::WAKE;
use crate::{raw, said, watch};

/// Maximum number of clients: the daemon, and a release.
const MOST_CLIENTS: usize = 8;
/// Maximum number of requests in flight, at most one for each domain.
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
    let server = LibvirtServer::new(uri);
    let watched = Arc::clone(&server);
    thread::spawn(move || watch::run(&watched.uri, &watched.board));
    server.welcome_all(&listener)
}

struct LibvirtServer {
    uri: String,
    board: Board,
    clients: CallPlaces,
    calls: DomainCalls,
}

impl LibvirtServer {
    fn new(uri: &str) -> Arc<Self> {
        Arc::new(Self {
            uri: uri.to_owned(),
            board: Board::default(),
            clients: CallPlaces::new(MOST_CLIENTS),
            calls: DomainCalls::new(MOST_REQUESTS),
        })
    }

    fn welcome_all(self: &Arc<Self>, listener: &UnixListener) -> io::Result<()> {
        listener.incoming().try_for_each(|stream| self.welcome(stream?))
    }

    /// Gives a new client its place and its threads.
    fn welcome(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let Some(place) = self.clients.take() else {
            let why = format!("{MOST_CLIENTS} clients of overbook-libvirt are connected already");
            // The client may have gone.
            let _ = (&stream).write_all(&line(&FromLibvirt::Lost { why }));
            return Ok(());
        };
        let client = Arc::new(LibvirtClient { stream, turn: Mutex::default(), _place: place });
        let (server, receiver) = (Arc::clone(self), Arc::downgrade(&client));
        thread::spawn(move || server.inform(&receiver));
        let server = Arc::clone(self);
        thread::spawn(move || {
            // A client that has gone, or does not read, has no use for an error.
            let _ = server.attend(&client);
            client.close();
        });
        Ok(())
    }

    /// Sends a client the news until it goes.
    fn inform(&self, client: &Weak<LibvirtClient>) {
        let mut seen = 0;
        loop {
            let (number, line) = self.board.after(seen);
            seen = number;
            let sent = client.upgrade().map(|client| client.send(&line));
            if !matches!(sent, Some(Ok(()))) {
                return;
            }
        }
    }

    /// Answers a client's requests until it goes.
    fn attend(self: &Arc<Self>, client: &Arc<LibvirtClient>) -> io::Result<()> {
        let mut reader = BufReader::new(&client.stream);
        loop {
            let mut line = String::new();
            if (&mut reader).take(MOST_BYTES).read_line(&mut line)? == 0 {
                return Ok(());
            }
            self.begin(serde_json::from_str(&line)?, client);
        }
    }

    fn begin(self: &Arc<Self>, request: ToLibvirt, client: &Arc<LibvirtClient>) {
        let call = match self.calls.begin(&request.uuid) {
            Ok(call) => call,
            Err(why) => return client.answer(request.id, Some(why)),
        };
        // A call that does not come back keeps no client's place.
        let (server, client) = (Arc::clone(self), Arc::downgrade(client));
        thread::spawn(move || {
            let refusal = change(&server.uri, &request).err();
            drop(call);
            if let Some(client) = client.upgrade() {
                client.answer(request.id, refusal);
            }
        });
    }
}

/// A connected client.
struct LibvirtClient {
    stream: UnixStream,
    /// Held while a line is sent.
    turn: Mutex<()>,
    _place: CallPlace,
}

impl LibvirtClient {
    /// Sends a whole line; a client that does not take it in time is let go.
    fn send(&self, line: &[u8]) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // It is gone already, or half a line has reached it.
        (&self.stream).write_all(line).inspect_err(|_| self.close())
    }

    fn answer(&self, id: u64, refusal: Option<String>) {
        // The client may have gone.
        let _ = self.send(&line(&FromLibvirt::Answer { id, refusal }));
    }

    /// Ends the connection, and with it both threads.
    fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Changes a running domain. Its persistent description stays as it is.
fn change(uri: &str, request: &ToLibvirt) -> Result<(), String> {
    let is_uuid = |text: &str| text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    if !is_uuid(&request.uuid) {
        return Err("no UUID".to_owned());
    }
    let told = |error: virt::error::Error| said(&error);
    let connect = OpenConnection::open(uri).map_err(told)?;
    let domain = Domain::lookup_by_uuid_string(&connect, &request.uuid).map_err(told)?;
    if matches!(request.change, DomainChange::Memory(_))
        && raw::is_job(&domain.get_job_info().map_err(told)?)
    {
        return Err("a job of libvirt is under way (a migration?)".to_owned());
    }
    check(request, process_of(&domain.get_name().map_err(told)?))?;
    match request.change {
        DomainChange::Memory(size) => {
            let kib = size.0 >> 10;
            domain.set_memory_flags(kib, virt_sys::VIR_DOMAIN_MEM_LIVE).map_err(told)?;
        }
        DomainChange::StatsPeriod(seconds) => {
            let seconds = i32::try_from(seconds).unwrap_or(i32::MAX);
            let live = virt_sys::VIR_DOMAIN_MEM_LIVE;
            domain.set_memory_stats_period(seconds, live).map_err(told)?;
            // libvirt announces no such change.
            WAKE.wake(true);
        }
    }
    Ok(())
}

/// Whether the change is still wanted: its sender waits, and `now` is the process it was meant for.
fn check(request: &ToLibvirt, now: Option<DomainProcess>) -> Result<(), String> {
    if now != Some(request.process) {
        return Err("the QEMU for which this was decided has ended".to_owned());
    }
    if boot_now() >= request.before {
        return Err("not changed, because libvirt took too long to answer".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
