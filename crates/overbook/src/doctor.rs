//! `overbook doctor`: every VM of the host, what it can have, and the line that mends what it
//! lacks.
//!
//! **Problem.** A VM may lack a mechanism for some forty reasons, most of them outside Overbook: in
//! QEMU's command line, in the manager's configuration, in the kernel. A VM without a socket shows
//! itself nowhere.
//!
//! **Idea.** The kernel lists all processes with a VM, with or without a daemon. Facts about each
//! are read first ([`look`], [`sockets`]), as plain data ([`facts`]). One pure function turns them
//! into diagnoses ([`rules`]), each with its remedy ([`remedies`]). A running daemon adds reasons
//! that only QEMU, the guest or a worker tells.
//!
//! **Invariants.** It changes nothing, and connects to the daemon's API alone: a QMP socket serves
//! one client at a time.

mod command_line;
mod facts;
mod host;
mod look;
mod remedies;
mod rules;
mod sockets;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use model::{AttachSpec, GroupSpec, Spec, VmName};
use serde::Serialize;

use crate::config_files;
use crate::proxmox::NodePaths;
use api::client::{ApiClient, ClientError};
use api::wire::VmStatus;
use facts::{DaemonView, VmFacts, VmRules};
pub(crate) use remedies::Remedy;

/// A thing that a VM can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Capability {
    /// Overbook finds it, by its name, and can ask its QEMU.
    See,
    Balloon,
    /// The guest's statistics.
    Statistics,
    /// Memory that the guest frees returns to the host by itself.
    FreePages,
    /// Its working set.
    Tracking,
    /// Its cold memory is paged out.
    Paging,
    /// Its identical pages are kept once.
    Sharing,
    /// It moves to another host of the pool.
    Move,
}

impl Capability {
    pub(crate) const ALL: [Self; 8] = [
        Self::See,
        Self::Balloon,
        Self::Statistics,
        Self::FreePages,
        Self::Tracking,
        Self::Paging,
        Self::Sharing,
        Self::Move,
    ];

    /// Its name for an operator.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::See => "see",
            Self::Balloon => "balloon",
            Self::Statistics => "statistics",
            Self::FreePages => "free pages",
            Self::Tracking => "tracking",
            Self::Paging => "paging",
            Self::Sharing => "sharing",
            Self::Move => "move",
        }
    }
}

/// The kind of a reason; programs tell reasons apart by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cause {
    // Of a VM.
    NotQemu,
    ProgramName,
    ProgramOwner,
    Silent,
    NoSocket,
    SocketElsewhere,
    SocketGone,
    TwoSockets,
    ManagersSocket,
    SocketInUse,
    AppArmor,
    SeLinux,
    SameName,
    OtherName,
    NoName,
    NoBalloon,
    NoReporting,
    MovedByOthers,
    GivesNothingBack,
    Uncooperative,
    OtherMemory,
    CgroupLimit,
    NoStatistics,
    NoGuestSwap,
    Locked,
    PassedThrough,
    HugePages,
    SharedMemory,
    FileMemory,
    Preallocated,
    NoShim,
    ShimNotLoaded,
    OldShim,
    OtherNetwork,
    NoUserfaultfd,
    SwapForbidden,
    HostCannotPage,
    SwitchedOff,
    NoGroup,
    ManagersMove,
    NoPool,
    NotMovable,
    /// A reason in the daemon's words.
    Told,
    // Of the host.
    OldKernel,
    NoSwap,
    SlowSwap,
    NoPressure,
    NoCgroup,
    NoKsm,
    ForeignKsm,
    NoHugePages,
    NoDirectory,
    OpenDirectory,
    StaleSocket,
    PlainFile,
    ManagersFiles,
    NoDaemon,
    Api,
    RootOnly,
    NotRoot,
    Configuration,
}

/// Why a VM, or each VM of the host, lacks something, and the line that mends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Diagnosis {
    pub(crate) cause: Cause,
    /// The capabilities that it costs, wholly or in part.
    pub(crate) lacks: Vec<Capability>,
    /// The reason in words.
    pub(crate) reason: String,
    /// `None`: there is nothing to mend, or no line that mends it.
    pub(crate) remedy: Option<Remedy>,
    /// Whether something is broken. Otherwise it was left out, or chosen so.
    pub(crate) is_fault: bool,
    /// Whether it is mended at the host, and holds for other VMs too.
    #[serde(skip)]
    pub(crate) is_hosts: bool,
}

/// Whether a VM has a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Availability {
    Yes,
    /// It could have it, and nothing is broken.
    Off,
    No,
}

/// A VM with its diagnoses.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ExaminedVm {
    pub(crate) name: String,
    pub(crate) pid: u32,
    /// The program that has started it.
    pub(crate) started_by: &'static str,
    pub(crate) group: Option<String>,
    pub(crate) capabilities: BTreeMap<Capability, Availability>,
    pub(crate) diagnoses: Vec<Diagnosis>,
}

/// The host and its VMs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Examination {
    /// Whether a daemon answered: only then its reasons are in it.
    pub(crate) has_daemon: bool,
    pub(crate) host: Vec<Diagnosis>,
    pub(crate) vms: Vec<ExaminedVm>,
}

impl Examination {
    /// Whether something is to be mended.
    pub(crate) fn is_fault(&self) -> bool {
        let of_vms = self.vms.iter().flat_map(|vm| &vm.diagnoses);
        self.host.iter().chain(of_vms).any(|it| it.is_fault)
    }
}

/// Looks at the host and all of its VMs. `socket`: the daemon's.
pub(crate) fn examine(config: &Path, socket: &Path) -> Examination {
    let loaded = config_files::load(config);
    let faults = loaded.as_ref().err().map(|faults| faults.as_slice().len());
    let Ok(spec) = loaded.or_else(|_| model::config::parse(&[(String::new(), String::new())]))
    else {
        unreachable!("an empty configuration is valid")
    };
    let (told, silent) = match ask(socket) {
        Ok(vms) => (Some(vms), None),
        Err(ClientError::NoDaemon(_)) => (None, None),
        Err(error) => (None, Some(error)),
    };
    let pids: Vec<u32> = look::processes().into_iter().collect();
    let files = sockets::survey(&spec.host.globs(), &pids);
    let node = NodePaths::default();
    let (proxmox, unread) = match node.is_node().then(|| node.report()) {
        Some(Ok(report)) => (report.vms, report.fault),
        Some(Err(why)) => (Vec::new(), Some(why)),
        None => (Vec::new(), None),
    };
    let of = |pid| look::vm(pid, &files, &proxmox);
    let mut vms: Vec<_> = pids.into_iter().filter_map(of).collect();
    complete(&mut vms, &spec, told.as_deref().unwrap_or_default());
    if silent.is_some() {
        // The client may be the daemon.
        vms.iter_mut().for_each(|vm| vm.has_client = false);
    }
    let tried = host::try_features();
    let facts = host::facts(&spec, &tried);
    let mut of_host: Vec<_> =
        faults.map(|count| host::of_configuration(count, config)).into_iter().collect();
    of_host.extend(host::of_daemon(&spec, told.is_some(), silent.as_ref()));
    of_host.extend(unread.iter().map(|why| host::of_proxmox(why)));
    of_host.extend(host::of_directories(&spec, &files));
    of_host.extend(host::of_features(&tried, &vms));
    of_host.extend(host::of_settings(&spec));
    let vms = vms.iter().map(|vm| ExaminedVm::of(vm, rules::diagnose(vm, &facts))).collect();
    Examination { has_daemon: told.is_some(), host: of_host, vms }
}

fn ask(socket: &Path) -> Result<Vec<VmStatus>, ClientError> {
    ApiClient::new(socket)?.get("/v1/vms")
}

/// Adds the facts that concern several VMs, the configuration and the daemon.
fn complete(vms: &mut [VmFacts], spec: &Spec, told: &[VmStatus]) {
    let names: Vec<_> = vms.iter().map(|vm| (vm.pid, vm.name.clone())).collect();
    for vm in vms {
        let same = |(pid, name): &&(u32, Option<String>)| {
            *pid != vm.pid && name.is_some() && *name == vm.name
        };
        vm.namesakes = names.iter().filter(same).map(|(pid, _)| *pid).collect();
        let status = status_of(vm, told);
        vm.wanted = wanted(vm, status, spec);
        vm.told = status.map(DaemonView::of);
    }
}

/// The daemon's view of a VM: by the place at which the daemon has found it, or else by its name.
fn status_of<'a>(vm: &VmFacts, told: &'a [VmStatus]) -> Option<&'a VmStatus> {
    let process = format!("/proc/{}", vm.pid);
    // The daemon knows sockets by paths without links.
    let sockets: Vec<_> =
        vm.sockets.iter().map(|it| it.canonicalize().unwrap_or_else(|_| it.clone())).collect();
    let is_place =
        |name: &str| name == process || sockets.iter().any(|socket| socket.as_os_str() == name);
    let by_place = told.iter().find(|status| is_place(&status.name));
    let is_alone = vm.namesakes.is_empty();
    let by_name = || told.iter().find(|status| is_alone && Some(&status.name) == vm.name.as_ref());
    by_place.or_else(by_name)
}

/// The rules of the VM's group, which the daemon knows best: only libvirt knows its metadata.
fn wanted(vm: &VmFacts, status: Option<&VmStatus>, spec: &Spec) -> VmRules {
    let name = VmName::from(vm.name.as_deref().unwrap_or_default());
    let movable = spec.pool.iter().any(|pool| pool.movable.iter().any(|it| it.matches(&name)));
    let attach = spec.host.attach == AttachSpec::On;
    let told = status.and_then(|status| status.group.as_deref());
    let has_label = |group: &GroupSpec| {
        group.vms.iter().any(|it| vm.labels.iter().any(|label| it.matches_label(label)))
    };
    let by_daemon = || spec.groups.iter().find(|(group, _)| told == Some(group.as_str()));
    let by_label = || spec.groups.iter().find(|(_, group)| has_label(group));
    let found = by_daemon().or_else(|| spec.group_of(&name)).or_else(by_label);
    let Some((group, of_group)) = found else {
        return VmRules { attach, tracking: true, movable, ..VmRules::default() };
    };
    VmRules {
        group: Some(group.to_string()),
        tracking: of_group.tracking.vcpu_share().is_some(),
        attach: of_group.attach == AttachSpec::On,
        dedup: of_group.dedup.is_on(),
        lazy: of_group.free_pages.is_lazy(),
        cold: of_group.cold.is_on(),
        movable,
    }
}

impl DaemonView {
    fn of(status: &VmStatus) -> Self {
        let unsupported = status.unsupported.iter().map(|(it, why)| (it.clone(), why.clone()));
        let refusals = status.refusals.iter().map(|it| (it.code.clone(), it.text.clone()));
        Self {
            shim_differs: status.shim.as_ref().and_then(|shim| shim.differs.clone()),
            link_error: status.link_error.clone(),
            unsupported: unsupported.collect(),
            refusals: refusals.collect(),
        }
    }
}

impl ExaminedVm {
    fn of(vm: &VmFacts, diagnoses: Vec<Diagnosis>) -> Self {
        let availability = |capability: Capability| {
            let costs = diagnoses.iter().filter(|it| it.lacks.contains(&capability));
            let of =
                |it: &Diagnosis| if it.is_fault { Availability::No } else { Availability::Off };
            costs.map(of).max().unwrap_or(Availability::Yes)
        };
        Self {
            name: vm.name.clone().unwrap_or_else(|| format!("/proc/{}", vm.pid)),
            pid: vm.pid,
            started_by: vm.started_by.words(),
            group: vm.wanted.group.clone(),
            capabilities: Capability::ALL.map(|it| (it, availability(it))).into(),
            diagnoses,
        }
    }
}
