//! `shell`: a nearly idle system. Once a second a small pipeline of its programs runs, like a
//! monitoring job; its output must be the same as the first time.

use std::time::Duration;

use clap::Args;

use crate::error::WorkError;
use crate::intact;
use crate::program::{self, difference};
use crate::run::Worker;

const RUNS_PER_S: f64 = 1.0;
const PIPELINE: &str = "ls -l /usr/bin /usr/lib | sort | md5sum";

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    checks: intact::Checks,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    intact::watch(&options.checks, &[], &worker.shared)?;
    let period = Duration::from_secs_f64(1.0 / worker.rate.unwrap_or(RUNS_PER_S));
    let mut first = None;
    let mut due = worker.shared.now();
    while worker.shared.sleep_until(due) {
        let said = program::output("sh", program::command("sh").args(["-c", PIPELINE]))?;
        let now = worker.shared.now();
        worker.shared.latency.record(now.saturating_sub(due));
        let expected = first.get_or_insert_with(|| said.clone());
        worker.shared.bad_bytes.add(difference(&said, expected));
        worker.done(1);
        due = (due + period).max(now);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct ShellLine {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn it_runs_its_pipeline_again_and_says_the_same() {
        let ShellLine { options } = ShellLine::parse_from(["shell", "--check-s", "0"]);
        let mut worker = Worker::for_test();
        worker.rate = Some(100.0);
        let stopper = worker.stop_after(2);
        run(&options, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() >= 2);
        assert_eq!(worker.shared.bad_bytes.get(), Some(0));
    }
}
