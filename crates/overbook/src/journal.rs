//! The record of what Overbook must undo, so that `release` works after any crash and without a
//! daemon.
//!
//! **Problem.** A balloon keeps its size when the daemon dies. Whoever comes next must know what it
//! was before Overbook touched it; nobody can ask QEMU.
//!
//! **Idea.** One small JSON file, rewritten whole: written to a temporary file, synced, renamed
//! over the old one, and the directory synced. It stands apart from the history so that a damaged
//! history never costs the way back.
//!
//! **Invariants.** A record is durable *before* the first action on its VM: who gets an error from
//! [`Journal::record`] must not act. An original value that is on record is never replaced in the
//! same life of a VM, so a restarted daemon cannot take its own doing for the original. After a
//! failed write the journal says what it said before.
//!
//! **Leaves out.** Undoing, and knowing which VMs are gone: the caller compares incarnations.

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

/// The file's name within the state directory.
pub const FILE_NAME: &str = "undo.json";
const VERSION: u32 = 1;
/// A record takes some 200 bytes; a larger file was not written by us.
const MOST_BYTES: u64 = 16 << 20;

/// What one VM had before Overbook touched it, in one of its lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UndoRecord {
    /// The QMP socket through which it was touched.
    pub socket: PathBuf,
    /// Its name, for messages.
    pub vm: VmName,
    /// Its life: a restarted QEMU has nothing to undo.
    pub incarnation: u64,
    /// The balloon's size; `None`: not touched.
    pub balloon: Option<Bytes>,
    /// The polling interval of the guest's statistics in seconds, 0 for off; `None`: not touched.
    pub stats_interval_s: Option<u64>,
}

impl UndoRecord {
    /// Of a VM on which nothing was changed yet.
    #[must_use]
    pub const fn untouched(vm: VmName, socket: PathBuf, incarnation: u64) -> Self {
        Self { socket, vm, incarnation, balloon: None, stats_interval_s: None }
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
    #[error("{path}: {source}; without this record no VM is touched")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A value could not be read again (a path that is not UTF-8, a balloon of size zero).
    #[error("{path} cannot be put on record ({why}); it is not touched")]
    Unwritable {
        /// The VM's socket.
        path: PathBuf,
        /// What cannot be written.
        why: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    vms: Vec<UndoRecord>,
}

/// The journal of one state directory. Its owner holds the directory's [`crate::lock::StateLock`].
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    records: BTreeMap<PathBuf, UndoRecord>,
    set_aside: Option<String>,
}

impl Journal {
    /// Reads the journal in `directory`; no file means that there is nothing to undo. A file that
    /// makes no sense is renamed, and [`Journal::set_aside`] says so.
    ///
    /// # Errors
    /// When the file is there and cannot be read, or makes no sense and cannot be renamed.
    pub fn open(directory: &Path) -> Result<Self, JournalError> {
        let path = directory.join(FILE_NAME);
        let fail = |source| JournalError::Io { path: path.clone(), source };
        let mut journal =
            Self { directory: directory.to_owned(), records: BTreeMap::new(), set_aside: None };
        let Some(bytes) = read_bounded(&path).map_err(fail)? else { return Ok(journal) };
        match parse(&bytes) {
            Ok(records) => journal.records = records,
            Err(why) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let aside = directory.join(format!("{FILE_NAME}.unusable-{}", now.as_millis()));
                fs::rename(&path, &aside).map_err(fail)?;
                journal.set_aside = Some(format!(
                    "{} makes no sense ({why}) and was renamed to {}: what was changed before cannot be \
                     undone automatically; compare the VMs' balloons with their RAM",
                    path.display(),
                    aside.display()
                ));
            }
        }
        Ok(journal)
    }

    /// What became of a journal that could not be used.
    #[must_use]
    pub fn set_aside(&self) -> Option<&str> {
        self.set_aside.as_deref()
    }

    /// Everything that is to be undone.
    pub fn records(&self) -> impl Iterator<Item = &UndoRecord> {
        self.records.values()
    }

    /// What the VM behind `socket` had before it was touched in this life.
    #[must_use]
    pub fn get(&self, socket: &Path, incarnation: u64) -> Option<&UndoRecord> {
        self.records.get(socket).filter(|record| record.incarnation == incarnation)
    }

    /// Makes the records durable; what is already on record of the same life stays as it is.
    /// Returns at once when nothing is new.
    ///
    /// # Errors
    /// When it cannot be made durable. The VMs must then not be touched.
    pub fn record(&mut self, records: &[UndoRecord]) -> Result<(), JournalError> {
        let mut next = self.records.clone();
        for new in records {
            if let Err(why) = check(new) {
                return Err(JournalError::Unwritable { path: new.socket.clone(), why });
            }
            let mut merged = new.clone();
            if let Some(old) = self.get(&new.socket, new.incarnation) {
                merged.balloon = old.balloon.or(new.balloon);
                merged.stats_interval_s = old.stats_interval_s.or(new.stats_interval_s);
            }
            next.insert(new.socket.clone(), merged);
        }
        self.replace(next)
    }

    /// Strikes out what has been undone, or whose VM is gone. A newer life's record stays.
    ///
    /// # Errors
    /// When it cannot be made durable; the record then stays, and undoing it again is harmless.
    pub fn forget(&mut self, socket: &Path, incarnation: u64) -> Result<(), JournalError> {
        let mut next = self.records.clone();
        if self.get(socket, incarnation).is_some() {
            next.remove(socket);
        }
        self.replace(next)
    }

    fn replace(&mut self, next: BTreeMap<PathBuf, UndoRecord>) -> Result<(), JournalError> {
        if next == self.records {
            return Ok(());
        }
        let path = self.directory.join(FILE_NAME);
        let content = Content { version: VERSION, vms: next.values().cloned().collect() };
        let text = serde_json::to_vec_pretty(&content).map_err(|error| {
            JournalError::Unwritable { path: path.clone(), why: error.to_string() }
        })?;
        write_durably(&self.directory, &path, &text)
            .map_err(|source| JournalError::Io { path, source })?;
        self.records = next;
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

fn parse(bytes: &[u8]) -> Result<BTreeMap<PathBuf, UndoRecord>, String> {
    if bytes.len() as u64 > MOST_BYTES {
        return Err(format!("it is larger than {}", Bytes(MOST_BYTES)));
    }
    let content: Content = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if content.version != VERSION {
        return Err(format!("it has version {}; this Overbook knows {VERSION}", content.version));
    }
    let mut records = BTreeMap::new();
    for record in content.vms {
        check(&record)?;
        let socket = record.socket.clone();
        if records.insert(socket.clone(), record).is_some() {
            return Err(format!("socket {socket:?} stands in it twice"));
        }
    }
    Ok(records)
}

/// What a record must hold. Checked when it is written too: one that a lying QEMU has spoilt must not
/// cost all the others when they are read again.
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
        // Room for others; if even this fails there is nothing more to do about it.
        let _ = fs::remove_file(&temporary);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_process::on_small_disk;

    fn record(socket: &str, incarnation: u64, mib: u64) -> UndoRecord {
        UndoRecord {
            socket: socket.into(),
            vm: "web-1".into(),
            incarnation,
            balloon: Some(Bytes::mib(mib)),
            stats_interval_s: None,
        }
    }

    #[test]
    fn what_was_recorded_is_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        assert_eq!(journal.records().count(), 0);
        journal.record(&[record("/q/1", 7, 512), record("/q/2", 8, 256)]).unwrap();
        let again = Journal::open(dir.path()).unwrap();
        assert_eq!(again.get(Path::new("/q/1"), 7), Some(&record("/q/1", 7, 512)));
        assert_eq!(again.records().count(), 2);
        assert!(!dir.path().join("undo.json.tmp").exists());
    }

    #[test]
    fn an_original_is_never_replaced_within_a_life() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        let polling =
            UndoRecord { balloon: None, stats_interval_s: Some(0), ..record("/q/1", 7, 1) };
        journal.record(&[polling]).unwrap();
        journal.record(&[record("/q/1", 7, 512)]).unwrap();
        journal.record(&[record("/q/1", 7, 128)]).unwrap();
        let kept = journal.get(Path::new("/q/1"), 7).unwrap();
        assert_eq!((kept.balloon, kept.stats_interval_s), (Some(Bytes::mib(512)), Some(0)));
    }

    #[test]
    fn a_new_life_replaces_the_old_ones_record() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        journal.record(&[record("/q/1", 7, 512)]).unwrap();
        journal.record(&[record("/q/1", 9, 128)]).unwrap();
        assert_eq!(journal.get(Path::new("/q/1"), 7), None);
        journal.forget(Path::new("/q/1"), 7).unwrap();
        assert!(
            journal.get(Path::new("/q/1"), 9).is_some(),
            "forgetting the dead spares the living"
        );
        journal.forget(Path::new("/q/1"), 9).unwrap();
        assert_eq!(Journal::open(dir.path()).unwrap().records().count(), 0);
    }

    #[test]
    fn a_journal_that_makes_no_sense_is_set_aside_and_said() {
        let cases: [(&[u8], &str); 6] = [
            (b"", "EOF"),
            (b"\xff\x00garbage", "expected value"),
            (b"{\"version\":2,\"vms\":[]}", "version 2"),
            (b"{\"version\":1,\"vms\":[],\"x\":1}", "unknown field"),
            (
                br#"{"version":1,"vms":[{"socket":"q","vm":"a","incarnation":1,"balloon":1,"stats_interval_s":null}]}"#,
                "no absolute path",
            ),
            (
                br#"{"version":1,"vms":[{"socket":"/q","vm":"a","incarnation":1,"balloon":0,"stats_interval_s":null}]}"#,
                "is zero",
            ),
        ];
        for (bytes, why) in cases {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(FILE_NAME), bytes).unwrap();
            let mut journal = Journal::open(dir.path()).unwrap();
            let said = journal.set_aside().unwrap().to_owned();
            assert!(said.contains(why), "{said}");
            let kept = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
            assert!(kept.file_name().to_str().unwrap().starts_with("undo.json.unusable-"));
            assert_eq!(fs::read(kept.path()).unwrap(), bytes, "never deleted");
            journal.record(&[record("/q/1", 1, 1)]).unwrap();
        }
    }

    #[test]
    fn without_the_directory_nothing_may_be_touched() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("gone")).unwrap();
        let error = journal.record(&[record("/q/1", 7, 512)]).unwrap_err();
        assert!(error.to_string().contains("no VM is touched"), "{error}");
        assert_eq!(journal.records().count(), 0);
    }

    #[test]
    fn a_socket_that_cannot_be_written_down_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        let socket = std::ffi::OsString::from_vec(b"/q/\xff".to_vec()).into();
        let error = journal.record(&[UndoRecord { socket, ..record("/q", 1, 1) }]).unwrap_err();
        assert!(matches!(error, JournalError::Unwritable { .. }));
    }

    #[test]
    fn a_record_that_could_not_be_read_again_is_refused_and_spares_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        journal.record(&[record("/q/1", 7, 512)]).unwrap();
        for bad in [record("/q/2", 8, 0), record("q/2", 8, 1)] {
            let error = journal.record(&[bad]).unwrap_err();
            assert!(matches!(error, JournalError::Unwritable { .. }), "{error}");
        }
        let again = Journal::open(dir.path()).unwrap();
        assert_eq!((again.records().count(), again.set_aside()), (1, None));
    }

    #[test]
    fn a_full_disk_refuses_the_record_and_keeps_the_old_ones() {
        let name = "journal::tests::a_full_disk_refuses_the_record_and_keeps_the_old_ones";
        let Some(dir) = on_small_disk(name, "256k") else { return };
        let mut journal = Journal::open(&dir).unwrap();
        journal.record(&[record("/q/1", 7, 512)]).unwrap();
        let filler = dir.join("filler");
        fs::write(&filler, vec![1; 1 << 20]).unwrap_err();
        let many: Vec<_> = (0..300).map(|i| record(&format!("/q/many-{i}"), 1, 1)).collect();
        let error = journal.record(&many).unwrap_err();
        assert!(error.to_string().contains("No space left"), "{error}");
        assert_eq!(journal.records().count(), 1);
        assert_eq!(Journal::open(&dir).unwrap().records().count(), 1);
        fs::remove_file(filler).unwrap();
        journal.record(&many).unwrap();
        assert_eq!(Journal::open(&dir).unwrap().records().count(), 301);
    }
}
