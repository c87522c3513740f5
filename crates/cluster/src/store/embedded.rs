//! A store for a single host: SQLite for the values, and this process for the leases.
//!
//! There are no other writers, because only one daemon has the state directory. So a lease is
//! held until its holder in this process has not renewed it for [`SEAT_TTL`], as in a pool of
//! many hosts.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, ready};
use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::{Change, SEAT_TTL, Snapshot, Still, Store, StoreError, WriterLease};

/// The longest wait for a change.
const QUIET: Duration = Duration::from_secs(10);

const SHAPE: &str = "
CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS revision (
    is_it INTEGER PRIMARY KEY CHECK (is_it = 1), n INTEGER NOT NULL
) STRICT;
INSERT OR IGNORE INTO revision VALUES (1, 0);
";

/// A store in a file of this host.
pub struct Embedded {
    state: Mutex<EmbeddedState>,
    revision: watch::Sender<i64>,
}

struct EmbeddedState {
    connection: Connection,
    seats: HashMap<String, LeaseTerm>,
    takings: i64,
}

struct LeaseTerm {
    number: i64,
    until: Instant,
}

fn refused(error: rusqlite::Error) -> StoreError {
    StoreError::Refused(error.to_string())
}

impl Embedded {
    /// Opens the store in this file, which is created if it is missing.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, or is not a store.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let connection = Connection::open(path).map_err(refused)?;
        connection.execute_batch(SHAPE).map_err(refused)?;
        let revision = connection.query_row("SELECT n FROM revision", [], |row| row.get(0));
        let revision = watch::Sender::new(revision.map_err(refused)?);
        let state = EmbeddedState { connection, seats: HashMap::new(), takings: 0 };
        Ok(Self { state: Mutex::new(state), revision })
    }

    fn state(&self) -> MutexGuard<'_, EmbeddedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_now(&self, prefix: &str) -> Result<Snapshot, rusqlite::Error> {
        let state = self.state();
        let mut found = state
            .connection
            .prepare_cached("SELECT key, value FROM kept WHERE substr(key, 1, ?2) = ?1")?;
        let length = i64::try_from(prefix.chars().count()).unwrap_or(i64::MAX);
        let rows =
            found.query_map(params![prefix, length], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(Snapshot { revision: *self.revision.borrow(), values: rows.collect::<Result<_, _>>()? })
    }

    fn write_now(
        &self,
        seat: &WriterLease,
        still: &[Still],
        changes: &[Change],
    ) -> Result<(), StoreError> {
        let mut state = self.state();
        state.seated(seat)?;
        let transaction = state.connection.transaction().map_err(refused)?;
        for Still { key, value } in still {
            let found = transaction
                .query_row("SELECT value FROM kept WHERE key = ?1", [key], |row| row.get(0))
                .optional();
            if found.map_err(refused)? != *value {
                return Err(StoreError::Changed);
            }
        }
        for change in changes {
            let done = match change {
                Change::Put { key, value } => transaction
                    .execute("INSERT OR REPLACE INTO kept VALUES (?1, ?2)", params![key, value]),
                Change::Delete { key } => {
                    transaction.execute("DELETE FROM kept WHERE key = ?1", params![key])
                }
            };
            done.map_err(refused)?;
        }
        let next = "UPDATE revision SET n = n + 1 RETURNING n";
        let revision = transaction.query_row(next, [], |row| row.get(0)).optional();
        let revision = revision.map_err(refused)?.unwrap_or_default();
        transaction.commit().map_err(refused)?;
        self.revision.send_replace(revision);
        Ok(())
    }
}

impl EmbeddedState {
    /// The lease, if exactly this acquisition of it is still held.
    fn seated(&mut self, seat: &WriterLease) -> Result<&mut LeaseTerm, StoreError> {
        let now = Instant::now();
        let taken = self.seats.get_mut(&seat.key);
        let taken = taken.filter(|taken| taken.number == seat.number && taken.until > now);
        taken.ok_or_else(|| StoreError::Unseated(seat.key.clone()))
    }
}

impl Store for Embedded {
    fn read<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(ready(self.read_now(prefix).map_err(refused)))
    }

    fn changed<'a>(&'a self, _: &'a str, since: i64) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let mut revision = self.revision.subscribe();
            // The channel cannot close while this store exists.
            let _ = timeout(QUIET, revision.wait_for(|revision| *revision > since)).await;
            Ok(())
        })
    }

    fn sit<'a>(
        &'a self,
        key: &'a str,
        _: &'a str,
    ) -> BoxFuture<'a, Result<Option<WriterLease>, StoreError>> {
        let mut state = self.state();
        let now = Instant::now();
        if state.seats.get(key).is_some_and(|taken| taken.until > now) {
            return Box::pin(ready(Ok(None)));
        }
        state.takings += 1;
        let number = state.takings;
        state.seats.insert(key.to_owned(), LeaseTerm { number, until: now + SEAT_TTL });
        Box::pin(ready(Ok(Some(WriterLease { key: key.to_owned(), number, lease: 0 }))))
    }

    fn stay<'a>(&'a self, seat: &'a WriterLease) -> BoxFuture<'a, Result<(), StoreError>> {
        let stays = self.state().seated(seat).map(|taken| taken.until = Instant::now() + SEAT_TTL);
        Box::pin(ready(stays))
    }

    fn rise(&self, seat: WriterLease) -> BoxFuture<'_, Result<(), StoreError>> {
        let mut state = self.state();
        if state.seated(&seat).is_ok() {
            state.seats.remove(&seat.key);
        }
        Box::pin(ready(Ok(())))
    }

    fn write<'a>(
        &'a self,
        seat: &'a WriterLease,
        still: Vec<Still>,
        changes: Vec<Change>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(ready(self.write_now(seat, &still, &changes)))
    }
}
