//! A pool's store: values by key, and seats that give the right to write them.
//!
//! **Problem.** A host, or a controller, that was cut off for a while does not know that others
//! have taken its place; an election alone does not help, for its writes may arrive late.
//! **Idea.** Each writer has a [`Seat`]: a key that ends with a lease, and that no other writer
//! can take meanwhile. Each write says which seat it is of, and the store carries it out only if
//! that very seat is still taken: all of it or nothing.
//!
//! A store that does not answer may have carried a write out or not: a caller
//! that gets [`StoreError::Unreachable`] reads again.

pub mod embedded;
pub mod etcd;
mod share;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

/// How long a seat stays taken after its holder was last heard of.
pub const SEAT_TTL: Duration = Duration::from_secs(10);
/// How long a store may take to answer.
pub const LIMIT: Duration = Duration::from_secs(3);

/// Why something cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StoreError {
    /// It does not answer; a write may have been carried out or not.
    #[error("the store does not answer: {0}")]
    Unreachable(String),
    /// It answers, and refuses.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// The seat is not taken any more: nothing was written.
    #[error("the seat {0} is lost: nothing is written any more")]
    Unseated(String),
    /// A value that the write depends on has changed: nothing was written.
    #[error("it has changed meanwhile: nothing is written")]
    Changed,
}

/// The right to write, as long as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Which one.
    pub key: String,
    /// Tells one taking of it from the next.
    pub number: i64,
    /// The lease that it ends with.
    lease: i64,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// From now on this is the value.
    Put {
        /// Of this key.
        key: String,
        /// In bytes.
        value: Vec<u8>,
    },
    /// It has no value any more.
    Delete {
        /// Which key.
        key: String,
    },
}

/// A value that a write depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Still {
    /// This key still has …
    pub key: String,
    /// … this value; `None`: none.
    pub value: Option<Vec<u8>>,
}

/// All that was kept at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Grows with each change.
    pub revision: i64,
    /// By key.
    pub values: BTreeMap<String, Vec<u8>>,
}

/// Where a pool keeps what it knows.
pub trait Store: Send + Sync {
    /// Everything whose key begins so.
    fn read<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Snapshot, StoreError>>;

    /// Waits until something has changed there since this revision, or a while has passed.
    fn changed<'a>(&'a self, prefix: &'a str, since: i64) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Takes a free seat. `who` is its value.
    fn sit<'a>(
        &'a self,
        key: &'a str,
        who: &'a str,
    ) -> BoxFuture<'a, Result<Option<Seat>, StoreError>>;

    /// Keeps the seat for another [`SEAT_TTL`].
    fn stay<'a>(&'a self, seat: &'a Seat) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Leaves the seat.
    fn rise(&self, seat: Seat) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Writes all of this; or nothing, where the seat is not taken any more, or something has
    /// changed that the write depends on.
    fn write<'a>(
        &'a self,
        seat: &'a Seat,
        still: Vec<Still>,
        changes: Vec<Change>,
    ) -> BoxFuture<'a, Result<(), StoreError>>;
}

impl Change {
    /// From now on this is the value, as JSON.
    #[must_use]
    pub fn put(key: String, value: &impl Serialize) -> Self {
        // Our records have no maps with keys other than text.
        Self::Put { key, value: serde_json::to_vec(value).unwrap_or_default() }
    }
}

impl Snapshot {
    /// That this key still has the value that it has here.
    #[must_use]
    pub fn still(&self, key: String) -> Still {
        let value = self.values.get(&key).cloned();
        Still { key, value }
    }
}
