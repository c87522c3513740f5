//! Draws a matrix of shares as SVG: the part of the row that the column also has.
//!
//! A cell's colour is one ink over the picture's ground, as opaque as its share is large. So one
//! scale serves a light page and a dark one: the style swaps ink and ground by the viewer's
//! preference. From [`DARK_FROM`] on, a cell's figure changes its colour; there both colours are
//! legible on both grounds. A viewer without preferences shows the light picture.

use std::fmt::Write;

use crate::markup::escaped;

/// From this share on, a figure has the colour for text on ink.
const DARK_FROM: f64 = 0.66;
const CELL: (usize, usize) = (64, 36);
const MARGIN: usize = 24;
/// Widths of an average and of a wide character, estimated without the font.
const LETTER: usize = 8;
/// Maximum number of letters shown of a name; the tooltip has the whole name.
const MOST_LETTERS: usize = 32;
const TITLE_HEIGHT: usize = 32;
const LEGEND_WIDTH: usize = 240;

const STYLE: &str = "\
.ground{fill:#ffffff}.ink{fill:#08306b}.text{fill:#000000}.on-ink{fill:#ffffff}\
.note{fill:#57606a}.line{stroke:#d0d7de}stop{stop-color:#08306b}\
@media(prefers-color-scheme:dark){\
.ground{fill:#0d1117}.ink{fill:#70b0f0}.text{fill:#ffffff}.on-ink{fill:#000000}\
.note{fill:#9aa4ae}.line{stroke:#30363d}stop{stop-color:#70b0f0}}\
text{font:13px system-ui,sans-serif}.title{font-weight:600}.note{font-size:12px}";

/// A square matrix.
#[derive(Clone, Debug)]
pub(crate) struct MatrixChart {
    /// The title.
    pub(crate) title: String,
    /// Rows and columns: a name, and its size.
    pub(crate) names: Vec<(String, String)>,
    /// Each column's share of each row, from 0 to 1.
    pub(crate) shares: Vec<Vec<f64>>,
}

impl MatrixChart {
    /// The picture, as an SVG file.
    pub(crate) fn svg(&self) -> String {
        let letters = |text: &String| text.chars().count().min(MOST_LETTERS);
        let longest = self.names.iter().map(|(name, _)| letters(name)).max().unwrap_or(0);
        let notes = self.names.iter().map(|(_, note)| letters(note)).max().unwrap_or(0);
        let left = MARGIN + LETTER * (longest + notes + 2);
        // Column names rise to the right at 45 degrees, past the end of the last column.
        let slope = LETTER * longest * 5 / 7 + 16;
        let top = MARGIN + TITLE_HEIGHT + slope;
        let number = self.names.len();
        let bottom = top + number * CELL.1;
        let end = |(column, (name, _)): (usize, &(String, String))| {
            left + (column * 2 + 1) * CELL.0 / 2 + (LETTER * letters(name) * 5 / 7).max(CELL.0 / 2)
        };
        let right = self.names.iter().enumerate().map(end).max().unwrap_or(left);
        let title = MARGIN + LETTER * self.title.chars().count();
        let (width, height) = (right.max(left + LEGEND_WIDTH).max(title) + MARGIN, bottom + 84);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{0}\">\n\
             <style>{STYLE}</style>\n\
             <rect class=\"ground\" width=\"{width}\" height=\"{height}\"/>\n\
             <text class=\"text title\" x=\"{MARGIN}\" y=\"{1}\">{0}</text>\n",
            escaped(&self.title),
            MARGIN + 12,
        );
        for (index, (name, note)) in self.names.iter().enumerate() {
            let (row, column) = (top + index * CELL.1, left + index * CELL.0);
            let (x, y) = (left - 12, row + CELL.1 / 2 + 5);
            // Writing to a string cannot fail.
            let _ = write!(
                svg,
                "<text class=\"text\" x=\"{MARGIN}\" y=\"{y}\">{}</text>\n\
                 <text class=\"note\" x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{}</text>\n",
                shown(name),
                escaped(note)
            );
            let (x, y) = (column + CELL.0 / 2, top - 10);
            let _ = writeln!(
                svg,
                "<text class=\"text\" x=\"{x}\" y=\"{y}\" transform=\"rotate(-45 {x} {y})\">{}</text>",
                shown(name)
            );
        }
        for (row, shares) in self.shares.iter().enumerate() {
            for (column, share) in shares.iter().enumerate() {
                let place = (left + column * CELL.0, top + row * CELL.1);
                self.draw_cell(&mut svg, (row, column), place, share.clamp(0.0, 1.0));
            }
        }
        draw_legend(&mut svg, left, bottom + 28);
        svg + "</svg>\n"
    }

    fn draw_cell(
        &self,
        svg: &mut String,
        cell: (usize, usize),
        (x, y): (usize, usize),
        share: f64,
    ) {
        let name = |index: usize| self.names.get(index).map_or("", |(name, _)| name);
        let (row, column) = (escaped(name(cell.0)), escaped(name(cell.1)));
        let class = if share < DARK_FROM { "text" } else { "on-ink" };
        let percent = share * 100.0;
        let _ = writeln!(
            svg,
            "<g><title>{percent:.2} % of {row} is in {column}</title>\
             <rect class=\"ink line\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" \
             fill-opacity=\"{share:.3}\"/>\
             <text class=\"{class}\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{percent:.1}</text></g>",
            CELL.0,
            CELL.1,
            x + CELL.0 / 2,
            y + CELL.1 / 2 + 5,
        );
    }
}

/// The scale, with its ends and its middle.
fn draw_legend(svg: &mut String, x: usize, y: usize) {
    *svg += "<defs><linearGradient id=\"scale\"><stop offset=\"0\" stop-opacity=\"0\"/>\
             <stop offset=\"1\" stop-opacity=\"1\"/></linearGradient></defs>\n";
    let _ = writeln!(
        svg,
        "<rect class=\"line\" x=\"{x}\" y=\"{y}\" width=\"{LEGEND_WIDTH}\" height=\"14\" \
         fill=\"url(#scale)\"/>"
    );
    for (share, anchor) in [(0, "start"), (50, "middle"), (100, "end")] {
        let (at, below) = (x + LEGEND_WIDTH * share / 100, y + 30);
        let _ = writeln!(
            svg,
            "<text class=\"note\" x=\"{at}\" y=\"{below}\" text-anchor=\"{anchor}\">{share} %</text>"
        );
    }
}

/// A name, cut off if it is too long.
fn shown(name: &str) -> String {
    if name.chars().count() <= MOST_LETTERS {
        return escaped(name);
    }
    let start: String = name.chars().take(MOST_LETTERS - 1).collect();
    format!("<title>{}</title>{}…", escaped(name), escaped(&start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markup::{channels, contrast};

    fn chart(names: &[&str], shares: &[&[f64]]) -> MatrixChart {
        MatrixChart {
            title: "what is shared".into(),
            names: names.iter().map(|name| ((*name).into(), "1 MiB".into())).collect(),
            shares: shares.iter().map(|row| row.to_vec()).collect(),
        }
    }

    #[test]
    fn each_cell_has_its_colour_its_figure_and_its_words() {
        let svg = chart(&["one", "two"], &[&[1.0, 0.125], &[0.7, 1.0]]).svg();
        assert_eq!(svg.matches("fill-opacity").count(), 4);
        for words in [
            "12.50 % of one is in two",
            "fill-opacity=\"0.125\"",
            ">12.5</text>",
            "70.00 % of two is in one",
            "<text class=\"on-ink\"",
            "what is shared",
            "1 MiB",
            "50 %",
        ] {
            assert!(svg.contains(words), "{words} is missing in\n{svg}");
        }
        assert!(chart(&[], &[]).svg().ends_with("</svg>\n"));
    }

    #[test]
    fn names_are_escaped_and_cut_off() {
        let long = format!("<&\"{}", "x".repeat(60));
        let svg = chart(&[&long], &[&[1.0]]).svg();
        let cut = format!("&lt;&amp;&quot;{}…</text>", "x".repeat(28));
        assert_eq!(svg.matches(&cut).count(), 2, "{svg}");
        assert!(!svg.contains("<&"), "{svg}");
    }

    /// Contrast of at least 4.5 to 1, by the Web Content Accessibility Guidelines.
    #[test]
    fn every_figure_can_be_read_on_every_colour() {
        let colours = |style: &str| {
            [".ground", ".ink", ".text", ".on-ink"].map(|class| {
                let start = style.find(&format!("{class}{{fill:#")).unwrap() + class.len() + 7;
                channels(&style[start..])
            })
        };
        for style in STYLE.split("@media") {
            let [ground, ink, text, on_ink] = colours(style);
            for share in (0..=100_u8).map(|percent| f64::from(percent) / 100.0) {
                let mix = |at: usize| ink[at] * share + ground[at] * (1.0 - share);
                let cell = [0, 1, 2].map(mix);
                let figure = if share < DARK_FROM { text } else { on_ink };
                let contrast = contrast(cell, figure);
                assert!(contrast >= 4.5, "{contrast} at {share}");
            }
        }
    }
}
