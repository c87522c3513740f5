//! How a VM is to be tracked: the one way that the product uses, and the paper's ways, which
//! experiments compare it with.

use model::Time;
use pages::budget::DEFAULT_SHARE;
use pages::phase::Judgement;

use super::granules::Granules;
use super::lru::LruStrategy;
use super::probes::ProbeStrategy;
use super::strategy::{Strategy, Untracked};

/// How to track a VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The way.
    pub mode: Mode,
    /// Pages of 4 KiB in a granule, a power of two up to 512; `None`: 32, and 512 above 2 GiB.
    pub granule_pages: Option<u32>,
    /// What random choices begin with.
    pub seed: u64,
}

impl Settings {
    /// This way, with the usual granules.
    #[must_use]
    pub const fn new(mode: Mode) -> Self {
        Self { mode, granule_pages: None, seed: 1 }
    }

    /// Probes of this number of granules, of which at most `most` are tracked; the paper's ways
    /// need the shim.
    pub(super) fn probes(&self, granules: u32, most: u32, now: Time) -> ProbeStrategy {
        let budget = match self.mode {
            Mode::Probes { budget } => budget,
            Mode::Lru(_) | Mode::Untracked => DEFAULT_SHARE,
        };
        ProbeStrategy::of(budget, granules, most, self.seed, now)
    }

    pub(super) fn strategy(&self, granules: &Granules, now: Time) -> Box<dyn Strategy> {
        match &self.mode {
            Mode::Probes { budget } => {
                Box::new(ProbeStrategy::new(*budget, granules, self.seed, now))
            }
            Mode::Lru(lru) => Box::new(LruStrategy::new(lru, granules, now)),
            Mode::Untracked => Box::new(Untracked),
        }
    }
}

/// A way to track.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Granules chosen at random are revoked at a rate that a budget allows, and the time to their
    /// next touch is measured. What the product does.
    Probes {
        /// Share of one vCPU's time that the traps may take.
        budget: f64,
    },
    /// The paper's.
    Lru(Lru),
    /// Not at all: for VMs whose pages are only merged.
    Untracked,
}

/// The paper's way (MEB §3): an LRU stack of what leaves a hot set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lru {
    /// What finds distances.
    pub structure: Structure,
    /// What is not trapped.
    pub hot_set: HotSet,
    /// Share of the granules that is looked at (SHARDS); 1: all.
    pub sample: f64,
    /// Whether tracking rests while nothing changes.
    pub intermittent: Intermittent,
}

/// What finds the distance of a granule in the LRU stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// A linked list: O(n).
    List,
    /// A balanced tree: O(log n).
    Avl,
    /// A bitmap over time with counts above it.
    Bitmap,
}

/// The granules that may be touched without a trap, in the order of their last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HotSet {
    /// So many, at least 64.
    Fixed(u32),
    /// As many as the guest's locality asks for, an eighth of all at most, adjusted in each
    /// [`INTERVAL`](super::INTERVAL).
    Dynamic,
}

/// Whether tracking rests while the guest stays in a phase (MEB §3.5). Intervals last
/// [`INTERVAL`](super::INTERVAL); the event is how many of a fixed few granules are touched in one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Intermittent {
    /// Never.
    Off,
    /// Never, but the event is measured.
    Watched,
    /// Yes, judged so; with [`Judgement::Anchored`] the rests are as long as tracking was dear, too
    /// ([`Duty`](pages::phase::Duty)).
    On(Judgement),
}
