//! The changes that Overbook has made to a VM, and their undoing.
//!
//! There are two: the interval at which QEMU polls the guest's statistics, and the balloon's
//! size. Before the first change of each, the original goes into an [`UndoRecord`] that is on
//! disk *before* the change is made; if it cannot be written, the change is not made. A restarted
//! daemon finds the record by the VM's incarnation, so it never takes its own settings for the
//! originals. The process that has restored a setting removes its record before it does anything
//! else to the VM.
//!
//! The balloon's size is relative to the RAM that the VM had. The balloon is to hold again what
//! it held, and memory that was plugged since then belongs to the guest. At most the guest's free
//! memory is taken back of a grant: a guest without swap is never shrunk below the memory that it
//! uses ([`spare`]).
//!
//! Restoring works through a running daemon (the socket serves one client at a time) and without
//! one ([`restore_all`], for `ExecStopPost`). It is idempotent, and is never applied to another
//! incarnation of the VM.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::Path;

use futures_util::future::join_all;
use model::{Bytes, GuestStats, Millis, VmName};
use policy::tuning;
use serde_json::Value;

use super::guest_stats;
use super::identity;
use super::libvirt::{self, Domains, Restored};
use super::qmp::{QmpClient, QmpError};
use super::questions;
use super::ram;
use super::records::Records;
use crate::journal::UndoRecord;

/// Why nothing, or not everything, was restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// QEMU does not answer, or refuses.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The balloon must not change now.
    #[error(
        "it is being migrated: its balloon stays at {actual} instead of the original {original}"
    )]
    Migrating {
        /// The present size.
        actual: Bytes,
        /// The original size.
        original: Bytes,
    },
    /// libvirt does not answer, or refuses.
    #[error("{0}")]
    Libvirt(String),
    /// QEMU does not answer.
    #[error("QEMU does not answer")]
    Unreachable,
    /// The changed QEMU is alive, but does not answer at its socket.
    #[error("the QEMU that was changed still runs, but another process answers at its socket")]
    Another,
    /// The settings were restored, but the journal cannot be written.
    #[error("{done}; but it stays on record: {why}")]
    OnRecord {
        /// Description of the restored settings.
        done: String,
        /// Why the record cannot be removed.
        why: String,
    },
}

/// Result for a VM whose QEMU has ended.
pub(super) const GONE: &str = "its QEMU has ended, nothing is left to undo";

/// A VM and the result of its release.
pub type Released = (VmName, Result<Undone, RestoreError>);

/// Whether the originals are restored, or only what that would do is found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// They are restored.
    Now,
    /// Nothing is changed.
    DryRun,
}

/// The effect of a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undone {
    /// The restored settings in words.
    pub words: String,
    /// Memory that the balloon gives the guest.
    pub gives: Bytes,
}

impl Undone {
    pub(super) fn nothing(why: &str) -> Self {
        Self { words: why.to_owned(), gives: Bytes::ZERO }
    }

    pub(super) fn of(done: &[String], gives: Bytes) -> Self {
        match done {
            [] => Self::nothing("nothing had been changed"),
            done => Self { words: done.join(", "), gives },
        }
    }
}

/// Restores the settings in these records on the VMs behind their sockets, all at the same time,
/// and removes the records. Only to be called while no daemon is connected to these VMs.
pub async fn restore_all(records: &Records, all: &[UndoRecord], undo: Undo) -> Vec<Released> {
    let sockets: BTreeSet<&Path> =
        all.iter().filter_map(|record| libvirt::socket_in(&record.socket)).collect();
    // All domains share a connection.
    let domains: BTreeMap<&Path, Domains> =
        sockets.into_iter().map(|socket| (socket, Domains::new(socket.to_owned()))).collect();
    let restored = join_all(all.iter().map(|record| {
        let socket = libvirt::socket_in(&record.socket);
        restore_at(records, record, undo, socket.and_then(|socket| domains.get(socket)))
    }));
    let connected = async {
        join_all(domains.values().map(libvirt::run)).await;
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        restored = restored => restored,
        never = connected => match never {},
    }
}

/// The same for one record; `domains`: the connection for a record of a domain.
pub(super) async fn restore_at(
    records: &Records,
    record: &UndoRecord,
    undo: Undo,
    domains: Option<&Domains>,
) -> Released {
    let outcome = if libvirt::is_place(&record.socket) {
        let restored = match domains {
            Some(domains) => libvirt::restore(domains, record, undo).await,
            None => Err(RestoreError::Unreachable),
        };
        match restored {
            Ok(Restored { mut done, has_followed: false }) => {
                done.words += "; it stays on record until the guest has followed";
                return (record.vm.clone(), Ok(done));
            }
            restored => restored.map(|restored| restored.done),
        }
    } else {
        match QmpClient::connect(&record.socket).await {
            Ok(mut client) => restore(&mut client, &record.socket, record, undo).await,
            // A socket can be removed while its QEMU runs.
            Err(error) => {
                let may_be_gone = error.is_dead_socket() || matches!(error, QmpError::Ended(_));
                let is_gone = may_be_gone && identity::has_ended(record.incarnation);
                if is_gone { Ok(Undone::nothing(GONE)) } else { Err(error.into()) }
            }
        }
    };
    (record.vm.clone(), strike_out(records, record.clone(), outcome, undo).await)
}

/// Removes the record of settings that were restored.
pub(super) async fn strike_out(
    records: &Records,
    record: UndoRecord,
    outcome: Result<Undone, RestoreError>,
    undo: Undo,
) -> Result<Undone, RestoreError> {
    let done = outcome?;
    if undo == Undo::DryRun {
        return Ok(done);
    }
    match records.strike(record).await {
        Ok(()) => Ok(done),
        Err(why) => Err(RestoreError::OnRecord { done: done.words, why }),
    }
}

/// Restores the settings in `record`.
pub(super) async fn restore(
    client: &mut QmpClient,
    socket: &Path,
    record: &UndoRecord,
    undo: Undo,
) -> Result<Undone, RestoreError> {
    let life = identity::of(client, socket).map(|peer| peer.incarnation);
    if life.as_ref().ok() != Some(&record.incarnation) {
        // The record stays as long as its QEMU may be alive.
        return match life {
            _ if !identity::has_ended(record.incarnation) => Err(RestoreError::Another),
            Err(error) => Err(QmpError::Ended(error).into()),
            Ok(_) => Ok(Undone::nothing("its QEMU was restarted since, nothing is left to undo")),
        };
    }
    let (mut done, mut gives) = (Vec::new(), Bytes::ZERO);
    let device = questions::find_balloon(client).await?;
    let spare = match &device {
        Some(device) if record.balloon.is_some() => spare(client, device).await?,
        _ => None,
    };
    if let (Some(seconds), Some(device)) = (record.stats_interval_s, &device) {
        if undo == Undo::Now {
            client.execute(questions::set_polling(device, seconds)).await?;
        }
        let off = if seconds == 0 { " (off)" } else { "" };
        done.push(format!("statistics every {seconds} s{off} again"));
    }
    if let Some(recorded) = record.balloon {
        let migration = questions::migration(client).await?;
        let (ram, actual) = ram::with_balloon(client).await?;
        let original = original(recorded, record.ram, ram.reach);
        if migration != model::Migration::None {
            return Err(RestoreError::Migrating { actual, original });
        }
        let least = actual.minus(spare.unwrap_or_default());
        let size = original.max(least);
        let is_all = size >= ram.reach;
        if undo == Undo::Now {
            client.execute(questions::set_balloon((!is_all).then_some(size))).await?;
        }
        done.push(told(size, original));
        gives = size.minus(actual);
    }
    Ok(Undone::of(&done, gives))
}

/// Describes the new size of a balloon.
pub(super) fn told(size: Bytes, original: Bytes) -> String {
    if size > original {
        format!("balloon to {size} instead of the original {original}: its guest uses that")
    } else {
        format!("balloon back to {size}")
    }
}

/// The original balloon size, adjusted for RAM plugged since then: `recorded` was the size when
/// the VM had `then` of RAM, and it has `now`.
pub(super) fn original(recorded: Bytes, then: Option<Bytes>, now: Bytes) -> Bytes {
    then.map_or(recorded, |then| now.minus(then.minus(recorded)))
}

/// Memory that a guest can lose without harm, according to its statistics; `None`: not known. A
/// guest that has swapped can swap the rest.
async fn spare(client: &mut QmpClient, device: &str) -> Result<Option<Bytes>, QmpError> {
    let answer = match client.execute(questions::property(device, "guest-stats")).await {
        Err(error) if error.is_fatal() => return Err(error),
        answer => answer.ok(),
    };
    Ok(answer.and_then(|answer| spare_in(&answer, sys::clock::wall_now_ms())))
}

fn spare_in(answer: &Value, wall_ms: u64) -> Option<Bytes> {
    let (stats, date) = guest_stats::parse(answer).ok()?;
    spare_of(&stats, date, wall_ms)
}

/// Memory that a guest with these statistics can lose; their date is in epoch seconds.
pub(super) fn spare_of(stats: &GuestStats, date: u64, wall_ms: u64) -> Option<Bytes> {
    let is_fresh = Millis(date.saturating_mul(1000).abs_diff(wall_ms)) <= tuning::STALE_AFTER;
    let GuestStats { total, available, free, swap_out, .. } = *stats;
    if swap_out.is_some_and(|swapped| !swapped.is_zero()) {
        return Some(Bytes(u64::MAX));
    }
    let margin = total?.percent(tuning::MARGIN_PERCENT).max(tuning::MARGIN_MIN);
    is_fresh.then_some(available.or(free)?.minus(margin))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn what_was_plugged_since_is_the_guests_and_what_was_unplugged_is_not() {
        let of = |recorded, then, now| {
            original(Bytes::mib(recorded), Some(Bytes::mib(then)), Bytes::mib(now))
        };
        assert_eq!(of(512, 512, 1024), Bytes::mib(1024));
        assert_eq!(of(1024, 1024, 512), Bytes::mib(512));
        assert_eq!(of(384, 512, 1024), Bytes::mib(896), "its balloon held 128 MiB");
        assert_eq!(original(Bytes::mib(384), None, Bytes::mib(512)), Bytes::mib(384));
    }

    /// The record names this process, which is not QEMU: another incarnation answers at the
    /// socket.
    #[tokio::test]
    async fn a_record_of_a_qemu_that_lives_is_kept_whoever_answers_at_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (read, mut write) = stream.into_split();
                write.write_all(b"{\"QMP\": {}}\n").await.unwrap();
                let mut line = String::new();
                tokio::io::BufReader::new(read).read_line(&mut line).await.unwrap();
                let id = &serde_json::from_str::<Value>(&line).unwrap()["id"];
                let answer = json!({"return": {}, "id": id}).to_string() + "\n";
                write.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let own = identity::of_process(sys::process::Identity::own().unwrap());
        let restored = async |life| {
            let undo = UndoRecord::untouched("web-1".into(), socket.clone(), life);
            let mut client = QmpClient::connect(&socket).await.unwrap();
            restore(&mut client, &socket, &undo, Undo::Now).await
        };
        assert!(matches!(restored(own).await, Err(RestoreError::Another)));
        let ended = restored(own + (1 << 22)).await.unwrap();
        assert!(ended.words.contains("was restarted since"), "{ended:?}");
    }

    #[test]
    fn a_guest_without_swap_spares_what_it_has_available_and_one_that_is_silent_nothing() {
        let spare = |date: u64, swap_out: u64| {
            let stats = json!({
                "stat-total-memory": 400 << 20,
                "stat-available-memory": 140 << 20,
                "stat-swap-out": swap_out,
            });
            spare_in(&json!({"stats": stats, "last-update": date}), 1_000_000)
        };
        assert_eq!(spare(999, 0), Some(Bytes::mib(100)), "beyond a tenth of its memory");
        assert_eq!(spare(900, 0), None, "said too long ago");
        assert_eq!(spare(999, 4096), Some(Bytes(u64::MAX)));
        assert_eq!(spare_in(&json!({}), 1_000_000), None);
    }
}
