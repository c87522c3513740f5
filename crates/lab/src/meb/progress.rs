//! The work that guests get done, by their own reports and their own clocks.
//!
//! Each second, a guest writes a line with the number of operations that it has done, and the
//! time on its own clock. The rate between two lines is therefore exact, regardless of when the
//! host reads them. The arrival at the host (to 50 ms) relates a line to the host's time.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::interrupt;
use crate::lab::{Lab, LabError, Machine};

const POLL: Duration = Duration::from_millis(10);
/// Timeout for guests to fill their memory, partly into a slow swap or under a tracer.
const WORK_LIMIT: Duration = Duration::from_secs(240);
/// Timeout for the next line of a guest that is busy with other work.
const LINE_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub struct Line {
    /// The time at which the host saw it.
    pub arrived: Instant,
    /// The time at which the guest wrote it, in seconds since its workload began.
    pub t_s: f64,
    /// Operations since its workload began.
    pub ops: f64,
    pub value: Value,
}

impl Line {
    /// The newest line of a guest, if there is one.
    pub fn newest(machine: &Machine) -> Option<Self> {
        let sample = machine.last_metric()?;
        let (t_s, ops) = (sample.value["t_s"].as_f64()?, sample.value["ops"].as_f64()?);
        Some(Self { arrived: sample.arrived, t_s, ops, value: sample.value })
    }

    /// Operations per second between an earlier line and this one; NaN when no time lies between
    /// them.
    pub fn rate_since(&self, earlier: &Self) -> f64 {
        let seconds = self.t_s - earlier.t_s;
        if seconds > 0.0 { (self.ops - earlier.ops) / seconds } else { f64::NAN }
    }

    /// Whether the guest has done an operation, or waits for the time to begin.
    fn has_begun(&self) -> bool {
        self.ops > 0.0 || self.value["waiting"] == true
    }

    /// Whether its work has ended.
    pub fn has_ended(&self) -> bool {
        self.value["final"] == true
    }

    /// A number that the line holds under this name.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.value[name].as_f64()
    }
}

/// Every line of every guest from now on, in order; the guests in the lab's order.
#[derive(Debug)]
pub struct Lines {
    of: Vec<Vec<Line>>,
}

impl Lines {
    /// An empty record of the lab's guests.
    pub fn of(lab: &Lab) -> Self {
        Self { of: lab.machines().iter().map(|_| Vec::new()).collect() }
    }

    /// Reads new lines; must be called several times a second.
    pub fn look(&mut self, lab: &Lab) -> Result<(), LabError> {
        for (machine, lines) in lab.machines().iter().zip(&mut self.of) {
            machine.ensure_alive()?;
            let newest = Line::newest(machine);
            lines.extend(newest.filter(|line| lines.last().is_none_or(|l| l.t_s < line.t_s)));
        }
        Ok(())
    }

    /// Reads new lines until `until` holds.
    pub fn look_until(
        &mut self,
        lab: &Lab,
        what: &str,
        limit: Duration,
        mut until: impl FnMut(&Self) -> bool,
    ) -> Result<(), LabError> {
        let deadline = Instant::now() + limit;
        loop {
            self.look(lab)?;
            if until(self) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(LabError::Timeout { what: what.to_owned(), limit });
            }
            interrupt::sleep(POLL)?;
        }
    }

    pub fn look_for(&mut self, lab: &Lab, length: Duration) -> Result<(), LabError> {
        let end = Instant::now() + length;
        while Instant::now() < end {
            self.look(lab)?;
            interrupt::sleep(POLL.min(end.saturating_duration_since(Instant::now())))?;
        }
        self.look(lab)
    }

    pub fn guest(&self, index: usize) -> &[Line] {
        self.of.get(index).map_or(&[], Vec::as_slice)
    }

    /// Operations per second of one guest over all its lines; NaN when there are fewer than two.
    pub fn rate(&self, index: usize) -> f64 {
        rate(self.guest(index))
    }

    /// The least number of lines that a guest has written.
    pub fn fewest(&self) -> usize {
        self.of.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Drops the lines so far; later ones count.
    pub fn clear(&mut self) {
        for lines in &mut self.of {
            // The last line stays, to recognise which lines are new.
            lines.drain(..lines.len().saturating_sub(1));
        }
    }
}

/// Each guest's rate over `lines` of its lines, after the first `beginning` lines that it writes
/// from now on.
pub fn rates(lab: &Lab, beginning: usize, lines: usize) -> Result<Vec<f64>, LabError> {
    let mut seen = Lines::of(lab);
    // The newest line is from before.
    seen.look(lab)?;
    let limit = LINE_LIMIT + Duration::from_secs((beginning + lines) as u64);
    let enough = 1 + beginning + lines;
    seen.look_until(lab, "the guests to report", limit, |seen| seen.fewest() >= enough)?;
    let after = |lines: &Vec<Line>| rate(lines.get(beginning..).unwrap_or_default());
    Ok(seen.of.iter().map(after).collect())
}

fn rate(lines: &[Line]) -> f64 {
    match lines {
        [first, .., last] => last.rate_since(first),
        _ => f64::NAN,
    }
}

/// The text that a guest's init prints when its workload has ended.
const END_MARK: &str = "workload ended";

/// Waits until every guest has done its first operation, which shows that its memory is filled. A
/// guest that is to begin later may still wait.
///
/// # Errors
/// When that takes too long, a guest dies, or its workload has ended (for example, because its
/// command line is wrong).
pub fn wait_until_working(lab: &Lab) -> Result<(), LabError> {
    lab.wait_for("every guest to work", WORK_LIMIT, |lab| {
        for machine in lab.machines() {
            let console = std::fs::read(&machine.files().console).unwrap_or_default();
            if String::from_utf8_lossy(&console).contains(END_MARK) {
                return Err(machine.death());
            }
        }
        Ok(lab.machines().iter().all(|m| Line::newest(m).is_some_and(|line| line.has_begun())))
    })
}
