//! CLAIMS.md: every claim with its target, its latest result, the date and commit of that, and the
//! command that measures it.

use std::fmt::Write as _;

use super::bench;
use super::claim::Claim;
use super::record::{Freshness, MeasuredFigure, RunRecord, Standing};
use super::tree::SourceTree;
use super::{EvidenceError, papers};
use crate::figures::{Target, rounded};
use crate::scenario::{self, Scenario};

/// Where the page lies in the source tree.
pub const CLAIMS: &str = "CLAIMS.md";

/// Claims that tests hold, and what is not proven: text.
const BY_TESTS: &str = include_str!("held_by_tests.md");
const NOT_PROVEN: &str = include_str!("not_proven.md");

const HEAD: &str = "\
# Claims

Every number that Overbook promises, and its latest result. `make claims` writes this page from the
claims in the code (`crates/lab/src/scenario`) and the records in `results`. The notes in the
records tell more, and so do [the papers' tables](docs/src/papers.md).

* **Target.** A figure without one is told, not claimed. **not met**: the result misses it.
* **Measured.** The median, its 95 % interval from six rounds on, else the least and the greatest of
  the rounds. A target is met if the worse end of the interval meets it; under six rounds, if the
  median does; an exact one, if every round does.
* **stale**: code that the scenario measures has changed since. `overbook lab evidence` measures it
  again.
* **undated**: carried over from an earlier list without dates and commits. Nothing says which code
  had this result, so these rows are stale, too. They were measured on 2 shared cores, 24 GiB, Linux
  6.18, QEMU 10.0 under emulation (TCG), many next to other programs.
";

/// Sections, and the names of their scenarios; `lab evidence` runs them in this order.
pub const TOPICS: &[(&str, &str)] = &[
    ("Guests and the daemon", "boot quickstart starve walls daemon-kill daemon-cost"),
    (
        "Tracking",
        "truth meb-accuracy meb-random-array meb-overhead meb-imt shim-idle worker-kill \
         shim-stress let-go readings",
    ),
    ("Identical pages", "dedup-vs-ksm dedup-cost dedup-soak dedup-overhead group-isolation"),
    (
        "Groups (Kim 2014)",
        "kim-table1 kim-fig1 kim-fig5 kim-fig6 kim-fig7 kim-fig8 kim-fig9 kim-fig10 kim-fig11 \
         kim-fig12 kim-fig13 kim-table2 kim-fig14 kim-fig15 kim-fig17",
    ),
    ("Disks by NBD", "coop-swap page-server-kill page-server-vs overdriver-table1"),
    (
        "Overload and pools",
        "overdriver-fig5 overdriver-excess overdriver-fig8 overdriver-table2 overload-demo \
         overdriver-pool overdriver-thresholds pool-idle cluster-kill",
    ),
    ("Known code", "smd-fig1 smd-fig2 smd-fig10 smd-fig11 smd-fig12 smd-saved smd-soak"),
    ("VMs as they run", "attached-accuracy attached-kvm attached-large"),
    ("Cold memory", "cold-circles cold-return cold-choice cold-density cold-soak"),
    (
        "Balance (MEB)",
        "meb-table3 meb-table4 meb-table5 meb-table6 meb-table7 meb-table8 meb-oscillation",
    ),
    (
        "Freed memory",
        "imr-table8 imr-table9 imr-table10 imr-reuse imr-vs-ksm-swap imr-fig7 imr-fig8 imr-fig9 \
         free-soak",
    ),
    ("Real KVM", "reclaimed kvm-host"),
];

#[derive(Debug)]
pub struct KnownScenario {
    pub scenario: &'static Scenario,
    pub record: Option<RunRecord>,
    /// Whether the record may be believed.
    pub freshness: Freshness,
}

impl KnownScenario {
    /// A scenario with its record in the tree.
    pub fn read(tree: &SourceTree, scenario: &'static Scenario) -> Result<Self, EvidenceError> {
        let record = RunRecord::read(tree, scenario.name)?;
        let freshness = Freshness::of(tree, scenario, record.as_ref())?;
        Ok(Self { scenario, record, freshness })
    }

    /// All scenarios, in the order of [`TOPICS`].
    pub fn all(tree: &SourceTree) -> Result<Vec<Self>, EvidenceError> {
        let names = TOPICS.iter().flat_map(|(_, names)| names.split(' '));
        let scenarios = names.filter_map(scenario::find);
        scenarios.map(|scenario| Self::read(tree, scenario)).collect()
    }
}

/// Writes CLAIMS.md and the page of the papers; returns whether any of them changed.
pub fn write_all(tree: &SourceTree) -> Result<bool, EvidenceError> {
    let known = KnownScenario::all(tree)?;
    let mut changed = false;
    for (name, text) in [(CLAIMS, text(tree, &known)?), (papers::PAGE, papers::text(tree, &known)?)]
    {
        let path = tree.path(name);
        if std::fs::read_to_string(&path).is_ok_and(|old| old == text) {
            continue;
        }
        std::fs::write(&path, text).map_err(|source| EvidenceError::File { path, source })?;
        changed = true;
    }
    Ok(changed)
}

/// The text of CLAIMS.md.
pub fn text(tree: &SourceTree, known: &[KnownScenario]) -> Result<String, EvidenceError> {
    let benches = RunRecord::read(tree, bench::NAME)?;
    let mut rows = Vec::new();
    for (title, names) in TOPICS {
        let is_here = |it: &&KnownScenario| names.split(' ').any(|name| name == it.scenario.name);
        let of_topic = known.iter().filter(is_here);
        let of_topic: Vec<ClaimRow> = of_topic.flat_map(ClaimRow::of).collect();
        rows.push((*title, of_topic));
    }
    let of_benches = bench::CLAIMS.iter().map(|claim| {
        ClaimRow::new(claim, benches.as_ref(), &Freshness::CarriedOver, "make bench".to_owned())
    });
    rows.push(("Benchmarks", of_benches.collect()));
    let mut page = format!("{HEAD}\n{}\n", sum(rows.iter().flat_map(|(_, rows)| rows)));
    for (title, rows) in rows.iter().filter(|(_, rows)| !rows.is_empty()) {
        let _ = write!(page, "\n## {title}\n\n| claim | target | measured | date and commit | ");
        page += "command |\n|---|---|---|---|---|\n";
        for row in rows {
            page += &row.line();
        }
    }
    Ok(format!("{page}\n{BY_TESTS}\n{NOT_PROVEN}"))
}

/// How many claims hold, how many do not, and how many of both are stale.
fn sum<'a>(rows: impl Iterator<Item = &'a ClaimRow<'a>>) -> String {
    let (mut met, mut not_met, mut none, mut told, mut stale) = (0, 0, 0, 0, 0);
    for row in rows {
        *match row.standing {
            Standing::Met => &mut met,
            Standing::NotMet => &mut not_met,
            Standing::NotMeasured => &mut none,
            Standing::Told => &mut told,
        } += 1;
        stale += usize::from(row.is_stale());
    }
    let all = met + not_met + none + told;
    format!(
        "Of {all} rows of scenarios and benchmarks {met} are met, {not_met} not met, {none} not measured\n\
         and {told} told; {stale} of those with a result are stale."
    )
}

/// One claim and all that is known of it.
struct ClaimRow<'a> {
    claim: &'a Claim,
    record: Option<&'a RunRecord>,
    freshness: &'a Freshness,
    standing: Standing,
    command: String,
}

impl<'a> ClaimRow<'a> {
    fn of(known: &'a KnownScenario) -> impl Iterator<Item = Self> {
        known.scenario.claims.iter().map(|claim| {
            let command = format!("lab run {}", known.scenario.name);
            Self::new(claim, known.record.as_ref(), &known.freshness, command)
        })
    }

    fn new(
        claim: &'a Claim,
        record: Option<&'a RunRecord>,
        freshness: &'a Freshness,
        command: String,
    ) -> Self {
        let standing = record.map_or(Standing::NotMeasured, |record| record.standing(claim));
        Self { claim, record, freshness, standing, command }
    }

    fn measured(&self) -> Option<&MeasuredFigure> {
        self.record.and_then(|record| record.figures.get(self.claim.figure))
    }

    fn is_stale(&self) -> bool {
        self.measured().is_some() && *self.freshness != Freshness::Fresh
    }

    fn line(&self) -> String {
        let Claim { figure, sentence, target, paper, .. } = self.claim;
        let target = target.map_or("told".to_owned(), |target| in_words(target, self.claim.unit));
        let paper = paper.map_or(String::new(), |paper| format!(" (paper: {paper})"));
        let result = match (self.measured(), self.standing) {
            (Some(measured), Standing::NotMet) => format!("**not met**: {}", value(measured)),
            (Some(measured), _) => value(measured),
            (None, _) => self.why_not_measured(),
        };
        let (when, command) = (self.when(), &self.command);
        format!("| {sentence} | {target}{paper} | {result} | {when} | `{command}`: `{figure}` |\n")
    }

    fn why_not_measured(&self) -> String {
        let missing = self.record.and_then(|record| record.missing.get(self.claim.figure));
        missing.map_or("not measured".to_owned(), |why| format!("not measured: {why}"))
    }

    fn when(&self) -> String {
        let Some(record) = self.record else { return String::new() };
        let Some(run) = &record.run else {
            let is_there = self.measured().is_some();
            return if is_there { "undated, **stale**".to_owned() } else { String::new() };
        };
        let mut when = run.date.split('T').next().unwrap_or_default().to_owned();
        match &run.commit {
            Some(commit) => {
                let _ = write!(when, ", {}", commit.get(..8).unwrap_or(commit));
            }
            None => when += ", unknown commit",
        }
        if run.changed {
            when += " and later changes";
        }
        let cores = run.computer.cores as f64;
        if run.load.before > cores / 4.0 || run.load.other_qemus > 0 {
            let _ = write!(when, ", on a busy machine (load {} before)", run.load.before);
        }
        if self.is_stale() {
            when += ", **stale**";
        }
        when
    }
}

/// A target for people, in its unit.
fn in_words(target: Target, unit: &str) -> String {
    let (sign, limit) = match target {
        Target::AtLeast(limit) => ("≥", limit),
        Target::AtMost(limit) => ("≤", limit),
        Target::Below(limit) => ("<", limit),
        Target::Equals(limit) => ("=", limit),
    };
    format!("{sign} {limit}{}", unit_of(unit))
}

/// A result for people: the median, and how sure it is.
pub(super) fn value(measured: &MeasuredFigure) -> String {
    let MeasuredFigure { unit, rounds, median, interval, .. } = measured;
    let of_rounds = match rounds.len() {
        0 => "rounds unknown".to_owned(),
        1 => "1 round".to_owned(),
        count => format!("{count} rounds"),
    };
    let range = match interval {
        Some([low, high]) => format!("{} to {}, ", rounded(*low), rounded(*high)),
        None if rounds.len() > 1 => {
            let low = rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let high = rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            format!("{} to {}, ", rounded(low), rounded(high))
        }
        None => String::new(),
    };
    format!("{}{} ({range}{of_rounds})", rounded(*median), unit_of(unit))
}

fn unit_of(unit: &str) -> String {
    match unit {
        "ratio" | "count" | "share" | "bool" => String::new(),
        unit => format!(" {unit}"),
    }
}

#[cfg(test)]
mod tests;
