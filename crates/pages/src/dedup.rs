//! Finds the equal pages of a group from hashes, without touching the pages.
//!
//! **Problem.** Among tens of millions of pages that change all the time, find those with equal
//! content. The memory for that must be a small and known part of the scanned memory, and pages
//! that are written as soon as they are merged must not be offered again and again.
//!
//! **Idea.** Each look at a page gives a hash of its content. A *book* for each VM keeps the
//! result of the last look at each page and how calm the page is. An *index* for the group keeps
//! one place for each content: a guest's page that was seen, or a slot of the group's *pool*. Two
//! pages meet in the index. Hashes only propose: a later comparison, with the guest held off,
//! decides whether the pages are equal. Adjacent merges become one *run*: one mapping.
//!
//! **Cost** ([`BYTES_PER_PAGE`]): 4 bytes of the book and 10.7 of the index for each page that is
//! scanned (0.36 %), 12 bytes for each slot of the pool.
//!
//! Architecture invariant: each group has its own book, index and pool, which know nothing of
//! other groups.
//!
//! Sources: Kim 2014 §4.1 (sharing inside a group only); Arcangeli, Eidus, Wright, OLS 2009
//! (stable and unstable places; here both are in one table). Left out: pages of zeros, which need
//! no place, and memory in huge pages.

mod book;
mod index;
mod known;
mod pool;
mod runs;

pub use book::{Book, Verdict};
pub use index::{ContentLocation, Index};
pub use known::KnownPages;
pub use pool::Pool;
pub use runs::{Run, least_run, runs};

/// Bytes for each scanned page, without the pool.
pub const BYTES_PER_PAGE: f64 = book::BYTES_PER_PAGE + index::BYTES_PER_PAGE;
