//! `probe`: measures what a guest can learn from the duration of its writes.
//!
//! **Idea.** It holds pages that every guest with `copies` holds as well, and an equal number
//! that no other guest has. When a host that keeps identical pages once has had time to merge
//! them, it writes a word to each page, in random order, and times each write. The first write to
//! a merged page makes the host copy it, and so takes longer.
//!
//! **Statistic.** Single writes differ by far more than a copy takes: vCPUs are interrupted,
//! translations missed. A robust statistic is the chance that of two pages, one of each kind, the
//! one that others hold is written slower (Mann and Whitney 1947). It is 0.5 when timing reveals
//! nothing, and 1 when it reveals every page.

use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::args::{megabytes, seconds};
use crate::content;
use crate::error::WorkError;
use crate::memory::{PAGES_PER_MB, WORDS_PER_MB, WorkMemory, fill_random};
use crate::run::Worker;

const WORDS_PER_PAGE: usize = WORDS_PER_MB / PAGES_PER_MB;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Memory to hold of either kind
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Time to wait when all is filled
    #[arg(long, value_name = "S", value_parser = seconds)]
    after: f64,
}

/// Result of the timed writes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Timing {
    /// The median write to a page that others hold, in nanoseconds.
    same_ns: u64,
    /// The median write to a page of its own.
    own_ns: u64,
    /// The share of all pairs of the two kinds in which the page that others hold was written
    /// slower.
    same_slower: f64,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut memory = WorkMemory::default();
    let (mut common, mut own) = (content::common(), content::own(worker.seed));
    // The kinds alternate, so that each lies next to the other anywhere.
    for _ in 0..options.mb {
        for content in [&mut common, &mut own] {
            if worker.shared.stopping() {
                return Ok(());
            }
            fill_random(memory.grow()?, content);
        }
        worker.shared.mb.set(memory.len_mb());
    }
    let mut pages: Vec<usize> = (0..memory.pages()).collect();
    for place in (1..pages.len()).rev() {
        pages.swap(place, own.below(place + 1));
    }
    let begin = worker.shared.now() + Duration::from_secs_f64(options.after);
    if !worker.shared.sleep_until(begin) {
        return Ok(());
    }
    let mut took = Vec::with_capacity(pages.len());
    for page in pages {
        let (word, value) = (page * WORDS_PER_PAGE, own.next_u64());
        let began = Instant::now();
        memory.set(word, value);
        let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        took.push((ns, (page / PAGES_PER_MB).is_multiple_of(2)));
        worker.done(1);
    }
    // No other thread sets it.
    let _ = worker.shared.timing.set(Timing::of(took));
    while worker.shared.sleep_until(Duration::MAX) {}
    Ok(())
}

impl Timing {
    /// From writes: nanoseconds, and whether others hold the page.
    fn of(mut writes: Vec<(u64, bool)>) -> Self {
        writes.sort_unstable();
        let median = |kind| {
            let ns: Vec<u64> = writes.iter().filter(|w| w.1 == kind).map(|w| w.0).collect();
            ns.get(ns.len() / 2).copied().unwrap_or(0)
        };
        // Wins count twice, so that a tie counts half.
        let (mut own_before, mut same_count, mut wins) = (0, 0, 0);
        for equal in writes.chunk_by(|a, b| a.0 == b.0) {
            let same = equal.iter().filter(|write| write.1).count();
            let own = equal.len() - same;
            wins += same * (2 * own_before + own);
            own_before += own;
            same_count += same;
        }
        let same_slower = wins as f64 / (2 * own_before * same_count) as f64;
        Self { same_ns: median(true), own_ns: median(false), same_slower }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same_slower(same: &[u64], own: &[u64]) -> f64 {
        let same = same.iter().map(|ns| (*ns, true));
        Timing::of(same.chain(own.iter().map(|ns| (*ns, false))).collect()).same_slower
    }

    #[test]
    fn the_statistic_is_that_of_all_pairs() {
        for (same, own, expected) in [
            (&[5, 6, 7][..], &[1, 2][..], 1.0),
            (&[1, 2], &[5, 6, 7], 0.0),
            (&[1, 4], &[2, 3], 0.5),
            (&[3, 3], &[3, 3], 0.5),
            (&[2, 9], &[2, 3], 0.625),
        ] {
            assert!((same_slower(same, own) - expected).abs() < 1e-9, "{same:?} {own:?}");
        }
    }

    #[test]
    fn every_page_of_both_kinds_is_written_once_and_timed() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.timing.get().is_none() {
                std::thread::yield_now();
            }
            shared.stop();
        });
        run(&Options { mb: 2, after: 0.0 }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert_eq!(worker.shared.ops(), 4 * PAGES_PER_MB as u64);
        assert!((0.0..=1.0).contains(&worker.shared.timing.get().unwrap().same_slower));
    }
}
