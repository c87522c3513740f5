//! Starts the process that answers the API ([`crate::api_process`]), and restarts it when it ends.
//!
//! The daemon keeps the sockets and the socket file, so clients stay in the backlog when a
//! process ends. The next process starts after a pause that doubles each time. The questions of
//! the process are bounded ([`MOST_ASK`], [`MOST_OPEN`]): a process that asks more can no longer
//! be trusted, and is ended.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::log;
use crate::api_process::{Down, MOST_ASK, MOST_OPEN};
use crate::helper::Helper;
use crate::http::{Ask, Doors, Outcome, Question, Tokens};

type Asks = mpsc::Sender<Ask>;
use api::published::Latest;

use drivers::lines::{JsonLines, Numbered, line, nonsense};

/// Interval at which the socket's file is checked.
const LOOK: Duration = Duration::from_secs(1);
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));
/// A process that has run at least this long resets the pause.
const GOOD_RUN: Duration = Duration::from_secs(3);
/// A process that does not read a line for this long is stuck.
const STUCK: Duration = Duration::from_secs(15);

/// Keeps a process that answers the API running until `ended`.
pub(super) async fn keep(
    mut doors: Doors,
    latest: Latest,
    asks: Asks,
    ended: oneshot::Receiver<()>,
) {
    let serving = async {
        let mut pause = PAUSES.0;
        loop {
            let started = Instant::now();
            match serve(&mut doors, latest.clone(), &asks).await {
                // The socket file was made again.
                Ok(()) => continue,
                Err(error) => {
                    log::warn(&format!("the process that answers the API has ended: {error}"));
                }
            }
            pause = if started.elapsed() < GOOD_RUN { pause } else { PAUSES.0 };
            sleep(pause).await;
            pause = (2 * pause).min(PAUSES.1);
        }
    };
    tokio::select! {
        () = serving => {}
        _ = ended => {}
    }
}

/// Runs one process until it ends, or until the socket file was made again.
async fn serve(doors: &mut Doors, latest: Latest, asks: &Asks) -> io::Result<()> {
    let listeners = doors.listeners();
    let mut spawn = Helper::program().arg("api");
    let unix = spawn.pass(&listeners.unix)?;
    spawn = spawn.arg(unix.to_string());
    let mut tokens = None;
    if let Some((tcp, secrets)) = &listeners.tcp {
        let tcp = spawn.pass(tcp)?;
        spawn = spawn.arg(tcp.to_string());
        tokens = Some(secrets.clone());
    }
    let (helper, down, up) = Helper::start(spawn)?;
    let (answers, answered) = mpsc::channel(MOST_OPEN);
    let outcome = tokio::select! {
        told = tell(down, tokens, latest, answered) => told,
        heard = hear(JsonLines::new(up, MOST_ASK), asks, answers) => heard,
        () = another_socket(doors) => Ok(()),
    };
    let status = helper.end().await;
    outcome.map_err(|error| io::Error::other(format!("{error}{status}")))
}

/// Returns when there is a new listener to serve.
async fn another_socket(doors: &mut Doors) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        if doors.look() {
            return;
        }
    }
}

/// Sends ticks and answers to the process. Ticks that it is too slow for are left out.
async fn tell(
    mut down: pipe::Sender,
    tokens: Option<Tokens>,
    mut latest: Latest,
    mut answered: mpsc::Receiver<Numbered<Outcome>>,
) -> io::Result<()> {
    write(&mut down, Down::Tokens(tokens)).await?;
    latest.mark_changed();
    loop {
        tokio::select! {
            changed = latest.changed() => {
                changed.map_err(io::Error::other)?;
                write(&mut down, newest(&mut latest)).await?;
            }
            Some(answer) = answered.recv() => {
                // The tick that shows the effects was published before the answer.
                if latest.has_changed().map_err(io::Error::other)? {
                    write(&mut down, newest(&mut latest)).await?;
                }
                write(&mut down, Down::Answer(Box::new(answer))).await?;
            }
        }
    }
}

fn newest(latest: &mut Latest) -> Down {
    Down::Tick(Arc::clone(&latest.borrow_and_update()))
}

async fn write(down: &mut pipe::Sender, said: Down) -> io::Result<()> {
    // Formatting a tick takes a while on a host with a thousand VMs.
    let text = spawn_blocking(move || line(&said)).await.map_err(io::Error::other)??;
    let written = timeout(STUCK, down.write_all(&text)).await;
    written.map_err(|_| nonsense(format!("it takes nothing for {STUCK:?}")))?
}

/// Passes the questions of the process to the loop.
async fn hear(
    mut up: JsonLines<BufReader<pipe::Receiver>>,
    asks: &Asks,
    answers: mpsc::Sender<Numbered<Outcome>>,
) -> io::Result<()> {
    let mut open = JoinSet::new();
    while let Some(Numbered { id, what }) = up.next::<Numbered<Question>>().await? {
        while open.try_join_next().is_some() {}
        if open.len() >= MOST_OPEN {
            return Err(nonsense(format!("it asks more than {MOST_OPEN} questions at a time")));
        }
        let (asks, answers) = (asks.clone(), answers.clone());
        open.spawn(async move {
            let (reply, outcome) = oneshot::channel();
            let ended = || Err("the daemon is ending".to_owned());
            let what = match asks.send(Ask { question: what, reply }).await {
                Ok(()) => outcome.await.unwrap_or_else(|_| ended()),
                Err(_) => ended(),
            };
            // The process may have ended.
            let _ = answers.send(Numbered { id, what }).await;
        });
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error with which a process ends that has written this text.
    async fn end_of(text: &[u8]) -> String {
        let (asks, mut asked) = mpsc::channel(1);
        let (answers, _kept) = mpsc::channel(MOST_OPEN);
        let (up, theirs) = io::pipe().unwrap();
        let up = BufReader::new(pipe::Receiver::from_owned_fd(up.into()).unwrap());
        let mut theirs = pipe::Sender::from_owned_fd(theirs.into()).unwrap();
        let unanswered = async {
            let mut kept = Vec::new();
            while let Some(ask) = asked.recv().await {
                kept.push(ask);
            }
        };
        let written = async {
            theirs.write_all(text).await.unwrap();
            drop(theirs);
            std::future::pending().await
        };
        tokio::select! {
            ended = hear(JsonLines::new(up, MOST_ASK), &asks, answers) => {
                ended.unwrap_err().to_string()
            }
            () = unanswered => unreachable!("the way to the loop stays open"),
            () = written => unreachable!("it waits"),
        }
    }

    #[tokio::test]
    async fn a_process_that_asks_too_much_or_makes_no_sense_is_none_of_ours() {
        let ask = |id| line(&Numbered { id, what: Question::Pause(model::Scope::Host) }).unwrap();
        let many: Vec<u8> = (0..=MOST_OPEN as u64).flat_map(ask).collect();
        assert_eq!(end_of(&many).await, "it asks more than 32 questions at a time");
        let few = &many[..many.len() - ask(MOST_OPEN as u64).len()];
        assert_eq!(end_of(few).await, "unexpected end of file", "32 are answered");
        let long = vec![b'x'; MOST_ASK + 1];
        assert_eq!(end_of(&long).await, "a line of more than 65536 bytes");
        let why = end_of(b"{\"id\":1,\"what\":\"Halt\"}\n").await;
        assert!(why.starts_with("unknown variant `Halt`"), "{why}");
    }
}
