//! VMs that are broken in one way each, as their managers start them, and the line that mends each.

use std::path::PathBuf;

use model::Bytes;
use model::proxmox::ProxmoxConf;
use model::view::MemoryLimit;

use super::command_line::CommandLine;
use super::facts::{
    Backing, DaemonView, HostFacts, Objection, ProcessFacts, Shim, StartedBy, VmFacts, VmRules,
};
use super::{Availability, Capability, Cause, Diagnosis, ExaminedVm, rules};

const UUID: &str = "8d0c2c74-9a3e-4e55-8a3c-0f4c2b1d9e77";

/// As an operator starts it, in good order.
const PLAIN: &str = "/usr/bin/qemu-system-x86_64 -name web-1 -m 2G -accel kvm \
    -device virtio-balloon-pci,free-page-reporting=on \
    -qmp unix:/run/overbook/qmp/web/web-1.sock,server=on,wait=off \
    -drive file=/srv/web-1.qcow2,if=virtio";

/// As libvirt 9 and 11 start it, with a socket of Overbook's.
const LIBVIRT: &str = r#"/usr/bin/qemu-system-x86_64 -name guest=web-1,debug-threads=on -S
    -object {"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/qemu/domain-1-web-1/master-key.aes"}
    -machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram -accel kvm -cpu host
    -m size=2097152k
    -object {"qom-type":"memory-backend-ram","id":"pc.ram","size":2147483648}
    -overcommit mem-lock=off -smp 2,sockets=2,cores=1,threads=1
    -uuid 8D0C2C74-9a3e-4e55-8a3c-0f4c2b1d9e77 -no-user-config -nodefaults
    -chardev socket,id=charmonitor,fd=25,server=on,wait=off
    -mon chardev=charmonitor,id=monitor,mode=control -rtc base=utc -no-shutdown
    -device {"driver":"pcie-root-port","port":16,"chassis":1,"id":"pci.1","bus":"pcie.0"}
    -blockdev {"driver":"file","filename":"/var/lib/libvirt/images/web-1.qcow2","node-name":"s"}
    -device {"driver":"virtio-balloon-pci","id":"balloon0","bus":"pci.5","addr":"0x0","free-page-reporting":true}
    -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
    -qmp unix:/run/overbook/qmp/libvirt-8d0c2c74-9a3e-4e55-8a3c-0f4c2b1d9e77.sock,server=on,wait=off
    -msg timestamp=on"#;

/// As Proxmox 8 starts it, with a socket of Overbook's.
const PROXMOX: &str = "/usr/bin/kvm -id 101 -name web-1,debug-threads=on -no-shutdown \
    -chardev socket,id=qmp,path=/var/run/qemu-server/101.qmp,server=on,wait=off \
    -mon chardev=qmp,mode=control \
    -chardev socket,id=qmp-event,path=/var/run/qmeventd.sock,reconnect=5 \
    -mon chardev=qmp-event,mode=control -pidfile /var/run/qemu-server/101.pid -daemonize \
    -smbios type=1,uuid=5f0e -smp 2,sockets=1,cores=2,maxcpus=2 -nodefaults \
    -cpu x86-64-v2-AES,enforce,+kvm_pv_eoi -m 2048 \
    -device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on \
    -drive file=/dev/pve/vm-101-disk-0,if=none,id=drive-scsi0 -machine type=pc+pve0 \
    -qmp unix:/run/overbook/qmp/101.sock,server=on,wait=off";

fn host() -> HostFacts {
    HostFacts { globs: model::config::parse(&[]).unwrap().host.qmp, ..HostFacts::default() }
}

/// A VM of a group that has all that it wants.
fn vm(line: &str) -> VmFacts {
    let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
    let line = CommandLine::of(&words);
    let started_by = match (&line.vmid, line.is_libvirts) {
        (Some(id), _) => StartedBy::Proxmox(id.clone()),
        (_, true) => StartedBy::Libvirt,
        _ => StartedBy::Hand,
    };
    let is_own = |path: &&PathBuf| path.starts_with("/run/overbook");
    VmFacts {
        pid: 4711,
        name: line.name.clone(),
        started_by,
        sockets: line.qmp.iter().filter(is_own).cloned().collect(),
        process: ProcessFacts {
            program: "qemu-system-x86_64".to_owned(),
            shim: Shim::Loaded,
            may_trap: true,
            ..ProcessFacts::default()
        },
        wanted: VmRules {
            group: Some("web".to_owned()),
            tracking: true,
            attach: true,
            dedup: true,
            cold: true,
            ..VmRules::default()
        },
        line,
        ..VmFacts::default()
    }
}

/// The same with another text in its command line, which also changes its sockets.
fn with(line: &str, from: &str, to: &str) -> VmFacts {
    assert!(line.contains(from), "{from} is not in it");
    vm(&line.replace(from, to))
}

fn faults(vm: &VmFacts, host: &HostFacts) -> Vec<Diagnosis> {
    rules::diagnose(vm, host).into_iter().filter(|it| it.is_fault).collect()
}

/// Checks that exactly this is wrong, and what its remedy says.
fn expect(what: &str, vm: &VmFacts, cause: Cause, lacks: Capability, remedy: &str) {
    let found = faults(vm, &host());
    let [only] = found.as_slice() else { panic!("{what}: {found:#?}") };
    assert_eq!(only.cause, cause, "{what}: {only:?}");
    assert!(only.lacks.contains(&lacks), "{what}: {only:?}");
    let line = only.remedy.as_ref().map(|it| it.line.as_str()).unwrap_or_default();
    let is_it = if remedy.is_empty() { line.is_empty() } else { line.contains(remedy) };
    assert!(is_it, "{what}: {line:?}");
}

#[test]
fn vms_in_good_order_have_nothing_to_mend() {
    for line in [PLAIN, LIBVIRT, PROXMOX] {
        assert_eq!(faults(&vm(line), &host()), [], "{line}");
    }
}

#[test]
fn a_socket_in_proxmoxs_directory_is_overbooks_by_its_ending() {
    let own = |ending: &str| {
        let line = PROXMOX.replace("/run/overbook/qmp/101.sock", &format!("/q/101.{ending}"));
        let line = line.replace("/q/", "/run/qemu-server/");
        let sockets = vec![format!("/run/qemu-server/101.{ending}").into()];
        VmFacts { sockets, ..vm(&line) }
    };
    assert_eq!(faults(&own("overbook"), &host()), []);
    let line = "overbook proxmox manage 101";
    expect("Proxmox's own", &own("qmp"), Cause::ManagersSocket, Capability::See, line);
}

#[test]
fn a_vm_without_a_socket_gets_the_line_of_its_manager() {
    use Cause::NoSocket;
    let none = |line: &str| {
        let at = line.find("-qmp unix:").unwrap();
        let end = line[at..].find("wait=off").unwrap() + at + "wait=off".len();
        vm(&format!("{}{}", &line[..at], &line[end..]))
    };
    let see = Capability::See;
    let line = "-qmp unix:/run/overbook/qmp/web-1.sock,server=on,wait=off";
    expect("plain", &none(PLAIN), NoSocket, see, line);
    expect("libvirt", &none(LIBVIRT), NoSocket, see, "apt install ./overbook-libvirt_*.deb");
    expect("Proxmox", &none(PROXMOX), NoSocket, see, "overbook proxmox manage 101");
}

#[test]
fn the_right_reason_is_named_for_vms_that_are_broken_in_one_way_each() {
    use Capability::{Balloon, FreePages, See, Sharing, Statistics, Tracking};
    let json = r#""driver":"virtio-balloon-pci","id":"balloon0","bus":"pci.5","addr":"0x0","free-page-reporting":true"#;
    let ram = r#"{"qom-type":"memory-backend-ram","id":"pc.ram","size":2147483648}"#;

    let none = with(LIBVIRT, json, r#""driver":"virtio-rng-pci""#);
    expect("no balloon", &none, Cause::NoBalloon, Statistics, "<memballoon model='virtio'");
    let device = "-device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on";
    let mut none = with(PROXMOX, device, "");
    none.proxmox = Some(ProxmoxConf { memory: Some(2048), balloon: Some(0), ..Default::default() });
    expect("no balloon", &none, Cause::NoBalloon, Balloon, "qm set 101 --balloon 2048 --shares 0");

    let off = with(PLAIN, ",free-page-reporting=on", "");
    expect("no reporting", &off, Cause::NoReporting, FreePages, "free-page-reporting=on");

    let locked = with(LIBVIRT, "mem-lock=off", "mem-lock=on");
    expect("locked", &locked, Cause::Locked, Balloon, "<memoryBacking><locked/>");

    let vfio = r#"{"driver":"vfio-pci","host":"0000:01:00.0","id":"hostdev0"}"#;
    let mut pinned = with(LIBVIRT, "-sandbox", &format!("-device {vfio} -sandbox"));
    pinned.process.is_locked = true;
    expect("VFIO", &pinned, Cause::PassedThrough, Balloon, "<hostdev");

    let huge = r#"{"qom-type":"memory-backend-file","id":"pc.ram","mem-path":"/dev/hugepages/libvirt/qemu/1-web-1","prealloc":true,"size":2147483648}"#;
    let huge = with(LIBVIRT, ram, huge);
    expect("huge pages", &huge, Cause::HugePages, Tracking, "<hugepages/>");

    let memfd =
        ram.replace("backend-ram", "backend-memfd").replace("\"size", "\"share\":true,\"size");
    let shared = with(LIBVIRT, ram, &memfd);
    expect("shared", &shared, Cause::SharedMemory, Tracking, "<access mode='shared'/>");
    let user = r#"-device {"driver":"vhost-user-fs-pci","id":"fs0"} -sandbox"#;
    let needed = with(&LIBVIRT.replace(ram, &memfd), "-sandbox", user);
    expect("virtiofs", &needed, Cause::SharedMemory, Tracking, "");

    let mut mounted = with(PLAIN, "-m 2G", "-m 2G -mem-path /srv/huge");
    mounted.process.backing = Some(Backing::HugePages);
    expect("huge pages elsewhere", &mounted, Cause::HugePages, Balloon, "-mem-path /srv/huge");
    let mut device = vm(PLAIN);
    device.process.backing = Some(Backing::Shared);
    assert_eq!(faults(&device, &host()), [], "a device may have shared memory of that size");
    device.line.has_more = true;
    expect("from a file", &device, Cause::SharedMemory, Tracking, "-object");

    let file = with(PLAIN, "-m 2G", "-m 2G -mem-path /srv/ram");
    expect("file", &file, Cause::FileMemory, Tracking, "-mem-path /srv/ram");
    let early = with(PLAIN, "-m 2G", "-m 2G -mem-prealloc");
    expect("preallocated", &early, Cause::Preallocated, Balloon, "-mem-prealloc");

    let mut moved = vm(PROXMOX);
    let conf = ProxmoxConf { memory: Some(2048), balloon: Some(1024), ..ProxmoxConf::default() };
    moved.proxmox = Some(conf.clone());
    expect("pvestatd", &moved, Cause::MovedByOthers, Balloon, "qm set 101 --shares 0");
    moved.proxmox = Some(ProxmoxConf { shares: Some(0), ..conf });
    assert_eq!(faults(&moved, &host()), [], "without shares Proxmox leaves it alone");

    let mut bare = vm(LIBVIRT);
    bare.process.shim = Shim::None;
    expect("no shim", &bare, Cause::NoShim, Sharing, "<qemu:env name='LD_PRELOAD'");
    bare.wanted.dedup = false;
    assert_eq!(faults(&bare, &host()), [], "a group without shared pages needs no shim");
    bare.wanted.lazy = true;
    expect("freed pages", &bare, Cause::NoShim, FreePages, "<qemu:env name='LD_PRELOAD'");

    let mut gone = vm(PLAIN);
    gone.process.shim = Shim::NotLoaded("/opt/liboverbook_shim.so".into());
    expect("not loaded", &gone, Cause::ShimNotLoaded, Sharing, "ls -lL /opt/liboverbook_shim.so");

    let mut user = vm(PLAIN);
    user.process.may_trap = false;
    expect("userfaultfd", &user, Cause::NoUserfaultfd, Tracking, r#"KERNEL=="userfaultfd""#);

    let mut confined = vm(LIBVIRT);
    (confined.process.uid, confined.process.label) = (64055, Some(format!("libvirt-{UUID}")));
    expect("AppArmor", &confined, Cause::AppArmor, Tracking, "/dev/userfaultfd rw,");

    let mut limited = vm(LIBVIRT);
    limited.process.memory_limits = vec![MemoryLimit {
        cgroup: "/machine.slice/machine-qemu\\x2d1\\x2dweb\\x2d1.scope".to_owned(),
        file: "memory.max".to_owned(),
        limit: Bytes::mib(1024),
        used: Bytes::mib(900),
    }];
    expect("limit", &limited, Cause::CgroupLimit, Balloon, "virsh memtune web-1 --hard-limit -1");

    let mut unswapped = vm(PLAIN);
    unswapped.process.shim = Shim::None;
    unswapped.wanted.dedup = false;
    unswapped.process.forbids_swap = Some("/system.slice/web-1.service".to_owned());
    let line = "systemctl set-property web-1.service MemorySwapMax=infinity";
    expect("swap", &unswapped, Cause::SwapForbidden, Tracking, line);

    let mut gone = vm(PLAIN);
    gone.sockets.clear();
    expect("deleted", &gone, Cause::SocketGone, See, "start its QEMU anew");
    let elsewhere = with(PLAIN, "/run/overbook/qmp/web/web-1.sock", "/tmp/web-1.qmp");
    expect("elsewhere", &elsewhere, Cause::SocketElsewhere, See, r#", "/tmp/web-1.qmp"]"#);

    let mut others = elsewhere;
    others.in_use = vec!["/tmp/web-1.qmp".into()];
    expect("another's", &others, Cause::NoSocket, See, "-qmp unix:/run/overbook/qmp/web-1.sock");

    let mut twice = vm(PLAIN);
    twice.sockets.push("/run/overbook/qmp/second.sock".into());
    let line = "-qmp unix:/run/overbook/qmp/second.sock";
    expect("two sockets", &twice, Cause::TwoSockets, See, line);
    let mut second = vm(PLAIN);
    second.namesakes = vec![4712];
    expect("two VMs", &second, Cause::SameName, See, "-name web-1-2");
    let mut renamed = vm(LIBVIRT);
    renamed.name = Some("web-9".to_owned());
    expect("two names", &renamed, Cause::OtherName, See, "virsh shutdown web-9");

    let mut managers = vm(PROXMOX);
    managers.sockets = vec!["/var/run/qemu-server/101.qmp".into()];
    expect("its manager's", &managers, Cause::ManagersSocket, See, "overbook proxmox manage 101");
    let mut own = vm(PROXMOX);
    own.sockets = vec!["/run/qemu-server/101.overbook".into()];
    assert_eq!(faults(&own, &host()), [], "for Overbook, in its manager's directory");
    let mut busy = vm(PLAIN);
    busy.has_client = true;
    expect("in use", &busy, Cause::SocketInUse, See, "-qmp unix:");

    let mut other = vm(PLAIN);
    other.process.is_in_other_network = true;
    expect("container", &other, Cause::OtherNetwork, Tracking, "network namespace");

    let mut wrapped = vm(PLAIN);
    wrapped.process.objection = Some(Objection::Name);
    expect("wrapper", &wrapped, Cause::ProgramName, See, "qemu-system");
    wrapped.process.objection = Some(Objection::Owner(1000));
    expect("a user's", &wrapped, Cause::ProgramOwner, See, "that root owns");
}

#[test]
fn a_confined_qemu_also_needs_a_rule_for_its_own_socket() {
    let mut confined = vm(LIBVIRT);
    confined.sockets.clear();
    confined.process.label = Some(format!("libvirt-{UUID}"));
    let causes = |vm: &VmFacts, host: &HostFacts| -> Vec<_> {
        faults(vm, host).into_iter().map(|it| it.cause).collect()
    };
    assert_eq!(causes(&confined, &host()), [Cause::SocketGone, Cause::AppArmor]);
    let found = faults(&confined, &host());
    let line = &found[1].remedy.as_ref().unwrap().line;
    assert_eq!(line, "/run/overbook/qmp/@{profile_name}.sock rw,");
    let allowed = HostFacts { apparmor: [line.clone()].into(), ..host() };
    assert_eq!(causes(&confined, &allowed), [Cause::SocketGone]);
    let none = VmFacts {
        line: CommandLine { qmp: Vec::new(), ..confined.line.clone() },
        ..confined.clone()
    };
    assert_eq!(causes(&none, &host()), [Cause::NoSocket], "libvirt's own calls need no socket");
    confined.process.label = Some("system_u:system_r:svirt_t:s0:c1,c2".to_owned());
    let found = faults(&confined, &host());
    let line = &found[1].remedy.as_ref().unwrap().line;
    assert!(
        line.starts_with("semanage fcontext -a -t qemu_var_run_t '/run/overbook/qmp"),
        "{line}"
    );
}

#[test]
fn a_domain_that_libvirt_tells_of_needs_no_socket() {
    let served = |why: &str| VmFacts {
        told: Some(DaemonView {
            unsupported: vec![("balloon".to_owned(), why.to_owned())],
            ..DaemonView::default()
        }),
        sockets: Vec::new(),
        line: CommandLine { qmp: Vec::new(), ..vm(LIBVIRT).line },
        ..vm(LIBVIRT)
    };
    let has_cause =
        |vm: &VmFacts| rules::diagnose(vm, &host()).iter().any(|it| it.cause == Cause::NoSocket);
    assert!(has_cause(&served("no QMP socket of it is named in [host] `qmp`")));
    let mut served = served("switched off");
    assert!(!has_cause(&served));
    served.told.as_mut().unwrap().link_error = Some("libvirt has not told of it".to_owned());
    expect("silent", &served, Cause::Told, Capability::See, "");
}

/// The daemon's reasons count where the facts tell none.
#[test]
fn the_daemon_adds_reasons_that_only_the_guest_or_a_worker_tells() {
    let told = |refusal: (&str, &str), unsupported: (&str, &str)| {
        let own = |(one, other): (&str, &str)| (one.to_owned(), other.to_owned());
        let told = DaemonView {
            shim_differs: None,
            link_error: None,
            unsupported: vec![own(unsupported)],
            refusals: vec![own(refusal)],
        };
        VmFacts { told: Some(told), ..vm(PLAIN) }
    };
    let nothing = ("content", "nothing calls for a change");
    let off = ("dedup", "switched off for group web (`dedup = \"off\"`)");
    assert_eq!(faults(&told(nothing, off), &host()), []);
    let cases = [
        (
            ("no_stats", "its guest sends no usable statistics"),
            off,
            Cause::NoStatistics,
            Capability::Statistics,
            "modprobe virtio_balloon",
        ),
        (
            ("swapless", "it is not known to have swap"),
            off,
            Cause::NoGuestSwap,
            Capability::Balloon,
            "swap = true",
        ),
        (
            ("moved_by_others", "another program moved its balloon from 2 GiB to 1 GiB"),
            off,
            Cause::MovedByOthers,
            Capability::Balloon,
            "stop the other program",
        ),
        (
            nothing,
            ("tracking", "the shim speaks version 7 of the protocol, the worker 9"),
            Cause::OldShim,
            Capability::Tracking,
            "start its QEMU anew",
        ),
        (
            nothing,
            ("tracking", "Overbook is paused"),
            Cause::Told,
            Capability::Tracking,
            "overbook resume",
        ),
    ];
    for (refusal, unsupported, cause, lacks, remedy) in cases {
        expect(refusal.1, &told(refusal, unsupported), cause, lacks, remedy);
    }
    let released = ("tracking", "released by the operator");
    assert_eq!(faults(&told(nothing, released), &host()), []);
    let mut down = told(nothing, off);
    down.told.as_mut().unwrap().link_error = Some("QEMU does not answer".to_owned());
    expect("down", &down, Cause::Told, Capability::See, "");
    // The facts have told it already.
    let mut locked = told(("gives_nothing_back", "its balloon gives nothing back"), off);
    locked.line.is_locked = true;
    expect("locked", &locked, Cause::Locked, Capability::Balloon, "mem-lock=on");
}

#[test]
fn a_shim_of_another_release_is_a_note_by_its_file_and_by_its_worker() {
    let old = |vm: &VmFacts| {
        let found = rules::diagnose(vm, &host());
        assert!(found.iter().all(|it| !it.is_fault), "{found:?}");
        let mut found = found.into_iter().filter(|it| it.cause == Cause::OldShim);
        let only = found.next().map(|it| it.reason);
        assert!(found.next().is_none());
        only.unwrap_or_default()
    };
    let mut replaced = vm(PLAIN);
    assert_eq!(old(&replaced), "");
    replaced.process.shim = Shim::Replaced;
    assert!(old(&replaced).contains("file was replaced since its start: it works on; restart"));
    let differs = "its shim speaks version 9 of the protocol, and this Overbook 10".to_owned();
    let told = DaemonView { shim_differs: Some(differs), ..DaemonView::default() };
    let told = VmFacts { told: Some(told), ..replaced };
    assert!(old(&told).starts_with("its shim speaks version 9 of the protocol"), "{}", old(&told));
}

#[test]
fn a_hosts_fault_is_every_vms_and_is_mended_at_the_host() {
    let host = HostFacts {
        no_paging: Some("the host has no swap".to_owned()),
        no_shim: Some("this kernel has no UFFDIO_MOVE".to_owned()),
        ..host()
    };
    let found = faults(&vm(PLAIN), &host);
    let causes: Vec<_> = found.iter().map(|it| (it.cause, it.is_hosts)).collect();
    assert_eq!(causes, [(Cause::OldKernel, true), (Cause::HostCannotPage, true)]);
    let mut bare = vm(PLAIN);
    (bare.process.shim, bare.wanted.dedup) = (Shim::None, false);
    let causes: Vec<_> = faults(&bare, &host).iter().map(|it| it.cause).collect();
    assert_eq!(causes, [Cause::HostCannotPage]);
}

#[test]
fn a_vm_of_another_program_is_listed_and_is_nothing_to_mend() {
    let mut other = vm("/usr/bin/firecracker --api-sock /run/fc.sock");
    other.process.objection = Some(Objection::NotQemu);
    let found = rules::diagnose(&other, &host());
    assert!(found.iter().all(|it| it.cause == Cause::NotQemu && !it.is_fault), "{found:?}");
    let examined = ExaminedVm::of(&other, found);
    assert!(examined.capabilities.values().all(|it| *it == Availability::Off));
    assert_eq!(examined.name, "/proc/4711");
}

#[test]
fn choices_are_notes_with_the_key_that_changes_them() {
    let mut alone = vm(PLAIN);
    alone.wanted = VmRules { attach: false, tracking: true, ..VmRules::default() };
    alone.process.shim = Shim::None;
    let found = rules::diagnose(&alone, &host());
    assert!(found.iter().all(|it| !it.is_fault), "{found:#?}");
    let line = |cause| {
        let found = found.iter().find(|it| it.cause == cause);
        found.and_then(|it| it.remedy.clone()).unwrap_or_else(|| panic!("{found:#?}")).line
    };
    assert_eq!(line(Cause::NoGroup), r#"vms = ["web-1"]"#);
    assert_eq!(line(Cause::SwitchedOff), r#"attach = "on""#);
    assert_eq!(line(Cause::NoShim), "LD_PRELOAD=/usr/lib/overbook/liboverbook_shim.so");
}
