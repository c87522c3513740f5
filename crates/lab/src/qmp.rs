//! The lab's own connection to a QEMU: one command at a time, each with a deadline.
//!
//! **Idea.** The messages are those of the drivers' codec ([`drivers::qmp`]); only the socket is
//! the lab's own, because the lab waits. Events are skipped. A QMP socket serves one client at a
//! time, so the lab has a socket of its own, separate from the daemon's. A [`QmpLine`] keeps its
//! connection open, because connecting is slow while a guest boots. A keeper hangs up when its
//! guests are up, so that `lab status` can connect.
//!
//! **Leaves out.** An allowance for events, and connections that survive a late answer.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use drivers::qmp::{self, Command, Message};
use serde_json::{Value, json};

/// Timeout for one command; a guest that boots on a busy machine delays its QEMU for seconds.
pub const DEADLINE: Duration = Duration::from_secs(20);
/// The longest line that a healthy QEMU sends is far below this.
const LINE_LIMIT: u64 = 1 << 20;

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket did not answer, or not in time.
    #[error("QMP {command}: {source}")]
    Io {
        /// The command, or `connect`.
        command: String,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU refused the command.
    #[error("QMP {command}: QEMU says {reason}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's own words.
        reason: String,
    },
}

/// A connection that is opened when it is needed, kept until it fails, and then opened again.
#[derive(Debug)]
pub struct QmpLine {
    socket: PathBuf,
    open: Mutex<Option<Qmp>>,
}

impl QmpLine {
    /// A connection to the QEMU that listens (or will listen) on `socket`.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), open: Mutex::default() }
    }

    /// Calls `talk` with the connection.
    pub fn with<T>(
        &self,
        talk: impl FnOnce(&mut Qmp) -> Result<T, QmpError>,
    ) -> Result<T, QmpError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut qmp = match open.take() {
            Some(qmp) => qmp,
            None => Qmp::connect(&self.socket, DEADLINE)?,
        };
        let result = talk(&mut qmp);
        // After a missed deadline, the next answer would belong to the last command.
        if !matches!(result, Err(QmpError::Io { .. })) {
            *open = Some(qmp);
        }
        result
    }

    /// Closes the connection, so that another client can connect.
    pub fn hang_up(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// One connection.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    /// ID of the last command sent.
    last_sent: u64,
}

impl Qmp {
    /// Connects to `socket` and skips the greeting; each answer must come within `deadline`.
    pub fn connect(socket: &Path, deadline: Duration) -> Result<Self, QmpError> {
        let failed = |source| QmpError::Io { command: "connect".into(), source };
        let stream = UnixStream::connect(socket).map_err(failed)?;
        stream.set_read_timeout(Some(deadline)).map_err(failed)?;
        stream.set_write_timeout(Some(deadline)).map_err(failed)?;
        let mut qmp = Self { reader: BufReader::new(stream), last_sent: 0 };
        let greeting = qmp.read_line().map_err(failed)?;
        qmp::check_greeting(&greeting).map_err(io::Error::other).map_err(failed)?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs one command and returns its result.
    pub fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        let failed = |source| QmpError::Io { command: command.to_owned(), source };
        self.last_sent += 1;
        let line = Command::with(command, arguments).to_line(self.last_sent);
        self.reader.get_mut().write_all(line.as_bytes()).map_err(failed)?;
        let outcome = self.read_answer().map_err(failed)?;
        outcome.map_err(|reason| QmpError::Refused { command: command.to_owned(), reason })
    }

    /// The guest's present memory, in bytes, by its balloon.
    pub fn balloon(&mut self) -> Result<u64, QmpError> {
        let reply = self.execute("query-balloon", json!({}))?;
        reply["actual"].as_u64().ok_or_else(|| QmpError::Refused {
            command: "query-balloon".into(),
            reason: reply.to_string(),
        })
    }

    /// Sets the balloon's target to `bytes` of guest memory.
    pub fn set_balloon(&mut self, bytes: u64) -> Result<(), QmpError> {
        self.execute("balloon", json!({ "value": bytes })).map(drop)
    }

    /// The answer to the last command: its value, or QEMU's words of refusal.
    fn read_answer(&mut self) -> io::Result<Result<Value, String>> {
        loop {
            let line = self.read_line()?;
            match qmp::parse(&line).map_err(io::Error::other)? {
                Message::Answer { id } if id == self.last_sent => {
                    return qmp::outcome(&line).map_err(io::Error::other);
                }
                Message::Answer { id } => {
                    let what = format!("an answer to command {id}, which was not sent");
                    return Err(io::Error::other(what));
                }
                Message::Event | Message::BalloonChange(_) => {}
            }
        }
    }

    fn read_line(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        (&mut self.reader).take(LINE_LIMIT).read_until(b'\n', &mut line).map_err(|error| {
            // A socket's timeout is reported as this error.
            let is_late = error.kind() == io::ErrorKind::WouldBlock;
            if is_late { io::Error::other("QEMU does not answer in time") } else { error }
        })?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line)
    }
}
