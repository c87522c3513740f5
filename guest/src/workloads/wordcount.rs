//! `wordcount`: counts the occurrences of each word in generated text; a batch job that reads
//! once and keeps a table.
//!
//! In memory, the whole text is built first and then read (it may be larger than the guest's
//! memory). With `--file` it is written to a disk and read back through the page cache. The
//! checksum covers the table in alphabetical order.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::PathBuf;

use clap::Args;

use crate::args::text_megabytes;
use crate::checksum::Checksum;
use crate::disk::BlockDevice;
use crate::error::WorkError;
use crate::run::Worker;
use crate::text::{self, Text};

const BUFFER_BYTES: usize = 64 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the text
    #[arg(long, value_name = "N", value_parser = text_megabytes)]
    mb: usize,
    /// Keep the text in this file or block device (which is overwritten) [default: in memory]
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Do it all again when done
    #[arg(long)]
    repeat: bool,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    run_once(options, worker)?;
    while options.repeat && !worker.shared.stopping() {
        run_once(options, worker)?;
    }
    Ok(())
}

fn run_once(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    worker.shared.mb.set(options.mb);
    let mut text = Text::new(worker.seed);
    let mut table = WordTable::default();
    let counted = match &options.file {
        None => {
            let text = text::in_memory(&mut text, options.mb, &worker.shared)?;
            text.split(|&byte| byte == b'\n').all(|line| table.count(line, worker))
        }
        Some(path) => {
            let disk = BlockDevice::for_writing(path, 1, options.mb)?;
            let mut out = BufWriter::with_capacity(BUFFER_BYTES, disk.cursor(0));
            let lines = text.lines(options.mb, &worker.shared, |line| out.write_all(line));
            let bytes =
                lines.and_then(|b| out.flush().map(|()| b)).map_err(disk.failed("write"))?;
            let input = BufReader::with_capacity(BUFFER_BYTES, disk.cursor(0).up_to(bytes));
            table.count_all(input, worker).map_err(disk.failed("read"))?
        }
    };
    if counted && !worker.shared.stopping() {
        let _ = worker.shared.checksum.set(table.checksum());
    }
    Ok(())
}

#[derive(Debug, Default)]
struct WordTable {
    counts: HashMap<Box<[u8]>, u64>,
}

impl WordTable {
    fn count_all(&mut self, mut input: impl BufRead, worker: &mut Worker) -> std::io::Result<bool> {
        let mut line = Vec::new();
        while input.read_until(b'\n', &mut line)? > 0 {
            if !self.count(line.trim_ascii_end(), worker) {
                return Ok(false);
            }
            line.clear();
        }
        Ok(true)
    }

    /// Counts the words of one line; false if the program is to stop.
    fn count(&mut self, line: &[u8], worker: &mut Worker) -> bool {
        for word in line.split(|&byte| byte == b' ').filter(|word| !word.is_empty()) {
            if !worker.proceed(1) {
                return false;
            }
            match self.counts.get_mut(word) {
                Some(count) => *count += 1,
                None => drop(self.counts.insert(word.into(), 1)),
            }
            worker.done(1);
        }
        true
    }

    fn checksum(&self) -> u64 {
        let mut rows: Vec<_> = self.counts.iter().collect();
        rows.sort_unstable();
        let mut sum = Checksum::new();
        for (word, count) in rows {
            sum.add(word);
            sum.add(&count.to_le_bytes());
        }
        sum.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_exactly() {
        let mut worker = Worker::for_test();
        let mut table = WordTable::default();
        table.count_all(&b"a b a\nb a\n\nc"[..], &mut worker).unwrap();
        let count = |word: &[u8]| table.counts[word];
        assert_eq!((count(b"a"), count(b"b"), count(b"c")), (3, 2, 1));
        assert_eq!(worker.shared.ops(), 6);
    }

    #[test]
    fn memory_and_file_give_the_same_result() {
        let dir = tempfile::tempdir().unwrap();
        let result = |file| {
            let mut worker = Worker::for_test();
            run(&Options { mb: 1, file, repeat: false }, &mut worker).unwrap();
            (worker.shared.ops(), *worker.shared.checksum.get().unwrap())
        };
        let in_memory = result(None);
        assert_eq!(in_memory, result(Some(dir.path().join("text"))));
        assert!(in_memory.0 > 100_000);
    }

    #[test]
    fn repeated_it_works_until_the_stop() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let once = {
            let mut worker = Worker::for_test();
            run(&Options { mb: 1, file: None, repeat: false }, &mut worker).unwrap();
            worker.shared.ops()
        };
        let stopper = std::thread::spawn(move || {
            while shared.ops() < once + 10 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        run(&Options { mb: 1, file: None, repeat: true }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.checksum.get().is_some());
    }
}
