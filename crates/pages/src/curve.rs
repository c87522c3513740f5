//! Miss-ratio curves: the share of references that miss, at every size of memory.
//!
//! [`Histogram`] counts stack distances, and [`AgedHistogram`] forgets old ones. Both yield a
//! [`MissRatioCurve`]: at size `m`, the share of references whose distance is larger than `m`. A
//! curve is a falling polyline, so it represents estimates from samples and probes as well as
//! exact counts. Sizes are in the unit of the distances (granules, objects) until
//! [`MissRatioCurve::scaled`].

mod aged;
mod histogram;
mod ratio;
#[cfg(test)]
mod tests;

pub use aged::AgedHistogram;
pub use histogram::Histogram;
pub use ratio::{CurveError, MissRatioCurve, Point};
