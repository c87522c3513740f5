use std::sync::mpsc;
use std::thread;

use serde_json::Value;

use super::*;
use crate::run::Worker;

fn lines(out: &[u8]) -> Vec<Value> {
    out.split(|&b| b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect()
}

struct Failing(io::ErrorKind, usize);

impl Write for Failing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        self.1 += 1;
        Err(self.0.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn lines_come_every_second_while_the_worker_is_stuck() {
    let shared = Arc::new(RunState::new());
    let (events, inbox) = mpsc::channel();
    let mut reporter = Reporter::new("test", Arc::clone(&shared), Vec::new());
    let limit = Some(Duration::from_millis(2900));
    // No message ever comes on the channel: the worker is in a page fault that does not end.
    let outcome = reporter.run(&inbox, limit);
    drop(events);
    assert!(matches!(outcome, WorkResult::Ended));
    let lines = lines(&reporter.out);
    let times: Vec<f64> = lines.iter().map(|l| l["t_s"].as_f64().unwrap()).collect();
    assert_eq!(lines.len(), 3, "{times:?}");
    assert!((1.0..2.0).contains(&times[0]) && (2.0..3.0).contains(&times[1]), "{times:?}");
    assert_eq!(lines[1]["final"], false);
    assert_eq!(lines[2]["final"], true);
}

#[test]
fn a_line_covers_its_second_and_the_final_one_the_run() {
    let shared = Arc::new(RunState::new());
    let worker = Worker::new(Arc::clone(&shared), 1, None);
    let mut reporter = Reporter::new("test", shared, Vec::new());
    let mut report = |t_s, ops, latency_us, last| {
        worker.done(ops);
        worker.shared.latency.record(Duration::from_micros(latency_us));
        serde_json::to_value(reporter.line(Duration::from_secs(t_s), last)).unwrap()
    };
    let first = report(1, 100, 10, false);
    let second = report(2, 300, 20, false);
    let last = report(4, 0, 20, true);
    assert_eq!((&first["ops_per_s"], &first["p50_us"]), (&100.0.into(), &10.into()));
    assert_eq!((&second["ops_per_s"], &second["p50_us"]), (&300.0.into(), &20.into()));
    assert_eq!((&last["ops"], &last["ops_per_s"]), (&400.into(), &100.0.into()));
}

#[test]
fn fields_without_meaning_are_absent() {
    let mut reporter = Reporter::new("test", Arc::new(RunState::new()), Vec::new());
    let line = serde_json::to_value(reporter.line(Duration::from_secs(1), false)).unwrap();
    // On a machine with swap the guest's own is reported, too.
    let names = line
        .as_object()
        .unwrap()
        .keys()
        .filter(|name| !["swap_kb", "oom_kills"].contains(&name.as_str()));
    let names: Vec<&String> = names.collect();
    assert_eq!(names.len(), 5, "{names:?}");
}

#[test]
fn a_closed_output_ends_the_run() {
    let out = Failing(io::ErrorKind::BrokenPipe, 0);
    let mut reporter = Reporter::new("test", Arc::new(RunState::new()), out);
    let (_events, inbox) = mpsc::channel();
    let outcome = reporter.run(&inbox, Some(Duration::from_secs(30)));
    assert!(matches!(outcome, WorkResult::ReaderGone));
    assert!(reporter.shared.now() < Duration::from_secs(30));
}

#[test]
fn other_write_errors_leave_the_work_running() {
    let out = Failing(io::ErrorKind::StorageFull, 0);
    let shared = Arc::new(RunState::new());
    let mut reporter = Reporter::new("test", shared, out);
    let (events, inbox) = mpsc::channel();
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(2500));
        events.send(Event::Finished(Ok(())))
    });
    assert!(matches!(reporter.run(&inbox, None), WorkResult::Ended));
    assert!(reporter.out.1 >= 2, "it tries the next line");
}

#[test]
fn a_signal_ends_the_run_with_a_final_line_and_the_workers_error() {
    let (events, inbox) = mpsc::channel();
    events.send(Event::Stop).unwrap();
    events.send(Event::Finished(Err(WorkError::Panicked))).unwrap();
    let mut reporter = Reporter::new("test", Arc::new(RunState::new()), Vec::new());
    assert!(matches!(reporter.run(&inbox, None), WorkResult::Failed(WorkError::Panicked)));
    assert!(reporter.shared.stopping());
    assert_eq!(lines(&reporter.out).len(), 1);
}
