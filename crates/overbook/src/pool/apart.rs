//! A pool's store, accessed by a process of its own without rights.
//!
//! ```text
//!   daemon ──the pool, questions (JSON lines on standard input)──►  store  ◄──gRPC, TLS──►  etcd
//!          ◄─answers (JSON lines on standard output)──────────────
//! ```
//!
//! **Problem.** The daemon may read every process of the host and talk to every QEMU. Code that
//! parses the answers of another host should have none of these rights.
//!
//! **Idea.** [`Apart`] is a [`Store`]. The process behind it opens the real store, gives up its
//! rights ([`sys::confine`]), and answers. It may end at any moment. Questions in flight are then
//! answered with [`StoreError::Unreachable`], like those to a store that does not answer, and the
//! next process starts after a pause that doubles each time. Leases are in the store, so they
//! outlive the process.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use cluster::store::{Change, Snapshot, Still, Store, StoreError, WriterLease};
use futures_util::future::BoxFuture;
use model::spec::PoolSpec;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use sys::confine;
use sys::log;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::helper::{Helper, outlive_signals};
use drivers::lines::{JsonLines, Numbered, line, nonsense};

/// Maximum length of an answer, in bytes: all records of one host, written as numbers.
const MOST_ANSWER: usize = 32 << 20;
/// Timeout of a question, after which the process counts as stuck. Waiting for a change takes
/// longest.
const STUCK: Duration = Duration::from_secs(20);
/// Length of the queue of questions.
const WAITING: usize = 16;
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// A process that has run at least this long resets the pause.
const GOOD_RUN: Duration = Duration::from_secs(3);

/// A question to the store: one of its methods.
#[derive(Debug, Serialize, Deserialize)]
enum StoreRequest {
    Read { prefix: String },
    Changed { prefix: String, since: i64 },
    Sit { key: String, who: String },
    Stay { seat: WriterLease },
    Rise { seat: WriterLease },
    Write { seat: WriterLease, still: Vec<Still>, changes: Vec<Change> },
}

/// The answer to a question.
#[derive(Debug, Serialize, Deserialize)]
enum StoreAnswer {
    Read(Snapshot),
    Sat(Option<WriterLease>),
    Done,
}

/// The first line: whether the store could be opened, or why not.
type Begun = Result<(), String>;
type Outcome = Result<StoreAnswer, StoreError>;
type Ask = (StoreRequest, oneshot::Sender<Outcome>);

/// A store that a process of its own accesses.
pub(crate) struct Apart(mpsc::Sender<Ask>);

impl Apart {
    /// Opens the store of this pool. The process ends when this value is dropped.
    pub(crate) fn start(pool: PoolSpec) -> Self {
        let (asks, asked) = mpsc::channel(WAITING);
        tokio::spawn(keep(pool, asked));
        Self(asks)
    }

    async fn ask(&self, question: StoreRequest) -> Outcome {
        let gone = || StoreError::Unreachable("the daemon ends".to_owned());
        let (reply, outcome) = oneshot::channel();
        let asked = async {
            self.0.send((question, reply)).await.map_err(|_| gone())?;
            outcome.await.map_err(|_| gone())?
        };
        let late = |_| StoreError::Unreachable(format!("nothing within {STUCK:?}"));
        timeout(STUCK, asked).await.map_err(late)?
    }

    async fn done(&self, question: StoreRequest) -> Result<(), StoreError> {
        match self.ask(question).await? {
            StoreAnswer::Done => Ok(()),
            other => Err(odd(&other)),
        }
    }
}

fn odd(answer: &StoreAnswer) -> StoreError {
    StoreError::Refused(format!("another question was answered: {answer:?}"))
}

impl Store for Apart {
    fn read<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            match self.ask(StoreRequest::Read { prefix: prefix.to_owned() }).await? {
                StoreAnswer::Read(snapshot) => Ok(snapshot),
                other => Err(odd(&other)),
            }
        })
    }

    fn changed<'a>(&'a self, prefix: &'a str, since: i64) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.done(StoreRequest::Changed { prefix: prefix.to_owned(), since }))
    }

    fn sit<'a>(
        &'a self,
        key: &'a str,
        who: &'a str,
    ) -> BoxFuture<'a, Result<Option<WriterLease>, StoreError>> {
        Box::pin(async move {
            let (key, who) = (key.to_owned(), who.to_owned());
            match self.ask(StoreRequest::Sit { key, who }).await? {
                StoreAnswer::Sat(seat) => Ok(seat),
                other => Err(odd(&other)),
            }
        })
    }

    fn stay<'a>(&'a self, seat: &'a WriterLease) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.done(StoreRequest::Stay { seat: seat.clone() }))
    }

    fn rise(&self, seat: WriterLease) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.done(StoreRequest::Rise { seat }))
    }

    fn write<'a>(
        &'a self,
        seat: &'a WriterLease,
        still: Vec<Still>,
        changes: Vec<Change>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.done(StoreRequest::Write { seat: seat.clone(), still, changes }))
    }
}

/// Keeps a process that answers, until no client can ask any more.
async fn keep(pool: PoolSpec, mut asked: mpsc::Receiver<Ask>) {
    let (mut pause, mut told) = (PAUSES.0, String::new());
    loop {
        let started = Instant::now();
        let Err(error) = serve(&pool, &mut asked).await else { return };
        let news = format!("the process that asks the pool's store has ended: {error}");
        if news != told {
            log::warn(&news);
            told = news;
        }
        pause = if started.elapsed() < GOOD_RUN { pause } else { PAUSES.0 };
        sleep(pause).await;
        pause = (2 * pause).min(PAUSES.1);
    }
}

/// Runs one process. Returns `Ok` when no client can ask any more.
async fn serve(pool: &PoolSpec, asked: &mut mpsc::Receiver<Ask>) -> io::Result<()> {
    let (helper, mut down, up) = Helper::start(Helper::program().arg("store"))?;
    let mut open = BTreeMap::new();
    let outcome = pass(pool, asked, &mut open, &mut down, JsonLines::new(up, MOST_ANSWER)).await;
    let status = helper.end().await;
    let outcome = outcome.map_err(|error| io::Error::other(format!("{error}{status}")));
    if let Err(error) = &outcome {
        let waiting = std::iter::from_fn(|| asked.try_recv().ok()).map(|(_, reply)| reply);
        for reply in open.into_values().map(|(reply, _)| reply).chain(waiting) {
            // The caller may have dropped the receiver.
            let _ = reply.send(Err(StoreError::Unreachable(error.to_string())));
        }
    }
    outcome
}

/// Questions in flight, with their start times.
type Open = BTreeMap<u64, (oneshot::Sender<Outcome>, Instant)>;

async fn pass(
    pool: &PoolSpec,
    asked: &mut mpsc::Receiver<Ask>,
    open: &mut Open,
    down: &mut pipe::Sender,
    mut up: JsonLines<BufReader<pipe::Receiver>>,
) -> io::Result<()> {
    down.write_all(&line(pool)?).await?;
    let begun = timeout(STUCK, up.next::<Begun>()).await.map_err(|_| is_stuck())??;
    begun.ok_or(io::ErrorKind::UnexpectedEof)?.map_err(io::Error::other)?;
    let mut id = 0;
    loop {
        // The numbers ascend, so the first question is the oldest.
        let oldest = open.first_key_value().map(|(_, (_, since))| *since + STUCK);
        let stuck = async {
            match oldest {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ask = asked.recv() => {
                let Some((what, reply)) = ask else { return Ok(()) };
                id += 1;
                open.insert(id, (reply, Instant::now()));
                let text = line(&Numbered { id, what })?;
                timeout(STUCK, down.write_all(&text)).await.map_err(|_| is_stuck())??;
            }
            answer = up.next::<Numbered<Outcome>>() => {
                let Some(Numbered { id, what }) = answer? else {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                };
                if let Some((reply, _)) = open.remove(&id) {
                    // The caller may have dropped the receiver.
                    let _ = reply.send(what);
                }
            }
            () = stuck => return Err(is_stuck()),
        }
    }
}

fn is_stuck() -> io::Error {
    nonsense(format!("nothing within {STUCK:?}"))
}

/// Answers the daemon's questions to its pool's store, until the daemon ends.
///
/// # Errors
/// The daemon names no pool, or a pool whose store cannot be opened.
pub(crate) fn run() -> io::Result<()> {
    let down = io::stdin().as_fd().try_clone_to_owned()?;
    let up = io::stdout().as_fd().try_clone_to_owned()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    outlive_signals()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let down = BufReader::new(pipe::Receiver::from_owned_fd(down)?);
        // The length of the daemon's lines is trusted.
        let mut down = JsonLines::new(down, usize::MAX - 1);
        let mut up = pipe::Sender::from_owned_fd(up)?;
        let Some(pool) = down.next::<PoolSpec>().await? else { return Ok(()) };
        let store = super::store(&pool).await;
        let begun: Begun = store.as_ref().map(drop).map_err(ToString::to_string);
        up.write_all(&line(&begun)?).await?;
        // The daemon was told the reason.
        let Ok(store) = store else { return Ok(()) };
        // The certificates are read by now. Threads for name lookups start later.
        if let Err(error) = confine::to_the_network() {
            log::warn(&format!(
                "what asks the pool's store has more rights than it needs: {error}"
            ));
        }
        answer_all(&store, down, up).await
    });
    // A name lookup in progress is not waited for.
    runtime.shutdown_background();
    outcome
}

async fn answer_all(
    store: &Arc<dyn Store>,
    mut down: JsonLines<BufReader<pipe::Receiver>>,
    mut up: pipe::Sender,
) -> io::Result<()> {
    let (done, mut answered) = mpsc::channel(WAITING);
    loop {
        tokio::select! {
            asked = down.next::<Numbered<StoreRequest>>() => {
                let Some(Numbered { id, what }) = asked? else { return Ok(()) };
                let (store, done) = (Arc::clone(store), done.clone());
                tokio::spawn(async move {
                    let what = answer(&*store, what).await;
                    // The receiver has gone when this process ends.
                    let _ = done.send(Numbered { id, what }).await;
                });
            }
            Some(answer) = answered.recv() => up.write_all(&line(&answer)?).await?,
        }
    }
}

async fn answer(store: &dyn Store, question: StoreRequest) -> Outcome {
    let done = |()| StoreAnswer::Done;
    match question {
        StoreRequest::Read { prefix } => store.read(&prefix).await.map(StoreAnswer::Read),
        StoreRequest::Changed { prefix, since } => store.changed(&prefix, since).await.map(done),
        StoreRequest::Sit { key, who } => store.sit(&key, &who).await.map(StoreAnswer::Sat),
        StoreRequest::Stay { seat } => store.stay(&seat).await.map(done),
        StoreRequest::Rise { seat } => store.rise(seat).await.map(done),
        StoreRequest::Write { seat, still, changes } => {
            store.write(&seat, still, changes).await.map(done)
        }
    }
}
