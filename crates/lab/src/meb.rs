//! Common parts of the experiments on working sets and miss-ratio curves (MEB: Wang et al. 2016,
//! §5.2).
//!
//! The code under test is the worker's own ([`overbook::worker::Tracked`]). It runs within this
//! process, so that each experiment can switch it on and off, choose its mode and see its cost.
//!
//! ```text
//! workloads          what the guests run, and why those
//! watch              one guest tracked: what was seen, and what it took of the tracker's CPU
//! progress           what a guest gets done, by its own clock
//! taken              what tracking takes from a guest, counted as time
//! pairs              with against without, again and again: a ratio with its confidence interval
//! modes              the paper's ways to track, one by one, as the worker's settings
//! sampler  peek      the estimator of ESX, and the pages that it looks at
//! page               plots, for people
//! balancing          guests with fixed memory, under each policy, and with enough memory
//! ```

pub mod balancing;
pub mod modes;
pub mod page;
pub mod pairs;
pub mod peek;
pub mod progress;
pub mod sampler;
pub mod taken;
pub mod watch;
pub mod workloads;
