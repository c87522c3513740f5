//! Draws lines over two axes as SVG: curves, and readings over time.
//!
//! The style swaps the colours by the viewer's preference for light or dark. Lines that lie on each
//! other are told apart by dashes and by marks at different places. The legend stands below the
//! axes, where no line is. A viewer without preferences shows the light picture.

mod axis;

use std::fmt::Write;

pub use axis::{PlotAxis, PlotScale};

use crate::markup::escaped;

/// Width of an average character, estimated without the font.
const LETTER: f64 = 7.2;
const LINE: f64 = 18.0;
const MARGIN: f64 = 10.0;
/// Marks on a line.
const MARKS: u32 = 7;
/// A line with at most this many points has a mark at each of them.
const FEW: usize = 12;
/// Only the first line is solid: it is drawn first, and hides none that lies on it.
const DASHES: [&str; 8] = ["", "9 4", "3 3", "12 3 3 3", "6 3 2 3 2 3", "16 5", "5 2 1 2", "1.5 3"];
/// Colours on a light ground and on a dark one.
const COLOURS: [(&str, &str); 8] = [
    ("0b5cad", "79b8ff"),
    ("b93c0a", "ffa657"),
    ("127a38", "7ee787"),
    ("9d174d", "ff9bce"),
    ("6d28d9", "c9b3ff"),
    ("0b6b83", "67d5e8"),
    ("7a4a0a", "e3c46b"),
    ("374151", "c9d1d9"),
];
const GROUNDS: (&str, &str) = ("ffffff", "14171c");

/// A plot.
#[derive(Clone, Debug)]
pub struct LinePlot {
    /// The title; empty: it stands elsewhere.
    pub title: String,
    /// The horizontal axis.
    pub x: PlotAxis,
    /// The vertical axis.
    pub y: PlotAxis,
    /// The lines.
    pub lines: Vec<PlotLine>,
    /// Positions on the horizontal axis, with their names.
    pub marks: Vec<(f64, String)>,
}

/// A line of a plot.
#[derive(Clone, Debug)]
pub struct PlotLine {
    /// Its name.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// The size of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlotSize {
    /// For a page of usual width.
    Wide,
    /// For a telephone.
    Narrow,
}

impl PlotSize {
    /// Width of the picture, and height of the axes' area.
    const fn size(self) -> (f64, f64) {
        match self {
            Self::Wide => (860.0, 280.0),
            Self::Narrow => (330.0, 230.0),
        }
    }
}

/// The area between the axes, and the amounts at its ends.
struct PlotArea {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    x: axis::AxisRange,
    y: axis::AxisRange,
}

impl PlotArea {
    fn x(&self, value: f64) -> f64 {
        self.left + self.x.share(value) * (self.right - self.left)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - self.y.share(value) * (self.bottom - self.top)
    }
}

impl LinePlot {
    /// The picture, as an SVG file.
    #[must_use]
    pub fn svg(&self, size: PlotSize) -> String {
        let (width, height) = size.size();
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x = self.x.range(points().map(|at| at.0).chain(self.marks.iter().map(|it| it.0)));
        let y = self.y.range(points().map(|at| at.1));
        let y_ticks = y.ticks(5.0);
        let letters = |text: &str| text.chars().map(|_| LETTER).sum::<f64>();
        let widest = y_ticks.iter().map(|tick| letters(&tick.1)).fold(0.0, f64::max);
        let (left, right) = (MARGIN + widest + 6.0, width - MARGIN - 16.0);
        let title = wrapped(&self.title, width - 2.0 * MARGIN);
        let head = MARGIN + LINE * (f64::from(u32::try_from(title.len()).unwrap_or(1)) + 1.0);
        let place = |value: f64| left + x.share(value) * (right - left);
        let marks = staggered(&self.marks, place, width - MARGIN);
        let levels = marks.iter().map(|mark| mark.level + 1).max().unwrap_or(0);
        let top = head + 6.0 + LINE * f64::from(levels);
        let bottom = top + height;
        let area = PlotArea { left, right, top, bottom, x, y };
        let (legend, end) = self.legend(bottom + 2.0 * LINE + 14.0, width);

        let whole = end + MARGIN;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" width=\"{width}\" \
             height=\"{whole:.0}\" viewBox=\"0 0 {width} {whole:.0}\" role=\"img\" \
             aria-label=\"{}\">\n<style>{}</style>\n\
             <rect class=\"p-ground\" width=\"{width}\" height=\"{whole:.0}\"/>\n",
            escaped(&self.words()),
            style(),
        );
        for (at, line) in (0_u32..).zip(&title) {
            let y = MARGIN + LINE * (f64::from(at) + 0.7);
            text(&mut svg, "p-text p-title", (MARGIN, y), "start", line);
        }
        text(&mut svg, "p-note", (MARGIN, head - 5.0), "start", &self.y.words());
        let foot = (right, bottom + 2.0 * LINE);
        text(&mut svg, "p-note", foot, "end", &self.x.words());
        grid(&mut svg, &area, &y_ticks);
        for mark in &marks {
            let y = head + 6.0 + LINE * (f64::from(mark.level) + 0.7);
            let (x, under) = (mark.x, y + 4.0);
            line(&mut svg, "p-mark", (x, under), (x, bottom));
            text(&mut svg, "p-text", (mark.from, y), "start", mark.name);
        }
        for (number, line) in self.lines.iter().enumerate() {
            draw_line(&mut svg, &area, number, self.lines.len(), &line.points);
        }
        svg + &legend + "</svg>\n"
    }

    /// The picture in a sentence.
    fn words(&self) -> String {
        let names: Vec<&str> = self.lines.iter().map(|line| line.name.as_str()).collect();
        let title = if self.title.is_empty() { "plot" } else { &self.title };
        format!("{title}: {} by {}; {}", self.y.label, self.x.label, names.join(", "))
    }

    /// The lines' names below the axes, from this height on, and the height of their end. A single
    /// line needs none.
    fn legend(&self, top: f64, width: f64) -> (String, f64) {
        let mut svg = String::new();
        if self.lines.len() < 2 {
            return (svg, top - LINE);
        }
        let (mut x, mut y) = (MARGIN, top);
        for (number, line) in self.lines.iter().enumerate() {
            let wide = line.name.chars().map(|_| LETTER).sum::<f64>() + 54.0;
            if x > MARGIN && x + wide > width {
                (x, y) = (MARGIN, y + LINE);
            }
            let class = format!("p-line {}", colour(number));
            let middle = y - 4.0;
            let ends = format!("{x:.1},{middle:.1} {:.1},{middle:.1}", x + 34.0);
            polyline(&mut svg, &class, dash(number), &ends);
            shape(&mut svg, number, (x + 17.0, middle));
            text(&mut svg, "p-text", (x + 40.0, y), "start", &line.name);
            x += wide;
        }
        (svg, y)
    }
}

/// A mark of the horizontal axis with a place for its name.
struct PlacedMark<'a> {
    x: f64,
    /// The left end of its name.
    from: f64,
    level: u32,
    name: &'a str,
}

/// Puts names that would lie on each other one below the other.
fn staggered(
    marks: &[(f64, String)],
    place: impl Fn(f64) -> f64,
    right: f64,
) -> Vec<PlacedMark<'_>> {
    let mut placed: Vec<PlacedMark<'_>> = Vec::new();
    // The right end of the last name of each level.
    let mut ends: Vec<f64> = Vec::new();
    let mut sorted: Vec<&(f64, String)> = marks.iter().collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (at, name) in sorted {
        let x = place(*at);
        let wide = name.chars().map(|_| LETTER).sum::<f64>();
        let from = (x + 4.0).min(right - wide).max(MARGIN);
        let free = ends.iter().position(|end| *end + LETTER < from.min(x));
        let level = free.unwrap_or(ends.len());
        if level == ends.len() {
            ends.push(0.0);
        }
        ends[level] = from + wide;
        placed.push(PlacedMark { x, from, level: u32::try_from(level).unwrap_or(0), name });
    }
    placed
}

fn grid(svg: &mut String, area: &PlotArea, y_ticks: &[(f64, String)]) {
    for (value, words) in y_ticks {
        let y = area.y(*value);
        line(svg, "p-grid", (area.left, y), (area.right, y));
        text(svg, "p-note", (area.left - 6.0, y + 4.0), "end", words);
    }
    let span = area.right - area.left;
    for (value, words) in area.x.ticks((span / 90.0).max(3.0)) {
        let x = area.x(value);
        line(svg, "p-grid", (x, area.top), (x, area.bottom));
        let wide = words.chars().map(|_| LETTER).sum::<f64>() / 2.0;
        let at = x.min(area.right + 16.0 - wide);
        text(svg, "p-note", (at, area.bottom + 16.0), "middle", &words);
    }
    line(svg, "p-axis", (area.left, area.bottom), (area.right, area.bottom));
    line(svg, "p-axis", (area.left, area.top), (area.left, area.bottom));
}

fn draw_line(svg: &mut String, area: &PlotArea, number: usize, all: usize, points: &[(f64, f64)]) {
    let known = points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
    let places: Vec<(f64, f64)> = known.map(|(x, y)| (area.x(*x), area.y(*y))).collect();
    let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    polyline(svg, &format!("p-line {}", colour(number)), dash(number), &path.join(" "));
    if places.len() <= FEW {
        places.iter().for_each(|place| shape(svg, number, *place));
        return;
    }
    let (from, to) = (places[0].0, places[places.len() - 1].0);
    let share = |at: usize| f64::from(u32::try_from(at).unwrap_or(0));
    // Each line has its marks elsewhere.
    let offset = (share(number) + 0.5) / share(all.max(1));
    for mark in 0..MARKS {
        let x = from + (f64::from(mark) + offset) / f64::from(MARKS) * (to - from);
        let after = places.partition_point(|place| place.0 < x).min(places.len() - 1);
        let (left, right) = (places[after.saturating_sub(1)], places[after]);
        let part = (x - left.0) / (right.0 - left.0).max(f64::MIN_POSITIVE);
        shape(svg, number, (x, left.1 + part.clamp(0.0, 1.0) * (right.1 - left.1)));
    }
}

fn colour(number: usize) -> String {
    format!("p{}", number % COLOURS.len())
}

const fn dash(number: usize) -> &'static str {
    DASHES[number % DASHES.len()]
}

// Writing to a string cannot fail.
fn text(svg: &mut String, class: &str, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escaped(words);
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

fn line(svg: &mut String, class: &str, (x, y): (f64, f64), (to_x, to_y): (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{to_x:.1}\" y2=\"{to_y:.1}\"/>"
    );
}

fn polyline(svg: &mut String, class: &str, dash: &str, points: &str) {
    let dash =
        if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") };
    let _ = writeln!(svg, "<polyline class=\"{class}\"{dash} points=\"{points}\"/>");
}

/// The mark of a line: one of six shapes.
fn shape(svg: &mut String, number: usize, (x, y): (f64, f64)) {
    let path = match number % 6 {
        0 => "m-4,0 a4,4 0 1 0 8,0 a4,4 0 1 0 -8,0 z",
        1 => "m-4,-4 h8 v8 h-8 z",
        2 => "m0,-5 l5,9 h-10 z",
        3 => "m0,-5 l5,5 l-5,5 l-5,-5 z",
        4 => "m0,5 l5,-9 h-10 z",
        _ => "m-4,-4 l8,8 m0,-8 l-8,8",
    };
    let class = format!("p-shape {}", colour(number));
    let _ = writeln!(svg, "<path class=\"{class}\" d=\"M{x:.1},{y:.1} {path}\"/>");
}

/// The text in lines of at most this width.
fn wrapped(text: &str, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let fits = |line: &String| {
            let letters = line.chars().chain(word.chars()).map(|_| LETTER).sum::<f64>();
            letters + LETTER <= width
        };
        match lines.last_mut().filter(|line| fits(line)) {
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn style() -> String {
    let scheme = |of: fn(&(&'static str, &'static str)) -> &'static str, text: &str, note: &str| {
        let mut rules = format!(
            ".p-ground{{fill:#{}}}.p-shape{{fill:#{0}}}.p-text{{fill:#{text}}}\
             .p-note{{fill:#{note}}}.p-mark,.p-axis{{stroke:#{note}}}.p-grid{{stroke:#{note}}}",
            of(&GROUNDS)
        );
        for (number, colours) in COLOURS.iter().enumerate() {
            let _ = write!(rules, ".p{number}{{stroke:#{}}}", of(colours));
        }
        rules
    };
    format!(
        "{}@media(prefers-color-scheme:dark){{{}}}\
         .plot text{{font:13px system-ui,sans-serif}}.plot .p-title{{font-weight:600}}\
         .p-line{{fill:none;stroke-width:2}}.p-shape{{stroke-width:1.5}}\
         .p-grid{{stroke-opacity:.25}}.p-mark{{stroke-dasharray:2 3}}",
        scheme(|it| it.0, "16191f", "555d6b"),
        scheme(|it| it.1, "e7eaef", "a5adba"),
    )
}

#[cfg(test)]
mod tests;
