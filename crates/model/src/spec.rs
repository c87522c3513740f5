//! What the operator wants, validated: it cannot be wrong any more.
//!
//! A [`Spec`] is only made by [`crate::config`], which reports every fault at once. A VM's limits
//! hold `min ≤ base ≤ max` after [`Spec::limits_of`], whatever the VM's real size is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    AttachSpec, Bytes, ColdSpec, DedupSpec, FreePagesSpec, GroupName, HostName, KsmSpec, Millis,
    NamePattern, OverloadSpec, TrackingBudget, VmName,
};

/// The whole configuration of one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Host-wide settings.
    pub host: HostSpec,
    /// What Overbook may do, by mechanism.
    pub modes: Modes,
    /// Where and to whom the API answers.
    pub api: ApiSpec,
    /// When a VM is overloaded.
    #[serde(default)]
    pub overload: OverloadSpec,
    /// The pool of hosts that this one belongs to.
    #[serde(default)]
    pub pool: Option<PoolSpec>,
    /// Tenants.
    pub groups: BTreeMap<GroupName, GroupSpec>,
    /// VMs with settings of their own.
    pub vms: BTreeMap<VmName, VmSpec>,
    /// Disks that VMs have by NBD, by name.
    #[serde(default)]
    pub disks: BTreeMap<String, DiskSpec>,
}

/// Host-wide settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSpec {
    /// Memory of the host that is never handed out; `None`: 5 % of the host's memory.
    pub reserve: Option<Bytes>,
    /// Globs of the QMP sockets through which VMs are found.
    pub qmp: Vec<String>,
    /// Where history and the record of what to undo are kept.
    pub state: PathBuf,
    /// Whether the kernel's KSM is driven for VMs without the shim.
    #[serde(default)]
    pub ksm: KsmSpec,
    /// Whether VMs are found by their processes, too, and those of no group are tracked from
    /// outside.
    #[serde(default)]
    pub attach: AttachSpec,
}

/// A pool of hosts that take each other's VMs in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    /// What it is called.
    pub name: String,
    /// What this host is called in it.
    pub host: HostName,
    /// Where the members of etcd answer.
    pub etcd: Vec<String>,
    /// Directory of `ca-cert.pem`, `client-cert.pem` and `client-key.pem`; `None`: without TLS.
    pub tls: Option<PathBuf>,
    /// Where this host receives VMs; `None`: it takes none in.
    pub receive: Option<ReceiveSpec>,
    /// VMs that may be moved.
    pub movable: Vec<NamePattern>,
    /// What a migration may take of the network, a second.
    pub bandwidth: Bytes,
    /// How long a guest may stand still while it is moved.
    pub downtime: Millis,
    /// After so long a guest leaves at once, and what it lacks there follows.
    pub precopy: Millis,
    /// For how long nothing else leaves a host that a VM has left, and the VM stays.
    pub rest: Millis,
}

/// How a host receives VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiveSpec {
    /// Where its QEMUs listen for guests.
    pub address: core::net::IpAddr,
    /// Is given a VM's name, and starts a QEMU for it that waits for its guest (`-incoming defer
    /// -S`).
    pub command: PathBuf,
}

impl PoolSpec {
    /// The downtimes that can be written, in milliseconds.
    pub const DOWNTIMES_MS: core::ops::RangeInclusive<u32> = 1..=10_000;
    /// How long guests can be sent while they run, in seconds.
    pub const PRECOPIES_S: core::ops::RangeInclusive<u32> = 1..=3_600;
    /// 1 Gbit/s.
    pub const BANDWIDTH: Bytes = Bytes(125_000_000);
    /// QEMU's own.
    pub const DOWNTIME: Millis = Millis(300);
    /// For how long hosts and VMs can rest after a move, in seconds.
    pub const RESTS_S: core::ops::RangeInclusive<u32> = 1..=86_400;
    /// Three times the shortest sustained overload.
    pub const REST: Millis = Millis::secs(240);
    /// As long as most overloads last.
    pub const PRECOPY: Millis = Millis::secs(60);
}

/// The API's listeners.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiSpec {
    /// The unix socket.
    pub socket: PathBuf,
    /// `address:port`, only together with a token.
    pub tcp: Option<core::net::SocketAddr>,
    /// File that holds the bearer token for TCP.
    pub token_file: Option<PathBuf>,
}

/// What a mechanism may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Measure only.
    #[default]
    Observe,
    /// Plan and show it, but touch nothing.
    Recommend,
    /// Carry the plan out.
    Enforce,
}

/// The mode of each mechanism that acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modes {
    /// Balloon targets.
    pub balloon: Mode,
}

/// How a group's surplus is shared out among its VMs (Kim 2014 §4.2.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Evenly.
    Fair,
    /// In proportion to what each VM contributed.
    Entitlement,
    /// To the VMs that swap.
    #[default]
    Demand,
    /// All of the group's memory to where it saves the most misses (Wang 2016 §4).
    Balance,
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// How the surplus is shared out.
    pub policy: Policy,
    /// Which VMs belong to it, among those of which root has said that they do.
    pub vms: Vec<NamePattern>,
    /// The users that its QEMUs run as, by name or number; none: that is not said.
    #[serde(default, rename = "uid", skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<String>,
    /// Memory that the tenant pays for; `None`: the sum of its VMs' base.
    pub budget: Option<Bytes>,
    /// Limits of its VMs, where a VM has none of its own.
    pub limits: LimitsSpec,
    /// What tracking may take from each of its VMs.
    #[serde(default)]
    pub tracking: TrackingBudget,
    /// Whether those without the shim are tracked from outside.
    #[serde(default)]
    pub attach: AttachSpec,
    /// How identical pages of its VMs are looked for.
    #[serde(default)]
    pub dedup: DedupSpec,
    /// Files of shared-pages tables: what its VMs' pages are likely to be.
    #[serde(default, rename = "static", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<PathBuf>,
    /// What becomes of memory that its VMs free.
    #[serde(default)]
    pub free_pages: FreePagesSpec,
    /// Whether the host pages out what its VMs do not touch.
    #[serde(default)]
    pub cold: ColdSpec,
    /// Whether its idle surplus may serve other groups that consent too, and theirs may serve it.
    #[serde(default)]
    pub lend: bool,
}

/// Limits as written; what is not written follows from the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsSpec {
    /// Never less than this; not written: `base`, so the VM is never shrunk below it.
    pub min: Option<Bytes>,
    /// Guaranteed; not written: all the RAM that the VM has.
    pub base: Option<Bytes>,
    /// Never more than this; not written: all the RAM that the VM has.
    pub max: Option<Bytes>,
}

/// One VM's own settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// Limits that go before the group's.
    pub limits: LimitsSpec,
    /// Whether the guest has swap. Not written: taken to have none until it is seen swapping.
    pub swap: Option<bool>,
    /// How much its misses count where memory is balanced.
    #[serde(default)]
    pub share: ShareSpec,
}

/// A disk that a VM has by NBD: what `overbook disks` makes its export of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// Whose it is; its group's process serves it.
    pub vm: VmName,
    /// Where its content lies on this host.
    pub file: PathBuf,
    /// Its size: whole pages.
    pub size: Bytes,
    /// Repositories that hold its pages as well, `host:port`; none: it is a plain file.
    pub repositories: Vec<String>,
    /// Directory of the certificates for these; `None`: without TLS.
    pub tls: Option<PathBuf>,
    /// Whether pages that were read from it may lie in its group's cache: a data disk.
    #[serde(default)]
    pub cache: bool,
    /// Processes that may have it at a time: one, except where a VM migrates within its host.
    #[serde(default = "DiskSpec::one")]
    pub shared: u32,
    /// For experiments: each read of the file takes so many microseconds longer, one after the
    /// other, as on a disk with one head.
    pub read_delay_us: u32,
}

impl DiskSpec {
    /// The delays that can be written, in microseconds.
    pub const READ_DELAYS_US: core::ops::RangeInclusive<u32> = 0..=1_000_000;
    /// How many processes may have a disk at a time, as it can be written.
    pub const SHARED: core::ops::RangeInclusive<u32> = 1..=8;

    const fn one() -> u32 {
        1
    }
}

/// How much one VM's misses count against others' where memory is balanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareSpec {
    /// Its misses count so many times.
    pub weight: u32,
    /// VMs of a higher priority have what saves them misses before those of a lower one get
    /// anything.
    pub priority: u8,
}

impl ShareSpec {
    /// The weights that can be written.
    pub const WEIGHTS: core::ops::RangeInclusive<u32> = 1..=1000;
    /// The priorities that can be written.
    pub const PRIORITIES: core::ops::RangeInclusive<u8> = 0..=9;
}

impl Default for ShareSpec {
    fn default() -> Self {
        Self { weight: 1, priority: 0 }
    }
}

/// A VM's limits as they apply: `min ≤ base ≤ max ≤ ram`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmLimits {
    /// Never less.
    pub min: Bytes,
    /// Guaranteed; what the VM holds above it is a grant.
    pub base: Bytes,
    /// Never more.
    pub max: Bytes,
}

impl VmLimits {
    /// The limits of the same VM with so much more memory that is all its own.
    #[must_use]
    pub const fn plus(self, more: Bytes) -> Self {
        Self { min: self.min, base: self.base.plus(more), max: self.max.plus(more) }
    }
}

impl Spec {
    /// The group that `vm` belongs to. At most one: overlapping patterns were refused.
    #[must_use]
    pub fn group_of(&self, vm: &VmName) -> Option<(&GroupName, &GroupSpec)> {
        self.groups.iter().find(|(_, group)| group.vms.iter().any(|p| p.matches(vm)))
    }

    /// The disks that the process of `group` serves, by name.
    pub fn disks_of(&self, group: &GroupName) -> impl Iterator<Item = (&String, &DiskSpec)> {
        self.disks
            .iter()
            .filter(move |(_, disk)| self.group_of(&disk.vm).is_some_and(|(own, _)| own == group))
    }

    /// Whether pages of a disk of `group` may lie in memory that the group has to spare.
    #[must_use]
    pub fn has_cache(&self, group: &GroupName) -> bool {
        self.disks_of(group).any(|(_, disk)| disk.cache)
    }

    /// Where the disk of this name is to be reached.
    #[must_use]
    pub fn disk_socket(&self, disk: &str) -> PathBuf {
        self.disk_directory().join(format!("{disk}.sock"))
    }

    /// Where the sockets of disks lie: beside the API's.
    #[must_use]
    pub fn disk_directory(&self) -> PathBuf {
        self.runtime_directory().join("disks")
    }

    /// Where all lies that is gone with the host's next start: beside the API's socket.
    #[must_use]
    pub fn runtime_directory(&self) -> &Path {
        self.api.socket.parent().unwrap_or(&self.api.socket)
    }

    /// The limits of `vm`, which has `ram`, in `group`.
    #[must_use]
    pub fn limits_of(&self, vm: &VmName, group: &GroupSpec, ram: Bytes) -> VmLimits {
        let own = self.vms.get(vm).map(|v| v.limits).unwrap_or_default();
        own.or(group.limits).resolve(ram)
    }

    /// What the operator says about the swap of `vm`.
    #[must_use]
    pub fn swap_of(&self, vm: &VmName) -> Option<bool> {
        self.vms.get(vm).and_then(|v| v.swap)
    }
}

impl LimitsSpec {
    /// These limits, and `other`'s where these say nothing.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            min: self.min.or(other.min),
            base: self.base.or(other.base),
            max: self.max.or(other.max),
        }
    }

    /// The limits that apply to a VM with `ram`: nothing exceeds what QEMU can give. Of a
    /// VM that was never reached (`ram` is zero) only what is written is known.
    #[must_use]
    pub fn resolve(self, ram: Bytes) -> VmLimits {
        let ram = if ram.is_zero() { self.max.or(self.base).unwrap_or_default() } else { ram };
        let max = self.max.unwrap_or(ram).min(ram);
        let base = self.base.unwrap_or(ram).min(max);
        VmLimits { min: self.min.unwrap_or(base).min(base), base, max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_are_not_written_never_shrink_a_vm() {
        let ram = Bytes::mib(512);
        let limits = LimitsSpec::default().resolve(ram);
        assert_eq!(limits, VmLimits { min: ram, base: ram, max: ram });
    }

    #[test]
    fn limits_never_exceed_what_qemu_can_give() {
        let written = LimitsSpec {
            min: Some(Bytes::mib(256)),
            base: Some(Bytes::mib(512)),
            max: Some(Bytes::mib(1024)),
        };
        let limits = written.resolve(Bytes::mib(128));
        assert_eq!(limits.max, Bytes::mib(128));
        assert!(limits.min <= limits.base && limits.base <= limits.max);
    }
}
