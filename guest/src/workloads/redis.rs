//! `redis`: a database of the guest's own system, which keeps N MB of values in memory, and a
//! client that sends one request after the other.
//!
//! The expected value follows from the seed, its key and the number of times it was set, so every
//! byte of every answer is checked. One request of eight sets a new value.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use clap::Args;

use crate::args::megabytes;
use crate::content::{fill_in_parts, parts};
use crate::error::WorkError;
use crate::intact;
use crate::memory::MB;
use crate::program::{self, Server, difference};
use crate::rng::{Rng, mix};
use crate::run::{RunState, Worker};

const PORT: u16 = 6379;
const VALUE: usize = 1024;
/// Requests that are sent before their answers are read, when the database is filled.
const AT_ONCE: usize = 64;
/// In memory only.
const ARGUMENTS: [&str; 8] =
    ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"];

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
    intact::watch(&options.checks, &["redis", "libjemalloc", "liblua", "libhiredis"], shared)?;
    let mut redis = program::command("redis-server");
    let (server, stream) = Server::start("redis-server", redis.args(ARGUMENTS), PORT, shared)?;
    let keys = options.mb * MB / VALUE;
    let mut client = RedisClient::new(stream, worker.seed, keys, options.parts);
    client.fill(shared).map_err(server.failed())?;
    shared.mb.set(options.mb);
    let mut rng = Rng::new(!worker.seed);
    while worker.proceed(1) {
        let key = rng.below(client.generations.len());
        let start = worker.shared.now();
        if rng.below(8) == 0 {
            client.send_new(key).and_then(|()| client.read_done()).map_err(server.failed())?;
        } else {
            let bad = client.get(key).map_err(server.failed())?;
            worker.shared.bad_bytes.add(bad);
        }
        worker.shared.latency.record(worker.shared.now() - start);
        worker.done(1);
    }
    Ok(())
}

/// One persistent connection, and the expected content of the database.
struct RedisClient {
    stream: BufReader<TcpStream>,
    seed: u64,
    parts: usize,
    /// The number of times that each key was set.
    generations: Vec<u32>,
    line: String,
    request: Vec<u8>,
    expected: Vec<u8>,
    answer: Vec<u8>,
}

impl RedisClient {
    fn new(stream: TcpStream, seed: u64, keys: usize, parts: usize) -> Self {
        let (generations, line, request) = (vec![0; keys], String::new(), Vec::new());
        let (expected, answer) = (vec![0; VALUE], Vec::new());
        let stream = BufReader::new(stream);
        Self { stream, seed, parts, generations, line, request, expected, answer }
    }

    /// Sets all values for the first time.
    fn fill(&mut self, shared: &RunState) -> io::Result<()> {
        for first in (0..self.generations.len()).step_by(AT_ONCE) {
            if shared.stopping() {
                return Ok(());
            }
            let keys = first..(first + AT_ONCE).min(self.generations.len());
            for key in keys.clone() {
                self.send_new(key)?;
            }
            for _ in keys {
                self.read_done()?;
            }
        }
        Ok(())
    }

    /// Sets `expected` to the value that `key` must hold.
    fn make_value(&mut self, key: usize) {
        let generation = u64::from(self.generations[key]);
        let seed = self.seed ^ mix(key as u64 | (generation << 32));
        fill_in_parts(&mut self.expected, self.parts, &mut Rng::new(seed));
    }

    fn send_new(&mut self, key: usize) -> io::Result<()> {
        self.generations[key] = self.generations[key].wrapping_add(1);
        self.make_value(key);
        self.request.clear();
        let name = key.to_string();
        write!(self.request, "*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${VALUE}\r\n", name.len())?;
        self.request.extend_from_slice(&self.expected);
        self.request.extend_from_slice(b"\r\n");
        self.stream.get_mut().write_all(&self.request)
    }

    fn read_done(&mut self) -> io::Result<()> {
        match self.read_line()? {
            "+OK" => Ok(()),
            other => Err(io::Error::other(format!("it answered {other:?}"))),
        }
    }

    /// The number of wrong bytes of the value; all, if it is gone.
    fn get(&mut self, key: usize) -> io::Result<usize> {
        let name = key.to_string();
        self.request.clear();
        write!(self.request, "*2\r\n$3\r\nGET\r\n${}\r\n{name}\r\n", name.len())?;
        self.stream.get_mut().write_all(&self.request)?;
        let line = self.read_line()?;
        if line == "$-1" {
            return Ok(VALUE);
        }
        let length: usize = line
            .strip_prefix('$')
            .and_then(|length| length.parse().ok())
            .filter(|length| *length <= 2 * VALUE)
            .ok_or_else(|| io::Error::other(format!("it answered {line:?}")))?;
        self.answer.resize(length + 2, 0);
        self.stream.read_exact(&mut self.answer)?;
        self.answer.truncate(length);
        self.make_value(key);
        Ok(difference(&self.answer, &self.expected))
    }

    fn read_line(&mut self) -> io::Result<&str> {
        self.line.clear();
        if self.stream.read_line(&mut self.line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(self.line.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A client of two keys, and the other end of its connection.
    fn client() -> (RedisClient, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (RedisClient::new(stream, 1, 2, 1), listener.accept().unwrap().0)
    }

    #[test]
    fn a_value_that_is_old_wrong_or_gone_is_counted_by_its_bytes() {
        let (mut client, mut server) = client();
        server.write_all(b"+OK\r\n+OK\r\n").unwrap();
        client.fill(&RunState::new()).unwrap();
        let mut answer = |value: &[u8]| {
            write!(server, "${}\r\n", value.len()).unwrap();
            server.write_all(value).unwrap();
            server.write_all(b"\r\n").unwrap();
        };
        client.make_value(0);
        let mut value = client.expected.clone();
        answer(&value);
        assert_eq!(client.get(0).unwrap(), 0);
        value[7] ^= 1;
        answer(&value);
        assert_eq!(client.get(0).unwrap(), 1);
        // This is another key's value.
        answer(&value);
        assert!(client.get(1).unwrap() > VALUE / 2);
        server.write_all(b"$-1\r\n+OK\r\n").unwrap();
        assert_eq!(client.get(1).unwrap(), VALUE);
        client.send_new(0).unwrap();
        client.read_done().unwrap();
        let old = value;
        client.make_value(0);
        assert!(difference(&client.expected, &old) > VALUE / 2);
    }
}
