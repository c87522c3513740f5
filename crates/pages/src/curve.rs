//! Miss-ratio curves: the share of references that miss, at every size of memory.
//!
//! [`Histogram`] counts stack distances, [`AgedHistogram`] forgets old ones, and a
//! [`MissRatioCurve`] is what either says: at size `m`, the share of references whose distance is
//! larger than `m`. A curve is a falling polyline, so that estimates from samples and probes fit in
//! it as well as exact counts; sizes are in the unit of the distances (granules, objects) until
//! [`MissRatioCurve::scaled`].

mod aged;
mod histogram;
mod ratio;
#[cfg(test)]
mod tests;

pub use aged::AgedHistogram;
pub use histogram::Histogram;
pub use ratio::{CurveError, MissRatioCurve, Point};
