//! The process that answers the API, without the daemon's rights.
//!
//! ```text
//!   daemon ──tokens, ticks, answers (JSON lines on standard input)──►  api  ◄──HTTP──►  clients
//!          ◄─questions (JSON lines on standard output)──────────────
//! ```
//!
//! **Problem.** The daemon may read every process of the host and talk to every QEMU. Code that
//! parses requests of untrusted clients should have none of these rights.
//!
//! **Idea.** The daemon opens the API's sockets and passes them to this process. The process then
//! gives up everything but its open file descriptors ([`sys::confine`]): it opens no file, makes no
//! connection and starts no process. It sees what the API shows, and asks what the API lets clients
//! ask. So a fault in the HTTP code gives an attacker no more than the API gives its clients.
//!
//! The process may end at any moment. Clients then wait in the backlog of the sockets until
//! [`daemon`](crate::daemon) has started the next process; no guest notices.
//!
//! **Leaves out.** This process tells the daemon which client asks; the daemon cannot check it.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use api::published::Published;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use sys::log;
use sys::process::inherited;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};

use crate::helper::outlive_signals;
use crate::http::{self, Ask, Asks, Inside, Listeners, Outcome, Tokens};
use drivers::lines::{JsonLines, Numbered, line, nonsense};

/// Maximum length of a question in bytes: a few names of some hundred bytes, and numbers.
pub(crate) const MOST_ASK: usize = 64 << 10;
/// Maximum number of questions in flight to the daemon.
pub(crate) const MOST_OPEN: usize = 32;
/// Maximum number of these that read the daemon's files.
const MOST_READINGS: usize = 16;

/// A line from the daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Down {
    /// The first line: the tokens of the TCP listener, if there is one.
    Tokens(Option<Tokens>),
    /// The latest tick. Earlier ticks may be left out.
    Tick(Arc<Published>),
    /// The answer to the question with this number.
    Answer(Box<Numbered<Outcome>>),
}

/// The daemon's lines.
type FromDaemon = JsonLines<BufReader<pipe::Receiver>>;

/// The file descriptors of the sockets that this process inherits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sockets {
    /// The unix socket.
    pub(crate) unix: i32,
    /// The TCP socket.
    pub(crate) tcp: Option<i32>,
}

/// Answers the API on these sockets until the daemon ends.
///
/// # Errors
/// A socket is not open, or a line of the daemon is invalid.
pub(crate) fn run(sockets: Sockets) -> io::Result<()> {
    let unix = UnixListener::from(inherited(sockets.unix)?);
    let tcp = sockets.tcp.map(inherited).transpose()?.map(TcpListener::from);
    let (down, up) = (io::stdin().as_fd().try_clone_to_owned()?, io::stdout());
    let up = up.as_fd().try_clone_to_owned()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    outlive_signals()?;
    runtime.block_on(async {
        let down = BufReader::new(pipe::Receiver::from_owned_fd(down)?);
        // The length of the daemon's lines is trusted.
        let down = JsonLines::new(down, usize::MAX - 1);
        let up = pipe::Sender::from_owned_fd(up)?;
        // The runtime has one thread, and that thread is confined now.
        if let Err(error) = sys::confine::to_what_is_open() {
            log::warn(&format!("what answers the API has more rights than it needs: {error}"));
        }
        serve(unix, tcp, down, up).await
    })
}

async fn serve(
    unix: UnixListener,
    tcp: Option<TcpListener>,
    mut down: FromDaemon,
    up: pipe::Sender,
) -> io::Result<()> {
    let Some(Down::Tokens(tokens)) = down.next().await? else {
        return Err(nonsense("the daemon begins without the tokens"));
    };
    let Some(Down::Tick(first)) = down.next().await? else {
        return Err(nonsense("the daemon begins without a tick"));
    };
    let tcp = tcp.zip(tokens);
    let (show, latest) = watch::channel(first);
    let (orders, ordered) = mpsc::channel(1);
    let (readings, read) = mpsc::channel(1);
    let inside = Inside { latest, asks: Asks { orders, readings } };
    let served = http::serve(Listeners { unix, tcp }, inside, std::future::pending());
    tokio::select! {
        served = served => served,
        ended = talk(down, up, &show, (ordered, read)) => ended,
    }
}

/// Passes ticks from the daemon and questions from clients, until the daemon ends.
async fn talk(
    mut down: FromDaemon,
    mut up: pipe::Sender,
    show: &watch::Sender<Arc<Published>>,
    (mut ordered, mut read): (mpsc::Receiver<Ask>, mpsc::Receiver<Ask>),
) -> io::Result<()> {
    // The flag tells whether the question is a reading.
    let mut open: BTreeMap<u64, (oneshot::Sender<Outcome>, bool)> = BTreeMap::new();
    let mut id = 0;
    loop {
        let readings = open.values().filter(|(_, is_reading)| *is_reading).count();
        let may_order = open.len() < MOST_OPEN;
        let may_read = may_order && readings < MOST_READINGS;
        // Further questions wait in their channels.
        let asked = tokio::select! {
            said = down.next() => match said? {
                Some(Down::Tick(tick)) => {
                    drop(show.send_replace(tick));
                    continue;
                }
                Some(Down::Answer(answer)) => {
                    if let Some((reply, _)) = open.remove(&answer.id) {
                        // The client may have disconnected.
                        let _ = reply.send(answer.what);
                    }
                    continue;
                }
                Some(Down::Tokens(_)) => return Err(nonsense("the daemon says the tokens twice")),
                None => return Ok(()),
            },
            Some(ask) = ordered.recv(), if may_order => ask,
            Some(ask) = read.recv(), if may_read => ask,
        };
        let Ask { question, reply } = asked;
        id += 1;
        let is_reading = question.is_of_history();
        let text = line(&Numbered { id, what: question })?;
        if text.len() > MOST_ASK {
            let _ = reply.send(Err(format!("a question of more than {MOST_ASK} bytes")));
            continue;
        }
        open.insert(id, (reply, is_reading));
        up.write_all(&text).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[tokio::test]
    async fn a_tick_comes_over_as_it_was_sent() {
        let sent = Arc::new(fixture::published());
        let bytes = line(&Down::Tick(Arc::clone(&sent))).unwrap();
        let Some(Down::Tick(came)) =
            JsonLines::new(bytes.as_slice(), bytes.len()).next().await.unwrap()
        else {
            panic!("it is something else");
        };
        assert_eq!(format!("{came:?}"), format!("{sent:?}"));
    }
}
