//! `overbook doctor` with real QEMUs, each broken in its own way: it lists all of them at once,
//! names the reason of each, and opens no VM's socket. The guests do not run: only their QEMUs'
//! start counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use lab::cache::Cache;
use lab::command;
use lab::qemu::Qemu;
use overbook_tests::{Requirement, overbook, requires, take_turn, text};
use serde_json::Value;
use sys::process::{Child, Spawn};

const LIMIT: Duration = Duration::from_secs(180);
const BALLOON: &str = "-device virtio-balloon-pci,free-page-reporting=on";

/// A directory with a configuration, QMP sockets and QEMUs, which end with it.
struct Qemus {
    dir: tempfile::TempDir,
    qemu: Qemu,
    running: Vec<Child>,
}

impl Drop for Qemus {
    fn drop(&mut self) {
        for child in &mut self.running {
            // One that has ended is fine.
            let _ = child.end(Duration::from_secs(5));
        }
    }
}

impl Qemus {
    fn new(qemu: Qemu) -> Self {
        let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
        let qemus = Self { dir, qemu, running: Vec::new() };
        std::fs::create_dir(qemus.at("qmp")).unwrap();
        // VMs of others on this host are left alone.
        let text = format!(
            "[host]\nqmp = [\"{0}/qmp/*.sock\"]\nstate = \"{0}/state\"\nattach = \"off\"\n\
             [api]\nsocket = \"{0}/api.sock\"\n",
            qemus.at("").display().to_string().trim_end_matches('/')
        );
        std::fs::write(qemus.at("overbook.toml"), text).unwrap();
        qemus
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn socket(&self, name: &str) -> String {
        let path = self.at(&format!("qmp/{name}.sock"));
        format!("-qmp unix:{},server=on,wait=off", path.display())
    }

    /// Starts a QEMU whose guest does not run, under a name that no other test has. Returns its
    /// process id.
    fn start(&mut self, name: &str, options: &str) -> u32 {
        let spawn = self.qemu.command();
        self.start_as(spawn, name, options)
    }

    fn start_as(&mut self, spawn: Spawn, name: &str, options: &str) -> u32 {
        let usual = "-S -display none -nodefaults -machine pc -m 64 -accel tcg,tb-size=8";
        let log = std::fs::File::create(self.at(&format!("{name}.log"))).unwrap();
        let spawn = spawn.arg("-name").arg(format!("doctor-{name}")).args(usual.split(' '));
        let spawn = spawn.args(options.split_whitespace()).stdin(Stdio::null());
        let child = spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap();
        let pid = child.identity().pid;
        self.running.push(child);
        pid
    }

    fn doctor(&self, more: &[&str]) -> (Option<i32>, String) {
        let config = self.at("overbook.toml");
        let output = overbook(&[&["--config", config.to_str().unwrap(), "doctor"], more].concat());
        (output.status.code(), text(&output))
    }

    fn json(&self) -> Value {
        let (code, said) = self.doctor(&["--json"]);
        assert!(matches!(code, Some(0 | 1)), "{code:?} {said}");
        serde_json::from_str(&said).unwrap()
    }

    /// Waits until `is_so` of the examination.
    fn until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let found = self.json();
            if is_so(&found) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}\n{found:#}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn logs(&self) -> String {
        let entries = std::fs::read_dir(self.dir.path()).unwrap().map(|it| it.unwrap().path());
        let logs = entries.filter(|path| path.extension().is_some_and(|it| it == "log"));
        logs.map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }
}

fn vm(found: &Value, pid: u32) -> &Value {
    found["vms"].as_array().unwrap().iter().find(|vm| vm["pid"] == pid).unwrap_or(&Value::Null)
}

/// The causes of the faults of a VM, or of the host, without those of the host's kernel.
fn causes(of: &Value) -> BTreeSet<String> {
    let diagnoses = of.as_array().into_iter().flatten();
    let faults = diagnoses.filter(|it| it["is_fault"] == true);
    let names = faults.map(|it| it["cause"].as_str().unwrap().to_owned());
    names.filter(|it| it != "host_cannot_page").collect()
}

/// Whether QEMU greets a client: its socket serves one at a time.
fn greets(socket: &Path) -> bool {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).is_ok_and(|_| line.starts_with("{\"QMP\""))
}

#[test]
fn real_qemus_that_are_broken_in_one_way_each_are_listed_at_once_with_the_right_reason() {
    let Some(_turn) = take_turn() else { return };
    let qemu = Qemu::provide(&Cache::open().unwrap());
    let Some(qemu) = requires(Requirement::Packages, qemu) else { return };
    let mut qemus = Qemus::new(qemu);
    std::fs::write(qemus.at("qmp/plain.sock"), "").unwrap();
    drop(UnixListener::bind(qemus.at("qmp/stale.sock")).unwrap());
    let in_order = |qemus: &Qemus, name: &str| format!("{} {BALLOON}", qemus.socket(name));
    let memfd = "-object memory-backend-memfd,id=ram,size=64M,share=on -machine memory-backend=ram";
    let elsewhere = format!("-qmp unix:{},server=on,wait=off", qemus.at("else.qmp").display());
    let options = [
        ("good", in_order(&qemus, "good"), None),
        ("unseen", BALLOON.to_owned(), Some("no_socket")),
        ("elsewhere", format!("{elsewhere} {BALLOON}"), Some("socket_elsewhere")),
        ("unballooned", qemus.socket("unballooned"), Some("no_balloon")),
        (
            "unreported",
            format!("{} -device virtio-balloon-pci", qemus.socket("unreported")),
            Some("no_reporting"),
        ),
        (
            "locked",
            format!("{} -overcommit mem-lock=on", in_order(&qemus, "locked")),
            Some("locked"),
        ),
        ("shared", format!("{} {memfd}", in_order(&qemus, "shared")), Some("shared_memory")),
        (
            "twice",
            format!("{} {}", in_order(&qemus, "twice"), qemus.socket("twice-more")),
            Some("two_sockets"),
        ),
        ("deleted", in_order(&qemus, "deleted"), Some("socket_gone")),
    ];
    let mut started: Vec<(u32, Option<&str>)> = Vec::new();
    for (name, options, cause) in &options {
        started.push((qemus.start(name, options), *cause));
    }
    let shim = qemus.at("liboverbook_shim.so");
    let spawn = qemus.qemu.command().env("LD_PRELOAD", &shim);
    let preloaded = in_order(&qemus, "preloaded");
    started.push((qemus.start_as(spawn, "preloaded", &preloaded), Some("shim_not_loaded")));

    // The kernel lists them before they have begun to do anything.
    let first = qemus.json();
    for (pid, _) in &started {
        assert!(!vm(&first, *pid).is_null(), "process {pid} is not listed: {first:#}");
    }
    qemus.until("each has made its socket", |_| {
        let names = options.iter().map(|(name, ..)| *name).chain(["preloaded", "twice-more"]);
        let mut has_socket = names.filter(|name| !["unseen", "elsewhere"].contains(name));
        has_socket.all(|name| qemus.at(&format!("qmp/{name}.sock")).exists())
    });
    std::fs::remove_file(qemus.at("qmp/deleted.sock")).unwrap();
    let found = qemus.until("each has the right reason, and no other", |found| {
        started.iter().all(|(pid, cause)| {
            let found = causes(&vm(found, *pid)["diagnoses"]);
            found == cause.iter().map(|it| (*it).to_owned()).collect()
        })
    });
    let good = vm(&found, started[0].0);
    for capability in ["see", "balloon", "statistics", "free_pages"] {
        let is = &good["capabilities"][capability];
        // It is in no group, so nothing moves its balloon.
        assert!(is == "yes" || (capability == "balloon" && is == "off"), "{good:#}");
    }
    assert_eq!(vm(&found, started[5].0)["capabilities"]["balloon"], "no");
    let host = causes(&found["host"]);
    assert!(host.contains("stale_socket") && host.contains("plain_file"), "{host:?}");
    assert_eq!(found["has_daemon"], false);

    let (code, page) = qemus.doctor(&["doctor-good"]);
    assert_eq!(code, Some(1), "the host has something to mend: {page}");
    let (_, page) = qemus.doctor(&["doctor-unseen"]);
    let line =
        format!("      -qmp unix:{}/qmp/doctor-unseen.sock,server=on", qemus.dir.path().display());
    assert!(page.contains(&line), "{page}");
    let is_narrow = |line: &str| line.starts_with("      ") || line.chars().count() <= 80;
    let (_, page) = qemus.doctor(&["--all"]);
    assert!(page.lines().all(is_narrow), "{page}");
    let (code, page) = qemus.doctor(&["nosuch"]);
    assert!(code == Some(1) && page.contains("named nosuch"), "{page}");

    assert!(greets(&qemus.at("qmp/good.sock")), "no client has taken its place");
    let stale = causes(&qemus.json()["host"]);
    assert_eq!(stale.contains("stale_socket"), host.contains("stale_socket"));

    with_a_daemon(&mut qemus, started[0].0);
}

/// A daemon adds what its QEMU says: the guest does not run, so it sends no statistics.
fn with_a_daemon(qemus: &mut Qemus, good: u32) {
    let config = qemus.at("overbook.toml");
    let log = std::fs::File::create(qemus.at("daemon.log")).unwrap();
    let program = Spawn::new(command::own_program("overbook").unwrap());
    let spawn = program.args(["--config", config.to_str().unwrap(), "daemon"]);
    let spawn = spawn.stdin(Stdio::null()).output_to(log).unwrap();
    qemus.running.push(spawn.die_with_parent().spawn().unwrap());
    let found = qemus.until("the daemon tells of the guest's driver", |found| {
        causes(&vm(found, good)["diagnoses"]).contains("no_statistics")
    });
    assert_eq!(found["has_daemon"], true);
    let diagnoses = vm(&found, good)["diagnoses"].as_array().unwrap();
    let told = diagnoses.iter().find(|it| it["cause"] == "no_statistics").unwrap();
    assert_eq!(told["remedy"]["line"], "modprobe virtio_balloon", "{told}");
}
