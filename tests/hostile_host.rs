//! A hostile host of a pool can falsify its own records, and no other host's. The test uses real
//! etcd with certificates from `overbook pki` and roles as in the guide. A hostile controller can
//! move only VMs that both hosts' own configurations name alike.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::records::{self, Records, Written};
use cluster::store::{Change, Store, StoreError, WriterLease};
use etcd_client::{
    Certificate, Client, ConnectOptions, Identity, Permission, PermissionType, TlsOptions,
};
use lab::etcd::Members;
use model::cluster::{HostReport, Intent};
use model::spec::PoolSpec;
use model::{Bytes, HostName, VmName};
use overbook::pki::{self, CertificateRequest};
use overbook::pool;
use overbook_tests::{Requirement, program, requires, take_turn};
use policy::handover::{SourceStep, TargetStep};
use sys::process::{Child, Identity as Process, Signal, Spawn};
use tokio::runtime::Runtime;
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(60);
const VALID: Duration = Duration::from_secs(3600);

/// A client with the certificates in `directory`.
async fn raw(endpoints: &[String], directory: &Path) -> Client {
    let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
    let own = Identity::from_pem(read("client-cert.pem"), read("client-key.pem"));
    let ca = Certificate::from_pem(read("ca-cert.pem"));
    let tls = TlsOptions::new().ca_certificate(ca).identity(own);
    let options = ConnectOptions::new().with_tls(tls).with_timeout(Duration::from_secs(3));
    Client::connect(endpoints, Some(options)).await.unwrap()
}

async fn store(endpoints: &[String], name: &str, directory: &Path) -> Arc<dyn Store> {
    let spec = PoolSpec {
        name: "test".to_owned(),
        host: name.into(),
        etcd: endpoints.to_owned(),
        tls: Some(directory.to_owned()),
        receive: None,
        movable: Vec::new(),
        bandwidth: PoolSpec::BANDWIDTH,
        downtime: PoolSpec::DOWNTIME,
        precopy: PoolSpec::PRECOPY,
        rest: PoolSpec::REST,
        certainty_percent: PoolSpec::CERTAINTY,
    };
    pool::store(&spec).await.unwrap()
}

/// Roles as in the guide.
async fn grant(root: &mut Client) {
    root.user_add("root", "-", None).await.unwrap();
    root.user_grant_role("root", "root").await.unwrap();
    for (user, own) in [("a", "hosts/a/"), ("b", "hosts/b/"), ("controller", "controller/")] {
        root.role_add(user).await.unwrap();
        let prefix = |kind, key: &str| Permission::new(kind, key).with_prefix();
        let own = prefix(PermissionType::Readwrite, &format!("/overbook/test/{own}"));
        root.role_grant_permission(user, own).await.unwrap();
        let all = prefix(PermissionType::Read, "/overbook/test/");
        root.role_grant_permission(user, all).await.unwrap();
        root.user_add(user, "-", None).await.unwrap();
        root.user_grant_role(user, user).await.unwrap();
    }
    root.auth_enable().await.unwrap();
}

async fn sits(store: &dyn Store, key: &str, who: &str) -> WriterLease {
    let end = Instant::now() + LIMIT;
    loop {
        match store.sit(key, who).await {
            Ok(Some(seat)) => return seat,
            other => assert!(Instant::now() < end, "{key}: {other:?}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn a_hostile_host_harms_nobody_but_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (own, foreign) = (dir.path().join("pki"), dir.path().join("foreign"));
    let here = ["127.0.0.1".to_owned()];
    for authority in [&own, &foreign] {
        pki::init(authority).unwrap();
    }
    let order = |name| CertificateRequest { name, addresses: &here, valid: VALID, renews: false };
    let issue = |name| pki::host(&own, order(name)).unwrap();
    let server = issue("etcd").join("etcd");
    let Some(members) =
        requires(Requirement::Packages, Members::start_secured(1, dir.path(), &server))
    else {
        return;
    };
    let endpoints = members.endpoints();
    Runtime::new().unwrap().block_on(async {
        let mut root = raw(&endpoints, &pki::controller(&own, order("root")).unwrap()).await;
        let end = Instant::now() + LIMIT;
        while let Err(why) = root.status().await {
            assert!(Instant::now() < end, "{why}");
            sleep(Duration::from_millis(50)).await;
        }
        root.role_add("root").await.unwrap();
        grant(&mut root).await;
        let (a, b): (HostName, HostName) = ("a".into(), "b".into());
        let hostile = store(&endpoints, "a", &issue("a")).await;
        let victim = store(&endpoints, "b", &issue("b")).await;
        let decides =
            store(&endpoints, "controller", &pki::controller(&own, order("controller")).unwrap())
                .await;

        // The host may write its own records.
        let mine = sits(&*hostile, &records::host_seat(&a), "a").await;
        let theirs = sits(&*victim, &records::host_seat(&b), "b").await;
        let report = HostReport { memory: Bytes::mib(1 << 20), ..HostReport::default() };
        let put = |key: String| vec![Change::put(key, &report)];
        hostile.write(&mine, vec![], put(records::report(&a))).await.unwrap();
        victim.write(&theirs, vec![], put(records::report(&b))).await.unwrap();

        // It may write nothing else: no intents, no other host's records, no other lease.
        let vm = "web-1".into();
        let intent = Intent {
            generation: 9,
            from: b.clone(),
            to: a.clone(),
            group: "web".into(),
            is_withdrawn: false,
        };
        let step =
            Written { generation: 9, step: SourceStep::Switched, incarnation: 0, is_over: false };
        let forged = [
            Change::put(records::intent(&vm), &intent),
            Change::put(records::report(&b), &report),
            Change::put(records::source(&b, &vm), &step),
            Change::Delete { key: records::host_seat(&b) },
        ];
        for change in forged {
            let done = hostile.write(&mine, vec![], vec![change.clone()]).await;
            assert!(matches!(done, Err(StoreError::Refused(_))), "{change:?}: {done:?}");
        }
        for key in [records::CONTROLLER_SEAT.to_owned(), records::host_seat(&b)] {
            let done = hostile.sit(&key, "a").await;
            assert!(matches!(done, Err(StoreError::Refused(_))), "{key}: {done:?}");
        }
        // Another host's key ends with its lease, so the host must not be able to revoke that.
        let mut attacker = raw(&endpoints, &own.join("a")).await;
        let key = format!("/overbook/test/{}", records::host_seat(&b));
        let lease = attacker.get(key, None).await.unwrap().kvs()[0].lease();
        let revoked = attacker.lease_revoke(lease).await;
        assert!(revoked.is_err(), "a lease of another host was revoked");
        victim.stay(&theirs).await.unwrap();

        // A host outside of the pool can read nothing.
        let stranger = pki::host(&foreign, order("a")).unwrap();
        std::fs::copy(own.join("ca-cert.pem"), stranger.join("ca-cert.pem")).unwrap();
        let stranger = store(&endpoints, "a", &stranger).await;
        let read = stranger.read("").await;
        assert!(read.is_err(), "a foreign certificate reads: {read:?}");

        // A host that was away writes a step of an older intent: it does not count for this one.
        let seat = sits(&*decides, records::CONTROLLER_SEAT, "controller").await;
        let intent = Intent { from: a.clone(), to: b.clone(), ..intent };
        let put = vec![Change::put(records::intent(&vm), &intent)];
        decides.write(&seat, vec![], put).await.unwrap();
        hostile.stay(&mine).await.unwrap();
        let old = Written { generation: 8, ..step };
        let put = vec![Change::put(records::source(&a, &vm), &old)];
        hostile.write(&mine, vec![], put).await.unwrap();
        let seen = Records::of(&victim.read("").await.unwrap());
        assert_eq!(seen.intents[&vm], intent);
        assert_eq!(seen.source_of(&vm, &intent), None);
    });
}

/// A real daemon of host `b`, in its own cgroup. A script takes the place of the command that
/// starts QEMUs.
struct Victim {
    dir: PathBuf,
    daemon: Child,
    cgroup: Option<PathBuf>,
}

impl Victim {
    fn start(dir: &Path, pool: &str) -> Self {
        fs::create_dir_all(dir.join("run/state")).unwrap();
        let (shown, config) = (dir.display(), dir.join("overbook.toml"));
        let text = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [\"{shown}/qmp/*.sock\"]\nstate = \"{shown}/run/state\"\n\
             [mode]\nballoon = \"observe\"\n[api]\nsocket = \"{shown}/run/overbook.sock\"\n\
             [group.web]\nvms = [\"web-*\"]\n[group.db]\nvms = [\"db-*\"]\n\
             [pool]\nname = \"test\"\nhost = \"b\"\nmovable = [\"web-*\"]\n{pool}\
             address = \"127.0.0.1\"\nincoming = \"{shown}/incoming\"\n"
        );
        fs::write(&config, text).unwrap();
        let script = format!(
            "#!/bin/sh\nsleep 1000 </dev/null >/dev/null 2>&1 &\n\
             echo $! >>{shown}/pids\necho \"$1\" >>{shown}/called\n"
        );
        fs::write(dir.join("incoming"), script).unwrap();
        fs::set_permissions(dir.join("incoming"), fs::Permissions::from_mode(0o755)).unwrap();
        let log = fs::File::create(dir.join("log")).unwrap();
        let spawn = Spawn::new(program().get_program()).arg("--config").arg(config).arg("daemon");
        let daemon = spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap();
        let own = sys::cgroup::of_process(std::process::id()).unwrap();
        let cgroup = own.map(|own| own.join(format!("overbook-test-{}", std::process::id())));
        let cgroup = cgroup.filter(|new| fs::create_dir(new).is_ok());
        if let Some(cgroup) = &cgroup {
            let pid = daemon.identity().pid.to_string();
            fs::write(cgroup.join("cgroup.procs"), pid).unwrap();
        }
        Self { dir: dir.to_owned(), daemon, cgroup }
    }

    fn lines(&self, file: &str) -> Vec<String> {
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Processes that the command has started.
    fn started(&self) -> Vec<Process> {
        let pids = self.lines("pids");
        pids.iter().filter_map(|pid| Process::of(pid.parse().unwrap())).collect()
    }

    /// The part of the records that `of` finds, once the daemon has written it.
    async fn says<T>(&self, store: &dyn Store, of: impl Fn(&Records) -> Option<T>) -> T {
        let end = Instant::now() + LIMIT;
        loop {
            let records = Records::of(&store.read("").await.unwrap());
            if let Some(said) = of(&records) {
                return said;
            }
            let log = self.lines("log").join("\n");
            assert!(Instant::now() < end, "it says nothing: {records:?}\n{log}");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.daemon.end(Duration::from_secs(5));
        for process in self.started() {
            let _ = process.signal(Signal::KILL);
            let _ = process.wait_for(Duration::from_secs(5));
        }
        self.cgroup.iter().for_each(|cgroup| drop(fs::remove_dir(cgroup)));
    }
}

#[test]
fn a_hostile_controller_brings_no_foreign_vm_and_a_qemu_that_came_is_no_part_of_the_daemon() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let own = dir.path().join("pki");
    pki::init(&own).unwrap();
    let here = ["127.0.0.1".to_owned()];
    let order = |name| CertificateRequest { name, addresses: &here, valid: VALID, renews: false };
    let issue = |name| pki::host(&own, order(name)).unwrap();
    let Some(members) = requires(
        Requirement::Packages,
        Members::start_secured(1, dir.path(), &issue("etcd").join("etcd")),
    ) else {
        return;
    };
    let endpoints = members.endpoints();
    let tls = issue("b");
    let pool = format!("etcd = {endpoints:?}\ntls = \"{}\"\n", tls.display());
    let mut victim = Victim::start(&dir.path().join("b"), &pool);
    Runtime::new().unwrap().block_on(async {
        // An attacker that has taken over both the controller and host `a`.
        let controller = pki::controller(&own, order("controller")).unwrap();
        let decides = store(&endpoints, "controller", &controller).await;
        let (a, b) = (HostName::from("a"), HostName::from("b"));
        let a_host = store(&endpoints, "a", &issue("a")).await;
        let seat = sits(&*decides, records::CONTROLLER_SEAT, "controller").await;
        let a_seat = sits(&*a_host, &records::host_seat(&a), "a").await;
        let intend = async |vm: &str, group: &str, from: &HostName, to: &HostName| {
            let (from, to) = (from.clone(), to.clone());
            let intent =
                Intent { generation: 1, from, to, group: group.into(), is_withdrawn: false };
            let put = Change::put(records::intent(&vm.into()), &intent);
            a_host.stay(&a_seat).await.unwrap();
            decides.stay(&seat).await.unwrap();
            decides.write(&seat, vec![], vec![put]).await.unwrap();
        };
        let foreign = [
            ("db-1", "db", "`movable` of this host's [pool] does not name it"),
            ("other-1", "web", "`movable` of this host's [pool] does not name it"),
            ("web-1", "db", "it is in group web of this host, and was sent as one of db"),
            ("web-/../1", "web", "its name has characters"),
        ];
        for (vm, group, words) in foreign {
            intend(vm, group, &a, &b).await;
            let key = (b.clone(), VmName::from(vm));
            let why = victim.says(&*decides, |records| match &records.targets.get(&key)?.step {
                TargetStep::Refused { why } => Some(why.clone()),
                step => panic!("{vm}: {step:?}"),
            });
            let why = why.await;
            eprintln!("saw: {vm} of {group} to b: {why}");
            assert!(why.contains(words), "{vm}: {why}");
            // The VM is not sent away either.
            intend(vm, group, &b, &a).await;
            let why = victim.says(&*decides, |records| match &records.sources.get(&key)?.step {
                SourceStep::Stayed { why } => Some(why.clone()),
                step => panic!("{vm}: {step:?}"),
            });
            let why = why.await;
            eprintln!("saw: {vm} of {group} from b: {why}");
            assert!(why.contains(words), "{vm}: {why}");
        }
        assert!(victim.lines("called").is_empty(), "{:?}", victim.lines("called"));
        intend("web-2", "web", &a, &b).await;
        let end = Instant::now() + LIMIT;
        while victim.lines("called").is_empty() {
            assert!(Instant::now() < end, "{}", victim.lines("log").join("\n"));
            a_host.stay(&a_seat).await.unwrap();
            decides.stay(&seat).await.unwrap();
            sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(victim.lines("called"), ["web-2"]);
    });
    let started = victim.started();
    let [qemu] = started.as_slice() else { panic!("{started:?}") };
    let cgroup = sys::cgroup::of_process(qemu.pid).unwrap();
    let of_daemon = victim.cgroup.as_ref().ok_or("none can be made");
    if let Some(of_daemon) = requires(Requirement::Cgroup, of_daemon) {
        let cgroup = cgroup.clone().unwrap();
        assert!(!cgroup.starts_with(of_daemon), "it is counted as the daemon's: {cgroup:?}");
        assert!(cgroup.ends_with("overbook-incoming-web-2-1"), "{cgroup:?}");
    }
    victim.daemon.end(LIMIT).unwrap();
    assert!(qemu.is_alive(), "it has ended with the daemon");
    drop(victim);
    cgroup.iter().for_each(|cgroup| drop(fs::remove_dir(cgroup)));
}
