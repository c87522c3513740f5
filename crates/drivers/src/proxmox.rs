//! Proxmox's VMs on this node: their names, in which pool and with which tags, and whether
//! pvestatd moves their balloons.
//!
//! **Problem.** Their files lie in `/etc/pve`, a FUSE file system of the cluster. A read there may
//! hang, in a way that not even SIGKILL ends. A thread of the daemon that hangs so would keep the
//! daemon from ending. **Idea.** A process of its own reads the files ([`read`]) and writes a
//! report whenever one changes. The daemon keeps the latest one ([`Proxmox`]) and opens no file in
//! `/etc/pve`. A node without `/run/qemu-server` needs none of it.
//!
//! **Invariants.** A VM belongs to a process by the PID in Proxmox's own directory, which only root
//! writes to. The last report stays in force while there is no newer one, so no VM leaves its
//! group, and no balloon is taken over from pvestatd, because the file system hangs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use model::proxmox::{ProxmoxConf, ProxmoxReport, ProxmoxVm, pools_in};
use model::{VmName, VmView};
use rustix::fs::{Mode, OFlags};
use sys::process::Identity;

use super::identity;
use super::libvirt::AllSettings;
use super::slot::Slot;
use super::tenant::managers;

/// Proxmox's directory of PIDs and sockets. Every node has it.
pub const RUN: &str = "/run/qemu-server";
/// The mount point of Proxmox's cluster file system.
pub const CLUSTER: &str = "/etc/pve";

/// Largest file in the cluster file system.
const MOST_BYTES: u64 = 1 << 20;
/// Maximum number of VMs of a node.
const MOST_VMS: usize = 4096;
/// Time after the start in which a VM that is met waits for the first report.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads the files of all VMs of this node. It may hang.
#[must_use]
pub fn read(run: &Path, cluster: &Path) -> ProxmoxReport {
    let fault = |path: &Path, error: io::Error| Some(format!("{}: {error}", path.display()));
    let failed = |path: &Path, error| ProxmoxReport { vms: Vec::new(), fault: fault(path, error) };
    let processes = managers::proxmoxs(run);
    // A link to the directory of this node.
    let directory = cluster.join("qemu-server");
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) => return failed(&directory, error),
    };
    let users = cluster.join("user.cfg");
    let mut pools = match text_of(&users) {
        Ok(text) => pools_in(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => return failed(&users, error),
    };
    let mut report = ProxmoxReport::default();
    for entry in entries {
        let path = match entry {
            Ok(entry) => entry.path(),
            Err(error) => {
                report.fault = fault(&directory, error);
                break;
            }
        };
        let Some(vmid) = vmid_in(&path) else { continue };
        if report.vms.len() == MOST_VMS {
            report.fault = Some(format!("{} has more VMs than {MOST_VMS}", directory.display()));
            break;
        }
        let conf = match text_of(&path) {
            Ok(text) => ProxmoxConf::read(&text),
            Err(error) => {
                report.fault = fault(&path, error);
                continue;
            }
        };
        let process = processes.get(&vmid).map(|process| (process.pid, process.start_ticks));
        report.vms.push(ProxmoxVm { vmid, process, pool: pools.remove(&vmid), conf });
    }
    report.vms.sort_by_key(|vm| vm.vmid);
    report
}

/// The number in a name such as `101.conf`.
fn vmid_in(path: &Path) -> Option<u32> {
    let is_conf = path.extension().is_some_and(|extension| extension == "conf");
    path.file_stem()?.to_str().filter(|_| is_conf)?.parse().ok()
}

/// The text of a regular file of the cluster file system.
///
/// # Errors
/// The kernel's; it is another kind of file, or too large.
pub fn text_of(path: &Path) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(io::Error::other(format!("it has more than {MOST_BYTES} bytes")));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The latest report.
#[derive(Debug)]
pub struct Proxmox {
    known: Mutex<KnownVms>,
    first: Condvar,
    begun: Instant,
}

#[derive(Debug, Default)]
struct KnownVms {
    is_told: bool,
    vms: BTreeMap<u32, Arc<ProxmoxVm>>,
    /// The VMs that run, by their incarnations.
    by_life: BTreeMap<u64, Arc<ProxmoxVm>>,
    settings: Arc<AllSettings>,
}

impl Default for Proxmox {
    fn default() -> Self {
        Self { known: Mutex::default(), first: Condvar::new(), begun: Instant::now() }
    }
}

impl Proxmox {
    /// Notes a report. With a fault, VMs that are missing in it and still run are as before:
    /// Proxmox unmounts the file system for a moment when it is upgraded.
    pub fn note(&self, report: ProxmoxReport) {
        let vms = report.vms.into_iter().map(|vm| (vm.vmid, Arc::new(vm)));
        let process = |(pid, start_ticks)| Identity { pid, start_ticks };
        let mut known = self.known();
        let may_be_missing = report.fault.is_some();
        let runs = |vm: &ProxmoxVm| vm.process.map(process).is_some_and(|it| it.is_alive());
        known.vms.retain(|_, vm| may_be_missing && runs(vm));
        known.vms.extend(vms);
        let of_life = |vm: &Arc<ProxmoxVm>| {
            Some((identity::of_process(process(vm.process?)), Arc::clone(vm)))
        };
        let lives = known.vms.values().filter_map(of_life);
        known.by_life = lives.collect();
        known.is_told = true;
        drop(known);
        self.first.notify_all();
    }

    /// The name of a VM. Blocks shortly after the start, until the first report.
    pub(super) fn name_of(&self, vmid: u32) -> Option<VmName> {
        let left = PATIENCE.saturating_sub(self.begun.elapsed());
        let is_silent = |known: &mut KnownVms| !known.is_told;
        let waited = self.first.wait_timeout_while(self.known(), left, is_silent);
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        known.vms.get(&vmid).map(|vm| vm.name())
    }

    /// Whether the QEMU of this incarnation is a VM of Proxmox.
    pub(super) fn has(&self, life: u64) -> bool {
        self.known().by_life.contains_key(&life)
    }

    /// The settings of the VMs in these slots; the same ones while they do not change.
    pub(super) fn settings(&self, slots: &BTreeMap<PathBuf, Arc<Slot>>) -> Arc<AllSettings> {
        let mut known = self.known();
        if known.by_life.is_empty() && known.settings.is_empty() {
            return Arc::clone(&known.settings);
        }
        let of = |slot: &Arc<Slot>| {
            let state = slot.state();
            let name = state.name.clone().filter(|name| !name.as_str().starts_with('/'))?;
            let vm = known.by_life.get(&state.view.incarnation)?;
            Some((name, Ok(vm.settings())))
        };
        let settings: AllSettings = slots.values().filter_map(of).collect();
        if *known.settings != settings {
            known.settings = Arc::new(settings);
        }
        Arc::clone(&known.settings)
    }

    /// Shows labels, and which balloons pvestatd moves.
    pub(super) fn tell(&self, vms: &mut BTreeMap<VmName, VmView>) {
        let known = self.known();
        for view in vms.values_mut() {
            if let Some(vm) = known.by_life.get(&view.incarnation) {
                view.manager = Some(vm.record());
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownVms> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NodeFiles(tempfile::TempDir);

    impl NodeFiles {
        fn new() -> Self {
            let node = Self(tempfile::tempdir().unwrap());
            for directory in ["run", "pve/nodes/a/qemu-server"] {
                std::fs::create_dir_all(node.at(directory)).unwrap();
            }
            std::os::unix::fs::symlink("nodes/a/qemu-server", node.at("pve/qemu-server")).unwrap();
            node.write("pve/user.cfg", "pool:shop::101:local:\n");
            node
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn write(&self, path: &str, text: impl AsRef<[u8]>) {
            std::fs::write(self.at(path), text).unwrap();
        }

        fn read(&self) -> ProxmoxReport {
            read(&self.at("run"), &self.at("pve"))
        }
    }

    fn own() -> Identity {
        Identity::own().unwrap()
    }

    #[test]
    fn all_vms_of_the_node_are_read_and_those_that_run_have_a_process() {
        let node = NodeFiles::new();
        node.write("pve/qemu-server/101.conf", "name: web-1\nballoon: 512\n");
        node.write("pve/qemu-server/102.conf", "memory: 1024\n");
        node.write("run/101.pid", own().pid.to_string());
        let report = node.read();
        assert_eq!(report.fault, None);
        let [web, other] = report.vms.as_slice() else { panic!("{report:?}") };
        assert_eq!(web.process, Some((own().pid, own().start_ticks)));
        assert_eq!((web.pool.as_deref(), &*web.name().to_string()), (Some("shop"), "web-1"));
        assert_eq!((other.process, &*other.name().to_string()), (None, "vm102"));
    }

    #[test]
    fn an_odd_file_costs_its_own_vm_and_is_told() {
        let node = NodeFiles::new();
        node.write("pve/qemu-server/101.conf", "name: web-1\n");
        node.write("pve/qemu-server/x.conf", "name: none\n");
        node.write("pve/qemu-server/101.conf.tmp.7", "name: none\n");
        node.write("pve/qemu-server/103.conf", b"name: web\xff\xfe\0-3\n#\xff");
        let fifo = node.at("pve/qemu-server/104.conf");
        assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
        let names = |report: &ProxmoxReport| {
            report.vms.iter().map(|vm| vm.name().to_string()).collect::<Vec<_>>()
        };
        let report = node.read();
        assert_eq!(names(&report), ["web-1", "web\u{fffd}\u{fffd}-3"]);
        assert!(report.fault.unwrap().ends_with("104.conf: it is no regular file"));
        std::fs::remove_file(node.at("pve/qemu-server/104.conf")).unwrap();
        node.write("pve/qemu-server/105.conf", vec![b'#'; (1 << 20) + 1]);
        let report = node.read();
        assert_eq!(report.vms.len(), 2);
        assert!(report.fault.unwrap().ends_with("has more than 1048576 bytes"));
        std::fs::remove_file(node.at("pve/user.cfg")).unwrap();
        assert_eq!(node.read().vms.len(), 2, "there need not be any pools");
        std::fs::create_dir(node.at("pve/user.cfg")).unwrap();
        assert!(node.read().vms.is_empty(), "the pools are not known");
        std::fs::remove_dir_all(node.at("pve/nodes")).unwrap();
        assert!(node.read().fault.unwrap().contains("qemu-server: No such file"));
    }

    #[test]
    fn what_cannot_be_read_for_a_moment_stays_as_it_was() {
        let proxmox = Proxmox::default();
        let process = Some((own().pid, own().start_ticks));
        let ended = Some((own().pid, own().start_ticks + 1));
        let vms = [(101, process), (102, process), (103, ended)];
        let vms = vms.map(|(vmid, process)| ProxmoxVm { vmid, process, ..ProxmoxVm::default() });
        proxmox.note(ProxmoxReport { vms: vms.into(), fault: None });
        assert_eq!(proxmox.name_of(103), Some("vm103".into()));
        proxmox.note(ProxmoxReport { vms: Vec::new(), fault: Some("unmounted".to_owned()) });
        assert_eq!(proxmox.name_of(101), Some("vm101".into()));
        let conf = ProxmoxConf::read("name: web-1");
        assert_eq!(proxmox.name_of(103), None, "it does not run any more");
        let vms = vec![ProxmoxVm { vmid: 101, process, conf, ..ProxmoxVm::default() }];
        proxmox.note(ProxmoxReport { vms: vms.clone(), fault: Some("102.conf".to_owned()) });
        assert_eq!(proxmox.name_of(101), Some("web-1".into()));
        assert_eq!(proxmox.name_of(102), Some("vm102".into()));
        proxmox.note(ProxmoxReport { vms, fault: None });
        assert_eq!(proxmox.name_of(102), None, "it is gone");
    }

    #[test]
    fn a_report_tells_names_settings_and_who_moves_the_balloon() {
        let proxmox = Proxmox::default();
        let conf = ProxmoxConf::read("name: web-1\nmemory: 1024\nballoon: 512\ntags: a;b\n");
        let process = Some((own().pid, own().start_ticks));
        let vm = ProxmoxVm { vmid: 101, process, pool: None, conf };
        proxmox.note(ProxmoxReport { vms: vec![vm.clone()], fault: None });
        assert_eq!(proxmox.name_of(101), Some("web-1".into()));
        assert_eq!(proxmox.name_of(102), None);
        let life = identity::of_process(own());
        assert!(proxmox.has(life) && !proxmox.has(life + 1));

        let slot = Arc::new(Slot::new("/q/101.overbook".into()).0);
        slot.state().name = Some("web-1".into());
        slot.state().view.incarnation = identity::of_process(own());
        let slots = [(slot.path.clone(), Arc::clone(&slot))].into();
        let settings = proxmox.settings(&slots);
        let labels = &settings[&"web-1".into()].as_ref().unwrap().labels;
        assert_eq!(labels, &["vmid:101", "tag:a", "tag:b"]);
        assert!(Arc::ptr_eq(&settings, &proxmox.settings(&slots)));

        let mut views = [("web-1".into(), slot.state().view.clone())].into();
        proxmox.tell(&mut views);
        let record = views[&"web-1".into()].manager.clone().unwrap();
        assert_eq!(record.balances.as_deref(), Some("qm set 101 --shares 0"));
        // Another process with the same name is another VM.
        slot.state().view.incarnation += 1;
        assert!(proxmox.settings(&slots).is_empty());
    }
}
