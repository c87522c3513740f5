//! The reporter: one JSON line per second on standard output, and a final one.
//!
//! It runs on the main thread and does not depend on the worker, so the lines come while the
//! worker is stuck. In a line, `ops_per_s` and the percentiles cover the time since the line
//! before; in the final one, the whole run. A field without a meaning for the workload (or
//! without an operation that ended in that second) is absent. `swap_kb` is the part of the whole
//! guest that is in swap and not in memory, which the host cannot see; it is absent where there
//! is no swap. `oom_kills` counts the programs that the guest's kernel has killed because memory
//! ran out since it booted.
//!
//! At the end the worker gets two seconds to come to its next check; then the final line is
//! written without it. A closed standard output ends the program. Any other write error is
//! reported once on standard error and the work goes on, because the load matters even when its
//! figures are lost.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use serde::Serialize;

use crate::error::WorkError;
use crate::histogram::Snapshot;
use crate::run::RunState;
use crate::workloads::Timing;
use crate::{oom, swap};

const PERIOD: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(2);

/// An event that ends a run early.
#[derive(Debug)]
pub(crate) enum Event {
    /// The worker has ended.
    Finished(Result<(), WorkError>),
    /// A signal asks for the end.
    Stop,
}

/// How a run ended.
#[derive(Debug)]
pub(crate) enum WorkResult {
    Ended,
    Failed(WorkError),
    /// Standard output was closed by its reader.
    ReaderGone,
}

#[derive(Debug, Serialize)]
struct ReportLine {
    workload: &'static str,
    t_s: f64,
    ops: u64,
    ops_per_s: f64,
    #[serde(rename = "final")]
    last: bool,
    /// The work is to begin later.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    waiting: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    mb: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p95_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p9999_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bad_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    census: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gap_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap_kb: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    oom_kills: Option<u64>,
    /// 16 hexadecimal digits: a JSON number would lose bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
}

/// Writes the lines of one run.
#[derive(Debug)]
pub(crate) struct Reporter<W> {
    workload: &'static str,
    shared: Arc<RunState>,
    out: W,
    told_write_error: bool,
    last_t: Duration,
    last_ops: u64,
    last_latency: Snapshot,
}

impl<W: Write> Reporter<W> {
    pub(crate) fn new(workload: &'static str, shared: Arc<RunState>, out: W) -> Self {
        let last_latency = shared.latency.snapshot();
        let (told_write_error, last_t, last_ops) = (false, Duration::ZERO, 0);
        Self { workload, shared, out, told_write_error, last_t, last_ops, last_latency }
    }

    /// Reports until the worker ends, a signal comes, or `time_limit` has passed.
    pub(crate) fn run(
        &mut self,
        inbox: &Receiver<Event>,
        time_limit: Option<Duration>,
    ) -> WorkResult {
        let mut tick = PERIOD;
        let result = loop {
            let until = time_limit.map_or(tick, |limit| limit.min(tick));
            match inbox.recv_timeout(until.saturating_sub(self.shared.now())) {
                Ok(Event::Finished(result)) => break result,
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break self.end(inbox),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = self.shared.now();
            if time_limit.is_some_and(|limit| now >= limit) {
                break self.end(inbox);
            }
            if now >= tick {
                if self.write(now, false).is_err() {
                    self.shared.stop();
                    return WorkResult::ReaderGone;
                }
                // After a delay the lines go on at whole seconds; missed ones are not made up for.
                tick = Duration::from_secs(now.as_secs()) + PERIOD;
            }
        };
        if self.write(self.shared.now(), true).is_err() {
            return WorkResult::ReaderGone;
        }
        result.map_or_else(WorkResult::Failed, |()| WorkResult::Ended)
    }

    /// Stops the worker and waits a little for it. A worker that is stuck in a page fault is left
    /// behind: the process ends anyway.
    fn end(&self, inbox: &Receiver<Event>) -> Result<(), WorkError> {
        self.shared.stop();
        let deadline = self.shared.now() + GRACE;
        while let Ok(event) = inbox.recv_timeout(deadline.saturating_sub(self.shared.now())) {
            if let Event::Finished(result) = event {
                return result;
            }
        }
        Ok(())
    }

    /// Writes one line; an error means that the reader has closed its end.
    fn write(&mut self, now: Duration, last: bool) -> Result<(), io::Error> {
        let mut bytes = serde_json::to_vec(&self.line(now, last))?;
        bytes.push(b'\n');
        match self.out.write_all(&bytes).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(error),
            Err(error) if !self.told_write_error => {
                self.told_write_error = true;
                eprintln!("overbook-guest: cannot write to standard output: {error}; working on");
            }
            Ok(()) | Err(_) => {}
        }
        Ok(())
    }

    fn line(&mut self, now: Duration, last: bool) -> ReportLine {
        let shared = &self.shared;
        let (ops, latency) = (shared.ops(), shared.latency.snapshot());
        let (span, done, interval) = if last {
            (now, ops, latency.clone())
        } else {
            (now - self.last_t, ops - self.last_ops, latency.since(&self.last_latency))
        };
        let line = ReportLine {
            workload: self.workload,
            t_s: rounded(now.as_secs_f64()),
            ops,
            ops_per_s: rounded(done as f64 / span.as_secs_f64().max(1e-9)),
            last,
            waiting: shared.waiting(),
            mb: shared.mb.get(),
            phase: shared.phase.get(),
            step_us: shared.step_us.get(),
            mean_us: interval.mean_us(),
            p50_us: interval.percentile_us(5_000),
            p95_us: interval.percentile_us(9_500),
            p99_us: interval.percentile_us(9_900),
            p9999_us: interval.percentile_us(9_999),
            dropped: shared.dropped.get(),
            bad_bytes: shared.bad_bytes.get(),
            checks: shared.checks.get(),
            census: shared.census.get(),
            gap_ms: shared.gap.take_ms(now),
            swap_kb: swap::in_use_kb(),
            oom_kills: oom::kills(),
            checksum: shared.checksum.get().map(|sum| format!("{sum:016x}")),
            timing: shared.timing.get().cloned(),
        };
        (self.last_t, self.last_ops, self.last_latency) = (now, ops, latency);
        line
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests;
