//! Questions to the daemon: everything that clients want beyond the latest tick, and the answers.
//!
//! Questions and answers are plain data, because they cross from one process to another.

use std::time::Duration;

use api::published::Lender;
use api::wire::{HistoryRow, LoanRow, ReleasePreview};
use model::{Bytes, GroupName, Scope, VmName};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::problem::Problem;

/// Timeout for the daemon's answer.
const LIMIT: Duration = Duration::from_secs(30);
/// Timeout for a sign of life.
const SIGN_LIMIT: Duration = Duration::from_secs(3);
/// Maximum number of rows in one answer.
pub const MAX_ROWS: usize = 10_000;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// Ask for a sign of life.
    Sign,
    /// Stop all changes there.
    Pause(Scope),
    /// End the pause there.
    Resume(Scope),
    /// Give VMs back what they had before Overbook touched them, and pause there.
    Release(Scope),
    /// Find out what a release of the whole host would do.
    PreviewRelease,
    /// Tell of the host's repository, and ask how much it may hold.
    Lender(Lender),
    /// Read the configuration again.
    Reload {
        /// Whether it may take much.
        is_sure: bool,
    },
    /// Read a VM's readings and changes.
    History {
        /// The VM.
        vm: VmName,
        /// The span.
        span: Span,
    },
    /// Read the last change of a VM.
    LastChange {
        /// The VM.
        vm: VmName,
    },
    /// Read the decisions about a group's loans.
    Loans {
        /// The group.
        group: GroupName,
        /// The span.
        span: Span,
    },
}

/// A part of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Rows since this moment, in milliseconds since the Unix epoch.
    pub since_wall_ms: u64,
    /// Rows before this moment, in milliseconds since the Unix epoch.
    pub until_wall_ms: u64,
    /// Maximum number of rows, the newest ones.
    pub limit: usize,
}

impl Span {
    /// Its moments, in milliseconds since the Unix epoch.
    #[must_use]
    pub const fn wall_ms(&self) -> std::ops::Range<u64> {
        self.since_wall_ms..self.until_wall_ms
    }
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LoopAnswer {
    /// The action is done: words for the operator.
    Done(String),
    /// The memory that the repository may hold.
    MayHold(Bytes),
    /// The effect of a release.
    Preview(Box<ReleasePreview>),
    /// Rows of a VM, oldest first. `None`: nothing was ever recorded for it.
    History(Option<Vec<HistoryRow>>),
    /// The last change of a VM.
    LastChange(Option<Box<HistoryRow>>),
    /// Decisions about a group, oldest first. `None`: nothing was ever recorded for it.
    Loans(Option<Vec<LoanRow>>),
}

/// The answer, or why there is none, in words for the operator.
pub type Outcome = Result<LoopAnswer, String>;

/// A question on its way to the daemon.
#[derive(Debug)]
pub struct Ask {
    /// The question.
    pub question: Question,
    /// The channel for the answer. The client may have gone.
    pub reply: oneshot::Sender<Outcome>,
}

impl Question {
    /// Whether the answer comes from the disk, which may be slow or hang.
    #[must_use]
    pub const fn is_of_history(&self) -> bool {
        matches!(self, Self::History { .. } | Self::LastChange { .. } | Self::Loans { .. })
    }
}

/// The channels to the daemon. They are separate so that a hanging disk delays no order.
#[derive(Clone, Debug)]
pub struct Asks {
    /// For orders to the daemon.
    pub orders: mpsc::Sender<Ask>,
    /// For questions about its history.
    pub readings: mpsc::Sender<Ask>,
}

/// Asks the daemon for a sign of life.
pub(super) async fn sign(asks: &Asks) -> Result<(), Problem> {
    ask_within(asks, Question::Sign, SIGN_LIMIT).await.map(drop)
}

/// Tells the daemon of the host's repository, and asks how much that may hold.
pub(super) async fn lender(asks: &Asks, lender: Lender) -> Result<Bytes, Problem> {
    match ask(asks, Question::Lender(lender)).await? {
        LoopAnswer::MayHold(amount) => Ok(amount),
        other => Err(odd(&other)),
    }
}

/// Sends an order, and returns the words of the answer.
pub(super) async fn change(asks: &Asks, question: Question) -> Result<String, Problem> {
    match ask(asks, question).await? {
        LoopAnswer::Done(text) => Ok(text),
        other => Err(odd(&other)),
    }
}

/// Asks for the effect of a release.
pub(super) async fn preview(asks: &Asks) -> Result<ReleasePreview, Problem> {
    match ask(asks, Question::PreviewRelease).await? {
        LoopAnswer::Preview(preview) => Ok(*preview),
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
        LoopAnswer::History(rows) => Ok(rows),
        other => Err(odd(&other)),
    }
}

/// Asks for the last change of a VM.
pub(super) async fn last_change(asks: &Asks, vm: VmName) -> Result<Option<HistoryRow>, Problem> {
    match ask(asks, Question::LastChange { vm }).await? {
        LoopAnswer::LastChange(row) => Ok(row.map(|row| *row)),
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
        LoopAnswer::Loans(rows) => Ok(rows),
        other => Err(odd(&other)),
    }
}

async fn ask(asks: &Asks, question: Question) -> Result<LoopAnswer, Problem> {
    ask_within(asks, question, LIMIT).await
}

async fn ask_within(
    asks: &Asks,
    question: Question,
    limit: Duration,
) -> Result<LoopAnswer, Problem> {
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

fn odd(answer: &LoopAnswer) -> Problem {
    Problem::Failed(format!("the daemon has answered another question: {answer:?}"))
}
