//! Reports of the workloads: JSON lines in one file per guest, stamped with their time of
//! arrival.
//!
//! **Idea.** A guest's clock stops when the guest is stopped, so the host stamps each line on
//! arrival. One thread follows all files. Lines are untrusted: a line that is too long or no JSON
//! is ignored.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

use crate::background::Background;

/// Polling interval of the files, which is the error of a time stamp.
const PERIOD: Duration = Duration::from_millis(50);
const LINE_LIMIT: usize = 16 * 1024;

/// One report of a workload.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The time at which the host saw it.
    pub arrived: Instant,
    /// The report as the workload printed it.
    pub value: Value,
}

/// The newest report of one guest. A reader that needs a history keeps it.
#[derive(Debug, Clone, Default)]
pub struct Newest(Arc<Mutex<Option<Sample>>>);

impl Newest {
    /// A copy; `None` until there is a report.
    pub fn get(&self) -> Option<Sample> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, sample: Sample) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sample);
    }
}

/// The thread that follows the files; it ends when this is dropped.
#[derive(Debug)]
pub struct Follower {
    _thread: Background<()>,
}

impl Follower {
    /// Follows each file, which need not exist yet, into its newest sample.
    pub fn start(files: Vec<(PathBuf, Newest)>) -> std::io::Result<Self> {
        let mut tails: Vec<Tail> = files.into_iter().map(|(p, s)| Tail::new(p, s)).collect();
        let thread = Background::start("metrics", move |stop| {
            while !stop.is_given() {
                tails.iter_mut().for_each(Tail::advance);
                std::thread::sleep(PERIOD);
            }
        })?;
        Ok(Self { _thread: thread })
    }
}

/// The state of reading one file.
struct Tail {
    path: PathBuf,
    file: Option<File>,
    partial: Vec<u8>,
    newest: Newest,
}

impl Tail {
    fn new(path: PathBuf, newest: Newest) -> Self {
        Self { path, file: None, partial: Vec::new(), newest }
    }

    fn advance(&mut self) {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else { return };
        let mut fresh = Vec::new();
        if file.read_to_end(&mut fresh).is_err() {
            return;
        }
        let arrived = Instant::now();
        for byte in fresh {
            if byte != b'\n' {
                // One byte above the limit marks the line as too long.
                if self.partial.len() <= LINE_LIMIT {
                    self.partial.push(byte);
                }
                continue;
            }
            if self.partial.len() <= LINE_LIMIT
                && let Ok(value) = serde_json::from_slice(&self.partial)
            {
                self.newest.set(Sample { arrived, value });
            }
            self.partial.clear();
        }
    }
}

/// The last complete report in a file and its age, for a reader that has not followed the file.
pub fn last_in(path: &Path) -> Option<(Value, Duration)> {
    let mut file = File::open(path).ok()?;
    let metadata = file.metadata().ok()?;
    let start = metadata.len().saturating_sub(2 * LINE_LIMIT as u64);
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let complete = tail.iter().rposition(|&byte| byte == b'\n')?;
    let mut lines = tail[..complete].rsplit(|&byte| byte == b'\n');
    let value = lines.find_map(|line| serde_json::from_slice(line).ok())?;
    Some((value, SystemTime::now().duration_since(metadata.modified().ok()?).unwrap_or_default()))
}

/// All complete reports in a file, in order; none when the file does not exist.
pub fn all_in(path: &Path) -> Vec<Value> {
    let text = std::fs::read(path).unwrap_or_default();
    let lines = text.split_inclusive(|&byte| byte == b'\n');
    let complete = lines.filter(|line| line.ends_with(b"\n") && line.len() <= LINE_LIMIT);
    complete.filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn tail_of(text: &[u8]) -> (Tail, tempfile::NamedTempFile) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        (Tail::new(file.path().to_owned(), Newest::default()), file)
    }

    #[test]
    fn a_line_counts_once_it_is_complete() {
        let (mut tail, mut file) = tail_of(b"{\"ops\":1}\r\n{\"ops\"");
        tail.advance();
        assert_eq!(tail.newest.get().unwrap().value["ops"], 1);
        file.write_all(b":2}\n").unwrap();
        tail.advance();
        assert_eq!(tail.newest.get().unwrap().value["ops"], 2);
    }

    #[test]
    fn garbage_and_gigantic_lines_are_left_out() {
        let long = format!("\"{}\"\nnot json\n{{\"ops\":3}}\n", "x".repeat(2 * LINE_LIMIT));
        let (mut tail, file) = tail_of(long.as_bytes());
        tail.advance();
        assert_eq!(tail.newest.get().unwrap().value["ops"], 3);
        assert_eq!(last_in(file.path()).unwrap().0["ops"], 3);
        assert_eq!(all_in(file.path()), [serde_json::json!({"ops": 3})]);
    }

    #[test]
    fn all_reports_are_read_but_the_one_that_is_being_written() {
        let (_, file) = tail_of(b"{\"ops\":1}\r\n{\"ops\":2}\n{\"ops\":3}");
        let ops: Vec<Value> = all_in(file.path()).iter().map(|line| line["ops"].clone()).collect();
        assert_eq!(ops, [1, 2]);
        assert!(all_in(Path::new("/nowhere")).is_empty());
    }
}
