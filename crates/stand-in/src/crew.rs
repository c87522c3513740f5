//! What all threads share, and what each of them is.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::kvm::Kicks;
use crate::machine::Machine;
use crate::page::{Content, Owned};
use crate::ram::{Held, Slot};
use crate::rng::Rng;
use crate::watch::{Kind, Watch};

/// What all threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Guest RAM.
    pub(crate) slots: Vec<Slot>,
    /// Whose guest RAM it is; none where KVM does not run them.
    pub(crate) machines: Vec<Machine>,
    /// The threads that run their vCPUs.
    pub(crate) kicks: Kicks,
    /// The figures.
    pub(crate) watch: Watch,
    ids: AtomicU64,
    stop: AtomicBool,
}

impl Shared {
    /// RAM in these slots, `threads` to come.
    pub(crate) fn new(slots: Vec<Slot>, machines: Vec<Machine>, threads: usize) -> Self {
        let (ids, stop) = (AtomicU64::new(1), AtomicBool::new(false));
        Self { slots, machines, kicks: Kicks::new(), watch: Watch::new(threads), ids, stop }
    }

    /// Content that there never was before.
    pub(crate) fn fresh(&self) -> Content {
        Content { id: self.ids.fetch_add(1, Ordering::Relaxed), ..Content::ZERO }
    }

    /// Asks all threads to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether they are to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Compares a page with what it must hold; counts harm and puts it right. Whether there was
    /// any.
    pub(crate) fn check(
        &self,
        during: &str,
        held: &Held<'_>,
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

    /// Compares all of RAM, when nobody works on it any more.
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

/// One thread.
#[derive(Debug)]
pub(crate) struct Hand<'a> {
    /// What it shares.
    pub(crate) shared: &'a Shared,
    /// Which of the threads it is.
    pub(crate) seat: usize,
    /// Its random numbers.
    pub(crate) rng: Rng,
}

impl<'a> Hand<'a> {
    /// The RAM of a random slot, if it is plugged; larger slots come more often.
    pub(crate) fn any_ram(&mut self) -> Option<Held<'a>> {
        let slots = &self.shared.slots;
        let mut page = self.rng.below(slots.iter().map(Slot::pages).sum());
        let slot = slots.iter().find(|slot| {
            let is_here = page < slot.pages();
            page = page.saturating_sub(slot.pages());
            is_here
        });
        slot.and_then(Slot::hold)
    }

    /// A run of pages that this thread owns: up to `most` of them, anywhere; perhaps none.
    pub(crate) fn own_any(&mut self, most: usize) -> Option<Run<'a>> {
        let held = self.any_ram()?;
        let first = self.rng.below(held.range().1 / crate::page::PAGE);
        let count = 1 + self.rng.below(most);
        let pages = held.own_run(first, count);
        (!pages.is_empty()).then_some(Run { held, first, pages })
    }

    /// Does something, timed and counted.
    pub(crate) fn time<T>(&self, kind: Kind, operation: impl FnOnce() -> Option<T>) -> Option<T> {
        self.shared.watch.time(self.seat, kind, operation)
    }

    /// Goes through RAM until the end, near a place that changes now and then.
    ///
    /// # Errors
    /// Those of `step`, which gets the place, a number of any size.
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

    /// Sleeps up to `most`; false when it is time to end.
    pub(crate) fn rest(&mut self, most: Duration) -> bool {
        let micros = usize::try_from(most.as_micros()).unwrap_or(usize::MAX).max(1);
        let mut left = Duration::from_micros(self.rng.below(micros) as u64);
        // In slices, so that the end is not waited for.
        while !left.is_zero() && !self.shared.is_stopping() {
            let slice = left.min(Duration::from_millis(50));
            std::thread::sleep(slice);
            left -= slice;
        }
        !self.shared.is_stopping()
    }
}

/// How a thread goes through RAM.
pub(crate) struct Pace {
    /// Steps until it goes elsewhere.
    pub(crate) stay: usize,
    /// Steps between two short sleeps.
    pub(crate) spell: usize,
    /// The longest of these.
    pub(crate) rest: Duration,
}

/// Pages in a row that one thread owns. Dropped in this order: pages, then the RAM.
pub(crate) struct Run<'a> {
    /// The pages.
    pub(crate) pages: Vec<Owned<'a>>,
    /// The first one's number.
    pub(crate) first: usize,
    /// The RAM that they are of.
    pub(crate) held: Held<'a>,
}

impl Run<'_> {
    /// Compares all of them; whether any was harmed.
    pub(crate) fn check(&self, shared: &Shared, during: &str) -> bool {
        let mut is_harmed = false;
        for (page, owned) in (self.first..).zip(&self.pages) {
            is_harmed |= shared.check(during, &self.held, page, owned);
        }
        is_harmed
    }

    /// Writes anew what may become zeros by itself: afterwards it is known what the run holds.
    pub(crate) fn settle(&self, shared: &Shared) {
        for (page, owned) in (self.first..).zip(&self.pages) {
            if owned.content().is_freed {
                shared.check("a look at what was freed", &self.held, page, owned);
                let content = shared.fresh();
                content.fill(self.held.words(page));
                owned.set(content);
            }
        }
    }

    /// Where the first one stands, and how many bytes there are.
    pub(crate) fn range(&self) -> (*mut u8, usize) {
        (self.held.address(self.first), self.pages.len() * crate::page::PAGE)
    }
}
