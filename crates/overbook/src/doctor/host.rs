//! The host: its kernel, swap and cgroups, the sockets' directories, and Overbook's own files.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use model::Spec;
use sys::features::{self, Feature};
use sys::ksm::{Knob, Ksm};

use super::facts::{HostFacts, VmFacts};
use super::remedies::{self, Remedy, quoted};
use super::sockets::{SocketFile, SocketState};
use super::{Capability, Cause, Diagnosis, look};
use crate::http::{Doors, ListenError, TokenError, TokenFault};
use Capability::{Balloon, FreePages, Move, Paging, See, Sharing, Statistics, Tracking};
use api::client::ClientError;
use drivers::discovery;

const APPARMOR: [&str; 2] = [
    "/etc/apparmor.d/local/abstractions/libvirt-qemu",
    "/etc/apparmor.d/abstractions/libvirt-qemu.d/overbook",
];
const ZRAM: &str = "modprobe zram && D=$(zramctl --find --size 8G --algorithm lz4) && \
                    mkswap $D && swapon -p 100 $D";
const ZSWAP: &str = "echo 1 > /sys/module/zswap/parameters/enabled";

/// The result of trying one feature of the kernel: `Err` with the reason if it is missing.
pub(super) type Tried = (Feature, Result<(), String>);

/// Tries the kernel's features.
pub(super) fn try_features() -> Vec<Tried> {
    let tried = |feature| match features::probe(feature) {
        features::Finding::Works(_) => (feature, Ok(())),
        features::Finding::Missing(why) => (feature, Err(why)),
    };
    features::ALL.map(tried).to_vec()
}

/// The facts on which VMs depend.
pub(super) fn facts(spec: &Spec, tried: &[Tried]) -> HostFacts {
    let missing = |wanted: Feature| {
        let found = tried.iter().find(|(feature, _)| *feature == wanted)?;
        found.1.clone().err()
    };
    let no_shim = [Feature::Userfaultfd, Feature::UffdioMove, Feature::PagemapScan];
    HostFacts {
        globs: spec.host.globs(),
        no_paging: missing(Feature::PagesOutside),
        no_shim: no_shim.into_iter().find_map(missing),
        no_shim_paging: missing(Feature::MovesSwapped),
        has_pool: spec.pool.is_some(),
        apparmor: apparmor_rules(),
    }
}

/// The rules that were added to libvirt's, without comments.
fn apparmor_rules() -> BTreeSet<String> {
    let texts = APPARMOR.map(|path| look::read(path, 64 << 10));
    let lines = texts.iter().flat_map(|text| text.lines()).map(str::trim);
    lines.filter(|line| !line.starts_with('#') && !line.is_empty()).map(str::to_owned).collect()
}

/// A diagnosis of the host.
fn fault(
    cause: Cause,
    lacks: &[Capability],
    reason: impl Into<String>,
    remedy: Option<Remedy>,
) -> Diagnosis {
    let (lacks, reason) = (lacks.to_vec(), reason.into());
    Diagnosis { cause, lacks, reason, remedy, is_fault: true, is_hosts: true }
}

fn note(
    cause: Cause,
    lacks: &[Capability],
    reason: impl Into<String>,
    remedy: Option<Remedy>,
) -> Diagnosis {
    Diagnosis { is_fault: false, ..fault(cause, lacks, reason, remedy) }
}

/// The kernel's missing features, each with its remedy.
pub(super) fn of_features(tried: &[Tried], vms: &[VmFacts]) -> Vec<Diagnosis> {
    let has_shim = vms.iter().any(|vm| vm.process.shim.is_loaded());
    let has_swap = !tried.iter().any(|(it, found)| *it == Feature::Swap && found.is_err());
    let missing = tried.iter().filter_map(|(it, found)| Some((*it, found.as_ref().err()?)));
    missing.filter_map(|(feature, why)| of_feature(feature, why, has_shim, has_swap)).collect()
}

fn of_feature(feature: Feature, why: &str, has_shim: bool, has_swap: bool) -> Option<Diagnosis> {
    let of_shim = [Tracking, Paging, Sharing];
    let kernel = |least: &str| {
        Some(Remedy::by_hand(format!(
            "install a kernel from Linux {least} on, and start the host anew"
        )))
    };
    // Only VMs with the shim need it.
    let needed = |lacks: &[Capability], reason: String, remedy| match has_shim {
        true => fault(Cause::OldKernel, lacks, reason, remedy),
        false => note(Cause::OldKernel, lacks, reason, remedy),
    };
    let shell = |line: &str| Some(Remedy::shell(line));
    Some(match feature {
        Feature::Userfaultfd => needed(&of_shim, format!("userfaultfd: {why}"), kernel("6.8")),
        Feature::UffdioMove => needed(&of_shim, format!("UFFDIO_MOVE: {why}"), kernel("6.8")),
        Feature::PagemapScan => needed(&of_shim, format!("PAGEMAP_SCAN: {why}"), kernel("6.8")),
        Feature::MovesSwapped => {
            needed(&[Paging], format!("VMs with the shim are not paged out: {why}"), kernel("6.14"))
        }
        Feature::UserfaultfdForUsers => {
            let why = format!("userfaultfd for QEMUs that do not run as root: {why}");
            note(Cause::NoUserfaultfd, &of_shim, why, Some(remedies::userfaultfd()))
        }
        Feature::Swap => {
            fault(Cause::NoSwap, &[Tracking, Paging], "the host has no swap", shell(ZRAM))
        }
        // Without swap that has been said.
        Feature::PagesOutside if !has_swap => return None,
        Feature::PagesOutside => {
            let remedy = match why {
                _ if why.contains("lose a write") => kernel("6.8"),
                _ if why.contains("full") => shell(ZRAM),
                _ if why.contains("disk") => shell(ZSWAP),
                _ => None,
            };
            let cause =
                if why.contains("lose a write") { Cause::OldKernel } else { Cause::SlowSwap };
            fault(cause, &[Tracking, Paging], why, remedy)
        }
        Feature::MadvFree => {
            note(Cause::OldKernel, &[FreePages], format!("MADV_FREE: {why}"), None)
        }
        Feature::MadvPageout => {
            note(Cause::OldKernel, &[Paging], format!("MADV_PAGEOUT: {why}"), kernel("5.10"))
        }
        Feature::Pressure => {
            let remedy = Remedy::at("kernel command line; start the host anew", "psi=1");
            note(Cause::NoPressure, &[], format!("memory pressure: {why}"), Some(remedy))
        }
        Feature::CgroupCpu | Feature::CgroupMemory => {
            let place = "kernel command line; start the host anew";
            let remedy = Remedy::at(place, "systemd.unified_cgroup_hierarchy=1");
            note(Cause::NoCgroup, &[], format!("cgroups: {why}"), Some(remedy))
        }
        Feature::Ksm => {
            note(Cause::NoKsm, &[Sharing], format!("KSM, for VMs without the shim: {why}"), None)
        }
        Feature::HugePages => {
            let line = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
            note(Cause::NoHugePages, &[], format!("transparent huge pages: {why}"), shell(line))
        }
        // Its substitute costs next to nothing.
        Feature::TlbMisses => return None,
    })
}

/// cgroups of version 1 alone, a KSM that another program runs, and a host without a pool.
pub(super) fn of_settings(spec: &Spec) -> Vec<Diagnosis> {
    let mut found = Vec::new();
    let has_v2 = ["", "/unified"]
        .iter()
        .any(|tree| Path::new(&format!("/sys/fs/cgroup{tree}/cgroup.controllers")).exists());
    let is_v1 = !has_v2 && Path::new("/sys/fs/cgroup/memory").exists();
    if is_v1 {
        let place = "kernel command line; start the host anew";
        found.push(note(
            Cause::NoCgroup,
            &[Paging],
            "the host has cgroups of version 1 alone: the kernel chooses no pages to page out",
            Some(Remedy::at(place, "systemd.unified_cgroup_hierarchy=1")),
        ));
    }
    let runs =
        Ksm::of_host().settings().is_ok_and(|it| it.get(&Knob::Run).is_some_and(|run| run == "1"));
    if runs && spec.host.ksm == model::KsmSpec::Off && spec.groups.len() > 1 {
        found.push(note(
            Cause::ForeignKsm,
            &[Sharing],
            "KSM runs, and Overbook does not drive it: it merges pages of different groups",
            Some(Remedy::shell("echo 2 > /sys/kernel/mm/ksm/run")),
        ));
    }
    if spec.pool.is_none() {
        let place = "overbook.toml: see the guide, A pool of hosts";
        let remedy = Some(Remedy::at(place, "[pool]"));
        found.push(note(Cause::NoPool, &[Move], "the host is in no pool: no VM moves", remedy));
    }
    found
}

/// The directories of the VMs' sockets, and the files in them.
pub(super) fn of_directories(spec: &Spec, files: &[SocketFile]) -> Vec<Diagnosis> {
    let mut found = Vec::new();
    let lacks = [See, Balloon, Statistics, Move];
    let missing: BTreeSet<PathBuf> =
        spec.host.qmp.iter().filter_map(|glob| missing_directory(glob)).collect();
    for directory in missing {
        let has_kvm = look::read("/etc/group", 1 << 20).lines().any(|it| it.starts_with("kvm:"));
        let group = if has_kvm { "" } else { "groupadd --system kvm; " };
        let line = format!("{group}install -d -g kvm -m 1770 {}", directory.display());
        let why =
            format!("there is no directory {}: no QEMU makes its socket", directory.display());
        found.push(fault(Cause::NoDirectory, &lacks, why, Some(Remedy::shell(line))));
    }
    for why in discovery::faults_of_directories(&spec.host.qmp) {
        let remedy = closed(&why).map(Remedy::shell);
        found.push(fault(Cause::OpenDirectory, &[See], why, remedy));
    }
    for SocketFile { path, state } in files {
        let path = path.display();
        match state {
            SocketState::Stale => found.push(fault(
                Cause::StaleSocket,
                &[See],
                format!("no process listens at {path}: its QEMU has ended"),
                Some(Remedy::shell(format!("rm {}", quoted(&path.to_string())))),
            )),
            SocketState::NoSocket => found.push(fault(
                Cause::PlainFile,
                &[See],
                format!("{path} is no socket, and `qmp` names it"),
                // It may be a link to a socket that is in use, or another program's file.
                Some(Remedy::by_hand("move it away, or let `qmp` in [host] name sockets alone")),
            )),
            SocketState::Listens { .. } => {}
        }
    }
    found
}

/// The command that closes a directory, by its fault in words (`tenant::place`).
fn closed(why: &str) -> Option<String> {
    let path = |words: &str| Some(quoted(&why[why.find(words)? + words.len()..]));
    let everybody = path("everybody may write to ").map(|path| format!("chmod o-w {path}"));
    let others = || path("others than root may write to ").map(|it| format!("chmod go-w {it}"));
    let owner =
        || why.split_once(" is of user ").map(|(it, _)| format!("chown root {}", quoted(it)));
    everybody.or_else(others).or_else(owner)
}

/// The directory of a glob, if the part before its first wildcard does not exist.
fn missing_directory(glob: &str) -> Option<PathBuf> {
    let parent = Path::new(glob).parent()?;
    let is_known = |part: &std::path::Component<'_>| {
        !part.as_os_str().to_string_lossy().contains(['*', '?', '['])
    };
    let known: PathBuf = parent.components().take_while(is_known).collect();
    (!known.is_dir()).then_some(known)
}

/// The daemon, its API and its socket.
pub(super) fn of_daemon(
    spec: &Spec,
    has_daemon: bool,
    error: Option<&ClientError>,
) -> Vec<Diagnosis> {
    let mut found: Vec<_> = Doors::check(&spec.api).iter().map(of_door).collect();
    if let Some(error) = error {
        let line = "systemctl status overbook; journalctl -u overbook -n 20";
        found.push(match error {
            ClientError::NotPermitted(_) => note(Cause::RootOnly, &[], error.to_string(), None),
            _ => fault(Cause::NoDaemon, &[], error.to_string(), Some(Remedy::shell(line))),
        });
    } else if !has_daemon {
        let why = "no daemon runs: this is what /proc tells, without the guests' own statistics";
        let remedy = Some(Remedy::shell("systemctl enable --now overbook"));
        found.push(note(Cause::NoDaemon, &[], why, remedy));
    }
    if let Ok(meta) = std::fs::metadata(&spec.api.socket)
        && meta.gid() == 0
        && has_daemon
    {
        let path = spec.api.socket.display();
        let why = format!("only root may ask the daemon: {path} has the group root");
        let place = "until the daemon starts anew";
        let remedy = Remedy::at(place, format!("chgrp GROUP {0}", quoted(&path.to_string())));
        found.push(note(Cause::RootOnly, &[], why, Some(remedy)));
    }
    if !rustix::process::geteuid().is_root() {
        let why = "this ran as another user than root, who may not look at all processes";
        found.push(note(Cause::NotRoot, &[], why, Some(Remedy::shell("sudo overbook doctor"))));
    }
    found
}

fn of_door(error: &ListenError) -> Diagnosis {
    let new = |path: &Path| {
        let path = quoted(&path.display().to_string());
        format!("(umask 077; openssl rand -hex 16 > {path})")
    };
    let line = match error {
        ListenError::Token(TokenError { path, fault: TokenFault::Exposed(_), .. }) => {
            format!("chmod 600 {}", quoted(&path.display().to_string()))
        }
        ListenError::Token(TokenError { path, .. }) => new(path),
        ListenError::NoToken(_) => {
            let line = "token_file = \"/etc/overbook/token\"";
            return fault(
                Cause::Api,
                &[],
                error.to_string(),
                Some(remedies::config("[api]", line)),
            );
        }
        ListenError::NotASocket(_) => {
            let line = "move it away, or name another file as `socket` in [api]";
            return fault(Cause::Api, &[], error.to_string(), Some(Remedy::by_hand(line)));
        }
        _ => return fault(Cause::Api, &[], error.to_string(), None),
    };
    fault(Cause::Api, &[], error.to_string(), Some(Remedy::shell(line)))
}

/// Proxmox's files cannot be read.
pub(super) fn of_proxmox(why: &str) -> Diagnosis {
    let remedy = Some(Remedy::shell("systemctl status pve-cluster"));
    fault(Cause::ManagersFiles, &[See], format!("Proxmox's files cannot be read: {why}"), remedy)
}

/// Faults of the configuration.
pub(super) fn of_configuration(faults: usize, path: &Path) -> Diagnosis {
    let path = path.display();
    if !Path::new(&path.to_string()).exists() {
        let line = format!("install -D -m 644 /usr/share/doc/overbook/overbook.toml {path}");
        let why = format!("there is no configuration {path}: the defaults were taken");
        return fault(Cause::Configuration, &[], why, Some(Remedy::shell(line)));
    }
    let why = format!("the configuration has {faults} faults, and the defaults were taken");
    fault(Cause::Configuration, &[], why, Some(Remedy::shell("overbook check")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> Spec {
        model::config::parse(&[(String::new(), String::new())]).unwrap()
    }

    #[test]
    fn a_kernel_without_all_features_is_told_what_each_is_for() {
        let tried = features::ALL.map(|feature| (feature, Err("tried".to_owned())));
        let found = of_features(&tried, &[]);
        let faults: Vec<_> = found.iter().filter(|it| it.is_fault).map(|it| it.cause).collect();
        assert_eq!(faults, [Cause::NoSwap], "without a VM with the shim the rest is optional");
        let old = |it: &&Diagnosis| it.cause == Cause::OldKernel && it.remedy.is_some();
        assert!(found.iter().filter(old).count() >= 4, "{found:?}");
        let none = features::ALL.map(|feature| (feature, Ok(())));
        assert!(of_features(&none, &[]).is_empty());
    }

    #[test]
    fn swap_is_mended_by_its_fault() {
        let line = |why: &str| {
            let found = of_feature(Feature::PagesOutside, why, false, true).unwrap();
            (found.cause, found.remedy.unwrap().line)
        };
        assert_eq!(line("the host swaps to a disk first, …"), (Cause::SlowSwap, ZSWAP.to_owned()));
        assert_eq!(line("Linux 6.1.70 can lose a write …").0, Cause::OldKernel);
        assert_eq!(of_feature(Feature::PagesOutside, "no swap", false, false), None);
    }

    #[test]
    fn files_that_are_no_vms_are_named_with_their_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = defaults();
        spec.host.qmp = vec![format!("{}/none/*.sock", dir.path().display())];
        let files = [SocketState::Stale, SocketState::NoSocket]
            .map(|state| SocketFile { path: "/q/a.sock".into(), state });
        let found = of_directories(&spec, &files);
        let causes: Vec<_> = found.iter().map(|it| it.cause).collect();
        assert!(causes.starts_with(&[Cause::NoDirectory]), "{found:?}");
        assert!(causes.ends_with(&[Cause::StaleSocket, Cause::PlainFile]), "{found:?}");
        let remedies = found[found.len() - 2..].iter().map(|it| it.remedy.clone().unwrap());
        let [stale, file] = remedies.collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(stale, Remedy::shell("rm /q/a.sock"));
        assert!(!file.line.contains("rm "), "nothing else is removed: {file:?}");
        let line = |why: &str| closed(why).unwrap();
        assert_eq!(line("everybody may write to /tmp/a b"), "chmod o-w '/tmp/a b'");
        assert_eq!(line("others than root may write to /run/x"), "chmod go-w /run/x");
        assert_eq!(line("/q is of user 7, who can put anything there"), "chown root /q");
        assert_eq!(closed("/q: No such file"), None);
    }

    #[test]
    fn a_missing_or_open_token_is_mended_by_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        let api = model::spec::ApiSpec {
            tcp: Some("127.0.0.1:0".parse().unwrap()),
            token_file: Some(token.clone()),
            ..defaults().api
        };
        let line = || of_door(&Doors::check(&api)[0]).remedy.unwrap().line;
        assert!(line().contains("openssl rand"), "{}", line());
        std::fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
        assert!(line().starts_with("chmod 600"), "{}", line());
        let remedy = of_door(&ListenError::NotASocket("/etc/passwd".into())).remedy.unwrap();
        assert!(remedy.line.starts_with("move it away"), "no file is removed: {remedy:?}");
    }
}
