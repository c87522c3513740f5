//! Exact LRU stack distances: how many distinct ids were touched since the last touch of this one.
//!
//! Problem: under LRU a memory of `m` pages hits exactly those references whose stack distance is
//! at most `m`, so one pass over the references gives the miss ratio at every size (Mattson 1970).
//! The naive stack is a list that is walked from its head: O(N) per reference.
//!
//! Idea: number the references. Each id keeps the time of its last touch; a time is *live* while
//! it is the last touch of some id. The distance of a reference to `x` is the number of live
//! times from `x`'s on. So there are two questions, answered by two parts that combine freely:
//! "when was this id touched last" ([`HashedStack`] for any ids, [`DenseStack`] for ids from 0
//! on) and "how many live times are before this one" ([`LiveTimes`]: [`Bitmap`], or [`Fenwick`]
//! for comparison). When the times run out, the live ones are renumbered without gaps, which
//! changes no distance.
//!
//! The paper's two structures serve as baselines: [`ListStack`] and [`AvlStack`] (MEB §3.2, Wang
//! et al. 2016). Their cost per reference is O(N) and O(log N); `Bitmap` costs O(1) in practice.
//!
//! Distances count the id itself: an immediate repeat has distance 1, a first reference has none.
//! Left out: sizes. Every id counts as one.

mod avl;
mod bitmap;
mod dense;
mod fenwick;
mod hashed;
mod list;
mod table;
#[cfg(test)]
mod tests;
mod timeline;

pub use avl::AvlStack;
pub use bitmap::Bitmap;
pub use dense::DenseStack;
pub use fenwick::Fenwick;
pub use hashed::HashedStack;
pub use list::ListStack;
pub use timeline::LiveTimes;

/// An LRU stack that yields distances.
pub trait StackDistance {
    /// Moves `id` to the top. Returns the number of distinct ids touched since its last touch,
    /// including itself, or `None` at its first touch.
    ///
    /// # Panics
    /// If more than 2³¹ ids are in the stack, or if a [`DenseStack`] is given an id beyond its
    /// number.
    fn touch(&mut self, id: u64) -> Option<u64>;

    /// How many distinct ids are in the stack.
    fn len(&self) -> usize;

    /// Whether nothing was touched yet.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A value that no time and no index has: "none" in 32 bits.
const NONE: u32 = u32::MAX;

/// The index of a node that is added to `len` others.
fn index_of_next(len: usize) -> u32 {
    let index = u32::try_from(len).ok().filter(|index| *index < 1 << 31);
    index.unwrap_or_else(|| panic!("{len} ids in one LRU stack; at most 2^31 can be numbered"))
}
