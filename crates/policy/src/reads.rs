//! What VMs read from their swap disks, and how long they wait for that.
//!
//! A disk answers so many requests per second and so many bytes per second. Who goes through memory
//! in order needs few requests, for each brings many pages; who jumps about needs one for each
//! page. Either may be all that the disk has to give, which no counter says: so it is the most that
//! any VM of the group was seen to get of late.

use model::Bytes;
use serde::{Deserialize, Serialize};

use crate::tuning;

/// Per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reads {
    /// Major faults: requests.
    pub(crate) faults: f64,
    pub(crate) bytes: f64,
}

impl Reads {
    /// What every disk answers.
    pub(crate) const LEAST: Self = Self {
        faults: tuning::DISK_LEAST,
        bytes: tuning::DISK_LEAST * tuning::READ_AHEAD.0 as f64,
    };

    /// Takes in those of the latest second.
    pub(crate) fn note(&mut self, faults: f64, swapped_in: Bytes) {
        let share = tuning::FAULTS_SHARE;
        let mean = |before: f64, latest: f64| (1.0 - share) * before + share * latest;
        let faults = mean(self.faults, faults.min(tuning::FAULTS_MAX));
        let swapped_in = swapped_in.min(tuning::SWAP_PER_SECOND_MAX);
        *self = if faults < tuning::FAULTS_LEAST {
            Self::default()
        } else {
            Self { faults, bytes: mean(self.bytes, swapped_in.0 as f64) }
        };
    }

    /// The part of it that is so much.
    pub(crate) fn scaled(self, factor: f64) -> Self {
        Self { faults: self.faults * factor, bytes: self.bytes * factor }
    }

    /// The more of each.
    pub(crate) fn max(self, other: Self) -> Self {
        Self { faults: self.faults.max(other.faults), bytes: self.bytes.max(other.bytes) }
    }

    /// What a disk answers that was known for this: the most that anybody had of it of late. While
    /// nobody asks for all that it has, nothing shows that it became slower.
    pub(crate) fn of_a_disk(self, reads: impl Iterator<Item = Self>, is_asked: bool) -> Self {
        let kept = if is_asked { tuning::DISK_FORGOTTEN } else { 1.0 };
        reads.fold(self.scaled(kept).max(Self::LEAST), Self::max)
    }

    /// The share of its time in which a VM with these reads waits for a disk that answers `disk`.
    /// Above [`tuning::DISK_SHARED`] it rises faster, up to all of its time at
    /// [`tuning::DISK_FULL`].
    pub(crate) fn wait_for(self, disk: Self) -> f64 {
        const SHARED: f64 = tuning::DISK_SHARED;
        const STEEPER: f64 = (1.0 - SHARED) / (tuning::DISK_FULL - SHARED);
        let disk = disk.max(Self::LEAST);
        let share = (self.faults / disk.faults).max(self.bytes / disk.bytes);
        share.max(SHARED + (share - SHARED) * STEEPER).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Reads = Reads { faults: 1_000.0, bytes: 32e6 };

    #[test]
    fn who_has_half_of_what_a_disk_answers_waits_all_the_time() {
        let of = |faults| Reads { faults, bytes: 0.0 }.wait_for(DISK);
        let of = [0.0, 100.0, 250.0, 375.0, 500.0, 5_000.0].map(of);
        assert_eq!(of, [0.0, 0.1, 0.25, 0.625, 1.0, 1.0]);
    }

    #[test]
    fn few_requests_may_fill_a_disk_too() {
        assert_eq!(Reads { faults: 10.0, bytes: 16e6 }.wait_for(DISK), 1.0);
        assert!((Reads { faults: 10.0, bytes: 3.2e6 }.wait_for(DISK) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_disk_of_which_nothing_is_known_answers_some() {
        let few = Reads { faults: tuning::DISK_LEAST / 10.0, bytes: 0.0 };
        assert!((few.wait_for(Reads::default()) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_disk_that_became_slower_is_found_out_while_somebody_asks_for_all_of_it() {
        let of = |is_asked, faults| {
            let reads = [Reads { faults, bytes: 0.0 }];
            (0..1_000).fold(DISK, |disk, _| disk.of_a_disk(reads.into_iter(), is_asked)).faults
        };
        assert_eq!([of(false, 300.0), of(false, 2_000.0)], [1_000.0, 2_000.0]);
        assert_eq!([of(true, 300.0), of(true, 0.0)], [300.0, Reads::LEAST.faults]);
    }

    #[test]
    fn what_was_read_is_forgotten_in_some_seconds() {
        let mut reads = Reads::default();
        (0..20).for_each(|_| reads.note(100.0, Bytes(1_000_000)));
        assert!((reads.faults - 100.0).abs() < 2.0 && (reads.bytes - 1e6).abs() < 2e4);
        (0..60).for_each(|_| reads.note(0.0, Bytes::ZERO));
        assert_eq!(reads, Reads::default());
    }
}
