//! A program that is started like a QEMU and belongs to no tenant. It claims the names of another
//! tenant's VMs, listens as their shim would, and waits for their shared pages.
//!
//! `SOCKET NAME...`: listens for QMP at `SOCKET`, and answers each connection with the next name.

use std::ffi::CString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use protocol::layout::{Counter, Layout, Shared};
use protocol::{Answer, MAX_PACKET, Merged, Region, Request, State, Status, Taken};
use rustix::fs::SeekFrom;
use serde_json::{Value, json};
use sys::memory_map::{PAGE_BYTES, PAGE_LEN};
use sys::seqpacket::{Connection, Listener};
use sys::shared_memory::SharedMemory;

use super::saw;
use crate::lab::LabError;

/// Its RAM in pages: the least that counts as a guest's.
const PAGES: u32 = 8192;
/// Balloon readings after which a connection ends, if there is another name to claim.
const READINGS: u32 = 3;
const POLL: Duration = Duration::from_millis(1);

pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let (socket, names) = args.split_first().ok_or_else(|| io::Error::other("SOCKET NAME..."))?;
    let (listener, names) = (UnixListener::bind(socket)?, names.to_vec());
    std::thread::spawn(move || {
        for (name, stream) in names.iter().cycle().zip(listener.incoming()) {
            // The daemon may hang up at any moment.
            let _ = stream.and_then(|stream| serve(stream, name, names.len() > 1));
        }
    });
    Shim::listen()?.serve()
}

fn serve(stream: UnixStream, name: &str, is_fickle: bool) -> io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    writeln!(stream, "{}", json!({"QMP": {"version": {}, "capabilities": []}}))?;
    let mut readings = 0;
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let message: Value = serde_json::from_str(&line)?;
        let command = message["execute"].as_str().unwrap_or_default();
        if command == "query-name" {
            saw(&format!("it was asked for its name, and said {name}"));
        }
        readings += u32::from(command == "query-balloon");
        if is_fickle && readings > READINGS {
            return Ok(());
        }
        writeln!(stream, "{}", json!({"return": answer(&message, name), "id": message["id"]}))?;
    }
}

fn answer(message: &Value, name: &str) -> Value {
    let ram = u64::from(PAGES) * PAGE_BYTES;
    let property = message["arguments"]["property"].as_str().unwrap_or_default();
    match (message["execute"].as_str().unwrap_or_default(), property) {
        ("query-name", _) => json!({"name": name}),
        ("query-memdev", _) => json!([{"size": ram}]),
        ("query-memory-size-summary", _) => json!({"base-memory": ram, "plugged-memory": 0}),
        ("query-balloon", _) => json!({"actual": ram}),
        ("query-status", _) => json!({"status": "running"}),
        ("qom-list", _) => json!([{"name": "b0", "type": "child<virtio-balloon-pci>"}]),
        (_, "guest-stats-polling-interval") => json!(1),
        (_, "guest-stats") => json!({"stats": {"stat-free-memory": 4096}, "last-update": 0}),
        (_, "free-page-reporting") => json!(true),
        _ => json!({}),
    }
}

/// A stand-in for a shim, which looks like one from outside.
struct Shim {
    listener: Listener,
    memory: SharedMemory,
    fd: OwnedFd,
    layout: Layout,
    regions: Vec<Region>,
    /// Its RAM, each page of one content.
    _ram: Vec<u8>,
}

impl Shim {
    fn listen() -> Result<Self, LabError> {
        let ram = vec![7; (PAGES as usize + 1) * PAGE_LEN];
        let address = (ram.as_ptr().addr().next_multiple_of(PAGE_LEN)) as u64;
        let regions = vec![Region { first_page: 0, pages: PAGES, address }];
        let layout = Layout::of_regions(&regions);
        let failed = |error: &dyn ToString| io::Error::other(error.to_string());
        let (memory, fd) = SharedMemory::create("attack", layout.words(), layout.bytes())
            .map_err(|error| failed(&error))?;
        Shared::initialise(layout, 1, memory.words(), memory.bytes())
            .map_err(|error| failed(&error))?;
        let nonce = sys::random::word();
        let listener = Listener::bind(&protocol::address(std::process::id(), nonce))
            .map_err(|error| failed(&error))?;
        let name = CString::new(protocol::listener_name(nonce)).unwrap_or_default();
        rustix::thread::set_name(&name).map_err(io::Error::from)?;
        Ok(Self { listener, memory, fd, layout, regions, _ram: ram })
    }

    /// Answers every client, for ever.
    fn serve(&self) -> ! {
        let mut connection = None;
        loop {
            if let Ok(Some(new)) = self.listener.accept() {
                saw("a worker has come");
                connection = Some(new);
            }
            if let Some(there) = &connection
                && !self.answer_all(there)
            {
                connection = None;
            }
            std::thread::sleep(POLL);
        }
    }

    /// `false`: the worker has disconnected.
    fn answer_all(&self, connection: &Connection) -> bool {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            let packet = match connection.receive(&mut buffer) {
                Ok(Some(packet)) => packet,
                Ok(None) => return true,
                Err(_) => return false,
            };
            let (id, Ok(request)) = Request::decode(&buffer[..packet.length]) else { continue };
            if let (Request::Pool { .. }, Some(pool)) = (&request, packet.fd) {
                watch(pool);
            }
            let fd = matches!(request, Request::Hello { .. }).then(|| self.fd.as_fd());
            let Ok(answer) = self.answer(&request).encode(id) else { continue };
            if connection.send(&answer, fd).is_err() {
                return false;
            }
        }
    }

    fn answer(&self, request: &Request) -> Answer {
        match request {
            Request::Hello { version } => {
                let (version, regions) = (*version, self.regions.clone());
                Answer::Welcome { version, regions, state: State::Off }
            }
            Request::About => Answer::About { release: "0".to_owned() },
            Request::Status => {
                let shared = Shared::open(self.layout, self.memory.words(), self.memory.bytes());
                shared.iter().for_each(|shared| shared.set(Counter::RoundTripNs, 20_000));
                let generation = shared.map_or(1, |shared| shared.generation());
                Answer::Status(Status { state: State::Off, generation, staging: Vec::new() })
            }
            Request::Merge { .. } => Answer::Merged(Merged::default()),
            Request::Take { .. } => Answer::Taken(Taken::default()),
            _ => Answer::Done { count: 0 },
        }
    }
}

/// Reports when it can read a page of another process in the pool.
fn watch(pool: OwnedFd) {
    saw("it was given the pool");
    std::thread::spawn(move || {
        let mut page = [0; PAGE_LEN];
        loop {
            let data = rustix::fs::seek(&pool, SeekFrom::Data(0));
            if data.is_ok_and(|at| rustix::io::pread(&pool, &mut page, at) == Ok(PAGE_LEN)) {
                return saw("it read a page of the pool");
            }
            std::thread::sleep(POLL);
        }
    });
}
