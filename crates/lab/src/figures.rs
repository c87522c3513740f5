//! Figures that a scenario measured, with their targets, printed as a table or as one JSON
//! object.
//!
//! **Invariants.** Whether a scenario passed is computed from its targets and cannot be claimed.
//! A figure that is no finite number (nothing was measured) misses every target. One of several
//! rounds meets its target by the same rule as in CLAIMS.md ([`Target::is_met_in`]). A figure that
//! the scenario claims has the target of its claim, and a claim with a target needs its figure.
//! Figures stay in the order in which they were added.

use std::fmt::{self, Write};

use serde::ser::{Serialize, SerializeMap, SerializeStruct, Serializer};

use crate::evidence::claim::Claim;
use crate::meb::pairs::{LEAST_COUNT, Median};
use crate::recording::median;
use crate::scenario;

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

    /// Whether these rounds, with this median and this 95 % interval, meet it. An exact target must
    /// be met by every round. Else both ends of the interval must meet it; few rounds have none,
    /// and their median must.
    pub fn is_met_in(self, rounds: &[f64], median: f64, interval: Option<[f64; 2]>) -> bool {
        match (self, interval) {
            (Self::Equals(_), _) if !rounds.is_empty() => {
                rounds.iter().all(|value| self.is_met_by(*value))
            }
            (_, Some(ends)) => ends.into_iter().all(|end| self.is_met_by(end)),
            (_, None) => self.is_met_by(median),
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
    pub value: f64,
    /// Its values in the rounds of this run, of which the number is the median; empty: one round.
    pub rounds: Vec<f64>,
    /// Its unit: `s`, `MiB`, `ops/s`, `ratio`, `count`.
    pub unit: &'static str,
    pub target: Option<Target>,
    /// The result in the paper, in the paper's form.
    pub paper: Option<String>,
    /// How it was measured, in a few words.
    pub note: String,
}

impl Figure {
    /// A number without a target.
    pub fn new(value: f64, unit: &'static str, note: impl Into<String>) -> Self {
        Self { value, rounds: Vec::new(), unit, target: None, paper: None, note: note.into() }
    }

    /// The median of several rounds; no number if one of them is none.
    pub fn of_rounds(rounds: Vec<f64>, unit: &'static str, note: impl Into<String>) -> Self {
        let is_known = rounds.iter().all(|value| value.is_finite());
        let value = if is_known { median(rounds.iter().copied()) } else { f64::NAN };
        Self { rounds, ..Self::new(value, unit, note) }
    }

    /// Its value in each round of this run.
    pub fn values(&self) -> Vec<f64> {
        if self.rounds.is_empty() { vec![self.value] } else { self.rounds.clone() }
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
        let interval = self.value.is_finite().then(|| interval(&self.rounds)).flatten();
        self.target.is_none_or(|target| target.is_met_in(&self.rounds, self.value, interval))
    }
}

/// The 95 % interval of the median of these rounds; `None`: they are too few for one.
pub fn interval(rounds: &[f64]) -> Option<[f64; 2]> {
    let Median { low, high, count, .. } = Median::of(rounds.to_vec());
    (count >= LEAST_COUNT).then_some([low, high])
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
    pub scenario: String,
    pub machine: String,
    /// The seed of everything random in it.
    pub seed: u64,
    pub runs: u32,
    /// Text above the figures in the table; not part of the JSON object.
    pub preface: String,
    /// The claims of the scenario of this name.
    claims: &'static [Claim],
    figures: Vec<(String, Figure)>,
}

impl Figures {
    pub fn new(scenario: &str, machine: String, seed: u64, runs: u32) -> Self {
        Self {
            scenario: scenario.to_owned(),
            machine,
            seed,
            runs,
            preface: String::new(),
            claims: scenario::find(scenario).map_or(&[], |scenario| scenario.claims),
            figures: Vec::new(),
        }
    }

    /// Adds one figure. If it is claimed, it gets the claim's unit, target and paper's value.
    pub fn add(&mut self, name: &str, mut figure: Figure) {
        if let Some(claim) = self.claims.iter().find(|claim| claim.figure == name) {
            figure.unit = claim.unit;
            figure.target = claim.target.or(figure.target);
            figure.paper = claim.paper.map(str::to_owned).or(figure.paper);
        }
        self.figures.push((name.to_owned(), figure));
    }

    /// Adds a number without a target of its own.
    pub fn tell(&mut self, name: &str, value: f64, unit: &'static str, note: impl Into<String>) {
        self.add(name, Figure::new(value, unit, note));
    }

    /// Adds the median of several rounds.
    pub fn tell_rounds(
        &mut self,
        name: &str,
        rounds: Vec<f64>,
        unit: &'static str,
        note: impl Into<String>,
    ) {
        self.add(name, Figure::of_rounds(rounds, unit, note));
    }

    /// Adds a number with a target that no claim has.
    pub fn check(
        &mut self,
        name: &str,
        value: f64,
        unit: &'static str,
        note: impl Into<String>,
        target: Target,
    ) {
        self.add(name, Figure::new(value, unit, note).target(target));
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Figure)> {
        self.figures.iter().map(|(name, figure)| (name.as_str(), figure))
    }

    /// Claims with a target whose figure is not there.
    fn missing(&self) -> impl Iterator<Item = &'static Claim> {
        let claims = self.claims.iter().filter(|claim| claim.target.is_some());
        claims.filter(|claim| self.get(claim.figure).is_none())
    }

    pub fn get(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|(known, _)| known == name).map(|(_, figure)| figure)
    }

    /// Whether every figure meets its target and none is missing. An empty set has not passed.
    pub fn passed(&self) -> bool {
        let is_complete = !self.figures.is_empty() && self.missing().next().is_none();
        is_complete && self.figures.iter().all(|(_, figure)| figure.met())
    }

    /// A row for each figure: name, value, unit, target, whether it is met, note.
    pub fn rows(&self) -> Vec<[String; 6]> {
        let row = |(name, figure): &(String, Figure)| {
            let target = figure.target.map(|target| target.to_string()).unwrap_or_default();
            let verdict = match figure.target {
                None => "",
                Some(_) if figure.met() => "ok",
                Some(_) => "MISSED",
            };
            let paper = figure.paper.as_ref().map(|paper| format!(" (paper: {paper})"));
            let note = figure.note.clone() + &paper.unwrap_or_default();
            let (value, unit) = (rounded(figure.value), figure.unit.to_owned());
            [name.clone(), value, unit, target, verdict.to_owned(), note]
        };
        let missing = self.missing().map(|claim| {
            let target = claim.target.map(|target| target.to_string()).unwrap_or_default();
            let words = ["none", claim.unit, &target, "MISSED", "not measured"].map(str::to_owned);
            let [value, unit, target, verdict, note] = words;
            [claim.figure.to_owned(), value, unit, target, verdict, note]
        });
        self.figures.iter().map(row).chain(missing).collect()
    }

    pub fn to_table(&self) -> String {
        let mut rows = vec![["figure", "value", "unit", "target", "", "note"].map(str::to_owned)];
        rows.extend(self.rows());
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

/// Figures of invented measurements; a name that is not there panics.
#[cfg(test)]
impl Figures {
    /// Figures of this scenario, as `add` adds them.
    pub(crate) fn invented(scenario: &str, add: impl FnOnce(&mut Self)) -> Self {
        let mut figures = Self::new(scenario, "m".into(), 1, 1);
        add(&mut figures);
        figures
    }

    pub(crate) fn value(&self, name: &str) -> f64 {
        self.get(name).unwrap().value
    }

    /// Whether a figure meets its target, if it has one.
    pub(crate) fn met(&self, name: &str) -> bool {
        self.get(name).unwrap().met()
    }

    /// Asserts that these figures have these numbers.
    pub(crate) fn assert_near(&self, expected: &[(&str, f64)]) {
        for (name, wanted) in expected {
            let value = self.value(name);
            assert!((value - wanted).abs() < 1e-9, "{name} is {value}, not {wanted}");
        }
    }
}

/// Rounds to three significant digits: a measurement on a shared machine is worth no more.
pub fn rounded(value: f64) -> String {
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
    fn several_rounds_are_their_median_and_one_without_a_number_spoils_it() {
        let of = |rounds: &[f64]| Figure::of_rounds(rounds.to_vec(), "ratio", "n").value;
        assert!((of(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!(of(&[3.0, f64::NAN, 2.0]).is_nan() && of(&[]).is_nan());
    }

    #[test]
    fn the_worse_end_of_an_interval_decides_and_few_rounds_have_none() {
        let met = |rounds: &[f64], target| {
            Figure::of_rounds(rounds.to_vec(), "ratio", "n").target(target).met()
        };
        assert!(met(&[0.9, 1.1, 1.2], Target::AtLeast(1.0)));
        assert!(!met(&[0.9, 1.1, 1.2, 1.2, 1.2, 1.2], Target::AtLeast(1.0)));
        assert!(met(&[1.0, 1.1, 1.2, 1.2, 1.2, 1.2], Target::AtLeast(1.0)));
        assert!(!met(&[1.0, 1.1, f64::NAN, 1.2, 1.2, 1.2], Target::AtLeast(1.0)));
        assert!(!met(&[0.0, 0.0, 1.0], Target::Equals(0.0)));
    }

    #[test]
    fn a_claim_gives_its_target_and_misses_without_its_figure() {
        let mut figures = Figures::new("boot", "m".into(), 1, 1);
        figures.add("left_behind", Figure::new(0.0, "count", "n"));
        assert!(!figures.passed() && figures.to_table().contains("above_base_mib"));
        figures.add("above_base_mib", Figure::new(1.0, "MiB", "n"));
        assert_eq!(figures.get("above_base_mib").unwrap().target, Some(Target::Equals(0.0)));
        assert!(!figures.passed());
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
