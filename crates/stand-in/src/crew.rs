//! The state that all threads share, and the state of each thread.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::kvm::Kicks;
use crate::machine::Machine;
use crate::page::{Content, Owned};
use crate::ram::{HeldPages, Slot};
use crate::rng::Rng;
use crate::watch::{WorkKind, WorkWatch};

/// The state that all threads share.
#[derive(Debug)]
pub(crate) struct CrewState {
    /// Guest RAM.
    pub(crate) slots: Vec<Slot>,
    /// The machines that use this guest RAM; none where KVM does not run them.
    pub(crate) machines: Vec<Machine>,
    /// The threads that run their vCPUs.
    pub(crate) kicks: Kicks,
    /// The statistics.
    pub(crate) watch: WorkWatch,
    ids: AtomicU64,
    stop: AtomicBool,
}

impl CrewState {
    /// Shared state with RAM in these slots, for `threads` threads.
    pub(crate) fn new(slots: Vec<Slot>, machines: Vec<Machine>, threads: usize) -> Self {
        let (ids, stop) = (AtomicU64::new(1), AtomicBool::new(false));
        Self { slots, machines, kicks: Kicks::new(), watch: WorkWatch::new(threads), ids, stop }
    }

    /// Content with an id that was never used before.
    pub(crate) fn fresh(&self) -> Content {
        Content { id: self.ids.fetch_add(1, Ordering::Relaxed), ..Content::ZERO }
    }

    /// Asks all threads to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the threads are to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Compares a page with its expected content; counts wrong bytes and repairs them. Returns
    /// whether there were any.
    pub(crate) fn check(
        &self,
        during: &str,
        held: &HeldPages<'_>,
        page: usize,
        owned: &Owned<'_>,
    ) -> bool {
        let words = held.words(page);
        let harm = owned.content().compare(words);
        if let Some(harm) = &harm {
            self.watch.harm(during, page, harm);
            owned.content().fill(words);
        }
        harm.is_some()
    }

    /// Compares all of RAM after all other threads have ended.
    pub(crate) fn check_all(&self) {
        for held in self.slots.iter().filter_map(Slot::hold) {
            for page in 0..held.range().1 / crate::page::PAGE {
                match held.entry(page).own() {
                    Some(owned) => {
                        self.check("the final look", &held, page, &owned);
                    }
                    None => eprintln!("overbook-stand-in: page {page} still has an owner"),
                }
            }
        }
    }
}

/// The state of one thread.
#[derive(Debug)]
pub(crate) struct Hand<'a> {
    /// The shared state.
    pub(crate) shared: &'a CrewState,
    /// The thread's number.
    pub(crate) seat: usize,
    /// The thread's random numbers.
    pub(crate) rng: Rng,
}

impl<'a> Hand<'a> {
    /// The RAM of a random slot, if it is plugged; larger slots are chosen more often.
    pub(crate) fn any_ram(&mut self) -> Option<HeldPages<'a>> {
        let slots = &self.shared.slots;
        let mut page = self.rng.below(slots.iter().map(Slot::pages).sum());
        let slot = slots.iter().find(|slot| {
            let is_here = page < slot.pages();
            page = page.saturating_sub(slot.pages());
            is_here
        });
        slot.and_then(Slot::hold)
    }

    /// A run of pages that this thread owns: at most `most`, at a random place. `None`: none is
    /// free.
    pub(crate) fn own_any(&mut self, most: usize) -> Option<CrewRun<'a>> {
        let held = self.any_ram()?;
        let first = self.rng.below(held.range().1 / crate::page::PAGE);
        let count = 1 + self.rng.below(most);
        let pages = held.own_run(first, count);
        (!pages.is_empty()).then_some(CrewRun { held, first, pages })
    }

    /// Runs an operation, timed and counted.
    pub(crate) fn time<T>(
        &self,
        kind: WorkKind,
        operation: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        self.shared.watch.time(self.seat, kind, operation)
    }

    /// Takes steps until the end, near a place that changes now and then.
    ///
    /// # Errors
    /// Those of `step`, which gets the place, a number that may exceed the RAM's size.
    pub(crate) fn roam(
        &mut self,
        pace: &Pace,
        mut step: impl FnMut(&mut Self, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut place = 0;
        for number in 0.. {
            if number % pace.stay == 0 {
                place = self.rng.below(1 << 30);
            }
            if number % pace.spell == 0 && !self.rest(pace.rest) {
                break;
            }
            step(self, place)?;
        }
        Ok(())
    }

    /// Sleeps for a random time up to `most`; false when it is time to end.
    pub(crate) fn rest(&mut self, most: Duration) -> bool {
        let micros = usize::try_from(most.as_micros()).unwrap_or(usize::MAX).max(1);
        let mut left = Duration::from_micros(self.rng.below(micros) as u64);
        // In slices, so that the thread ends in time.
        while !left.is_zero() && !self.shared.is_stopping() {
            let slice = left.min(Duration::from_millis(50));
            std::thread::sleep(slice);
            left -= slice;
        }
        !self.shared.is_stopping()
    }
}

/// The pace at which a thread goes through RAM.
pub(crate) struct Pace {
    /// Number of steps before the place changes.
    pub(crate) stay: usize,
    /// Number of steps between two short sleeps.
    pub(crate) spell: usize,
    /// The longest short sleep.
    pub(crate) rest: Duration,
}

/// Adjacent pages that one thread owns. Fields are dropped in this order: pages, then the RAM.
pub(crate) struct CrewRun<'a> {
    /// The pages.
    pub(crate) pages: Vec<Owned<'a>>,
    /// The number of the first page.
    pub(crate) first: usize,
    /// The RAM that holds the pages.
    pub(crate) held: HeldPages<'a>,
}

impl CrewRun<'_> {
    /// Compares all pages; returns whether any was wrong.
    pub(crate) fn check(&self, shared: &CrewState, during: &str) -> bool {
        let mut is_harmed = false;
        for (page, owned) in (self.first..).zip(&self.pages) {
            is_harmed |= shared.check(during, &self.held, page, owned);
        }
        is_harmed
    }

    /// Writes new content to pages that may become zeros by themselves: afterwards the content is
    /// known.
    pub(crate) fn settle(&self, shared: &CrewState) {
        for (page, owned) in (self.first..).zip(&self.pages) {
            if owned.content().is_freed {
                shared.check("a look at what was freed", &self.held, page, owned);
                let content = shared.fresh();
                content.fill(self.held.words(page));
                owned.set(content);
            }
        }
    }

    /// The address of the first page, and the number of bytes.
    pub(crate) fn range(&self) -> (*mut u8, usize) {
        (self.held.address(self.first), self.pages.len() * crate::page::PAGE)
    }
}
