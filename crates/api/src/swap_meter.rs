//! A VM's swap traffic, as a rate between two reports of the guest's statistics.
//!
//! The guest counts, and reports at times of its own choosing. So a rate divides by the time
//! between two reports, not by the daemon's period. Between reports the last rate stays, until it
//! is too old to count. (The policy has its own meter, which also judges whether counters can be
//! believed.)

use model::{Bytes, Reading, Time, VmView};
use policy::tuning::STALE_AFTER;

/// Computes a rate from the guest's swap counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct SwapMeter {
    incarnation: u64,
    counted: Option<Reading<Bytes>>,
    rate: Option<Bytes>,
}

impl SwapMeter {
    /// Bytes per second between the last two reports. `None` before there are two reports of the
    /// same incarnation, after the counters ran backwards, and while the guest reports nothing.
    pub fn rate(&mut self, view: &VmView, now: Time) -> Option<Bytes> {
        let counted = view.stats.and_then(|stats| {
            let (into, out) = (stats.value.swap_in?, stats.value.swap_out?);
            Some(Reading::new(into.plus(out), stats.at))
        });
        let Some(new) = counted else {
            *self = Self::default();
            return None;
        };
        let old = self.counted.filter(|_| self.incarnation == view.incarnation);
        self.rate = match old {
            Some(old) if old.at == new.at => self.rate,
            Some(old) if old.at < new.at && old.value <= new.value => {
                let elapsed_ms = new.at.since(old.at).0;
                Some(new.value.minus(old.value).share(1000, elapsed_ms))
            }
            _ => None,
        };
        self.incarnation = view.incarnation;
        self.counted = Some(new);
        self.rate.filter(|_| new.age(now) <= STALE_AFTER)
    }
}
