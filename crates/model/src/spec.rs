//! The operator's configuration, validated: it cannot be wrong any more.
//!
//! Only [`crate::config`] makes a [`Spec`], and reports every fault at once. A VM's limits
//! satisfy `min ≤ base ≤ max` after [`Spec::limits_of`], for any real size of the VM.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::ops::RangeInclusive;
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
    /// The mode of each mechanism.
    pub modes: Modes,
    /// The addresses of the API, and the access to it.
    pub api: ApiSpec,
    /// The thresholds of overload.
    #[serde(default)]
    pub overload: OverloadSpec,
    /// The pool that this host belongs to.
    #[serde(default)]
    pub pool: Option<PoolSpec>,
    /// Tenants.
    pub groups: BTreeMap<GroupName, GroupSpec>,
    /// VMs with their own settings.
    pub vms: BTreeMap<VmName, VmSpec>,
    /// Disks that VMs use by NBD, by name.
    #[serde(default)]
    pub disks: BTreeMap<String, DiskSpec>,
}

/// Host-wide settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSpec {
    /// Host memory that is never handed out; `None`: 5 % of the host's memory.
    pub reserve: Option<Bytes>,
    /// Globs of the QMP sockets through which VMs are found.
    pub qmp: Vec<String>,
    /// The directory of history and of the record of changes to undo.
    pub state: PathBuf,
    /// Whether Overbook drives the kernel's KSM for VMs without the shim.
    #[serde(default)]
    pub ksm: KsmSpec,
    /// Whether VMs are also found by their processes, and VMs of no group are tracked from
    /// outside.
    #[serde(default)]
    pub attach: AttachSpec,
    /// Time for which nothing is taken from a VM that was just found, and from any VM after the
    /// operator has changed the configuration or resumed: the operator can read the plan and
    /// withdraw.
    #[serde(default)]
    pub grace: Millis,
}

impl HostSpec {
    /// The default of `grace`.
    pub const GRACE: Millis = Millis::secs(60);
    /// The valid values of `grace_s`.
    pub const GRACES_S: RangeInclusive<u32> = 0..=3600;

    /// `qmp`, and the sockets that `overbook proxmox manage` gives to VMs.
    #[must_use]
    pub fn globs(&self) -> Vec<String> {
        self.qmp.iter().cloned().chain([crate::proxmox::SOCKETS.to_owned()]).collect()
    }
}

/// A pool of hosts that move VMs between each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    /// The pool's name.
    pub name: String,
    /// This host's name in the pool.
    pub host: HostName,
    /// The addresses of the etcd members.
    pub etcd: Vec<String>,
    /// Directory of `ca-cert.pem`, `client-cert.pem` and `client-key.pem`; `None`: without TLS.
    pub tls: Option<PathBuf>,
    /// Where this host receives VMs; `None`: it receives none.
    pub receive: Option<ReceiveSpec>,
    /// VMs that may be moved.
    pub movable: Vec<NamePattern>,
    /// Largest bandwidth of a migration, per second.
    pub bandwidth: Bytes,
    /// Largest downtime of a guest during a migration.
    pub downtime: Millis,
    /// Time after which a guest is switched over to postcopy.
    pub precopy: Millis,
    /// Time after a move during which no other VM leaves the source host, and the moved VM stays.
    pub rest: Millis,
    /// Probability, in percent, that the memory which the pool keeps for overloads suffices at any
    /// moment; 0: none is kept.
    #[serde(default)]
    pub certainty_percent: u32,
}

/// How a host receives VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiveSpec {
    /// The address at which the host's QEMUs listen for guests.
    pub address: core::net::IpAddr,
    /// A program that gets a VM's name and starts a QEMU that waits for the guest (`-incoming
    /// defer -S`).
    pub command: PathBuf,
}

impl PoolSpec {
    /// The downtimes that the configuration accepts, in milliseconds.
    pub const DOWNTIMES_MS: core::ops::RangeInclusive<u32> = 1..=10_000;
    /// The lengths of precopy that the configuration accepts, in seconds.
    pub const PRECOPIES_S: core::ops::RangeInclusive<u32> = 1..=3_600;
    /// The certainties that the configuration accepts, in percent.
    pub const CERTAINTIES: core::ops::RangeInclusive<u32> = 0..=99;
    /// The default certainty (Williams 2011 §4.2).
    pub const CERTAINTY: u32 = 97;
    /// The default bandwidth: 1 Gbit/s.
    pub const BANDWIDTH: Bytes = Bytes(125_000_000);
    /// The default downtime: QEMU's own.
    pub const DOWNTIME: Millis = Millis(300);
    /// The rests after a move that the configuration accepts, in seconds.
    pub const RESTS_S: core::ops::RangeInclusive<u32> = 1..=86_400;
    /// The default rest: three times the shortest sustained overload.
    pub const REST: Millis = Millis::secs(240);
    /// The default length of precopy: the duration of most overloads.
    pub const PRECOPY: Millis = Millis::secs(60);
}

/// The API's listeners.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiSpec {
    /// The unix socket.
    pub socket: PathBuf,
    /// `address:port`, accepted only together with a token.
    pub tcp: Option<core::net::SocketAddr>,
    /// The file that holds the bearer token for TCP.
    pub token_file: Option<PathBuf>,
    /// The file that holds another token, with which a client on TCP may read and change nothing.
    #[serde(default)]
    pub read_token_file: Option<PathBuf>,
}

/// The actions allowed to a mechanism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Measure only.
    #[default]
    Observe,
    /// Plan and show the plan, but change nothing.
    Recommend,
    /// Carry the plan out.
    Enforce,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::Observe, Self::Recommend, Self::Enforce];

    /// The mode's name in the configuration and the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Recommend => "recommend",
            Self::Enforce => "enforce",
        }
    }
}

impl Display for Mode {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
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
    /// In proportion to each VM's contribution.
    Entitlement,
    /// To the VMs that swap.
    #[default]
    Demand,
    /// By value: the group's memory goes to the VMs where it saves the most misses (Wang 2016
    /// §4).
    Balance,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Fair, Self::Entitlement, Self::Demand, Self::Balance];

    /// The policy's name in the configuration and the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fair => "fair",
            Self::Entitlement => "entitlement",
            Self::Demand => "demand",
            Self::Balance => "balance",
        }
    }
}

impl Display for Policy {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// How the surplus is shared out.
    pub policy: Policy,
    /// The VMs that belong to the group, among those that root has assigned to it.
    pub vms: Vec<NamePattern>,
    /// The users that the group's QEMUs run as, by name or number; empty: not configured.
    #[serde(default, rename = "uid", skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<String>,
    /// Memory that the tenant pays for; `None`: the sum of the VMs' base.
    pub budget: Option<Bytes>,
    /// Limits of VMs that have none of their own.
    pub limits: LimitsSpec,
    /// The budget of tracking for each VM.
    #[serde(default)]
    pub tracking: TrackingBudget,
    /// Whether VMs without the shim are tracked from outside.
    #[serde(default)]
    pub attach: AttachSpec,
    /// How identical pages of the group's VMs are searched for.
    #[serde(default)]
    pub dedup: DedupSpec,
    /// Files of shared-pages tables: likely contents of the VMs' pages.
    #[serde(default, rename = "static", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<PathBuf>,
    /// The handling of memory that the group's VMs free.
    #[serde(default)]
    pub free_pages: FreePagesSpec,
    /// Whether the host pages out memory that the group's VMs do not touch.
    #[serde(default)]
    pub cold: ColdSpec,
    /// The groups to which the group lends idle surplus, and from which it borrows theirs.
    #[serde(default)]
    pub lend: LendSpec,
}

/// The groups among which a group lends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LendSpec {
    /// `true`: all groups that say `true`; `false`: none.
    Open(bool),
    /// The groups that name the same circle: the parts of one tenant, for example (Kim 2014,
    /// section 8.3).
    Circle(String),
}

impl Default for LendSpec {
    fn default() -> Self {
        Self::Open(false)
    }
}

impl LendSpec {
    /// Whether the group lends at all.
    #[must_use]
    pub fn takes_part(&self) -> bool {
        *self != Self::Open(false)
    }

    /// Whether a group with this setting lends to one with the other.
    #[must_use]
    pub fn includes(&self, other: &Self) -> bool {
        self.takes_part() && self == other
    }
}

/// Limits as written; a missing limit follows from the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsSpec {
    /// Lower bound; absent: `base`, so the VM is never shrunk below it.
    pub min: Option<Bytes>,
    /// Guaranteed memory; absent: all the RAM of the VM.
    pub base: Option<Bytes>,
    /// Upper bound; absent: all the RAM of the VM.
    pub max: Option<Bytes>,
}

/// Settings of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// Limits that override the group's.
    pub limits: LimitsSpec,
    /// Whether the guest has swap; absent: the guest counts as one without swap until it swaps.
    pub swap: Option<bool>,
    /// The weight of the VM's misses where memory is balanced.
    #[serde(default)]
    pub share: ShareSpec,
}

/// A disk that a VM uses by NBD: the configuration of an export of `overbook disks`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// The VM that uses the disk. The process of the VM's group serves it.
    pub vm: VmName,
    /// The file with the disk's content on this host.
    pub file: PathBuf,
    /// The disk's size, a multiple of the page size.
    pub size: Bytes,
    /// Repositories that also hold the disk's pages, as `host:port`; empty: a plain file.
    pub repositories: Vec<String>,
    /// The directory of the certificates for the repositories; `None`: without TLS.
    pub tls: Option<PathBuf>,
    /// Whether the group's cache may hold pages that were read from the disk: a data disk.
    #[serde(default)]
    pub cache: bool,
    /// The number of concurrent clients: one, except where a VM migrates within its host.
    #[serde(default = "DiskSpec::one")]
    pub shared: u32,
    /// For experiments: an extra delay of each read of the file in microseconds. Delayed reads
    /// are serialized, as on a disk with one head.
    pub read_delay_us: u32,
}

impl DiskSpec {
    /// The delays that the configuration accepts, in microseconds.
    pub const READ_DELAYS_US: core::ops::RangeInclusive<u32> = 0..=1_000_000;
    /// The numbers of concurrent clients that the configuration accepts.
    pub const SHARED: core::ops::RangeInclusive<u32> = 1..=8;

    const fn one() -> u32 {
        1
    }
}

/// The weight of one VM's misses against those of other VMs where memory is balanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareSpec {
    /// Factor by which the VM's misses are multiplied.
    pub weight: u32,
    /// VMs of a higher priority get the memory that saves them misses before VMs of a lower one
    /// get any.
    pub priority: u8,
}

impl ShareSpec {
    /// The weights that the configuration accepts.
    pub const WEIGHTS: core::ops::RangeInclusive<u32> = 1..=1000;
    /// The priorities that the configuration accepts.
    pub const PRIORITIES: core::ops::RangeInclusive<u8> = 0..=9;
}

impl Default for ShareSpec {
    fn default() -> Self {
        Self { weight: 1, priority: 0 }
    }
}

/// A VM's effective limits: `min ≤ base ≤ max ≤ ram`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmLimits {
    /// Lower bound.
    pub min: Bytes,
    /// Guaranteed memory; memory above it is a grant.
    pub base: Bytes,
    /// Upper bound.
    pub max: Bytes,
}

impl VmLimits {
    /// The same limits with `more` memory added to `base` and `max`, for memory that is the VM's
    /// alone.
    #[must_use]
    pub const fn plus(self, more: Bytes) -> Self {
        Self { min: self.min, base: self.base.plus(more), max: self.max.plus(more) }
    }
}

impl Spec {
    /// The group that `vm` belongs to. There is at most one, because overlapping patterns are
    /// refused.
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

    /// Whether the group's spare memory may hold pages of one of its disks.
    #[must_use]
    pub fn has_cache(&self, group: &GroupName) -> bool {
        self.disks_of(group).any(|(_, disk)| disk.cache)
    }

    /// The socket of the disk with this name.
    #[must_use]
    pub fn disk_socket(&self, disk: &str) -> PathBuf {
        self.disk_directory().join(format!("{disk}.sock"))
    }

    /// The directory of the disks' sockets, next to the API's socket.
    #[must_use]
    pub fn disk_directory(&self) -> PathBuf {
        self.runtime_directory().join("disks")
    }

    /// The directory of files that do not survive a reboot: the directory of the API's socket.
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

    /// The operator's setting for swap of `vm`.
    #[must_use]
    pub fn swap_of(&self, vm: &VmName) -> Option<bool> {
        self.vms.get(vm).and_then(|v| v.swap)
    }
}

impl LimitsSpec {
    /// These limits, with `other`'s for missing ones.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            min: self.min.or(other.min),
            base: self.base.or(other.base),
            max: self.max.or(other.max),
        }
    }

    /// Whether the written limits are in order.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        self.min.into_iter().chain(self.base).chain(self.max).is_sorted()
    }

    /// The limits that apply to a VM with `ram`: nothing exceeds the memory that QEMU can give. A
    /// VM whose QEMU never answered has a `ram` of zero: then only written limits are known.
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
