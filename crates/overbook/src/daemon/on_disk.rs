//! Answers questions about the history, each on a thread that may block on the disk.

use std::path::Path;

use crate::history;
use crate::http::{LoopAnswer, MAX_ROWS, Outcome, Question, Span};

/// Any one row that was ever kept.
const ANY: Span = Span { since_wall_ms: 0, until_wall_ms: u64::MAX, limit: 1 };

/// The answer from the history in `file`. `None`: the question is not about the history.
pub(super) fn answer(file: &Path, question: &Question) -> Option<Outcome> {
    let outcome = match question {
        Question::Sign
        | Question::Pause(_)
        | Question::Resume(_)
        | Question::Release(_)
        | Question::PreviewRelease
        | Question::Lender(_)
        | Question::Reload { .. } => return None,
        Question::History { vm, span } => {
            let read = |span: Span| history::read(file, vm, span.wall_ms(), span.limit);
            known(read, *span).map(LoopAnswer::History)
        }
        Question::LastChange { vm } => {
            let row = history::last_change(file, vm);
            row.map(|row| LoopAnswer::LastChange(row.map(|row| Box::new(row.into()))))
        }
        Question::Loans { group, span } => {
            let read = |span: Span| history::loans(file, group, span.wall_ms(), span.limit);
            known(read, *span).map(LoopAnswer::Loans)
        }
    };
    Some(outcome.map_err(|error| error.to_string()))
}

/// The rows of a span. `None`: the history has no row at all for the name.
fn known<T, U: From<T>, E>(
    read: impl Fn(Span) -> Result<Vec<T>, E>,
    span: Span,
) -> Result<Option<Vec<U>>, E> {
    let rows = read(Span { limit: span.limit.min(MAX_ROWS), ..span })?;
    let is_known = !rows.is_empty() || !read(ANY)?.is_empty();
    Ok(is_known.then(|| rows.into_iter().map(U::from).collect()))
}
