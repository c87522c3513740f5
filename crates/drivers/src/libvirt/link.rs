//! The connection to `overbook-libvirt`.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::libvirt::{DomainChange, FromLibvirt, ToLibvirt};
use rustix::process::geteuid;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{sleep, timeout};

use super::super::shared::DriverState;
use super::Domains;
use crate::lines::{JsonLines, line, nonsense};

/// Maximum length of a message: some hundred bytes for each domain.
const MOST_BYTES: usize = 16 << 20;
/// Longest silence of a connection that works.
const SILENCE: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_secs(1);
/// Timeout of a request: libvirt itself waits up to 30 s for another call on the same domain.
const PATIENCE: Duration = Duration::from_secs(3);

/// Follows the reports until the task is aborted.
pub(crate) async fn run(shared: Arc<DriverState>) {
    loop {
        let error = follow(&shared.domains).await;
        shared.domains.lose(format!("overbook-libvirt: {error}"));
        sleep(PAUSE).await;
    }
}

async fn follow(domains: &Domains) -> io::Error {
    let mut connection = match LibvirtConnection::open(&domains.socket).await {
        Ok(connection) => connection,
        Err(error) => return error,
    };
    loop {
        match connection.next(SILENCE).await {
            Ok(FromLibvirt::Domains { at, domains: all }) => domains.note(all, at),
            Ok(FromLibvirt::Lost { why }) => domains.lose(why),
            Ok(FromLibvirt::Answer { .. }) => {}
            Err(error) => return error,
        }
    }
}

/// A connection of its own for each purpose: the reports, and each request.
pub(super) struct LibvirtConnection {
    lines: JsonLines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
}

impl LibvirtConnection {
    /// Connects.
    ///
    /// # Errors
    /// Nothing answers there, or a process of a user who is not trusted.
    pub(super) async fn open(socket: &Path) -> io::Result<Self> {
        let stream = timeout(SILENCE, UnixStream::connect(socket)).await??;
        let user = stream.peer_cred()?.uid();
        if user != 0 && user != geteuid().as_raw() {
            return Err(nonsense(format!("user {user} answers there, who is not root")));
        }
        let (reader, writer) = stream.into_split();
        Ok(Self { lines: JsonLines::new(BufReader::new(reader), MOST_BYTES), writer })
    }

    /// The next message.
    ///
    /// # Errors
    /// The connection has ended, or is silent for too long.
    pub(super) async fn next(&mut self, patience: Duration) -> io::Result<FromLibvirt> {
        let read = timeout(patience, self.lines.next()).await?;
        read?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Changes a domain.
    ///
    /// # Errors
    /// The reason why it is not known to have happened.
    pub(super) async fn change(&mut self, uuid: &str, change: DomainChange) -> Result<(), String> {
        const ID: u64 = 1;
        let request = ToLibvirt { id: ID, uuid: uuid.to_owned(), change };
        let answered = async {
            self.writer.write_all(&line(&request)?).await?;
            loop {
                match self.next(PATIENCE).await? {
                    FromLibvirt::Answer { id: ID, refusal } => return io::Result::Ok(refusal),
                    _ => continue,
                }
            }
        };
        match timeout(PATIENCE, answered).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(refusal))) => Err(refusal),
            Ok(Err(error)) => Err(format!("overbook-libvirt: {error}")),
            Err(_) => Err("libvirt has not answered in time".to_owned()),
        }
    }
}

/// Changes a domain, by a connection of its own.
///
/// # Errors
/// The reason why it is not known to have happened.
pub(super) async fn change(socket: &Path, uuid: &str, change: DomainChange) -> Result<(), String> {
    let connection = LibvirtConnection::open(socket).await;
    let mut connection = connection.map_err(|error| format!("overbook-libvirt: {error}"))?;
    connection.change(uuid, change).await
}
