//! Figures that a scenario measured, with their targets, printed as a table or as one JSON
//! object.
//!
//! **Invariants.** Whether a scenario passed is computed from its targets and cannot be claimed.
//! A figure that is no finite number (nothing was measured) misses every target. Figures stay in
//! the order in which they were added.

use std::fmt::{self, Write};

use serde::ser::{Serialize, SerializeMap, SerializeStruct, Serializer};

/// The target of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// `>= x`
    AtLeast(f64),
    /// `<= x`
    AtMost(f64),
    /// `< x`
    Below(f64),
    /// `== x`
    Equals(f64),
}

impl Target {
    /// Whether `value` meets it. NaN and infinity (a division by zero) meet no target.
    pub fn is_met_by(self, value: f64) -> bool {
        if !value.is_finite() {
            return false;
        }
        match self {
            Self::AtLeast(limit) => value >= limit,
            Self::AtMost(limit) => value <= limit,
            Self::Below(limit) => value < limit,
            Self::Equals(wanted) => (value - wanted).abs() < 1e-9,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(limit) => write!(out, ">= {limit}"),
            Self::AtMost(limit) => write!(out, "<= {limit}"),
            Self::Below(limit) => write!(out, "< {limit}"),
            Self::Equals(wanted) => write!(out, "== {wanted}"),
        }
    }
}

/// One measured number.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The number.
    pub value: f64,
    /// Its unit: `s`, `MiB`, `ops/s`, `ratio`, `count`.
    pub unit: &'static str,
    /// Its target.
    pub target: Option<Target>,
    /// The result in the paper, in the paper's form.
    pub paper: Option<String>,
    /// How it was measured, in a few words.
    pub note: String,
}

impl Figure {
    /// A number without a target.
    pub fn new(value: f64, unit: &'static str, note: impl Into<String>) -> Self {
        Self { value, unit, target: None, paper: None, note: note.into() }
    }

    /// The same figure with a target.
    pub fn target(self, target: Target) -> Self {
        Self { target: Some(target), ..self }
    }

    /// The same figure with the result in the paper.
    pub fn paper(self, paper: impl Into<String>) -> Self {
        Self { paper: Some(paper.into()), ..self }
    }

    /// Whether it meets its target, if it has one.
    pub fn met(&self) -> bool {
        self.target.is_none_or(|target| target.is_met_by(self.value))
    }
}

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Figure", 5)?;
        object.serialize_field("value", &self.value)?;
        object.serialize_field("unit", self.unit)?;
        object.serialize_field("target", &self.target.map(|target| target.to_string()))?;
        object.serialize_field("paper", &self.paper)?;
        object.serialize_field("note", &self.note)?;
        object.end()
    }
}

/// All that a scenario measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// The scenario's name.
    pub scenario: String,
    /// The machine that it ran on.
    pub machine: String,
    /// The seed of everything random in it.
    pub seed: u64,
    /// The number of measurements.
    pub runs: u32,
    /// Text above the figures in the table; not part of the JSON object.
    pub preface: String,
    figures: Vec<(String, Figure)>,
}

impl Figures {
    /// An empty set of figures.
    pub fn new(scenario: &str, machine: String, seed: u64, runs: u32) -> Self {
        Self {
            scenario: scenario.to_owned(),
            machine,
            seed,
            runs,
            preface: String::new(),
            figures: Vec::new(),
        }
    }

    /// Adds one figure.
    pub fn add(&mut self, name: &str, figure: Figure) {
        self.figures.push((name.to_owned(), figure));
    }

    /// The figure of this name.
    pub fn get(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|(known, _)| known == name).map(|(_, figure)| figure)
    }

    /// Whether every figure meets its target. An empty set has not passed.
    pub fn passed(&self) -> bool {
        !self.figures.is_empty() && self.figures.iter().all(|(_, figure)| figure.met())
    }

    /// As a table for people.
    pub fn to_table(&self) -> String {
        let mut rows = vec![["figure", "value", "unit", "target", "", "note"].map(str::to_owned)];
        for (name, figure) in &self.figures {
            let target = figure.target.map(|target| target.to_string()).unwrap_or_default();
            let verdict = match figure.target {
                None => "",
                Some(_) if figure.met() => "ok",
                Some(_) => "MISSED",
            };
            let paper = figure.paper.as_ref().map(|paper| format!(" (paper: {paper})"));
            let note = figure.note.clone() + &paper.unwrap_or_default();
            let (value, unit) = (rounded(figure.value), figure.unit.to_owned());
            rows.push([name.clone(), value, unit, target, verdict.to_owned(), note]);
        }
        let mut widths = [0; 6];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = self.preface.clone();
        for [name, value, unit, target, verdict, note] in &rows {
            let [n, v, u, t, d, _] = widths;
            let line =
                format!("{name:<n$}  {value:>v$} {unit:<u$}  {target:<t$}  {verdict:<d$}  {note}");
            let _ = writeln!(text, "{}", line.trim_end());
        }
        let verdict = if self.passed() { "passed" } else { "FAILED" };
        let (scenario, machine) = (&self.scenario, &self.machine);
        let (seed, runs) = (self.seed, self.runs);
        let _ = writeln!(text, "{scenario}: {verdict} (seed {seed}, runs {runs}, {machine})");
        text
    }
}

/// Rounds to three significant digits: a measurement on a shared machine is worth no more.
fn rounded(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "none".to_owned(),
        _ if value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Figures", 6)?;
        object.serialize_field("scenario", &self.scenario)?;
        object.serialize_field("machine", &self.machine)?;
        object.serialize_field("seed", &self.seed)?;
        object.serialize_field("runs", &self.runs)?;
        object.serialize_field("passed", &self.passed())?;
        object.serialize_field("figures", &Ordered(&self.figures))?;
        object.end()
    }
}

/// A JSON object whose keys keep their order.
struct Ordered<'a>(&'a [(String, Figure)]);

impl Serialize for Ordered<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, figure) in self.0 {
            map.serialize_entry(name, figure)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(value: f64, target: Target) -> Figures {
        let mut figures = Figures::new("s", "m".into(), 1, 1);
        figures.add("speedup", Figure::new(value, "ratio", "n").target(target));
        figures
    }

    #[test]
    fn passed_follows_from_the_targets() {
        assert!(figures(3.0, Target::AtLeast(3.0)).passed());
        assert!(!figures(2.9, Target::AtLeast(3.0)).passed());
        assert!(figures(3.0, Target::AtMost(3.0)).passed());
        assert!(!figures(1.0, Target::Below(1.0)).passed());
        assert!(figures(0.0, Target::Equals(0.0)).passed());
    }

    #[test]
    fn what_was_not_measured_has_not_passed() {
        assert!(!figures(f64::NAN, Target::AtMost(3.0)).passed());
        assert!(!figures(f64::NAN, Target::Equals(0.0)).passed());
        assert!(!figures(f64::INFINITY, Target::AtLeast(3.0)).passed());
        assert!(!Figures::new("s", "m".into(), 1, 1).passed());
    }

    #[test]
    fn the_json_object_has_the_agreed_shape() {
        let json = serde_json::to_string(&figures(4.0, Target::AtLeast(3.0))).unwrap();
        let figure = r#"{"value":4.0,"unit":"ratio","target":">= 3","paper":null,"note":"n"}"#;
        let head = r#"{"scenario":"s","machine":"m","seed":1,"runs":1,"passed":true,"figures""#;
        assert_eq!(json, format!(r#"{head}:{{"speedup":{figure}}}}}"#));
    }

    #[test]
    fn the_table_marks_what_missed_its_target() {
        let table = figures(2.0, Target::AtLeast(3.0)).to_table();
        assert!(table.contains("MISSED") && table.contains("s: FAILED"), "{table}");
    }
}
