//! The record of a scenario's run: `results/<scenario>.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::EvidenceError;
use super::claim::Claim;
use super::host::{Computer, HostLoad};
use super::tree::{self, SourceTree};
use crate::command;
use crate::figures::{Figures, Target, interval};
use crate::inside::{SHIM, TRACER};
use crate::recording::median;
use crate::scenario::Scenario;

/// The directory of records in the source tree.
pub const DIRECTORY: &str = "results";
const LAB: &str = "overbook-lab";

/// All that is known of a scenario's latest run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecord {
    /// The scenario, which is also the file's name.
    pub scenario: String,
    /// The run; `None`: carried over from a list without dates.
    pub run: Option<RunFacts>,
    /// Figures that were read in every round.
    pub figures: BTreeMap<String, MeasuredFigure>,
    /// Figures that were not, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, String>,
}

/// The circumstances of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunFacts {
    /// The commit that was checked out; `None`: there was no git.
    pub commit: Option<String>,
    /// Whether sources that count differed from that commit.
    pub changed: bool,
    /// The end of the run, in UTC.
    pub date: String,
    /// Its length.
    pub seconds: u64,
    pub seed: u64,
    /// The length that `--minutes` asked for.
    pub minutes: Option<u32>,
    /// How often the scenario ran.
    pub runs: u32,
    pub computer: Computer,
    pub load: HostLoad,
    /// The hash of each file or directory that was measured.
    pub sources: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredFigure {
    pub unit: String,
    /// Its value in each round; empty where only the sum was carried over.
    pub rounds: Vec<f64>,
    pub median: f64,
    /// The 95 % interval of the median, which six rounds and more have.
    pub interval: Option<[f64; 2]>,
    /// How it was measured, in the scenario's words.
    pub note: String,
}

/// Whether a claim holds, by its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It has no target.
    Told,
    Met,
    NotMet,
    /// There is no value.
    NotMeasured,
}

/// Whether a record may be believed of the code as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Freshness {
    None,
    CarriedOver,
    /// These sources have changed since.
    Stale(Vec<String>),
    /// The sources are the same.
    Fresh,
}

impl MeasuredFigure {
    fn new(unit: &str, rounds: Vec<f64>, note: String) -> Self {
        let (value, interval) = (median(rounds.iter().copied()), interval(&rounds));
        Self { unit: unit.to_owned(), rounds, median: value, interval, note }
    }

    fn meets(&self, target: Target) -> bool {
        target.is_met_in(&self.rounds, self.median, self.interval)
    }
}

impl RunRecord {
    /// A record of these figures. A figure that is no number in one of its rounds is missing.
    pub fn of(scenario: &str, run: RunFacts, measured: &Figures) -> Result<Self, EvidenceError> {
        let (mut figures, mut missing) = (BTreeMap::new(), BTreeMap::new());
        for (name, figure) in measured.iter() {
            let values = figure.values();
            let unread = values.iter().filter(|value| !value.is_finite()).count();
            if unread == 0 {
                let measured = MeasuredFigure::new(figure.unit, values, figure.note.clone());
                figures.insert(name.to_owned(), measured);
            } else {
                let reason = format!("no number in {unread} of {} rounds", values.len());
                missing.insert(name.to_owned(), reason);
            }
        }
        if figures.is_empty() && missing.is_empty() {
            return Err(EvidenceError::NoFigure(scenario.to_owned()));
        }
        Ok(Self { scenario: scenario.to_owned(), run: Some(run), figures, missing })
    }

    /// The record of a scenario, if there is one.
    pub fn read(tree: &SourceTree, scenario: &str) -> Result<Option<Self>, EvidenceError> {
        let path = path(tree, scenario);
        if !path.exists() {
            return Ok(None);
        }
        let faulty = |fault| EvidenceError::Faulty { path: path.clone(), fault };
        let record: Self = serde_json::from_slice(&tree::read(&path)?)
            .map_err(|error| faulty(error.to_string()))?;
        match record.fault(scenario) {
            Some(fault) => Err(faulty(fault)),
            None => Ok(Some(record)),
        }
    }

    /// Writes it in place of the one before.
    pub fn write(&self, tree: &SourceTree) -> Result<PathBuf, EvidenceError> {
        let path = path(tree, &self.scenario);
        let failed = |source| EvidenceError::File { path: path.clone(), source };
        let text = serde_json::to_string_pretty(self).map_err(|error| failed(error.into()))?;
        // A reader sees the old record or the new one, and a death between leaves the old one.
        let draft = path.with_extension("json.new");
        std::fs::create_dir_all(tree.path(DIRECTORY)).map_err(failed)?;
        std::fs::write(&draft, text + "\n").map_err(failed)?;
        std::fs::rename(&draft, &path).map_err(failed)?;
        Ok(path)
    }

    /// The part that contradicts the rest of the record.
    fn fault(&self, scenario: &str) -> Option<String> {
        if self.scenario != scenario {
            return Some(format!("it is a record of {}", self.scenario));
        }
        self.figures.iter().find_map(|(name, figure)| {
            if figure.rounds.is_empty() {
                return self.run.as_ref().map(|_| format!("{name} has no rounds"));
            }
            let again =
                MeasuredFigure::new(&figure.unit, figure.rounds.clone(), figure.note.clone());
            let same = again == *figure || (self.run.is_none() && again.median == figure.median);
            (!same).then(|| format!("{name}: median and interval are not those of its rounds"))
        })
    }

    /// Whether a claim holds.
    pub fn standing(&self, claim: &Claim) -> Standing {
        match (self.figures.get(claim.figure), claim.target) {
            (None, _) => Standing::NotMeasured,
            (Some(_), None) => Standing::Told,
            (Some(measured), Some(target)) if measured.meets(target) => Standing::Met,
            (Some(_), Some(_)) => Standing::NotMet,
        }
    }
}

impl Freshness {
    /// That of a scenario's record.
    pub fn of(
        tree: &SourceTree,
        scenario: &Scenario,
        record: Option<&RunRecord>,
    ) -> Result<Self, EvidenceError> {
        let Some(record) = record else { return Ok(Self::None) };
        let Some(run) = &record.run else { return Ok(Self::CarriedOver) };
        let now = hashes(tree, scenario)?;
        let changed = now.into_iter().filter(|(path, hash)| run.sources.get(path) != Some(hash));
        let changed: Vec<String> = changed.map(|(path, _)| path).collect();
        Ok(if changed.is_empty() { Self::Fresh } else { Self::Stale(changed) })
    }
}

/// The hashes of all that a scenario measures.
pub fn hashes(
    tree: &SourceTree,
    scenario: &Scenario,
) -> Result<BTreeMap<String, String>, EvidenceError> {
    scenario.sources().map(|path| Ok((path.to_owned(), tree.hash(path)?))).collect()
}

/// Refuses programs that are older than the sources that they were built from: a record would
/// name code that was not measured.
pub fn check_programs(tree: &SourceTree, scenario: &Scenario) -> Result<(), EvidenceError> {
    let failed = |source| EvidenceError::File { path: "/proc/self/exe".into(), source };
    for source in scenario.sources() {
        for name in programs_of(source) {
            let program = command::own_program(name).map_err(failed)?;
            let built: SystemTime = tree::written(&program)?;
            if let Some((_, file)) = tree.newest(source)?.filter(|(time, _)| *time > built) {
                return Err(EvidenceError::OldProgram { file, program });
            }
        }
    }
    Ok(())
}

/// The programs and libraries that a change of this source changes.
fn programs_of(source: &str) -> &'static [&'static str] {
    match source.strip_prefix("crates/").and_then(|path| path.split('/').next()) {
        Some("shim" | "protocol") => &[SHIM],
        Some("tracer") => &[TRACER],
        Some("lab" | "sim") => &[LAB],
        _ => &["overbook", LAB],
    }
}

fn path(tree: &SourceTree, scenario: &str) -> PathBuf {
    tree.path(&format!("{DIRECTORY}/{scenario}.json"))
}

#[cfg(test)]
mod tests;
