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

/// A request to `overbook-libvirt` about a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToLibvirt {
    /// The request's number, which the answer repeats.
    pub id: u64,
    /// The domain's UUID.
    pub uuid: String,
    /// The process for which the change was decided. The domain's next QEMU is left alone.
    pub process: DomainProcess,
    /// The time after which the change must not begin, because the sender has given it up.
    pub before: Time,
    /// The change.
    pub change: DomainChange,
}

/// A domain's QEMU. A later process with the same PID has another start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DomainProcess {
    /// The PID.
    pub pid: u32,
    /// The start time, in clock ticks since boot.
    pub start_ticks: u64,
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
    pub process: Option<DomainProcess>,
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
    /// Whether its vCPUs are stopped: by `virsh suspend`, or by the guest itself.
    #[serde(default)]
    pub is_suspended: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_an_earlier_release_says_nothing_of_suspended_domains() {
        let known = LibvirtDomain {
            uuid: "8d0c".to_owned(),
            name: "web-1".into(),
            process: None,
            settings: None,
            has_balloon: true,
            max: Bytes::mib(512),
            current: None,
            stats: GuestStats::default(),
            stats_date_s: 0,
            stats_period_s: 0,
            reports_free_pages: false,
            deflates_on_oom: false,
            is_busy: None,
            is_suspended: true,
        };
        let mut message = serde_json::to_value(&known).unwrap();
        assert_eq!(serde_json::from_value::<LibvirtDomain>(message.clone()).unwrap(), known);
        message.as_object_mut().unwrap().remove("is_suspended");
        let earlier: LibvirtDomain = serde_json::from_value(message).unwrap();
        assert!(!earlier.is_suspended);
    }
}

/// Settings that a VM has from its manager: from the metadata of a libvirt domain, or from its
/// file in Proxmox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainSettings {
    /// The group that it belongs to.
    pub group: Option<GroupName>,
    /// Its limits.
    pub limits: LimitsSpec,
    /// The weight of its misses.
    #[serde(default)]
    pub weight: Option<u32>,
    /// The name that its owner knows it by, where that is not the VM's name.
    #[serde(default)]
    pub title: Option<String>,
    /// Labels for the patterns of groups, such as `pool:web`.
    #[serde(default)]
    pub labels: Vec<String>,
}
