//! One connection to one QEMU.

use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use model::Bytes;
use serde_json::Value;
use sys::no_links;
use sys::peer::{Peer, PeerError};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::QmpError;
use super::allowance::Allowance;
use super::error::excerpt;
use super::framing::{Lines, MAX_LINE};
use super::message::{Command, Message, check_greeting, outcome, parse};

/// Timeout of the greeting, and of the answer to each batch of commands.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// A connection whose greeting has been received, and which may send commands.
#[derive(Debug)]
pub struct QmpClient {
    stream: UnixStream,
    lines: Lines,
    /// Longest line that is accepted now.
    limit: usize,
    /// Allowance for events.
    unasked: Allowance,
    /// The balloon's size by the latest event, until a caller takes it.
    balloon: Option<Bytes>,
    /// ID of the last command sent.
    last_sent: u64,
    /// ID of the last command that was answered.
    last_answered: u64,
}

/// Connects to the socket at `path` itself, without following symbolic links: a user who may
/// write to a directory could point a link at another VM's socket.
///
/// # Errors
/// Errors of the kernel; `ELOOP`: the path has a link.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = no_links::open(path)?;
    // The descriptor refers to the socket itself, even if its name changes meanwhile.
    UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd())).await
}

impl QmpClient {
    /// Connects, waits for the greeting, and enters command mode.
    ///
    /// # Errors
    /// No process listens, or the listener does not speak QMP within [`DEADLINE`].
    pub async fn connect(path: &Path) -> Result<Self, QmpError> {
        let stream = match timeout(DEADLINE, connect(path)).await {
            Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => return Err(QmpError::Queue),
            Ok(stream) => stream?,
            Err(_) => return Err(QmpError::NoGreeting(DEADLINE)),
        };
        if let Err(error @ PeerError::Ended { .. }) = Peer::of(&stream) {
            return Err(QmpError::Ended(error));
        }
        let mut client = Self {
            stream,
            lines: Lines::default(),
            limit: MAX_LINE,
            unasked: Allowance::new(Instant::now()),
            balloon: None,
            last_sent: 0,
            last_answered: 0,
        };
        client.await_greeting().await?;
        client.execute(Command::new("qmp_capabilities")).await?;
        Ok(client)
    }

    async fn await_greeting(&mut self) -> Result<(), QmpError> {
        let line = timeout(DEADLINE, self.lines.next(&mut self.stream, MAX_LINE)).await;
        let error = match line {
            Ok(Ok(line)) => return check_greeting(line),
            Ok(Err(error)) => error,
            Err(_) => QmpError::NoGreeting(DEADLINE),
        };
        match self.lines.incomplete() {
            [] => Err(error),
            beginning => Err(QmpError::NotQmp(excerpt(beginning))),
        }
    }

    /// The process that listens on the socket.
    ///
    /// # Errors
    /// The process has ended, or is in a PID namespace that this process cannot see.
    pub fn peer(&self) -> Result<Peer, PeerError> {
        Peer::of(&self.stream)
    }

    /// Sends one command and waits for its answer.
    ///
    /// # Errors
    /// QEMU refuses, or does not answer in time; see [`QmpError::is_fatal`].
    pub async fn execute(&mut self, command: Command) -> Result<Value, QmpError> {
        let [answer] = self.batch([command]).await?;
        answer
    }

    /// Sends several commands at once (at most 8, which QEMU queues), and waits for all answers.
    /// Each command may be refused on its own.
    ///
    /// # Errors
    /// The connection fails, or the answers do not arrive in time.
    pub async fn batch<const N: usize>(
        &mut self,
        commands: [Command; N],
    ) -> Result<[Result<Value, QmpError>; N], QmpError> {
        let names = commands.each_ref().map(|command| command.name);
        let longest = commands.iter().map(Command::longest_answer).max();
        let missed = |done: usize| QmpError::Deadline {
            command: names[done.min(N.saturating_sub(1))],
            deadline: DEADLINE,
        };
        let mut answers = names.map(|_| Vec::new());
        let mut done = 0;
        let talk = async {
            self.drop_late_answers().await?;
            self.limit = longest.unwrap_or(MAX_LINE);
            let first = self.last_sent + 1;
            let mut text = String::new();
            for command in &commands {
                self.last_sent += 1;
                text.push_str(&command.to_line(self.last_sent));
            }
            self.stream.write_all(text.as_bytes()).await?;
            while done < N {
                let (id, text) = self.next_answer().await?;
                answers[usize::try_from(id - first).unwrap_or(done)] = text;
                done += 1;
            }
            Ok::<(), QmpError>(())
        };
        match timeout(DEADLINE, talk).await {
            Ok(outcome) => outcome?,
            Err(_) => return Err(missed(done)),
        }
        self.limit = MAX_LINE;
        let mut outcomes =
            names.map(|command| Err(QmpError::Deadline { command, deadline: DEADLINE }));
        for ((answer, command), of) in answers.iter().zip(names).zip(&mut outcomes) {
            *of = outcome(answer)?.map_err(|message| QmpError::Refused { command, message });
        }
        Ok(outcomes)
    }

    /// Waits until QEMU reports a change of the balloon's size. Cancel-safe: callers wait for it
    /// between commands, and so also learn at once that QEMU has died.
    ///
    /// # Errors
    /// The connection fails, or QEMU floods it.
    pub async fn balloon_change(&mut self) -> Result<Bytes, QmpError> {
        loop {
            if let Some(size) = self.balloon.take() {
                return Ok(size);
            }
            self.receive().await?;
        }
    }

    /// Waits until all commands sent so far are answered.
    async fn drop_late_answers(&mut self) -> Result<(), QmpError> {
        while self.last_answered < self.last_sent {
            self.receive().await?;
        }
        Ok(())
    }

    async fn next_answer(&mut self) -> Result<(u64, Vec<u8>), QmpError> {
        loop {
            if let Some(answer) = self.receive().await? {
                return Ok(answer);
            }
        }
    }

    /// Reads one line: records an event, or returns an answer's ID and text. QEMU answers
    /// commands in order.
    async fn receive(&mut self) -> Result<Option<(u64, Vec<u8>)>, QmpError> {
        let line = self.lines.next(&mut self.stream, self.limit).await?;
        let message = parse(line)?;
        if let Message::Answer { id } = message {
            let expected = self.last_answered + 1;
            if id != expected || id > self.last_sent {
                let what = format!("an answer to question {id}, which was not asked");
                return Err(QmpError::Garbage(what));
            }
            self.last_answered = id;
            return Ok(Some((id, line.to_vec())));
        }
        if !self.unasked.spend(line.len(), Instant::now()) {
            return Err(QmpError::Flood);
        }
        if let Message::BalloonChange(size) = message {
            self.balloon = Some(size);
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
