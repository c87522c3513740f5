//! Observed state of the host and its VMs: plain data in which every reading carries its time.
//!
//! A view never hides missing data. A value that could not be read is `None` or a [`Link`] with
//! its reason. An old value carries its age: the policy decides which values are too old. All of
//! it can be exported and read back (`overbook plan --export`), so that a host's state becomes a
//! test.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    Bytes, CacheReading, Cold, Dedup, DiskReading, FreePages, GroupName, KsmReading, Millis,
    ShimVersion, Time, Tracking, VmName, WorkerReading,
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
    /// The kernel's own merging of identical pages; `None`: not supported by the kernel, or not
    /// read yet.
    #[serde(default)]
    pub ksm: Option<Reading<KsmReading>>,
}

/// A value and the time at which it was true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading<T> {
    /// The value read.
    pub value: T,
    /// The time at which it was true (not: at which it arrived).
    pub at: Time,
}

impl<T> Reading<T> {
    /// A reading of `value` at `at`.
    pub const fn new(value: T, at: Time) -> Self {
        Self { value, at }
    }

    /// Age of the reading.
    pub const fn age(&self, now: Time) -> Millis {
        now.since(self.at)
    }
}

/// The host according to `/proc/meminfo`, `/proc/pressure/memory` and `/proc/stat`.
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
    /// Memory that a swapped byte takes: 0 with swap on disks, less than 1 with swap compressed
    /// in memory.
    #[serde(default)]
    pub swap_cost: f32,
    /// Share of the last 10 s in which some task waited for memory, in percent; `None`: the
    /// kernel has no PSI.
    pub psi_some_avg10: Option<f32>,
    /// Share of the last 10 s in which every task waited for memory, in percent.
    pub psi_full_avg10: Option<f32>,
    /// Share of CPU time used since the previous reading, 0 to 1; `None`: unknown.
    #[serde(default)]
    pub cpu_busy: Option<f32>,
}

/// The known state of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Distinguishes two VMs that have the same name one after the other. Actions carry it, so
    /// that a decision about the old VM never applies to the new one.
    pub incarnation: u64,
    /// QEMU's process, where it is known.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Whether QEMU answers.
    pub link: Link,
    /// Guest RAM that the balloon can change, at its current size: base memory and DIMMs. At most
    /// the memory that QEMU has mapped according to the kernel.
    pub ram: Bytes,
    /// The part of `ram` in DIMMs that were plugged while the guest ran. Configured limits apply
    /// to the VM without them.
    #[serde(default)]
    pub hotplugged: Bytes,
    /// Memory of devices that the balloon does not count (NVDIMM, virtio-pmem, virtio-mem, SGX
    /// EPC). The host backs this and `ram`.
    #[serde(default)]
    pub devices: Bytes,
    /// The balloon's size as the device reports it: memory that the guest may use. `None`: no
    /// balloon device, or a guest without its driver (see [`VmView::limits`]).
    pub balloon: Option<Reading<Bytes>>,
    /// Whether the guest's driver deflates the balloon by itself before its kernel kills a
    /// program (`deflate-on-oom`); `None`: unknown, or no balloon device.
    #[serde(default)]
    pub deflates_on_oom: Option<bool>,
    /// The guest's own statistics; untrusted input until the policy has checked them.
    pub stats: Option<Reading<GuestStats>>,
    /// Physical memory that the kernel counts for the guest, with page tables: without QEMU's own
    /// memory and shared pages, and with freed memory that the host has not taken yet.
    pub used: Option<Reading<Bytes>>,
    /// The VM's part of its group's shared pages, as last reported. Pages stay shared while no
    /// worker reports.
    #[serde(default)]
    pub pool_part: Bytes,
    /// QEMU's own memory without the guest's, at the last measurement.
    #[serde(default)]
    pub own: Option<Bytes>,
    /// The shim in QEMU, where a worker talks to it.
    #[serde(default)]
    pub shim: Option<ShimVersion>,
    /// Whether a migration is active.
    pub migration: Migration,
    /// Whether its vCPUs are stopped: by a user, or by the guest itself.
    #[serde(default)]
    pub suspended: bool,
    /// Why QEMU refuses to migrate the VM; `None`: it does not refuse.
    #[serde(default)]
    pub immovable: Option<String>,
    /// CPU time of QEMU's cgroup in microseconds since the cgroup was created (`cpu.stat` of
    /// cgroup v2). libvirt and systemd give each VM its own cgroup.
    #[serde(default)]
    pub cgroup_cpu_us: Option<Reading<u64>>,
    /// The memory limits of QEMU's cgroups, where they could be read.
    #[serde(default)]
    pub memory_limits: Option<Reading<Vec<MemoryLimit>>>,
    /// The VM's working set and miss-ratio curve, where they are tracked.
    #[serde(default)]
    pub tracking: Option<Reading<Tracking>>,
    /// The VM's part in its group's shared pages, where deduplication is on.
    #[serde(default)]
    pub dedup: Option<Reading<Dedup>>,
    /// Memory that the VM has freed, where that is handed over to the host.
    #[serde(default)]
    pub free_pages: Option<Reading<FreePages>>,
    /// The location of the VM's memory, where the host may page it out.
    #[serde(default)]
    pub cold: Option<Reading<Cold>>,
    /// The VM's disks that Overbook serves, by name, where the process that serves them answers.
    #[serde(default)]
    pub disks: BTreeMap<String, Reading<DiskReading>>,
    /// Mechanisms that this VM cannot take part in, each with the reason.
    pub limits: BTreeMap<Mechanism, String>,
    /// The last action that QEMU refused, in its words.
    pub last_error: Option<Reading<String>>,
    /// The VM in the records of its manager; `None`: there are none, or they say nothing.
    #[serde(default)]
    pub manager: Option<ManagerRecord>,
}

/// A VM in the records of its manager (libvirt, Nova, Proxmox).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerRecord {
    /// The name that its owner knows it by, where that is not the VM's name.
    pub title: Option<String>,
    /// Its labels, such as `pool:web`.
    pub labels: Vec<String>,
    /// Whether the manager moves the balloon by itself; the command that ends this.
    pub balances: Option<String>,
}

impl VmView {
    /// A VM of which only the state of its link is known.
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
            pool_part: Bytes::ZERO,
            own: None,
            shim: None,
            migration: Migration::Unknown,
            suspended: false,
            immovable: None,
            cgroup_cpu_us: None,
            memory_limits: None,
            tracking: None,
            dedup: None,
            free_pages: None,
            cold: None,
            disks: BTreeMap::new(),
            limits: BTreeMap::new(),
            last_error: None,
            manager: None,
        }
    }
}

/// A cgroup's memory limit, and the memory that is charged there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// The cgroup, as a path from the root of its tree.
    pub cgroup: String,
    /// The file that holds the limit: `memory.max`, `memory.high`, or `memory.limit_in_bytes`.
    pub file: String,
    /// The limit.
    pub limit: Bytes,
    /// Memory that all processes of the cgroup occupy, without the page cache.
    pub used: Bytes,
}

/// The first words of the reason in [`VmView::limits`] for a mechanism that the configuration
/// switches off. A VM that cannot take part has another reason.
pub const SWITCHED_OFF: &str = "switched off";

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
    /// Tracking the VM's working set and miss-ratio curve.
    Tracking,
    /// Merging pages that are identical in VMs of the VM's group.
    Dedup,
    /// Handing over memory that the guest frees, so that the host can take it when it is short.
    FreePages,
    /// Paging out memory that the guest does not touch.
    Cold,
}

/// The state of the connection to a VM's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Link {
    /// QEMU answers commands.
    Up,
    /// No connection yet, or none any more; retried with increasing pauses.
    Down {
        /// Start of this state.
        since: Time,
        /// The error.
        why: String,
    },
}

/// Live migration according to the source QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Migration {
    /// No migration.
    #[default]
    None,
    /// From setup to completion: the balloon must not be touched.
    Active,
    /// QEMU could not be asked.
    Unknown,
}

/// The guest's statistics from the virtio balloon (virtio 1.2 §5.5.6.4).
///
/// The guest does not fill in an absent field (QEMU shows 2^64−1). Counters run since the guest's
/// boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// Memory that the guest's kernel manages.
    pub total: Option<Bytes>,
    /// Completely unused memory.
    pub free: Option<Bytes>,
    /// Memory usable without swapping, by the guest's estimate.
    pub available: Option<Bytes>,
    /// Memory reclaimable without I/O: page cache.
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
