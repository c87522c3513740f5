//! Runs a scenario for a record.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::host::{Computer, LoadMeter};
use super::record::{self, RunFacts, RunRecord};
use super::tree::SourceTree;
use crate::figures::Figures;
use crate::lab::LabError;
use crate::scenario::{Context, Scenario};

/// Runs it, writes the record, and returns both.
///
/// # Errors
/// When a program is older than its sources, the scenario fails, or the record cannot be written.
pub fn run(context: Context, scenario: &Scenario) -> Result<(RunRecord, Figures), LabError> {
    let tree = SourceTree::find()?;
    record::check_programs(&tree, scenario)?;
    let sources = record::hashes(&tree, scenario)?;
    let paths: Vec<&str> = scenario.sources().collect();
    let commit = tree.commit(&paths);
    let (meter, began, seed) = (LoadMeter::start()?, Instant::now(), context.seed);
    let figures = (scenario.run)(&context)?;
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_err(std::io::Error::other)?;
    let run = RunFacts {
        changed: commit.as_ref().is_some_and(|(_, changed)| *changed),
        commit: commit.map(|(commit, _)| commit),
        date: model::date::utc(wall.as_secs() * 1000),
        seconds: began.elapsed().as_secs(),
        seed,
        minutes: context.minutes,
        runs: 1,
        computer: Computer::this(&context.provisions),
        load: meter.stop(),
        sources,
    };
    let record = RunRecord::of(scenario.name, run, &figures)?;
    record.write(&tree)?;
    Ok((record, figures))
}
