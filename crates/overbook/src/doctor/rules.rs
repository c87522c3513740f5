//! From the facts about a VM to its diagnoses: pure, so each rule can be tried on a table of VMs.

use model::Bytes;
use model::proxmox::ProxmoxConf;

use super::facts::{Backing, DaemonView, HostFacts, Objection, Shim, StartedBy, VmFacts};
use super::remedies::{self, Remedy};
use super::{Capability, Cause, Diagnosis};
use Capability::{Balloon, FreePages, Move, Paging, See, Sharing, Statistics, Tracking};

/// Memory that QEMU needs for itself, which a limit of its cgroup must leave.
const OF_QEMU: Bytes = Bytes::mib(100);
/// Directories of the managers' own QMP sockets.
const OF_MANAGERS: [&str; 4] =
    ["/var/lib/libvirt/qemu", "/run/libvirt/qemu", "/run/qemu-server", "/var/run/qemu-server"];

/// All that keeps a VM from a mechanism, the most important first.
pub(super) fn diagnose(vm: &VmFacts, host: &HostFacts) -> Vec<Diagnosis> {
    let mut found = Diagnoses { vm, host, all: Vec::new() };
    if found.is_stranger() {
        return found.all;
    }
    found.socket();
    found.name();
    found.balloon();
    found.memory();
    found.shim();
    found.paging();
    found.group();
    found.moves();
    if let Some(told) = &vm.told {
        found.told(told);
    }
    found.all
}

struct Diagnoses<'a> {
    vm: &'a VmFacts,
    host: &'a HostFacts,
    all: Vec<Diagnosis>,
}

impl Diagnoses<'_> {
    fn add(
        &mut self,
        cause: Cause,
        lacks: &[Capability],
        reason: impl Into<String>,
        remedy: Option<Remedy>,
    ) {
        let lacks = lacks.to_vec();
        let reason = reason.into();
        self.all.push(Diagnosis { cause, lacks, reason, remedy, is_fault: true, is_hosts: false });
    }

    /// The same for something that works as it is, and could be had in addition.
    fn note(
        &mut self,
        cause: Cause,
        lacks: &[Capability],
        reason: impl Into<String>,
        remedy: Option<Remedy>,
    ) {
        self.add(cause, lacks, reason, remedy);
        if let Some(last) = self.all.last_mut() {
            last.is_fault = false;
        }
    }

    fn has(&self, cause: Cause) -> bool {
        self.all.iter().any(|it| it.cause == cause)
    }

    fn lacks(&self, capability: Capability) -> bool {
        self.all.iter().any(|it| it.lacks.contains(&capability))
    }

    /// Whether the process is none that Overbook serves.
    fn is_stranger(&mut self) -> bool {
        let process = &self.vm.process;
        let program = &process.program;
        let every = &Capability::ALL;
        match process.objection {
            None => return false,
            Some(Objection::NotQemu) => self.note(
                Cause::NotQemu,
                every,
                format!("`{program}` runs a VM by KVM and is not QEMU, which alone is served"),
                None,
            ),
            Some(Objection::Name) => self.add(
                Cause::ProgramName,
                every,
                format!("its program is called `{program}`, which is not taken for QEMU"),
                Some(Remedy::by_hand("start it by a name such as qemu-system-x86_64")),
            ),
            Some(Objection::Owner(user)) => self.add(
                Cause::ProgramOwner,
                every,
                format!("its program belongs to user {user}: any user can call a program QEMU"),
                Some(Remedy::by_hand("start it from a program that root owns")),
            ),
            Some(Objection::Silent) => self.add(
                Cause::Silent,
                every,
                "its command line could not be read within 2 s",
                None,
            ),
        }
        true
    }

    fn socket(&mut self) {
        const LACKS: [Capability; 4] = [See, Balloon, Statistics, Move];
        let vm = self.vm;
        if let [one, other, ..] = vm.sockets.as_slice() {
            self.add(
                Cause::TwoSockets,
                &[See],
                format!("two sockets name it: {} and {}", one.display(), other.display()),
                Some(remedies::drop_socket(vm, other)),
            );
        }
        let is_managers = |path: &&std::path::PathBuf| {
            let is_overbooks = path.extension().is_some_and(|it| it == "overbook");
            !is_overbooks && OF_MANAGERS.iter().any(|directory| path.starts_with(directory))
        };
        if let Some(path) = vm.sockets.iter().find(is_managers) {
            self.add(
                Cause::ManagersSocket,
                &LACKS,
                format!(
                    "`qmp` names {}, which {} uses: a QMP socket serves one client at a time",
                    path.display(),
                    vm.started_by.words()
                ),
                Some(remedies::socket(vm, self.host)),
            );
        }
        let is_up = vm.told.as_ref().is_some_and(|told| told.link_error.is_none());
        if vm.has_client && !is_up {
            self.add(
                Cause::SocketInUse,
                &LACKS,
                "another program is connected to its QMP socket, which serves one at a time",
                Some(remedies::socket(vm, self.host)),
            );
        }
        if !vm.sockets.is_empty() {
            return;
        }
        let is_free = |path: &&std::path::PathBuf| !vm.in_use.contains(path);
        let own = vm.line.qmp.iter().filter(|path| !is_managers(path) && is_free(path));
        let own: Vec<_> = own.collect();
        if let Some(path) = own.iter().find(|path| remedies::is_named(path, &self.host.globs)) {
            self.add(
                Cause::SocketGone,
                &LACKS,
                format!("it was started with {}, and there is no such socket now", path.display()),
                Some(remedies::restart(vm)),
            );
        } else if let Some(path) = own.first() {
            self.add(
                Cause::SocketElsewhere,
                &LACKS,
                format!("no `qmp` in [host] names its QMP socket, {}", path.display()),
                Some(remedies::glob_of(path, &self.host.globs)),
            );
        } else if !vm.is_served_by_libvirt() {
            self.add(
                Cause::NoSocket,
                &LACKS,
                "it has no QMP socket for Overbook",
                Some(remedies::socket(vm, self.host)),
            );
        }
        self.confinement();
    }

    /// Rules that would keep QEMU from making the socket on its command line, at its next start.
    fn confinement(&mut self) {
        let has_own = !self.vm.line.qmp.is_empty();
        let Some(label) = self.vm.process.label.as_ref().filter(|_| has_own) else { return };
        let is_allowed = || self.host.apparmor.iter().any(|line| line.contains("/overbook/qmp/"));
        if label.starts_with("libvirt-") && !is_allowed() {
            self.add(
                Cause::AppArmor,
                &[See],
                format!("AppArmor ({label}) will keep it from making a socket"),
                Some(remedies::apparmor_socket(self.host)),
            );
        } else if label.contains(":svirt") {
            self.add(
                Cause::SeLinux,
                &[See],
                format!("SELinux ({label}) will keep it from making a socket"),
                Some(remedies::selinux_socket(self.host)),
            );
        }
    }

    fn name(&mut self) {
        let vm = self.vm;
        if let Some(other) = vm.namesakes.first() {
            self.add(
                Cause::SameName,
                &[See, Balloon, Tracking],
                format!("process {other} has the same name"),
                Some(remedies::rename(vm)),
            );
        }
        match (&vm.name, &vm.line.name) {
            (Some(name), Some(told)) if name != told => self.add(
                Cause::OtherName,
                &[See, Balloon],
                format!(
                    "its QEMU calls itself `{told}`, but {} has started it as `{name}`",
                    vm.started_by.words()
                ),
                Some(remedies::restart(vm)),
            ),
            (None, _) if !vm.line.has_more => self.note(
                Cause::NoName,
                &[See],
                "it has no name, so no group can have it",
                Some(Remedy::qemu("-name NAME")),
            ),
            _ => {}
        }
    }

    fn balloon(&mut self) {
        let vm = self.vm;
        match vm.line.balloon {
            // Its balloon may stand in the file.
            None if vm.line.has_more => {}
            None => self.add(
                Cause::NoBalloon,
                &[Balloon, Statistics, FreePages],
                "it has no balloon device",
                Some(remedies::balloon(vm)),
            ),
            Some(balloon) if !balloon.reports_free_pages => self.add(
                Cause::NoReporting,
                &[FreePages],
                "its balloon device does not report free pages",
                Some(remedies::reporting(vm)),
            ),
            Some(_) => {}
        }
        if vm.proxmox.as_ref().is_some_and(ProxmoxConf::is_balanced) {
            self.add(
                Cause::MovedByOthers,
                &[Balloon],
                "Proxmox (pvestatd) moves its balloon by itself, so Overbook leaves it alone",
                Some(remedies::rest_balloon(vm)),
            );
        }
        if let Some(kind) = &vm.line.other_memory {
            self.note(
                Cause::OtherMemory,
                &[Balloon],
                format!("the balloon does not cover the memory of its {kind}"),
                None,
            );
        }
        let ram = vm.line.ram.unwrap_or_default();
        let is_low = |it: &&model::view::MemoryLimit| it.limit < ram.plus(OF_QEMU);
        if let Some(limit) = vm.process.memory_limits.iter().find(is_low) {
            self.add(
                Cause::CgroupLimit,
                &[Balloon],
                format!(
                    "{} of {} is {}: that does not hold its RAM of {ram} and QEMU itself",
                    limit.file, limit.cgroup, limit.limit
                ),
                Some(remedies::raise_limit(vm, limit)),
            );
        }
    }

    /// Memory that the host cannot have back.
    fn memory(&mut self) {
        let vm = self.vm;
        let all = [Balloon, FreePages, Tracking, Paging, Sharing];
        let of_paging = [Tracking, Paging, Sharing];
        let passes_devices = vm.line.passed_through.is_some() || vm.process.passes_devices;
        // The kernel counts memory that a device pins as locked.
        if vm.line.is_locked || (vm.process.is_locked && !passes_devices) {
            let why = "its memory is locked: the host gets none of it back";
            self.add(Cause::Locked, &all, why, Some(remedies::unlock(vm)));
        }
        if passes_devices {
            let device = vm.line.passed_through.as_deref().unwrap_or("a device");
            let why = format!("{device} is passed through, which pins all of its memory");
            let lacks = [&all[..], &[Move]].concat();
            self.add(Cause::PassedThrough, &lacks, why, Some(remedies::take_device(vm)));
        }
        match backing(vm) {
            Backing::HugePages => self.add(
                Cause::HugePages,
                &all,
                "its memory is in the kernel's pool of huge pages, which is never paged",
                Some(remedies::small_pages(vm)),
            ),
            Backing::Shared => {
                let (for_device, remedy) = match &vm.line.vhost_user {
                    Some(device) => (format!(", as its {device} needs it"), None),
                    None => (String::new(), Some(remedies::private(vm))),
                };
                let why = format!("its memory is shared (share=on){for_device}");
                self.add(Cause::SharedMemory, &of_paging, why, remedy);
            }
            Backing::File => self.add(
                Cause::FileMemory,
                &of_paging,
                "its memory is mapped from a file",
                Some(remedies::private(vm)),
            ),
            Backing::Private => {}
        }
        if vm.line.is_preallocated && !self.has(Cause::HugePages) {
            let why = "its memory is preallocated: the host backs all of it from the start";
            self.add(Cause::Preallocated, &[Balloon], why, Some(remedies::no_preallocation(vm)));
        }
    }

    fn shim(&mut self) {
        let vm = self.vm;
        let process = &vm.process;
        let lacks = [Tracking, Paging, Sharing];
        match &process.shim {
            Shim::None => {
                let reason = match (vm.wanted.dedup, vm.wanted.lazy) {
                    (true, _) => ", and its group shares pages",
                    (_, true) => ", and its group hands over freed pages",
                    _ => "",
                };
                let is_wanted = !reason.is_empty();
                let reason = format!("its QEMU was started without Overbook's shim{reason}");
                let lacks: &[Capability] =
                    if vm.wanted.lazy { &[Sharing, FreePages] } else { &[Sharing] };
                self.note(Cause::NoShim, lacks, reason, Some(remedies::shim(vm)));
                if let Some(last) = self.all.last_mut() {
                    last.is_fault = is_wanted;
                }
                return;
            }
            Shim::NotLoaded(path) => {
                let is_selinux = process.label.as_ref().is_some_and(|it| it.contains(":svirt"));
                let why = match is_selinux {
                    true => "SELinux drops it: its policy needs `noatsecure`".to_owned(),
                    false => format!("the loader did not load {}", path.display()),
                };
                let reason = format!("LD_PRELOAD names the shim, but {why}");
                self.add(Cause::ShimNotLoaded, &[Sharing], reason, Some(remedies::load(path)));
                return;
            }
            Shim::Replaced | Shim::Loaded => {}
        }
        let replaced = || "its shim's file was replaced since its start".to_owned();
        let told = vm.told.as_ref().and_then(|told| told.shim_differs.clone());
        if let Some(why) = told.or_else(|| (process.shim == Shim::Replaced).then(replaced)) {
            let reason = format!("{why}: it works on; restart the VM when convenient");
            self.note(Cause::OldShim, &[], reason, Some(remedies::restart(vm)));
        }
        if process.is_in_other_network {
            self.add(
                Cause::OtherNetwork,
                &lacks,
                "it runs in another network namespace, where its shim cannot be found",
                Some(Remedy::by_hand("start its QEMU in the host's network namespace")),
            );
        }
        if !process.may_trap {
            let user = process.uid;
            self.add(
                Cause::NoUserfaultfd,
                &lacks,
                format!("user {user}, as which it runs, may not use /dev/userfaultfd"),
                Some(remedies::userfaultfd()),
            );
        }
        let is_confined = process.label.as_ref().is_some_and(|it| it.starts_with("libvirt-"));
        let is_allowed = || self.host.apparmor.iter().any(|it| it.contains("/dev/userfaultfd"));
        if process.uid != 0 && is_confined && !is_allowed() {
            self.add(
                Cause::AppArmor,
                &lacks,
                "AppArmor keeps its shim from /dev/userfaultfd",
                Some(remedies::apparmor_line("/dev/userfaultfd rw,")),
            );
        }
        if let Some(why) = &self.host.no_shim {
            self.add(Cause::OldKernel, &lacks, why, None);
            self.is_hosts();
        } else if let Some(why) = &self.host.no_shim_paging {
            self.add(Cause::OldKernel, &[Paging], why, None);
            self.is_hosts();
        }
    }

    /// The last diagnosis is mended at the host.
    fn is_hosts(&mut self) {
        if let Some(last) = self.all.last_mut() {
            last.is_hosts = true;
        }
    }

    fn paging(&mut self) {
        let vm = self.vm;
        let lacks = [Tracking, Paging];
        let has_shim = vm.process.shim.is_loaded();
        if let Some(cgroup) = &vm.process.forbids_swap {
            let lacks = if has_shim { &lacks[1..] } else { &lacks[..] };
            let why = format!("its cgroup may not swap (memory.swap.max of {cgroup} is 0)");
            self.add(Cause::SwapForbidden, lacks, why, Some(remedies::allow_swap(cgroup)));
        }
        if let Some(why) = &self.host.no_paging {
            let lacks = if has_shim { &lacks[1..] } else { &lacks[..] };
            self.add(Cause::HostCannotPage, lacks, why, None);
            self.is_hosts();
        }
        if !has_shim && !vm.wanted.attach {
            let why = "`attach` is off: a VM without the shim is not tracked";
            let remedy = Some(remedies::config(&table(vm), "attach = \"on\""));
            self.note(Cause::SwitchedOff, &lacks, why, remedy);
        }
    }

    fn group(&mut self) {
        let vm = self.vm;
        let Some(group) = &vm.wanted.group else {
            let name = vm.name.as_deref().unwrap_or("NAME");
            let line = format!("vms = [{}]", remedies::text(name));
            self.note(
                Cause::NoGroup,
                &[Balloon, Paging, Sharing],
                "it is in no group: it is observed, and nothing is moved",
                Some(remedies::config("[group.NAME]", &line)),
            );
            return;
        };
        let off = [
            (vm.wanted.tracking, Tracking, "tracking", "1%"),
            (vm.wanted.cold, Paging, "cold", "when-needed"),
            (vm.wanted.dedup, Sharing, "dedup", "adaptive"),
        ];
        for (_, capability, key, on) in off.into_iter().filter(|(is_on, ..)| !is_on) {
            let why = format!("`{key}` is off for group {group}");
            let line = format!("{key} = \"{on}\"");
            let remedy = Some(remedies::config(&format!("[group.{group}]"), &line));
            self.note(Cause::SwitchedOff, &[capability], why, remedy);
        }
    }

    fn moves(&mut self) {
        let vm = self.vm;
        match &vm.started_by {
            StartedBy::Hand => {}
            by => {
                let why = format!("{} has started it, and alone may move it", by.words());
                self.note(Cause::ManagersMove, &[Move], why, Some(remedies::migrate(vm)));
                return;
            }
        }
        if !self.host.has_pool {
            self.note(Cause::NoPool, &[Move], "the host is in no pool", None);
            self.is_hosts();
        } else if !vm.wanted.movable {
            let name = vm.name.as_deref().unwrap_or("NAME");
            let line = format!("movable = [{}]", remedies::text(name));
            let remedy = Some(remedies::config("[pool]", &line));
            self.note(Cause::NotMovable, &[Move], "`movable` does not name it", remedy);
        }
    }

    /// Reasons that only the daemon knows. A reason that the facts have told already is left out.
    fn told(&mut self, told: &DaemonView) {
        if let Some(why) = &told.link_error
            && !self.lacks(See)
        {
            let remedy = remedies::of_words(self.vm, why);
            self.add(Cause::Told, &[See, Balloon, Statistics], why, remedy);
        }
        for (code, words) in &told.refusals {
            let (cause, lacks): (_, &[Capability]) = match code.as_str() {
                "moved_by_others" | "managers_balloon" => (Cause::MovedByOthers, &[Balloon]),
                "gives_nothing_back" => (Cause::GivesNothingBack, &[Balloon]),
                "uncooperative" => (Cause::Uncooperative, &[Balloon]),
                "swapless" => (Cause::NoGuestSwap, &[Balloon]),
                "no_stats" | "stale_stats" | "implausible_stats" | "counters_went_back" => {
                    (Cause::NoStatistics, &[Statistics, Balloon])
                }
                _ => continue,
            };
            let is_known = self.has(cause)
                || self.has(Cause::NoBalloon)
                || (cause == Cause::GivesNothingBack && self.is_held())
                || (cause == Cause::NoStatistics && self.lacks(Statistics));
            if !is_known {
                let remedy =
                    remedies::of_words(self.vm, words).or_else(|| remedies::of(cause, self.vm));
                self.add(cause, lacks, words, remedy);
            }
        }
        for (mechanism, words) in &told.unsupported {
            let capability = match mechanism.as_str() {
                "balloon" => Balloon,
                "statistics" => Statistics,
                "free_page_reporting" | "free_pages" => FreePages,
                "host_memory" => See,
                "tracking" => Tracking,
                "cold" => Paging,
                "dedup" => Sharing,
                _ => continue,
            };
            let is_old = words.contains("speaks version");
            let is_choice = words.starts_with("switched off")
                || ["no group", "by the operator"].iter().any(|part| words.contains(part));
            // It ends by itself in a moment.
            let is_passing = [
                "resting: ",
                "not reported",
                "not asked yet",
                "is not known yet",
                "migration is running",
            ]
            .iter()
            .any(|part| words.contains(part));
            // Choices were read in the configuration.
            if is_choice || is_passing || (self.lacks(capability) && !is_old) {
                continue;
            }
            if is_old && self.all.iter().any(|it| it.cause == Cause::OldShim && it.is_fault) {
                continue;
            }
            let cause = match capability {
                _ if is_old => Cause::OldShim,
                Statistics => Cause::NoStatistics,
                _ => Cause::Told,
            };
            let lacks: &[Capability] = match is_old {
                true => &[Tracking, Paging, Sharing],
                false => &[capability],
            };
            let remedy =
                remedies::of_words(self.vm, words).or_else(|| remedies::of(cause, self.vm));
            self.all.retain(|it| it.cause != Cause::OldShim || it.is_fault);
            self.add(cause, lacks, words, remedy);
        }
    }

    /// Whether the facts tell why the host gets no memory back.
    fn is_held(&self) -> bool {
        let causes = [Cause::Locked, Cause::PassedThrough, Cause::HugePages, Cause::Preallocated];
        causes.into_iter().any(|cause| self.has(cause))
    }
}

/// How the VM's RAM is mapped: as the command line says, except for the kernel's pool of huge
/// pages, which may be mounted anywhere.
fn backing(vm: &VmFacts) -> Backing {
    let seen = vm.process.backing.clone();
    if seen == Some(Backing::HugePages) {
        return Backing::HugePages;
    }
    let is_huge = |path: &std::path::PathBuf| path.to_string_lossy().contains("hugepages");
    let mut paths = vm.line.backends.iter().filter_map(|it| it.path.as_ref());
    let mem_path = vm.line.mem_path.iter();
    if vm.line.backends.iter().any(|it| it.is_huge)
        || paths.clone().chain(mem_path.clone()).any(is_huge)
    {
        Backing::HugePages
    } else if vm.line.backends.iter().any(|it| it.is_shared) {
        Backing::Shared
    } else if paths.next().is_some() || vm.line.mem_path.is_some() {
        Backing::File
    } else {
        // Other devices map shared memory, too. It is the RAM's only if a file may say so.
        seen.filter(|_| vm.line.has_more).unwrap_or(Backing::Private)
    }
}

/// The table of the configuration for the VM's group, or for VMs of no group.
fn table(vm: &VmFacts) -> String {
    vm.wanted.group.as_ref().map_or("[host]".to_owned(), |group| format!("[group.{group}]"))
}
