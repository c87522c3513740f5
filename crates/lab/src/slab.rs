//! Memory of the kernel's own objects, by its slab allocator's counters. They count the whole
//! machine, so the share of one experiment is known only while nothing else runs.
//!
//! They are read from `/sys/kernel/slab` and not from `/proc/slabinfo`, which omits caches that
//! the kernel has merged with others of the same size. Reading them needs root.

use std::io;

use sys::memory_map::PAGE_LEN;

/// The objects of one cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objects {
    /// Their number.
    pub count: f64,
    /// Bytes per object, including its part of the slab's unused rest.
    pub each: f64,
}

impl Objects {
    /// The objects of the cache of this name.
    ///
    /// # Errors
    /// When the kernel has no such cache, does not count, or this is not root.
    pub fn of(cache: &str) -> io::Result<Self> {
        let field = |name: &str| {
            let path = format!("/sys/kernel/slab/{cache}/{name}");
            let text = std::fs::read_to_string(&path)?;
            first_number(&text).ok_or_else(|| io::Error::other(format!("{path}: {text:?}")))
        };
        let slab = PAGE_LEN as f64 * field("order")?.exp2();
        Ok(Self { count: field("objects")?, each: slab / field("objs_per_slab")? })
    }

    pub fn more_than(self, before: Self) -> f64 {
        self.count - before.count
    }

    /// Memory of the objects that were added.
    pub fn growth_bytes(self, before: Self) -> f64 {
        self.more_than(before) * self.each
    }
}

/// The total, which counts of each node may follow.
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
