//! Whether to look for the next request instead of sleeping until it comes.
//!
//! Problem: to wake a thread on a CPU that has gone idle can take tens of microseconds, many times
//! what a request for a page takes. Who has one request under way at a time pays for that each
//! time. To look for the request until it comes saves the waking; but where the client waits for
//! this very CPU, it makes all of it slower. Nobody tells which it is. Idea: try it. Now and then
//! some waits go by the other way, and whichever was shorter stays.
//!
//! Who looks does so for [`LOOKS`] at most, and then sleeps. Its task yields each time: the runtime
//! looks at all its sockets, and whoever else has something to do does it. Where requests are rare,
//! or come many at once and so share the cost of one waking, nobody looks and nothing is tried.

use std::time::{Duration, Instant};

/// How long to look before sleeping.
const LOOKS: Duration = Duration::from_micros(50);
/// Waits longer than this say nothing of how long the waking takes: there was nothing to do.
const SOON: Duration = Duration::from_micros(200);
/// More requests at once than these share the cost of a waking: QEMU has no more under way.
const FEW: usize = 16;
/// A trial lasts for so many waits.
const TRIAL: u32 = 32;
/// So many waits lie between trials, at first; twice as many after each that changed nothing.
const FIRST_REST: u32 = 64;
const LAST_REST: u32 = 1 << 15;

/// What is known of the waits of one connection.
#[derive(Debug)]
pub(super) struct Patience {
    /// Since when nothing has come.
    since: Option<Instant>,
    /// Requests that came since the wait before.
    answered: usize,
    /// Waits go by looking first.
    looks: bool,
    is_trial: bool,
    /// Until the next trial begins, or this one ends.
    left: u32,
    rest: u32,
    /// What waits take by sleeping and by looking, in nanoseconds.
    usual: [u32; 2],
}

impl Default for Patience {
    fn default() -> Self {
        let (left, rest) = (FIRST_REST, FIRST_REST);
        Self { since: None, answered: 0, looks: false, is_trial: false, left, rest, usual: [0; 2] }
    }
}

impl Patience {
    /// A request has come.
    pub(super) fn came(&mut self) {
        let Some(since) = self.since.take() else {
            self.answered += 1;
            return;
        };
        let were_few = std::mem::replace(&mut self.answered, 1) <= FEW;
        if were_few {
            self.learn(since.elapsed());
        }
    }

    /// Nothing has come: whether to look again soon, or to sleep.
    pub(super) fn look_again(&mut self) -> bool {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        self.looks && self.answered <= FEW && waited < LOOKS
    }

    fn learn(&mut self, waited: Duration) {
        if waited > SOON {
            if self.looks {
                self.settle(false);
            }
            return;
        }
        let waited = u32::try_from(waited.as_nanos()).unwrap_or(u32::MAX);
        let usual = &mut self.usual[usize::from(self.looks)];
        // What it was before a trial counts for little at its end.
        *usual = *usual - *usual / 8 + waited / 8;
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return;
        }
        if !self.is_trial {
            (self.looks, self.is_trial, self.left) = (!self.looks, true, TRIAL);
            return;
        }
        // To look costs CPU time: it has to be worth it.
        let [sleeping, looking] = self.usual;
        self.settle(looking < sleeping - sleeping / 4);
    }

    /// From now on waits go by looking, or do not, until the next trial.
    fn settle(&mut self, looks: bool) {
        let before = self.looks != self.is_trial;
        self.rest = if looks == before { (self.rest * 2).min(LAST_REST) } else { FIRST_REST };
        (self.looks, self.is_trial, self.left) = (looks, false, self.rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it looks within so many waits, each of which takes `us` microseconds.
    fn looks(patience: &mut Patience, waits: u32, us: impl Fn(bool) -> u64) -> u32 {
        (0..waits).fold(0, |looks, _| {
            patience.learn(Duration::from_micros(us(patience.looks)));
            looks + u32::from(patience.looks)
        })
    }

    #[test]
    fn it_looks_where_that_is_shorter() {
        let mut patience = Patience::default();
        looks(&mut patience, 200, |looks| if looks { 20 } else { 90 });
        let looked = looks(&mut patience, 10_000, |looks| if looks { 20 } else { 90 });
        assert!(looked > 9_000, "{looked}");
    }

    #[test]
    fn it_sleeps_where_looking_keeps_the_client_waiting() {
        let mut patience = Patience::default();
        let looked = looks(&mut patience, 100_000, |looks| if looks { 60 } else { 10 });
        assert!(looked < 500, "{looked}");
    }

    #[test]
    fn it_keeps_trying_where_some_waits_are_long() {
        let mut patience = Patience::default();
        let noisy = |looks, number: u64| match number % 100 {
            0 => 1_000,
            _ if looks => 20,
            _ => 90,
        };
        let mut number = 0;
        let looked = (0..100).map(|_| {
            number += 1;
            looks(&mut patience, 100, |looks| noisy(looks, number))
        });
        assert!(looked.sum::<u32>() > 5_000);
    }

    #[test]
    fn it_changes_its_mind() {
        let mut patience = Patience::default();
        looks(&mut patience, 1_000, |looks| if looks { 20 } else { 90 });
        let looked = looks(&mut patience, 10_000, |looks| if looks { 60 } else { 10 });
        assert!(looked < 2_000, "{looked}");
    }

    #[test]
    fn it_sleeps_where_requests_are_rare() {
        let mut patience = Patience::default();
        assert_eq!(looks(&mut patience, 10_000, |_| 1_000), 0);
        looks(&mut patience, 200, |looks| if looks { 20 } else { 90 });
        assert!(patience.looks);
        assert_eq!(looks(&mut patience, 10_000, |_| 1_000), 0);
    }
}
