//! Draws a chart of curves as SVG.

use plotters::prelude::*;

use super::{ChartError, Curve, CurveChart};

const SVG_SIZE: (u32, u32) = (880, 420);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for ChartError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// All curves of a chart, as an SVG element.
pub(super) fn draw(chart: &CurveChart) -> Result<String, ChartError> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SVG_SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        draw_on(chart, &area)?;
        area.present()?;
    }
    Ok(text)
}

fn draw_on(
    chart: &CurveChart,
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
) -> Result<(), ChartError> {
    let end = chart.end();
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, ("sans-serif", 18))
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..end, 0.0..1.0)?;
    let x_text = |x: &f64| (chart.x_text)(*x);
    context
        .configure_mesh()
        .x_desc(chart.x_axis)
        .y_desc("miss ratio")
        .x_label_formatter(&x_text)
        .light_line_style(WHITE)
        .draw()?;
    for (number, curve) in chart.curves.iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        context
            .draw_series(LineSeries::new(corners(curve, end), color.stroke_width(2)))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    let heights = (0..).map(|line| 0.97 - 0.06 * f64::from(line));
    for ((x, what), height) in chart.marks.iter().zip(heights) {
        context.draw_series(LineSeries::new([(*x, 0.0), (*x, 1.0)], BLACK.mix(0.5)))?;
        let words = format!("{what}: {}", (chart.x_text)(*x));
        context.draw_series([Text::new(words, (*x, height), ("sans-serif", 14))])?;
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

/// A curve's corners, from no memory to the end of the picture.
fn corners(curve: &Curve, end: f64) -> Vec<(f64, f64)> {
    let mut corners = curve.points.clone();
    if corners.first().is_none_or(|first| first.0 > 0.0) {
        corners.insert(0, (0.0, 1.0));
    }
    let last = corners.last().map_or(1.0, |last| last.1);
    corners.push((end, last));
    corners
}
