//! libvirt's domains, end to end: a real libvirtd with five domains, `overbook-libvirt` and the
//! daemon. Neither has a monitor of its own in any QEMU.
//!
//! libvirtd needs root and directories of the system. So the test runs itself again in namespaces
//! of its own (processes, mounts, network), where it hides the host's libvirt, and where the
//! daemon finds no other QEMU. All of it ends with the namespaces.
//!
//! The same runs with the libvirt and the QEMU of a newer Debian. Their packages are unpacked
//! privately, and their `/usr` is mounted over the system's in the namespaces.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::Cell;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lab::cache::Cache;
use lab::command::own_program;
use lab::machine::KERNEL_BASICS;
use lab::packages::Unpacked;
use model::Bytes;
use overbook_tests::{Requirement, built, ensure, provisions, requires, take_turn, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Set in the namespaces: the directory of the test's files.
const INSIDE: &str = "OVERBOOK_LIBVIRT_TEST";
/// Set for the namespaces: the directory to mount over `/usr`.
const NEWER_USR: &str = "OVERBOOK_LIBVIRT_TEST_USR";
/// Set in the namespaces: the directory of an unpacked QEMU, if it is not the system's.
const QEMU: &str = "OVERBOOK_LIBVIRT_TEST_QEMU";
/// The newer Debian, its libvirt's version, and the packages of its libvirt and QEMU. The others
/// are what the test needs of a system.
const NEWER: (&str, &str) = ("trixie", "11.");
const NEWER_PACKAGES: [&str; 7] = [
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "libvirt-clients",
    "qemu-system-x86",
    "coreutils",
    "dash",
    "util-linux",
];
const BASE: Bytes = Bytes::mib(128);
const MAX: Bytes = Bytes::mib(256);
/// The guest that is short of memory.
const HUNGRY: &str = "hungry";
const HUNGRY_MAX: Bytes = Bytes::mib(512);
/// Its array: it could use the group's whole budget.
const ARRAY_MIB: u64 = 400;
/// The group's budget. It also pays for the QEMUs' own memory.
const BUDGET: Bytes = Bytes::mib(480);
/// Maximum time of any wait, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(240);
const POLL: Duration = Duration::from_millis(200);
/// Maximum number of files that `overbook-libvirt` has open at the end: the daemon's connection
/// and the one to libvirt, with their event loop.
const MOST_FILES: usize = 24;
/// Directories of the system's libvirt, which the namespace hides.
const HIDDEN: [&str; 5] =
    ["/run/libvirt", "/var/lib/libvirt", "/etc/libvirt", "/var/log/libvirt", "/var/cache/libvirt"];
const KVM: &str = "/dev/kvm";
/// The place in the namespace at which libvirt's user finds an unpacked QEMU.
const QEMU_ROOT: &str = "/mnt";
/// Modules of the system's QEMU. Another QEMU that finds them ends.
const MODULES: &str = "/usr/lib/x86_64-linux-gnu/qemu";
/// The domains: three of the group `shop` by their names, one by its metadata, and one of no group.
const DOMAINS: [&str; 5] = ["hungry", "idle-1", "idle-2", "idle-3", "stray"];
const METADATA: &str = "xmlns:o=\"https://overbook.example/libvirt/1\" group=\"shop\" \
    min=\"64 MiB\" base=\"128 MiB\"";

#[test]
fn libvirts_domains_are_found_balanced_and_left_as_they_were() {
    const NAME: &str = "libvirts_domains_are_found_balanced_and_left_as_they_were";
    if let Some(dir) = std::env::var_os(INSIDE) {
        return inside(Path::new(&dir), "");
    }
    let Some(_turn) = take_turn() else { return };
    let libvirtd = requires::program("/usr/sbin/libvirtd");
    let Some(()) = requires(Requirement::Program("libvirtd"), libvirtd) else { return };
    let Some(with) = provisions() else { return };
    in_namespaces(NAME, &with, |command| {
        if let Some(root) = with.qemu.unpacked() {
            command.env(QEMU, root);
        }
    });
}

#[test]
fn the_same_is_so_with_the_libvirt_of_a_newer_debian() {
    const NAME: &str = "the_same_is_so_with_the_libvirt_of_a_newer_debian";
    if let Some(dir) = std::env::var_os(INSIDE) {
        return inside(Path::new(&dir), NEWER.1);
    }
    let Some(_turn) = take_turn() else { return };
    let merged = ensure(Path::new("/bin").is_symlink(), "programs outside of /usr");
    let Some(()) = requires(Requirement::MergedUsr, merged) else { return };
    let Some(with) = provisions() else { return };
    let (entry, cache) = (format!("libvirt-{}", NEWER.0), Cache::open().unwrap());
    let newer = Unpacked::provide_from(&cache, &entry, NEWER.0, &NEWER_PACKAGES);
    let Some(newer) = requires(Requirement::Packages, newer) else { return };
    in_namespaces(NAME, &with, |command| {
        command.env(NEWER_USR, newer.root().join("usr"));
    });
}

/// Runs the test `name` again in namespaces of its own, with a directory that has what guests
/// need.
fn in_namespaces(name: &str, with: &lab::Provisions, set: impl FnOnce(&mut Command)) {
    let Some(_) = built("overbook-libvirt") else { return };
    let Some(()) = requires(Requirement::Root, requires::root()) else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    for (from, to) in [(&with.image.kernel, "kernel"), (&with.image.initramfs, "initrd")] {
        fs::copy(from, dir.path().join(to)).unwrap();
        fs::set_permissions(dir.path().join(to), Permissions::from_mode(0o644)).unwrap();
    }
    // The namespaces end with this thread. The shell is process 1 there, and reaps
    // QEMUs that libvirt leaves to it.
    let script = format!(
        "test -z \"${NEWER_USR}\" || mount --bind -o ro \"${NEWER_USR}\" /usr; \"$@\" & wait $!"
    );
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["--propagation", "private", "sh", "-c", &script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--include-ignored", "--exact", name, "--nocapture"])
        .env(INSIDE, dir.path());
    set(&mut command);
    let status = command.status().unwrap();
    assert!(status.success(), "in its namespaces: {status}");
}

/// libvirtd and its domains, `overbook-libvirt`, and the daemon.
struct LibvirtHost {
    dir: PathBuf,
    libvirtd: Child,
    helper: Child,
    daemon: Child,
}

/// `version`: the beginning of libvirtd's version.
fn inside(dir: &Path, version: &str) {
    prepare(dir);
    let libvirtd = start_libvirtd(dir);
    let runs = Command::new("/usr/sbin/libvirtd").arg("--version").output().unwrap();
    let runs = text(&runs);
    eprintln!("{runs}");
    assert!(runs.contains(&format!("(libvirt) {version}")), "{runs}");
    let emulator = emulator(dir);
    for name in DOMAINS {
        let file = dir.join(format!("{name}.xml"));
        fs::write(&file, description(dir, &emulator, name)).unwrap();
        virsh(&["define", file.to_str().unwrap()]);
        virsh(&["start", name]);
    }
    // A guest that boots has all of its memory until its driver inflates the balloon.
    let deadline = Instant::now() + LIMIT;
    while !DOMAINS.iter().all(|name| actual(name) == BASE) {
        assert!(Instant::now() < deadline, "the guests do not boot");
        std::thread::sleep(POLL);
    }
    fs::write(dir.join("overbook.toml"), configuration(dir)).unwrap();
    let (helper, daemon) = (start_helper(dir), start_daemon(dir));
    let mut host = LibvirtHost { dir: dir.to_owned(), libvirtd, helper, daemon };

    found_and_limited(&host);
    balanced(&host);
    survives(&mut host);
    hangs(&mut host);
    noticed(&host);
    suspended(&host);
    started_anew(&host);
    released(&mut host);
    managed_and_back(&host);
    let connections = fs::read_dir(format!("/proc/{}/fd", host.helper.id())).unwrap().count();
    assert!(connections < MOST_FILES, "{connections} files are open: connections are not closed");
    let all = DOMAINS.map(|name| virsh(&["dominfo", name])).concat();
    assert!(!all.contains("tainted"), "{all}");
}

fn found_and_limited(host: &LibvirtHost) {
    host.until("all domains are found, with what libvirt tells of them", |host| {
        DOMAINS.iter().all(|name| {
            let vm = host.vm(name);
            vm["balloon_bytes"].is_u64() && vm["guest_free_bytes"].is_u64()
        })
    });
    for name in ["hungry", "idle-1", "idle-2", "idle-3"] {
        host.until("its metadata is in force", |host| host.vm(name)["group"] == "shop");
        let vm = host.vm(name);
        let limits = ["min_bytes", "base_bytes", "max_bytes"].map(|key| vm[key].as_u64());
        assert_eq!(limits, [Bytes::mib(64), BASE, ram(name)].map(|size| Some(size.0)), "{vm}");
        assert_eq!(vm["unsupported"]["balloon"], Value::Null, "{vm}");
    }
    let stray = host.vm("stray");
    assert_eq!((&stray["group"], &stray["link_up"]), (&Value::Null, &true.into()), "{stray}");
}

fn balanced(host: &LibvirtHost) {
    host.until("the hungry guest has more than its base", |_| {
        actual("hungry") > BASE.plus(Bytes::mib(8))
    });
    host.until("idle guests have less", |_| {
        ["idle-1", "idle-2", "idle-3"].iter().any(|name| actual(name) < BASE)
    });
    assert_eq!(actual("stray"), BASE, "it is in no group");
}

fn survives(host: &mut LibvirtHost) {
    host.helper.kill().unwrap();
    host.helper.wait().unwrap();
    host.until("its silence is told", |host| {
        let why = host.vm("hungry")["link_error"].take();
        why.as_str().is_some_and(|why| why.contains("overbook-libvirt"))
    });
    assert_eq!(host.vm("hungry")["group"], "shop", "it stays in its group");
    host.helper = start_helper(&host.dir);
    host.until_linked();

    host.libvirtd.kill().unwrap();
    host.libvirtd.wait().unwrap();
    host.until("libvirt's end is told", |host| {
        host.vm("hungry")["link_error"].as_str().is_some_and(|why| why.contains("libvirt"))
    });
    host.libvirtd = start_libvirtd(&host.dir);
    host.until_linked();
    let running = virsh(&["list", "--name"]);
    assert_eq!(running.split_whitespace().count(), DOMAINS.len(), "{running}");

    host.daemon.kill().unwrap();
    host.daemon.wait().unwrap();
    host.daemon = start_daemon(&host.dir);
    host.until_linked();
}

/// A stopped process costs its own domains' readings, and nothing else.
fn hangs(host: &mut LibvirtHost) {
    let libvirtd = Pid::from_child(&host.libvirtd);
    kill_process(libvirtd, Signal::STOP).unwrap();
    host.until("libvirt's silence is told", |host| {
        host.vm("hungry")["link_error"].as_str().is_some_and(|why| why.contains("libvirt"))
    });
    kill_process(libvirtd, Signal::CONT).unwrap();
    host.until_linked();

    let qemu = fs::read_to_string("/run/libvirt/qemu/idle-2.pid").unwrap();
    let qemu = Pid::from_raw(qemu.trim().parse().unwrap()).unwrap();
    kill_process(qemu, Signal::STOP).unwrap();
    let others_are_fresh = |host: &LibvirtHost| {
        ["hungry", "idle-1", "idle-3", "stray"].iter().all(|name| {
            let vm = host.vm(name);
            vm["link_up"] == true && vm["stats_age_ms"].as_u64().is_some_and(|age| age < 3000)
        })
    };
    host.until("one guest is silent and the others are not", |host| {
        host.vm("idle-2")["migration"] == "unknown" && others_are_fresh(host)
    });
    host.helper.kill().unwrap();
    host.helper.wait().unwrap();
    host.until("its end is told", |host| host.vm("hungry")["link_up"] == false);
    host.helper = start_helper(&host.dir);
    host.until("a new one sees the others, though it has never heard of this one", |host| {
        others_are_fresh(host)
    });
    kill_process(qemu, Signal::CONT).unwrap();
    host.until_linked();
}

fn noticed(host: &LibvirtHost) {
    host.until_said_to_be_moved("idle-3");
    let left = actual("idle-3");
    assert!(left >= Bytes::mib(160), "it is left alone at {left}");
    noticed_though_never_moved(host);
}

/// The balloon of a domain that Overbook has never moved, and that its metadata puts into a group
/// while it runs.
fn noticed_though_never_moved(host: &LibvirtHost) {
    let settings = "<vm group=\"shop\" min=\"128 MiB\" base=\"128 MiB\" max=\"128 MiB\"/>";
    let uri = "https://overbook.example/libvirt/1";
    let set = ["--uri", uri, "--key", "o", "--set", settings];
    virsh(&[&["metadata", "stray", "--live"], &set[..]].concat());
    host.until("its new metadata is in force", |host| host.vm("stray")["group"] == "shop");
    host.until_said_to_be_moved("stray");
    virsh(&["metadata", "stray", "--live", "--uri", uri, "--remove"]);
    host.until("it has left its group", |host| host.vm("stray")["group"].is_null());
}

fn suspended(host: &LibvirtHost) {
    for (order, is_suspended) in [("suspend", true), ("resume", false)] {
        virsh(&[order, "idle-2"]);
        host.until(order, |host| host.vm("idle-2")["suspended"] == is_suspended);
    }
    host.until_linked();
}

/// A domain's next start is another VM: nothing of the earlier one reaches it.
fn started_anew(host: &LibvirtHost) {
    let found = || {
        let log = fs::read_to_string(host.dir.join("daemon.log")).unwrap();
        log.matches("idle-2: found").count()
    };
    let before = found();
    virsh(&["destroy", "idle-2"]);
    virsh(&["start", "idle-2"]);
    host.until("the next start is found", |_| found() > before);
    host.until_linked();
}

fn released(host: &mut LibvirtHost) {
    let release = |host: &LibvirtHost| {
        let output = host.overbook(&["release"]);
        assert!(output.status.success(), "{}", text(&output));
    };
    let period = |host: &LibvirtHost, seconds: u32| {
        let period = format!("<stats period='{seconds}'/>");
        host.until(&period, |_| virsh(&["dumpxml", "idle-1"]).contains(&period));
    };
    release(host);
    let have_what_they_had = |host: &LibvirtHost| {
        host.until("the guests have what they had", |_| {
            // A guest that uses more than it had keeps it.
            let idle = ["idle-1", "idle-2"].iter().all(|name| actual(name) == BASE);
            idle && actual("hungry") >= BASE
        });
    };
    have_what_they_had(host);
    period(host, 5);

    // The same without a daemon.
    let resumed = host.overbook(&["resume"]);
    assert!(resumed.status.success(), "{}", text(&resumed));
    period(host, 1);
    host.until("memory is taken again", |_| {
        ["idle-1", "idle-2"].iter().any(|name| actual(name) < BASE)
    });
    host.daemon.kill().unwrap();
    host.daemon.wait().unwrap();
    release(host);
    period(host, 5);
    have_what_they_had(host);
}

fn managed_and_back(host: &LibvirtHost) {
    let read = || virsh(&["dumpxml", "--inactive", "--security-info", "idle-1"]);
    let before = read();
    let run = |arguments: &[&str]| host.overbook(&[&["libvirt"], arguments].concat());
    let shown = run(&["manage", "idle-1"]);
    assert!(!shown.status.success() && read() == before, "nothing is written without a yes");
    assert!(text(&shown).contains("+    <qemu:env name='LD_PRELOAD'"), "{}", text(&shown));
    let managed = run(&["manage", "idle-1", "--yes"]);
    assert!(managed.status.success(), "{}", text(&managed));
    let after = read();
    assert!(after.contains("freePageReporting='on'") && after.contains("liboverbook_shim.so"));
    let back = run(&["unmanage", "idle-1", "--yes"]);
    assert!(back.status.success(), "{}", text(&back));
    assert_eq!(read(), before);
}

impl LibvirtHost {
    fn overbook(&self, arguments: &[&str]) -> Output {
        let config = self.dir.join("overbook.toml");
        overbook_tests::program().arg("--config").arg(config).args(arguments).output().unwrap()
    }

    /// A VM in `status`; null if it is not found.
    fn vm(&self, name: &str) -> Value {
        let output = self.overbook(&["status", "--json"]);
        let Ok(page) = serde_json::from_slice::<Value>(&output.stdout) else { return Value::Null };
        let vms = page["vms"].as_array().unwrap();
        vms.iter().find(|vm| vm["name"] == name).cloned().unwrap_or_default()
    }

    /// Moves a domain's balloon until the daemon has noticed. A guest that the daemon has just met
    /// may still move by an earlier request, so it takes several tries.
    fn until_said_to_be_moved(&self, name: &str) {
        let (moves, moved) = (Cell::new(0), Cell::new(None::<Instant>));
        self.until("the move by another program is told", |host| {
            if moved.get().is_none_or(|at| at.elapsed() > Duration::from_secs(25)) {
                let size = if moves.get() % 2 == 0 { "200M" } else { "160M" };
                virsh(&["setmem", name, size, "--live"]);
                moves.set(moves.get() + 1);
                moved.set(Some(Instant::now()));
            }
            host.vm(name).to_string().contains("another program moved its balloon")
        });
    }

    fn until_linked(&self) {
        self.until("all are linked again", |host| {
            DOMAINS.iter().all(|name| {
                let vm = host.vm(name);
                vm["link_up"] == true && vm["migration"] == "none"
            })
        });
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is_so(self) {
            if Instant::now() > deadline {
                let log = |name: &str| {
                    let log = fs::read_to_string(self.dir.join(name)).unwrap_or_default();
                    format!("\n{name}:\n{}", lab::command::last_lines(&log, 30))
                };
                let status = text(&self.overbook(&["status", "--json"]));
                let logs = ["daemon.log", "helper.log", "libvirtd.log", "hungry.console"].map(log);
                panic!("not in time: {what}\n{status}{}", logs.concat());
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Hides the host's libvirt, and configures an own one.
fn prepare(dir: &Path) {
    for hidden in HIDDEN {
        fs::create_dir_all(hidden).unwrap();
        run("mount", &["-t", "tmpfs", "tmpfs", hidden]);
    }
    if Path::new(KVM).exists() {
        // The domains do without KVM. A device that root can use and libvirt's user cannot would
        // have libvirt ask QEMU for its features before each start.
        let no_device = dir.join("no-kvm");
        File::create(&no_device).unwrap();
        fs::set_permissions(&no_device, Permissions::from_mode(0o600)).unwrap();
        run("mount", &["--bind", no_device.to_str().unwrap(), KVM]);
    }
    run("ip", &["link", "set", "lo", "up"]);
    let qemu = "security_driver = \"none\"\nnamespaces = []\ncgroup_controllers = []\n\
        stdio_handler = \"file\"\nremember_owner = 0\n";
    fs::write("/etc/libvirt/qemu.conf", qemu).unwrap();
    fs::write("/etc/libvirt/libvirtd.conf", "auth_unix_rw = \"none\"\n").unwrap();
    let files = dir.join("files");
    fs::create_dir(&files).unwrap();
    fs::set_permissions(&files, Permissions::from_mode(0o777)).unwrap();
    run("virtlogd", &["-d"]);
}

fn start_libvirtd(dir: &Path) -> Child {
    let child = spawn(dir, "libvirtd.log", Command::new("/usr/sbin/libvirtd"));
    let deadline = Instant::now() + LIMIT;
    while !connected(&["list"]).status.success() {
        assert!(Instant::now() < deadline, "libvirtd does not come up");
        std::thread::sleep(POLL);
    }
    child
}

fn start_helper(dir: &Path) -> Child {
    let mut command = Command::new(own_program("overbook-libvirt").unwrap());
    command.args(["serve", "--socket"]).arg(dir.join("run/libvirt.sock"));
    fs::create_dir_all(dir.join("run")).unwrap();
    spawn(dir, "helper.log", command)
}

fn start_daemon(dir: &Path) -> Child {
    let mut command = overbook_tests::program();
    command.arg("--config").arg(dir.join("overbook.toml")).arg("daemon");
    spawn(dir, "daemon.log", command)
}

fn spawn(dir: &Path, log: &str, mut command: Command) -> Child {
    let log = File::options().create(true).append(true).open(dir.join(log)).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

fn configuration(dir: &Path) -> String {
    let (dir, budget) = (dir.display(), BUDGET.0 >> 20);
    // A guest that has never swapped would keep its base.
    let swap = ["idle-1", "idle-2", "idle-3"].map(|name| format!("[vm.{name}]\nswap = true\n"));
    let swap = swap.concat();
    format!(
        "[host]\nqmp = [\"{dir}/none/*.sock\"]\nstate = \"{dir}/run/state\"\nattach = \"on\"\n\
         grace_s = 10\n\n\
         [mode]\nballoon = \"enforce\"\n\n[api]\nsocket = \"{dir}/run/overbook.sock\"\n\n\
         [group.shop]\nvms = [\"idle-*\"]\nbudget = \"{budget} MiB\"\ntracking = \"off\"\n\
         attach = \"off\"\n{swap}"
    )
}

/// The emulator for libvirt: the system's, or a program that knows where the parts of an unpacked
/// QEMU are.
fn emulator(dir: &Path) -> PathBuf {
    let Some(root) = std::env::var_os(QEMU) else { return "/usr/bin/qemu-system-x86_64".into() };
    run("mount", &["--bind", root.to_str().unwrap(), QEMU_ROOT]);
    run("mount", &["-o", "remount,bind,ro", QEMU_ROOT]);
    if Path::new(MODULES).exists() {
        run("mount", &["-t", "tmpfs", "tmpfs", MODULES]);
    }
    let program = dir.join("qemu-system-x86_64");
    let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"]
        .map(|directory| format!("{QEMU_ROOT}/{directory}"))
        .join(":");
    let script = format!(
        "#!/bin/sh\nexport LD_LIBRARY_PATH={libraries}\n\
         exec {QEMU_ROOT}/usr/bin/qemu-system-x86_64 -L {QEMU_ROOT}/usr/share/qemu \
         -L {QEMU_ROOT}/usr/share/seabios \"$@\"\n"
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    program
}

/// A domain's RAM, which is also its greatest size.
fn ram(name: &str) -> Bytes {
    if name == HUNGRY { HUNGRY_MAX } else { MAX }
}

fn description(dir: &Path, emulator: &Path, name: &str) -> String {
    let (dir, emulator) = (dir.display(), emulator.display());
    let (max, base) = (ram(name).0 >> 10, BASE.0 >> 10);
    let metadata = match name {
        "stray" => String::new(),
        _ => format!("<metadata><o:vm {METADATA} max=\"{max} KiB\"/></metadata>"),
    };
    let workload = if name == HUNGRY {
        format!("random-array,--mb,{ARRAY_MIB},--record-kb,64")
    } else {
        "idle".to_owned()
    };
    let swap = format!("{dir}/files/{name}.swap");
    File::create(&swap).unwrap().set_len(ram(name).0).unwrap();
    fs::set_permissions(&swap, Permissions::from_mode(0o666)).unwrap();
    let line = format!(
        "{KERNEL_BASICS} tsc=reliable tsc_early_khz={} overbook.name={name} \
         overbook.balloon_kb={} overbook.run={workload},--seed,1",
        sys::tsc::khz(),
        max - base,
    );
    format!(
        "<domain type='qemu'><name>{name}</name>{metadata}<memory unit='KiB'>{max}</memory>\
         <currentMemory unit='KiB'>{base}</currentMemory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{dir}/kernel</kernel>\
         <initrd>{dir}/initrd</initrd><cmdline>{line}</cmdline></os>\
         <features><acpi/><apic/><tcg><tb-cache unit='MiB'>32</tb-cache></tcg></features>\
         <cpu mode='maximum'/>\
         <clock offset='utc'><timer name='hpet' present='no'/></clock>\
         <on_reboot>destroy</on_reboot><devices><emulator>{emulator}</emulator>\
         <disk type='file' device='disk'><driver name='qemu' type='raw'/>\
         <source file='{swap}'/><target dev='vda' bus='virtio'/><serial>swap</serial></disk>\
         <serial type='file'><source path='{dir}/files/{name}.console'/><target port='0'/></serial>\
         <serial type='file'><source path='{dir}/files/{name}.metrics'/><target port='1'/></serial>\
         <memballoon model='virtio'><stats period='5'/></memballoon></devices></domain>"
    )
}

fn connected(arguments: &[&str]) -> Output {
    let mut command = Command::new("virsh");
    command.args(["-q", "-c", "qemu:///system"]).args(arguments).output().unwrap()
}

/// The output of `virsh`, which must succeed.
fn virsh(arguments: &[&str]) -> String {
    let output = connected(arguments);
    let log = || {
        let dir = PathBuf::from(std::env::var_os(INSIDE).unwrap());
        fs::read_to_string(dir.join("libvirtd.log")).unwrap_or_default()
    };
    assert!(output.status.success(), "virsh {arguments:?}: {}\n{}", text(&output), log());
    String::from_utf8(output.stdout).unwrap()
}

/// A guest's memory, as libvirt reports it.
fn actual(name: &str) -> Bytes {
    let stats = virsh(&["dommemstat", name]);
    let actual = stats.lines().find_map(|line| line.strip_prefix("actual "));
    Bytes(actual.unwrap().trim().parse::<u64>().unwrap() << 10)
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output));
}
