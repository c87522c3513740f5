//! What a pool keeps: values by key, and seats that say who may write them.
//!
//! **Problem.** A host, or a controller, that was cut off for a while does not know that others
//! have taken its place; an election alone does not help, for what it sends may arrive late.
//! **Idea.** Who writes has a [`Seat`]: a key that ends with a lease, and that nobody else can take
//! meanwhile. Each write says which seat it is of, and the store carries it out only if that very
//! seat is still taken: all of it or nothing.
//!
//! A store that does not answer may have carried a write out or not: whoever is told
//! [`StoreError::Unreachable`] reads again.

pub mod embedded;
pub mod etcd;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a seat stays taken after its holder was last heard of.
pub const SEAT_TTL: Duration = Duration::from_secs(10);
/// How long a store may take to answer.
pub const LIMIT: Duration = Duration::from_secs(3);

/// Why something cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It does not answer; nobody knows whether a write was carried out.
    #[error("the store does not answer: {0}")]
    Unreachable(String),
    /// It answers, and refuses.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// The seat is not taken any more: nothing was written.
    #[error("the seat {0} is lost: nothing is written any more")]
    Unseated(String),
}

/// The right to write, as long as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Which one.
    pub key: String,
    /// Tells one taking of it from the next.
    pub number: i64,
    /// The lease that it ends with.
    lease: i64,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// All that was kept at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

    /// Takes a seat, if nobody has it. `who` is its value.
    fn sit<'a>(
        &'a self,
        key: &'a str,
        who: &'a str,
    ) -> BoxFuture<'a, Result<Option<Seat>, StoreError>>;

    /// Keeps the seat for another [`SEAT_TTL`].
    fn stay<'a>(&'a self, seat: &'a Seat) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Leaves the seat.
    fn rise(&self, seat: Seat) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Writes all of this, or nothing where the seat is not taken any more.
    fn write<'a>(
        &'a self,
        seat: &'a Seat,
        changes: Vec<Change>,
    ) -> BoxFuture<'a, Result<(), StoreError>>;
}

/// A kind of value: all of a kind lie in one directory, each under a name.
pub trait Kind: Serialize + DeserializeOwned {
    /// Where they lie, with a slash at the end.
    const DIRECTORY: &'static str;
}

impl Change {
    /// From now on this is the value of that name.
    #[must_use]
    pub fn put<T: Kind>(name: &str, value: &T) -> Self {
        // What we write has no maps with keys that are no text.
        let value = serde_json::to_vec(value).unwrap_or_default();
        Self::Put { key: format!("{}{name}", T::DIRECTORY), value }
    }

    /// That name has no value any more.
    #[must_use]
    pub fn delete<T: Kind>(name: &str) -> Self {
        Self::Delete { key: format!("{}{name}", T::DIRECTORY) }
    }
}

impl Snapshot {
    /// All of one kind, by name. What cannot be read is left out: it is of another version, or a
    /// host's mistake, and concerns nobody but that host.
    #[must_use]
    pub fn all<T: Kind>(&self) -> BTreeMap<String, T> {
        let of_kind = self.values.range(T::DIRECTORY.to_owned()..);
        let of_kind =
            of_kind.map_while(|(key, value)| Some((key.strip_prefix(T::DIRECTORY)?, value)));
        of_kind
            .filter_map(|(name, value)| {
                Some((name.to_owned(), serde_json::from_slice(value).ok()?))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Height(u32);

    impl Kind for Height {
        const DIRECTORY: &'static str = "heights/";
    }

    #[test]
    fn a_kind_is_found_by_name_and_what_cannot_be_read_is_left_out() {
        let Change::Put { key, value } = Change::put("a/b", &Height(7)) else { panic!("no put") };
        let mut values = BTreeMap::from([(key, value)]);
        values.insert("height".to_owned(), b"1".to_vec());
        values.insert("heights/c".to_owned(), b"nonsense".to_vec());
        values.insert("heights0".to_owned(), b"3".to_vec());
        let snapshot = Snapshot { revision: 1, values };
        assert_eq!(snapshot.all::<Height>(), BTreeMap::from([("a/b".to_owned(), Height(7))]));
    }
}
