//! The cast: what a fake guest is made of, what it works on, and how it misbehaves.
//!
//! A [`Fake`] is a description; [`crate::Guest`] brings it to life. Natures add up: a guest may
//! have a slow balloon *and* migrate.

use std::sync::Arc;

use model::Bytes;

/// How a guest differs from a well-behaved one. Times are seconds of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nature {
    /// From then on its balloon does not move, whatever it is asked.
    StuckBalloon {
        /// The first second in which it is stuck.
        from: u64,
    },
    /// Its balloon moves a tenth as fast as others' give memory up, or slower still.
    SlowBalloon {
        /// How much it moves per second.
        per_second: Bytes,
    },
    /// Its statistics are false.
    LyingStats(Lie),
    /// From then on its statistics are not renewed: it is too busy, or its driver hangs.
    FrozenStats {
        /// The first second without an answer.
        from: u64,
    },
    /// It swaps all the time, however much memory it gets.
    SwapStorm,
    /// It dies, and comes back under the same name as another incarnation.
    VanishingVm {
        /// The second in which it dies.
        at: u64,
        /// How long it is away.
        away: u64,
    },
    /// It has no balloon driver.
    NoBalloonDriver,
    /// Memory that it has touched stays on the host whatever its balloon takes: it is locked,
    /// pinned or preallocated.
    PinnedMemory,
    /// Its QEMU is in a cgroup whose limit the kernel enforces.
    Confined {
        /// Memory that it and its guest may occupy.
        limit: Bytes,
    },
    /// It has no swap: a working set beyond its memory kills its programs.
    Swapless,
    /// Its kernel tells how many programs it has killed (Linux 6.12 does, 6.1 does not).
    CountsKills,
    /// It is being migrated for a while.
    Migrating {
        /// The first second of it.
        from: u64,
        /// The first second after it.
        until: u64,
    },
}

/// What a lying guest says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// "I use nothing and never swap": false but possible.
    Idle,
    /// "I swap all the time": false but possible.
    Hungry,
    /// More free memory than the machine has, and no counters: cannot be true.
    Impossible,
}

/// The memory that a guest's programs want, over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Load {
    /// From each second on that much. The first entry is for second 0.
    Steps(Vec<(u64, Bytes)>),
    /// `high` for the first `busy` seconds of every `period`, else `low`: oscillating demand.
    Oscillating {
        /// Between bursts.
        low: Bytes,
        /// In a burst.
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
        /// How much it takes in a second.
        per_second: Bytes,
        /// When the first one begins.
        from: u64,
        /// Seconds from burst to burst.
        period: u64,
    },
    /// One after the other, each for [`TURN`] seconds, again and again: as it was recorded.
    InTurn(Arc<[Bytes]>),
}

/// How long a burst holds what it has taken, in seconds.
const BURST_HOLDS: u64 = 5;

/// How long each part of a recording lasts, in seconds.
pub const TURN: u64 = 5;

impl Load {
    /// Always `size`.
    #[must_use]
    pub fn steady(size: Bytes) -> Self {
        Self::Steps(vec![(0, size)])
    }

    /// What the programs want in `second`.
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

/// What it is in `second`, of what is it in turn.
fn in_turn<T>(all: &[T], second: u64) -> Option<&T> {
    let turn = (second / TURN).checked_rem(all.len() as u64)?;
    all.get(usize::try_from(turn).ok()?)
}

/// One guest of a scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct Fake {
    /// Its name within its group.
    pub name: String,
    /// What QEMU was started with.
    pub ram: Bytes,
    /// What its programs want.
    pub load: Load,
    /// How much page cache it fills free memory with.
    pub cache: Bytes,
    /// Where its balloon stands at first; `None`: at `ram`.
    pub balloon: Option<Bytes>,
    /// Whether the host gets back what the guest frees (free-page reporting).
    pub reports_free: bool,
    /// Whether all of its memory was touched when it booted.
    pub preallocated: bool,
    /// How its programs go through their memory, in turn as [`Load::InTurn`]; empty: that is not
    /// tracked.
    pub accesses: Arc<[Access]>,
    /// Its misbehaviour.
    pub natures: Vec<Nature>,
}

/// How programs go through what they want: how often, and how much of it they miss with less.
#[derive(Clone, Debug, PartialEq)]
pub struct Access {
    /// References per second.
    pub references_per_s: f64,
    /// A miss-ratio curve: by shares of what the programs want, from 0 to 1, the share of
    /// references that miss.
    pub curve: Vec<(f64, f64)>,
}

impl Access {
    /// All of it evenly, by chance.
    #[must_use]
    pub fn even(references_per_s: f64) -> Self {
        Self { references_per_s, curve: vec![(0.0, 1.0), (1.0, 0.0)] }
    }

    /// One after the other, again and again: with less than all of it, LRU finds nothing.
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
    /// What every guest's kernel needs for itself.
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

    /// A guest without swap that does next to nothing, and from second `from` on once in `period`
    /// seconds takes up to `mib` MiB, `per_second` MiB a second.
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

    /// It misbehaves in this way, too.
    #[must_use]
    pub fn that(mut self, nature: Nature) -> Self {
        self.natures.push(nature);
        self
    }

    /// It is tracked, and goes through its memory like this.
    #[must_use]
    pub fn accessing(self, access: Access) -> Self {
        Self { accesses: Arc::new([access]), ..self }
    }

    /// How its programs go through their memory in `second`.
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

    /// Memory that it has touched once stays with it on the host until its balloon takes it.
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
