//! The report of a scenario: a table on the terminal and a page with plots.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use model::Bytes;

use crate::chart::{Chart, Line};
use crate::figures::Figures;
use crate::page;
use crate::recording::{Moment, Recording};

/// One guest's row in the table, before and after.
#[derive(Debug, Clone)]
pub struct Row {
    /// Its name.
    pub guest: String,
    pub workload: String,
    /// Memory that it had, at the end of each phase.
    pub memory: [Option<Bytes>; 2],
    /// Memory that it occupied on the host, at the end of each phase.
    pub used: [Option<Bytes>; 2],
    /// Memory that it swapped per second, over each phase.
    pub swap_per_s: [Option<Bytes>; 2],
    /// Median operations per second.
    pub ops_per_s: [f64; 2],
}

const HEAD: [&str; 7] =
    ["guest", "workload", "memory", "on the host", "swap/s", "operations/s", "ratio"];

/// The table; each cell shows `observe -> enforce`.
pub fn table(rows: &[Row]) -> String {
    let lines: Vec<[String; 7]> =
        std::iter::once(HEAD.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let mut widths = [0; 7];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<String> =
            line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
    }
    text
}

fn cells(row: &Row) -> [String; 7] {
    let size = |size: Option<Bytes>| size.map_or("?".to_owned(), |s| format!("{:.0}", s.as_mib()));
    let rate = |rate: Option<Bytes>| rate.map_or("?".to_owned(), |r| format!("{:.1}", r.as_mib()));
    let pair = |[a, b]: [String; 2], unit: &str| format!("{a} -> {b} {unit}");
    let [before, after] = row.ops_per_s;
    [
        row.guest.clone(),
        row.workload.clone(),
        pair(row.memory.map(size), "MiB"),
        pair(row.used.map(size), "MiB"),
        pair(row.swap_per_s.map(rate), "MiB"),
        pair(row.ops_per_s.map(count), ""),
        if before > 0.0 && after.is_finite() {
            format!("{:.2}x", after / before)
        } else {
            "?".to_owned()
        },
    ]
}

fn count(value: f64) -> String {
    match value {
        v if !v.is_finite() => "?".to_owned(),
        v if v >= 1e6 => format!("{:.1} M", v / 1e6),
        v if v >= 1e4 => format!("{:.0} k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Why no report could be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file cannot be written.
    #[error("{path}: {error}")]
    Write { path: PathBuf, error: std::io::Error },
}

/// Writes `<scenario>.html`, and its first plot as `<scenario>.svg`, into `dir`.
pub fn write(
    dir: &Path,
    figures: &Figures,
    recording: &Recording,
    table: &str,
) -> Result<PathBuf, ReportError> {
    let plots = [
        ("Memory of each guest", memory_chart(recording)),
        ("Operations per second", operations_chart(recording)),
        ("Swap traffic", swap_chart(recording)),
    ];
    page::write(dir, figures, table, &plots.map(|(heading, plot)| (heading.to_owned(), plot)))
}

fn lines(recording: &Recording, value: impl Fn(&Moment) -> Option<f64>) -> Vec<Line> {
    let line = |(guest, moments): (&String, &Vec<Moment>)| {
        Line::new(guest, moments.iter().filter_map(|m| Some((m.at_s, value(m)?))))
    };
    recording.guests.iter().map(line).collect()
}

fn memory_chart(recording: &Recording) -> Chart {
    Chart {
        unit: "MiB",
        across: "seconds",
        is_log: false,
        lines: lines(recording, |moment| Some(moment.balloon?.as_mib())),
        marks: recording.phases.clone(),
    }
}

fn operations_chart(recording: &Recording) -> Chart {
    Chart {
        unit: "operations/s",
        across: "seconds",
        is_log: true,
        lines: lines(recording, |moment| moment.ops_per_s.map(|ops| ops.max(1.0))),
        marks: recording.phases.clone(),
    }
}

fn swap_chart(recording: &Recording) -> Chart {
    let mut all = lines(recording, |moment| Some(moment.swapped?.as_mib()));
    for line in &mut all {
        let rates = line.points.windows(2).map(|pair| {
            let seconds = pair[1].0 - pair[0].0;
            (pair[1].0, (pair[1].1 - pair[0].1).max(0.0) / seconds.max(0.1))
        });
        line.points = rates.collect();
    }
    Chart {
        unit: "MiB/s",
        across: "seconds",
        is_log: false,
        lines: all,
        marks: recording.phases.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_before_and_after() {
        let row = Row {
            guest: "a".into(),
            workload: "sort".into(),
            memory: [Some(Bytes::mib(128)), Some(Bytes::mib(256))],
            used: [Some(Bytes::mib(100)), None],
            swap_per_s: [Some(Bytes::mib(3)), None],
            ops_per_s: [200.0, 1_000_000.0],
        };
        let text = table(&[row]);
        assert!(text.contains("128 -> 256 MiB"), "{text}");
        assert!(text.contains("100 -> ? MiB") && text.contains("3.0 -> ? MiB"), "{text}");
        assert!(text.ends_with("5000.00x\n"), "{text}");
    }
}
