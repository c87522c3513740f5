//! `overbook history NAME`: the memory of a VM, its changes and its moves between hosts, or the
//! loans of a group.
//!
//! By default it shows means and lines of the whole time ([`summary`]). With `--rows` it shows the
//! rows as they were recorded.

mod summary;

use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use model::{Millis, PagesPerMs, date::utc};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Format,
    context::Context,
    error::CliError,
    output::Output,
    screen,
    table::{Column, TextTable, rate, size},
    when,
};
use crate::http::MAX_ROWS;
use api::client::{ApiClient, path_of};
use api::wire::{HistoryRow, LoanRow};

/// Rows without `--limit`.
const ROWS: usize = 60;
/// Changes without `--limit`.
const CHANGES: usize = 20;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The VM's name; it need not be running any more
    #[arg(add = super::names::vms_and_groups())]
    name: String,
    /// It is a group's name: show what that lent and borrowed
    #[arg(long)]
    loans: bool,
    /// How far to look back: 90s, 15min, 2h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = when::length)]
    since: Millis,
    /// Look back from this moment instead of now, for example 2026-05-28T20:23:40Z
    #[arg(long, value_name = "MOMENT", value_parser = when::moment)]
    until: Option<u64>,
    /// Show every recorded row instead of means
    #[arg(long)]
    rows: bool,
    /// The newest changes, at most this many [default: 20]; with --rows, --loans or --json the
    /// newest rows [default: 60]
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
    #[command(flatten)]
    format: Format,
}

const COLUMNS: [Column; 11] = [
    ("TIME", false),
    ("MAY USE", true),
    ("TARGET", true),
    ("HOST:USED", true),
    ("WSS", true),
    ("SAVED", true),
    ("SCAN", true),
    ("GUEST:SWAP", true),
    ("OUT", true),
    ("REFAULTS/s", true),
    ("CHANGE", false),
];
/// Left out of a narrow table, in this order.
const DROPPABLE: [&str; 9] =
    ["SCAN", "SAVED", "REFAULTS/s", "OUT", "GUEST:SWAP", "WSS", "TARGET", "HOST:USED", "MAY USE"];

const LOAN_COLUMNS: [Column; 2] = [("TIME", false), ("LOAN", false)];

/// A row with its time.
trait Dated: Serialize + DeserializeOwned {
    /// Milliseconds since the Unix epoch.
    fn wall_ms(&self) -> u64;
}

impl Dated for HistoryRow {
    fn wall_ms(&self) -> u64 {
        self.wall_ms
    }
}

impl Dated for LoanRow {
    fn wall_ms(&self) -> u64 {
        self.wall_ms
    }
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let end = arguments.until.unwrap_or(now);
    let since = end.saturating_sub(arguments.since.0);
    let path = path_of(if arguments.loans { "loans" } else { "history" }, &arguments.name);
    let client = context.client()?;
    let ask = |until: Option<u64>, limit: usize| -> String {
        let until = until.map(|until| format!("&until_wall_ms={until}")).unwrap_or_default();
        format!("{path}?since_wall_ms={since}{until}&limit={limit}")
    };
    if arguments.loans {
        let rows: Vec<LoanRow> = fetch(&client, ask, arguments.until, arguments.most())?;
        return show(arguments, &rows, &LOAN_COLUMNS, loan);
    }
    if arguments.rows || arguments.format.json {
        let rows: Vec<HistoryRow> = fetch(&client, ask, arguments.until, arguments.most())?;
        return show(arguments, &rows, &COLUMNS, row);
    }
    let rows: Vec<HistoryRow> = fetch(&client, ask, arguments.until, usize::MAX)?;
    if rows.is_empty() {
        return Ok(Output::text(&arguments.nothing()));
    }
    let changes = arguments.limit.unwrap_or(CHANGES);
    let title = format!("{} in {}", arguments.name, arguments.span());
    Ok(Output::text(&summary::text(&title, &rows, since..end, changes, screen::width())))
}

impl Arguments {
    const fn most(&self) -> usize {
        match self.limit {
            Some(limit) => limit,
            None => ROWS,
        }
    }

    /// The time that was asked for, in words.
    fn span(&self) -> String {
        let since = self.since;
        match self.until {
            Some(until) => format!("the {since} before {}", utc(until)),
            None => format!("the last {since}"),
        }
    }

    fn nothing(&self) -> String {
        let (name, span) = (&self.name, self.span());
        if self.loans {
            return format!("no loan of {name} began, ended or changed in {span}\n");
        }
        format!("nothing is known of {name} in {span}\n")
    }
}

/// The newest `limit` rows, oldest first. One answer has at most [`MAX_ROWS`], so several may be
/// needed.
fn fetch<T: Dated>(
    client: &ApiClient,
    path: impl Fn(Option<u64>, usize) -> String,
    until: Option<u64>,
    limit: usize,
) -> Result<Vec<T>, CliError> {
    pages(until, limit, |until, limit| Ok(client.get(&path(until, limit))?))
}

fn pages<T: Dated>(
    mut until: Option<u64>,
    limit: usize,
    ask: impl Fn(Option<u64>, usize) -> Result<Vec<T>, CliError>,
) -> Result<Vec<T>, CliError> {
    let mut rows: Vec<T> = Vec::new();
    loop {
        let wanted = limit.saturating_sub(rows.len()).min(MAX_ROWS);
        let mut page = ask(until, wanted)?;
        let is_last = page.len() < wanted || wanted < MAX_ROWS;
        if !is_last {
            // More rows of the oldest moment may be missing: the next page has all of them.
            let oldest = page.first().map_or(0, T::wall_ms);
            let newer = page.iter().position(|row| row.wall_ms() > oldest);
            if let Some(newer) = newer {
                page.drain(..newer);
                until = Some(oldest + 1);
            } else {
                until = Some(oldest);
            }
        }
        page.append(&mut rows);
        rows = page;
        if is_last {
            return Ok(rows);
        }
    }
}

fn show<T: Dated>(
    arguments: &Arguments,
    rows: &[T],
    columns: &[Column],
    row: fn(&T) -> Vec<String>,
) -> Result<Output, CliError> {
    if arguments.format.json {
        return Output::json(&rows);
    }
    if rows.is_empty() {
        return Ok(Output::text(&arguments.nothing()));
    }
    let cells: Vec<_> = rows.iter().map(row).collect();
    let mut text = TextTable::fitted(columns, &cells, &DROPPABLE, screen::width()).text();
    if rows.len() >= arguments.most() {
        let oldest = rows.first().map_or(0, T::wall_ms);
        text += &format!(
            "\nearlier rows: --until {}\nthe newest {} rows of {}; --limit shows more\n",
            utc(oldest),
            rows.len(),
            arguments.span()
        );
    }
    Ok(Output::text(&text))
}

fn loan(row: &LoanRow) -> Vec<String> {
    vec![utc(row.wall_ms), decided(&row.loan.words(), Some(&row.mode))]
}

fn row(row: &HistoryRow) -> Vec<String> {
    vec![
        utc(row.wall_ms),
        size(row.balloon_bytes),
        size(row.target_bytes),
        size(row.used_bytes),
        size(row.working_set_bytes),
        size(row.saved_bytes),
        row.scan_rate_pages_per_ms
            .map_or_else(|| "-".to_owned(), |rate| PagesPerMs(rate).to_string()),
        rate(row.swap_bytes_per_second),
        size(row.paged_out_bytes),
        row.refaults_per_second.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}")),
        change(row),
    ]
}

/// The change or the move in a row; empty: it is a reading.
fn change(row: &HistoryRow) -> String {
    match (&row.change, row.mode.as_deref()) {
        (None, _) => row.moved.clone().unwrap_or_default(),
        (Some(change), mode) => decided(change, mode),
    }
}

/// A decision, with the mode if it was not carried out.
fn decided(what: &str, mode: Option<&str>) -> String {
    match mode {
        Some("enforce") => what.to_owned(),
        mode => format!("({}) {what}", mode.unwrap_or("mode unknown")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers as the daemon does: the newest rows before a moment.
    fn asked(times: &[u64], until: Option<u64>, limit: usize) -> Vec<HistoryRow> {
        let before = times.iter().filter(|time| until.is_none_or(|until| **time < until));
        let row = |time: &u64| HistoryRow { wall_ms: *time, ..HistoryRow::default() };
        let rows: Vec<HistoryRow> = before.map(row).collect();
        rows[rows.len().saturating_sub(limit)..].to_vec()
    }

    #[test]
    fn more_rows_than_one_answer_holds_are_asked_for_page_by_page() {
        // Each moment has a reading and a change.
        let times: Vec<u64> = (0..25_001).map(|n| n / 2).collect();
        let of = |limit| -> Vec<u64> {
            let rows = pages(None, limit, |until, limit| Ok(asked(&times, until, limit))).unwrap();
            rows.iter().map(|row| row.wall_ms).collect()
        };
        assert_eq!(of(usize::MAX), times);
        assert_eq!(of(60), times[times.len() - 60..]);
        assert_eq!(of(MAX_ROWS + 7), times[times.len() - MAX_ROWS - 7..]);
    }

    #[test]
    fn a_time_without_rows_is_told_in_words() {
        let mut asked = Arguments {
            name: "web".to_owned(),
            loans: false,
            since: Millis::secs(3600),
            until: None,
            rows: false,
            limit: None,
            format: Format { json: false },
        };
        assert_eq!(asked.nothing(), "nothing is known of web in the last 60 min\n");
        asked.loans = true;
        // A loan that lasts is on record at its beginning and at its end.
        let no_news = "no loan of web began, ended or changed in the last 60 min\n";
        assert_eq!(asked.nothing(), no_news);
    }

    #[test]
    fn a_page_of_one_moment_does_not_repeat_for_ever() {
        let times = vec![5; MAX_ROWS + 1];
        let rows: Vec<HistoryRow> =
            pages(None, usize::MAX, |until, limit| Ok(asked(&times, until, limit))).unwrap();
        assert_eq!(rows.len(), MAX_ROWS);
    }

    #[test]
    fn pages_end_before_the_given_moment() {
        let times: Vec<u64> = (0..100).collect();
        let rows: Vec<HistoryRow> =
            pages(Some(50), 10, |until, limit| Ok(asked(&times, until, limit))).unwrap();
        assert_eq!((rows[0].wall_ms, rows[9].wall_ms), (40, 49));
    }
}
