//! Questions to the daemon, for all that clients want beyond the latest tick, each with its answer.
//!
//! Questions and answers are plain data, because the daemon answers them from another process.

use std::time::Duration;

use model::{GroupName, VmName};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::{
    problem::Problem,
    wire::{HistoryRow, LoanRow},
};

/// How long the daemon may take to answer.
const LIMIT: Duration = Duration::from_secs(30);
/// How long it may take to say that it is there.
const SIGN_LIMIT: Duration = Duration::from_secs(3);
/// Rows of history in one answer, at most.
pub const MAX_ROWS: usize = 10_000;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// Say that you are there.
    Sign,
    /// Change nothing any more.
    Pause,
    /// Go on.
    Resume,
    /// Give every VM back what it had before Overbook touched it, and pause.
    Release,
    /// Tell the readings of a VM, and its changes.
    History {
        /// The VM.
        vm: VmName,
        /// Which part.
        span: Span,
    },
    /// Tell the last change of a VM.
    LastChange {
        /// The VM.
        vm: VmName,
    },
    /// Tell the decisions about a group's loans.
    Loans {
        /// The group.
        group: GroupName,
        /// Which part.
        span: Span,
    },
}

/// A part of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Rows since this moment, in milliseconds since the Unix epoch.
    pub since_wall_ms: u64,
    /// The most rows that are wanted, the newest ones.
    pub limit: usize,
}

/// An answer, by question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// It is done: words for the operator.
    Done(String),
    /// Rows of a VM, oldest first; `None`: nothing was ever kept of it.
    History(Option<Vec<HistoryRow>>),
    /// The last change of a VM.
    LastChange(Option<Box<HistoryRow>>),
    /// Decisions about a group, oldest first; `None`: nothing was ever kept of it.
    Loans(Option<Vec<LoanRow>>),
}

/// The answer, or why there is none: words for the operator.
pub type Outcome = Result<Answer, String>;

/// A question on its way to the daemon.
#[derive(Debug)]
pub struct Ask {
    /// The question.
    pub question: Question,
    /// Where the answer goes; a client that has gone misses nothing.
    pub reply: oneshot::Sender<Outcome>,
}

impl Question {
    /// Whether the answer comes from the disk, which may take its time or hang.
    #[must_use]
    pub const fn is_of_history(&self) -> bool {
        matches!(self, Self::History { .. } | Self::LastChange { .. } | Self::Loans { .. })
    }
}

/// The ways to the daemon. A disk that hangs keeps no order waiting.
#[derive(Clone, Debug)]
pub struct Asks {
    /// For what the daemon is to do.
    pub orders: mpsc::Sender<Ask>,
    /// For what is on its disk.
    pub readings: mpsc::Sender<Ask>,
}

/// Asks whether the daemon is there.
pub(super) async fn sign(asks: &Asks) -> Result<(), Problem> {
    ask_within(asks, Question::Sign, SIGN_LIMIT).await.map(drop)
}

/// Asks for something that is done, and answers the words about it.
pub(super) async fn change(asks: &Asks, question: Question) -> Result<String, Problem> {
    match ask(asks, question).await? {
        Answer::Done(text) => Ok(text),
        other => Err(odd(&other)),
    }
}

/// Asks for the rows of a VM.
pub(super) async fn history(
    asks: &Asks,
    vm: VmName,
    span: Span,
) -> Result<Option<Vec<HistoryRow>>, Problem> {
    match ask(asks, Question::History { vm, span }).await? {
        Answer::History(rows) => Ok(rows),
        other => Err(odd(&other)),
    }
}

/// Asks for the last change of a VM.
pub(super) async fn last_change(asks: &Asks, vm: VmName) -> Result<Option<HistoryRow>, Problem> {
    match ask(asks, Question::LastChange { vm }).await? {
        Answer::LastChange(row) => Ok(row.map(|row| *row)),
        other => Err(odd(&other)),
    }
}

/// Asks for the decisions about a group's loans.
pub(super) async fn loans(
    asks: &Asks,
    group: GroupName,
    span: Span,
) -> Result<Option<Vec<LoanRow>>, Problem> {
    match ask(asks, Question::Loans { group, span }).await? {
        Answer::Loans(rows) => Ok(rows),
        other => Err(odd(&other)),
    }
}

async fn ask(asks: &Asks, question: Question) -> Result<Answer, Problem> {
    ask_within(asks, question, LIMIT).await
}

async fn ask_within(asks: &Asks, question: Question, limit: Duration) -> Result<Answer, Problem> {
    let (reply, outcome) = oneshot::channel();
    let way = if question.is_of_history() { &asks.readings } else { &asks.orders };
    let asked = async {
        way.send(Ask { question, reply }).await.ok()?;
        outcome.await.ok()
    };
    let outcome = tokio::time::timeout(limit, asked).await;
    let answered = outcome.map_err(|_| Problem::Busy(limit.as_secs()))?;
    let ended = || Problem::Failed("the daemon is ending".to_owned());
    answered.ok_or_else(ended)?.map_err(Problem::Failed)
}

fn odd(answer: &Answer) -> Problem {
    Problem::Failed(format!("the daemon has answered another question: {answer:?}"))
}
