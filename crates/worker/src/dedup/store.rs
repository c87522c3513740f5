//! The group's pool: its file, its slots, and the holders of slots that are not workable VMs.
//!
//! **Problem.** A worker may end at any instant, but its pool must not, because guests map it.
//! The next worker does not know what was shared. A slot that is reused while a guest still maps
//! it would expose another guest's content.
//!
//! **Idea.** The kernel knows the sharers ([`sys::pool_maps`]). A new worker takes over the pool
//! and treats all its content as in use. It reads the sharers of each VM as soon as the VM's shim
//! has answered, because then no request of the old worker is in flight there. When every process
//! that maps the pool has been read or has ended, slots without sharers are emptied.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

use pages::dedup::{Book, Pool};
use rustix::io::Errno;
use sys::pool_file::{AdoptError, PoolFile};
use sys::pool_maps::{self, FileId, Mapping};
use sys::process;

/// The capacity of a pool: 64 GiB of content. It takes addresses, but no memory.
pub const SLOTS: u32 = 1 << 24;
const _: () = assert!(SLOTS <= Book::MOST_SLOTS);

/// The most files with the pool's name that are distinguished: a second one is made by a QEMU, to
/// hide the real one.
const MOST_CALLED_SO: usize = 64;

/// A pool.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) file: PoolFile,
    pub(super) id: FileId,
    pub(super) slots: Pool,
    /// Filled slots that are not read yet.
    unread: Vec<Range<u32>>,
    /// Filled slots of the adopted pool: kept until all their sharers are known.
    past: Vec<u32>,
    holders: BTreeMap<u32, Holder>,
}

/// A process that is not workable now, and the slots that it may share.
#[derive(Debug)]
struct Holder {
    process: OwnedFd,
    /// `None`: unknown.
    slots: Option<Vec<u32>>,
}

impl Store {
    /// Takes over the pool of this name of which these processes map most; `None`: there is none.
    ///
    /// # Errors
    /// When another worker has it, or the kernel's.
    pub(super) fn take_over(name: &str, pids: &[u32]) -> Result<Option<Self>, AdoptError> {
        let mut found = most_mapped(name, pids).into_iter();
        let file = found.find_map(|(pid, mapping)| match PoolFile::adopt(pid, &mapping, SLOTS) {
            Err(error @ AdoptError::InUse) => Some(Err(error)),
            // Any process can make a file of this name.
            Err(AdoptError::Foreign(_) | AdoptError::System(_)) => None,
            Ok(file) => Some(Ok(file)),
        });
        let Some(file) = file.transpose()? else { return Ok(None) };
        let mut store = Self::with(file)?;
        for holder in pool_maps::holders(store.id) {
            if let Ok(process) = process::open_pidfd(holder)
                && holder != std::process::id()
            {
                store.holders.insert(holder, Holder { process, slots: None });
            }
        }
        // The takeover has failed unless this process alone can write to the file. So no other
        // process fills a slot after this list was read.
        store.unread = store.file.filled()?;
        for slot in store.unread.iter().cloned().flatten() {
            if store.slots.adopt(slot) {
                store.past.push(slot);
            }
        }
        Ok(Some(store))
    }

    /// Makes an empty pool.
    ///
    /// # Errors
    /// The kernel's, if there is no memory for it.
    pub(super) fn create(name: &str) -> Result<Self, Errno> {
        Self::with(PoolFile::create(name, SLOTS)?)
    }

    fn with(file: PoolFile) -> Result<Self, Errno> {
        Ok(Self {
            id: file.id()?,
            file,
            slots: Pool::new(SLOTS),
            unread: Vec::new(),
            past: Vec::new(),
            holders: BTreeMap::new(),
        })
    }

    /// The next slots whose content is to be read, at most `most`; they then count as read.
    pub(super) fn next_unread(&mut self, most: u32) -> Option<Range<u32>> {
        let range = self.unread.last_mut()?;
        let next = range.start..range.end.min(range.start.saturating_add(most));
        range.start = next.end;
        if range.start == range.end {
            self.unread.pop();
        }
        Some(next)
    }

    /// Records a process that is no longer workable, and the slots that it shares or will share.
    pub(super) fn hold(&mut self, pid: u32, process: OwnedFd, slots: Vec<u32>) {
        self.holders.insert(pid, Holder { process, slots: Some(slots) });
    }

    /// Removes a process's holder entry: its sharers are now known. Returns slots to leave.
    #[must_use]
    pub(super) fn met(&mut self, pid: u32) -> Vec<u32> {
        let slots = self.holders.remove(&pid).and_then(|holder| holder.slots).unwrap_or_default();
        self.with_past(slots)
    }

    /// Removes processes that have ended. Returns slots to leave.
    #[must_use]
    pub(super) fn ended(&mut self) -> Vec<u32> {
        let mut left = Vec::new();
        self.holders.retain(|_, holder| {
            let has_ended = process::has_ended(&holder.process);
            if has_ended {
                left.extend(holder.slots.take().unwrap_or_default());
            }
            !has_ended
        });
        self.with_past(left)
    }

    fn with_past(&mut self, mut left: Vec<u32>) -> Vec<u32> {
        if self.holders.values().all(|holder| holder.slots.is_some()) {
            left.append(&mut self.past);
        }
        left
    }
}

/// The pools of this name that these processes map, in descending order of the mapped size, each
/// with one of its mappings.
fn most_mapped(name: &str, pids: &[u32]) -> Vec<(u32, Mapping)> {
    let mut found: BTreeMap<FileId, (u64, u32, Mapping)> = BTreeMap::new();
    for &pid in pids {
        // A process may have ended meanwhile; then its mappings cannot be read.
        let _ = pool_maps::each_mapping(pid, |mapping| {
            let is_known = found.len() < MOST_CALLED_SO || found.contains_key(&mapping.file);
            if mapping.name == name && is_known {
                let len = mapping.range.len;
                found.entry(mapping.file).or_insert((0, pid, mapping)).0 += len;
            }
            true
        });
    }
    let mut found: Vec<_> = found.into_values().collect();
    found.sort_by_key(|(len, ..)| std::cmp::Reverse(*len));
    found.into_iter().map(|(_, pid, mapping)| (pid, mapping)).collect()
}
