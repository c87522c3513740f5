//! Messages between the daemon and `overbook-libvirt`, the process that calls libvirt.
//!
//! Each message is one line of JSON. The process sends the running domains once a second, and
//! after events. The daemon sends requests, and each is answered.

use serde::{Deserialize, Serialize};

use crate::spec::LimitsSpec;
use crate::{Bytes, GroupName, GuestStats, Time, VmName};

/// The file name of the socket, in the daemon's runtime directory.
pub const SOCKET_NAME: &str = "libvirt.sock";

/// A message from `overbook-libvirt`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "message")]
pub enum FromLibvirt {
    /// All running domains.
    Domains {
        /// The time at which libvirt was asked.
        at: Time,
        /// The domains.
        domains: Vec<LibvirtDomain>,
    },
    /// libvirt cannot be asked.
    Lost {
        /// The error.
        why: String,
    },
    /// The answer to a request.
    Answer {
        /// The request's number.
        id: u64,
        /// Why libvirt refused it; `None`: it is done.
        refusal: Option<String>,
    },
}

/// A request to `overbook-libvirt` about the domain with this UUID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToLibvirt {
    /// The request's number, which the answer repeats.
    pub id: u64,
    /// The domain.
    pub uuid: String,
    /// The change.
    pub change: DomainChange,
}

/// A change of a running domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DomainChange {
    /// Set the balloon, so that the guest may use this much memory.
    Memory(Bytes),
    /// Ask the guest for statistics once in this number of seconds; 0: never.
    StatsPeriod(u64),
}

/// A running domain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LibvirtDomain {
    /// Its UUID, as libvirt writes it.
    pub uuid: String,
    /// Its name.
    pub name: VmName,
    /// QEMU's process, where libvirt's files tell it.
    pub pid: Option<u32>,
    /// Overbook's element in the domain's metadata, or the fault in it; `None`: there is none.
    pub settings: Option<Result<DomainSettings, String>>,
    /// Whether it has a virtio balloon.
    pub has_balloon: bool,
    /// The guest's memory, with plugged DIMMs.
    pub max: Bytes,
    /// Memory that the balloon leaves to the guest.
    pub current: Option<Bytes>,
    /// The guest's statistics.
    pub stats: GuestStats,
    /// The date of the statistics, in seconds since the epoch; 0: the guest has sent none.
    pub stats_date_s: u64,
    /// The interval at which the guest is asked for statistics, in seconds; 0: never.
    pub stats_period_s: u64,
    /// Whether the balloon reports free pages.
    pub reports_free_pages: bool,
    /// Whether the guest's driver deflates the balloon before its kernel kills a program.
    pub deflates_on_oom: bool,
    /// Whether a job of libvirt is under way: a migration, a save, a backup. `None`: unknown.
    pub is_busy: Option<bool>,
}

/// Settings in the metadata of a domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainSettings {
    /// The group that it belongs to.
    pub group: Option<GroupName>,
    /// Its limits.
    pub limits: LimitsSpec,
}
