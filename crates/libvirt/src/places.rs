//! A limit on things that are under way at the same time.

use std::sync::Arc;

/// A number of places. Each is taken until its [`CallPlace`] is dropped.
#[derive(Debug)]
pub(crate) struct CallPlaces {
    taken: Arc<()>,
    most: usize,
}

/// A taken place.
#[derive(Debug)]
pub(crate) struct CallPlace(#[expect(dead_code, reason = "counted until it is dropped")] Arc<()>);

impl CallPlaces {
    /// Free places.
    pub(crate) fn new(most: usize) -> Self {
        Self { taken: Arc::new(()), most }
    }

    /// A place, if one is free. Two threads that ask at the same time may get one too many.
    pub(crate) fn take(&self) -> Option<CallPlace> {
        (Arc::strong_count(&self.taken) <= self.most).then(|| CallPlace(Arc::clone(&self.taken)))
    }

    /// The number of places that are taken.
    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        Arc::strong_count(&self.taken) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_it_is_dropped() {
        let places = CallPlaces::new(1);
        let place = places.take().unwrap();
        assert!(places.take().is_none());
        drop(place);
        assert!(places.take().is_some());
    }
}
