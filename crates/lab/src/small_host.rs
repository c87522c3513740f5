//! A host with little memory: a memory cgroup with its guests, and whatever else is its own.
//!
//! **Problem.** A cgroup counts other memory than a host has. What the host keeps compressed
//! (by zswap, under cgroups of version 1) counts for nobody. And a QEMU that emulates has tens of
//! megabytes of translated code, which one with KVM has not. **Idea.** A limit that follows: what
//! the host has, less what is compressed of guests, and with what QEMUs have resident beside them.
//! Then pages that go to compressed memory free what they no longer take, and nobody gains or loses
//! by swapping a QEMU's own.
//!
//! A limit that cannot be reached at once stays where it was until the next look; how far the host
//! was above what it has for that reason is remembered.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use model::Bytes;
use sys::memory_of::{Counters, Overhead};

use crate::lab::{Lab, LabError};
use crate::memory_group::MemoryGroup;
use crate::zswap::Zswap;

/// How often the limit is set anew.
const PERIOD: Duration = Duration::from_millis(100);

/// Such a host; dropping it removes the cgroup, whose processes must have ended by then.
pub struct SmallHost {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    group: MemoryGroup,
    memory: Bytes,
    beside: Mutex<Beside>,
    latest: Mutex<Look>,
    most_above: AtomicU64,
    stop: AtomicBool,
}

/// What QEMUs have beside their guests, as it was measured last.
#[derive(Debug, Default)]
struct Beside {
    /// The most of each, by process.
    most: BTreeMap<u32, Bytes>,
    resident: Bytes,
    /// What has been swapped of it: what it lacks of the most.
    swapped: Bytes,
    /// What has been swapped of all.
    all_swapped: Bytes,
}

/// Where its memory is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Look {
    /// All in the cgroup, without what QEMUs have beside their guests.
    pub used: Bytes,
    /// What zswap has of guests.
    pub compressed: Bytes,
}

impl SmallHost {
    /// With so much memory for guests.
    ///
    /// # Errors
    /// When this is not root, or the host has no memory controller.
    pub fn new(name: &str, memory: Bytes) -> Result<Self, LabError> {
        let group = MemoryGroup::new(name)?;
        group.set_limit(memory)?;
        let shared = Arc::new(Shared {
            group,
            memory,
            beside: Mutex::default(),
            latest: Mutex::default(),
            most_above: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("small-host".into()).spawn(move || {
            while !its.stop.load(Ordering::Relaxed) {
                its.look(Zswap::pool().unwrap_or_default());
                std::thread::sleep(PERIOD);
            }
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The cgroup, for [`MachineSpec::cgroup`](crate::MachineSpec).
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.shared.group.dir()
    }

    /// Has this process in it.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn take_in(&self, pid: u32) -> Result<(), LabError> {
        self.shared.group.take_in(pid)
    }

    /// Measures what QEMUs have beside their guests, some milliseconds for each; so many `more` are
    /// to come, which will have as much.
    pub fn measure(&self, lab: &Lab, more: usize) {
        let (mut found, mut all_swapped) = (BTreeMap::new(), Bytes::ZERO);
        for machine in lab.machines() {
            let (pid, ram) = (machine.process().pid, machine.spec().memory_max);
            // One that is dead has none.
            let Ok(counters) = Counters::of(pid) else { continue };
            let Ok(overhead) = Overhead::measure(pid, &[ram]) else { continue };
            all_swapped = all_swapped.plus(counters.swapped);
            found.insert(pid, overhead.own);
        }
        let mut beside = self.shared.beside();
        let mut swapped = Bytes::ZERO;
        for (pid, own) in &found {
            let most = beside.most.entry(*pid).or_default();
            *most = (*most).max(*own);
            swapped = swapped.plus(most.minus(*own));
        }
        let (count, all) = (found.len() as u64, found.into_values().sum::<Bytes>());
        beside.resident = all.share(count + more as u64, count);
        (beside.swapped, beside.all_swapped) = (swapped, all_swapped);
    }

    /// Where its memory was a moment ago.
    #[must_use]
    pub fn latest(&self) -> Look {
        *self.shared.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far it was above what it has, at most.
    #[must_use]
    pub fn most_above(&self) -> Bytes {
        Bytes(self.shared.most_above.load(Ordering::Relaxed))
    }
}

impl Shared {
    fn look(&self, compressed: Bytes) {
        let (own, compressed) = {
            let beside = self.beside();
            let of_guests = beside.all_swapped.minus(beside.swapped);
            let is_any = !beside.all_swapped.is_zero();
            let part = compressed.share(of_guests.0, beside.all_swapped.0);
            (beside.resident, if is_any { part } else { compressed })
        };
        // It may be impossible just now.
        let _ = self.group.set_limit(self.memory.plus(own).minus(compressed));
        let used = self.group.usage().unwrap_or_default().minus(own);
        let above = used.plus(compressed).minus(self.memory);
        self.most_above.fetch_max(above.0, Ordering::Relaxed);
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Look { used, compressed };
    }

    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.beside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SmallHost {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SmallHost").field("latest", &self.latest()).finish_non_exhaustive()
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
