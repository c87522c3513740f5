//! A lean NBD client: it loads a server at the least CPU cost of its own.
//!
//! It has one thread and one blocking socket, and keeps a number of requests in flight. It reads
//! the available data, parses all replies in it, and sends the same number of new requests at
//! once. It does not look at the data of reads. Servers under its load therefore differ only by
//! their own cost.

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pageserver::nbd::dialogue::{Dialogue, Step, Wanted};
use pageserver::nbd::reply::{CHUNK, SIMPLE};
use pageserver::nbd::request::{Command, HEADER, Request};
use pageserver::nbd::wire::{Bytes, SIMPLE_REPLY, STRUCTURED_REPLY, chunk};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::pinning;
use crate::random::Random;

/// Size of each random read or write, in bytes.
pub(crate) const PAGE: u32 = 4096;
/// The export that every server is asked for.
pub(crate) const EXPORT: &str = "memory";
/// Size of the receive buffer, in bytes.
const ROOM: usize = 1 << 20;
/// Timeout after which a silent server counts as dead.
const SILENCE: Duration = Duration::from_secs(20);

/// Address of a server.
#[derive(Clone, Debug)]
pub(crate) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
    /// With the directory of the certificates.
    Tls(SocketAddr, PathBuf),
}

/// Result of some seconds of load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) requests: u32,
    pub(crate) per_s: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

pub(crate) trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

/// A connection to a server.
pub(crate) struct Load {
    stream: Box<dyn Stream>,
    input: Vec<u8>,
    /// Received data that is not a whole reply yet.
    unread: std::ops::Range<usize>,
    size: u64,
}

impl Load {
    /// Connects, and chooses the export of this name.
    pub(crate) fn connect(address: &Address, export: &str) -> io::Result<Self> {
        let tls = matches!(address, Address::Tls(..));
        let mut dialogue = Dialogue::new(Wanted { name: export.to_owned(), tls, status: false });
        let (stream, size): (Box<dyn Stream>, _) = match address {
            Address::Unix(path) => {
                let mut stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(SILENCE))?;
                let size = talk(&mut stream, &mut dialogue, Vec::new())?;
                (Box::new(stream), size)
            }
            Address::Tcp(to) => {
                let mut stream = connect_tcp(*to)?;
                let size = talk(&mut stream, &mut dialogue, Vec::new())?;
                (Box::new(stream), size)
            }
            Address::Tls(to, directory) => {
                let mut stream = connect_tcp(*to)?;
                talk(&mut stream, &mut dialogue, Vec::new())?;
                let mut stream = Tls::over(stream, *to, directory)?;
                let mut out = Vec::new();
                dialogue.secured(&mut out);
                let size = talk(&mut stream, &mut dialogue, out)?;
                (Box::new(stream), size)
            }
        };
        let size = size.ok_or_else(|| broken("the server chooses no export"))?;
        Ok(Self { stream, input: vec![0; ROOM], unread: 0..0, size })
    }

    /// Writes every page once.
    pub(crate) fn fill(&mut self) -> io::Result<()> {
        let mut pages = (0..self.size / u64::from(PAGE)).map(|page| page * u64::from(PAGE));
        self.drive(Command::Write, PAGE, 16, |_| pages.next()).map(|_| ())
    }

    /// Reads or writes the first `total` bytes in sequence, in requests of `length` bytes with
    /// `depth` in flight. Returns the rate in MB (10^6 bytes) per second.
    pub(crate) fn stream(
        &mut self,
        command: Command,
        (length, depth): (u32, u32),
        total: u64,
    ) -> io::Result<f64> {
        let mut places = (0..total / u64::from(length)).map(|n| n * u64::from(length));
        let began = Instant::now();
        let took = self.drive(command, length, depth, |_| places.next())?;
        let bytes = took.len() as f64 * f64::from(length);
        Ok(bytes / 1e6 / began.elapsed().as_secs_f64())
    }

    /// Reads or writes pages at random for `time`, with `depth` requests in flight.
    pub(crate) fn measure(
        &mut self,
        command: Command,
        depth: u32,
        time: Duration,
        seed: u64,
    ) -> io::Result<Rate> {
        let mut random = Random::new(seed);
        let last = self.size / u64::from(PAGE) - 1;
        let began = Instant::now();
        let mut next =
            |now: Instant| (now - began < time).then(|| random.between(0, last) * u64::from(PAGE));
        let mut took = self.drive(command, PAGE, depth, &mut next)?;
        Ok(Rate::of(&mut took, began.elapsed()))
    }

    /// Keeps `depth` requests in flight while `next` names an offset. Returns the latency of
    /// each, in nanoseconds.
    fn drive(
        &mut self,
        command: Command,
        length: u32,
        depth: u32,
        mut next: impl FnMut(Instant) -> Option<u64>,
    ) -> io::Result<Vec<u32>> {
        let data = vec![0x5a_u8; length as usize];
        let mut ask = |out: &mut Vec<u8>, cookie: u64, now: Instant| {
            let Some(offset) = next(now) else { return false };
            let request = Request { flags: 0, command: Some(command), cookie, offset, length };
            request.encode(out);
            if command == Command::Write {
                out.extend_from_slice(&data);
            }
            true
        };
        let (mut took, mut out) = (Vec::new(), Vec::new());
        let mut now = Instant::now();
        let mut sent = vec![now; depth as usize];
        let mut under_way = (0..depth).filter(|n| ask(&mut out, u64::from(*n), now)).count();
        self.stream.write_all(&out)?;
        while under_way > 0 {
            self.receive()?;
            now = Instant::now();
            out.clear();
            let brings = if command == Command::Read { length as usize } else { 0 };
            while let Some((length, done)) = parse(&self.input[self.unread.clone()], brings)? {
                self.unread.start += length;
                let Some(cookie) = done else { continue };
                let sent = usize::try_from(cookie).ok().and_then(|n| sent.get_mut(n));
                let sent = sent.ok_or_else(|| broken("an answer to nothing"))?;
                let ns = now.saturating_duration_since(*sent).as_nanos();
                took.push(u32::try_from(ns).unwrap_or(u32::MAX));
                *sent = now;
                under_way -= usize::from(!ask(&mut out, cookie, now));
            }
            if !out.is_empty() {
                self.stream.write_all(&out)?;
            }
        }
        Ok(took)
    }

    fn receive(&mut self) -> io::Result<()> {
        if self.unread.is_empty() {
            self.unread = 0..0;
        } else if self.unread.end > ROOM / 2 {
            self.input.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        match self.stream.read(&mut self.input[self.unread.end..])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.unread.end += n;
                Ok(())
            }
        }
    }
}

impl Rate {
    fn of(took_ns: &mut [u32], elapsed: Duration) -> Self {
        took_ns.sort_unstable();
        let at = |part: usize| {
            let ns = took_ns.get(took_ns.len() * part / 100).copied();
            ns.map_or(f64::NAN, |ns| f64::from(ns) / 1e3)
        };
        let requests = u32::try_from(took_ns.len()).unwrap_or(u32::MAX);
        let per_s = f64::from(requests) / elapsed.as_secs_f64();
        Self { requests, per_s, p50_us: at(50), p99_us: at(99) }
    }
}

/// The reply, or part of one, at the front of `input`: its length, and the request that it
/// completes. `brings` is the number of data bytes after a simple reply.
fn parse(input: &[u8], brings: usize) -> io::Result<Option<(usize, Option<u64>)>> {
    let mut bytes = Bytes::new(input);
    let (length, done) = match bytes.u32() {
        Some(SIMPLE_REPLY) => {
            let (Some(error), Some(cookie)) = (bytes.u32(), bytes.u64()) else { return Ok(None) };
            if error != 0 {
                return Err(broken("the server says that it failed"));
            }
            (SIMPLE + brings, Some(cookie))
        }
        Some(STRUCTURED_REPLY) => {
            let head = (bytes.u16(), bytes.u16(), bytes.u64(), bytes.u32());
            let (Some(flags), Some(kind), Some(cookie), Some(length)) = head else {
                return Ok(None);
            };
            if kind & chunk::ERROR_BIT != 0 {
                return Err(broken("the server says that it failed"));
            }
            (CHUNK + length as usize, (flags & chunk::DONE != 0).then_some(cookie))
        }
        Some(_) => return Err(broken("what comes is no reply")),
        None => return Ok(None),
    };
    Ok((input.len() >= length).then_some((length, done)))
}

/// Negotiates. Returns the export's size, or `None` when TLS is next.
pub(crate) fn talk(
    stream: &mut impl Stream,
    dialogue: &mut Dialogue,
    mut out: Vec<u8>,
) -> io::Result<Option<u64>> {
    let (mut input, mut room) = (Vec::new(), [0; 4096]);
    loop {
        while let Some((length, step)) =
            dialogue.advance(&input, &mut out).map_err(io::Error::other)?
        {
            input.drain(..length);
            match step {
                Step::Next => {}
                Step::StartTls => return Ok(None),
                Step::Ready(session) => return Ok(Some(session.export.size)),
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

fn broken(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn connect_tcp(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    Ok(stream)
}

/// TLS that takes all available records at once.
struct Tls {
    session: ClientConnection,
    socket: BufReader<TcpStream>,
}

impl Tls {
    fn over(stream: TcpStream, to: SocketAddr, directory: &Path) -> io::Result<Self> {
        let read = |name: &str| CertificateDer::from_pem_file(directory.join(name));
        let mut roots = RootCertStore::empty();
        roots.add(read("ca-cert.pem").map_err(io::Error::other)?).map_err(io::Error::other)?;
        let own = vec![read("client-cert.pem").map_err(io::Error::other)?];
        let key = PrivateKeyDer::from_pem_file(directory.join("client-key.pem"));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_client_auth_cert(own, key.map_err(io::Error::other)?)
            .map_err(io::Error::other)?;
        let name = ServerName::IpAddress(to.ip().into());
        let session = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
        let mut tls = Self { session, socket: BufReader::with_capacity(ROOM / 2, stream) };
        tls.session.set_buffer_limit(None);
        while tls.session.is_handshaking() {
            tls.send()?;
            if tls.session.is_handshaking() {
                tls.hear()?;
            }
        }
        tls.send()?;
        Ok(tls)
    }

    fn send(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            self.session.write_tls(self.socket.get_mut())?;
        }
        Ok(())
    }

    fn hear(&mut self) -> io::Result<()> {
        if self.session.read_tls(&mut self.socket)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.session.process_new_packets().map(|_| ()).map_err(io::Error::other)
    }
}

impl Read for Tls {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        loop {
            match self.session.reader().read(&mut into[filled..]) {
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let is_all = filled == into.len() || self.socket.buffer().is_empty();
            if filled > 0 && is_all {
                return Ok(filled);
            }
            self.hear()?;
        }
    }
}

impl Write for Tls {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let n = self.session.writer().write(data)?;
        self.send()?;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

/// The round trip of a read without a server: an event loop that does nothing else waits for a
/// request's bytes by epoll, as servers do, and sends a reply's bytes, on these CPUs (empty: on
/// any).
pub(crate) fn raw_round_trips(time: Duration, cpus: &[usize]) -> io::Result<Rate> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut near = connect_tcp(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    far.set_nodelay(true)?;
    let cpus = cpus.to_vec();
    let echo = std::thread::spawn(move || {
        // Where the CPUs are not allowed, the thread runs on any.
        let _ = pinning::this_thread(&cpus);
        answer_by_epoll(far)
    });
    let (request, mut reply, mut took) = ([0; HEADER], [0; RAW_REPLY], Vec::new());
    let began = Instant::now();
    while began.elapsed() < time {
        let asked = Instant::now();
        near.write_all(&request)?;
        near.read_exact(&mut reply)?;
        took.push(u32::try_from(asked.elapsed().as_nanos()).unwrap_or(u32::MAX));
    }
    let rate = Rate::of(&mut took, began.elapsed());
    drop(near);
    let ended = echo.join().map_err(|_| io::Error::other("the event loop panicked"))?;
    ended.map(|()| rate)
}

/// The bytes of a reply to the read of a page.
const RAW_REPLY: usize = SIMPLE + PAGE as usize;

/// Answers each request's bytes with a reply's bytes until the other side ends.
fn answer_by_epoll(mut far: TcpStream) -> io::Result<()> {
    far.set_nonblocking(true)?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &far, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let (mut request, reply, mut there) = ([0; HEADER], [0x5a; RAW_REPLY], 0);
    let mut events = Vec::with_capacity(1);
    loop {
        events.clear();
        match epoll::wait(&epoll, spare_capacity(&mut events), None) {
            Err(Errno::INTR) => continue,
            result => result.map(drop)?,
        }
        match far.read(&mut request[there..]) {
            Ok(0) => return Ok(()),
            Ok(count) => there += count,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        }
        if there == HEADER {
            // The other side waits for it, so the socket has room.
            far.write_all(&reply)?;
            there = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_loop_answers_until_the_other_side_ends() {
        let rate = raw_round_trips(Duration::from_millis(20), &[]).unwrap();
        assert!(rate.requests > 0 && rate.per_s > 0.0 && rate.p50_us > 0.0, "{rate:?}");
    }
}
