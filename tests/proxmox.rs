//! A node of Proxmox, end to end: its files, and QEMUs started as Proxmox starts them, in a
//! namespace where `/run/qemu-server` and `/etc/pve` are the test's own. At the end the cluster's
//! file system hangs, as pmxcfs may.
//!
//! Source of the command line: `qm showcmd` of Proxmox VE 8, without options that need its disks,
//! networks, daemons and its own QEMU. The guests do not run: only their QEMUs' start counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lab::cache::Cache;
use lab::qemu::Qemu;
use overbook_tests::{Requirement, ensure, requires, take_turn, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Set in the namespace: the directory of the test's files.
const INSIDE: &str = "OVERBOOK_PROXMOX_TEST";
const NAME: &str = "vms_of_proxmox_are_found_by_what_its_files_say";
/// Maximum time of any wait, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(240);
const POLL: Duration = Duration::from_millis(200);
const CONFS: &str = "/etc/pve/qemu-server";
/// Changes a file as `qm set VMID --args VALUE` and `qm set VMID --delete args` do.
const QM: &str = r#"#!/bin/sh
file=/etc/pve/qemu-server/$2.conf
{
    test "$3" = --args && printf 'args: %s\n' "$4"
    grep -v '^args:' "$file"
} > "$file.tmp.$$"
mv "$file.tmp.$$" "$file"
"#;

#[test]
fn vms_of_proxmox_are_found_by_what_its_files_say() {
    if let Some(dir) = std::env::var_os(INSIDE) {
        return inside(Path::new(&dir));
    }
    let Some(_turn) = take_turn() else { return };
    let Some(()) = requires(Requirement::Root, requires::root()) else { return };
    let fuse = ensure(Path::new("/dev/fuse").exists(), "no /dev/fuse");
    let Some(()) = requires(Requirement::Fuse, fuse) else { return };
    let Some(_) = requires(Requirement::Packages, qemu()) else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    // The namespaces end with this thread. The shell is process 1 there, and reaps
    // processes that are left to it.
    let status = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["--propagation", "private", "sh", "-c", "\"$@\" & wait $!", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(INSIDE, dir.path())
        .status()
        .unwrap();
    assert!(status.success(), "in its namespace: {status}");
}

fn qemu() -> Result<Qemu, String> {
    let cache = Cache::open().map_err(|error| error.to_string())?;
    Qemu::provide(&cache).map_err(|error| error.to_string())
}

/// A node, and the daemon on it.
struct ProxmoxNode {
    dir: PathBuf,
    daemon: Child,
    _qemus: Vec<sys::process::Child>,
}

fn inside(dir: &Path) {
    prepare(dir);
    managed_and_back(dir);
    let web = start(101, "web-1");
    let db = start(102, "db-1");
    let mut node = ProxmoxNode { dir: dir.to_owned(), daemon: daemon(dir), _qemus: vec![web, db] };
    found_by_labels(&node);
    left_to_proxmox(&node);
    seen_by_the_doctor(&node);
    hangs(&mut node);
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output));
}

/// The files of a node with two VMs.
fn prepare(dir: &Path) {
    run("mount", &["-t", "tmpfs", "-o", "mode=755", "none", "/run"]);
    let etc = dir.join("etc");
    run("cp", &["-a", "/etc", etc.to_str().unwrap()]);
    run("mount", &["--bind", etc.to_str().unwrap(), "/etc"]);
    fs::create_dir("/run/qemu-server").unwrap();
    fs::create_dir_all("/etc/pve/nodes/pve-1/qemu-server").unwrap();
    symlink("nodes/pve-1/qemu-server", CONFS).unwrap();
    fs::write("/etc/pve/user.cfg", "user:root@pam:1:0:::::\n\npool:shop:Web%3A shop:101:local:\n")
        .unwrap();
    let conf = |vmid: u32, lines: &str| {
        let text = format!("#Made by a test%3A {vmid}\n{lines}memory: 64\nostype: l26\n");
        fs::write(conf(vmid), text).unwrap();
    };
    conf(101, "args: -rtc base=utc\nballoon: 48\nname: web-1\nshares: 0\ntags: prod;eu\n");
    conf(102, "balloon: 32\nname: db-1\ntags: prod\n");
    let text = format!(
        "[host]\nstate = \"{0}/state\"\n\n[mode]\nballoon = \"recommend\"\n\n\
         [api]\nsocket = \"{0}/overbook.sock\"\n\n[group.shop]\nvms = [\"pool:shop\"]\n\n\
         [group.db]\nvms = [\"vmid:102\"]\n",
        dir.display()
    );
    fs::write(dir.join("overbook.toml"), text).unwrap();
    fs::create_dir(dir.join("bin")).unwrap();
    fs::write(dir.join("bin/qm"), QM).unwrap();
    fs::set_permissions(dir.join("bin/qm"), Permissions::from_mode(0o755)).unwrap();
}

fn conf(vmid: u32) -> PathBuf {
    Path::new(CONFS).join(format!("{vmid}.conf"))
}

fn overbook(dir: &Path, arguments: &[&str]) -> Output {
    let path = format!("{}:{}", dir.join("bin").display(), std::env::var("PATH").unwrap());
    let mut command = overbook_tests::program();
    command.arg("--config").arg(dir.join("overbook.toml")).env("PATH", path);
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Leaves both VMs managed.
fn managed_and_back(dir: &Path) {
    let read = || fs::read_to_string(conf(101)).unwrap();
    let proxmox = |arguments: &[&str]| overbook(dir, &[&["proxmox"], arguments].concat());
    let before = read();
    let shown = proxmox(&["manage", "101"]);
    assert!(!shown.status.success() && read() == before, "nothing is written without a yes");
    assert!(text(&shown).contains("\n+args: -rtc base=utc -chardev "), "{}", text(&shown));
    for (order, is_back) in [("manage", false), ("unmanage", true), ("manage", false)] {
        let done = proxmox(&[order, "101", "--yes"]);
        assert!(done.status.success(), "{}", text(&done));
        assert_eq!(read() == before || is_same(&read(), &before), is_back, "{order}: {}", read());
    }
    let again = proxmox(&["manage", "101", "--yes"]);
    assert!(text(&again).contains("it is managed already"), "{}", text(&again));
    let other = proxmox(&["manage", "102", "--yes"]);
    assert!(text(&other).contains("  qm set 102 --shares 0"), "{}", text(&other));
    let none = proxmox(&["manage", "103", "--yes"]);
    assert!(text(&none).contains("there is no /etc/pve/qemu-server/103.conf"), "{}", text(&none));
}

/// Whether two files have the same lines: `qm` orders them.
fn is_same(one: &str, other: &str) -> bool {
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    sorted(one) == sorted(other)
}

/// Starts a VM's QEMU.
fn start(vmid: u32, name: &str) -> sys::process::Child {
    let text = fs::read_to_string(conf(vmid)).unwrap();
    let args = text.lines().find_map(|line| line.strip_prefix("args: ")).unwrap();
    let line = format!(
        "-name {name},debug-threads=on -no-shutdown \
         -chardev socket,id=qmp,path=/var/run/qemu-server/{vmid}.qmp,server=on,wait=off \
         -mon chardev=qmp,mode=control -pidfile /var/run/qemu-server/{vmid}.pid -smp 1 -nodefaults \
         -display none -S -accel tcg,tb-size=8 -m 64 \
         -device virtio-balloon-pci,id=balloon0,addr=0x3,free-page-reporting=on -machine type=pc \
         {args}"
    );
    let spawn = qemu().unwrap().command().args(line.split_whitespace()).stdin(Stdio::null());
    let log = File::create(format!("/run/{vmid}.log")).unwrap();
    spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap()
}

fn daemon(dir: &Path) -> Child {
    let log = File::create(dir.join("daemon.log")).unwrap();
    let mut command = overbook_tests::program();
    command.arg("--config").arg(dir.join("overbook.toml")).arg("daemon").stdin(Stdio::null());
    command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

impl ProxmoxNode {
    /// A VM in `status`; null if it is not found.
    fn vm(&self, name: &str) -> Value {
        let output = overbook(&self.dir, &["status", "--json"]);
        let Ok(page) = serde_json::from_slice::<Value>(&output.stdout) else { return Value::Null };
        let vms = page["vms"].as_array().unwrap();
        vms.iter().find(|vm| vm["name"] == name).cloned().unwrap_or_default()
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is_so(self) {
            let logs = ["/run/101.log", "/run/102.log"].map(|it| fs::read_to_string(it).unwrap());
            let (vms, log) = ([self.vm("web-1"), self.vm("db-1")], self.log());
            assert!(Instant::now() < deadline, "{what}\n{vms:#?}\n{logs:?}\n{log}");
            std::thread::sleep(POLL);
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("daemon.log")).unwrap()
    }
}

/// Whether the policy leaves the VM to Proxmox, and says so.
fn is_left(vm: &Value) -> bool {
    let refusals = vm["refusals"].as_array();
    refusals.into_iter().flatten().any(|it| {
        it["code"] == "managers_balloon" && it["text"].as_str().unwrap().contains("qm set 102")
    })
}

fn found_by_labels(node: &ProxmoxNode) {
    node.until("both are found, in the groups that their labels name", |node| {
        let (web, db) = (node.vm("web-1"), node.vm("db-1"));
        web["group"] == "shop" && db["group"] == "db" && web["link_up"] == true
    });
    let web = node.vm("web-1");
    let expected = ["vmid:101", "pool:shop", "tag:prod", "tag:eu"];
    assert_eq!(web["labels"], serde_json::json!(expected), "{web}");
    assert_eq!(web["base_bytes"], 48 << 20, "its `balloon`: {web}");
    assert_eq!(web["unsupported"]["balloon"], Value::Null, "it has one: {web}");
    // Proxmox's own socket is free for Proxmox's tools.
    let stream = UnixStream::connect("/run/qemu-server/101.qmp").unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    assert!(line.starts_with("{\"QMP\""), "{line}");
}

fn left_to_proxmox(node: &ProxmoxNode) {
    node.until("pvestatd's VM is left alone", |node| is_left(&node.vm("db-1")));
    assert!(!is_left(&node.vm("web-1")));
    let text = fs::read_to_string(conf(102)).unwrap();
    let new = conf(102).with_extension("new");
    fs::write(&new, format!("{text}shares: 0\n")).unwrap();
    fs::rename(new, conf(102)).unwrap();
    node.until("it is Overbook's once its shares are 0", |node| {
        let vm = node.vm("db-1");
        vm["group"] == "db" && !is_left(&vm)
    });
}

fn seen_by_the_doctor(node: &ProxmoxNode) {
    let output = overbook(&node.dir, &["doctor", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let vms = found["vms"].as_array().unwrap();
    let web = vms.iter().find(|vm| vm["name"] == "web-1").unwrap();
    assert_eq!(web["started_by"], "Proxmox");
    for capability in ["see", "free_pages"] {
        assert_eq!(web["capabilities"][capability], "yes", "{capability}: {web:#}");
    }
    let costs_balloon = |it: &&Value| it["lacks"].as_array().unwrap().contains(&"balloon".into());
    let diagnoses = web["diagnoses"].as_array().unwrap().iter();
    let causes: Vec<_> = diagnoses.filter(costs_balloon).map(|it| &it["cause"]).collect();
    assert!(causes.iter().all(|cause| **cause == "no_statistics"), "its guest is off: {web:#}");
}

/// A file system that answers the first question and no other one, until it is unmounted.
fn hanging_file_system() -> std::thread::JoinHandle<()> {
    let mut device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    // `mount` inherits it, and no other program: the daemon runs already.
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::empty()).unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    run("mount", &["-i", "-t", "fuse", "-o", &options, "none", "/etc/pve"]);
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC).unwrap();
    std::thread::spawn(move || {
        let mut question = vec![0; 1 << 20];
        let length = device.read(&mut question).unwrap();
        assert!(length >= 40, "the kernel begins with FUSE_INIT");
        // `struct fuse_out_header` and `struct fuse_init_out` of linux/fuse.h: version 7.31.
        let mut answer = [0_u8; 80];
        answer[..4].copy_from_slice(&80_u32.to_ne_bytes());
        answer[8..16].copy_from_slice(&question[8..16]);
        answer[16..20].copy_from_slice(&7_u32.to_ne_bytes());
        answer[20..24].copy_from_slice(&31_u32.to_ne_bytes());
        answer[36..40].copy_from_slice(&4096_u32.to_ne_bytes());
        device.write_all(&answer).unwrap();
        // A question that was read can be withdrawn by no signal. An error: it is unmounted.
        while device.read(&mut question).is_ok() {}
    })
}

fn hangs(node: &mut ProxmoxNode) {
    let file_system = hanging_file_system();
    node.until("its silence is told", |node| node.log().contains("/etc/pve does not answer"));
    let web = node.vm("web-1");
    assert_eq!((&web["group"], &web["link_up"]), (&"shop".into(), &true.into()), "{web}");
    let order = overbook(&node.dir, &["proxmox", "manage", "101", "--yes"]);
    assert!(text(&order).contains("/etc/pve does not answer"), "{}", text(&order));
    kill_process(Pid::from_child(&node.daemon), Signal::TERM).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = node.daemon.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "the daemon does not end\n{}", node.log());
        std::thread::sleep(POLL);
    };
    assert!(status.success(), "{status}\n{}", node.log());
    // A new one starts: no lock and no socket is held by a process that hangs.
    node.daemon = daemon(&node.dir);
    node.until("a new daemon finds the VM, by its process or socket", |node| {
        !node.vm("web-1").is_null()
    });
    run("umount", &["-f", "-l", "/etc/pve"]);
    file_system.join().unwrap();
    node.until("it goes on by itself", |node| node.vm("web-1")["group"] == "shop");
}
