//! `nginx`: a web server of the system that the guest runs in, and a client that asks it again and
//! again.
//!
//! The site is N MB of documents in the guest's memory, the same in every guest. The client
//! requests one at random, over one connection, and compares every byte of the answer with the
//! expected document.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;

use clap::Args;

use crate::args::megabytes;
use crate::content;
use crate::error::WorkError;
use crate::intact;
use crate::memory::{MB, fill_random};
use crate::program::{self, Server, difference};
use crate::rng::Rng;
use crate::run::Worker;

const PORT: u16 = 8080;
const DOCUMENT: usize = 16 * 1024;
const SITE: &str = "/tmp/site";
const CONFIGURATION: &str = "/tmp/nginx.conf";
/// Like Debian's own, without settings that write or point elsewhere.
const SETTINGS: &str = "daemon off;
user root;
worker_processes auto;
error_log stderr;
pid /tmp/nginx.pid;
events { worker_connections 64; }
http {
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000000;
    keepalive_time 1000d;
    server { listen 127.0.0.1:8080; root /tmp/site; }
}
";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the site
    #[arg(long, value_name = "N", default_value = "8", value_parser = megabytes)]
    mb: usize,
    #[command(flatten)]
    checks: intact::Checks,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let shared = &worker.shared;
    let documents = options.mb * MB / DOCUMENT;
    fs::create_dir_all(SITE).map_err(WorkError::file("make", Path::new(SITE)))?;
    let mut expected = vec![0; DOCUMENT];
    for number in 0..documents {
        write_document(number, &mut expected);
        let path = Path::new(SITE).join(number.to_string());
        fs::write(&path, &expected).map_err(WorkError::file("write", &path))?;
    }
    fs::write(CONFIGURATION, SETTINGS)
        .map_err(WorkError::file("write", Path::new(CONFIGURATION)))?;
    shared.mb.set(options.mb);
    intact::watch(&options.checks, &["libnginx", "libpcre", "nginx"], shared)?;

    let mut nginx = program::command("nginx");
    let (server, stream) = Server::start("nginx", nginx.args(["-c", CONFIGURATION]), PORT, shared)?;
    let mut client = NginxClient::new(stream);
    let mut rng = Rng::new(worker.seed);
    while worker.proceed(1) {
        let number = rng.below(documents);
        let start = worker.shared.now();
        let answer = client.get(number).map_err(server.failed())?;
        worker.shared.latency.record(worker.shared.now() - start);
        write_document(number, &mut expected);
        worker.shared.bad_bytes.add(difference(answer, &expected));
        worker.done(1);
    }
    Ok(())
}

fn write_document(number: usize, bytes: &mut [u8]) {
    fill_random(bytes, &mut content::common_part(number));
}

/// One persistent connection.
struct NginxClient {
    stream: BufReader<TcpStream>,
    line: String,
    body: Vec<u8>,
}

impl NginxClient {
    fn new(stream: TcpStream) -> Self {
        Self { stream: BufReader::new(stream), line: String::new(), body: Vec::new() }
    }

    fn get(&mut self, document: usize) -> io::Result<&[u8]> {
        let request = format!("GET /{document} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        self.stream.get_mut().write_all(request.as_bytes())?;
        let status = self.read_line()?;
        if status.split(' ').nth(1) != Some("200") {
            return Err(io::Error::other(format!("it answered {status:?}")));
        }
        let mut length = None;
        loop {
            let line = self.read_line()?;
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().ok();
            }
        }
        let length: usize = length.ok_or_else(|| io::Error::other("an answer of no length"))?;
        self.body.resize(length.min(2 * DOCUMENT), 0);
        self.stream.read_exact(&mut self.body)?;
        Ok(&self.body)
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

    /// A client that receives these answers.
    fn asked(answers: &'static [u8]) -> NginxClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(answers).unwrap();
        // The server side stays open: requests are not read, and the client reads the answers
        // above.
        std::mem::forget(server);
        NginxClient::new(stream)
    }

    #[test]
    fn answers_of_one_connection_are_told_apart() {
        let mut client = asked(
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc\
            HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 2\r\n\r\nde\
            HTTP/1.1 404 Not Found\r\n\r\n",
        );
        assert_eq!(client.get(0).unwrap(), b"abc");
        assert_eq!(client.get(1).unwrap(), b"de");
        assert_eq!(
            client.get(2).unwrap_err().to_string(),
            "it answered \"HTTP/1.1 404 Not Found\""
        );
    }
}
