//! The ways of tracking that Table I of the paper compares, as settings of the worker. Each has
//! the observation time that it needs to show its cost.
//!
//! | name | LRU stack | hot set | intermittent | observed for |
//! |-|-|-|-|-|
//! | `list` | linked list | fixed, small | no | [`STEADY`] |
//! | `dhs` | linked list | dynamic, an eighth of the VM at most | no | [`GROWING`] |
//! | `abl` | AVL tree | fixed, small | no | [`STEADY`] |
//! | `da` | AVL tree | dynamic | no | [`GROWING`] |
//! | `imt_fixed` | AVL tree | dynamic | threshold 0.20 | [`SWITCHED`] |
//! | `imt_adaptive` | AVL tree | dynamic | ours ([`Judgement::Anchored`]), rests by cost | [`RESTING`] |
//! | `budget` | none: working-set probes within 1 % of a vCPU, as shipped | | | [`CHEAP`] |
//!
//! "Rests by cost": after each stretch, tracking rests for a time in proportion to the stretch's
//! cost ([`Duty`](pages::phase::Duty)).

use pages::phase::Judgement;
use worker::{HotSet, Intermittent, Lru, Mode, Settings, Structure};

/// The smallest hot set that the shim accepts: the paper's small one.
pub const SMALL_HOT_SET: u32 = protocol::MIN_HOT_SET;
/// The paper's fixed threshold (Table I).
pub const FIXED_THRESHOLD: f64 = 0.20;
/// The share of a vCPU that the product may take.
pub const BUDGET: f64 = 0.01;

/// Lines until the first one that lies entirely after a change.
pub const CHANGE: usize = 1;

/// Observation time of a way, in lines of the guest: one a second. Windows without tracking and
/// windows with it alternate; each of the latter lies between two of the former.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Windows with tracking, which starts afresh in each.
    pub pairs: usize,
    /// Lines after the start of tracking that do not count.
    pub beginning: usize,
    /// Lines of a window with tracking.
    pub with: usize,
    /// Lines of a window without tracking.
    pub without: usize,
}

/// For ways that cost the same from the first moment on. Their cost is so high (fifty times
/// slower) that a few lines suffice.
pub const STEADY: Schedule = Schedule { pairs: 1, beginning: CHANGE, with: 2, without: 2 };
/// For a hot set that begins with 64 granules. The working set is known after up to ten seconds.
/// The hot set is then a twelfth of it, and grows by a fifth a second, in six more seconds, to an
/// eighth of the VM.
pub const GROWING: Schedule = Schedule { pairs: 1, beginning: 16, with: 3, without: 4 };
/// For a way that learns for some seconds, then switches every few seconds.
pub const SWITCHED: Schedule = Schedule { pairs: 1, beginning: 10, with: 60, without: 8 };
/// For a way that learns and begins to rest. The window holds one cycle of at most 123 lines, and
/// a few lines more.
pub const RESTING: Schedule = Schedule { pairs: 1, beginning: 70, with: 130, without: 8 };
/// For a way that costs one percent. The first lines serve to learn the cost of a trap and to
/// find idle memory. Revoking that is expensive, and done once.
pub const CHEAP: Schedule = Schedule { pairs: 3, beginning: 15, with: 20, without: 10 };

/// The measure of a way's cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instrument {
    /// The guest's speed: it has noise of several percent, and includes all costs.
    Speed,
    /// Time that can be counted ([`taken`](super::taken)): for ways that are off most of the time
    /// or cost a percent.
    Clock,
}

/// One way of tracking.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModeArm {
    /// Its name in figures.
    pub name: &'static str,
    /// Its mean overhead in Table I; `None`: not in the paper.
    pub paper: Option<&'static str>,
    pub settings: Settings,
    pub schedule: Schedule,
    /// The measure of its cost.
    pub instrument: Instrument,
}

/// All ways, in the paper's order of falling cost. Ways without a budget track granules of
/// `granule_pages`.
pub fn all(granule_pages: u32) -> Vec<ModeArm> {
    let (small, dynamic) = (HotSet::Fixed(SMALL_HOT_SET), HotSet::Dynamic);
    let way = |name, paper, structure, hot_set, intermittent, schedule| {
        let lru = Lru { structure, hot_set, intermittent, sample: 1.0 };
        let settings =
            Settings { granule_pages: Some(granule_pages), ..Settings::new(Mode::Lru(lru)) };
        ModeArm { name, paper: Some(paper), settings, schedule, instrument: Instrument::Speed }
    };
    let by_the_clock = |way: ModeArm| ModeArm { instrument: Instrument::Clock, ..way };
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
        ModeArm {
            name: "budget",
            paper: None,
            settings: shipped(),
            schedule: CHEAP,
            instrument: Instrument::Clock,
        },
    ]
}

/// The settings of the product.
pub fn shipped() -> Settings {
    Settings::new(Mode::Probes { budget: BUDGET })
}

/// The paper's best way, never switched off: the reference for intermittent tracking.
pub fn always_on() -> Settings {
    let (structure, hot_set) = (Structure::Bitmap, HotSet::Dynamic);
    Settings::new(Mode::Lru(Lru {
        structure,
        hot_set,
        intermittent: Intermittent::Watched,
        sample: 1.0,
    }))
}
