//! A VM's history at a glance: a line for each figure, means of intervals, and the changes.
//!
//! A pure function of the recorded rows. Readings count by the time for which they stand, because
//! older ones stand for 10 s or a minute.

use api::wire::HistoryRow;
use std::ops::Range;

use model::{Millis, date::utc};

use super::change;
use crate::cli::{
    fit,
    table::{Column, TextTable, rate, size},
};
use crate::curve_chart::EIGHTHS;

/// Lengths of an interval, in seconds; the shortest one that gives few rows is taken.
const STEPS_S: [u64; 14] =
    [10, 30, 60, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400, 172_800, 604_800];
/// Rows of means, at most.
const ROWS: u64 = 16;
/// Width of a line, where there is room for it.
const LINE: usize = 48;
/// The marks of a line, from low to high. The lowest known value has a mark too.
const MARKS: &[char] = EIGHTHS.split_at(1).1;
/// The longest time for which a reading stands.
const LONGEST_MS: u64 = 60_000;
/// Space for the name of a figure.
const LABEL: usize = 12;

/// A figure of a reading: its title, its value, whether it is a rate, and whether it has a line.
struct Figure {
    title: &'static str,
    value: fn(&HistoryRow) -> Option<f64>,
    unit: FigureUnit,
    has_line: bool,
}

#[derive(Clone, Copy)]
enum FigureUnit {
    Bytes,
    BytesPerSecond,
    PerSecond,
}

#[expect(clippy::cast_precision_loss, reason = "a mean of bytes is shown with three digits")]
fn exact(bytes: Option<u64>) -> Option<f64> {
    bytes.map(|bytes| bytes as f64)
}

const FIGURES: [Figure; 8] = [
    Figure {
        title: "MAY USE",
        value: |row| exact(row.balloon_bytes),
        unit: FigureUnit::Bytes,
        has_line: true,
    },
    Figure {
        title: "TARGET",
        value: |row| exact(row.target_bytes),
        unit: FigureUnit::Bytes,
        has_line: false,
    },
    Figure {
        title: "HOST:USED",
        value: |row| exact(row.used_bytes),
        unit: FigureUnit::Bytes,
        has_line: true,
    },
    Figure {
        title: "WSS",
        value: |row| exact(row.working_set_bytes),
        unit: FigureUnit::Bytes,
        has_line: true,
    },
    Figure {
        title: "SAVED",
        value: |row| exact(row.saved_bytes),
        unit: FigureUnit::Bytes,
        has_line: false,
    },
    Figure {
        title: "GUEST:SWAP",
        value: |row| exact(row.swap_bytes_per_second),
        unit: FigureUnit::BytesPerSecond,
        has_line: true,
    },
    Figure {
        title: "OUT",
        value: |row| exact(row.paged_out_bytes),
        unit: FigureUnit::Bytes,
        has_line: false,
    },
    Figure {
        title: "REFAULTS/s",
        value: |row| row.refaults_per_second,
        unit: FigureUnit::PerSecond,
        has_line: false,
    },
];
/// Left out of a narrow table, in this order.
const DROPPABLE: [&str; 6] = ["SAVED", "REFAULTS/s", "OUT", "TARGET", "WSS", "GUEST:SWAP"];

impl FigureUnit {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "means of bytes lie between 0 and 2^64"
    )]
    fn words(self, value: Option<f64>) -> String {
        let bytes = value.map(|value| round(value as u64));
        match self {
            Self::Bytes => size(bytes),
            Self::BytesPerSecond => rate(bytes),
            Self::PerSecond => value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}")),
        }
    }
}

/// A mean to a whole mebibyte, below that to a whole kibibyte: more digits say nothing.
const fn round(bytes: u64) -> u64 {
    let unit = if bytes >= 1 << 20 { 1 << 20 } else { 1 << 10 };
    bytes.saturating_add(unit / 2) / unit * unit
}

/// The history in words. `most`: changes at most. With a `width` no line is longer.
pub(super) fn text(
    title: &str,
    rows: &[HistoryRow],
    wall_ms: Range<u64>,
    most: usize,
    width: Option<usize>,
) -> String {
    let readings: Vec<&HistoryRow> = rows.iter().filter(|row| change(row).is_empty()).collect();
    let changes: Vec<&HistoryRow> = rows.iter().filter(|row| !change(row).is_empty()).collect();
    let fit = |line: &str| width.map_or_else(|| line.to_owned(), |width| fit::clip(line, width));
    let mut text = fit(title) + "\n";
    if let Some(begin) = readings.first().map(|row| row.wall_ms) {
        // A history that is shorter than the time asked for fills the whole line.
        let known = begin.max(wall_ms.start)..wall_ms.end.max(begin + 1);
        text += "\n";
        for figure in FIGURES.iter().filter(|figure| figure.has_line) {
            text += &line(figure, &readings, &known, width)
                .map_or_else(String::new, |line| fit(&line) + "\n");
        }
        text += &format!("\n{}", means(&readings, &changes, &known, width));
    }
    text + &listed(&changes, most, width)
}

/// `MAY USE     ▁▂▃▄▅▆▇█  192 MiB to 384 MiB`. `None`: the figure was never known.
fn line(
    figure: &Figure,
    readings: &[&HistoryRow],
    wall_ms: &Range<u64>,
    width: Option<usize>,
) -> Option<String> {
    let marks = width.map_or(LINE, |width| width.saturating_sub(LABEL + 24).clamp(8, LINE));
    let span = (wall_ms.end - wall_ms.start).max(1);
    let cells: Vec<Option<f64>> = (0..marks as u64)
        .map(|at| {
            let moment = |at: u64| wall_ms.start + span * at / marks as u64;
            mean(figure, readings, &(moment(at)..moment(at + 1)))
        })
        .collect();
    let known = || cells.iter().flatten().copied();
    let (low, high) = (known().reduce(f64::min)?, known().reduce(f64::max)?);
    let marks: String =
        cells.iter().map(|cell| cell.map_or(' ', |at| mark(at, low, high))).collect();
    let (low, high) = (figure.unit.words(Some(low)), figure.unit.words(Some(high)));
    let range = if low == high { low } else { format!("{low} to {high}") };
    Some(format!("{:<LABEL$}{marks}  {range}", figure.title))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the product lies between 0 and 7"
)]
fn mark(value: f64, low: f64, high: f64) -> char {
    let share = if high > low { (value - low) / (high - low) } else { 0.0 };
    MARKS[((share * 7.0).round() as usize).min(7)]
}

/// The mean of a figure between two moments: each reading counts by its part of that time.
fn mean(figure: &Figure, readings: &[&HistoryRow], wall_ms: &Range<u64>) -> Option<f64> {
    let from = readings.partition_point(|row| row.wall_ms + LONGEST_MS <= wall_ms.start);
    let to = readings.partition_point(|row| row.wall_ms < wall_ms.end);
    let mut sum = 0.0;
    let mut time = 0.0;
    for row in &readings[from..to] {
        let end = row.wall_ms + 1000 * u64::from(row.step_seconds.unwrap_or(1));
        let part = end.min(wall_ms.end).saturating_sub(row.wall_ms.max(wall_ms.start));
        let part = f64::from(u32::try_from(part).unwrap_or(u32::MAX));
        if let Some(value) = (figure.value)(row).filter(|_| part > 0.0) {
            sum += value * part;
            time += part;
        }
    }
    (time > 0.0).then(|| sum / time)
}

/// The table of means, without figures that were never known.
fn means(
    readings: &[&HistoryRow],
    changes: &[&HistoryRow],
    wall_ms: &Range<u64>,
    width: Option<usize>,
) -> String {
    let span_s = (wall_ms.end - wall_ms.start) / 1000;
    let enough = |step: &u64| span_s / step < ROWS;
    let step = STEPS_S.into_iter().find(enough).unwrap_or(STEPS_S[STEPS_S.len() - 1]) * 1000;
    let is_known = |figure: &&Figure| readings.iter().any(|row| (figure.value)(row).is_some());
    let figures: Vec<&Figure> = FIGURES.iter().filter(is_known).collect();
    let mut columns: Vec<Column> = vec![("TIME", false)];
    columns.extend(figures.iter().map(|figure| (figure.title, true)));
    columns.push(("CHANGES", true));
    let mut rows = Vec::new();
    let mut begin = wall_ms.start / step * step;
    while begin < wall_ms.end {
        let interval = begin..begin + step;
        let mut cells = vec![utc(begin)];
        let values: Vec<Option<f64>> =
            figures.iter().map(|figure| mean(figure, readings, &interval)).collect();
        let in_it = changes.iter().filter(|row| interval.contains(&row.wall_ms)).count();
        cells.extend(figures.iter().zip(&values).map(|(figure, value)| figure.unit.words(*value)));
        cells.push(if in_it == 0 { "-".to_owned() } else { in_it.to_string() });
        if in_it > 0 || values.iter().any(Option::is_some) {
            rows.push(cells);
        }
        begin += step;
    }
    let table = TextTable::fitted(&columns, &rows, &DROPPABLE, width).text();
    format!("means of {} from TIME on\n{table}", Millis(step))
}

/// The newest changes, oldest first.
fn listed(changes: &[&HistoryRow], most: usize, width: Option<usize>) -> String {
    if changes.is_empty() {
        return "\nno changes\n".to_owned();
    }
    let earlier = changes.len().saturating_sub(most);
    let title = match earlier {
        0 => "changes".to_owned(),
        n => format!("the newest {} changes; --limit shows {n} earlier ones", changes.len() - n),
    };
    let mut text = format!("\n{title}\n");
    for row in &changes[earlier..] {
        let line = format!("{}  {}", utc(row.wall_ms), change(row));
        let lines = width
            .map_or_else(|| vec![line.clone()], |width| fit::wrap(&line, width, 22.min(width / 2)));
        text += &lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_780_000_200_000;

    fn reading(second: u64, step: u32, balloon_mib: u64) -> HistoryRow {
        HistoryRow {
            wall_ms: START + second * 1000,
            step_seconds: Some(step),
            balloon_bytes: Some(balloon_mib << 20),
            target_bytes: Some(balloon_mib << 20),
            used_bytes: Some(180 << 20),
            swap_bytes_per_second: Some(0),
            ..HistoryRow::default()
        }
    }

    fn changed(second: u64, text: &str) -> HistoryRow {
        HistoryRow {
            wall_ms: START + second * 1000,
            mode: Some("enforce".to_owned()),
            change: Some(text.to_owned()),
            ..HistoryRow::default()
        }
    }

    /// An hour in which the VM grows from 192 to 384 MiB in its middle.
    fn hour() -> Vec<HistoryRow> {
        let size = |second| if second < 1800 { 192 } else { 384 };
        let mut rows: Vec<HistoryRow> = (0..3600).map(|at| reading(at, 1, size(at))).collect();
        rows.insert(1800, changed(1800, "target raised to 384 MiB: it is short of memory"));
        rows
    }

    fn shown(rows: &[HistoryRow], most: usize, width: Option<usize>) -> String {
        text("web-1 in the last 60 min", rows, START..START + 3_600_000, most, width)
    }

    #[test]
    fn an_hour_letter_by_letter() {
        let expected = "\
web-1 in the last 60 min

MAY USE     ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁██████████████████████  192 MiB to 384 MiB
HOST:USED   ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁  180 MiB
GUEST:SWAP  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁  0 B/s

means of 5 min from TIME on
TIME                  MAY USE   TARGET  HOST:USED  GUEST:SWAP  CHANGES
2026-05-28T20:30:00Z  192 MiB  192 MiB    180 MiB       0 B/s        -
2026-05-28T20:35:00Z  192 MiB  192 MiB    180 MiB       0 B/s        -
2026-05-28T20:40:00Z  192 MiB  192 MiB    180 MiB       0 B/s        -
2026-05-28T20:45:00Z  192 MiB  192 MiB    180 MiB       0 B/s        -
2026-05-28T20:50:00Z  192 MiB  192 MiB    180 MiB       0 B/s        -
2026-05-28T20:55:00Z  192 MiB  192 MiB    180 MiB       0 B/s        -
2026-05-28T21:00:00Z  384 MiB  384 MiB    180 MiB       0 B/s        1
2026-05-28T21:05:00Z  384 MiB  384 MiB    180 MiB       0 B/s        -
2026-05-28T21:10:00Z  384 MiB  384 MiB    180 MiB       0 B/s        -
2026-05-28T21:15:00Z  384 MiB  384 MiB    180 MiB       0 B/s        -
2026-05-28T21:20:00Z  384 MiB  384 MiB    180 MiB       0 B/s        -
2026-05-28T21:25:00Z  384 MiB  384 MiB    180 MiB       0 B/s        -

changes
2026-05-28T21:00:00Z  target raised to 384 MiB: it is short of memory
";
        assert_eq!(shown(&hour(), 20, Some(80)), expected);
    }

    #[test]
    fn no_line_is_longer_than_the_terminal() {
        for width in [40, 60, 80, 100] {
            let text = shown(&hour(), 20, Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
        }
    }

    #[test]
    fn readings_count_by_the_time_for_which_they_stand() {
        let rows = [reading(0, 10, 100), reading(10, 1, 200), reading(11, 1, 300)];
        let readings: Vec<&HistoryRow> = rows.iter().collect();
        let mean = mean(&FIGURES[0], &readings, &(START..START + 12_000)).unwrap();
        assert!((mean - 125.0 * 1_048_576.0).abs() < 1.0, "{mean}");
    }

    #[test]
    fn a_long_reading_leaves_no_gap_in_a_short_time() {
        let rows: Vec<HistoryRow> = (55..60).map(|at| reading(at * 60, 60, 100 + at)).collect();
        let span = START + 3_300_000..START + 3_600_000;
        let text = text("web-1 in the last 5 min", &rows, span, 20, Some(80));
        let line = text.lines().find(|line| line.starts_with("MAY USE  ")).unwrap();
        let marks: Vec<&str> = line.split_whitespace().skip(2).collect();
        assert_eq!(marks.len(), 6, "one line of marks without a gap, and its range: {line}");
    }

    #[test]
    fn a_short_history_fills_the_line_and_has_short_intervals() {
        let rows: Vec<HistoryRow> = (3500..3600).map(|at| reading(at, 1, at - 3400)).collect();
        let text = shown(&rows, 20, None);
        assert!(text.contains("MAY USE     ▁▁▁▁▂"), "{text}");
        assert!(text.contains("means of 10 s from TIME on"), "{text}");
        assert!(text.ends_with("\nno changes\n"), "{text}");
    }

    #[test]
    fn earlier_changes_are_counted() {
        let mut rows = hour();
        rows.extend((0..30).map(|n| changed(3600 + n, &format!("change {n}"))));
        let text = shown(&rows, 5, None);
        assert!(text.contains("the newest 5 changes; --limit shows 26 earlier ones"), "{text}");
        assert!(text.contains("change 25\n") && !text.contains("change 24\n"), "{text}");
    }

    #[test]
    fn changes_without_readings_are_listed() {
        let text = shown(&[changed(7, "target raised to 384 MiB")], 20, Some(80));
        assert_eq!(
            text,
            "web-1 in the last 60 min\n\nchanges\n2026-05-28T20:30:07Z  target raised to 384 MiB\n"
        );
    }
}
