//! Which pages of a group are the same, as far as can be said without touching them.
//!
//! **Problem.** Among tens of millions of pages that change all the time, find those with equal
//! content, in memory that is a small and known part of what is scanned, and without offering again
//! and again what is written as soon as it is merged.
//!
//! **Idea.** Each look at a page gives a hash of its content. A *book* for each VM keeps what the
//! last look said and how calm the page is; an *index* for the group keeps one place for each
//! content: a guest's page that was seen, or a slot of the group's *pool*. Two pages meet in the
//! index; whether they are really equal is decided later, by whoever can hold the guest off and
//! compare (hashes only propose). Merges that lie side by side become one *run*: one mapping.
//!
//! **Cost** ([`BYTES_PER_PAGE`]): 4 bytes of the book and 10.7 of the index for each page that is
//! scanned (0.36 %), 12 bytes for each slot of the pool.
//!
//! Architecture invariant: one of each per group; nothing here knows another group's.
//!
//! Sources: Kim 2014 §4.1 (sharing inside a group only); Arcangeli, Eidus, Wright, OLS 2009 (stable
//! and unstable places; here both stand in one table). Left out: pages of zeros, which need no
//! place but none; what lies in huge pages.

mod book;
mod index;
mod known;
mod pool;
mod runs;

pub use book::{Book, Verdict};
pub use index::{Index, Place};
pub use known::Known;
pub use pool::Pool;
pub use runs::{Run, least_run, runs};

/// What a page that is scanned takes, without the pool.
pub const BYTES_PER_PAGE: f64 = book::BYTES_PER_PAGE + index::BYTES_PER_PAGE;
