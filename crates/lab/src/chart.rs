//! One kind of plot: values over time (or over sizes, or one value per workload). It has a line
//! per guest or method, and marks where phases begin.

use overbook::line_plot::{LinePlot, PlotAxis, PlotLine, PlotScale, PlotSize};

/// A line of a plot.
#[derive(Debug, Clone)]
pub struct Line {
    pub name: String,
    /// Positions on the horizontal axis, and values.
    pub points: Vec<(f64, f64)>,
}

impl Line {
    pub fn new(name: impl ToString, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.to_string(), points: points.into_iter().collect() }
    }
}

#[derive(Debug, Clone)]
pub struct Chart {
    /// The unit of the values.
    pub unit: &'static str,
    /// The label of the horizontal axis: mostly seconds.
    pub across: &'static str,
    /// Whether the scale is logarithmic.
    pub is_log: bool,
    pub lines: Vec<Line>,
    /// Positions on the horizontal axis with their names.
    pub marks: Vec<(f64, String)>,
}

impl Chart {
    /// A plot with a linear scale, without marks.
    pub fn linear(
        unit: &'static str,
        across: &'static str,
        lines: impl IntoIterator<Item = Line>,
    ) -> Self {
        let lines = lines.into_iter().collect();
        Self { unit, across, is_log: false, lines, marks: Vec::new() }
    }
}

/// The plot as an SVG file.
pub fn svg(chart: &Chart, size: PlotSize) -> String {
    let axis = |label: &str, is_log: bool| match label {
        _ if is_log => PlotAxis::logarithmic(label),
        "MiB" => PlotAxis { scale: PlotScale::Binary, ..PlotAxis::linear(label) },
        _ => PlotAxis::linear(label),
    };
    let line = |line: &Line| PlotLine { name: line.name.clone(), points: line.points.clone() };
    let plot = LinePlot {
        title: String::new(),
        x: axis(chart.across, false),
        y: axis(chart.unit, chart.is_log),
        lines: chart.lines.iter().map(line).collect(),
        marks: chart.marks.clone(),
    };
    plot.svg(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_holds_its_lines_names_and_marks() {
        let line = |name: &str| Line { name: name.into(), points: vec![(0.0, 1.0), (5.0, 900.0)] };
        for is_log in [false, true] {
            let chart = Chart {
                unit: "MiB",
                across: "seconds",
                is_log,
                lines: vec![line("web-1"), line("web-2")],
                marks: vec![(2.0, "enforce".to_owned())],
            };
            let text = svg(&chart, PlotSize::Wide);
            for word in ["web-1", "enforce", "MiB", "<polyline"] {
                assert!(text.contains(word), "{word} is missing");
            }
            assert_eq!(text.contains("(logarithmic)"), is_log);
            assert_eq!(text.contains(">512</text>"), !is_log, "{text}");
        }
    }
}
