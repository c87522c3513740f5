//! A pool's store: values by key, and leases that protect writing.
//!
//! **Problem.** A host or a controller that was cut off for a while does not know that others
//! have replaced it. An election alone does not help, because its writes may arrive late.
//! **Idea.** Each writer holds a lease ([`WriterLease`]) on a key, which no other writer can take
//! meanwhile. Each write names its lease, and the store commits it only if exactly that lease is
//! still held (fencing): all of it or nothing.
//!
//! A store that does not answer may or may not have committed a write: after
//! [`StoreError::Unreachable`] the caller reads again.

pub mod embedded;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "etcd")]
mod share;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

/// The time for which a lease stays held after its last renewal.
pub const SEAT_TTL: Duration = Duration::from_secs(10);
/// The timeout for an answer of a store.
pub const LIMIT: Duration = Duration::from_secs(3);

/// The reason why something cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StoreError {
    /// The store does not answer; it is unknown whether a write was committed.
    #[error("the store does not answer: {0}")]
    Unreachable(String),
    /// The store refuses the request.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// The lease is no longer held: nothing was written.
    #[error("the seat {0} is lost: nothing is written any more")]
    Unseated(String),
    /// A precondition of the write has changed: nothing was written.
    #[error("it has changed meanwhile: nothing is written")]
    Changed,
}

/// A writer's lease: the right to write, while it is renewed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterLease {
    /// The key of the lease.
    pub key: String,
    /// The fencing token: it distinguishes this acquisition of the lease from the next.
    pub number: i64,
    /// The etcd lease to which the key is bound.
    lease: i64,
}

/// A change of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Sets a value.
    Put {
        /// The key.
        key: String,
        /// The value in bytes.
        value: Vec<u8>,
    },
    /// Deletes a value.
    Delete {
        /// The key.
        key: String,
    },
}

/// A precondition of a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Still {
    /// The key that must still have …
    pub key: String,
    /// … this value; `None`: none.
    pub value: Option<Vec<u8>>,
}

/// All values at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Grows with each change.
    pub revision: i64,
    /// The values by key.
    pub values: BTreeMap<String, Vec<u8>>,
}

/// A pool's store.
pub trait Store: Send + Sync {
    /// Reads all values whose keys have this prefix.
    fn read<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Snapshot, StoreError>>;

    /// Waits until a value with this prefix has changed since this revision, or some time has
    /// passed.
    fn changed<'a>(&'a self, prefix: &'a str, since: i64) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Acquires a lease, if no other writer holds it. `who` is the value of its key.
    fn sit<'a>(
        &'a self,
        key: &'a str,
        who: &'a str,
    ) -> BoxFuture<'a, Result<Option<WriterLease>, StoreError>>;

    /// Renews the lease for another [`SEAT_TTL`].
    fn stay<'a>(&'a self, seat: &'a WriterLease) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Releases the lease.
    fn rise(&self, seat: WriterLease) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Commits all of this; or nothing, if the lease is no longer held, or a precondition has
    /// changed.
    fn write<'a>(
        &'a self,
        seat: &'a WriterLease,
        still: Vec<Still>,
        changes: Vec<Change>,
    ) -> BoxFuture<'a, Result<(), StoreError>>;
}

impl Change {
    /// Sets a value, as JSON.
    #[must_use]
    pub fn put(key: String, value: &impl Serialize) -> Self {
        // Our values have no maps with keys that are not text.
        Self::Put { key, value: serde_json::to_vec(value).unwrap_or_default() }
    }
}

impl Snapshot {
    /// The precondition that this key still has its value in this snapshot.
    #[must_use]
    pub fn still(&self, key: String) -> Still {
        let value = self.values.get(&key).cloned();
        Still { key, value }
    }
}
