//! Decides whether to poll for the next request instead of sleeping until it comes.
//!
//! Problem: waking a thread on an idle CPU can take tens of microseconds, many times as long as a
//! request for a page. A client that has one request in flight at a time pays for that with each
//! request. Polling for the request saves the wake-up; but if the client waits for this very CPU,
//! polling delays everything. No interface tells which case it is. Idea: measure both. Now and
//! then some waits use the other method, and the faster one stays.
//!
//! A wait polls for at most [`LOOKS`], and then sleeps. The task yields each time, so the runtime
//! checks its sockets and runs other tasks. If requests are rare, or many come at once and share
//! the cost of one wake-up, no wait polls and no trial is made.

use std::time::{Duration, Instant};

/// How long to poll before sleeping.
const LOOKS: Duration = Duration::from_micros(50);
/// Longer waits tell nothing about wake-ups: there was nothing to do.
const SOON: Duration = Duration::from_micros(200);
/// More requests at once than these share the cost of a wake-up: QEMU has no more in flight.
const FEW: usize = 16;
/// Number of waits in a trial.
const TRIAL: u32 = 32;
/// Number of waits between trials, at first; it doubles after each trial that changed nothing.
const FIRST_REST: u32 = 64;
const LAST_REST: u32 = 1 << 15;

/// Measurements of one connection's waits.
#[derive(Debug)]
pub(super) struct Patience {
    /// Time since which no request has come.
    since: Option<Instant>,
    /// Requests that came since the last wait.
    answered: usize,
    /// Whether waits poll first.
    looks: bool,
    is_trial: bool,
    /// Waits until the next trial begins, or this one ends.
    left: u32,
    rest: u32,
    /// Average length of waits with sleeping and with polling, in nanoseconds.
    usual: [u32; 2],
}

impl Default for Patience {
    fn default() -> Self {
        let (left, rest) = (FIRST_REST, FIRST_REST);
        Self { since: None, answered: 0, looks: false, is_trial: false, left, rest, usual: [0; 2] }
    }
}

impl Patience {
    /// Notes that a request has come.
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

    /// Whether to poll again soon or to sleep, now that no request has come.
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
        // The value from before a trial has little weight at the end of the trial.
        *usual = *usual - *usual / 8 + waited / 8;
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return;
        }
        if !self.is_trial {
            (self.looks, self.is_trial, self.left) = (!self.looks, true, TRIAL);
            return;
        }
        // Polling costs CPU time, so it must be clearly faster.
        let [sleeping, looking] = self.usual;
        self.settle(looking < sleeping - sleeping / 4);
    }

    /// Sets whether waits poll until the next trial.
    fn settle(&mut self, looks: bool) {
        let before = self.looks != self.is_trial;
        self.rest = if looks == before { (self.rest * 2).min(LAST_REST) } else { FIRST_REST };
        (self.looks, self.is_trial, self.left) = (looks, false, self.rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `waits` waits poll, if each takes `us` microseconds.
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
