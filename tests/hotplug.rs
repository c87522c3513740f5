//! RAM that is plugged and unplugged while the daemon runs: it belongs to the guest until a
//! policy decides otherwise, and no action of Overbook takes it away by mistake.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use lab::MachineSpec;
use lab::zram::Zram;
use model::{Bytes, Mode};
use overbook_tests::{BASE, MAX, Requirement, Stage, idle, requires};
use serde_json::json;

/// The DIMM that is plugged.
const DIMM: Bytes = Bytes::mib(128);
/// The guest's memory before that, after a take.
const LESS: Bytes = Bytes::mib(112);
/// Long enough for the daemon to see the DIMM and to decide several times.
const WATCHED: Duration = Duration::from_secs(8);

/// The idle guest on a machine with DIMM slots.
fn expandable() -> MachineSpec {
    // DIMMs are above 4 GiB, so Linux would reserve 64 MiB of bounce buffers from the start.
    let kernel_options = "swiotlb=noforce".to_owned();
    MachineSpec { kernel_options, ..idle("guest") }.with_qemu("-m slots=4,maxmem=4G")
}

fn plug(stage: &Stage, driver: &str) {
    let guest = stage.guest("guest");
    let memory = json!({"qom-type": "memory-backend-ram", "id": "memory", "size": DIMM.0});
    guest.qmp("object-add", memory).unwrap();
    let device = json!({"driver": driver, "id": "device", "memdev": "memory"});
    guest.qmp("device_add", device).unwrap();
}

fn plus(size: Bytes, more: Bytes) -> u64 {
    size.plus(more).0
}

/// Whether the words about the guest contain no mistake about its RAM.
fn no_program_is_blamed(stage: &Stage) -> bool {
    let words = stage.says(&["explain", "guest"]);
    !words.contains("cannot be true") && !words.contains("another program")
}

#[test]
fn a_dimm_is_the_guests_and_a_release_gives_back_what_was_taken_and_no_less() {
    let Some(stage) = Stage::start(Mode::Enforce, &[expandable()]) else { return };
    let none = ("max = \"262144KiB\"", "max = \"112MiB\"");
    stage.configure(&[none, ("base = \"131072KiB\"", "base = \"112MiB\"")]);
    stage.until("it is cut down", |stage| stage.balloon("guest") <= LESS);
    let cut = stage.balloon("guest");

    plug(&stage, "pc-dimm");
    stage.until("the DIMM is seen", |stage| stage.vm("guest")["ram_bytes"] == plus(MAX, DIMM));
    stage.throughout(WATCHED, "the DIMM is the guest's", |stage| {
        stage.balloon("guest") >= cut.plus(DIMM) && no_program_is_blamed(stage)
    });

    let said = stage.says(&["release"]);
    assert!(said.contains("balloon back to 256 MiB"), "{said}");
    stage.until("it has what it had, and the DIMM", |stage| {
        stage.balloon("guest") == BASE.plus(DIMM)
    });

    // A DIMM that the guest has released does not count as taken.
    assert_eq!(stage.says(&["resume"]), "resumed\n");
    stage.guest("guest").qmp("device_del", json!({"id": "device"})).unwrap();
    stage.until("it is unplugged", |stage| stage.vm("guest")["ram_bytes"] == MAX.0);
    stage.throughout(WATCHED, "no program is blamed", no_program_is_blamed);
    let said = stage.says(&["release"]);
    assert!(said.contains("guest: "), "{said}");
    stage.until("it has what it had", |stage| stage.balloon("guest") == BASE);
}

#[test]
fn a_dimm_of_a_vm_that_is_paged_is_not_taken_by_its_balloon() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(256))) else { return };
    let guest = MachineSpec { shim: true, memory_base: MAX, ..expandable() };
    let Some(stage) = Stage::start(Mode::Enforce, &[guest]) else { return };
    stage.configure(&[
        ("cold = \"off\"", "cold = \"when-needed\""),
        ("base = \"262144KiB\"", "base = \"131072KiB\""),
    ]);
    stage.until("it is known where its memory is", |stage| !stage.vm("guest")["cold"].is_null());
    plug(&stage, "pc-dimm");
    stage.until("the DIMM is seen", |stage| stage.vm("guest")["ram_bytes"] == plus(MAX, DIMM));
    stage.throughout(WATCHED, "its balloon holds nothing", |stage| {
        stage.balloon("guest") == MAX.plus(DIMM)
    });
    drop(stage);
    drop(zram);
}

#[test]
fn memory_that_no_balloon_reaches_is_shown_apart_and_is_no_surplus() {
    let nvdimm = "-machine nvdimm=on -object memory-backend-ram,id=memory,size=128M \
        -device nvdimm,id=device,memdev=memory";
    let guest = expandable().with_qemu(nvdimm);
    let Some(stage) = Stage::start(Mode::Enforce, &[guest]) else { return };
    // Without a configured guarantee, the guarantee is all of its RAM.
    stage.configure(&[("base = \"131072KiB\"", ""), ("max = \"262144KiB\"", "")]);
    stage.until("it is shown", |stage| stage.vm("guest")["devices_bytes"] == DIMM.0);
    assert_eq!(stage.vm("guest")["ram_bytes"], MAX.0);
    let page = stage.says(&["vm", "guest"]);
    assert!(page.contains("128 MiB of devices that its balloon cannot reach"), "{page}");
    stage.until("its group pays for its RAM", |stage| {
        stage.json(&["group", "shop"])["budget_bytes"] == MAX.0
    });
    stage.throughout(WATCHED, "the group is no richer by it", |stage| {
        stage.json(&["group", "shop"])["budget_bytes"] == MAX.0 && no_program_is_blamed(stage)
    });
}
