//! The ways to track that Table I of the paper compares, as settings of the worker.
//!
//! | name | LRU stack | hot set | intermittent |
//! |-|-|-|-|
//! | `list` | linked list | fixed, small | no |
//! | `dhs` | linked list | dynamic | no |
//! | `abl` | AVL tree | fixed, small | no |
//! | `da` | AVL tree | dynamic | no |
//! | `imt_fixed` | AVL tree | dynamic | threshold 0.20 |
//! | `imt_adaptive` | AVL tree | dynamic | adaptive, as the product has it ([`Judgement::Anchored`]) |
//! | `budget` | none: working-set probes within 1 % of a vCPU, as shipped | | |

use overbook::worker::{HotSet, Intermittent, Lru, Mode, Settings, Structure};
use pages::phase::Judgement;

/// The least hot set that the shim takes: the paper's small one.
pub const SMALL_HOT_SET: u32 = protocol::MIN_HOT_SET;
/// The paper's fixed threshold (Table I).
pub const FIXED_THRESHOLD: f64 = 0.20;
/// What the product may take of a vCPU.
pub const BUDGET: f64 = 0.01;

/// One way to track.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Way {
    /// Its name in figures.
    pub name: &'static str,
    /// Table I's mean overhead of it; `None`: not in the paper.
    pub paper: Option<&'static str>,
    /// How the worker does it.
    pub settings: Settings,
    /// Whether it switches itself on and off, so that only long windows show its cost.
    pub is_intermittent: bool,
}

/// All of them, in the paper's order of falling cost. Those without a budget track granules of
/// `granule_pages`.
#[must_use]
pub fn all(granule_pages: u32) -> Vec<Way> {
    let (small, dynamic) = (HotSet::Fixed(SMALL_HOT_SET), HotSet::Dynamic);
    let way = |name, paper, structure, hot_set, intermittent| {
        let lru = Lru { structure, hot_set, intermittent, sample: 1.0 };
        let settings =
            Settings { granule_pages: Some(granule_pages), ..Settings::new(Mode::Lru(lru)) };
        let is_intermittent = intermittent != Intermittent::Off;
        Way { name, paper: Some(paper), settings, is_intermittent }
    };
    let fixed = Intermittent::On(Judgement::Fixed(FIXED_THRESHOLD));
    let adaptive = Intermittent::On(Judgement::Anchored);
    vec![
        way("list", "7.58", Structure::List, small, Intermittent::Off),
        way("dhs", "1.39", Structure::List, dynamic, Intermittent::Off),
        way("abl", "0.80", Structure::Avl, small, Intermittent::Off),
        way("da", "0.32", Structure::Avl, dynamic, Intermittent::Off),
        way("imt_fixed", "0.09", Structure::Avl, dynamic, fixed),
        way("imt_adaptive", "0.02", Structure::Avl, dynamic, adaptive),
        Way { name: "budget", paper: None, settings: shipped(), is_intermittent: false },
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
