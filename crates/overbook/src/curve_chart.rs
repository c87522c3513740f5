//! Draws miss-ratio curves, in the terminal or as SVG.
//!
//! A curve is a falling polyline: with `x` memory, `y` of the references miss. Both pictures
//! begin at a miss ratio of 1 with no memory and end at the last point.

use crate::line_plot::{LinePlot, PlotAxis, PlotLine, PlotScale, PlotSize};

const ROWS: u16 = 16;
const COLUMNS: u16 = 64;
/// The eighths of a character cell, from below.
pub(crate) const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Curves in one picture.
#[derive(Clone, Debug)]
pub struct CurveChart {
    /// The title.
    pub title: String,
    /// The label of the x axis, for the SVG.
    pub x_axis: &'static str,
    /// Formats an amount on the x axis.
    pub x_text: fn(f64) -> String,
    /// The amounts that are round on the x axis.
    pub x_scale: PlotScale,
    /// The curves; the terminal shows only the first.
    pub curves: Vec<Curve>,
    /// Amounts to mark on the x axis, with their labels.
    pub marks: Vec<(f64, String)>,
}

/// One curve.
#[derive(Clone, Debug)]
pub struct Curve {
    /// The curve's name.
    pub name: String,
    /// Memory and miss ratio, sorted by memory.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// The miss ratio with `x` memory.
    fn at(&self, x: f64) -> f64 {
        let after = self.points.partition_point(|point| point.0 <= x);
        let before = after.checked_sub(1).map_or((0.0, 1.0), |index| self.points[index]);
        let Some(next) = self.points.get(after) else { return before.1 };
        before.1 + (next.1 - before.1) * (x - before.0) / (next.0 - before.0).max(f64::MIN_POSITIVE)
    }

    /// The corners from no memory to the end of the picture.
    fn corners(&self, end: f64) -> Vec<(f64, f64)> {
        let mut corners = self.points.clone();
        if corners.first().is_none_or(|first| first.0 > 0.0) {
            corners.insert(0, (0.0, 1.0));
        }
        let last = corners.last().map_or(1.0, |last| last.1);
        corners.push((end, last));
        corners
    }
}

impl CurveChart {
    /// The end of the x axis.
    fn end(&self) -> f64 {
        let last = self.curves.iter().filter_map(|curve| curve.points.last()).map(|point| point.0);
        last.chain(self.marks.iter().map(|mark| mark.0)).fold(1.0, f64::max)
    }

    /// The first curve, for a terminal of 80 columns.
    #[must_use]
    pub fn terminal(&self) -> String {
        let end = self.end();
        let middle = |column: u16| (f64::from(column) + 0.5) / f64::from(COLUMNS) * end;
        let ratio = |column| self.curves.first().map_or(1.0, |curve| curve.at(middle(column)));
        let heights: Vec<u16> = (0..COLUMNS).map(|column| eighths(ratio(column))).collect();
        let mut text = format!("{}\n", self.title);
        for row in (0..ROWS).rev() {
            let label = match row {
                15 => "1.00",
                11 => "0.75",
                7 => "0.50",
                3 => "0.25",
                _ => "    ",
            };
            let cell = |height: &u16| EIGHTHS[usize::from(height.saturating_sub(row * 8).min(8))];
            let line: String = heights.iter().map(cell).collect();
            text += &format!("{label} │{}\n", line.trim_end());
        }
        text += &format!("0.00 └{}\n", "─".repeat(usize::from(COLUMNS)));
        text + &self.feet(end)
    }

    /// The x axis' figures, and the marks below them.
    fn feet(&self, end: f64) -> String {
        let [half, whole] = [end / 2.0, end].map(self.x_text);
        let mut text = format!("     0{half:^62}{whole:>8}\n");
        for (x, what) in &self.marks {
            let share = (x / end).clamp(0.0, 1.0) * f64::from(COLUMNS - 1);
            let column = (0..COLUMNS).rev().find(|column| f64::from(*column) <= share).unwrap_or(0);
            let gap = " ".repeat(usize::from(column));
            text += &format!("      {gap}▲ {what}: {}\n", (self.x_text)(*x));
        }
        text
    }

    /// All curves, as an SVG file.
    #[must_use]
    pub fn svg(&self) -> String {
        let end = self.end();
        let line =
            |curve: &Curve| PlotLine { name: curve.name.clone(), points: curve.corners(end) };
        let mark = |(x, what): &(f64, String)| (*x, format!("{what}: {}", (self.x_text)(*x)));
        let x = PlotAxis::linear(self.x_axis);
        let plot = LinePlot {
            title: self.title.clone(),
            x: PlotAxis { scale: self.x_scale, text: self.x_text, ..x },
            y: PlotAxis { end: Some(1.0), ..PlotAxis::linear("miss ratio") },
            lines: self.curves.iter().map(line).collect(),
            marks: self.marks.iter().map(mark).collect(),
        };
        plot.svg(PlotSize::Wide)
    }
}

/// The height of a ratio, in eighths of a row.
fn eighths(ratio: f64) -> u16 {
    let whole = (0..=ROWS * 8).rev().find(|n| f64::from(*n) <= ratio * f64::from(ROWS * 8) + 0.5);
    whole.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(f64, f64)]) -> CurveChart {
        CurveChart {
            title: "web-1".into(),
            x_axis: "memory",
            x_text: |x| format!("{x:.0} MiB"),
            x_scale: PlotScale::Binary,
            curves: vec![Curve { name: "live".into(), points: points.to_vec() }],
            marks: vec![(48.0, "working set".into()), (32.0, "in memory at most".into())],
        }
    }

    #[test]
    fn the_terminal_shows_a_falling_curve_and_its_marks() {
        let stairs =
            [(0.0, 1.0), (16.0, 1.0), (16.001, 0.5), (48.0, 0.5), (48.001, 0.0), (64.0, 0.0)];
        let text = chart(&stairs).terminal();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "web-1");
        assert_eq!(lines[1], format!("1.00 │{}", "█".repeat(16)));
        assert_eq!(lines[9], format!("0.50 │{}", "█".repeat(48)));
        assert_eq!(lines[16], format!("     │{}", "█".repeat(48)));
        assert!(lines[18].contains("32 MiB") && lines[18].ends_with("64 MiB"), "{text}");
        assert_eq!(lines[19], format!("      {}▲ working set: 48 MiB", " ".repeat(47)));
        assert_eq!(lines[20], format!("      {}▲ in memory at most: 32 MiB", " ".repeat(31)));
    }

    #[test]
    fn between_two_points_a_curve_is_straight() {
        let text = chart(&[(0.0, 1.0), (64.0, 0.0)]).terminal();
        let widths: Vec<usize> =
            text.lines().skip(1).take(16).map(|l| l.chars().count() - 6).collect();
        assert!(widths.windows(2).all(|pair| pair[1] - pair[0] == 4), "{widths:?}");
    }

    #[test]
    fn a_plot_holds_its_curve_and_its_marks_at_round_amounts() {
        let text = chart(&[(16.0, 0.5), (190.0, 0.1)]).svg();
        let marks = ["working set: 48 MiB", "in memory at most: 32 MiB"];
        let ticks = [">0 MiB<", ">32 MiB<", ">64 MiB<", ">96 MiB<", ">160 MiB<"];
        let words = ["web-1", "live", "miss ratio", "<polyline"];
        for word in words.into_iter().chain(marks).chain(ticks) {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
    }

    #[test]
    fn a_curve_without_points_is_drawn_too() {
        assert!(chart(&[]).terminal().contains("1.00 │█"));
        assert!(chart(&[]).svg().contains("<svg"));
    }
}
