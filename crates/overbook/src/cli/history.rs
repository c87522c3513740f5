//! `overbook history NAME`: the memory of a VM, its changes and its moves between hosts, or the
//! loans of a group.

use std::time::{SystemTime, UNIX_EPOCH};

use api::client::path_of;
use api::wire::{HistoryRow, LoanRow};
use clap::Args;
use model::{Millis, PagesPerMs};
use serde::Serialize;

use super::{
    Format,
    context::Context,
    error::CliError,
    output::Output,
    table::{Column, rate, size, table},
    when,
};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The VM's name; it need not be running any more
    name: String,
    /// It is a group's name: show what that lent and borrowed
    #[arg(long)]
    loans: bool,
    /// How far to look back: 90s, 15min, 2h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = when::length)]
    since: Millis,
    /// The newest rows, at most this many
    #[arg(long, value_name = "ROWS", default_value_t = 60)]
    limit: usize,
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

const LOAN_COLUMNS: [Column; 2] = [("TIME", false), ("LOAN", false)];

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let since = now.saturating_sub(arguments.since.0);
    let path = path_of(if arguments.loans { "loans" } else { "history" }, &arguments.name);
    let path = format!("{path}?since_wall_ms={since}&limit={}", arguments.limit);
    if arguments.loans {
        let rows: Vec<LoanRow> = context.client()?.get(&path)?;
        return show(arguments, &rows, &LOAN_COLUMNS, loan);
    }
    let rows: Vec<HistoryRow> = context.client()?.get(&path)?;
    show(arguments, &rows, &COLUMNS, row)
}

fn show<T: Serialize>(
    arguments: &Arguments,
    rows: &[T],
    columns: &[Column],
    row: fn(&T) -> Vec<String>,
) -> Result<Output, CliError> {
    if arguments.format.json {
        return Output::json(&rows);
    }
    if rows.is_empty() {
        let (name, since) = (&arguments.name, arguments.since);
        return Ok(Output::text(&format!("nothing is known of {name} in the last {since}\n")));
    }
    let mut text = table(columns, &rows.iter().map(row).collect::<Vec<_>>());
    if rows.len() >= arguments.limit {
        let (limit, since) = (arguments.limit, arguments.since);
        text += &format!("\nthe newest {limit} rows of the last {since}; --limit shows more\n");
    }
    Ok(Output::text(&text))
}

fn loan(row: &LoanRow) -> Vec<String> {
    vec![when::utc(row.wall_ms), decided(&row.loan.words(), Some(&row.mode))]
}

fn row(row: &HistoryRow) -> Vec<String> {
    vec![
        when::utc(row.wall_ms),
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
