//! The drivers on a real QEMU without a guest: QMP, the process and the balloon device are real.
//! It is the lab's QEMU, which is downloaded if the system has no recent one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use drivers::journal::Journal;
use drivers::{Drivers, Records, Settings};
use lab::cache::Cache;
use lab::qemu::Qemu;
use model::ports::Sense;
use model::view::Mechanism;
use model::{Bytes, Link, Migration, VmName, VmView};
use sys::process::{Child, Signal};

/// Starts a QEMU whose CPU never runs; it ends with the test.
fn start(name: &str, socket: &Path) -> Child {
    let qemu = Qemu::provide(&Cache::open().unwrap()).unwrap();
    let qmp = format!("unix:{},server=on,wait=off", socket.display());
    let child = qemu
        .command()
        .die_with_parent()
        .args(["-name", name, "-S", "-M", "q35", "-accel", "tcg", "-m", "64M", "-nodefaults"])
        .args(["-display", "none", "-qmp", &qmp, "-device", "virtio-balloon-pci"])
        .spawn();
    child.unwrap()
}

fn watch(dir: &Path) -> Drivers {
    let globs = vec![format!("{}/*.qmp", dir.display())];
    let records = Records::new(Journal::open(dir).unwrap());
    Drivers::new(Settings {
        globs,
        processes: false,
        groups: BTreeMap::new(),
        period: Duration::from_millis(200),
        libvirt: "/none".into(),
        records,
    })
    .unwrap()
}

async fn until(drivers: &mut Drivers, vm: &str, is_so: impl Fn(&VmView) -> bool) -> VmView {
    let mut last = None;
    for _ in 0..500 {
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

#[tokio::test]
async fn a_real_qemu_is_seen_with_its_memory_and_its_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let mut qemu = start("real", &dir.path().join("r.qmp"));
    let mut drivers = watch(dir.path());
    let view = until(&mut drivers, "real", |v| is_up(v) && v.used.is_some()).await;
    assert_eq!((view.ram, view.migration), (Bytes::mib(64), Migration::None));
    assert_eq!(view.balloon.unwrap().value, Bytes::mib(64));
    let used = view.used.unwrap().value;
    assert!(used < Bytes::mib(4), "the guest has not run; it cannot occupy {used}");
    let limits: Vec<_> = view.limits.into_keys().collect();
    assert_eq!(limits, [Mechanism::Statistics, Mechanism::FreePageReporting]);
    qemu.end(Duration::from_secs(5)).unwrap();
}

#[tokio::test]
async fn a_stopped_qemu_delays_no_other_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut stuck = start("stuck", &dir.path().join("s.qmp"));
    let mut well = start("well", &dir.path().join("w.qmp"));
    let mut drivers = watch(dir.path());
    until(&mut drivers, "stuck", is_up).await;
    until(&mut drivers, "well", is_up).await;
    stuck.signal(Signal::STOP).unwrap();
    until(&mut drivers, "stuck", |v| !is_up(v)).await;
    for _ in 0..20 {
        let view = until(&mut drivers, "well", is_up).await;
        let age = view.balloon.unwrap().age(sys::clock::boot_now());
        assert!(age.0 < 1000, "the other was last read {age} ago");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stuck.signal(Signal::CONT).unwrap();
    until(&mut drivers, "stuck", is_up).await;
    stuck.end(Duration::from_secs(5)).unwrap();
    well.end(Duration::from_secs(5)).unwrap();
}

#[tokio::test]
async fn a_qemu_that_was_killed_and_started_again_is_another_life() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("r.qmp");
    let mut first = start("real", &socket);
    let mut drivers = watch(dir.path());
    let life = until(&mut drivers, "real", is_up).await.incarnation;
    first.signal(Signal::KILL).unwrap();
    until(&mut drivers, "real", |v| !is_up(v)).await;
    let mut second = start("real", &socket);
    until(&mut drivers, "real", |v| is_up(v) && v.incarnation != life).await;
    first.end(Duration::ZERO).unwrap();
    second.end(Duration::from_secs(5)).unwrap();
}
