//! Cold memory end to end: a real guest, the daemon and its worker, and the host's swap.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::zram::Zram;
use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, skip};
use sys::memory_of::Counters;
use sys::process::{Identity, Signal};

/// Of what the guest has and hardly touches.
const ENOUGH: Bytes = Bytes::mib(60);

/// Changes the configuration, and has it read.
fn configure(stage: &Stage, changes: &[(&str, &str)]) {
    let mut text = std::fs::read_to_string(stage.config()).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{from} is not in it");
        text = text.replace(from, to);
    }
    std::fs::write(stage.config(), text).unwrap();
    stage.hang_up();
}

/// What of QEMU is in the host's swap.
fn out(stage: &Stage) -> Bytes {
    Counters::of(stage.guest("guest").process().pid).unwrap().swapped
}

fn worker(stage: &Stage) -> Option<u32> {
    let page = stage.json(&["group", "shop"]);
    page["worker"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

#[test]
fn what_a_guest_does_not_touch_is_paged_out_when_the_host_is_short_and_no_byte_is_lost() {
    let zram = match Zram::new(Bytes::mib(512)) {
        Ok(zram) => zram,
        Err(error) => return skip(&error.to_string()),
    };
    // It comes by each page once in half a minute.
    let guest = MachineSpec {
        shim: true,
        ..MachineSpec::new("guest", "shop", MAX, MAX, "verify --mb 120 --rate 4")
    };
    let Some(stage) = Stage::start(Mode::Enforce, &[guest]) else { return };
    fleet::wait_until_filled(&stage.lab, 120).unwrap();
    let why = stage.vm("guest")["unsupported"]["cold"].as_str().unwrap().to_owned();
    assert!(why.contains("\"off\""), "{why}");
    let when_needed = "free_pages = \"off\"\ncold = \"when-needed\"";
    let smaller = ("base = \"262144KiB\"", "base = \"98304KiB\"");
    let less = ("min = \"131072KiB\"", "min = \"65536KiB\"");
    configure(&stage, &[("free_pages = \"off\"", when_needed), smaller, less]);
    stage.until("it is known where its memory is", |stage| !stage.vm("guest")["cold"].is_null());
    assert_eq!(out(&stage), Bytes::ZERO, "nobody needs it");

    // Its grants come back.
    configure(&stage, &[("[host]", "[host]\nreserve = \"900GiB\"")]);
    stage.until("it is paged out", |stage| out(stage) > ENOUGH);
    assert_eq!(stage.balloon("guest"), MAX, "its balloon holds nothing");
    let words = stage.says(&["explain", "guest"]);
    assert!(words.contains("paged out"), "{words}");

    // Whoever dies, it is the guest's.
    let killed = worker(&stage).unwrap();
    Identity::of(killed).unwrap().signal(Signal::KILL).unwrap();
    stage.until("there is a new worker", |stage| worker(stage).is_some_and(|pid| pid != killed));
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);

    // What QEMU has beside its guest may stay there.
    let released = stage.overbook(&["release"]);
    assert!(released.status.success(), "{}", overbook_tests::text(&released));
    stage.until("everything is back", |stage| out(stage) < Bytes::mib(4));
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}
