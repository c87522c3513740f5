//! `postgres`: a relational database of the guest's own system, a table of N MB, and a client
//! that asks for one row after the other.
//!
//! The expected row follows from the seed, its key and the number of times it was changed, so
//! every byte of every answer is checked. One statement of eight changes a row. The database was
//! made with the system's image. Its writes stay in the guest's memory, like all files that a
//! guest writes.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::args::megabytes;
use crate::content::{fill_in_parts, parts};
use crate::error::WorkError;
use crate::intact;
use crate::memory::MB;
use crate::program::{self, Server, difference};
use crate::rng::{Rng, mix};
use crate::run::{RunState, Worker};

const PORT: u16 = 5432;
const USER: &str = "postgres";
/// The directory in which distributions install the programs of each release.
const RELEASES: &str = "/usr/lib/postgresql";
/// Made with the image.
const DATA: &str = "/var/lib/postgresql/guest";
/// Hexadecimal digits.
const VALUE: usize = 1024;
/// For one small machine, whose files do not outlive the guest.
const SETTINGS: [&str; 11] = [
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "dynamic_shared_memory_type=mmap",
    "shared_buffers=16MB",
    "max_connections=8",
    "wal_level=minimal",
    "max_wal_senders=0",
    "min_wal_size=32MB",
    "max_wal_size=48MB",
    "fsync=off",
    "jit=off",
];
/// The error code with which the database refuses connections until it has checked its files.
const STARTING: &[u8] = b"57P03";
const START_LIMIT: Duration = Duration::from_secs(120);
const RETRY: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of all values
    #[arg(long, value_name = "N", default_value = "8", value_parser = megabytes)]
    mb: usize,
    /// How often each value repeats its content, which makes it compressible by that factor
    #[arg(long, value_name = "N", default_value = "1", value_parser = parts)]
    parts: usize,
    #[command(flatten)]
    checks: intact::Checks,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let shared = &worker.shared;
    intact::watch(&options.checks, &["postgresql", "libpq"], shared)?;
    let failed = |source| WorkError::Program { name: USER, source };
    let mut postgres = server().map_err(failed)?;
    let (server, first) = Server::start(USER, &mut postgres, PORT, shared)?;
    let stream = log_in(first, shared).map_err(server.failed())?;
    let rows = Rows::new(worker.seed, options.mb * MB / VALUE, options.parts);
    let mut client = PostgresClient { stream, rows, body: Vec::new() };
    client.fill(shared).map_err(server.failed())?;
    shared.mb.set(options.mb);
    let mut rng = Rng::new(!worker.seed);
    while worker.proceed(1) {
        let key = rng.below(client.rows.generations.len());
        let start = worker.shared.now();
        if rng.below(8) == 0 {
            client.change(key).map_err(server.failed())?;
        } else {
            let bad = client.get(key).map_err(server.failed())?;
            worker.shared.bad_bytes.add(bad);
        }
        worker.shared.latency.record(worker.shared.now() - start);
        worker.done(1);
    }
    Ok(())
}

/// The newest release's server, run as the data's owner: it refuses root.
fn server() -> io::Result<std::process::Command> {
    let releases = std::fs::read_dir(RELEASES)?.map(|entry| Ok(entry?.path()));
    let newest = releases.collect::<io::Result<Vec<PathBuf>>>()?.into_iter().max();
    let release = newest.ok_or_else(|| io::Error::other("no release is installed"))?;
    let mut command = program::command(&release.join("bin/postgres").display().to_string());
    let (uid, gid) = ids(&std::fs::read_to_string("/etc/passwd")?)
        .ok_or_else(|| io::Error::other("the system has no such user"))?;
    command.current_dir(Path::new("/")).uid(uid).gid(gid).args(["-D", DATA]);
    command.args(SETTINGS.iter().flat_map(|setting| ["-c", setting]));
    Ok(command)
}

/// The user's numeric ids.
fn ids(passwd: &str) -> Option<(u32, u32)> {
    let lines = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let fields = lines.into_iter().find(|fields| fields[0] == USER)?;
    Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

/// A session, once the database accepts one.
fn log_in(first: TcpStream, shared: &RunState) -> io::Result<BufReader<TcpStream>> {
    let (mut stream, begun) = (BufReader::new(first), shared.now());
    let mut body = Vec::new();
    loop {
        match begin(&mut stream, &mut body) {
            Ok(()) => return Ok(stream),
            Err(error) if shared.now() - begun > START_LIMIT || shared.stopping() => {
                return Err(error);
            }
            Err(_) if body.windows(STARTING.len()).any(|at| at == STARTING) => {}
            Err(error) => return Err(error),
        }
        shared.sleep_until(shared.now() + RETRY);
        let next = TcpStream::connect((Ipv4Addr::LOCALHOST, PORT))?;
        next.set_nodelay(true)?;
        stream = BufReader::new(next);
    }
}

fn begin(stream: &mut BufReader<TcpStream>, body: &mut Vec<u8>) -> io::Result<()> {
    // Version 3.0 of the protocol.
    let mut message = 196_608_u32.to_be_bytes().to_vec();
    for word in ["user", USER, "database", USER, ""] {
        message.extend_from_slice(word.as_bytes());
        message.push(0);
    }
    let length = u32::try_from(message.len() + 4).unwrap_or(u32::MAX);
    stream.get_mut().write_all(&[&length.to_be_bytes()[..], &message].concat())?;
    until_ready(stream, body, |_, _| {})
}

/// Reads messages until the server is ready for the next statement. If the server reports an
/// error, that is the error, and `body` holds its message.
fn until_ready(
    stream: &mut impl BufRead,
    body: &mut Vec<u8>,
    mut with: impl FnMut(u8, &[u8]),
) -> io::Result<()> {
    loop {
        match read_message(stream, body)? {
            b'Z' => return Ok(()),
            b'E' => {
                let text = String::from_utf8_lossy(body).replace('\0', " ");
                return Err(io::Error::other(format!("it answered {text:?}")));
            }
            kind => with(kind, body),
        }
    }
}

/// The kind of the next message; its content is in `body` afterwards.
fn read_message(stream: &mut impl BufRead, body: &mut Vec<u8>) -> io::Result<u8> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_be_bytes(length);
    if !(4..1 << 20).contains(&length) {
        return Err(io::Error::other(format!("a message of {length} bytes")));
    }
    body.resize(length as usize - 4, 0);
    stream.read_exact(body)?;
    Ok(kind)
}

/// The only column of a row.
fn column(row: &[u8]) -> Option<&[u8]> {
    let length = u32::from_be_bytes(row.get(2..6)?.try_into().ok()?);
    row.get(6..)?.get(..length as usize)
}

/// The expected content of the table.
struct Rows {
    seed: u64,
    parts: usize,
    /// The number of times that each row was changed.
    generations: Vec<u32>,
    expected: String,
}

impl Rows {
    fn new(seed: u64, rows: usize, parts: usize) -> Self {
        Self { seed, parts, generations: vec![0; rows], expected: String::new() }
    }

    /// Sets `expected` to the value that the row of `key` must hold.
    fn make(&mut self, key: usize) {
        let generation = u64::from(self.generations[key]);
        let mut rng = Rng::new(self.seed ^ mix(key as u64 | (generation << 32)));
        let mut bytes = [0; VALUE / 2];
        fill_in_parts(&mut bytes, self.parts, &mut rng);
        self.expected.clear();
        for byte in bytes {
            // Writing to a string cannot fail.
            let _ = write!(self.expected, "{byte:02x}");
        }
    }
}

/// One persistent session.
struct PostgresClient {
    stream: BufReader<TcpStream>,
    rows: Rows,
    body: Vec<u8>,
}

impl PostgresClient {
    /// Makes the table.
    fn fill(&mut self, shared: &RunState) -> io::Result<()> {
        self.say("drop table if exists data")?;
        // One transaction, so that the log does not repeat the table's content.
        self.say("begin")?;
        self.say("create table data (key integer not null, value text) with (fillfactor = 90)")?;
        self.send(b'Q', b"copy data from stdin\0")?;
        if read_message(&mut self.stream, &mut self.body)? != b'G' {
            return Err(io::Error::other("it takes no rows"));
        }
        for key in 0..self.rows.generations.len() {
            if shared.stopping() {
                break;
            }
            self.rows.make(key);
            let line = format!("{key}\t{}\n", self.rows.expected);
            self.send(b'd', line.as_bytes())?;
        }
        self.send(b'c', &[])?;
        until_ready(&mut self.stream, &mut self.body, |_, _| {})?;
        self.say("commit")?;
        self.say("create unique index on data (key)")?;
        self.say("analyze data")
    }

    fn change(&mut self, key: usize) -> io::Result<()> {
        self.rows.generations[key] = self.rows.generations[key].wrapping_add(1);
        self.rows.make(key);
        let value = &self.rows.expected;
        let statement = format!("update data set value = '{value}' where key = {key}");
        self.say(&statement)
    }

    /// The number of wrong bytes of the row; all, if it is gone.
    fn get(&mut self, key: usize) -> io::Result<usize> {
        self.rows.make(key);
        let expected = self.rows.expected.as_bytes();
        let mut wrong = VALUE;
        let statement = format!("select value from data where key = {key}\0");
        send(&mut self.stream, b'Q', statement.as_bytes())?;
        until_ready(&mut self.stream, &mut self.body, |kind, body| {
            if kind == b'D' {
                wrong = difference(column(body).unwrap_or_default(), expected);
            }
        })?;
        Ok(wrong)
    }

    /// Runs a statement that returns no rows.
    fn say(&mut self, statement: &str) -> io::Result<()> {
        self.send(b'Q', format!("{statement}\0").as_bytes())?;
        until_ready(&mut self.stream, &mut self.body, |_, _| {})
    }

    fn send(&mut self, kind: u8, content: &[u8]) -> io::Result<()> {
        send(&mut self.stream, kind, content)
    }
}

fn send(stream: &mut BufReader<TcpStream>, kind: u8, content: &[u8]) -> io::Result<()> {
    let length = u32::try_from(content.len() + 4).map_err(io::Error::other)?;
    stream.get_mut().write_all(&[&[kind], &length.to_be_bytes()[..], content].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn message(kind: u8, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(content.len() + 4).unwrap();
        [&[kind], &length.to_be_bytes()[..], content].concat()
    }

    fn row(value: &str) -> Vec<u8> {
        let length = u32::try_from(value.len()).unwrap();
        let content = [&[0, 1], &length.to_be_bytes()[..], value.as_bytes()].concat();
        [message(b'D', &content), message(b'Z', b"I")].concat()
    }

    #[test]
    fn a_row_that_is_old_wrong_or_gone_is_counted_by_its_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let rows = Rows::new(1, 2, 2);
        let mut client = PostgresClient { stream: BufReader::new(stream), rows, body: Vec::new() };
        client.rows.make(0);
        let value = client.rows.expected.clone();
        server.write_all(&row(&value)).unwrap();
        assert_eq!(client.get(0).unwrap(), 0);
        server.write_all(&row(&value)).unwrap();
        assert!(client.get(1).unwrap() > VALUE / 2);
        server.write_all(&message(b'Z', b"I")).unwrap();
        assert_eq!(client.get(0).unwrap(), VALUE);
        server.write_all(&message(b'Z', b"I")).unwrap();
        client.change(0).unwrap();
        server.write_all(&row(&value)).unwrap();
        assert!(client.get(0).unwrap() > VALUE / 2);
        server.write_all(&message(b'E', b"SERROR\0Mno table\0\0")).unwrap();
        assert!(client.get(0).unwrap_err().to_string().contains("no table"));
    }

    #[test]
    fn a_user_is_found_by_name() {
        assert_eq!(ids("root:x:0:0::/:\npostgres:x:104:112::/:\n"), Some((104, 112)));
        assert_eq!(ids("root:x:0:0::/:\n"), None);
    }

    #[test]
    fn a_message_of_a_wrong_length_is_an_error() {
        let mut body = Vec::new();
        assert!(read_message(&mut &[b'Z', 0, 0, 0, 3][..], &mut body).is_err());
        assert!(read_message(&mut &[b'Z', 255, 0, 0, 4][..], &mut body).is_err());
    }
}
