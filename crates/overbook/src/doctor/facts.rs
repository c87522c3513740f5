//! The facts about a process and its host from which a diagnosis is made: plain data.

use std::collections::BTreeSet;
use std::path::PathBuf;

use model::proxmox::ProxmoxConf;
use model::view::MemoryLimit;

use super::command_line::CommandLine;

/// A process with a VM, and all that is known of it.
#[derive(Clone, Debug, Default)]
pub(super) struct VmFacts {
    pub(super) pid: u32,
    /// The name that its manager tells, or the one on its command line.
    pub(super) name: Option<String>,
    pub(super) started_by: StartedBy,
    pub(super) line: CommandLine,
    pub(super) process: ProcessFacts,
    /// Its sockets among those that `qmp` names.
    pub(super) sockets: Vec<PathBuf>,
    /// Whether another program is connected to one of them.
    pub(super) has_client: bool,
    /// QMP sockets of its command line with a client.
    pub(super) in_use: Vec<PathBuf>,
    /// Other processes with the same name.
    pub(super) namesakes: Vec<u32>,
    /// The configuration of Proxmox for it.
    pub(super) proxmox: Option<ProxmoxConf>,
    /// The labels that Proxmox gives it.
    pub(super) labels: Vec<String>,
    pub(super) wanted: VmRules,
    /// The running daemon's view of it.
    pub(super) told: Option<DaemonView>,
}

impl VmFacts {
    /// Whether libvirt stands in for a socket: the daemon knows the VM, and misses none.
    pub(super) fn is_served_by_libvirt(&self) -> bool {
        let misses = |told: &DaemonView| {
            told.unsupported.iter().any(|(_, why)| why.starts_with("no QMP socket"))
        };
        self.started_by == StartedBy::Libvirt && self.told.as_ref().is_some_and(|it| !misses(it))
    }
}

/// The program that has started a VM, which decides where it is configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum StartedBy {
    /// A command line of an operator, or an unknown manager.
    #[default]
    Hand,
    Libvirt,
    /// Proxmox, with the number of the VM.
    Proxmox(String),
}

impl StartedBy {
    /// Its name.
    pub(super) const fn words(&self) -> &'static str {
        match self {
            Self::Hand => "by hand",
            Self::Libvirt => "libvirt",
            Self::Proxmox(_) => "Proxmox",
        }
    }
}

/// The facts that the kernel tells about a process.
#[derive(Clone, Debug, Default)]
pub(super) struct ProcessFacts {
    /// Its program's name.
    pub(super) program: String,
    /// Why the daemon does not take the program for QEMU.
    pub(super) objection: Option<Objection>,
    /// The user that it runs as.
    pub(super) uid: u32,
    /// How its guest's RAM is mapped.
    pub(super) backing: Option<Backing>,
    /// Whether the kernel keeps the guest's RAM from being paged out (`VmLck`).
    pub(super) is_locked: bool,
    /// Whether it has open a device that pins all memory of a guest.
    pub(super) passes_devices: bool,
    pub(super) shim: Shim,
    /// Whether its user may trap page faults of the kernel.
    pub(super) may_trap: bool,
    /// Whether it is in another network namespace than this process.
    pub(super) is_in_other_network: bool,
    /// The label by which AppArmor or SELinux confines it.
    pub(super) label: Option<String>,
    /// The cgroup that forbids it to swap.
    pub(super) forbids_swap: Option<String>,
    pub(super) memory_limits: Vec<MemoryLimit>,
}

/// Why the daemon does not take a program for QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Objection {
    /// It uses KVM, and is another program.
    NotQemu,
    /// Its command line is QEMU's, and its name is not.
    Name,
    /// Its file belongs to this user, neither root nor the daemon's own.
    Owner(u32),
    /// It did not say in time how it was started.
    Silent,
}

/// How a guest's RAM is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Private and anonymous, as QEMU maps it by default.
    Private,
    /// Shared with other processes.
    Shared,
    /// Private, from a file.
    File,
    /// In the kernel's pool of huge pages.
    HugePages,
}

/// The shim in a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Shim {
    #[default]
    None,
    /// `LD_PRELOAD` names this file, and it is not loaded.
    NotLoaded(PathBuf),
    Loaded,
    /// It is loaded, and its file has been replaced since.
    Replaced,
}

impl Shim {
    /// Whether it is loaded.
    pub(super) const fn is_loaded(&self) -> bool {
        matches!(self, Self::Loaded | Self::Replaced)
    }
}

/// The configuration's rules for a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct VmRules {
    pub(super) group: Option<String>,
    /// Mechanisms that its group has on.
    pub(super) tracking: bool,
    pub(super) attach: bool,
    pub(super) dedup: bool,
    pub(super) lazy: bool,
    pub(super) cold: bool,
    /// Whether `movable` names it.
    pub(super) movable: bool,
}

/// The daemon's view of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DaemonView {
    /// The difference of its shim from this release's.
    pub(super) shim_differs: Option<String>,
    /// Why QEMU does not answer.
    pub(super) link_error: Option<String>,
    /// Mechanisms that the VM cannot take part in, by their names in the API, with the reasons.
    pub(super) unsupported: Vec<(String, String)>,
    /// Why nothing was taken or given: code and words.
    pub(super) refusals: Vec<(String, String)>,
}

/// The facts about the host on which VMs depend.
#[derive(Clone, Debug, Default)]
pub(super) struct HostFacts {
    /// Globs of QMP sockets.
    pub(super) globs: Vec<String>,
    /// Why VMs cannot be tracked and paged from outside.
    pub(super) no_paging: Option<String>,
    /// Why no VM with the shim can be tracked.
    pub(super) no_shim: Option<String>,
    /// Why no VM with the shim is paged out.
    pub(super) no_shim_paging: Option<String>,
    /// Whether the host is in a pool.
    pub(super) has_pool: bool,
    /// Lines of the local AppArmor rules for libvirt's QEMUs.
    pub(super) apparmor: BTreeSet<String>,
}
