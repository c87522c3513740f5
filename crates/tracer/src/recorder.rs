//! Pages touched in the current tick, in order of first touch. The hot path.
//!
//! Idea: each page has the number of the tick in which it was last touched. An access to a page
//! already touched in this tick costs two loads and no write, so vCPUs do not disturb each other.
//! The first access in a tick claims the page by a swap and takes the next place in the tick's
//! list.
//!
//! Two lists alternate. A vCPU may be interrupted between its swap and its push; it then has half
//! a tick before the list is read. If it needs longer, its page is reported two ticks later. Each
//! list has a place for every page, so it is never full while each page comes once per tick. A
//! late page that exceeds the list is left out.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// The value of an empty place, which no page has as its number.
const EMPTY: u32 = u32::MAX;

/// The pages of one tick.
#[derive(Debug)]
struct List {
    length: AtomicUsize,
    places: Box<[AtomicU32]>,
}

impl List {
    fn new(pages: usize) -> Self {
        let places = (0..pages).map(|_| AtomicU32::new(EMPTY)).collect();
        Self { length: AtomicUsize::new(0), places }
    }
}

/// The state shared by all vCPUs and the writer.
#[derive(Debug)]
pub(crate) struct Recorder {
    tick: AtomicU32,
    last_touched: Box<[AtomicU32]>,
    lists: [List; 2],
}

impl Recorder {
    /// For a guest of `pages` pages; the first tick has number 1.
    pub(crate) fn new(pages: usize) -> Self {
        let last_touched = (0..pages).map(|_| AtomicU32::new(0)).collect();
        Self { tick: AtomicU32::new(1), last_touched, lists: [List::new(pages), List::new(pages)] }
    }

    /// Whether the page was recorded in this tick already.
    #[inline]
    pub(crate) fn knows(&self, page: usize) -> bool {
        let tick = self.tick.load(Ordering::Relaxed);
        self.last_touched.get(page).is_none_or(|last| last.load(Ordering::Relaxed) == tick)
    }

    /// Records a touch, once per tick.
    pub(crate) fn touch(&self, page: usize) {
        let tick = self.tick.load(Ordering::Relaxed);
        let Some(last) = self.last_touched.get(page) else { return };
        if last.swap(tick, Ordering::Relaxed) == tick {
            return;
        }
        let list = &self.lists[tick as usize % 2];
        let place = list.length.fetch_add(1, Ordering::Relaxed);
        if let (Some(place), Ok(page)) = (list.places.get(place), u32::try_from(page)) {
            place.store(page, Ordering::Release);
        }
    }

    /// Ends the tick; returns its number, for [`Recorder::take`].
    pub(crate) fn advance(&self) -> u32 {
        self.tick.fetch_add(1, Ordering::Relaxed)
    }

    /// Moves the pages touched in the ended tick to `pages`. To be called half a tick after its
    /// end.
    pub(crate) fn take(&self, tick: u32, pages: &mut Vec<u32>) {
        let list = &self.lists[tick as usize % 2];
        let length = list.length.swap(0, Ordering::Relaxed).min(list.places.len());
        let taken = list.places[..length].iter().map(|p| p.swap(EMPTY, Ordering::Acquire));
        pages.extend(taken.filter(|&page| page != EMPTY));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(recorder: &Recorder, tick: u32) -> Vec<u32> {
        let mut pages = Vec::new();
        recorder.take(tick, &mut pages);
        pages
    }

    #[test]
    fn a_page_counts_once_per_tick_in_order_of_first_touch() {
        let recorder = Recorder::new(10);
        [7, 3, 7, 9, 3].into_iter().for_each(|page| recorder.touch(page));
        assert!(recorder.knows(9) && !recorder.knows(1));
        let first = recorder.advance();
        [3, 1].into_iter().for_each(|page| recorder.touch(page));
        assert_eq!(taken(&recorder, first), [7, 3, 9]);
        let second = recorder.advance();
        assert_eq!(taken(&recorder, second), [3, 1]);
        assert_eq!(taken(&recorder, second), []);
    }

    #[test]
    fn what_is_no_page_is_known_and_never_recorded() {
        let recorder = Recorder::new(2);
        assert!(recorder.knows(2));
        recorder.touch(2);
        let tick = recorder.advance();
        assert_eq!(taken(&recorder, tick), []);
    }

    #[test]
    fn threads_together_record_each_page_once() {
        const PAGES: usize = 5000;
        let recorder = Recorder::new(PAGES);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..PAGES).for_each(|page| recorder.touch(page)));
            }
        });
        let tick = recorder.advance();
        let mut pages = taken(&recorder, tick);
        pages.sort_unstable();
        assert!(pages.iter().copied().eq(0..5000));
    }
}
