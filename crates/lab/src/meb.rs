//! Common parts of the experiments on working sets and miss-ratio curves (MEB: Wang et al. 2016,
//! §5.2).
//!
//! The code under test is the worker's own ([`worker::Tracked`]). It runs within this
//! process, so that each experiment can switch it on and off, choose its mode and see its cost.
//!
//! ```text
//! workloads          the guests' workloads, and the programs that they stand for
//! watch              one guest tracked: observations, and the tracker's CPU time
//! progress           the work of a guest, by its own clock
//! taken              the cost of tracking for a guest, counted as time
//! pairs              with against without, repeatedly: a ratio with its confidence interval
//! modes              the paper's ways of tracking, as the worker's settings
//! sampler  peek      the estimator of ESX, and the pages that it samples
//! page               a page with plots
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
