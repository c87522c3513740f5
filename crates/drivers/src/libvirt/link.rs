//! The connection to `overbook-libvirt`: one for reports, requests and their answers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::Millis;
use model::libvirt::{DomainChange, DomainProcess, FromLibvirt, ToLibvirt};
use rustix::process::geteuid;
use sys::clock::boot_now;
use sys::process::Identity;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::Domains;
use crate::lines::{JsonLines, line, nonsense};

/// Maximum length of a message: some hundred bytes for each domain.
const MOST_BYTES: usize = 16 << 20;
/// Longest silence of a connection that works.
const SILENCE: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_secs(1);
/// Timeout of a request: libvirt itself waits up to 30 s for another call on the same domain.
const PATIENCE: Millis = Millis::secs(3);

/// Follows the reports for as long as it is polled.
pub(crate) async fn run(domains: &Domains) -> Infallible {
    loop {
        let error = follow(domains).await;
        domains.lose(format!("overbook-libvirt: {error}"));
        domains.link.end().await;
        sleep(PAUSE).await;
    }
}

async fn follow(domains: &Domains) -> io::Error {
    let (mut lines, writer) = match open(&domains.socket).await {
        Ok(connection) => connection,
        Err(error) => return error,
    };
    *domains.link.writer.lock().await = Some(writer);
    loop {
        match next(&mut lines).await {
            Ok(FromLibvirt::Domains { at, domains: all }) => domains.note(all, at),
            Ok(FromLibvirt::Lost { why }) => domains.lose(why),
            Ok(FromLibvirt::Answer { id, refusal }) => domains.link.note_answer(id, refusal),
            Err(error) => return error,
        }
    }
}

type Lines = JsonLines<BufReader<OwnedReadHalf>>;

/// Connects. Fails if a process of a user who is not trusted answers.
async fn open(socket: &Path) -> io::Result<(Lines, OwnedWriteHalf)> {
    let stream = timeout(SILENCE, UnixStream::connect(socket)).await??;
    let user = stream.peer_cred()?.uid();
    if user != 0 && user != geteuid().as_raw() {
        return Err(nonsense(format!("user {user} answers there, who is not root")));
    }
    let (reader, writer) = stream.into_split();
    Ok((JsonLines::new(BufReader::new(reader), MOST_BYTES), writer))
}

/// The next message. Fails if the connection has ended, or is silent for too long.
async fn next(lines: &mut Lines) -> io::Result<FromLibvirt> {
    timeout(SILENCE, lines.next()).await??.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// The sending side of the connection, and the requests that wait for their answers.
#[derive(Debug, Default)]
pub(super) struct DomainLink {
    /// `None`: there is no connection.
    writer: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
    waiting: Mutex<WaitingRequests>,
}

#[derive(Debug, Default)]
struct WaitingRequests {
    last: u64,
    answers: BTreeMap<u64, oneshot::Sender<Option<String>>>,
}

/// A request that waits for its answer until this is dropped.
struct WaitingRequest<'a> {
    link: &'a DomainLink,
    id: u64,
    answer: oneshot::Receiver<Option<String>>,
}

impl DomainLink {
    /// Changes the domain with this UUID and process.
    ///
    /// # Errors
    /// The reason why it is not known to have happened.
    pub(super) async fn change(
        &self,
        process: Identity,
        uuid: &str,
        change: DomainChange,
    ) -> Result<(), String> {
        let asked = self.ask(process, uuid, change);
        let refusal = match timeout(Duration::from_millis(PATIENCE.0), asked).await {
            Ok(answer) => answer.map_err(|error| format!("overbook-libvirt: {error}"))?,
            Err(_) => Some("libvirt has not answered in time".to_owned()),
        };
        refusal.map_or(Ok(()), Err)
    }

    /// Returns why libvirt refused it.
    async fn ask(
        &self,
        process: Identity,
        uuid: &str,
        change: DomainChange,
    ) -> io::Result<Option<String>> {
        let before = boot_now().after(PATIENCE);
        let mut waiting = self.begin();
        let Identity { pid, start_ticks } = process;
        let process = DomainProcess { pid, start_ticks };
        let request = ToLibvirt { id: waiting.id, uuid: uuid.to_owned(), process, before, change };
        {
            let mut place = self.writer.lock().await;
            // If the write fails or is given up, half a line may have been sent. The writer is
            // dropped then, which ends the connection.
            let mut writer = place.take().ok_or(io::ErrorKind::NotConnected)?;
            writer.write_all(&line(&request)?).await?;
            *place = Some(writer);
        }
        (&mut waiting.answer).await.map_err(|_| io::ErrorKind::ConnectionReset.into())
    }

    fn begin(&self) -> WaitingRequest<'_> {
        let (sender, answer) = oneshot::channel();
        let mut waiting = self.waiting();
        waiting.last += 1;
        let id = waiting.last;
        waiting.answers.insert(id, sender);
        WaitingRequest { link: self, id, answer }
    }

    fn note_answer(&self, id: u64, refusal: Option<String>) {
        if let Some(waiting) = self.waiting().answers.remove(&id) {
            // It may have been given up.
            let _ = waiting.send(refusal);
        }
    }

    /// Ends the connection: no answer will come.
    async fn end(&self) {
        *self.writer.lock().await = None;
        self.waiting().answers.clear();
    }

    fn waiting(&self) -> MutexGuard<'_, WaitingRequests> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.link.waiting().answers.remove(&self.id);
    }
}

#[cfg(test)]
mod tests;
