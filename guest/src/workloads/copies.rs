//! `copies`: memory of which a part is the same in every guest that runs it, a part is only this
//! guest's, and a part is zero. So the saving of a host that keeps identical pages once is known
//! in advance. `--interleaved` is the layout in which sharing is most expensive: every second
//! page is the same, and no two of these are neighbours.
//!
//! Then it reads random words, and writes to its own part only. Each operation is timed, so an
//! access that waits shows in the percentiles. `mb` is the memory that is filled.

use clap::Args;

use crate::args::megabytes;
use crate::content;
use crate::error::WorkError;
use crate::memory::{PAGE, PAGES_PER_MB, WORDS_PER_MB, WorkMemory, fill_random};
use crate::run::Worker;

/// One operation of this many writes.
const READS_PER_WRITE: usize = 8;
const WORDS_PER_PAGE: usize = WORDS_PER_MB / PAGES_PER_MB;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Memory that is the same in all guests
    #[arg(long, value_name = "N", value_parser = megabytes)]
    same_mb: usize,
    /// Memory that no other guest has, if --seed is its own
    #[arg(long, value_name = "N", value_parser = megabytes)]
    own_mb: usize,
    /// Memory that is written and zero
    #[arg(long, value_name = "N", value_parser = megabytes)]
    zero_mb: Option<usize>,
    /// Alternate pages that are the same in all guests with pages of this guest's own
    #[arg(long)]
    interleaved: bool,
    /// Touch nothing any more when all is filled
    #[arg(long)]
    rest: bool,
}

/// Content of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyContent {
    Same,
    Own,
    Zeros,
}

impl Options {
    fn content(&self, page: usize) -> CopyContent {
        let (same, own) = (self.same_mb * PAGES_PER_MB, self.own_mb * PAGES_PER_MB);
        let is_same = match page {
            _ if page >= same + own => return CopyContent::Zeros,
            // The surplus of the larger kind comes at the end.
            _ if !self.interleaved => page < same,
            _ if page >= 2 * same.min(own) => same > own,
            _ => page.is_multiple_of(2),
        };
        if is_same { CopyContent::Same } else { CopyContent::Own }
    }

    /// The place of the guest's own page of this number.
    fn own_page(&self, number: usize) -> usize {
        if self.interleaved && number < self.same_mb * PAGES_PER_MB {
            2 * number + 1
        } else {
            self.same_mb * PAGES_PER_MB + number
        }
    }
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut memory = WorkMemory::default();
    let (mut common, mut own) = (content::common(), content::own(worker.seed));
    let zero_mb = options.zero_mb.unwrap_or(0);
    let all_mb = options.same_mb + options.own_mb + zero_mb;
    for mb in 0..all_mb {
        if worker.shared.stopping() {
            return Ok(());
        }
        let chunk = memory.grow()?;
        for (number, page) in chunk.chunks_exact_mut(PAGE).enumerate() {
            match options.content(mb * PAGES_PER_MB + number) {
                CopyContent::Same => fill_random(page, &mut common),
                CopyContent::Own => fill_random(page, &mut own),
                // Other content comes first: a kernel may map its zero page under memory that is
                // only zeroed.
                CopyContent::Zeros => {
                    page.fill(1);
                    page.fill(0);
                }
            }
        }
        worker.shared.mb.set(memory.len_mb());
    }
    while worker.proceed(1) {
        if options.rest {
            worker.shared.sleep_until(std::time::Duration::MAX);
            continue;
        }
        let began = worker.shared.now();
        if own.below(READS_PER_WRITE) == 0 {
            let word = own.below(options.own_mb * WORDS_PER_MB);
            let page = options.own_page(word / WORDS_PER_PAGE);
            let word = page * WORDS_PER_PAGE + word % WORDS_PER_PAGE;
            let value = own.next_u64();
            memory.set(word, value);
        } else {
            std::hint::black_box(memory.get(own.below(memory.words())));
        }
        worker.shared.latency.record(worker.shared.now().saturating_sub(began));
        worker.done(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(same_mb: usize, own_mb: usize, zero_mb: usize, interleaved: bool) -> Options {
        Options { same_mb, own_mb, zero_mb: Some(zero_mb), interleaved, rest: false }
    }

    #[test]
    fn what_a_page_holds_and_where_own_pages_lie_agree() {
        for interleaved in [false, true] {
            for (same, own) in [(1, 1), (2, 1), (1, 2), (0, 1)] {
                let options = options(same, own, 1, interleaved);
                let pages = (0..(same + own + 1) * PAGES_PER_MB).map(|page| options.content(page));
                let contents: Vec<CopyContent> = pages.collect();
                let all = |content| (0..).zip(&contents).filter(move |(_, is)| **is == content);
                assert_eq!(all(CopyContent::Same).count(), same * PAGES_PER_MB);
                assert_eq!(all(CopyContent::Zeros).count(), PAGES_PER_MB);
                let own_pages: Vec<usize> = all(CopyContent::Own).map(|(page, _)| page).collect();
                let said = (0..own * PAGES_PER_MB).map(|number| options.own_page(number));
                assert_eq!(own_pages, said.collect::<Vec<_>>(), "{options:?}");
            }
        }
        assert_eq!([0, 1, 2].map(|page| options(1, 1, 0, true).content(page)), {
            [CopyContent::Same, CopyContent::Own, CopyContent::Same]
        });
    }

    #[test]
    fn it_fills_and_then_reads_and_writes() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.ops() < 1000 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        run(&options(2, 1, 1, false), &mut worker).unwrap();
        stopper.join().unwrap();
        assert_eq!(worker.shared.mb.get(), Some(4));
        assert!(worker.shared.latency.snapshot().percentile_us(9_999).is_some());
    }
}
