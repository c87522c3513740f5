//! `sort`: sorts the lines of generated text; a batch job whose memory need is the text.
//!
//! It is a merge sort in two passes, so that progress is visible: runs of neighbouring lines are
//! sorted, then all runs are merged at once through a heap. In memory, the text stays in place
//! and only line positions are sorted. The text may be larger than the guest's memory; then both
//! passes swap. With `--file` the sort is external: the text, the runs and the result are three
//! regions of one file or disk, and memory holds one run, or one buffer per run. Each line counts
//! as one operation when its run is sorted and one when it is merged. The checksum covers the
//! lines in their final order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::PathBuf;

use clap::Args;

use crate::args::text_megabytes;
use crate::checksum::Checksum;
use crate::disk::{BlockDevice, mb_bytes};
use crate::error::WorkError;
use crate::run::Worker;
use crate::text::{self, Text};

/// Lines per run in memory (about 700 kB of text).
const RUN_LINES: usize = 16 * 1024;
/// Text per run on disk.
const RUN_BYTES: u64 = 4 << 20;
const RUN_BUFFER_BYTES: usize = 16 * 1024;
const BUFFER_BYTES: usize = 64 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the text
    #[arg(long, value_name = "N", value_parser = text_megabytes)]
    mb: usize,
    /// Sort in this file or block device of 3 N MB (which is overwritten) [default: in memory]
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
    let mut checksum = Checksum::new();
    let finished = match &options.file {
        None => {
            let text = text::in_memory(&mut Text::new(worker.seed), options.mb, &worker.shared)?;
            sort_in_memory(&text, worker, |line| checksum.add(line))
        }
        Some(path) => {
            let disk = BlockDevice::for_writing(path, 3, options.mb)?;
            sort_on_disk(&disk, options.mb, worker, &mut checksum)?
        }
    };
    if finished && !worker.shared.stopping() {
        let _ = worker.shared.checksum.set(checksum.value());
    }
    Ok(())
}

/// Hands the lines of `text` to `each` in order; false if it was stopped.
fn sort_in_memory(text: &[u8], worker: &mut Worker, mut each: impl FnMut(&[u8])) -> bool {
    let mut starts = line_starts(text);
    let line = |&start: &u32| text[start as usize..].split(|&b| b == b'\n').next().unwrap_or(&[]);
    for run in starts.chunks_mut(RUN_LINES) {
        if !worker.proceed(run.len()) {
            return false;
        }
        run.sort_unstable_by_key(line);
        worker.done(run.len());
    }
    let runs = starts.chunks(RUN_LINES).map(|run| run.iter().map(line).map(Ok));
    let merged = merge(runs.collect(), worker, |line| {
        each(line);
        Ok(())
    });
    merged.unwrap_or(false)
}

/// Positions fit 32 bits: the text is at most 4,095 MB.
fn line_starts(text: &[u8]) -> Vec<u32> {
    let mut starts = Vec::with_capacity(text.iter().filter(|&&b| b == b'\n').count());
    let mut start = 0;
    for line in text.split_inclusive(|&b| b == b'\n') {
        starts.push(start);
        start += u32::try_from(line.len()).unwrap_or(u32::MAX);
    }
    starts
}

/// Region 0 receives the text, region 1 the runs, region 2 the result; false if it was stopped.
fn sort_on_disk(
    disk: &BlockDevice,
    mb: usize,
    worker: &mut Worker,
    checksum: &mut Checksum,
) -> Result<bool, WorkError> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, disk.cursor(0));
    let mut text = Text::new(worker.seed);
    let lines = text.lines(mb, &worker.shared, |line| out.write_all(line));
    let bytes = lines.and_then(|b| out.flush().map(|()| b)).map_err(disk.failed("write"))?;

    let (text_at, runs_at, result_at) = (0, mb_bytes(mb), mb_bytes(2 * mb));
    let Some(ends) =
        write_runs(disk, text_at..bytes, runs_at, worker).map_err(disk.failed("sort"))?
    else {
        return Ok(false);
    };
    let starts = std::iter::once(&runs_at).chain(&ends);
    let runs = starts.zip(&ends).map(|(&start, &end)| {
        let run = disk.cursor(start).up_to(end - start);
        BufReader::with_capacity(RUN_BUFFER_BYTES, run).split(b'\n')
    });
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, disk.cursor(result_at));
    let merged = merge(runs.collect(), worker, |line| {
        checksum.add(line);
        out.write_all(line)?;
        out.write_all(b"\n")
    });
    merged.and_then(|finished| out.flush().map(|()| finished)).map_err(disk.failed("merge"))
}

/// Sorts the text piece by piece into consecutive runs from `at` on; returns the end of each run.
fn write_runs(
    disk: &BlockDevice,
    text: std::ops::Range<u64>,
    at: u64,
    worker: &mut Worker,
) -> std::io::Result<Option<Vec<u64>>> {
    let text_bytes = text.end - text.start;
    let mut input =
        BufReader::with_capacity(BUFFER_BYTES, disk.cursor(text.start).up_to(text_bytes));
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, disk.cursor(at));
    let (mut ends, mut end, mut piece) = (Vec::new(), at, Vec::new());
    loop {
        piece.clear();
        input.by_ref().take(RUN_BYTES).read_to_end(&mut piece)?;
        // The piece may end within a line; this reads the rest of it.
        input.read_until(b'\n', &mut piece)?;
        if piece.is_empty() {
            out.flush()?;
            return Ok(Some(ends));
        }
        let mut lines: Vec<&[u8]> = piece.split_inclusive(|&b| b == b'\n').collect();
        if !worker.proceed(lines.len()) {
            return Ok(None);
        }
        lines.sort_unstable_by_key(|line| line.trim_ascii_end());
        for line in &lines {
            out.write_all(line)?;
        }
        end += piece.len() as u64;
        ends.push(end);
        worker.done(lines.len());
    }
}

/// Merges sorted runs; false if it was stopped.
fn merge<L: AsRef<[u8]> + Ord>(
    mut runs: Vec<impl Iterator<Item = std::io::Result<L>>>,
    worker: &mut Worker,
    mut each: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<bool> {
    let mut heap = BinaryHeap::with_capacity(runs.len());
    for (number, run) in runs.iter_mut().enumerate() {
        if let Some(first) = run.next() {
            heap.push(Reverse((first?, number)));
        }
    }
    while let Some(mut least) = heap.peek_mut() {
        if !worker.proceed(1) {
            return Ok(false);
        }
        let Reverse((line, number)) = &mut *least;
        each(line.as_ref())?;
        match runs[*number].next() {
            Some(next) => *line = next?,
            None => drop(PeekMut::pop(least)),
        }
        worker.done(1);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generated(mb: usize) -> Vec<u8> {
        let worker = Worker::for_test();
        text::in_memory(&mut Text::new(1), mb, &worker.shared).unwrap()
    }

    fn sorted_by_the_library(text: &[u8]) -> Vec<&[u8]> {
        let mut lines: Vec<&[u8]> = text.trim_ascii_end().split(|&b| b == b'\n').collect();
        lines.sort_unstable();
        lines
    }

    #[test]
    fn lines_come_out_in_order_and_none_is_lost() {
        let text = generated(3);
        let mut worker = Worker::for_test();
        let mut lines = Vec::new();
        assert!(sort_in_memory(&text, &mut worker, |line| lines.push(line.to_vec())));
        let expected = sorted_by_the_library(&text);
        assert!(expected.len() > 2 * RUN_LINES, "the test must merge several runs");
        assert_eq!(lines, expected);
        assert_eq!(worker.shared.ops(), 2 * expected.len() as u64);
    }

    #[test]
    fn the_external_sort_leaves_the_sorted_text_and_the_same_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let checksum = |file| {
            let mut worker = Worker::for_test();
            run(&Options { mb: 5, file, repeat: false }, &mut worker).unwrap();
            *worker.shared.checksum.get().unwrap()
        };
        assert_eq!(checksum(None), checksum(Some(path.clone())));
        let result = std::fs::read(path).unwrap().split_off(10 << 20);
        let lines: Vec<&[u8]> = result.trim_ascii_end().split(|&b| b == b'\n').collect();
        assert!(lines == sorted_by_the_library(&generated(5)));
    }

    #[test]
    fn a_stopped_sort_has_no_checksum() {
        let mut worker = Worker::for_test();
        worker.shared.stop();
        run(&Options { mb: 1, file: None, repeat: false }, &mut worker).unwrap();
        assert_eq!(worker.shared.checksum.get(), None);
    }
}
