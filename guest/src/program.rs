//! Programs of the guest's own system: started, used, and ended with the workload.
//!
//! Their standard output is separate from ours, which carries the measurement; their standard
//! error is ours. A server that ends, or does not answer, ends the work.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::error::WorkError;
use crate::run::RunState;

/// The directories in which a Debian has its programs.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// The longest time for a server to start where memory is short.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The longest time for an answer.
const PATIENCE: Duration = Duration::from_secs(300);

/// A program to run, with a search path for others.
pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", PATH).env("LC_ALL", "C").stdin(Stdio::null());
    command
}

/// The standard output of `command`, if it succeeded.
pub(crate) fn output(name: &'static str, command: &mut Command) -> Result<Vec<u8>, WorkError> {
    let failed = |source| WorkError::Program { name, source };
    let Output { status, stdout, .. } =
        command.stderr(Stdio::inherit()).output().map_err(failed)?;
    if status.success() { Ok(stdout) } else { Err(failed(io::Error::other(status.to_string()))) }
}

/// The number of bytes that differ; bytes that only one of the two has count, too.
pub(crate) fn difference(one: &[u8], other: &[u8]) -> usize {
    let pairs = one.iter().zip(other);
    pairs.filter(|(one, other)| one != other).count() + one.len().abs_diff(other.len())
}

/// A server that listens on the loopback.
#[derive(Debug)]
pub(crate) struct Server {
    name: &'static str,
    child: Child,
}

impl Server {
    /// Starts it and returns a connection to it.
    pub(crate) fn start(
        name: &'static str,
        command: &mut Command,
        port: u16,
        shared: &RunState,
    ) -> Result<(Self, TcpStream), WorkError> {
        let failed = |source| WorkError::Program { name, source };
        let child = command.stdout(Stdio::null()).spawn().map_err(failed)?;
        let mut server = Self { name, child };
        let (address, begun) = (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), shared.now());
        loop {
            match TcpStream::connect(address) {
                Ok(stream) => return ready(stream).map_err(failed).map(|stream| (server, stream)),
                Err(error) if shared.now() - begun > START_LIMIT => return Err(failed(error)),
                Err(_) => {}
            }
            if let Some(status) = server.child.try_wait().map_err(failed)? {
                return Err(failed(io::Error::other(status.to_string())));
            }
            shared.sleep_until(shared.now() + Duration::from_millis(20));
        }
    }

    /// For `map_err`: the communication with the server failed.
    pub(crate) fn failed(&self) -> impl Fn(io::Error) -> WorkError + use<> {
        let name = self.name;
        move |source| WorkError::Program { name, source }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ready(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_or_fails_is_named() {
        let error = |name| output(name, &mut command(name)).unwrap_err().to_string();
        assert!(error("no-such-program").starts_with("no-such-program: "));
        assert_eq!(error("false"), "false: exit status: 1");
    }

    #[test]
    fn a_server_that_ends_at_once_is_an_error() {
        let shared = RunState::new();
        // No server listens on port 1.
        let error = Server::start("true", &mut command("true"), 1, &shared).unwrap_err();
        assert_eq!(error.to_string(), "true: exit status: 0");
    }

    #[test]
    fn bytes_that_differ_or_are_missing_are_counted() {
        assert_eq!(difference(b"abcd", b"abxd"), 1);
        assert_eq!(difference(b"abcd", b"ab"), 2);
    }
}
