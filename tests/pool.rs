//! Two hosts in a pool, with etcd, their own daemons and a controller. A real guest in long
//! overload moves from one to the other, although processes die meanwhile. The setup is that of
//! the guide: etcd, controller and guest use TLS with certificates of `overbook pki`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lab::etcd::Members;
use lab::takeover::Takeover;
use lab::{Lab, command};
use overbook::pki::{self, CertificateRequest};
use overbook_tests::{Requirement, hungry, program, provisions, requires, take_turn, text};
use serde_json::Value;
use sys::process::{Child, Signal, Spawn, children_of};

const LIMIT: Duration = Duration::from_secs(120);
const VALID: Duration = Duration::from_secs(3600);
const POLL: Duration = Duration::from_millis(100);

/// A host: a directory and a daemon.
struct MemberHost {
    dir: PathBuf,
    daemon: Option<Child>,
}

impl MemberHost {
    fn new(name: &str, dir: &Path, pool: &str, incoming: Option<&Path>) -> Self {
        fs::create_dir_all(dir.join("run/state")).unwrap();
        fs::create_dir_all(dir.join("etc")).unwrap();
        let receive = incoming.map(|command| {
            format!("address = \"127.0.0.1\"\nincoming = \"{}\"\n", command.display())
        });
        let shown = dir.display();
        let config = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [\"{shown}/qmp/*.sock\"]\nstate = \"{shown}/run/state\"\n\
             [mode]\nballoon = \"observe\"\n\
             [api]\nsocket = \"{shown}/run/overbook.sock\"\n\
             [overload]\ninterval_s = 2\npages_per_s = 20\nwindow = 4\nsustained = 3\n\
             [group.shop]\nvms = [\"hungry\"]\nbase = \"128MiB\"\nmax = \"256MiB\"\n\
             [pool]\nhost = \"{name}\"\n{pool}movable = [\"hungry\"]\n\
             rest_s = 2\nprecopy_s = 4\n{}",
            receive.unwrap_or_default()
        );
        fs::write(dir.join("etc/overbook.toml"), config).unwrap();
        let mut host = Self { dir: dir.to_owned(), daemon: None };
        host.start();
        host
    }

    fn config(&self) -> PathBuf {
        self.dir.join("etc/overbook.toml")
    }

    fn start(&mut self) {
        self.daemon = Some(start(&self.config(), &["daemon"], &self.dir.join("run/daemon.log")));
    }

    fn kill(&mut self) {
        kill(&mut self.daemon);
    }

    /// Kills this host's unprivileged process that talks to the store.
    fn kills_its_store(&self) {
        let daemon = self.daemon.as_ref().unwrap().identity().pid;
        let read =
            |pid, what: &str| fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
        let mut killed = None;
        until("a process asks the store", &[self], || {
            let children = children_of(daemon).unwrap();
            killed = children.into_iter().find(|child| {
                let status = read(child.pid, "status");
                let is_confined = status.contains("CapEff:\t0000000000000000\n")
                    && status.contains("Seccomp:\t2\n");
                read(child.pid, "cmdline").contains("\0store\0") && is_confined
            });
            killed.is_some()
        });
        killed.unwrap().signal(Signal::KILL).unwrap();
    }

    fn asks(&self, arguments: &[&str]) -> Option<Value> {
        let output = program().arg("--config").arg(self.config()).args(arguments).output().unwrap();
        serde_json::from_slice(&output.stdout).ok()
    }

    /// The state for a failure message.
    fn scene(&self) -> String {
        let log = fs::read_to_string(self.dir.join("run/daemon.log")).unwrap_or_default();
        let config = self.config();
        let ask = |word: &str| {
            let all = ["cluster", word];
            text(&program().arg("--config").arg(&config).args(all).output().unwrap())
        };
        let controller = self.dir.join("../controller.log");
        let decided = fs::read_to_string(controller).unwrap_or_default();
        let status = program().arg("--config").arg(&config).arg("status").output().unwrap();
        format!(
            "{}\n{}{}{}\n{log}\n{decided}",
            text(&status),
            ask("hosts"),
            ask("overloads"),
            ask("migrations")
        )
    }
}

impl Drop for MemberHost {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start(config: &Path, arguments: &[&str], log: &Path) -> Child {
    let log = fs::File::options().create(true).append(true).open(log).unwrap();
    let program = command::own_program("overbook").unwrap();
    let spawn = Spawn::new(program).arg("--config").arg(config).args(arguments);
    spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap()
}

fn kill(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        child.signal(Signal::KILL).unwrap();
        child.wait_for(Duration::from_secs(5)).unwrap();
    }
}

fn until(what: &str, hosts: &[&MemberHost], mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        let scenes = || hosts.iter().map(|host| host.scene()).collect::<Vec<_>>().join("\n---\n");
        assert!(Instant::now() < deadline, "not in time: {what}\n{}", scenes());
        std::thread::sleep(POLL);
    }
}

/// The rows of `overbook cluster`, as this host sees them.
fn rows(host: &MemberHost, what: &str) -> Vec<Value> {
    let page = host.asks(&["cluster", what, "--json"]);
    page.and_then(|page| page.as_array().cloned()).unwrap_or_default()
}

#[test]
fn a_guest_that_is_overloaded_for_long_goes_to_a_host_that_has_room() {
    let Some(_turn) = take_turn() else { return };
    let Some(with) = provisions() else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let authority = dir.path().join("pki");
    pki::init(&authority).unwrap();
    let here = ["127.0.0.1".to_owned()];
    let issued = |name| {
        let order = CertificateRequest { name, addresses: &here, valid: VALID, renews: false };
        pki::host(&authority, order).unwrap()
    };
    let order = CertificateRequest { name: "decides", addresses: &[], valid: VALID, renews: false };
    let decides = pki::controller(&authority, order).unwrap();
    let certificate = issued("etcd").join("etcd");
    let Some(mut members) =
        requires(Requirement::Packages, Members::start_secured(3, dir.path(), &certificate))
    else {
        return;
    };
    let (near, far) = (dir.path().join("a"), dir.path().join("b"));
    let mut lab = Lab::start(&near, &with, &[hungry()]).unwrap();
    let guest = lab.machine("hungry").unwrap();
    guest.hang_up();
    let takeover = Takeover::new(guest.process(), &near, &far).unwrap();
    let endpoints = members.endpoints();
    let pool = |tls: &Path| format!("etcd = {endpoints:?}\ntls = \"{}\"\n", tls.display());
    let mut a = MemberHost::new("a", &near, &pool(&issued("a")), None);
    let mut b = MemberHost::new("b", &far, &pool(&issued("b")), Some(takeover.script()));
    let controls = dir.path().join("controller.toml");
    let own = format!("[pool]\nhost = \"decides\"\nrest_s = 2\n{}", pool(&decides));
    fs::write(&controls, own).unwrap();
    until("both hosts are there", &[&a, &b], || {
        let hosts = rows(&a, "hosts");
        hosts.len() == 2 && hosts.iter().all(|host| host["is_there"] == true)
    });
    until("it is overloaded", &[&a, &b], || {
        rows(&a, "overloads").iter().any(|row| row["severity"] == "sustained")
    });
    let places = a.asks(&["cluster", "place", &hungry().group, "--json"]).unwrap();
    let of_group =
        |host| places.as_array().unwrap().iter().find(|row| row["host"] == host).unwrap();
    assert_eq!((&of_group("a")["vms"], &of_group("b")["vms"]), (&1.into(), &0.into()), "{places}");
    let mut controller =
        Some(start(&controls, &["controller"], &dir.path().join("controller.log")));
    until("it is to be moved", &[&a, &b], || !rows(&b, "migrations").is_empty());

    // Every process that is needed dies in the middle of the move.
    a.kill();
    b.kill();
    kill(&mut controller);
    members.kill(0).unwrap();
    a.start();
    b.start();
    a.kills_its_store();
    b.kills_its_store();
    let log = dir.path().join("controller.log");
    controller = Some(start(&controls, &["controller"], &log));
    until("it is on the other host", &[&a, &b], || {
        let page = b.asks(&["cluster", "explain", "hungry", "--json"]);
        page.is_some_and(|page| page["host"] == "b") && rows(&b, "migrations").is_empty()
    });
    assert!(!lab.machine("hungry").unwrap().alive(), "its first QEMU is still there");
    assert_eq!(takeover.started().len(), 1, "not one QEMU runs it: {}", b.scene());
    let metrics = far.join("log/hungry.metrics");
    let lines = || fs::read_to_string(&metrics).unwrap_or_default().lines().count();
    let before = lines();
    until("it works there", &[&b], || lines() >= before + 2);
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.contains("hungry has gone from a to b"), "{said}");

    // Each host's history has the move.
    for (host, words) in [(&a, "it has moved to host b"), (&b, "it has come from host a")] {
        until("its history has the move", &[host], || {
            let rows = host.asks(&["history", "hungry", "--json"]).unwrap_or_default();
            rows.as_array().is_some_and(|rows| rows.iter().any(|row| row["moved"] == words))
        });
    }

    // Without a store the hosts go on, and report it.
    for i in 0..members.count() {
        members.kill(i).unwrap();
    }
    until("it is said that the store is gone", &[&b], || {
        let page = b.asks(&["status", "--json"]).unwrap_or_default();
        page["host"]["pool_trouble"].as_str().is_some_and(|why| why.contains("does not answer"))
    });
    let before = lines();
    until("it works on", &[&b], || lines() >= before + 2);
    kill(&mut controller);
    drop((a, b, takeover));
    lab.stop().unwrap();
}
