//! The choice of the granules to revoke, and the evaluation of their touches: the part of
//! tracking in which the product and the experiments differ.
//!
//! A strategy is pure: time, touches and costs are arguments. Granules are numbered without gaps.

use std::fmt;
use std::time::Duration;

use model::tracking::{CurvePoint, MOST_CURVE_POINTS, TrackingCost};
use model::{Bytes, Reading, Time, Tracking};
use pages::curve::MissRatioCurve;

use super::clock::boot;
use super::cost::TrackingUse;

/// The result of a strategy. Sizes are in granules.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Estimate {
    /// The working set; `None`: no size that was seen is enough.
    pub(super) working_set: Option<f64>,
    /// The miss-ratio curve.
    pub(super) curve: MissRatioCurve,
    /// References per second.
    pub(super) references_per_s: f64,
    /// The moment that the estimate describes.
    pub(super) at: Time,
}

impl Estimate {
    /// Converts the estimate to a reading of a VM whose granules stand for `bytes_each` bytes
    /// each. The guest's swap is not included.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "sizes are positive and a VM's; a granule has at most 2 MiB"
    )]
    pub(super) fn reading(
        self,
        bytes_each: f64,
        granule: Bytes,
        seen_through: Option<Bytes>,
        cost: TrackingCost,
    ) -> Reading<Tracking> {
        let bytes = |granules: f64| Bytes((granules * bytes_each) as u64);
        let curve = self.curve.resampled(MOST_CURVE_POINTS);
        let point = |point: &pages::curve::Point| CurvePoint {
            memory: bytes(point.size),
            miss_ratio: point.ratio,
        };
        let tracking = Tracking {
            working_set: self.working_set.map(bytes),
            swapped: Bytes::ZERO,
            curve: curve.points().iter().map(point).collect(),
            references_per_s: self.references_per_s,
            granule,
            seen_through,
            cost,
        };
        Reading::new(tracking, boot(self.at))
    }
}

/// A way of tracking.
pub(super) trait Strategy: fmt::Debug + Send {
    /// The parameters for the shim; they may change over time. `None`: the VM is not tracked.
    fn tracking(&self) -> Option<protocol::Tracking>;

    /// The granules to revoke now.
    fn revoke(&mut self, now: Time) -> Vec<u32>;

    /// The granule, which was requested to be revoked at `at`, is revoked.
    fn revoked(&mut self, granule: u32, at: Time);

    /// The granule was touched and is accessible again.
    fn touched(&mut self, granule: u32, at: Time);

    /// The tracked granules, each with the tenths of a second since its last touch; `None`: it
    /// may be in use.
    fn ages(&mut self, _now: Time) -> Vec<(u32, Option<u32>)> {
        Vec::new()
    }

    /// The granule is accessible again, and it is unknown whether the guest has touched it.
    fn called_back(&mut self, granule: u32, at: Time) {
        self.touched(granule, at);
    }

    /// The granule, which was requested to be revoked at `at`, cannot be: all of its pages are
    /// shared, or given up by the guest.
    fn cannot_be_revoked(&mut self, _granule: u32, _at: Time, _is_given_up: bool) {}

    /// Some touches were lost; `is_revoked` tells which granules are revoked now.
    fn resync(&mut self, now: Time, is_revoked: &mut dyn FnMut(u32) -> bool);

    /// No granule is revoked any more; they were not touched.
    fn given_back(&mut self, now: Time);

    /// The cost of one trap to the VM, and the cost of tracking it since the last call.
    fn observe(&mut self, now: Time, trap_ns: u64, taken: TrackingUse);

    /// Before this strategy, tracking took this share of a vCPU's time for `_length`.
    fn begin_after(&mut self, _share: f64, _length: Duration) {}

    /// Whether all granules are tracked now, or only watched for a change (intermittent
    /// tracking).
    fn is_following(&self) -> bool {
        true
    }

    /// The event that intermittent tracking watches, as of the last interval.
    fn event(&self) -> Option<f64> {
        None
    }

    /// The present estimate.
    fn estimate(&self, now: Time) -> Option<Estimate>;
}

/// Tracks nothing: the VM's pages are only merged.
#[derive(Debug)]
pub(super) struct Untracked;

impl Strategy for Untracked {
    fn tracking(&self) -> Option<protocol::Tracking> {
        None
    }

    fn revoke(&mut self, _: Time) -> Vec<u32> {
        Vec::new()
    }

    fn revoked(&mut self, _: u32, _: Time) {}

    fn touched(&mut self, _: u32, _: Time) {}

    fn resync(&mut self, _: Time, _: &mut dyn FnMut(u32) -> bool) {}

    fn given_back(&mut self, _: Time) {}

    fn observe(&mut self, _: Time, _: u64, _: TrackingUse) {}

    fn is_following(&self) -> bool {
        false
    }

    fn estimate(&self, _: Time) -> Option<Estimate> {
        None
    }
}
