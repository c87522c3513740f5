//! Tracking from outside, end to end: a real guest whose QEMU has nothing loaded into it, the
//! daemon and its group's worker, and the host's swap in compressed memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::daemon::OUTSIDE;
use lab::zram::Zram;
use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Requirement, Stage, requires};
use sys::memory_of::Counters;

/// The array that the guest works on.
const SET_MIB: f64 = 60.0;
/// Maximum memory that a guest's kernel and other programs touch.
const KERNEL_MIB: f64 = 20.0;
/// Maximum memory that tracking keeps paged out at once.
const MOST_OUT: Bytes = Bytes::mib(40);

fn working_set_mib(stage: &Stage) -> Option<f64> {
    let bytes = stage.vm("plain")["tracking"]["working_set_bytes"].as_u64()?;
    Some(Bytes(bytes).as_mib())
}

fn until_known(stage: &Stage) {
    let near = SET_MIB * 0.85..SET_MIB + KERNEL_MIB;
    stage.until("the working set is near what the guest works on", |stage| {
        working_set_mib(stage).is_some_and(|set| near.contains(&set))
    });
}

#[test]
fn a_guest_with_nothing_loaded_into_its_qemu_shows_its_working_set_and_loses_no_byte() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(512))) else { return };
    let guest = |name, workload| MachineSpec {
        small_pages: true,
        ..MachineSpec::new(name, "shop", MAX, MAX, workload)
    };
    let guests = [guest("plain", "random-array --mb 60"), guest("intact", "verify --mb 60")];
    let Some(mut stage) = Stage::start(Mode::Observe, &guests) else { return };
    until_known(&stage);
    let vm = stage.vm("plain");
    assert_eq!(vm["unsupported"]["tracking"], serde_json::Value::Null, "{vm}");
    let why = vm["unsupported"]["dedup"].as_str().unwrap();
    assert!(why.contains("dedup = \"off\""), "{why}");
    let curve = stage.json(&["vm", "plain", "--mrc"]);
    assert!(curve["points"].as_array().unwrap().len() > 10, "{curve}");
    let out = Counters::of(stage.guest("plain").process().pid).unwrap().swapped;
    assert!(out < MOST_OUT, "{out} are out");

    // No process's death loses a byte of the guests' memory.
    stage.kill_worker("shop");
    until_known(&stage);
    stage.daemon.kill(&mut stage.lab).unwrap();
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}

/// Restarts the daemon without any QMP socket.
fn begin_without_sockets(stage: &mut Stage) {
    let attach = ("attach = \"off\"", "attach = \"on\"");
    stage.configure(&[attach, ("/qmp/*.sock", "/none/*.sock")]);
    stage.daemon.kill(&mut stage.lab).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
}

#[test]
fn guests_that_run_already_are_found_by_their_processes_and_show_their_working_sets() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(512))) else { return };
    let guest = |name, small_pages, workload| MachineSpec {
        small_pages,
        ..MachineSpec::new(name, OUTSIDE, MAX, MAX, workload)
    };
    let guests = [
        guest("plain", true, "random-array --mb 60"),
        guest("huge", false, "random-array --mb 60"),
        guest("intact", true, "verify --mb 60"),
    ];
    let Some(mut stage) = Stage::start(Mode::Observe, &guests) else { return };
    let kept = huge_pages(&stage, "huge");
    assert!(kept > Bytes::mib(60), "{kept}: are huge pages switched off?");
    begin_without_sockets(&mut stage);
    until_known(&stage);
    let curve = stage.json(&["vm", "plain", "--mrc"]);
    assert!(curve["points"].as_array().unwrap().len() > 10, "{curve}");
    stage.until("each has a working set", |stage| {
        let all = ["plain", "huge", "intact"].map(|name| stage.vm(name));
        all.iter().all(|vm| vm["tracking"]["working_set_bytes"].as_u64().is_some_and(|it| it > 0))
    });
    let vm = stage.vm("huge");
    let why = vm["unsupported"]["balloon"].as_str().unwrap();
    assert!(why.contains("no QMP socket"), "{why}");
    let why = vm["unsupported"]["cold"].as_str().unwrap();
    assert!(why.contains("no group"), "{why}");
    let lost = kept.minus(huge_pages(&stage, "huge"));
    assert!(lost <= Bytes(MAX.0 / 16), "{lost} of {kept}: one block of each sixteen is sampled");
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}

/// Huge pages in the guest's RAM. QEMU frees some of its own memory after the boot.
fn huge_pages(stage: &Stage, name: &str) -> Bytes {
    let pid = stage.guest(name).process().pid;
    let ram = sys::outside::guest_ram(pid, MAX).unwrap().unwrap();
    ram.iter().map(|piece| piece.huge).sum()
}

#[test]
fn what_a_guest_does_not_touch_is_paged_out_from_outside_and_comes_back() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(1024))) else { return };
    // The guest fills its memory, and then touches little of it.
    let guest = |name, small_pages| MachineSpec {
        small_pages,
        ..MachineSpec::new(name, "shop", MAX, MAX, "verify --mb 120 --rate 8")
    };
    let guests = [guest("small", true), guest("huge", false)];
    let Some(mut stage) = Stage::start(Mode::Enforce, &guests) else { return };
    fleet::wait_until_filled(&stage.lab, 120).unwrap();
    stage.configure(&[
        ("cold = \"off\"", "cold = \"when-needed\""),
        ("base = \"262144KiB\"", "base = \"98304KiB\""),
        ("min = \"131072KiB\"", "min = \"65536KiB\""),
        ("[host]", "[host]\nreserve = \"900GiB\""),
    ]);
    let out =
        |stage: &Stage, name: &str| Counters::of(stage.guest(name).process().pid).unwrap().swapped;
    let both_out =
        |stage: &Stage| ["small", "huge"].iter().all(|name| out(stage, name) > Bytes::mib(50));
    stage.until("both are paged out in part", both_out);
    stage.kill_worker("shop");
    stage.until("both are paged out in part", both_out);
    stage.daemon.kill(&mut stage.lab).unwrap();
    let released = stage.overbook(&["release"]);
    assert!(released.status.success(), "{}", overbook_tests::text(&released));
    for name in ["small", "huge"] {
        // Pages of QEMU's own memory may stay in swap.
        assert!(out(&stage, name) < Bytes::mib(4), "{name}: {}", out(&stage, name));
    }
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}

#[test]
fn a_group_that_wants_no_vm_looked_at_from_outside_is_left_alone() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(64))) else { return };
    let guest = MachineSpec::new("plain", "shop", MAX, MAX, "random-array --mb 60");
    let Some(stage) = Stage::start(Mode::Observe, &[guest]) else { return };
    stage.configure(&[("cold = \"off\"", "cold = \"off\"\nattach = \"off\"")]);
    stage.until("it says why", |stage| {
        let vm = stage.vm("plain");
        let why = vm["unsupported"]["tracking"].as_str().unwrap_or_default();
        why.contains("without Overbook's shim") && vm["tracking"].is_null()
    });
    drop(stage);
    drop(zram);
}
