//! What clients want of the daemon beyond the latest tick: questions, each with its answer.
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

/// What the daemon is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// Change nothing any more.
    Pause,
    /// Go on.
    Resume,
    /// Give every VM back what it had before Overbook touched it, and pause.
    Release,
    /// What a VM had and what was done to it.
    History {
        /// The VM.
        vm: VmName,
        /// Which part.
        span: Span,
    },
    /// The last change of a VM.
    LastChange {
        /// The VM.
        vm: VmName,
    },
    /// What a group lent and borrowed, and why.
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
    /// The newest rows, at most so many.
    pub limit: usize,
}

/// What the daemon says, by question.
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
    /// What is asked.
    pub question: Question,
    /// Where the answer goes; a client that has gone misses nothing.
    pub reply: oneshot::Sender<Outcome>,
}

/// The way to the daemon.
pub type Asks = mpsc::Sender<Ask>;

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
    let (reply, outcome) = oneshot::channel();
    let asked = async {
        asks.send(Ask { question, reply }).await.ok()?;
        outcome.await.ok()
    };
    let outcome = tokio::time::timeout(LIMIT, asked).await;
    let answered = outcome.map_err(|_| Problem::Busy(LIMIT.as_secs()))?;
    let ended = || Problem::Failed("the daemon is ending".to_owned());
    answered.ok_or_else(ended)?.map_err(Problem::Failed)
}

fn odd(answer: &Answer) -> Problem {
    Problem::Failed(format!("the daemon has answered another question: {answer:?}"))
}
