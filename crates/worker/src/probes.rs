//! The tracking of the product: working-set probes within a budget (`pages::probe`).

use std::time::Duration;

use model::{Millis, Time};
use pages::budget::Governor;
use pages::probe::{Reading, Tracker};
use protocol::Tracking;

use super::cost::TrackingUse;
use super::granules::Granules;
use super::strategy::{Estimate, Strategy};

/// How often the budget gets the cost of a trap. It moves by a tenth each time, so a machine that
/// has become ten times slower is recognized within five seconds.
const OBSERVE_EVERY: Millis = Millis(200);

/// Probes of one VM.
#[derive(Debug)]
pub(super) struct ProbeStrategy {
    tracker: Tracker,
    tracking: Tracking,
    observed: Time,
}

impl ProbeStrategy {
    /// Probes of these granules that cost at most `budget`, a share of one vCPU.
    pub(super) fn new(budget: f64, granules: &Granules, seed: u64, now: Time) -> Self {
        let most = protocol::most_revoked(granules.granule_pages());
        let tracker = Tracker::new(granules.count(), most, Governor::new(budget), seed, now);
        let tracking = Tracking {
            granule_pages: granules.granule_pages(),
            hot_set: None,
            sample: u32::MAX,
            // Set once: it is generous, and a change would cost a request.
            max_traps_per_s: tracker.fuse(),
        };
        Self { tracker, tracking, observed: now }
    }

    /// The same for single pages, without a shim.
    pub(super) fn of(budget: f64, pages: u32, most: u32, seed: u64, now: Time) -> Self {
        let tracker = Tracker::new(pages, most, Governor::new(budget), seed, now);
        let max_traps_per_s = tracker.fuse();
        let tracking =
            Tracking { granule_pages: 1, hot_set: None, sample: u32::MAX, max_traps_per_s };
        Self { tracker, tracking, observed: now }
    }
}

impl Strategy for ProbeStrategy {
    fn tracking(&self) -> Option<Tracking> {
        Some(self.tracking)
    }

    fn revoke(&mut self, now: Time) -> Vec<u32> {
        self.tracker.tick(now).to_vec()
    }

    fn revoked(&mut self, granule: u32, at: Time) {
        self.tracker.revoked(granule, at);
    }

    fn touched(&mut self, granule: u32, at: Time) {
        self.tracker.touched(granule, at);
    }

    fn ages(&mut self, now: Time) -> Vec<(u32, Option<u32>)> {
        self.tracker.ages(now)
    }

    fn called_back(&mut self, granule: u32, at: Time) {
        self.tracker.called_back(granule, at);
    }

    fn resync(&mut self, now: Time, is_revoked: &mut dyn FnMut(u32) -> bool) {
        self.tracker.resync(now, is_revoked);
    }

    fn given_back(&mut self, now: Time) {
        self.tracker.given_back(now);
    }

    fn cannot_be_revoked(&mut self, granule: u32, at: Time, is_given_up: bool) {
        self.tracker.cannot_be_revoked(granule, at, is_given_up);
    }

    fn observe(&mut self, now: Time, trap_ns: u64, taken: TrackingUse) {
        self.tracker.governor_mut().spent(taken.cpu_ns);
        self.tracker.governor_mut().measured(taken.held_ns);
        if now >= self.observed.after(OBSERVE_EVERY) {
            self.observed = now;
            self.tracker.governor_mut().observe_trap_ns(trap_ns);
        }
    }

    fn begin_after(&mut self, share: f64, length: Duration) {
        let length = Millis(u64::try_from(length.as_millis()).unwrap_or(u64::MAX));
        self.tracker.governor_mut().begin_after(share, length);
    }

    fn estimate(&self, _now: Time) -> Option<Estimate> {
        let Reading { working_set, curve, references_per_s, at, .. } = self.tracker.reading()?;
        Some(Estimate { working_set: Some(working_set), curve, references_per_s, at })
    }
}
