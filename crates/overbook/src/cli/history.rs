//! `overbook history VM`: what it had and what was done to it.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use model::{Millis, PagesPerMs};

use super::{
    Format,
    context::Context,
    error::CliError,
    output::Output,
    table::{Column, rate, size, table},
    when,
};
use crate::{client::path_of, http::wire::HistoryRow};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Its name; it need not be running any more
    vm: String,
    /// How far to look back: 90s, 15min, 2h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = when::length)]
    since: Millis,
    /// The newest rows, at most this many
    #[arg(long, value_name = "ROWS", default_value_t = 60)]
    limit: usize,
    #[command(flatten)]
    format: Format,
}

const COLUMNS: [Column; 9] = [
    ("TIME", false),
    ("MAY USE", true),
    ("TARGET", true),
    ("HOST:USED", true),
    ("WSS", true),
    ("SAVED", true),
    ("SCAN", true),
    ("GUEST:SWAP", true),
    ("CHANGE", false),
];

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let since = now.saturating_sub(arguments.since.0);
    let path = path_of("history", &arguments.vm);
    let path = format!("{path}?since_wall_ms={since}&limit={}", arguments.limit);
    let rows: Vec<HistoryRow> = context.client()?.get(&path)?;
    if arguments.format.json {
        return Output::json(&rows);
    }
    if rows.is_empty() {
        let text =
            format!("nothing is known of {} in the last {}\n", arguments.vm, arguments.since);
        return Ok(Output::text(&text));
    }
    Ok(Output::text(&table(&COLUMNS, &rows.iter().map(row).collect::<Vec<_>>())))
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
        change(row),
    ]
}

fn change(row: &HistoryRow) -> String {
    match (&row.change, row.mode.as_deref()) {
        (None, _) => String::new(),
        (Some(change), Some("enforce")) => change.clone(),
        (Some(change), mode) => format!("({}) {change}", mode.unwrap_or("mode unknown")),
    }
}
