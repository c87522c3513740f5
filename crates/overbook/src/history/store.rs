//! The SQLite file: its schema, its limits of age and size, and the handling of an unusable file.
//!
//! Rows are ordered by (step, time, VM). So writing appends at three places, and thinning deletes
//! from three beginnings. Reading one VM's rows passes over other VMs' rows, which is fast enough
//! for a person. The schema's version is in `user_version`.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use model::{Bytes, PagesPerMs};
use rusqlite::{Connection, ErrorCode, params};

use super::sample::{COARSE_S, FINEST_S, Rows};

/// Version of the schema below. A change gets the next number, and code that migrates the old one.
pub(super) const VERSION: i64 = 7;

const SHAPE: &str = "
CREATE TABLE reading (
    step_s INTEGER NOT NULL, wall_ms INTEGER NOT NULL, vm TEXT NOT NULL,
    used INTEGER, balloon INTEGER, target INTEGER, swap_per_s INTEGER, working_set INTEGER,
    shared INTEGER, saved INTEGER, merged INTEGER, scan_rate INTEGER, freed INTEGER, freed_taken INTEGER,
    in_repositories INTEGER, disk_read_us INTEGER,
    resident INTEGER, paged_out INTEGER, refaults_per_s REAL,
    PRIMARY KEY (step_s, wall_ms, vm)
) STRICT, WITHOUT ROWID;
CREATE TABLE change (
    id INTEGER PRIMARY KEY, wall_ms INTEGER NOT NULL, vm TEXT NOT NULL, mode TEXT NOT NULL,
    is_take INTEGER NOT NULL, target INTEGER NOT NULL, reason TEXT NOT NULL, words TEXT NOT NULL
) STRICT;
CREATE INDEX change_of_vm ON change (vm, wall_ms);
CREATE INDEX change_by_age ON change (wall_ms);
";

/// Loans between groups. New in version 3.
const LOANS: &str = "
CREATE TABLE loan (
    id INTEGER PRIMARY KEY, wall_ms INTEGER NOT NULL, lender TEXT NOT NULL, borrower TEXT NOT NULL,
    mode TEXT NOT NULL, amount INTEGER NOT NULL, reason TEXT NOT NULL, words TEXT NOT NULL
) STRICT;
CREATE INDEX loan_by_age ON loan (wall_ms);
";

/// VMs that changed hosts. New in version 6.
const MOVES: &str = "
CREATE TABLE moved (
    id INTEGER PRIMARY KEY, wall_ms INTEGER NOT NULL, vm TEXT NOT NULL, words TEXT NOT NULL
) STRICT;
CREATE INDEX moved_of_vm ON moved (vm, wall_ms);
CREATE INDEX moved_by_age ON moved (wall_ms);
";

/// From version 1, which has no working sets.
const FROM_1: &str = "ALTER TABLE reading ADD COLUMN working_set INTEGER;";
/// From version 2, which has no identical pages and no loans.
const FROM_2: &str = "
ALTER TABLE reading ADD COLUMN shared INTEGER;
ALTER TABLE reading ADD COLUMN saved INTEGER;
ALTER TABLE reading ADD COLUMN merged INTEGER;
ALTER TABLE reading ADD COLUMN scan_rate INTEGER;
";
/// From version 3, which has no freed memory.
const FROM_3: &str = "
ALTER TABLE reading ADD COLUMN freed INTEGER;
ALTER TABLE reading ADD COLUMN freed_taken INTEGER;
";
/// From version 4, which has no disks.
const FROM_4: &str = "
ALTER TABLE reading ADD COLUMN in_repositories INTEGER;
ALTER TABLE reading ADD COLUMN disk_read_us INTEGER;
";
/// From version 6, which has no paging by the host.
const FROM_6: &str = "
ALTER TABLE reading ADD COLUMN resident INTEGER;
ALTER TABLE reading ADD COLUMN paged_out INTEGER;
ALTER TABLE reading ADD COLUMN refaults_per_s REAL;
";

const HOUR_MS: u64 = 3_600_000;

/// How long the rows of each step are kept: an hour, a day, thirty days.
const KEPT_MS: [(u32, u64); 3] =
    [(FINEST_S, HOUR_MS), (COARSE_S[0], 24 * HOUR_MS), (COARSE_S[1], 30 * 24 * HOUR_MS)];
/// The tables of decisions and of their results.
const DECISIONS: [&str; 3] = ["change", "loan", "moved"];
const CHANGES_KEPT_MS: u64 = 30 * 24 * HOUR_MS;
const MOST_CHANGES: i64 = 200_000;
/// Maximum size of the file; beyond it the oldest rows are deleted, within their age limits too.
pub(super) const MOST_BYTES: Bytes = Bytes::mib(256);

/// Why the history cannot be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    /// An error of SQLite.
    #[error("{path}: {source}")]
    Sqlite { path: PathBuf, source: rusqlite::Error },
    /// The file is not a history that this version can use.
    #[error("{path}: {why}")]
    Unusable { path: PathBuf, why: String },
    /// An unusable file could not be renamed.
    #[error("cannot set {path} aside: {source}")]
    SetAside { path: PathBuf, source: io::Error },
}

impl StoreError {
    /// Whether the file itself is at fault, so that a retry cannot help.
    pub(super) fn is_unusable(&self) -> bool {
        match self {
            Self::Unusable { .. } => true,
            Self::Sqlite { source, .. } => matches!(
                source.sqlite_error_code(),
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
            ),
            Self::SetAside { .. } => false,
        }
    }
}

/// The open file.
pub(super) struct HistoryStore {
    path: PathBuf,
    connection: Connection,
    most_bytes: Bytes,
}

impl HistoryStore {
    /// Opens or creates the file. An unusable file is an error ([`StoreError::is_unusable`]).
    pub(super) fn open(path: &Path, most_bytes: Bytes) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Sqlite { path: path.to_owned(), source };
        let unusable = |why: String| StoreError::Unusable { path: path.to_owned(), why };
        let mut connection = Connection::open(path).map_err(fail)?;
        connection.busy_timeout(Duration::from_secs(2)).map_err(fail)?;
        let version: i64 =
            connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(fail)?;
        if version > VERSION {
            return Err(unusable(format!(
                "it has version {version}, written by a newer Overbook; this one knows {VERSION}"
            )));
        }
        configure(&connection, most_bytes).map_err(fail)?;
        if version == 0 {
            let objects: i64 = connection
                .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
                .map_err(fail)?;
            if objects > 0 {
                return Err(unusable("it is some other program's database".to_owned()));
            }
            shape(&mut connection, &[SHAPE, LOANS, MOVES].concat()).map_err(fail)?;
        }
        let verdict: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(fail)?;
        if verdict != "ok" {
            return Err(unusable(format!("it is damaged: {verdict}")));
        }
        // Each entry migrates from its version, counted from 1, to the next one.
        let steps = [FROM_1, &[FROM_2, LOANS].concat(), FROM_3, FROM_4, MOVES, FROM_6];
        let done = usize::try_from(version - 1).unwrap_or(steps.len());
        if let Some(steps @ [_, ..]) = steps.get(done..) {
            shape(&mut connection, &steps.concat()).map_err(fail)?;
        }
        Ok(Self { path: path.to_owned(), connection, most_bytes })
    }

    fn fail(&self) -> impl Fn(rusqlite::Error) -> StoreError + use<> {
        let path = self.path.clone();
        move |source| StoreError::Sqlite { path: path.clone(), source }
    }

    /// Adds the rows of one tick, all or none.
    pub(super) fn append(&mut self, rows: &Rows) -> Result<(), StoreError> {
        let fail = self.fail();
        insert(&mut self.connection, rows).map_err(fail)
    }

    /// Deletes rows that are too old, and the oldest rows while the file is too large.
    pub(super) fn thin(&mut self, now_ms: u64) -> Result<(), StoreError> {
        let fail = self.fail();
        delete_old(&self.connection, now_ms).map_err(&fail)?;
        // Each round deletes a tenth, so 100 rounds leave nothing.
        for _ in 0..100 {
            if self.bytes().map_err(&fail)? <= self.most_bytes {
                break;
            }
            delete_oldest_tenth(&self.connection).map_err(&fail)?;
        }
        Ok(())
    }

    /// Bytes that the rows occupy, without the free pages that deleted rows left.
    fn bytes(&self) -> rusqlite::Result<Bytes> {
        let pragma = |name| -> rusqlite::Result<i64> {
            self.connection.pragma_query_value(None, name, |row| row.get(0))
        };
        let pages = pragma("page_count")?.saturating_sub(pragma("freelist_count")?);
        let bytes = pages.saturating_mul(pragma("page_size")?);
        Ok(Bytes(u64::try_from(bytes).unwrap_or(0)))
    }
}

fn configure(connection: &Connection, most_bytes: Bytes) -> rusqlite::Result<()> {
    // WAL: a crash of the daemon loses no committed row, and readers never wait. A crash of the
    // host loses the last seconds and damages nothing. NORMAL: fsync only at checkpoints.
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "cache_size", -256)?;
    connection.pragma_update_and_check(None, "journal_size_limit", 4 << 20, |_| Ok(()))?;
    connection.pragma_update_and_check(None, "wal_autocheckpoint", 250, |_| Ok(()))?;
    let page: i64 = connection.pragma_query_value(None, "page_size", |row| row.get(0))?;
    // A quarter more than the limit, so that thinning comes first and this only stops a runaway.
    let pages = signed(most_bytes.0) / page.max(1) / 4 * 5;
    connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))
}

/// Migrates the file to the current schema with `sql`.
fn shape(connection: &mut Connection, sql: &str) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute_batch(sql)?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}

/// SQLite's integers are signed.
pub(super) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn insert(connection: &mut Connection, rows: &Rows) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    {
        let mut reading = transaction.prepare_cached(
            "INSERT OR REPLACE INTO reading \
             (step_s, wall_ms, vm, used, balloon, target, swap_per_s, working_set, \
             shared, saved, merged, scan_rate, freed, freed_taken, in_repositories, disk_read_us, \
             resident, paged_out, refaults_per_s) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, \
             ?17, ?18, ?19)",
        )?;
        let size = |bytes: Option<Bytes>| bytes.map(|bytes| signed(bytes.0));
        for row in &rows.readings {
            let s = row.sample;
            reading.execute(params![
                row.step_s,
                signed(row.wall_ms),
                row.vm.as_str(),
                size(s.used),
                size(s.balloon),
                size(s.target),
                size(s.swap_per_s),
                size(s.working_set),
                size(s.dedup.map(|dedup| dedup.shared)),
                size(s.dedup.map(|dedup| dedup.saved)),
                size(s.dedup.map(|dedup| dedup.merged)),
                s.scan_rate.map(|PagesPerMs(rate)| rate),
                size(s.free_pages.map(|free| free.freed)),
                size(s.free_pages.map(|free| free.taken)),
                size(s.disks.map(|disks| disks.in_repositories)),
                s.disks.map(|disks| signed(disks.read_us)),
                size(s.cold.map(|cold| cold.resident)),
                size(s.cold.map(|cold| cold.out)),
                s.cold.map(|cold| cold.refaults_per_s)
            ])?;
        }
        let mut change = transaction.prepare_cached(
            "INSERT INTO change (wall_ms, vm, mode, is_take, target, reason, words) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?;
        for row in &rows.changes {
            change.execute(params![
                signed(row.wall_ms),
                row.vm.as_str(),
                json(&row.mode),
                row.is_take,
                signed(row.target.0),
                json(&row.reason),
                row.reason.to_string()
            ])?;
        }
        let mut loan = transaction.prepare_cached(
            "INSERT INTO loan (wall_ms, lender, borrower, mode, amount, reason, words) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?;
        for row in &rows.loans {
            loan.execute(params![
                signed(row.wall_ms),
                row.lender.as_str(),
                row.loan.borrower.as_str(),
                json(&row.mode),
                signed(row.loan.amount.0),
                json(&row.loan.reason),
                row.loan.reason.to_string()
            ])?;
        }
        let mut moved = transaction
            .prepare_cached("INSERT INTO moved (wall_ms, vm, words) VALUES (?1, ?2, ?3)")?;
        for row in &rows.moves {
            moved.execute(params![signed(row.wall_ms), row.vm.as_str(), row.words])?;
        }
    }
    transaction.commit()
}

/// These types always have a JSON form; without one, readers would show the words alone.
fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn delete_old(connection: &Connection, now_ms: u64) -> rusqlite::Result<()> {
    for (step_s, kept_ms) in KEPT_MS {
        let before = signed(now_ms.saturating_sub(kept_ms));
        connection
            .prepare_cached("DELETE FROM reading WHERE step_s = ?1 AND wall_ms < ?2")?
            .execute(params![step_s, before])?;
    }
    let before = signed(now_ms.saturating_sub(CHANGES_KEPT_MS));
    for table in DECISIONS {
        connection
            .prepare_cached(&format!("DELETE FROM {table} WHERE wall_ms < ?1"))?
            .execute(params![before])?;
        connection
            .prepare_cached(&format!(
                "DELETE FROM {table} WHERE id <= (SELECT max(id) FROM {table}) - ?1"
            ))?
            .execute(params![MOST_CHANGES])?;
    }
    Ok(())
}

fn delete_oldest_tenth(connection: &Connection) -> rusqlite::Result<()> {
    for (step_s, _) in KEPT_MS {
        connection.execute(
            "DELETE FROM reading WHERE step_s = ?1 AND wall_ms <= \
               (SELECT min(wall_ms) + (max(wall_ms) - min(wall_ms)) / 10 FROM reading \
                WHERE step_s = ?1)",
            params![step_s],
        )?;
    }
    for table in DECISIONS {
        let oldest = format!("SELECT min(id) + (max(id) - min(id)) / 10 FROM {table}");
        connection.execute(&format!("DELETE FROM {table} WHERE id <= ({oldest})"), [])?;
    }
    Ok(())
}

/// Renames an unusable file together with its write-ahead log, and returns the new name.
pub(super) fn set_aside(path: &Path, now_ms: u64) -> Result<PathBuf, StoreError> {
    let aside = with_suffix(path, &format!(".unusable-{now_ms}"));
    let fail = |source| StoreError::SetAside { path: path.to_owned(), source };
    for part in ["-wal", "-shm"] {
        match std::fs::rename(with_suffix(path, part), with_suffix(&aside, part)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(error)),
            _ => {}
        }
    }
    std::fs::rename(path, &aside).map_err(fail)?;
    Ok(aside)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
