//! What the kernel's own objects take, by its slab allocator's counters: the whole machine's, so
//! what one experiment adds to them is only known while nothing else happens on it.
//!
//! They are read from `/sys/kernel/slab` and not from `/proc/slabinfo`, which leaves out caches
//! that the kernel has merged with others of the same size. Reading them needs root.

use std::io;

use sys::memory_map::PAGE_LEN;

/// One kind of objects.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objects {
    /// How many there are.
    pub count: f64,
    /// What each takes, with what is left over of its slab.
    pub each: f64,
}

impl Objects {
    /// Of the cache of this name.
    ///
    /// # Errors
    /// When the kernel has none, does not count, or this is not root.
    pub fn of(cache: &str) -> io::Result<Self> {
        let field = |name: &str| {
            let path = format!("/sys/kernel/slab/{cache}/{name}");
            let text = std::fs::read_to_string(&path)?;
            first_number(&text).ok_or_else(|| io::Error::other(format!("{path}: {text:?}")))
        };
        let slab = PAGE_LEN as f64 * field("order")?.exp2();
        Ok(Self { count: field("objects")?, each: slab / field("objs_per_slab")? })
    }

    /// How many more they are than they were.
    #[must_use]
    pub fn more_than(self, before: Self) -> f64 {
        self.count - before.count
    }

    /// What those take that were not there before.
    #[must_use]
    pub fn growth_bytes(self, before: Self) -> f64 {
        self.more_than(before) * self.each
    }
}

/// A total, which the parts of each node may follow.
fn first_number(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_what_comes_first() {
        assert_eq!(first_number("35406 N0=30000 N1=5406\n"), Some(35406.0));
        assert_eq!(first_number("\n"), None);
    }

    #[test]
    fn growth_is_that_of_the_count() {
        let before = Objects { count: 10.0, each: 195.0 };
        assert!((Objects { count: 12.0, ..before }.growth_bytes(before) - 390.0).abs() < 1e-9);
    }
}
