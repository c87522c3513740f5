//! What was seen of the host and its VMs: plain data in which every reading carries its moment.
//!
//! A view never hides ignorance. What could not be read is `None` or a [`Link`] with its reason,
//! and what was read long ago says so: the policy decides what is too old. Everything here can be
//! written out and read back (`overbook plan --export`), which is how a puzzling host becomes a
//! test.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    Bytes, CacheReading, Cold, Dedup, DiskReading, FreePages, GroupName, KsmReading, Millis, Time,
    Tracking, VmName, WorkerReading,
};

/// Everything that is known about one host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostView {
    /// The host's own memory and CPUs.
    pub host: Option<Reading<HostReading>>,
    /// Every VM that was found, managed or not.
    pub vms: BTreeMap<VmName, VmView>,
    /// Each group's worker, where one is needed.
    #[serde(default)]
    pub workers: BTreeMap<GroupName, Reading<WorkerReading>>,
    /// Each group's second-level cache, where the process of its disks answers.
    #[serde(default)]
    pub caches: BTreeMap<GroupName, Reading<CacheReading>>,
    /// The kernel's own merging of identical pages; `None`: the kernel has none, or it was not read
    /// yet.
    #[serde(default)]
    pub ksm: Option<Reading<KsmReading>>,
}

/// A value and when it was true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading<T> {
    /// What was read.
    pub value: T,
    /// When it was true (not: when it arrived).
    pub at: Time,
}

impl<T> Reading<T> {
    /// A reading of `value` at `at`.
    pub const fn new(value: T, at: Time) -> Self {
        Self { value, at }
    }

    /// How old the reading is.
    pub const fn age(&self, now: Time) -> Millis {
        now.since(self.at)
    }
}

/// The host as `/proc/meminfo`, `/proc/pressure/memory` and `/proc/stat` tell it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostReading {
    /// `MemTotal`.
    pub total: Bytes,
    /// `MemAvailable`.
    pub available: Bytes,
    /// `SwapTotal`.
    pub swap_total: Bytes,
    /// `SwapFree`.
    pub swap_free: Bytes,
    /// What memory a swapped byte takes: 0 where swap is on disks, less than 1 where it is
    /// compressed in memory.
    #[serde(default)]
    pub swap_cost: f32,
    /// Share of the last 10 s in which some task waited for memory, in percent; `None` where the
    /// kernel has no PSI.
    pub psi_some_avg10: Option<f32>,
    /// Share of the last 10 s in which every task waited for memory, in percent.
    pub psi_full_avg10: Option<f32>,
    /// Share of its CPUs' time that was used since the reading before, 0 to 1; `None`: not known.
    #[serde(default)]
    pub cpu_busy: Option<f32>,
}

/// What is known of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Tells one life of a VM from the next under the same name. Actions carry it, so that what was
    /// decided about the dead is never done to the newborn.
    pub incarnation: u64,
    /// QEMU's process, where it is known.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Whether QEMU talks to us.
    pub link: Link,
    /// Guest RAM that the balloon reaches, as it is now: base memory and DIMMs. At most the memory
    /// that the kernel sees mapped by QEMU.
    pub ram: Bytes,
    /// DIMMs among it that were plugged while the guest ran: limits that are written are of a VM
    /// without them.
    #[serde(default)]
    pub hotplugged: Bytes,
    /// Memory of devices that the balloon does not count (NVDIMM, virtio-pmem, virtio-mem, SGX
    /// EPC). The host backs this and `ram`.
    #[serde(default)]
    pub devices: Bytes,
    /// The balloon's size as the device reports it: what the guest may use. `None`: no balloon
    /// device, or a guest without its driver (see [`VmView::limits`]).
    pub balloon: Option<Reading<Bytes>>,
    /// Whether the guest's driver takes memory back by itself before its kernel kills a program
    /// (`deflate-on-oom`); `None`: not known, or no balloon device.
    #[serde(default)]
    pub deflates_on_oom: Option<bool>,
    /// The guest's own statistics; hostile input until the policy has checked them.
    pub stats: Option<Reading<GuestStats>>,
    /// Physical memory that the guest occupies on the host, page tables and its part of the group's
    /// shared pages included, QEMU's own and what it has freed excluded.
    pub used: Option<Reading<Bytes>>,
    /// What QEMU occupies beside its guest, as it was last measured.
    #[serde(default)]
    pub own: Option<Bytes>,
    /// Whether a migration is under way.
    pub migration: Migration,
    /// Why QEMU refuses to migrate it; `None`: it does not.
    #[serde(default)]
    pub immovable: Option<String>,
    /// Traffic of each of its disks.
    #[serde(default)]
    pub block: Option<Reading<BTreeMap<String, BlockStats>>>,
    /// CPU time of the cgroup that QEMU runs in, in microseconds since that was made (`cpu.stat` of
    /// cgroup v2). libvirt and systemd give each VM one of its own.
    #[serde(default)]
    pub cgroup_cpu_us: Option<Reading<u64>>,
    /// The limits of memory that QEMU's cgroups have, where they could be read.
    #[serde(default)]
    pub memory_limits: Option<Reading<Vec<MemoryLimit>>>,
    /// Its working set and miss-ratio curve, where they are tracked.
    #[serde(default)]
    pub tracking: Option<Reading<Tracking>>,
    /// Its part in its group's shared pages, where they are looked for.
    #[serde(default)]
    pub dedup: Option<Reading<Dedup>>,
    /// What it has freed, where that is handed over to the host.
    #[serde(default)]
    pub free_pages: Option<Reading<FreePages>>,
    /// Where its memory is, where the host may page it out.
    #[serde(default)]
    pub cold: Option<Reading<Cold>>,
    /// Its disks that Overbook serves, by name, where their process answers.
    #[serde(default)]
    pub disks: BTreeMap<String, Reading<DiskReading>>,
    /// Mechanisms that this VM cannot take part in, each with the reason.
    pub limits: BTreeMap<Mechanism, String>,
    /// The last action that QEMU refused, in its words.
    pub last_error: Option<Reading<String>>,
}

impl VmView {
    /// A VM of which nothing is known but whether its QEMU answers.
    #[must_use]
    pub const fn unknown(link: Link) -> Self {
        Self {
            incarnation: 0,
            pid: None,
            link,
            ram: Bytes::ZERO,
            hotplugged: Bytes::ZERO,
            devices: Bytes::ZERO,
            balloon: None,
            deflates_on_oom: None,
            stats: None,
            used: None,
            own: None,
            migration: Migration::Unknown,
            immovable: None,
            block: None,
            cgroup_cpu_us: None,
            memory_limits: None,
            tracking: None,
            dedup: None,
            free_pages: None,
            cold: None,
            disks: BTreeMap::new(),
            limits: BTreeMap::new(),
            last_error: None,
        }
    }
}

/// A limit of memory that a cgroup has, and what is charged there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// The cgroup, as a path from the root of its tree.
    pub cgroup: String,
    /// The file that says so: `memory.max`, `memory.high`, or `memory.limit_in_bytes`.
    pub file: String,
    /// No more than this.
    pub limit: Bytes,
    /// Memory that all processes there occupy, without the cache of files.
    pub used: Bytes,
}

/// A part of Overbook that acts on VMs. Each has its own [`crate::Mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mechanism {
    /// The virtio balloon.
    Balloon,
    /// The guest's statistics over the balloon device.
    Statistics,
    /// Free-page reporting.
    FreePageReporting,
    /// Counting the VM's memory on the host.
    HostMemory,
    /// Tracking what its memory is worth to it.
    Tracking,
    /// Keeping pages once that are identical in VMs of its group.
    Dedup,
    /// Handing over what the guest frees, to be taken when it is needed.
    FreePages,
    /// Paging out what it does not touch.
    Cold,
}

/// The state of the connection to a VM's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Link {
    /// Commands are being answered.
    Up,
    /// Not yet, or not any more; tried again with increasing pauses.
    Down {
        /// Since when.
        since: Time,
        /// What went wrong.
        why: String,
    },
}

/// Live migration as the source QEMU reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Migration {
    /// None under way.
    #[default]
    None,
    /// From setup to completion: the balloon must not be touched.
    Active,
    /// QEMU could not be asked.
    Unknown,
}

/// The guest's statistics as the virtio balloon brings them (virtio 1.2 §5.5.6.4).
///
/// An absent field is one that the guest does not fill in (QEMU shows 2^64−1). Counters run since
/// the guest's boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// Memory that the guest's kernel manages.
    pub total: Option<Bytes>,
    /// Not used for anything at all.
    pub free: Option<Bytes>,
    /// Usable without swapping, by the guest's estimate.
    pub available: Option<Bytes>,
    /// Reclaimable without I/O: page cache.
    pub disk_caches: Option<Bytes>,
    /// Swapped in since boot.
    pub swap_in: Option<Bytes>,
    /// Swapped out since boot.
    pub swap_out: Option<Bytes>,
    /// Page faults that needed I/O, since boot.
    pub major_faults: Option<u64>,
    /// Page faults that needed none, since boot.
    pub minor_faults: Option<u64>,
    /// Programs killed for want of memory since boot.
    #[serde(default)]
    pub oom_kills: Option<u64>,
}

/// What one disk has moved since QEMU opened it. Counted by QEMU, so no guest can falsify it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockStats {
    /// Read by the guest.
    pub rd_bytes: Bytes,
    /// Written by the guest.
    pub wr_bytes: Bytes,
    /// Read requests completed.
    pub rd_ops: u64,
    /// Write requests completed.
    pub wr_ops: u64,
}
