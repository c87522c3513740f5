//! Cold memory end to end: a real guest, the daemon and its worker, and the host's swap.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::zram::Zram;
use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Requirement, Stage, requires};
use sys::memory_of::Counters;

/// Part of the memory that the guest hardly touches.
const ENOUGH: Bytes = Bytes::mib(60);

/// Memory of QEMU in the host's swap.
fn out(stage: &Stage) -> Bytes {
    Counters::of(stage.guest("guest").process().pid).unwrap().swapped
}

#[test]
fn what_a_guest_does_not_touch_is_paged_out_when_the_host_is_short_and_no_byte_is_lost() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(512))) else { return };
    // The guest touches each page once in half a minute.
    let guest = MachineSpec {
        shim: true,
        ..MachineSpec::new("guest", "shop", MAX, MAX, "verify --mb 120 --rate 4")
    };
    let Some(mut stage) = Stage::start(Mode::Enforce, &[guest]) else { return };
    fleet::wait_until_filled(&stage.lab, 120).unwrap();
    let why = stage.vm("guest")["unsupported"]["cold"].as_str().unwrap().to_owned();
    assert!(why.contains("\"off\""), "{why}");
    let when_needed = ("cold = \"off\"", "cold = \"when-needed\"");
    let smaller = ("base = \"262144KiB\"", "base = \"98304KiB\"");
    let less = ("min = \"131072KiB\"", "min = \"65536KiB\"");
    stage.configure(&[when_needed, smaller, less]);
    stage.until("it is known where its memory is", |stage| !stage.vm("guest")["cold"].is_null());
    assert_eq!(out(&stage), Bytes::ZERO, "nobody needs it");

    // The guest must give back its grants.
    stage.configure(&[("[host]", "[host]\nreserve = \"900GiB\"")]);
    stage.until("it is paged out", |stage| out(stage) > ENOUGH);
    assert_eq!(stage.balloon("guest"), MAX, "its balloon holds nothing");
    let words = stage.says(&["explain", "guest"]);
    assert!(words.contains("paged out"), "{words}");

    // No process's death loses the guest's memory.
    stage.kill_worker("shop");
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    stage.until("it is paged out again", |stage| out(stage) > ENOUGH);
    stage.daemon.kill(&mut stage.lab).unwrap();
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);

    // Pages of QEMU's own memory may stay in swap.
    let released = stage.overbook(&["release"]);
    assert!(released.status.success(), "{}", overbook_tests::text(&released));
    assert!(out(&stage) < Bytes::mib(4), "without a daemon, too: {}", out(&stage));
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}
