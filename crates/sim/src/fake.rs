//! Fake guests: their parts, their loads, and their misbehaviour.
//!
//! A [`Fake`] is a description; [`crate::Guest`] runs it. Natures add up: a guest may have a slow
//! balloon *and* migrate.

use std::sync::Arc;

use model::Bytes;

/// How a guest differs from a well-behaved one. Times are seconds of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nature {
    /// From a given second on its balloon does not move, for any target.
    StuckBalloon {
        /// The first second in which it is stuck.
        from: u64,
    },
    /// Its balloon moves slowly, in both directions.
    SlowBalloon {
        /// The most that it moves per second.
        per_second: Bytes,
    },
    /// Its statistics are false.
    LyingStats(Lie),
    /// From a given second on its statistics are not renewed: it is too busy, or its driver hangs.
    FrozenStats {
        /// The first second without an answer.
        from: u64,
    },
    /// It swaps all the time, however much memory it gets.
    SwapStorm,
    /// It dies, and returns under the same name as another incarnation.
    VanishingVm {
        /// The second in which it dies.
        at: u64,
        /// Seconds until it returns.
        away: u64,
    },
    /// It has no balloon driver.
    NoBalloonDriver,
    /// Memory that it has touched stays on the host even when its balloon takes it: the memory is
    /// locked, pinned or preallocated.
    PinnedMemory,
    /// Its QEMU is in a cgroup whose limit the kernel enforces.
    Confined {
        /// Memory that it and its guest may occupy.
        limit: Bytes,
    },
    /// It has no swap: a working set beyond its memory kills its programs.
    Swapless,
    /// Its kernel reports the number of programs that it has killed (Linux 6.12 does, 6.1 does
    /// not).
    CountsKills,
    /// It is being migrated for a while.
    Migrating {
        /// The first second of the migration.
        from: u64,
        /// The first second after it.
        until: u64,
    },
}

/// The claim of a lying guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// "I use nothing and never swap": false but possible.
    Idle,
    /// "I swap all the time": false but possible.
    Hungry,
    /// More free memory than the machine has, and no swap counters: cannot be true.
    Impossible,
}

/// The memory that a guest's programs want, over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Load {
    /// A size from each given second on. The first entry is for second 0.
    Steps(Vec<(u64, Bytes)>),
    /// `high` for the first `busy` seconds of every `period`, else `low`: oscillating demand.
    Oscillating {
        /// Size between bursts.
        low: Bytes,
        /// Size in a burst.
        high: Bytes,
        /// Seconds from burst to burst.
        period: u64,
        /// Seconds that a burst lasts.
        busy: u64,
    },
    /// Once in a period a program takes memory at a pace, holds it for a moment, and ends.
    Bursts {
        /// Memory in use between bursts.
        low: Bytes,
        /// Memory in use at the peak of a burst.
        high: Bytes,
        /// Memory that it takes in a second.
        per_second: Bytes,
        /// The second in which the first burst begins.
        from: u64,
        /// Seconds from burst to burst.
        period: u64,
    },
    /// The sizes of a recording, each for [`TURN`] seconds, over and over.
    InTurn(Arc<[Bytes]>),
}

/// Seconds for which a burst holds its memory at the peak.
const BURST_HOLDS: u64 = 5;

/// Length of each part of a recording, in seconds.
pub const TURN: u64 = 5;

impl Load {
    /// Always `size`.
    #[must_use]
    pub fn steady(size: Bytes) -> Self {
        Self::Steps(vec![(0, size)])
    }

    /// Memory that the programs want in `second`.
    #[must_use]
    pub fn at(&self, second: u64) -> Bytes {
        match self {
            Self::Steps(steps) => steps
                .iter()
                .rev()
                .find(|(from, _)| *from <= second)
                .map_or(Bytes::ZERO, |(_, size)| *size),
            Self::Oscillating { low, high, period, busy } => {
                if second % period < *busy {
                    *high
                } else {
                    *low
                }
            }
            Self::Bursts { low, high, per_second, from, period } => {
                let Some(since) = second.checked_sub(*from) else { return *low };
                let rises = high.minus(*low).0.div_ceil(per_second.0.max(1));
                let into = since % period;
                if into < rises + BURST_HOLDS {
                    low.plus(Bytes(per_second.0.saturating_mul(into + 1))).min(*high)
                } else {
                    *low
                }
            }
            Self::InTurn(sizes) => in_turn(sizes, second).copied().unwrap_or_default(),
        }
    }
}

/// The element of `all` whose turn it is in `second`.
fn in_turn<T>(all: &[T], second: u64) -> Option<&T> {
    let turn = (second / TURN).checked_rem(all.len() as u64)?;
    all.get(usize::try_from(turn).ok()?)
}

/// One guest of a scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct Fake {
    /// Its name within its group.
    pub name: String,
    /// The RAM that QEMU was started with.
    pub ram: Bytes,
    /// Memory that its programs want.
    pub load: Load,
    /// The most page cache with which it fills free memory.
    pub cache: Bytes,
    /// Memory that its balloon leaves it at first; `None`: all of `ram`.
    pub balloon: Option<Bytes>,
    /// Whether the host gets back the memory that the guest frees (free-page reporting).
    pub reports_free: bool,
    /// Whether all of its memory was touched when it booted.
    pub preallocated: bool,
    /// The access patterns of its programs, in turn as in [`Load::InTurn`]. An empty list means
    /// that the guest is not tracked.
    pub accesses: Arc<[Access]>,
    /// Its misbehaviour.
    pub natures: Vec<Nature>,
}

/// The access pattern of programs: the rate of references, and the misses with less memory than
/// the programs want.
#[derive(Clone, Debug, PartialEq)]
pub struct Access {
    /// References per second.
    pub references_per_s: f64,
    /// A miss-ratio curve. Each point has a share of the memory that the programs want, from 0 to
    /// 1, and the share of references that miss with it.
    pub curve: Vec<(f64, f64)>,
}

impl Access {
    /// References to random places, spread evenly over all the memory.
    #[must_use]
    pub fn even(references_per_s: f64) -> Self {
        Self { references_per_s, curve: vec![(0.0, 1.0), (1.0, 0.0)] }
    }

    /// References that go through all the memory in order, over and over. With less than 97 % of
    /// it, LRU never hits.
    #[must_use]
    pub fn cyclic(references_per_s: f64) -> Self {
        Self { references_per_s, curve: vec![(0.0, 1.0), (0.97, 1.0), (1.0, 0.0)] }
    }

    /// The share of references that miss with this share of what the programs want.
    #[must_use]
    pub fn miss_ratio(&self, share: f64) -> f64 {
        let after = self.curve.partition_point(|point| point.0 <= share);
        match (self.curve.get(after.wrapping_sub(1)), self.curve.get(after)) {
            (Some(before), Some(after)) => {
                before.1 + (after.1 - before.1) * (share - before.0) / (after.0 - before.0)
            }
            (Some((_, ratio)), None) | (None, Some((_, ratio))) => *ratio,
            (None, None) => 0.0,
        }
    }
}

impl Fake {
    /// Memory that every guest's kernel needs for itself.
    pub const KERNEL: Bytes = Bytes::mib(30);

    /// A well-behaved guest with 384 MiB of RAM that works on `load`.
    pub fn new(name: impl Into<String>, load: Load) -> Self {
        Self {
            name: name.into(),
            ram: Bytes::mib(384),
            load,
            cache: Bytes::ZERO,
            balloon: None,
            reports_free: true,
            preallocated: false,
            accesses: Arc::new([]),
            natures: Vec::new(),
        }
    }

    /// A guest that does almost nothing.
    pub fn idle(name: impl Into<String>) -> Self {
        Self::new(name, Load::steady(Bytes::mib(30)))
    }

    /// A guest that always works on `mib` MiB.
    pub fn busy(name: impl Into<String>, mib: u64) -> Self {
        Self::new(name, Load::steady(Bytes::mib(mib)))
    }

    /// A guest without swap that is almost idle. From second `from` on, once in `period` seconds,
    /// it takes up to `mib` MiB at `per_second` MiB a second.
    pub fn bursting(
        name: impl Into<String>,
        mib: u64,
        per_second: u64,
        from: u64,
        period: u64,
    ) -> Self {
        let [low, high, per_second] = [20, mib, per_second].map(Bytes::mib);
        let bursts = Load::Bursts { low, high, per_second, from, period };
        Self::new(name, bursts).that(Nature::Swapless)
    }

    /// Its programs want `mib` MiB from `second` on.
    #[must_use]
    pub fn then(mut self, second: u64, mib: u64) -> Self {
        if let Load::Steps(steps) = &mut self.load {
            steps.push((second, Bytes::mib(mib)));
        }
        self
    }

    /// It also misbehaves in this way.
    #[must_use]
    pub fn that(mut self, nature: Nature) -> Self {
        self.natures.push(nature);
        self
    }

    /// It is tracked, and has this access pattern.
    #[must_use]
    pub fn accessing(self, access: Access) -> Self {
        Self { accesses: Arc::new([access]), ..self }
    }

    /// The access pattern of its programs in `second`.
    #[must_use]
    pub fn access(&self, second: u64) -> Option<&Access> {
        in_turn(&self.accesses, second)
    }

    /// It was started with `mib` MiB of RAM.
    #[must_use]
    pub const fn with_ram(mut self, mib: u64) -> Self {
        self.ram = Bytes::mib(mib);
        self
    }

    /// Its balloon leaves it `mib` MiB when the run begins.
    #[must_use]
    pub const fn standing_at(mut self, mib: u64) -> Self {
        self.balloon = Some(Bytes::mib(mib));
        self
    }

    /// It keeps up to `mib` MiB of page cache where it has room.
    #[must_use]
    pub const fn caching(mut self, mib: u64) -> Self {
        self.cache = Bytes::mib(mib);
        self
    }

    /// Memory that it has touched stays resident on the host until its balloon takes it.
    #[must_use]
    pub const fn hoarding(mut self) -> Self {
        self.reports_free = false;
        self
    }

    /// It hoards, and has touched all of its memory at boot.
    #[must_use]
    pub const fn preallocated(mut self) -> Self {
        self.preallocated = true;
        self.hoarding()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_changes_at_its_steps_and_oscillates_by_its_period() {
        let load = Fake::busy("a", 10).then(5, 90).load;
        assert_eq!([4, 5, 60].map(|s| load.at(s)), [10, 90, 90].map(Bytes::mib));
        let (low, high) = (Bytes::mib(1), Bytes::mib(9));
        let load = Load::Oscillating { low, high, period: 10, busy: 3 };
        assert_eq!([0, 2, 3, 9, 10].map(|s| load.at(s)), [high, high, low, low, high]);
        let per_second = Bytes::mib(4);
        let load = Load::Bursts { low, high, per_second, from: 2, period: 20 };
        let at = [1, 2, 3, 8, 9, 22].map(|s| load.at(s));
        assert_eq!(at, [1, 5, 9, 9, 1, 5].map(Bytes::mib));
        let load = Load::InTurn([low, high].into());
        assert_eq!([0, 4, 5, 9, 10].map(|s| load.at(s)), [low, low, high, high, low]);
    }
}
