//! The ways to track a VM: that of the product, and those of the paper, for experiments that
//! compare them.

use model::Time;
use pages::budget::DEFAULT_SHARE;
use pages::phase::Judgement;

use super::granules::Granules;
use super::lru::LruStrategy;
use super::probes::ProbeStrategy;
use super::strategy::{Strategy, Untracked};

/// The parameters of tracking a VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The way of tracking.
    pub mode: Mode,
    /// Pages of 4 KiB in a granule, a power of two up to 512; `None`: 32, and 512 above 2 GiB.
    pub granule_pages: Option<u32>,
    /// The seed of random choices.
    pub seed: u64,
}

impl Settings {
    /// The settings of this way, with the default granules.
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
    /// Granules chosen at random are revoked at a rate that a budget allows, and the time to
    /// their next touch is measured. The product uses this.
    Probes {
        /// Share of one vCPU's time that tracking may take, for traps and for its own work.
        budget: f64,
    },
    /// The way of the paper.
    Lru(Lru),
    /// No tracking: for VMs whose pages are only merged.
    Untracked,
}

/// The paper's way (MEB §3): an LRU stack of the granules that leave a hot set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lru {
    /// The structure that finds distances.
    pub structure: Structure,
    /// The granules that do not trap.
    pub hot_set: HotSet,
    /// The share of the granules that is tracked (SHARDS); 1: all.
    pub sample: f64,
    /// Whether tracking pauses while nothing changes.
    pub intermittent: Intermittent,
}

/// The structure that finds the distance of a granule in the LRU stack.
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
    /// This number, at least 64.
    Fixed(u32),
    /// A number that follows the guest's locality, at most an eighth of all, adjusted in each
    /// [`INTERVAL`](super::INTERVAL).
    Dynamic,
}

/// Whether tracking pauses while the guest stays in a phase (MEB §3.5). An interval lasts
/// [`INTERVAL`](super::INTERVAL); its event is the number of touched granules among a fixed few.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Intermittent {
    /// Never.
    Off,
    /// Never, but the event is measured.
    Watched,
    /// It pauses by this judgement; with [`Judgement::Anchored`] each rest is also in proportion
    /// to the cost of tracking ([`Duty`](pages::phase::Duty)).
    On(Judgement),
}
