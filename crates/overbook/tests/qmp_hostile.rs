//! The drivers against simulated QEMUs: each misbehaviour is visible and affects only its own VM.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod daemon_fixture;
#[path = "qmp_hostile/flood.rs"]
mod flood;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drivers::journal::{Journal, UndoRecord};
use drivers::{Drivers, Records, Released, Settings, Undo};
use model::ports::{Act, Sense};
use model::view::Mechanism;
use model::{Action, Bytes, Link, Migration, VmName, VmView};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

const PERIOD: Duration = Duration::from_millis(50);
const RAM: u64 = 256 << 20;
/// The argument that empties the balloon, however much RAM there is.
const WHOLE: &str = "\"value\":9223372036854775807";

/// A simulated QEMU. It answers like a healthy one, unless a test sets another answer.
#[derive(Clone)]
struct Fake {
    name: &'static str,
    answers: Arc<Mutex<BTreeMap<&'static str, Value>>>,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    fn new(name: &'static str) -> Self {
        Self { name, answers: Arc::default(), heard: Arc::default() }
    }

    /// Answers `command` (or the `qom-get` of a property) with `value`.
    fn answering(self, command: &'static str, value: Value) -> Self {
        self.answers.lock().unwrap().insert(command, value);
        self
    }

    /// Plugs memory devices, each of this type and this size in MiB. The balloon is empty.
    fn plug(&self, devices: &[(&str, u64)]) {
        let sum: u64 = devices.iter().map(|(_, mib)| mib << 20).sum();
        let dimms = devices.iter().filter(|(kind, _)| *kind == "dimm").map(|(_, mib)| mib << 20);
        let actual = RAM + dimms.sum::<u64>();
        let device = |(kind, mib): &(&str, u64)| json!({"type": kind, "data": {"size": mib << 20}});
        let devices: Vec<Value> = devices.iter().map(device).collect();
        let mut answers = self.answers.lock().unwrap();
        let summary = json!({"base-memory": RAM, "plugged-memory": sum});
        answers.insert("query-memory-size-summary", summary);
        answers.insert("query-memory-devices", json!(devices));
        answers.insert("query-balloon", json!({"actual": actual}));
    }

    fn answer(&self, message: &Value) -> Value {
        let command = message["execute"].as_str().unwrap();
        let property = message["arguments"]["property"].as_str().unwrap_or(command);
        let asked = if command == "qom-get" { property } else { command };
        if let Some(value) = self.answers.lock().unwrap().get(asked) {
            return value.clone();
        }
        match (command, property) {
            ("query-name", _) => json!({"name": self.name}),
            ("query-memdev", _) => json!([{"size": RAM}]),
            ("query-memory-size-summary", _) => json!({"base-memory": RAM, "plugged-memory": 0}),
            ("query-balloon", _) => json!({"actual": RAM}),
            ("query-status", _) => json!({"status": "running"}),
            ("qom-list", _) => json!([{"name": "b0", "type": "child<virtio-balloon-pci>"}]),
            (_, "guest-stats-polling-interval") => json!(0),
            (_, "guest-stats") => {
                let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
                json!({"stats": {"stat-free-memory": 4096}, "last-update": now})
            }
            (_, "free-page-reporting") => json!(true),
            _ => json!({}),
        }
    }

    async fn serve(self, path: PathBuf) {
        let listener = UnixListener::bind(path).unwrap();
        loop {
            let Ok((stream, _)) = listener.accept().await else { return };
            let mut stream = BufReader::new(stream);
            let mut text = "{\"QMP\": {}}\n".to_owned();
            loop {
                if stream.get_mut().write_all(text.as_bytes()).await.is_err() {
                    break;
                }
                let mut line = String::new();
                if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                    break;
                }
                self.heard.lock().unwrap().push(line.trim().to_owned());
                let message: Value = serde_json::from_str(&line).unwrap();
                text =
                    format!("{}\n", json!({"return": self.answer(&message), "id": message["id"]}));
            }
        }
    }

    fn heard(&self, what: &str) -> usize {
        self.heard.lock().unwrap().iter().filter(|line| line.contains(what)).count()
    }
}

/// Drivers of the sockets in `dir`, with the journal there.
fn watch(dir: &Path) -> Drivers {
    with_journal(dir, Journal::open(dir).unwrap())
}

fn with_journal(dir: &Path, journal: Journal) -> Drivers {
    let globs = vec![format!("{}/*.qmp", dir.display())];
    Drivers::new(Settings {
        globs,
        processes: false,
        groups: BTreeMap::new(),
        period: PERIOD,
        libvirt: "/none".into(),
        records: Records::new(journal),
    })
    .unwrap()
}

/// The records of the journal in `dir`.
fn on_record(dir: &Path) -> Vec<UndoRecord> {
    Journal::open(dir).unwrap().records().cloned().collect()
}

/// A VM that a daemon has changed before it ended, with the journal that it left.
async fn left_changed() -> (tempfile::TempDir, Fake) {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new("web");
    tokio::spawn(fake.clone().serve(dir.path().join("a.qmp")));
    let mut first = watch(dir.path());
    let view = until(&mut first, "web", is_up).await;
    first.act(&set("web", &view, 200));
    eventually("it is changed", || fake.heard(&format!("{}", 200 << 20)) == 1).await;
    (dir, fake)
}

/// Pauses all VMs and releases them.
async fn release(drivers: &Drivers) -> Vec<Released> {
    drivers.keep_hands_off();
    drivers.release(|_: &VmName| true, Undo::Now).await
}

/// Waits until `is_so` returns true for the VM.
async fn until(drivers: &mut Drivers, vm: &str, is_so: impl Fn(&VmView) -> bool) -> VmView {
    let mut last = None;
    for _ in 0..3000 {
        last = drivers.view().vms.remove(&VmName::from(vm));
        if let Some(view) = last.as_ref().filter(|view| is_so(view)) {
            return view.clone();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{vm} never came to look so: {last:#?}")
}

fn is_up(view: &VmView) -> bool {
    view.link == Link::Up
}

fn down_because(view: &VmView, text: &str) -> bool {
    matches!(&view.link, Link::Down { why, .. } if why.contains(text))
}

fn set(vm: &str, view: &VmView, mib: u64) -> Action {
    let (vm, target) = (VmName::from(vm), Bytes::mib(mib));
    Action::Resize { vm, incarnation: view.incarnation, target, by: model::Means::Balloon }
}

/// Waits until `holds` returns true.
async fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..3000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not in time: {what}");
}

/// Waits long enough for an unwanted event to happen.
async fn settle() {
    tokio::time::sleep(PERIOD * 6).await;
}

#[tokio::test]
async fn a_healthy_vm_is_seen_whole() {
    let dir = tempfile::tempdir().unwrap();
    tokio::spawn(Fake::new("web").serve(dir.path().join("x.qmp")));
    let mut drivers = watch(dir.path());
    let view = until(&mut drivers, "web", |v| is_up(v) && v.stats.is_some()).await;
    assert_eq!((view.ram, view.migration), (Bytes(RAM), Migration::None));
    assert_eq!(view.balloon.unwrap().value, Bytes(RAM));
    let limits: Vec<_> = view.limits.keys().collect();
    assert_eq!(limits, [&Mechanism::HostMemory], "this test is not QEMU, and only that is amiss");
    assert!(drivers.view().host.is_some());
}

#[tokio::test]
async fn ram_is_what_the_balloon_reaches_now_and_other_memory_devices_stand_apart() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new("web");
    tokio::spawn(fake.clone().serve(dir.path().join("x.qmp")));
    let mut drivers = watch(dir.path());
    until(&mut drivers, "web", is_up).await;
    fake.plug(&[("dimm", 128), ("nvdimm", 512), ("virtio-mem", 64)]);
    let has = |ram: u64, devices| {
        move |v: &VmView| (v.ram, v.devices) == (Bytes(RAM + (ram << 20)), Bytes::mib(devices))
    };
    until(&mut drivers, "web", has(128, 576)).await;
    fake.plug(&[("virtio-pmem", 32)]);
    until(&mut drivers, "web", has(0, 32)).await;
}

#[tokio::test]
async fn memory_that_was_plugged_after_the_decision_is_the_guests_and_a_release_leaves_it_there() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new("web");
    tokio::spawn(fake.clone().serve(dir.path().join("x.qmp")));
    let mut drivers = watch(dir.path());
    let view = until(&mut drivers, "web", is_up).await;
    // The decision takes 56 of 256 MiB.
    fake.plug(&[("dimm", 512)]);
    drivers.act(&set("web", &view, 200));
    let grown = format!("\"value\":{}", (200 + 512) << 20);
    eventually("it is asked for what that is now", || fake.heard(&grown) == 1).await;
    let outcomes = release(&drivers).await;
    let [(_, Ok(done))] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(done.words.contains("balloon back to 768 MiB"), "{done:?}");
    assert_eq!(fake.heard(WHOLE), 1);
}

#[tokio::test]
async fn a_release_leaves_a_grant_that_a_guest_without_swap_uses() {
    let dir = tempfile::tempdir().unwrap();
    let stats = |available: u64| {
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let stats = json!({
            "stat-total-memory": RAM,
            "stat-free-memory": available << 20,
            "stat-available-memory": available << 20,
            "stat-swap-out": 0,
        });
        json!({"stats": stats, "last-update": now})
    };
    // The VM had 128 MiB. It now has all of its RAM and can spare 24 MiB.
    let fake = Fake::new("web").answering("guest-stats", stats(50));
    let fake = fake.answering("query-balloon", json!({"actual": 128 << 20}));
    tokio::spawn(fake.clone().serve(dir.path().join("x.qmp")));
    let mut drivers = watch(dir.path());
    let view = until(&mut drivers, "web", is_up).await;
    drivers.act(&set("web", &view, 256));
    eventually("it moves", || fake.heard("\"balloon\"") == 1).await;
    let fake = fake.answering("query-balloon", json!({"actual": RAM}));
    let fake = fake.answering("guest-stats", stats(50));
    let outcomes = release(&drivers).await;
    let [(_, Ok(done))] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(
        done.words.contains("instead of the original 128 MiB: its guest uses that"),
        "{done:?}"
    );
    let (tenth, spare) = (RAM / 10, 50 << 20);
    assert_eq!(fake.heard(&format!("\"value\":{}", RAM - (spare - tenth))), 1);
}

#[tokio::test]
async fn bad_statistics_are_a_visible_limit_and_nothing_else() {
    for bad in [json!(-7), json!("many"), json!(1_u64 << 62)] {
        let dir = tempfile::tempdir().unwrap();
        let stats = json!({"stats": {"stat-free-memory": bad}, "last-update": 1_700_000_000});
        let fake = Fake::new("liar").answering("guest-stats", stats);
        tokio::spawn(fake.serve(dir.path().join("x.qmp")));
        let mut drivers = watch(dir.path());
        let is_limited = |v: &VmView| is_up(v) && v.limits.contains_key(&Mechanism::Statistics);
        let view = until(&mut drivers, "liar", is_limited).await;
        assert!(view.limits[&Mechanism::Statistics].contains("stat-free-memory"));
        assert!(view.stats.is_none() && view.balloon.is_some());
    }
}

#[tokio::test]
async fn nonsense_in_every_answer_leaves_the_daemon_standing() {
    for nonsense in
        [json!(null), json!(-1), json!("x"), json!([[[]]]), json!({"actual": -5, "size": -1})]
    {
        let commands =
            ["query-name", "query-balloon", "guest-stats", "query-migrate", "query-status"];
        let more = ["query-memdev", "qom-list", "guest-stats-polling-interval"];
        for command in commands.into_iter().chain(more) {
            let dir = tempfile::tempdir().unwrap();
            let fake = Fake::new("vm").answering(command, nonsense.clone());
            tokio::spawn(fake.serve(dir.path().join("vm.qmp")));
            let mut drivers = watch(dir.path());
            until(&mut drivers, "vm", |v| v.ram == Bytes(RAM)).await;
        }
    }
}

#[tokio::test]
async fn a_silent_and_a_babbling_socket_do_not_delay_a_healthy_vm() {
    let dir = tempfile::tempdir().unwrap();
    tokio::spawn(Fake::new("well").serve(dir.path().join("well.qmp")));
    let silent = UnixListener::bind(dir.path().join("silent.qmp")).unwrap();
    let babbler = UnixListener::bind(dir.path().join("babbler.qmp")).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = babbler.accept().await {
            while stream.write_all(&[b'x'; 65_536]).await.is_ok() {}
        }
    });
    let mut drivers = watch(dir.path());
    until(&mut drivers, "silent", |v| down_because(v, "no QMP greeting in 2 s")).await;
    until(&mut drivers, "babbler", |v| down_because(v, "not QMP: first line was `xxx")).await;
    for _ in 0..20 {
        let view = until(&mut drivers, "well", is_up).await;
        let age = view.balloon.unwrap().age(sys::clock::boot_now());
        assert!(age.0 < 1500, "the healthy VM was last read {age} ago");
        tokio::time::sleep(PERIOD).await;
    }
    drop(silent);
}

#[tokio::test]
async fn two_sockets_of_one_vm_are_a_fault_of_the_second() {
    let dir = tempfile::tempdir().unwrap();
    tokio::spawn(Fake::new("web").serve(dir.path().join("a.qmp")));
    let mut drivers = watch(dir.path());
    until(&mut drivers, "web", is_up).await;
    let second = Fake::new("web");
    tokio::spawn(second.clone().serve(dir.path().join("b.qmp")));
    until(&mut drivers, "b", |v| down_because(v, "two sockets name this VM: `web`")).await;
    let view = until(&mut drivers, "web", is_up).await;
    drivers.act(&set("web", &view, 200));
    settle().await;
    assert_eq!(second.heard("\"balloon\"") + second.heard("qom-set"), 0);
}

#[tokio::test]
async fn the_balloon_moves_after_its_original_is_recorded_and_release_puts_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new("web");
    tokio::spawn(fake.clone().serve(dir.path().join("a.qmp")));
    let mut drivers = watch(dir.path());
    let view = until(&mut drivers, "web", is_up).await;
    drivers.act(&set("web", &view, 200));
    eventually("it moves", || fake.heard(&format!("{}", 200 << 20)) == 1).await;
    let [last] = &on_record(dir.path())[..] else { panic!("one record") };
    assert_eq!((last.balloon, last.stats_interval_s), (Some(Bytes(RAM)), Some(0)));
    assert_eq!(fake.heard(&format!("{}", 200 << 20)), 1);

    let outcomes = release(&drivers).await;
    assert!(matches!(&outcomes[..], [(vm, Ok(_))] if vm.as_str() == "web"), "{outcomes:?}");
    assert_eq!(fake.heard(WHOLE), 1);
    let settings = fake.heard("qom-set");
    drivers.act(&set("web", &view, 100));
    settle().await;
    assert_eq!(fake.heard(&format!("{}", 100 << 20)), 0, "released is released");
    assert_eq!(fake.heard("qom-set"), settings);
    assert!(on_record(dir.path()).is_empty());
    assert!(release(&drivers).await.is_empty(), "nothing is left to be done");
}

#[tokio::test]
async fn a_vm_that_leaves_management_gets_back_what_it_had_and_is_watched_on() {
    let dir = tempfile::tempdir().unwrap();
    let (left, kept) = (Fake::new("web"), Fake::new("db"));
    tokio::spawn(left.clone().serve(dir.path().join("a.qmp")));
    tokio::spawn(kept.clone().serve(dir.path().join("b.qmp")));
    let mut drivers = watch(dir.path());
    for name in ["web", "db"] {
        let view = until(&mut drivers, name, is_up).await;
        drivers.act(&set(name, &view, 200));
    }
    let moved = |fake: &Fake| fake.heard(&format!("{}", 200 << 20)) == 1;
    eventually("both move", || moved(&left) && moved(&kept)).await;
    let released = drivers.let_go(&|vm| vm.as_str() == "web").await;
    assert!(matches!(&released[..], [(vm, Ok(_))] if vm.as_str() == "web"), "{released:?}");
    assert_eq!((left.heard(WHOLE), kept.heard(WHOLE)), (1, 0));
    until(&mut drivers, "web", is_up).await;
}

#[tokio::test]
async fn a_dry_run_tells_what_a_release_would_do_and_changes_nothing() {
    let (dir, fake) = left_changed().await;
    fake.answers.lock().unwrap().insert("query-balloon", json!({"actual": 200 << 20}));
    let drivers = watch(dir.path());
    let settings = fake.heard("qom-set");
    let outcomes = drivers.release(|_: &VmName| true, Undo::DryRun).await;
    let [(_, Ok(would))] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(would.words, "statistics every 0 s (off) again, balloon back to 256 MiB");
    assert_eq!(would.gives, Bytes::mib(56));
    assert_eq!((fake.heard(WHOLE), fake.heard("qom-set")), (0, settings));
    assert_eq!(on_record(dir.path()).len(), 1, "it stays on record");
    let outcomes = drivers.release(|vm: &VmName| vm.as_str() == "db", Undo::Now).await;
    assert!(outcomes.is_empty(), "another VM is meant: {outcomes:?}");
    assert_eq!(fake.heard(WHOLE), 0);
}

#[tokio::test]
async fn a_vm_that_is_paused_by_name_is_not_changed_and_another_one_is() {
    let dir = tempfile::tempdir().unwrap();
    let (held, other) = (Fake::new("web"), Fake::new("db"));
    let mut pauses = model::Pauses::default();
    pauses.add(&model::Scope::Vm("web".into()), model::Hold::Kept);
    let mut drivers = watch(dir.path());
    drivers.set_pauses(pauses);
    tokio::spawn(held.clone().serve(dir.path().join("a.qmp")));
    tokio::spawn(other.clone().serve(dir.path().join("b.qmp")));
    for name in ["web", "db"] {
        let view = until(&mut drivers, name, is_up).await;
        drivers.act(&set(name, &view, 200));
    }
    let moved = |fake: &Fake| fake.heard(&format!("{}", 200 << 20));
    eventually("the other one moves", || moved(&other) == 1).await;
    settle().await;
    assert_eq!((moved(&held), held.heard("qom-set")), (0, 0), "{:?}", held.heard);
    drivers.set_pauses(model::Pauses::default());
    eventually("it is polled after the pause", || held.heard("qom-set") == 1).await;
}

#[tokio::test]
async fn the_original_is_found_again_beside_the_record_of_a_dead_namesake() {
    let (dir, fake) = left_changed().await;

    // The socket of a dead QEMU remains, and the living QEMU has the same name.
    let dead = dir.path().join("z.qmp");
    drop(UnixListener::bind(&dead).unwrap());
    let mut journal = Journal::open(dir.path()).unwrap();
    let shrunk = UndoRecord {
        balloon: Some(Bytes::mib(1)),
        ..UndoRecord::untouched("web".into(), dead.clone(), 77)
    };
    journal.record(&[shrunk]).unwrap();
    let mut second = with_journal(dir.path(), journal);
    let view = until(&mut second, "web", is_up).await;
    second.act(&set("web", &view, 100));
    eventually("it moves", || fake.heard(&format!("{}", 100 << 20)) == 1).await;
    let outcomes = release(&second).await;
    assert!(outcomes.iter().all(|(_, outcome)| outcome.is_ok()), "{outcomes:?}");
    assert_eq!(fake.heard(WHOLE), 1);
    assert!(on_record(dir.path()).is_empty());
}

#[tokio::test]
async fn a_vm_that_the_configuration_does_not_name_any_more_is_released_too() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fake = Fake::new("web");
    tokio::spawn(fake.clone().serve(dir.path().join("a.qmp")));
    let mut first = watch(dir.path());
    let view = until(&mut first, "web", is_up).await;
    first.act(&set("web", &view, 200));
    eventually("it moves", || fake.heard(&format!("{}", 200 << 20)) == 1).await;
    drop(first);

    let second = with_journal(elsewhere.path(), Journal::open(dir.path()).unwrap());
    let outcomes = release(&second).await;
    assert!(matches!(&outcomes[..], [(_, Ok(_))]), "{outcomes:?}");
    assert_eq!(fake.heard(WHOLE), 1);
    assert!(on_record(dir.path()).is_empty());
}

#[tokio::test]
async fn a_release_that_comes_before_the_first_connection_waits_for_it() {
    let (dir, fake) = left_changed().await;
    let second = watch(dir.path());
    let outcomes = release(&second).await;
    assert!(matches!(&outcomes[..], [(_, Ok(_))]), "{outcomes:?}");
    assert_eq!(fake.heard(WHOLE), 1);
}

#[tokio::test]
async fn vms_that_are_gone_do_not_stay_on_record() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    let gone = UndoRecord {
        balloon: Some(Bytes(RAM)),
        ..UndoRecord::untouched("old".into(), dir.path().join("old.qmp"), 77)
    };
    journal.record(&[gone]).unwrap();
    let _drivers = with_journal(dir.path(), journal);
    eventually("nothing is on record", || on_record(dir.path()).is_empty()).await;
}

#[tokio::test]
async fn what_cannot_be_recorded_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new("web");
    tokio::spawn(fake.clone().serve(dir.path().join("a.qmp")));
    let nowhere = Journal::open(&dir.path().join("gone")).unwrap();
    let mut drivers = with_journal(dir.path(), nowhere);
    let view = until(&mut drivers, "web", is_up).await;
    drivers.act(&set("web", &view, 200));
    let told = |v: &VmView| v.last_error.as_ref().is_some_and(|e| e.value.contains("recorded"));
    until(&mut drivers, "web", told).await;
    assert_eq!(fake.heard("\"balloon\"") + fake.heard("qom-set"), 0);
}

#[tokio::test]
async fn no_balloon_moves_in_a_migration_or_in_another_life() {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::new("web").answering("query-migrate", json!({"status": "active"}));
    tokio::spawn(fake.clone().serve(dir.path().join("a.qmp")));
    let mut drivers = watch(dir.path());
    let view = until(&mut drivers, "web", is_up).await;
    assert_eq!(view.migration, Migration::Active);
    let mut other_life = view.clone();
    other_life.incarnation += 1;
    drivers.act(&set("web", &other_life, 100));
    settle().await;
    assert_eq!(drivers.view().vms[&VmName::from("web")].last_error, None);
    drivers.act(&set("web", &view, 200));
    until(&mut drivers, "web", |v| v.last_error.is_some()).await;
    assert_eq!(fake.heard("\"balloon\""), 0);
}

#[tokio::test]
async fn a_vm_whose_socket_vanishes_is_forgotten_after_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qmp");
    let server = tokio::spawn(Fake::new("web").serve(path.clone()));
    let mut drivers = watch(dir.path());
    until(&mut drivers, "web", is_up).await;
    std::fs::remove_file(&path).unwrap();
    server.abort();
    until(&mut drivers, "web", |v| !is_up(v)).await;
    assert_eq!(on_record(dir.path()).len(), 1);
    while !drivers.view().vms.is_empty() {
        tokio::time::sleep(PERIOD).await;
    }
    eventually("nor does it stay on record", || on_record(dir.path()).is_empty()).await;
}
