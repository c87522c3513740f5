//! A host with little memory: a memory cgroup with its guests and all else that belongs to the
//! host.
//!
//! **Problem.** A cgroup does not count the memory that a host has. Compressed memory (of zswap,
//! under cgroups of version 1) is charged to no group. And an emulating QEMU has tens of
//! megabytes of translated code, which one with KVM does not have. **Idea.** A limit that is
//! adjusted: the host's memory, less the guests' compressed memory, plus the resident memory of
//! the QEMUs besides their guests. A page that is compressed then frees only the difference, and
//! swapping a QEMU's own memory changes nothing.
//!
//! When the kernel cannot reach a limit at once, the limit stays until the next adjustment. The
//! most by which the host exceeded its memory for that reason is recorded.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::Bytes;
use sys::memory_of::{Counters, Overhead};

use crate::background::Background;
use crate::lab::{Lab, LabError};
use crate::memory_group::MemoryGroup;
use crate::zswap::Zswap;

/// Interval between adjustments of the limit.
const PERIOD: Duration = Duration::from_millis(100);

/// Such a host; dropping it removes the cgroup, whose processes must have ended by then.
pub struct SmallHost {
    shared: Arc<HostCounters>,
    _thread: Background<()>,
}

struct HostCounters {
    group: MemoryGroup,
    memory: Bytes,
    beside: Mutex<Beside>,
    latest: Mutex<Look>,
    most_above: AtomicU64,
}

/// Memory of QEMUs besides their guests, as measured last.
#[derive(Debug, Default)]
struct Beside {
    /// The largest resident size of each, by process.
    most: BTreeMap<u32, Bytes>,
    resident: Bytes,
    /// Swapped part of this memory: the difference to the largest resident size.
    swapped: Bytes,
    /// Swapped memory of the QEMUs and their guests.
    all_swapped: Bytes,
}

/// The use of its memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Look {
    /// Memory of the cgroup, without the QEMUs' own.
    pub used: Bytes,
    /// Memory of zswap for guests.
    pub compressed: Bytes,
}

impl SmallHost {
    /// Makes one with `memory` for guests.
    ///
    /// # Errors
    /// When this is not root, or the host has no memory controller.
    pub fn new(name: &str, memory: Bytes) -> Result<Self, LabError> {
        let group = MemoryGroup::new(name)?;
        group.set_limit(memory)?;
        let shared = Arc::new(HostCounters {
            group,
            memory,
            beside: Mutex::default(),
            latest: Mutex::default(),
            most_above: AtomicU64::new(0),
        });
        let its = Arc::clone(&shared);
        let thread = Background::start("small-host", move |stop| {
            while !stop.is_given() {
                its.look(Zswap::pool().unwrap_or_default());
                std::thread::sleep(PERIOD);
            }
        })?;
        Ok(Self { shared, _thread: thread })
    }

    /// The cgroup, for [`MachineSpec::cgroup`](crate::MachineSpec).
    pub fn dir(&self) -> &Path {
        self.shared.group.dir()
    }

    /// Moves this process into it.
    pub fn take_in(&self, pid: u32) -> Result<(), LabError> {
        self.shared.group.take_in(pid)
    }

    /// Measures the memory of QEMUs besides their guests, some milliseconds for each. `more`
    /// QEMUs of the same size are expected.
    pub fn measure(&self, lab: &Lab, more: usize) {
        let (mut found, mut all_swapped) = (BTreeMap::new(), Bytes::ZERO);
        for machine in lab.machines() {
            let (pid, ram) = (machine.process().pid, machine.spec().memory_max);
            // A dead QEMU has none.
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

    pub fn latest(&self) -> Look {
        *self.shared.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most by which it exceeded its memory.
    pub fn most_above(&self) -> Bytes {
        Bytes(self.shared.most_above.load(Ordering::Relaxed))
    }
}

impl HostCounters {
    fn look(&self, compressed: Bytes) {
        let (own, compressed) = {
            let beside = self.beside();
            let of_guests = beside.all_swapped.minus(beside.swapped);
            let is_any = !beside.all_swapped.is_zero();
            let part = compressed.share(of_guests.0, beside.all_swapped.0);
            (beside.resident, if is_any { part } else { compressed })
        };
        // The kernel may be unable to reclaim that much at present.
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
