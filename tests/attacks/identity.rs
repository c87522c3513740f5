//! Processes that impersonate others: QEMUs of no tenant that take a tenant's names, sockets that
//! have outlived their process, addresses that were bound first, files with the names of pools.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lab::MachineSpec;
use lab::attack::{Attacker, NOBODY};
use model::{Mode, VmName};
use overbook_tests::{BASE, Stage, program, take_turn, text};
use serde_json::Value;
use sys::peer::{Peer, PeerError};
use sys::pool_maps;

use crate::group::{AttackedGroup, GroupStandIn};
use crate::{end, two_that_share};

/// Long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Time that an attacker gets.
const A_WHILE: Duration = Duration::from_secs(10);

/// A directory that root has given to the attacker's user.
fn given_away(parent: &Path, name: &str) -> PathBuf {
    let dir = parent.join(name);
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o755)).unwrap();
    chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
    dir
}

fn attack(name: &str, args: &[&str]) -> Attacker {
    Attacker::start_as("qemu-system-x86_64", name, args, Some(NOBODY)).unwrap()
}

/// Waits for a line of the attacker's output; also returns the lines before it.
fn until_it_saw(attacker: &Attacker, what: &str) -> Vec<String> {
    let (mut lines, end) = (Vec::new(), Instant::now() + LIMIT);
    loop {
        lines.extend(attacker.saw(Duration::from_millis(100)));
        if lines.iter().any(|line| line.contains(what)) {
            return lines;
        }
        assert!(Instant::now() < end, "the attacker never saw that {what}: {lines:#?}");
    }
}

/// The entry in `status` for the VM with this socket.
fn stranger(stage: &Stage, socket: &Path) -> Value {
    stage.vm(socket.to_str().unwrap())
}

/// Two guests of group shop share their pages. The attacker runs as its own user, and listens in
/// its own directory.
#[test]
fn a_qemu_of_no_tenant_that_takes_a_tenants_names_is_given_none_of_its_pages() {
    // The guests have the same seed, so their data is identical.
    let guest = |name| MachineSpec {
        shim: true,
        ..MachineSpec::new(name, "shop", BASE, BASE, "verify --mb 40")
    };
    let guests = ["shop-1", "shop-2"];
    let Some(mut stage) = Stage::start(Mode::Enforce, &guests.map(guest)) else { return };
    let outside = tempfile::tempdir().unwrap();
    let evil = given_away(outside.path(), "evil");
    let own = stage.lab.dir().join("qmp");
    let globs = |dir: &Path| format!("\"{}/*.sock\"", dir.display());
    stage.configure(&[
        ("vms = [\"shop-1\", \"shop-2\"]", "vms = [\"shop-*\"]"),
        (&globs(&own), &format!("{}, {}", globs(&own), globs(&evil))),
        ("dedup = \"off\"", "dedup = 1000"),
    ]);
    let guests = guests.map(|name| stage.guest(name).process().pid);
    let shares = |pid: &u32| pool_maps::pools_of(*pid).is_ok_and(|pools| !pools.is_empty());
    stage.until("the guests share pages", |_| guests.iter().all(shares));

    let socket = evil.join("shop-evil.sock");
    let attacker = attack("qemu", &[socket.to_str().unwrap(), "shop-evil"]);
    let mut saw = until_it_saw(&attacker, "said shop-evil");
    let is_stranger = |stage: &Stage| {
        let vm = stranger(stage, &socket);
        !vm.is_null() && vm["group"].is_null() && stage.vm("shop-evil").is_null()
    };
    stage.until("it is a stranger", is_stranger);
    let explained = stage.says(&["explain", socket.to_str().unwrap()]);
    assert!(explained.contains("nothing that root made says so"), "{explained}");
    stage.throughout(A_WHILE, "it stays a stranger", is_stranger);
    saw.extend(attacker.all_seen());
    assert!(!saw.iter().any(|line| line.contains("pool") || line.contains("worker")), "{saw:#?}");

    // A socket with two names harms no other VM, and is left alone under both names.
    drop(attacker);
    std::fs::remove_file(&socket).unwrap();
    let attacker = attack("qemu", &[socket.to_str().unwrap(), "shop-evil", "shop-1"]);
    let mut saw = until_it_saw(&attacker, "said shop-1");
    stage.until("it has two names", |stage| {
        let log = std::fs::read_to_string(stage.lab.dir().join("log/daemon")).unwrap();
        log.contains("shop-evil") && text(&stage.overbook(&["status"])).contains("and then")
    });
    assert_eq!(stage.vm("shop-1")["group"], "shop", "the guest has its name");
    saw.extend(attacker.all_seen());
    assert!(!saw.iter().any(|line| line.contains("pool") || line.contains("worker")), "{saw:#?}");

    // The attack succeeds if root assigns this user to the group, so it would have succeeded
    // before.
    drop(attacker);
    std::fs::remove_file(&socket).unwrap();
    stage.configure(&[("[group.\"shop\"]", "[group.\"shop\"]\nuid = [0, \"65534\"]")]);
    let attacker = attack("qemu", &[socket.to_str().unwrap(), "shop-evil"]);
    until_it_saw(&attacker, "it read a page of the pool");
    drop(attacker);
    stage.daemon.kill(&mut stage.lab).unwrap();
}

/// Starts a stand-in with this pid. Only root can choose the next pid, and only if no other
/// process starts in between.
fn begin_with_pid(pid: u32) -> Option<GroupStandIn> {
    std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
    let stand_in = GroupStandIn::start();
    (stand_in.pid() == pid).then_some(stand_in)
}

#[test]
fn a_socket_that_has_outlived_its_process_is_not_that_of_the_next_one_with_its_number() {
    let Some(_turn) = take_turn() else { return };
    let outside = tempfile::tempdir().unwrap();
    let socket = given_away(outside.path(), "evil").join("web-1.sock");
    let attacker = attack("orphan", &[socket.to_str().unwrap()]);
    let line = until_it_saw(&attacker, "the process that listened was").pop().unwrap();
    let pid: u32 = line.rsplit(' ').next().unwrap().parse().unwrap();
    let end = Instant::now() + LIMIT;
    let next = loop {
        match begin_with_pid(pid) {
            Some(next) => break next,
            None => assert!(Instant::now() < end, "no process could be given the number {pid}"),
        }
    };
    let stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let found = Peer::of(&stream).map(|peer| peer.process).unwrap_err();
    let number = rustix::net::sockopt::socket_peercred(&stream).unwrap().pid;
    assert_eq!(number.as_raw_nonzero().get().unsigned_abs(), next.pid(), "the kernel's number");
    assert!(matches!(found, PeerError::Ended { .. }), "{found}");
    until_it_saw(&attacker, "somebody has come");

    // The drivers report it, and assign it to no VM.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let state = tempfile::tempdir().unwrap();
    let why = runtime.block_on(async {
        let records = drivers::Records::new(drivers::journal::Journal::open(state.path()).unwrap());
        let mut drivers = drivers::Drivers::new(drivers::Settings {
            globs: vec![socket.display().to_string()],
            processes: false,
            groups: std::collections::BTreeMap::new(),
            period: Duration::from_millis(100),
            libvirt: "/none".into(),
            records,
        })
        .unwrap();
        loop {
            let view = model::ports::Sense::view(&mut drivers);
            let vm = view.vms.get(&VmName::from("web-1"));
            if let Some(model::Link::Down { why, .. }) = vm.map(|vm| &vm.link)
                && !why.contains("not connected yet")
            {
                assert_eq!(vm.and_then(|vm| vm.pid), None);
                return why.clone();
            }
            assert!(Instant::now() < end, "it is never looked at: {vm:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(
        why.contains("Ended") || why.contains("has not greeted") || why.contains("has ended"),
        "{why}"
    );
}

#[test]
fn addresses_that_were_bound_before_hinder_nobody_and_a_name_that_is_no_text_hides_nobody() {
    let Some(_turn) = take_turn() else { return };
    let squatter = attack("squat", &["500"]);
    let saw = until_it_saw(&squatter, "addresses");
    assert!(saw.iter().any(|line| line.contains("it has bound 1001 addresses")), "{saw:#?}");
    let mut group = AttackedGroup::new();
    let mut both = two_that_share(&mut group);
    both.iter_mut().for_each(|vm| vm.expect("check 0 1"));
    end(group, both);
}

/// Another Overbook, simulated by this process, has merged pages and left them behind.
#[test]
fn a_release_asks_no_qemu_of_another_overbook_and_none_that_only_looks_like_one() {
    let Some(_turn) = take_turn() else { return };
    let mut group = AttackedGroup::new();
    let both = two_that_share(&mut group);
    drop(group);
    let own = tempfile::tempdir().unwrap();
    let state = own.path().join("state");
    std::fs::create_dir(&state).unwrap();
    std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o700)).unwrap();
    let evil = given_away(own.path(), "evil");
    let mute = evil.join("web-1.sock");
    let attacker = attack("mute", &[mute.to_str().unwrap(), "100"]);
    until_it_saw(&attacker, "it maps 100 files");
    let config = own.path().join("overbook.toml");
    let host = format!(
        "[host]\nattach = \"off\"\ngrace_s = 0\nstate = {state:?}\nqmp = [\"{}/*.sock\"]\n[api]\nsocket = \"{}/api.sock\"\n",
        evil.display(),
        own.path().display()
    );
    std::fs::write(&config, host).unwrap();
    let release = program().arg("--config").arg(&config).arg("release").output().unwrap();
    assert_eq!(text(&release), "nothing to release\n");
    assert!(release.status.success());
    for vm in &both {
        let pools = pool_maps::pools_of(vm.pid()).unwrap();
        assert_eq!(pools.len(), 1, "it shares as before: {pools:?}");
    }
}
