//! A guest changes hosts, with two real QEMUs, two daemons that die at any moment, and a network
//! that breaks. It always runs on exactly one host, and loses no byte. The migration uses TLS,
//! and no other connection gets into a waiting QEMU.
//!
//! A daemon's written steps survive its death; everything else is lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use drivers::migration::{
    Limits, Secured, Turn, source_turn, source_turn_without, target_turn, target_turn_without,
};
use drivers::qmp::{Command, QmpClient};
use lab::lab::{Lab, Provisions};
use lab::machine::{self, Files, MachineSpec};
use model::{Bytes, Millis};
use overbook::pki::{self, CertificateRequest, Purpose};
use overbook_tests::{provisions, take_turn};
use policy::handover::{IntentView, SourceQemu, SourceStep, TargetQemu, TargetStep};
use serde_json::{Value, json};
use sys::process::Identity;
use tokio::runtime::Runtime;
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(120);
/// Migrating a guest of some 100 MiB takes a second or two. A guest that verifies writes faster
/// than this bandwidth.
const LIMITS: Limits =
    Limits { bandwidth: Bytes::mib(64), downtime: Millis(300), precopy: Millis::secs(4) };
const ROUNDS: u64 = 10;
/// The address on which targets listen.
const ANY_PORT: &str = "tcp:127.0.0.1:0";

/// A network between two hosts that can be cut.
struct Cable {
    listener: TcpListener,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    fn new() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        Self { listener, ends: Arc::default() }
    }

    /// Forwards connections to `there`; returns the address to use instead.
    fn to(&self, there: &str) -> String {
        let there: SocketAddr = there.strip_prefix("tcp:").unwrap().parse().unwrap();
        let listener = self.listener.try_clone().unwrap();
        let ends = self.ends.clone();
        thread::spawn(move || {
            while let Ok((here, _)) = listener.accept() {
                let Ok(there) = TcpStream::connect(there) else { continue };
                let pairs = [(&here, &there), (&there, &here)];
                for (from, to) in pairs {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                ends.lock().unwrap().extend([here, there]);
            }
        });
        format!("tcp:{}", self.listener.local_addr().unwrap())
    }

    fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

/// Certificates of a separate authority, and the directory that shows them to QEMUs.
struct Trust {
    authority: PathBuf,
    shown: PathBuf,
}

impl Trust {
    fn new(dir: &Path) -> Self {
        let authority = dir.join("pki");
        pki::init(&authority).unwrap();
        let trust = Self { authority, shown: dir.join("shown") };
        for host in ["a", "b"] {
            trust.issue(host);
        }
        trust
    }

    fn issue(&self, host: &str) -> PathBuf {
        let valid = Duration::from_secs(3600);
        let order = CertificateRequest { name: host, addresses: &[], valid, renews: false };
        pki::host(&self.authority, order).unwrap()
    }

    /// The certificates with which `host` migrates, to or from `peer`.
    fn of(&self, host: &str, peer: &str) -> Secured {
        let files = self.authority.join(host).join("migration");
        let peer_name = Purpose::Migration.common_name(peer);
        Secured { files, shown: self.shown.clone(), peer_name }
    }
}

/// A QEMU; a daemon that dies forgets the connection.
struct Qemu {
    files: Files,
    process: Option<Identity>,
    client: Option<QmpClient>,
}

impl Qemu {
    fn of(files: Files, process: Option<Identity>) -> Self {
        Self { files, process, client: None }
    }

    fn is_alive(&self) -> bool {
        self.process.is_some_and(|process| process.is_alive())
    }

    /// `None`: QEMU has ended, was not started yet, or does not answer yet.
    async fn client(&mut self) -> Option<&mut QmpClient> {
        if !self.is_alive() {
            self.client = None;
        } else if self.client.is_none() {
            self.client = QmpClient::connect(&self.files.daemon_socket).await.ok();
        }
        self.client.as_mut()
    }

    async fn runs(&mut self) -> bool {
        let Some(client) = self.client().await else { return false };
        match client.execute(Command::new("query-status")).await {
            Ok(status) => status["running"] == true,
            Err(_) => {
                self.client = None;
                false
            }
        }
    }
}

/// The written steps of both hosts.
#[derive(Default)]
struct Steps {
    source: Option<SourceStep>,
    target: Option<TargetStep>,
}

/// Faults during one round.
struct Trouble {
    /// Each turn of a daemon ends with its death with a chance of one in this number.
    deadly: u32,
    /// Time from the first bytes until the network breaks.
    cut_after: Option<Duration>,
    /// Time until the intent is withdrawn.
    late_after: Option<Duration>,
}

/// A guest that moves from one QEMU to the next.
struct Journey<'a> {
    lab: &'a mut Lab,
    with: &'a Provisions,
    trust: &'a Trust,
    spec: MachineSpec,
    here: Qemu,
    there: Qemu,
    generation: u64,
    random: fastrand::Rng,
}

impl Journey<'_> {
    /// Runs one intent until both hosts have ended it; returns whether the guest has moved.
    async fn go(&mut self, trouble: &Trouble) -> bool {
        let (mut steps, cable, begun) = (Steps::default(), Cable::new(), Instant::now());
        let (mut is_cut, mut moving_at) = (false, None);
        loop {
            let why = "nobody ends it";
            assert!(begun.elapsed() < LIMIT, "{why}: {:?}, {:?}", steps.source, steps.target);
            let is_late = trouble.late_after.is_some_and(|after| begun.elapsed() > after);
            if steps.source == Some(SourceStep::Moving) {
                moving_at.get_or_insert_with(Instant::now);
            }
            let due = |at: Instant| trouble.cut_after.is_some_and(|after| at.elapsed() > after);
            if !is_cut && moving_at.is_some_and(due) {
                cable.cut();
                is_cut = true;
            }
            let target_over = self.target(&mut steps, is_late, trouble.deadly, &cable).await;
            let source_over = self.source(&mut steps, is_late, trouble.deadly).await;
            // The source is checked first: it no longer runs once the target may.
            let both = self.here.runs().await && self.there.runs().await;
            assert!(!both, "it runs twice: {:?}, {:?}", steps.source, steps.target);
            if target_over && source_over {
                return steps.source == Some(SourceStep::Left);
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// A turn of the source's daemon; returns whether it is done with this intent.
    async fn source(&mut self, steps: &mut Steps, is_late: bool, deadly: u32) -> bool {
        let seen = steps.seen(is_late);
        let is_alive = self.here.is_alive();
        let client = self.here.client().await;
        if is_alive && client.is_none() {
            return false;
        }
        let dies = self.random.u32(0..deadly) == 0;
        let turn = match client {
            Some(client) => {
                let secured = Some(&self.trust.of("a", "b"));
                source_turn(client, self.generation, seen, LIMITS, secured).await
            }
            None => Ok(source_turn_without(&SourceQemu::Gone, seen)),
        };
        match turn {
            Ok(Turn::Over) => return true,
            Ok(Turn::Write(step)) if !dies => steps.source = Some(step),
            Ok(_) if !dies => {}
            Ok(_) | Err(_) => self.here.client = None,
        }
        false
    }

    /// A turn of the target's daemon; returns whether it is done with this intent.
    async fn target(
        &mut self,
        steps: &mut Steps,
        is_late: bool,
        deadly: u32,
        cable: &Cable,
    ) -> bool {
        let seen = steps.seen(is_late);
        let (is_launched, is_alive) = (self.there.process.is_some(), self.there.is_alive());
        let client = self.there.client().await;
        if is_alive && client.is_none() {
            return false;
        }
        let dies = self.random.u32(0..deadly) == 0;
        let is_ours = seen.target.is_some();
        let without = |qemu| Ok(target_turn_without(&qemu, seen));
        let turn = match client {
            Some(client) => {
                let secured = Some(&self.trust.of("b", "a"));
                target_turn(client, is_ours, seen, ANY_PORT, secured).await
            }
            None if is_launched => without(TargetQemu::Gone("its QEMU has ended".to_owned())),
            None => without(TargetQemu::Absent),
        };
        match turn {
            Ok(Turn::Over) => return true,
            Ok(Turn::Launch) => self.launch(),
            Ok(Turn::Write(TargetStep::Prepared { address })) if !dies => {
                steps.target = Some(TargetStep::Prepared { address: cable.to(&address) });
            }
            Ok(Turn::Write(step)) if !dies => steps.target = Some(step),
            Ok(_) if !dies => {}
            Ok(_) | Err(_) => self.there.client = None,
        }
        false
    }

    fn launch(&mut self) {
        let name = format!("host-{}", self.generation);
        let started = launch(self.lab, self.with, &self.spec, &self.there.files, &name);
        self.there.process = Some(started);
    }

    /// Checks the guest's next output, wherever it runs now.
    async fn works_on(&self) {
        let file = &self.here.files.metrics;
        let lines = || fs::read_to_string(file).unwrap_or_default().lines().count();
        let (before, begun) = (lines(), Instant::now());
        while lines() < before + 2 {
            assert!(begun.elapsed() < LIMIT, "the guest does nothing any more");
            sleep(Duration::from_millis(50)).await;
        }
        for line in fs::read_to_string(file).unwrap().lines() {
            // The first line may have begun on the other host.
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            assert!(line["bad_bytes"].as_u64().unwrap_or(0) == 0, "{line}");
        }
    }
}

/// Starts QEMU as a manager on the target does.
fn launch(
    lab: &mut Lab,
    with: &Provisions,
    spec: &MachineSpec,
    files: &Files,
    name: &str,
) -> Identity {
    let Provisions { qemu, image, accel } = with;
    let command = machine::command(spec, files, qemu, image, *accel);
    lab.spawn(name, command.args(["-incoming", "defer", "-S"])).unwrap()
}

impl Steps {
    fn seen(&self, is_late: bool) -> IntentView<'_> {
        let (source, target) = (self.source.as_ref(), self.target.as_ref());
        IntentView { source, target, is_late, ..IntentView::default() }
    }
}

#[test]
fn a_guest_that_changes_hosts_runs_on_one_of_them_whatever_happens() {
    let Some(_turn) = take_turn() else { return };
    let Some(with) = provisions() else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let memory = Bytes::mib(160);
    let spec = MachineSpec::new("guest", "shop", memory, memory, "verify --mb 64");
    let mut lab = Lab::start(&dir.path().join("lab"), &with, std::slice::from_ref(&spec)).unwrap();
    let own = lab.machine("guest").unwrap();
    own.hang_up();
    let here = Qemu::of(own.files().clone(), Some(own.process()));
    let files = |lab: &Lab, generation: u64| Files::new(lab.dir(), &format!("guest-{generation}"));
    let there = Qemu::of(files(&lab, 1), None);
    let trust = Trust::new(dir.path());
    let mut journey = Journey {
        lab: &mut lab,
        with: &with,
        trust: &trust,
        spec,
        here,
        there,
        generation: 1,
        random: fastrand::Rng::with_seed(31),
    };
    let (mut moved, mut stayed) = (0, 0);
    Runtime::new().unwrap().block_on(async {
        for round in 0..ROUNDS {
            let after = |random: &mut fastrand::Rng| Duration::from_millis(random.u64(0..2500));
            // The first round is without faults, and must succeed.
            let random = &mut journey.random;
            let trouble = Trouble {
                deadly: if round == 0 { u32::MAX } else { 6 },
                cut_after: (round % 3 == 1).then(|| after(random)),
                late_after: (round % 3 == 2).then(|| after(random)),
            };
            let has_moved = journey.go(&trouble).await;
            let next = Qemu::of(files(journey.lab, journey.generation + 1), None);
            let there = std::mem::replace(&mut journey.there, next);
            if has_moved {
                journey.here = there;
                moved += 1;
            } else {
                stayed += 1;
            }
            assert!(journey.here.runs().await, "it runs nowhere after round {round}");
            journey.works_on().await;
            journey.generation += 1;
            assert!(round > 0 || moved == 1, "without trouble it does not move");
        }
    });
    assert!(stayed > 0, "there was no trouble at all");
    drop(journey);
    lab.stop().unwrap();
}

/// Sends the guest to `address`, as the daemon of host `a` does; returns the outcome.
async fn sends(
    qemu: &mut Qemu,
    generation: u64,
    address: &str,
    with: &Secured,
) -> Result<(), String> {
    let mut steps = Steps {
        source: Some(SourceStep::Moving),
        target: Some(TargetStep::Prepared { address: address.to_owned() }),
    };
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LIMIT, "QEMU does not say how it has ended");
        let Some(client) = qemu.client().await else { continue };
        match source_turn(client, generation, steps.seen(false), LIMITS, Some(with)).await {
            Ok(Turn::Write(SourceStep::Stayed { why })) => return Err(why),
            Ok(Turn::Write(SourceStep::Switched)) => return Ok(()),
            Ok(Turn::Write(step)) => steps.source = Some(step),
            Ok(Turn::Did | Turn::Waits) => sleep(Duration::from_millis(20)).await,
            other => panic!("{other:?}"),
        }
    }
}

/// An attacker with its own QEMU, which presents a certificate without checking the peer's.
/// Returns the error that the attacker saw.
async fn attacks(qemu: &mut Qemu, address: &str, files: Option<&Path>) -> String {
    let client = qemu.client().await.unwrap();
    let id = "attack";
    let mut creds = "";
    if let Some(files) = files {
        let object = json!({
            "qom-type": "tls-creds-x509", "id": id, "dir": files, "endpoint": "client",
            "verify-peer": true, "sanity-check": false,
        });
        client.execute(Command::with("object-add", object)).await.unwrap();
        creds = id;
    }
    // The target's name, so that its certificate passes the check.
    let parameters = json!({"tls-creds": creds, "tls-hostname": "migration.b"});
    client.execute(Command::with("migrate-set-parameters", parameters)).await.unwrap();
    let uri = json!({"uri": address});
    client.execute(Command::with("migrate", uri)).await.unwrap();
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LIMIT, "QEMU does not say how it has ended");
        let answer = client.execute(Command::new("query-migrate")).await.unwrap();
        match answer["status"].as_str().unwrap_or_default() {
            "failed" => {
                let gone = json!({"id": id});
                let _ = client.execute(Command::with("object-del", gone)).await;
                return answer["error-desc"].as_str().unwrap_or("failed").to_owned();
            }
            status => assert_ne!(status, "completed", "the attacker's guest is let in"),
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a QEMU that was started to receive reports its address.
async fn waits(qemu: &mut Qemu, secured: &Secured) -> String {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LIMIT, "it does not wait");
        if let Some(client) = qemu.client().await {
            match target_turn(client, false, IntentView::default(), ANY_PORT, Some(secured)).await {
                Ok(Turn::Write(TargetStep::Prepared { address })) => return address,
                Ok(Turn::Did | Turn::Waits) => {}
                // The QEMU has just been started.
                Err(_) => qemu.client = None,
                other => panic!("{other:?}"),
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// The beginning of a guest, as QEMU sends it without TLS.
const PLAIN: &[u8] = b"QEVM\0\0\0\x03\x07";

/// Sends these bytes; returns the answer until the other side closes the connection.
fn says(address: &str, bytes: &[u8]) -> Vec<u8> {
    let address: SocketAddr = address.strip_prefix("tcp:").unwrap().parse().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // The other side may already have closed the connection.
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    let mut heard = Vec::new();
    match stream.read_to_end(&mut heard) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("it does not hang up"),
        _ => heard,
    }
}

#[test]
fn no_attacker_gets_in_where_a_qemu_waits_for_a_guest() {
    let Some(_turn) = take_turn() else { return };
    let Some(with) = provisions() else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let (trust, foreign) =
        (Trust::new(&dir.path().join("own")), Trust::new(&dir.path().join("foreign")));
    let memory = Bytes::mib(160);
    let spec = MachineSpec::new("guest", "shop", memory, memory, "verify --mb 64");
    let mut lab = Lab::start(&dir.path().join("lab"), &with, std::slice::from_ref(&spec)).unwrap();
    let own = lab.machine("guest").unwrap();
    own.hang_up();
    let mut source = Qemu::of(own.files().clone(), Some(own.process()));
    let [mut wrong, mut target] = ["1", "2"].map(|host| {
        let files = Files::new(lab.dir(), &format!("guest-{host}"));
        let process = launch(&mut lab, &with, &spec, &files, &format!("host-{host}"));
        Qemu::of(files, Some(process))
    });
    // A certificate that was stolen from host `a` and is revoked.
    trust.issue("thief");
    let stolen = trust.authority.join("thief/migration");
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::copy(trust.authority.join("a/migration").join(file), stolen.join(file)).unwrap();
    }
    let order = CertificateRequest {
        name: "a",
        addresses: &[],
        valid: Duration::from_secs(3600),
        renews: true,
    };
    pki::host(&trust.authority, order).unwrap();
    pki::revoke(&trust.authority, &[stolen.join("client-cert.pem")]).unwrap();
    // A certificate of the right host for another purpose.
    let disks = trust.issue("disks").join("migration");
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::copy(trust.authority.join("a/disks").join(file), disks.join(file)).unwrap();
    }
    trust.issue("c");
    // The authority's own certificate is public.
    let strange = foreign.authority.join("a/migration");
    fs::copy(trust.authority.join("ca-cert.pem"), strange.join("ca-cert.pem")).unwrap();
    let files = |host: &str| trust.authority.join(host).join("migration");
    Runtime::new().unwrap().block_on(async {
        // Host `b` answers at the address of `c`: it must not get the guest.
        let address = waits(&mut wrong, &trust.of("b", "a")).await;
        let saw = sends(&mut source, 101, &address, &trust.of("a", "c")).await;
        eprintln!("saw: host b instead of c: {saw:?}");
        let why = saw.expect_err("a guest goes to another host than it is to");
        assert!(why.contains("does not match the hostname migration.c"), "{why}");

        let address = waits(&mut target, &trust.of("b", "a")).await;
        let heard = says(&address, PLAIN);
        eprintln!("saw: without TLS: {} bytes: {heard:02x?}", heard.len());
        // 0x15: a TLS alert; QEMU may also close the connection without one.
        assert!(heard.is_empty() || heard[0] == 0x15, "it answers without TLS: {heard:02x?}");
        let attackers = [
            ("a guest without TLS", None),
            ("a certificate of another authority", Some(strange)),
            ("another host of the pool", Some(files("c"))),
            ("the right host's certificate for another purpose", Some(files("disks"))),
            ("the right host's certificate, revoked", Some(files("thief"))),
        ];
        for (who, files) in attackers {
            let saw = attacks(&mut source, &address, files.as_deref()).await;
            eprintln!("saw: {who}: {saw}");
            let client = target.client().await.unwrap();
            let status = client.execute(Command::new("query-status")).await.unwrap();
            assert_eq!(status["status"], "inmigrate", "{who} has reached the target: {saw}");
            assert!(source.runs().await, "{who}: the guest that was to be sent is lost");
        }
        // The attacks have not harmed the target: the right host still gets in.
        sends(&mut source, 102, &address, &trust.of("a", "b")).await.unwrap();
        let client = target.client().await.unwrap();
        let status = client.execute(Command::new("query-status")).await.unwrap();
        assert_eq!(status["status"], "paused", "the guest did not arrive");
        assert_eq!(fs::read_dir(&trust.shown).unwrap().count(), 0, "certificates lie about");
    });
    drop((source, wrong, target));
    lab.stop().unwrap();
}
