//! One kind of plot: values over time (or over sizes, or one value per workload). It has a line
//! per guest or method, and marks where phases begin.

use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

const SIZE: (u32, u32) = (880, 320);

/// A line of a plot.
#[derive(Debug, Clone)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Positions on the horizontal axis, and values.
    pub points: Vec<(f64, f64)>,
}

/// A plot.
#[derive(Debug, Clone)]
pub struct Chart {
    /// The unit of the values.
    pub unit: &'static str,
    /// The label of the horizontal axis: mostly seconds.
    pub across: &'static str,
    /// Whether the scale is logarithmic; then no value may be below 1.
    pub is_log: bool,
    /// The lines.
    pub lines: Vec<Line>,
    /// Positions on the horizontal axis with their names.
    pub marks: Vec<(f64, String)>,
}

/// Why a plot cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[error("a plot cannot be drawn: {0}")]
pub struct ChartError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for ChartError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// The plot as an SVG element.
///
/// # Errors
/// When the library refuses to draw it.
pub fn svg(chart: &Chart) -> Result<String, ChartError> {
    let points = || chart.lines.iter().flat_map(|line| &line.points);
    // Room for the legend on the right, where no line is.
    let end = points().map(|p| p.0).fold(1.0, f64::max) * 1.16;
    let top = points().map(|p| p.1).fold(1.0, f64::max) * 1.1;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        if chart.is_log {
            draw(&area, chart, end, top, (1.0..top * 2.0).log_scale())?;
        } else {
            draw(&area, chart, end, top, 0.0..top)?;
        }
        area.present()?;
    }
    Ok(text)
}

fn draw<Y>(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    chart: &Chart,
    end: f64,
    top: f64,
    scale: Y,
) -> Result<(), ChartError>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64> + Ranged<ValueType = f64>,
{
    let mut context = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end, scale)?;
    context
        .configure_mesh()
        .x_desc(chart.across)
        .y_desc(chart.unit)
        .light_line_style(WHITE)
        .draw()?;
    for (number, line) in chart.lines.iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        context
            .draw_series(LineSeries::new(line.points.iter().copied(), color.stroke_width(2)))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    for (at, name) in &chart.marks {
        let foot = if chart.is_log { 1.0 } else { 0.0 };
        context.draw_series(LineSeries::new([(*at, foot), (*at, top)], BLACK.mix(0.5)))?;
        let label = Text::new(name.clone(), (*at + end / 200.0, top), ("sans-serif", 14));
        context.draw_series([label])?;
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_holds_its_lines_names_and_marks() {
        let lines = vec![Line { name: "web-1".into(), points: vec![(0.0, 1.0), (5.0, 900.0)] }];
        for is_log in [false, true] {
            let marks = vec![(2.0, "enforce".to_owned())];
            let text =
                svg(&Chart { unit: "MiB", across: "seconds", is_log, lines: lines.clone(), marks })
                    .unwrap();
            for word in ["web-1", "enforce", "MiB", "<polyline"] {
                assert!(text.contains(word), "{word} is missing");
            }
        }
    }

    #[test]
    fn an_empty_plot_is_drawn_too() {
        let chart =
            Chart { unit: "MiB", across: "seconds", is_log: true, lines: vec![], marks: vec![] };
        assert!(svg(&chart).unwrap().contains("<svg"));
    }
}
