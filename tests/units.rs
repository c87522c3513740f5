//! The installed units: their exposure as rated by systemd, and their programs within the units'
//! limits, on real guests.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod systemd;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::records;
use cluster::store::{Change, Store, WriterLease};
use lab::etcd::Members;
use lab::zram::Zram;
use lab::{MachineSpec, fleet};
use model::cluster::Intent;
use model::{Bytes, DiskReading, HostName, Mode};
use overbook::pki::{self, CertificateRequest};
use overbook::{config_files, pool};
use overbook_tests::{MAX, Requirement, Stage, assert_unshared, requires, unpacked};
use sys::process::{Identity, children_of};
use systemd::{Systemd, packaging};
use tokio::runtime::Runtime;

/// Maximum exposure that `systemd-analyze security` may find in each unit, of 10.
const MOST: f64 = 2.0;
/// Maximum exposure with everything that an operator can add to the daemon's unit.
const MOST_WITH_ALL: f64 = 2.7;
const VMS: [&str; 2] = ["one", "two"];
const ENOUGH: Bytes = Bytes::mib(12);
/// The kernel's setting that the daemon may change.
const KSM: &str = "/sys/kernel/mm/ksm";
const LIMIT: Duration = Duration::from_secs(60);
const A_DAY: Duration = Duration::from_secs(86_400);

/// The files in `packaging()` with this extension, sorted.
fn files(ending: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(packaging()).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        all.filter(|path| path.extension().is_some_and(|found| found == ending)).collect();
    found.sort();
    found
}

/// systemd's rating of a unit's exposure, of 10.
fn exposure(mut analyze: Command, unit: &Path) -> f64 {
    let output = analyze.args(["security", "--offline=true"]).arg(unit).output().unwrap();
    let said = overbook_tests::text(&output);
    let score = said.lines().find_map(|line| {
        let (_, score) = line.split_once("Overall exposure level for ")?;
        score.split_once(": ")?.1.split_whitespace().next()?.parse().ok()
    });
    score.unwrap_or_else(|| panic!("{}: no score in:\n{said}", unit.display()))
}

#[test]
fn systemd_finds_no_unit_more_exposed_than_is_said() {
    let Some(programs) = systemd::programs() else { return };
    let units = files("service");
    assert_eq!(units.len(), 5, "{units:?}");
    for unit in units {
        let score = exposure(programs.command("systemd-analyze"), &unit);
        eprintln!("{}: {score}", unit.file_name().unwrap().display());
        assert!(score <= MOST, "{}: {score}", unit.display());
    }

    // With both files that an operator may add.
    let dir = tempfile::tempdir().unwrap();
    let name = "overbook.service";
    let mut whole = fs::read_to_string(packaging().join(name)).unwrap();
    let (added, rest) = (files("conf"), whole.find("[Install]").unwrap());
    assert_eq!(added.len(), 2, "{added:?}");
    let rest = whole.split_off(rest);
    for file in added {
        whole += &fs::read_to_string(file).unwrap();
    }
    let unit = dir.path().join(name);
    fs::write(&unit, whole + &rest).unwrap();
    let score = exposure(programs.command("systemd-analyze"), &unit);
    eprintln!("{name} with frames.conf and network.conf: {score}");
    assert!(score > MOST && score <= MOST_WITH_ALL, "{score}");
}

/// Without scripts, a package's units are neither started, nor stopped, nor purged.
#[test]
fn each_package_with_units_has_scripts_for_them() {
    let all = cargo_metadata::MetadataCommand::new()
        .no_deps()
        .other_options(["--offline".to_owned()])
        .exec()
        .unwrap();
    let debs = all.packages.iter().filter_map(|package| package.metadata.get("deb"));
    let with_units: Vec<_> = debs.filter(|deb| deb["systemd-units"].is_array()).collect();
    assert_eq!(with_units.len(), 2, "{with_units:?}");
    for deb in with_units {
        assert!(deb["maintainer-scripts"].is_string(), "{}: {deb}", deb["name"]);
    }
}

fn bytes(stage: &Stage, vm: &str, of: &str, field: &str) -> Bytes {
    Bytes(stage.vm(vm)[of][field].as_u64().unwrap_or(0))
}

fn until_all(stage: &Stage, what: &str, of: &str, field: &str) {
    stage.until(what, |stage| VMS.iter().all(|vm| bytes(stage, vm, of, field) > ENOUGH));
}

/// A field of `/proc/PID/status`.
fn status(pid: u32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {field} in {text}")).trim().to_owned()
}

fn capabilities(pid: u32) -> u32 {
    u64::from_str_radix(&status(pid, "CapEff"), 16).unwrap().count_ones()
}

#[test]
fn the_daemon_does_all_its_work_in_what_its_unit_leaves_it() {
    let Some(programs) = systemd::programs() else { return };
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(256))) else { return };
    let guest = |name: &str| MachineSpec {
        shim: true,
        ..MachineSpec::new(name, "shop", MAX, MAX, "verify --mb 100 --breathe 15 --rate 20")
    };
    // Not below /tmp, because the unit has its own /tmp.
    let Some(mut stage) = Stage::start_in(Path::new("/run"), Mode::Enforce, &VMS.map(guest)) else {
        return;
    };
    fleet::wait_until_filled(&stage.lab, 100).unwrap();
    stage.configure(&[("dedup = \"off\"", "dedup = 200")]);
    stage.daemon.kill(&mut stage.lab).unwrap();

    let systemd = Systemd::start(&programs, stage.lab.dir(), &stage.config());
    let unit = "overbook.service";
    systemd.install(unit);
    systemd.must(&["start", unit]);
    let (daemon, capable) = (systemd.main_pid(unit), capabilities(systemd.main_pid(unit)));
    let names = fs::read_to_string(packaging().join(unit)).unwrap();
    let names = names.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    assert_eq!(capable as usize, names.split_whitespace().count(), "{names}");
    assert_eq!((&*status(daemon, "Seccomp"), &*status(daemon, "NoNewPrivs")), ("2", "1"));
    // The process has given up rights that the unit grants: it has one more filter.
    let is_api = |child: &Identity| {
        let words = fs::read_to_string(format!("/proc/{}/cmdline", child.pid)).unwrap_or_default();
        words.split('\0').any(|word| word == "api")
    };
    let children = children_of(daemon).unwrap();
    let api = children.into_iter().find(is_api).expect("a process answers the API").pid;
    let filters = |pid| status(pid, "Seccomp_filters").parse::<u32>().unwrap();
    assert_eq!((capabilities(api), filters(api)), (0, filters(daemon) + 1));

    until_all(&stage, "both share pages", "dedup", "saved_bytes");
    let worker = stage.worker("shop").unwrap().pid;
    assert_eq!(capabilities(worker), capable);
    let cgroup = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert_ne!(cgroup(worker), cgroup(daemon), "its CPU time is counted apart");
    if Path::new(KSM).exists() {
        let mounts = fs::read_to_string(format!("/proc/{daemon}/mountinfo")).unwrap();
        assert!(mounts.contains(&format!(" {KSM} rw")), "KSM could not be driven:\n{mounts}");
    }

    // A mechanism that needs one more capability reports that, and works with it.
    stage.configure(&[
        ("free_pages = \"off\"", "free_pages = \"lazy\""),
        ("[host]", "[host]\nreserve = \"900GiB\""),
    ]);
    systemd.must(&["reload", unit]);
    stage.until("it is said what freed memory lacks", |stage| {
        let why = stage.vm(VMS[0])["unsupported"]["free_pages"].to_string();
        why.contains("CAP_SYS_ADMIN")
    });
    systemd.add("frames.conf", unit);
    systemd.must(&["restart", unit]);
    assert_eq!(capabilities(systemd.main_pid(unit)), capable + 1);
    until_all(&stage, "what both have freed is taken", "free_pages", "taken_bytes_total");
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);

    // The daemon undoes everything as it stops, within the same unit.
    systemd.must(&["stop", unit]);
    assert!(stage.undo().is_empty(), "{:?}", stage.undo());
    // On a busy machine a shim may be paused at that time, and its VM shares for a while longer.
    stage.until("nothing is shared", |stage| stage.overbook(&["release"]).status.success());
    for vm in VMS {
        assert_unshared(stage.guest(vm).process().pid);
    }
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop((systemd, stage));
    drop(zram);
}

fn until(systemd: &Systemd<'_>, what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "not in time: {what}: {}", systemd.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A disk that cannot be served, or a repository that cannot lend, is tried again ever less often.
#[test]
fn a_service_that_cannot_start_is_not_started_again_without_a_pause() {
    for unit in ["overbook-disks@.service", "overbook-repository.service"] {
        let text = fs::read_to_string(packaging().join(unit)).unwrap();
        let has = |key: &str| text.lines().any(|line| line.starts_with(key));
        assert!(has("RestartSteps=") && has("RestartMaxDelaySec="), "{unit}:\n{text}");
    }
}

#[test]
fn a_stop_releases_and_a_restart_does_not() {
    let Some(programs) = systemd::programs() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/run").unwrap();
    let (at, ask) = (dir.path().display(), dir.path().join("ask"));
    fs::create_dir(dir.path().join("log")).unwrap();
    let config = dir.path().join("overbook.toml");
    let text = format!(
        "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/overbook.sock\"\n"
    );
    fs::write(&config, text).unwrap();
    let (systemd, unit) = (Systemd::start(&programs, dir.path(), &config), "overbook.service");
    systemd.install(unit);

    // This systemd is a user manager, so `systemctl` needs to be told.
    fs::create_dir(&ask).unwrap();
    let script = format!("#!/bin/sh\nexec {} \"$@\"\n", systemd.systemctl_in_words());
    fs::write(ask.join("systemctl"), script).unwrap();
    let run = fs::Permissions::from_mode(0o755);
    fs::set_permissions(ask.join("systemctl"), run).unwrap();
    let path = format!("Environment=PATH={}:/usr/bin:/bin", ask.display());
    systemd.tell(unit, &format!("[Service]\n{path}\nProtectHome=no\n"));

    systemd.must(&["start", unit]);
    let first = systemd.main_pid(unit);
    systemd.must(&["restart", unit]);
    let log = systemd.log();
    assert!(log.contains(&format!("{unit} is being restarted: every guest")), "{log}");
    assert!(!log.contains("nothing to release"), "{log}");
    assert_ne!(systemd.main_pid(unit), first);
    systemd.must(&["stop", unit]);
    assert!(systemd.log().contains("nothing to release"), "{}", systemd.log());
}

#[test]
fn a_repository_and_the_disks_of_a_group_work_in_what_their_units_leave_them() {
    let Some(programs) = systemd::programs() else { return };
    let Some(clients) = unpacked("nbd-clients", &["libnbd-bin", "qemu-utils"]) else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/run").unwrap();
    let (at, here) = (dir.path().display(), Ipv4Addr::LOCALHOST);
    fs::create_dir(dir.path().join("log")).unwrap();
    let authority = dir.path().join("pki");
    pki::init(&authority).unwrap();
    let addresses = [here.to_string()];
    let order =
        CertificateRequest { name: "host", addresses: &addresses, valid: A_DAY, renews: false };
    let tls = pki::host(&authority, order).unwrap();
    let tls = tls.display();
    let port = TcpListener::bind((here, 0)).unwrap().local_addr().unwrap().port();
    let config = dir.path().join("overbook.toml");
    let text = format!(
        "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/overbook.sock\"\n\
         [group.shop]\nvms = [\"one\"]\n[disk.swap]\nvm = \"one\"\nfile = \"{at}/file\"\n\
         size = \"32MiB\"\nrepositories = [\"{here}:{port}\"]\ntls = \"{tls}/disks\"\n"
    );
    fs::write(&config, text).unwrap();
    let systemd = Systemd::start(&programs, dir.path(), &config);

    // All memory that it lends is pinned.
    let repository = "overbook-repository.service";
    systemd.install(repository);
    let told = format!("MEMORY=64MiB LISTEN={here}:{port} TLS={tls}/repository");
    systemd.tell(repository, &format!("[Service]\nEnvironment={told}\n"));
    systemd.must(&["start", repository]);
    until(&systemd, "the repository has pinned its memory", || {
        let text = fs::read_to_string(format!("/proc/{}/status", systemd.main_pid(repository)));
        let text = text.unwrap_or_default();
        let locked = text.lines().find_map(|line| line.strip_prefix("VmLck:"));
        let kib = locked.and_then(|kib| kib.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kib.is_some_and(|kib| kib >= 64 << 10)
    });
    assert_eq!(capabilities(systemd.main_pid(repository)), 1, "CAP_IPC_LOCK");

    // The disks are served even without the network.
    let (unit, disks) = ("overbook-disks@.service", "overbook-disks@shop.service");
    systemd.install(unit);
    systemd.must(&["start", disks]);
    let reading = || -> Option<DiskReading> {
        let mut stream = UnixStream::connect(dir.path().join("disks/shop.status")).ok()?;
        stream.write_all(b"{}\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str::<disks::Status>(&text).ok()?.disks.remove("swap")
    };
    let connected = || reading().and_then(|disk| disk.repositories).map(|them| them.connected);
    let export = format!("nbd+unix:///swap?socket={at}/disks/swap.sock");
    let qemu_io = |commands: &[&str]| {
        let mut command = Command::new("timeout");
        command.arg("120").arg(clients.program("qemu-io"));
        command.env("LD_LIBRARY_PATH", clients.libraries()).args(["-f", "raw", &export]);
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let output = command.args(commands).output().unwrap();
        let said = overbook_tests::text(&output);
        assert!(output.status.success() && !said.contains("rror"), "{said}");
    };
    until(&systemd, "somebody answers for the disks", || reading().is_some());
    qemu_io(&["write -P 7 0 4M", "flush", "read -P 7 0 4M"]);
    assert_eq!(connected(), Some(0), "its unit lets nothing out");

    systemd.add("network.conf", unit);
    systemd.must(&["restart", disks]);
    until(&systemd, "the repository is connected", || connected() == Some(1));
    qemu_io(&["write -P 9 0 4M", "flush", "read -P 9 0 4M"]);
    systemd.must(&["stop", disks]);
    systemd.must(&["stop", repository]);
}

#[test]
fn a_controller_takes_its_seat_in_what_its_unit_leaves_it() {
    let Some(programs) = systemd::programs() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/run").unwrap();
    fs::create_dir(dir.path().join("log")).unwrap();
    let authority = dir.path().join("pki");
    pki::init(&authority).unwrap();
    let addresses = [Ipv4Addr::LOCALHOST.to_string()];
    let order =
        |name| CertificateRequest { name, addresses: &addresses, valid: A_DAY, renews: false };
    let etcd = pki::host(&authority, order("etcd")).unwrap().join("etcd");
    let Some(members) =
        requires(Requirement::Packages, Members::start_secured(1, dir.path(), &etcd))
    else {
        return;
    };
    let config = dir.path().join("overbook.toml");
    let tls = pki::controller(&authority, order("a")).unwrap();
    let endpoints = members.endpoints();
    let text = format!(
        "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [\"{at}/*.sock\"]\nstate = \"{at}/state\"\n\
         [pool]\nhost = \"a\"\netcd = {endpoints:?}\ntls = \"{tls}\"\n",
        at = dir.path().display(),
        tls = tls.display()
    );
    fs::write(&config, text).unwrap();
    let pool = config_files::load(&config).unwrap().pool.unwrap();
    let systemd = Systemd::start(&programs, dir.path(), &config);
    let unit = "overbook-controller.service";
    systemd.install(unit);
    systemd.must(&["start", unit]);
    let runtime = Runtime::new().unwrap();
    let is_taken = async || {
        let seats = pool::store(&pool).await.ok()?.read(records::CONTROLLER_SEAT).await.ok()?;
        Some(seats.values.contains_key(records::CONTROLLER_SEAT))
    };
    until(&systemd, "the controller has its seat", || runtime.block_on(is_taken()) == Some(true));
    assert_eq!(capabilities(systemd.main_pid(unit)), 0);
    systemd.must(&["stop", unit]);
}

/// Takes a lease that is free, or will be soon.
async fn sits(store: &dyn Store, key: &str, who: &str) -> WriterLease {
    let deadline = Instant::now() + LIMIT;
    loop {
        match store.sit(key, who).await {
            Ok(Some(seat)) => return seat,
            other => assert!(Instant::now() < deadline, "{key}: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn a_qemu_that_comes_is_a_unit_of_its_own_and_outlives_the_daemon() {
    let Some(programs) = systemd::programs() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/run").unwrap();
    fs::create_dir(dir.path().join("log")).unwrap();
    let authority = dir.path().join("pki");
    pki::init(&authority).unwrap();
    let addresses = [Ipv4Addr::LOCALHOST.to_string()];
    let order =
        |name| CertificateRequest { name, addresses: &addresses, valid: A_DAY, renews: false };
    let issue = |name| pki::host(&authority, order(name)).unwrap();
    let Some(members) = requires(
        Requirement::Packages,
        Members::start_secured(1, dir.path(), &issue("etcd").join("etcd")),
    ) else {
        return;
    };
    let (at, endpoints, own) = (dir.path().display(), members.endpoints(), issue("b"));
    let text = |host: &str, tls: &Path| {
        format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [\"{at}/qmp/*.sock\"]\nstate = \"{at}/state\"\n\
             [api]\nsocket = \"{at}/overbook.sock\"\n[group.web]\nvms = [\"web-*\"]\n\
             [pool]\nhost = \"{host}\"\netcd = {endpoints:?}\ntls = \"{}\"\n\
             movable = [\"web-*\"]\naddress = \"127.0.0.1\"\nincoming = \"{at}/start\"\n",
            tls.display()
        )
    };
    let config = dir.path().join("overbook.toml");
    fs::write(&config, text("b", &own)).unwrap();
    // The script takes the place of the command that starts a QEMU.
    let command = dir.path().join("start");
    let script =
        format!("#!/bin/sh\nsleep 1000 &\necho $! >{at}/pid.new\nmv {at}/pid.new {at}/pid\n");
    fs::write(&command, script).unwrap();
    fs::set_permissions(&command, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(dir.path().join("state")).unwrap();
    let systemd = Systemd::start(&programs, dir.path(), &config);
    let unit = "overbook.service";
    systemd.install(unit);
    systemd.add("network.conf", unit);
    systemd.must(&["start", unit]);

    let decides = dir.path().join("controller.toml");
    let certificate = pki::controller(&authority, order("controller")).unwrap();
    fs::write(&decides, text("controller", &certificate)).unwrap();
    let spec = config_files::load(&decides).unwrap().pool.unwrap();
    let pid = || fs::read_to_string(dir.path().join("pid")).ok()?.trim().parse::<u32>().ok();
    Runtime::new().unwrap().block_on(async {
        let store = pool::store(&spec).await.unwrap();
        let a = HostName::from("a");
        let there = sits(&*store, &records::host_seat(&a), "a").await;
        let seat = sits(&*store, records::CONTROLLER_SEAT, "controller").await;
        let (to, group) = ("b".into(), "web".into());
        let intent = Intent { generation: 1, from: a, to, group, is_withdrawn: false };
        let put = Change::put(records::intent(&"web-2".into()), &intent);
        store.write(&seat, vec![], vec![put]).await.unwrap();
        let deadline = Instant::now() + LIMIT;
        while pid().is_none() {
            store.stay(&there).await.unwrap();
            let said = fs::read_to_string(dir.path().join("incoming/web-2.log"));
            assert!(Instant::now() < deadline, "it is not started: {said:?}{}", systemd.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let (qemu, started) = (pid().unwrap(), "overbook-incoming-web-2-1.service");
    systemd.must(&["is-active", started]);
    let cgroup = sys::cgroup::of_process(qemu).unwrap().unwrap();
    assert!(cgroup.ends_with(Path::new("machine.slice").join(started)), "{cgroup:?}");
    // The QEMU has nothing of the daemon's sandbox.
    assert_eq!((&*status(qemu, "Seccomp"), &*status(qemu, "NoNewPrivs")), ("0", "0"));
    let score = fs::read_to_string(format!("/proc/{qemu}/oom_score_adj")).unwrap();
    assert!(!score.starts_with('-'), "it is spared as the daemon is: {score}");
    systemd.must(&["stop", unit]);
    systemd.must(&["is-active", started]);
    assert_eq!(pid(), Some(qemu));
}

/// A worker takes up to 4 MiB for each GiB of guests' RAM, and is charged with shared pages.
#[test]
fn the_daemons_memory_limit_grows_with_the_host() {
    let text = fs::read_to_string(packaging().join("overbook.service")).unwrap();
    let most = text.lines().find_map(|line| line.strip_prefix("MemoryMax=")).unwrap();
    assert!(most.ends_with('%'), "{most}");
}
