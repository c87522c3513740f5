//! The record of the changes that Overbook must undo, so that `release` works after any crash and
//! without a daemon.
//!
//! **Problem.** A balloon keeps its size when the daemon dies. The next process must know the
//! size from before Overbook changed it, and QEMU cannot tell.
//!
//! **Idea.** One small JSON file, rewritten as a whole: written to a temporary file, synced,
//! renamed over the old one, and the directory synced. It is separate from the history, so that a
//! damaged history never prevents a release.
//!
//! **Invariants.** A record is durable *before* the first action on its VM: a caller that gets an
//! error from [`Journal::record`] must not act. A recorded original is never replaced in the same
//! incarnation of a VM, so a restarted daemon cannot take its own settings for the original.
//! After a failed write the journal still has its old content.
//!
//! In addition to the VMs' records there may be one of the host: KSM's settings ([`KsmRecord`]).
//!
//! **Leaves out.** Undoing, and knowing which VMs are gone: the caller compares incarnations.

mod ksm;

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use model::{Bytes, VmName};
use serde::{Deserialize, Serialize};

pub use ksm::KsmRecord;

/// The file's name within the state directory.
pub const FILE_NAME: &str = "undo.json";
const VERSION: u32 = 1;
/// A record takes some 200 bytes; Overbook does not write larger files.
const MOST_BYTES: u64 = 16 << 20;

/// The settings of one VM, in one incarnation, before Overbook changed them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoRecord {
    /// The QMP socket through which they were changed.
    pub socket: PathBuf,
    /// The VM's name, for messages.
    pub vm: VmName,
    /// The VM's incarnation: after a restart of QEMU there is nothing to undo.
    pub incarnation: u64,
    /// The balloon's size; `None`: not changed.
    pub balloon: Option<Bytes>,
    /// The RAM that the VM had then, which DIMMs may have changed since. `None`: not changed, or
    /// written by a version that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<Bytes>,
    /// The polling interval of the guest's statistics in seconds, 0 for off; `None`: not changed.
    pub stats_interval_s: Option<u64>,
}

impl UndoRecord {
    /// The record of a VM that was not changed yet.
    #[must_use]
    pub const fn untouched(vm: VmName, socket: PathBuf, incarnation: u64) -> Self {
        Self { socket, vm, incarnation, balloon: None, ram: None, stats_interval_s: None }
    }

    /// Whether nothing was changed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.balloon.is_none() && self.stats_interval_s.is_none()
    }
}

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The operating system refused.
    #[error("{path}: {source}; without this record nothing is touched")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A value could not be read back (a path that is not UTF-8, a balloon of size zero).
    #[error("{path} cannot be put on record ({why}); it is not touched")]
    Unwritable {
        /// The VM's socket.
        path: PathBuf,
        /// The value that cannot be written.
        why: String,
    },
}

/// The file. A newer release may have added keys, which an older one leaves out after a downgrade.
#[derive(Serialize, Deserialize)]
struct JournalContent {
    version: u32,
    vms: Vec<UndoRecord>,
    /// Absent in journals of earlier versions, and while there is nothing to undo.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ksm: Option<KsmRecord>,
}

/// All changes to be undone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct OnRecord {
    vms: BTreeMap<PathBuf, UndoRecord>,
    ksm: Option<KsmRecord>,
}

/// The journal of one state directory. Its owner holds that directory's lock.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    on_record: OnRecord,
    set_aside: Option<String>,
}

impl Journal {
    /// Reads the journal in `directory`; without a file there is nothing to undo. An invalid file
    /// is renamed, and [`Journal::set_aside`] reports that.
    ///
    /// # Errors
    /// The file exists and cannot be read, or is invalid and cannot be renamed.
    pub fn open(directory: &Path) -> Result<Self, JournalError> {
        let path = directory.join(FILE_NAME);
        let fail = |source| JournalError::Io { path: path.clone(), source };
        let mut journal = Self {
            directory: directory.to_owned(),
            on_record: OnRecord::default(),
            set_aside: None,
        };
        let Some(bytes) = read_bounded(&path).map_err(fail)? else { return Ok(journal) };
        match parse(&bytes) {
            Ok(on_record) => journal.on_record = on_record,
            Err(why) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let aside = directory.join(format!("{FILE_NAME}.unusable-{}", now.as_millis()));
                fs::rename(&path, &aside).map_err(fail)?;
                journal.set_aside = Some(format!(
                    "{} makes no sense ({why}) and was renamed to {}: what was changed before cannot be \
                     undone automatically; compare the VMs' balloons with their RAM, and look at \
                     /sys/kernel/mm/ksm",
                    path.display(),
                    aside.display()
                ));
            }
        }
        Ok(journal)
    }

    /// The report on an invalid journal file that was renamed.
    #[must_use]
    pub fn set_aside(&self) -> Option<&str> {
        self.set_aside.as_deref()
    }

    /// The changes on VMs to be undone.
    pub fn records(&self) -> impl Iterator<Item = &UndoRecord> {
        self.on_record.vms.values()
    }

    /// The original settings of the VM behind `socket`, in this incarnation.
    #[must_use]
    pub fn get(&self, socket: &Path, incarnation: u64) -> Option<&UndoRecord> {
        self.on_record.vms.get(socket).filter(|record| record.incarnation == incarnation)
    }

    /// Makes the records durable; values already recorded of the same incarnation stay as they
    /// are. Returns at once if there is no change.
    ///
    /// # Errors
    /// The records cannot be made durable. The VMs must then not be changed.
    pub fn record(&mut self, records: &[UndoRecord]) -> Result<(), JournalError> {
        let mut next = self.on_record.clone();
        for new in records {
            if let Err(why) = check(new) {
                return Err(JournalError::Unwritable { path: new.socket.clone(), why });
            }
            let mut merged = new.clone();
            if let Some(old) = self.get(&new.socket, new.incarnation) {
                if old.balloon.is_some() {
                    (merged.balloon, merged.ram) = (old.balloon, old.ram);
                }
                merged.stats_interval_s = old.stats_interval_s.or(new.stats_interval_s);
            }
            next.vms.insert(new.socket.clone(), merged);
        }
        self.replace(next)
    }

    /// Removes a record that has been undone, or whose VM is gone. A newer incarnation's record
    /// stays.
    ///
    /// # Errors
    /// The removal cannot be made durable; the record then stays, and undoing it again is
    /// harmless.
    pub fn forget(&mut self, socket: &Path, incarnation: u64) -> Result<(), JournalError> {
        let mut next = self.on_record.clone();
        if self.get(socket, incarnation).is_some() {
            next.vms.remove(socket);
        }
        self.replace(next)
    }

    /// The changes of KSM to be undone.
    #[must_use]
    pub const fn ksm(&self) -> Option<&KsmRecord> {
        self.on_record.ksm.as_ref()
    }

    /// Replaces the record of KSM; `None` removes it.
    ///
    /// # Errors
    /// The record cannot be made durable. KSM must then not be changed.
    pub fn set_ksm(&mut self, ksm: Option<KsmRecord>) -> Result<(), JournalError> {
        self.replace(OnRecord { ksm, ..self.on_record.clone() })
    }

    fn replace(&mut self, next: OnRecord) -> Result<(), JournalError> {
        if next == self.on_record {
            return Ok(());
        }
        let path = self.directory.join(FILE_NAME);
        let vms = next.vms.values().cloned().collect();
        let content = JournalContent { version: VERSION, vms, ksm: next.ksm.clone() };
        let text = serde_json::to_vec_pretty(&content).map_err(|error| {
            JournalError::Unwritable { path: path.clone(), why: error.to_string() }
        })?;
        write_durably(&self.directory, &path, &text)
            .map_err(|source| JournalError::Io { path, source })?;
        self.on_record = next;
        Ok(())
    }
}

fn read_bounded(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn parse(bytes: &[u8]) -> Result<OnRecord, String> {
    if bytes.len() as u64 > MOST_BYTES {
        return Err(format!("it is larger than {}", Bytes(MOST_BYTES)));
    }
    let content: JournalContent =
        serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if content.version != VERSION {
        return Err(format!("it has version {}; this Overbook knows {VERSION}", content.version));
    }
    content.ksm.as_ref().map_or(Ok(()), KsmRecord::check)?;
    let mut vms = BTreeMap::new();
    for record in content.vms {
        check(&record)?;
        let socket = record.socket.clone();
        if vms.insert(socket.clone(), record).is_some() {
            return Err(format!("socket {socket:?} stands in it twice"));
        }
    }
    Ok(OnRecord { vms, ksm: content.ksm })
}

/// Checks a record, also before it is written: a record that a lying QEMU has made invalid must
/// not make all others unreadable.
fn check(record: &UndoRecord) -> Result<(), String> {
    let socket = &record.socket;
    if socket.to_str().is_none() {
        return Err("its path is not UTF-8".to_owned());
    }
    if !socket.is_absolute() {
        return Err(format!("socket {socket:?} is no absolute path"));
    }
    if record.balloon == Some(Bytes::ZERO) {
        return Err(format!("the balloon size of {socket:?} is zero"));
    }
    Ok(())
}

fn write_durably(directory: &Path, path: &Path, text: &[u8]) -> io::Result<()> {
    let temporary = directory.join(format!("{FILE_NAME}.tmp"));
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(text)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(directory)?.sync_all()
    };
    write().inspect_err(|_| {
        // Frees the space; if even this fails there is nothing more to do.
        let _ = fs::remove_file(&temporary);
    })
}

#[cfg(test)]
mod tests;
