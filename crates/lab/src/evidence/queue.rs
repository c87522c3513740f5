//! `overbook lab evidence`: runs all scenarios without a fresh record, one after the other.
//!
//! **Idea.** A record is the only state, so the work can be ended at any moment and begun again.
//! Each scenario is a process of its own, as a user would start it, so none leaves anything for
//! the next one.

use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sys::process::{Signal, Spawn};

use super::host;
use super::page::KnownScenario;
use super::papers::Paper;
use super::record::{Freshness, RunRecord, Standing};
use super::tree::SourceTree;
use crate::interrupt;
use crate::lab::LabError;
use crate::scenario::Scenario;

/// The assumed length of a scenario that has never been timed.
const UNTIMED: Duration = Duration::from_secs(15 * 60);
/// Time between two looks at a scenario's process.
const POLL: Duration = Duration::from_millis(200);
/// Time that a process has to put everything back once it is told to end.
const GRACE: Duration = Duration::from_secs(60);

/// The scenarios to run.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    /// Only those whose record was made from other sources; else those without a record, too.
    pub only_stale: bool,
    /// Only those that measure a table or figure of this paper.
    pub paper: Option<&'a Paper>,
}

/// A scenario to run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct QueuedRun {
    scenario: &'static str,
    /// The time that it will take, and whether an earlier run said so.
    length: Duration,
    is_timed: bool,
}

/// The scenarios to run, in order.
fn plan(known: &[KnownScenario], selection: Selection) -> Vec<QueuedRun> {
    let is_due = |known: &&KnownScenario| {
        let is_due = match known.freshness {
            Freshness::Fresh => false,
            Freshness::None => !selection.only_stale,
            Freshness::CarriedOver | Freshness::Stale(_) => true,
        };
        is_due && selection.paper.is_none_or(|paper| paper.has(known.scenario.name))
    };
    let task = |known: &KnownScenario| {
        let seconds = known.record.as_ref().and_then(|record| Some(record.run.as_ref()?.seconds));
        let length = seconds.map_or(UNTIMED, Duration::from_secs);
        QueuedRun { scenario: known.scenario.name, length, is_timed: seconds.is_some() }
    };
    known.iter().filter(is_due).map(task).collect()
}

/// The first tasks that fit into `left`, in order; a long one is left out for shorter ones.
fn fitting(tasks: &[QueuedRun], mut left: Duration) -> (Vec<&QueuedRun>, Vec<&QueuedRun>) {
    tasks.iter().partition(|task| match left.checked_sub(task.length) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    })
}

/// Runs what is due, within `budget`.
pub fn run(
    tree: &SourceTree,
    selection: Selection,
    budget: Duration,
    options: &[String],
) -> Result<ExitCode, LabError> {
    let began = Instant::now();
    let tasks = plan(&KnownScenario::all(tree)?, selection);
    let (fit, left_out) = fitting(&tasks, budget);
    let untimed = fit.iter().filter(|task| !task.is_timed).count();
    let all: Duration = fit.iter().map(|task| task.length).sum();
    eprintln!("{} to run, {} ({untimed} never timed: 15 min each)", fit.len(), InWords(all));
    let mut failed = Vec::new();
    for (number, task) in fit.iter().enumerate() {
        let may_wait = || began.elapsed() + task.length < budget;
        if !may_wait() || !host::wait_until_quiet(may_wait)? {
            eprintln!("the time is over; {} were not begun", fit.len() - number);
            break;
        }
        let left: Duration = fit[number..].iter().map(|task| task.length).sum();
        eprintln!("{}/{} {}: {} left", number + 1, fit.len(), task.scenario, InWords(left));
        let before = RunRecord::read(tree, task.scenario)?;
        run_one(task.scenario, options)?;
        match RunRecord::read(tree, task.scenario)? {
            record if record == before => failed.push(task.scenario),
            Some(record) => eprintln!("  {}", outcome(&record, task.scenario)),
            None => failed.push(task.scenario),
        }
    }
    if !left_out.is_empty() {
        let names: Vec<&str> = left_out.iter().map(|task| task.scenario).collect();
        eprintln!("do not fit into {}: {}", InWords(budget), names.join(", "));
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("without a new record: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

fn run_one(scenario: &str, options: &[String]) -> Result<(), LabError> {
    let program = std::env::current_exe()?;
    let spawn = Spawn::new(program).args(["run", scenario, "--record"]).args(options);
    let mut child = spawn.die_with_parent().spawn()?;
    while child.try_wait()?.is_none() {
        if interrupt::interrupted() {
            // Ctrl-C reaches the child as well; a signal to this process alone does not.
            let _ = child.signal(Signal::INT);
            child.wait_for(GRACE)?;
            return Err(interrupt::Interrupted.into());
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

fn outcome(record: &RunRecord, scenario: &str) -> String {
    let claims =
        crate::scenario::find(scenario).map_or(&[][..], |scenario: &Scenario| scenario.claims);
    let with_target = claims.iter().filter(|claim| claim.target.is_some());
    let standings: Vec<Standing> = with_target.map(|claim| record.standing(claim)).collect();
    let met = standings.iter().filter(|standing| **standing == Standing::Met).count();
    format!("{scenario}: recorded; {met} of {} claims met", standings.len())
}

/// Options of the command line that each scenario gets.
pub fn options(dir: &Path, accel: &str) -> Vec<String> {
    vec!["--dir".into(), dir.display().to_string(), "--accel".into(), accel.to_owned()]
}

/// A duration for people.
struct InWords(Duration);

impl fmt::Display for InWords {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minutes = self.0.as_secs().div_ceil(60);
        match minutes / 60 {
            0 => write!(out, "{minutes} min"),
            hours => write!(out, "{hours} h {} min", minutes % 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::papers;
    use crate::scenario;

    /// Some scenarios, without a record.
    fn known(of: &[(&str, Freshness)]) -> Vec<KnownScenario> {
        let known = |(name, freshness): &(&str, Freshness)| KnownScenario {
            scenario: scenario::find(name).unwrap(),
            record: None,
            freshness: freshness.clone(),
        };
        of.iter().map(known).collect()
    }

    fn names(tasks: &[QueuedRun]) -> Vec<&str> {
        tasks.iter().map(|task| task.scenario).collect()
    }

    #[test]
    fn what_is_missing_or_stale_is_due_and_what_is_fresh_is_not() {
        let stale = Freshness::Stale(vec!["a.rs".into()]);
        let known = known(&[
            ("boot", Freshness::Fresh),
            ("quickstart", Freshness::None),
            ("kim-fig8", stale),
            ("walls", Freshness::CarriedOver),
        ]);
        let all = Selection { only_stale: false, paper: None };
        assert_eq!(names(&plan(&known, all)), ["quickstart", "kim-fig8", "walls"]);
        let only_stale = Selection { only_stale: true, paper: None };
        assert_eq!(names(&plan(&known, only_stale)), ["kim-fig8", "walls"]);
        let papers = papers::all().unwrap();
        let kim = papers.iter().find(|paper| paper.name == "kim");
        assert_eq!(names(&plan(&known, Selection { only_stale: false, paper: kim })), ["kim-fig8"]);
    }

    #[test]
    fn what_does_not_fit_is_left_out_for_what_does() {
        let task = |scenario, minutes: u64| QueuedRun {
            scenario,
            length: Duration::from_secs(minutes * 60),
            is_timed: true,
        };
        let tasks = [task("a", 10), task("b", 30), task("c", 5)];
        let (fit, left_out) = fitting(&tasks, Duration::from_secs(20 * 60));
        assert_eq!(fit, [&tasks[0], &tasks[2]]);
        assert_eq!(left_out, [&tasks[1]]);
    }

    #[test]
    fn durations_are_in_hours_and_minutes() {
        assert_eq!(InWords(Duration::from_secs(61)).to_string(), "2 min");
        assert_eq!(InWords(Duration::from_secs(3 * 3600 + 120)).to_string(), "3 h 2 min");
    }
}
