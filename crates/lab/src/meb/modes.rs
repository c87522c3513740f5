//! The ways to track that Table I of the paper compares, as settings of the worker, and how long
//! each has to be looked at until it shows what it costs.
//!
//! | name | LRU stack | hot set | intermittent | looked at |
//! |-|-|-|-|-|
//! | `list` | linked list | fixed, small | no | [`STEADY`] |
//! | `dhs` | linked list | dynamic, an eighth of the VM at most | no | [`GROWING`] |
//! | `abl` | AVL tree | fixed, small | no | [`STEADY`] |
//! | `da` | AVL tree | dynamic | no | [`GROWING`] |
//! | `imt_fixed` | AVL tree | dynamic | threshold 0.20 | [`SWITCHED`] |
//! | `imt_adaptive` | AVL tree | dynamic | ours ([`Judgement::Anchored`]), rests by cost | [`RESTING`] |
//! | `budget` | none: working-set probes within 1 % of a vCPU, as shipped | | | [`CHEAP`] |
//!
//! "Rests by cost": after each stretch tracking rests for as long as that was dear
//! ([`Duty`](pages::phase::Duty)).

use overbook::worker::{HotSet, Intermittent, Lru, Mode, Settings, Structure};
use pages::phase::Judgement;

/// The least hot set that the shim takes: the paper's small one.
pub const SMALL_HOT_SET: u32 = protocol::MIN_HOT_SET;
/// The paper's fixed threshold (Table I).
pub const FIXED_THRESHOLD: f64 = 0.20;
/// What the product may take of a vCPU.
pub const BUDGET: f64 = 0.01;

/// Lines until the first one that is wholly of what has just changed.
pub const CHANGE: usize = 1;

/// How long a way is looked at, in lines of the guest: one a second. Windows without tracking and
/// windows with it alternate; the former lie around each of the latter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Windows with tracking, which begins anew in each.
    pub pairs: usize,
    /// Lines after the beginning of tracking that do not count.
    pub beginning: usize,
    /// Lines of a window with.
    pub with: usize,
    /// Lines of a window without.
    pub without: usize,
}

/// The same from the first moment on, and so dear (fifty times slower) that a few lines tell.
pub const STEADY: Schedule = Schedule { pairs: 1, beginning: CHANGE, with: 2, without: 2 };
/// A hot set that begins with 64 granules: up to ten seconds until the working set is known, and
/// six more, a fifth each, from a twelfth of it to an eighth of the VM.
pub const GROWING: Schedule = Schedule { pairs: 1, beginning: 16, with: 3, without: 4 };
/// Learns for some seconds, then switches every few.
pub const SWITCHED: Schedule = Schedule { pairs: 1, beginning: 10, with: 60, without: 8 };
/// Learns and begins to rest; then one cycle of at most 123 lines, and some to spare.
pub const RESTING: Schedule = Schedule { pairs: 1, beginning: 70, with: 130, without: 8 };
/// One percent. The beginning is for learning what a trap costs and for finding what is idle:
/// revoking it is dear, and done once.
pub const CHEAP: Schedule = Schedule { pairs: 3, beginning: 15, with: 20, without: 10 };

impl Schedule {
    /// How many lines it takes, which is as many seconds.
    #[must_use]
    pub const fn lines(&self) -> usize {
        self.pairs * (self.beginning + self.with + CHANGE + self.without)
    }
}

/// What tells how dear a way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instrument {
    /// The guest's speed: noise of several percent, and nothing left out.
    Speed,
    /// Time that can be counted ([`taken`](super::taken)): for ways that are off most of the time
    /// or cost a percent.
    Clock,
}

/// One way to track.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Way {
    /// Its name in figures.
    pub name: &'static str,
    /// Table I's mean overhead of it; `None`: not in the paper.
    pub paper: Option<&'static str>,
    /// How the worker does it.
    pub settings: Settings,
    /// How long it is looked at.
    pub schedule: Schedule,
    /// What tells its cost.
    pub instrument: Instrument,
}

/// All of them, in the paper's order of falling cost. Those without a budget track granules of
/// `granule_pages`.
#[must_use]
pub fn all(granule_pages: u32) -> Vec<Way> {
    let (small, dynamic) = (HotSet::Fixed(SMALL_HOT_SET), HotSet::Dynamic);
    let way = |name, paper, structure, hot_set, intermittent, schedule| {
        let lru = Lru { structure, hot_set, intermittent, sample: 1.0 };
        let settings =
            Settings { granule_pages: Some(granule_pages), ..Settings::new(Mode::Lru(lru)) };
        Way { name, paper: Some(paper), settings, schedule, instrument: Instrument::Speed }
    };
    let by_the_clock = |way: Way| Way { instrument: Instrument::Clock, ..way };
    let off = Intermittent::Off;
    let fixed = Intermittent::On(Judgement::Fixed(FIXED_THRESHOLD));
    let adaptive = Intermittent::On(Judgement::Anchored);
    vec![
        way("list", "7.58", Structure::List, small, off, STEADY),
        way("dhs", "1.39", Structure::List, dynamic, off, GROWING),
        way("abl", "0.80", Structure::Avl, small, off, STEADY),
        way("da", "0.32", Structure::Avl, dynamic, off, GROWING),
        by_the_clock(way("imt_fixed", "0.09", Structure::Avl, dynamic, fixed, SWITCHED)),
        by_the_clock(way("imt_adaptive", "0.02", Structure::Avl, dynamic, adaptive, RESTING)),
        Way {
            name: "budget",
            paper: None,
            settings: shipped(),
            schedule: CHEAP,
            instrument: Instrument::Clock,
        },
    ]
}

/// What the product does.
#[must_use]
pub fn shipped() -> Settings {
    Settings::new(Mode::Probes { budget: BUDGET })
}

/// The paper's best way, never switched off: what intermittent tracking is judged against.
#[must_use]
pub fn always_on() -> Settings {
    let (structure, hot_set) = (Structure::Bitmap, HotSet::Dynamic);
    Settings::new(Mode::Lru(Lru {
        structure,
        hot_set,
        intermittent: Intermittent::Watched,
        sample: 1.0,
    }))
}
