//! Reads the history while a daemon writes it.
//!
//! Each call opens the file read-only, queries it and closes it. With WAL, a reader sees a
//! consistent snapshot and blocks no writer. Where several resolutions cover the same time, the
//! finest is returned.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use model::{Bytes, GroupName, Mode, PagesPerMs, Reason, VmName};
use rusqlite::{Connection, OpenFlags, Row, params};
use serde::{Deserialize, Serialize};

use super::{
    sample::{COARSE_S, FINEST_S},
    store::{VERSION, signed},
};

/// One row of a VM's history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HistoryRow {
    /// Time in milliseconds since the Unix epoch. Of a reading: the beginning of its step.
    pub wall_ms: u64,
    /// The reading, change or move.
    #[serde(flatten)]
    pub entry: Entry,
}

/// A reading, a change, or a move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Entry {
    /// A reading of the VM.
    Reading {
        /// Length of the row's step, in seconds: 1, 10 or 60.
        step_s: u32,
        /// Physical memory on the host.
        used: Option<Bytes>,
        /// The balloon's size: the memory that the guest may use.
        balloon: Option<Bytes>,
        /// The memory that the VM was meant to have.
        target: Option<Bytes>,
        /// Swapped in and out by the guest per second, the mean of the step.
        swap_per_s: Option<Bytes>,
        /// The working set, if the VM was tracked.
        #[serde(default)]
        working_set: Option<Bytes>,
        /// The part of its memory that was shared.
        #[serde(default)]
        shared: Option<Bytes>,
        /// The memory that sharing saved it.
        #[serde(default)]
        saved: Option<Bytes>,
        /// Memory of it that was merged since its worker first connected to it.
        #[serde(default)]
        merged: Option<Bytes>,
        /// The rate at which its group was scanned for identical pages.
        #[serde(default)]
        scan_rate: Option<PagesPerMs>,
        /// Memory that it had freed and the host had not taken.
        #[serde(default)]
        freed: Option<Bytes>,
        /// Freed memory that the host took since its worker first connected to it.
        #[serde(default)]
        freed_taken: Option<Bytes>,
        /// The part of its disks that was in repositories.
        #[serde(default)]
        in_repositories: Option<Bytes>,
        /// Median time of a read of its slowest disk, over the time that the disk was served.
        #[serde(default)]
        disk_read_us: Option<u32>,
        /// Resident memory, if the host paged out cold memory.
        #[serde(default)]
        resident: Option<Bytes>,
        /// Memory in the host's swap.
        #[serde(default)]
        paged_out: Option<Bytes>,
        /// Refaults per second.
        #[serde(default)]
        refaults_per_s: Option<f64>,
    },
    /// A decision.
    Change {
        /// The mode at the time; only `enforce` carries decisions out.
        mode: Mode,
        /// Whether memory was taken from the VM.
        is_take: bool,
        /// The VM's new target.
        target: Bytes,
        /// The reason; `None` when another version of Overbook wrote a reason that this one does
        /// not know.
        reason: Option<Reason>,
        /// The reason in words.
        words: String,
    },
    /// A step of a move between hosts.
    Move {
        /// The step and its reason, in words.
        words: String,
    },
}

/// A decision about a loan between two groups.
#[derive(Clone, Debug, PartialEq)]
pub struct LoanRow {
    /// Time in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// The mode at the time; only `enforce` carries decisions out.
    pub mode: Mode,
    /// The group whose idle surplus it was.
    pub lender: GroupName,
    /// The group that could use it.
    pub borrower: GroupName,
    /// The amount; 0 ends the loan.
    pub amount: Bytes,
    /// The reason; `None` when another version of Overbook wrote a reason that this one does not
    /// know.
    pub reason: Option<Reason>,
    /// The reason in words.
    pub words: String,
}

/// Why the history cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Nothing has been recorded.
    #[error("there is no history at {0}: has the daemon run with this state directory?")]
    Missing(PathBuf),
    /// The file has the schema of another version.
    #[error("{path} has version {found}; this Overbook knows {VERSION}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
    },
    /// An error of SQLite.
    #[error("{path}: {source}")]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// The error.
        source: rusqlite::Error,
    },
}

/// The newest `limit` rows of `vm` within `wall_ms`, oldest first. Blocks on the disk.
///
/// # Errors
/// There is no readable history.
pub fn read(
    path: &Path,
    vm: &VmName,
    wall_ms: Range<u64>,
    limit: usize,
) -> Result<Vec<HistoryRow>, ReadError> {
    let connection = open(path)?;
    let query = || -> rusqlite::Result<Vec<HistoryRow>> {
        // One snapshot for all queries.
        let snapshot = connection.unchecked_transaction()?;
        let mut rows = readings(&snapshot, vm, &wall_ms, limit)?;
        rows.extend(changes(&snapshot, vm, &wall_ms, limit)?);
        rows.extend(moves(&snapshot, vm, &wall_ms, limit)?);
        rows.sort_by_key(|row| row.wall_ms);
        Ok(rows.split_off(rows.len().saturating_sub(limit)))
    };
    query().map_err(|source| ReadError::Sqlite { path: path.to_owned(), source })
}

/// The last recorded change of `vm`.
///
/// # Errors
/// There is no readable history.
pub fn last_change(path: &Path, vm: &VmName) -> Result<Option<HistoryRow>, ReadError> {
    let rows = changes(&open(path)?, vm, &(0..u64::MAX), 1);
    let rows = rows.map_err(|source| ReadError::Sqlite { path: path.to_owned(), source })?;
    Ok(rows.into_iter().next())
}

/// The newest `limit` decisions about what `group` lent or borrowed within `wall_ms`, oldest first.
/// Blocks on the disk.
///
/// # Errors
/// There is no readable history.
pub fn loans(
    path: &Path,
    group: &GroupName,
    wall_ms: Range<u64>,
    limit: usize,
) -> Result<Vec<LoanRow>, ReadError> {
    let connection = open(path)?;
    let query = || -> rusqlite::Result<Vec<LoanRow>> {
        let mut statement = connection.prepare(
            "SELECT wall_ms, mode, lender, borrower, amount, reason, words FROM loan \
             WHERE (lender = ?1 OR borrower = ?1) AND wall_ms >= ?2 \
             AND wall_ms < ?3 ORDER BY wall_ms DESC, id DESC LIMIT ?4",
        )?;
        let (since, until) = (signed(wall_ms.start), signed(wall_ms.end));
        let group = params![group.as_str(), since, until, signed(limit as u64)];
        let found = statement.query_map(group, |row| {
            Ok(LoanRow {
                wall_ms: unsigned(row, 0)?,
                mode: serde_json::from_str(&row.get::<_, String>(1)?).unwrap_or_default(),
                lender: row.get::<_, String>(2)?.as_str().into(),
                borrower: row.get::<_, String>(3)?.as_str().into(),
                amount: Bytes(unsigned(row, 4)?),
                reason: serde_json::from_str(&row.get::<_, String>(5)?).ok(),
                words: row.get(6)?,
            })
        })?;
        let mut rows: Vec<LoanRow> = found.collect::<Result<_, _>>()?;
        rows.reverse();
        Ok(rows)
    };
    query().map_err(|source| ReadError::Sqlite { path: path.to_owned(), source })
}

fn open(path: &Path) -> Result<Connection, ReadError> {
    if !path.exists() {
        return Err(ReadError::Missing(path.to_owned()));
    }
    let fail = |source| ReadError::Sqlite { path: path.to_owned(), source };
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(fail)?;
    connection.busy_timeout(Duration::from_secs(2)).map_err(fail)?;
    connection.pragma_update(None, "cache_size", -256).map_err(fail)?;
    let found: i64 =
        connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(fail)?;
    match found {
        VERSION => Ok(connection),
        0 => Err(ReadError::Missing(path.to_owned())),
        found => Err(ReadError::Version { path: path.to_owned(), found }),
    }
}

fn readings(
    connection: &Connection,
    vm: &VmName,
    wall_ms: &Range<u64>,
    limit: usize,
) -> rusqlite::Result<Vec<HistoryRow>> {
    let mut rows: Vec<HistoryRow> = Vec::new();
    // The finest step comes first; coarser steps add earlier rows.
    for step_s in [FINEST_S, COARSE_S[0], COARSE_S[1]] {
        let before_ms = rows.last().map_or(i64::MAX, |row| signed(row.wall_ms));
        let wanted = limit.saturating_sub(rows.len());
        let mut statement = connection.prepare(
            "SELECT wall_ms, used, balloon, target, swap_per_s, working_set, \
             shared, saved, merged, scan_rate, freed, freed_taken, in_repositories, \
             disk_read_us, resident, paged_out, refaults_per_s FROM reading \
             WHERE step_s = ?1 AND vm = ?2 AND wall_ms >= ?3 AND wall_ms <= ?4 - ?1 * 1000 \
             AND wall_ms < ?6 ORDER BY wall_ms DESC LIMIT ?5",
        )?;
        let found = statement.query_map(
            params![
                step_s,
                vm.as_str(),
                signed(wall_ms.start),
                before_ms,
                signed(wanted as u64),
                signed(wall_ms.end)
            ],
            |row| {
                let entry = Entry::Reading {
                    step_s,
                    used: size(row, 1)?,
                    balloon: size(row, 2)?,
                    target: size(row, 3)?,
                    swap_per_s: size(row, 4)?,
                    working_set: size(row, 5)?,
                    shared: size(row, 6)?,
                    saved: size(row, 7)?,
                    merged: size(row, 8)?,
                    scan_rate: row.get::<_, Option<u32>>(9)?.map(PagesPerMs),
                    freed: size(row, 10)?,
                    freed_taken: size(row, 11)?,
                    in_repositories: size(row, 12)?,
                    disk_read_us: row.get(13)?,
                    resident: size(row, 14)?,
                    paged_out: size(row, 15)?,
                    refaults_per_s: row.get(16)?,
                };
                Ok(HistoryRow { wall_ms: unsigned(row, 0)?, entry })
            },
        )?;
        for row in found {
            rows.push(row?);
        }
    }
    rows.reverse();
    Ok(rows)
}

fn changes(
    connection: &Connection,
    vm: &VmName,
    wall_ms: &Range<u64>,
    limit: usize,
) -> rusqlite::Result<Vec<HistoryRow>> {
    let select = "SELECT wall_ms, mode, is_take, target, reason, words FROM change";
    latest(connection, select, (vm, wall_ms, limit), |row| {
        Ok(Entry::Change {
            mode: serde_json::from_str(&row.get::<_, String>(1)?).unwrap_or_default(),
            is_take: row.get(2)?,
            target: Bytes(unsigned(row, 3)?),
            reason: serde_json::from_str(&row.get::<_, String>(4)?).ok(),
            words: row.get(5)?,
        })
    })
}

fn moves(
    connection: &Connection,
    vm: &VmName,
    wall_ms: &Range<u64>,
    limit: usize,
) -> rusqlite::Result<Vec<HistoryRow>> {
    let select = "SELECT wall_ms, words FROM moved";
    latest(connection, select, (vm, wall_ms, limit), |row| Ok(Entry::Move { words: row.get(1)? }))
}

/// A VM's latest rows in a table, oldest first. `select` begins with `wall_ms`.
fn latest(
    connection: &Connection,
    select: &str,
    (vm, wall_ms, limit): (&VmName, &Range<u64>, usize),
    entry: impl Fn(&Row<'_>) -> rusqlite::Result<Entry>,
) -> rusqlite::Result<Vec<HistoryRow>> {
    let mut statement = connection.prepare(&format!(
        "{select} WHERE vm = ?1 AND wall_ms >= ?2 AND wall_ms < ?3 \
         ORDER BY wall_ms DESC, id DESC LIMIT ?4"
    ))?;
    let (since, until) = (signed(wall_ms.start), signed(wall_ms.end));
    let found = statement
        .query_map(params![vm.as_str(), since, until, signed(limit as u64)], |row| {
            Ok(HistoryRow { wall_ms: unsigned(row, 0)?, entry: entry(row)? })
        })?;
    let mut rows: Vec<HistoryRow> = found.collect::<Result<_, _>>()?;
    rows.reverse();
    Ok(rows)
}

fn unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or(0))
}

fn size(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Bytes>> {
    let value: Option<i64> = row.get(column)?;
    Ok(value.map(|n| Bytes(u64::try_from(n).unwrap_or(0))))
}
