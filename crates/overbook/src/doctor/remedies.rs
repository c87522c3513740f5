//! The one line that mends a cause, for each way in which a VM is started.
//!
//! Sources: libvirt's domain format, `qm(1)` of Proxmox VE 8, QEMU's `-device help`, and the pages
//! of the guide on installing and on managed VMs.

use api::verdict::HOST_PAUSED;
use std::path::{Path, PathBuf};

use model::view::MemoryLimit;
use serde::Serialize;

use super::Cause;
use super::facts::{HostFacts, StartedBy, VmFacts};

/// The directory of QMP sockets that the package makes.
const DIRECTORY: &str = "/run/overbook/qmp";
/// The shim, as the package installs it.
const SHIM: &str = "/usr/lib/overbook/liboverbook_shim.so";
const APPARMOR: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";

/// A remedy: the line, and where it belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Remedy {
    /// The line, to be copied.
    pub(crate) line: String,
    /// Where it belongs; empty: it is a command for a shell.
    pub(crate) place: String,
}

impl Remedy {
    /// A command.
    pub(super) fn shell(line: impl Into<String>) -> Self {
        Self::at("", line)
    }

    /// Something that no command does.
    pub(super) fn by_hand(line: impl Into<String>) -> Self {
        Self::at("by hand", line)
    }

    /// An option of QEMU.
    pub(super) fn qemu(line: impl Into<String>) -> Self {
        Self::at("on QEMU's command line; start the VM anew", line)
    }

    fn without(line: impl Into<String>) -> Self {
        Self::at("remove from QEMU's command line; start the VM anew", line)
    }

    pub(super) fn at(place: impl Into<String>, line: impl Into<String>) -> Self {
        Self { line: line.into(), place: place.into() }
    }
}

/// A word for a shell, quoted if need be.
pub(super) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// The VM's name for a command.
fn name(vm: &VmFacts) -> String {
    quoted(vm.name.as_deref().unwrap_or("NAME"))
}

/// A line in the domain's XML.
fn xml(vm: &VmFacts, element: &str, line: &str) -> Remedy {
    Remedy::at(format!("virsh edit {}, in {element}; shut down and start the VM", name(vm)), line)
}

/// Something to remove from the domain's XML.
fn not_xml(vm: &VmFacts, line: &str) -> Remedy {
    let place = format!("virsh edit {}: remove; shut down and start the VM", name(vm));
    Remedy::at(place, line)
}

/// A change of Proxmox's configuration.
fn qm_set(id: &str, change: &str) -> Remedy {
    let id = quoted(id);
    Remedy::at(format!("then: qm shutdown {id} && qm start {id}"), format!("qm set {id} {change}"))
}

/// Proxmox keeps one value of `args`: the present ones stay.
fn qm_args(vm: &VmFacts, id: &str, more: &str) -> Remedy {
    let present = vm.proxmox.as_ref().and_then(|conf| conf.args.clone()).unwrap_or_default();
    qm_set(id, &format!("--args {}", quoted(format!("{present} {more}").trim())))
}

/// A text for the configuration. TOML knows the escapes of JSON.
pub(super) fn text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A key of Overbook's configuration.
pub(super) fn config(table: &str, line: &str) -> Remedy {
    Remedy::at(format!("{table} of overbook.toml"), line)
}

/// The VM's QEMU is started anew.
pub(super) fn restart(vm: &VmFacts) -> Remedy {
    let name = name(vm);
    match &vm.started_by {
        StartedBy::Hand => Remedy::by_hand("shut the VM down, and start its QEMU anew"),
        StartedBy::Libvirt => Remedy::shell(format!("virsh shutdown {name}; virsh start {name}")),
        StartedBy::Proxmox(id) => Remedy::shell(format!("qm shutdown {id} && qm start {id}")),
    }
}

/// A QMP socket of Overbook's own, or the process that needs none.
pub(super) fn socket(vm: &VmFacts, host: &HostFacts) -> Remedy {
    let option = |path: &Path| format!("-qmp unix:{},server=on,wait=off", path.display());
    match &vm.started_by {
        StartedBy::Hand => {
            let path = place_for(vm.name.as_deref().unwrap_or("NAME"), &host.globs);
            let option = option(&path);
            let words = option.split_once(' ').map(|(dash, list)| (dash, quoted_list(list)));
            Remedy::qemu(words.map_or(String::new(), |(dash, list)| format!("{dash} {list}")))
        }
        StartedBy::Libvirt => Remedy::shell("apt install ./overbook-libvirt_*.deb"),
        StartedBy::Proxmox(id) => Remedy::at(
            format!("then: qm shutdown {id} && qm start {id}"),
            format!("overbook proxmox manage {id}"),
        ),
    }
}

/// Like [`quoted`], for an option with commas.
fn quoted_list(word: &str) -> String {
    if word.contains([' ', '\'', '"', '$', '`', '\\', '&', ';', '(', ')', '<', '>', '|', '*']) {
        quoted(word)
    } else {
        word.to_owned()
    }
}

/// A socket's path that the first glob names.
fn place_for(stem: &str, globs: &[String]) -> PathBuf {
    let of = |glob: &String| {
        let (directory, file) = glob.rsplit_once('/')?;
        let is_simple = !directory.contains(['*', '?', '[']) && file.matches('*').count() == 1;
        (is_simple && !file.contains(['?', '[']))
            .then(|| Path::new(directory).join(file.replace('*', stem)))
    };
    globs.iter().find_map(of).unwrap_or_else(|| Path::new(DIRECTORY).join(format!("{stem}.sock")))
}

/// Whether one of the globs names this path.
pub(super) fn is_named(path: &Path, globs: &[String]) -> bool {
    let options =
        glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::default() };
    let names = |glob: &String| {
        glob::Pattern::new(glob).is_ok_and(|pattern| pattern.matches_path_with(path, options))
    };
    globs.iter().any(names)
}

/// The globs, and one for this socket.
pub(super) fn glob_of(path: &Path, globs: &[String]) -> Remedy {
    let all = globs.iter().cloned().chain([path.display().to_string()]);
    let all: Vec<_> = all.map(|glob| text(&glob)).collect();
    config("[host]", &format!("qmp = [{}]", all.join(", ")))
}

/// One of two sockets goes.
pub(super) fn drop_socket(vm: &VmFacts, socket: &Path) -> Remedy {
    let option = format!("-qmp unix:{}", socket.display());
    match &vm.started_by {
        StartedBy::Hand => Remedy::without(option),
        StartedBy::Libvirt => {
            not_xml(vm, &format!("<qemu:arg value='unix:{}…'/>", socket.display()))
        }
        StartedBy::Proxmox(id) => {
            Remedy::at(format!("in `args` of qm config {id}: remove; start the VM anew"), option)
        }
    }
}

/// Another name.
pub(super) fn rename(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::qemu(format!("-name {}-2", name(vm))),
        StartedBy::Libvirt => Remedy::shell(format!("virsh domrename {0} {0}-2", name(vm))),
        StartedBy::Proxmox(id) => qm_set(id, &format!("--name {}-2", name(vm))),
    }
}

/// A balloon device. Without shares Proxmox leaves it to others.
pub(super) fn balloon(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::qemu("-device virtio-balloon-pci,free-page-reporting=on"),
        StartedBy::Libvirt => {
            xml(vm, "<devices>", "<memballoon model='virtio' freePageReporting='on'/>")
        }
        StartedBy::Proxmox(id) => qm_set(id, &format!("--balloon {} --shares 0", memory(vm))),
    }
}

/// The VM's memory in MiB.
fn memory(vm: &VmFacts) -> u64 {
    let told = vm.proxmox.as_ref().and_then(|conf| conf.memory);
    told.unwrap_or_else(|| vm.line.ram.unwrap_or_default().0 >> 20)
}

/// Free-page reporting.
pub(super) fn reporting(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::qemu("-device virtio-balloon-pci,free-page-reporting=on"),
        StartedBy::Libvirt => {
            xml(vm, "<devices>", "<memballoon model='virtio' freePageReporting='on'/>")
        }
        StartedBy::Proxmox(id) => {
            qm_args(vm, id, "-global virtio-balloon-pci.free-page-reporting=on")
        }
    }
}

/// A balloon that Proxmox leaves alone.
pub(super) fn rest_balloon(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Proxmox(id) => Remedy::shell(format!("qm set {} --shares 0", quoted(id))),
        StartedBy::Libvirt => {
            let memory = memory(vm);
            Remedy::shell(format!("virsh setmem {} {memory}M --live --config", name(vm)))
        }
        StartedBy::Hand => Remedy::by_hand("stop the other program that moves its balloon"),
    }
}

/// A limit of a cgroup goes.
pub(super) fn raise_limit(vm: &VmFacts, limit: &MemoryLimit) -> Remedy {
    if vm.started_by == StartedBy::Libvirt {
        let name = name(vm);
        return Remedy::shell(format!("virsh memtune {name} --hard-limit -1 --live --config"));
    }
    let property = if limit.file == "memory.high" { "MemoryHigh" } else { "MemoryMax" };
    of_unit(&limit.cgroup, property, "infinity", &limit.file)
}

/// The cgroup may swap.
pub(super) fn allow_swap(cgroup: &str) -> Remedy {
    of_unit(cgroup, "MemorySwapMax", "infinity", "memory.swap.max")
}

/// A property of the cgroup's unit, or its file if systemd did not make it.
fn of_unit(cgroup: &str, property: &str, value: &str, file: &str) -> Remedy {
    let unit = cgroup
        .rsplit('/')
        .find(|part| [".scope", ".service", ".slice"].iter().any(|kind| part.ends_with(kind)));
    match unit {
        Some(unit) => {
            Remedy::shell(format!("systemctl set-property {} {property}={value}", quoted(unit)))
        }
        None => Remedy::shell(format!(
            "echo max > {}",
            quoted(&format!("/sys/fs/cgroup{cgroup}/{file}"))
        )),
    }
}

/// Memory that is not locked.
pub(super) fn unlock(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::without("-overcommit mem-lock=on"),
        StartedBy::Libvirt => not_xml(vm, "<memoryBacking><locked/></memoryBacking>"),
        StartedBy::Proxmox(id) => Remedy::at(
            format!("in `args` of qm config {id}: remove; start the VM anew"),
            "-overcommit mem-lock=on",
        ),
    }
}

/// The passed-through device goes.
pub(super) fn take_device(vm: &VmFacts) -> Remedy {
    let device = vm.line.passed_through.as_deref().unwrap_or("vfio-pci");
    match &vm.started_by {
        StartedBy::Hand => Remedy::without(format!("-device {device},…")),
        StartedBy::Libvirt => not_xml(vm, "<hostdev …>…</hostdev>"),
        StartedBy::Proxmox(id) => qm_set(id, "--delete hostpci0"),
    }
}

/// Memory outside the pool of huge pages; transparent huge pages serve instead.
pub(super) fn small_pages(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::without(backing_option(vm)),
        StartedBy::Libvirt => not_xml(vm, "<memoryBacking><hugepages/></memoryBacking>"),
        StartedBy::Proxmox(id) => qm_set(id, "--delete hugepages"),
    }
}

/// Private, anonymous memory.
pub(super) fn private(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::without(backing_option(vm)),
        StartedBy::Libvirt => not_xml(
            vm,
            "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
        ),
        StartedBy::Proxmox(id) => Remedy::at(
            format!("in `args` of qm config {id}: remove; start the VM anew"),
            backing_option(vm),
        ),
    }
}

/// The option that gives a VM its kind of memory.
fn backing_option(vm: &VmFacts) -> String {
    let backend = || vm.line.backends.iter().find(|it| it.is_shared || it.path.is_some());
    match &vm.line.mem_path {
        Some(path) => format!("-mem-path {}", path.display()),
        None if backend().is_some_and(|it| it.is_shared) => "share=on of its -object".to_owned(),
        None => "-object memory-backend-…".to_owned(),
    }
}

/// Memory that is not preallocated.
pub(super) fn no_preallocation(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::without("-mem-prealloc, or prealloc=on of its -object"),
        StartedBy::Libvirt => {
            not_xml(vm, "<memoryBacking><allocation mode='immediate'/></memoryBacking>")
        }
        StartedBy::Proxmox(id) => Remedy::at(
            format!("in `args` of qm config {id}: remove; start the VM anew"),
            "-mem-prealloc",
        ),
    }
}

/// The shim.
pub(super) fn shim(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Hand => Remedy::at(
            "before QEMU's command line; start the VM anew",
            format!("LD_PRELOAD={SHIM}"),
        ),
        StartedBy::Libvirt => {
            let line = format!("<qemu:env name='LD_PRELOAD' value='{SHIM}'/>");
            xml(vm, "<qemu:commandline>", &line)
        }
        StartedBy::Proxmox(_) => Remedy::at(
            "in a wrapper of /usr/bin/kvm: see the guide, Managed VMs",
            format!("export LD_PRELOAD={SHIM}"),
        ),
    }
}

/// The shim can be loaded.
pub(super) fn load(path: &Path) -> Remedy {
    let path = quoted(&path.display().to_string());
    Remedy::shell(format!("ls -lL {path} && LD_PRELOAD={path} ldd /bin/true"))
}

/// QEMUs of other users may use the device.
pub(super) fn userfaultfd() -> Remedy {
    Remedy::at(
        "/etc/udev/rules.d/60-userfaultfd.rules; then: udevadm control --reload && udevadm \
         trigger --name-match=userfaultfd",
        r#"KERNEL=="userfaultfd", GROUP="kvm", MODE="0660""#,
    )
}

/// A rule of AppArmor for libvirt's QEMUs.
pub(super) fn apparmor_line(rule: &str) -> Remedy {
    Remedy::at(format!("{APPARMOR}; shut down and start the VM"), rule)
}

/// Each QEMU of libvirt may make its own socket.
pub(super) fn apparmor_socket(host: &HostFacts) -> Remedy {
    let socket = place_for("@{profile_name}", &host.globs);
    apparmor_line(&format!("{} rw,", socket.display()))
}

/// QEMUs that SELinux confines may make sockets in the directory.
pub(super) fn selinux_socket(host: &HostFacts) -> Remedy {
    let socket = place_for("x", &host.globs);
    let directory = socket.parent().unwrap_or(Path::new(DIRECTORY)).display();
    Remedy::shell(format!(
        "semanage fcontext -a -t qemu_var_run_t '{directory}(/.*)?' && restorecon -R {directory}"
    ))
}

/// The VM's manager moves it.
pub(super) fn migrate(vm: &VmFacts) -> Remedy {
    match &vm.started_by {
        StartedBy::Proxmox(id) => Remedy::shell(format!("qm migrate {} NODE --online", quoted(id))),
        _ => Remedy::shell(format!("virsh migrate --live {} qemu+ssh://HOST/system", name(vm))),
    }
}

/// The remedy for a cause that the daemon tells.
pub(super) fn of(cause: Cause, vm: &VmFacts) -> Option<Remedy> {
    match cause {
        Cause::NoStatistics => Some(Remedy::at(
            "in the guest (Windows: the balloon service)",
            "modprobe virtio_balloon",
        )),
        Cause::NoGuestSwap => {
            let table = format!("[vm.\"{}\"]", vm.name.as_deref().unwrap_or("NAME"));
            Some(Remedy::at(
                format!("{table} of overbook.toml, once the guest has swap"),
                "swap = true",
            ))
        }
        Cause::MovedByOthers => Some(rest_balloon(vm)),
        Cause::GivesNothingBack => Some(unlock(vm)),
        Cause::Uncooperative => Some(Remedy::at("in the guest", "dmesg | grep -i balloon")),
        Cause::OldShim => Some(restart(vm)),
        _ => None,
    }
}

/// The remedy for a reason in the daemon's words.
pub(super) fn of_words(vm: &VmFacts, words: &str) -> Option<Remedy> {
    let of_group = || format!("[group.{}]", vm.wanted.group.as_deref().unwrap_or("NAME"));
    let is = |part: &str| words.contains(part);
    if is("speaks version") || is("two names") || is("and then") {
        Some(restart(vm))
    } else if is("userfaultfd is not permitted") {
        Some(userfaultfd())
    } else if is(HOST_PAUSED) {
        Some(Remedy::shell("overbook resume"))
    } else if is("nothing that root made says so") {
        let uid = format!("uid = \"{}\"", vm.process.uid);
        Some(config(&of_group(), &uid))
    } else if is("its balloon cannot be used") {
        Some(Remedy::at("in the guest", "modprobe virtio_balloon"))
    } else if is("frames.conf") {
        Some(Remedy::shell(
            "install -D -m 644 /usr/share/overbook/frames.conf -t \
             /etc/systemd/system/overbook.service.d/",
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_for_a_shell_are_quoted_where_they_need_it() {
        assert_eq!(quoted("web-1"), "web-1");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("$(rm x)'"), r"'$(rm x)'\'''");
        assert_eq!(quoted(""), "''");
        assert_eq!(text("a\"]\nx"), r#""a\"]\nx""#);
    }

    #[test]
    fn sockets_go_where_the_globs_look() {
        let globs = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        let place = |list: &[&str]| place_for("web-1", &globs(list)).display().to_string();
        assert_eq!(place(&["/run/q/*.sock"]), "/run/q/web-1.sock");
        assert_eq!(place(&["/run/*/x.sock", "/run/q/*.qmp"]), "/run/q/web-1.qmp");
        assert_eq!(place(&["/run/*/[ab].sock"]), "/run/overbook/qmp/web-1.sock");
        let globs = globs(&["/run/q/*.sock"]);
        assert!(is_named(Path::new("/run/q/a.sock"), &globs));
        assert!(!is_named(Path::new("/run/q/d/a.sock"), &globs));
        let line = glob_of(Path::new("/x/a.qmp"), &globs).line;
        assert_eq!(line, r#"qmp = ["/run/q/*.sock", "/x/a.qmp"]"#);
    }

    #[test]
    fn a_limit_is_lifted_where_it_was_set() {
        let line = |cgroup: &str| allow_swap(cgroup).line;
        let scope = "/machine.slice/machine-qemu\\x2d1\\x2dweb.scope/libvirt/emulator";
        let expected =
            r"systemctl set-property 'machine-qemu\x2d1\x2dweb.scope' MemorySwapMax=infinity";
        assert_eq!(line(scope), expected);
        assert_eq!(line("/own"), "echo max > /sys/fs/cgroup/own/memory.swap.max");
    }
}
