//! A VM whose QEMU is in a cgroup with a limit gets no grant above that limit, because the kernel
//! would kill QEMU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use lab::MachineSpec;
use lab::memory_group::MemoryGroup;
use model::{Bytes, Mode, VmName};
use overbook_tests::{BASE, MAX, Requirement, Stage, hungry, idle, requires};

/// Memory between base and the limit, without the margin: less than the group can hand out
/// without taking from the other VM.
const FITS: Bytes = Bytes::mib(8);
/// The margin below a limit of this size.
const MARGIN: Bytes = Bytes::mib(16);

/// QEMU's memory in addition to its guest's, once it is known.
fn own(stage: &Stage) -> Option<Bytes> {
    stage.daemon.case().unwrap().view.vms.get(&VmName::from("hungry"))?.own
}

fn is_refused(stage: &Stage) -> bool {
    let vm = stage.vm("hungry");
    vm["refusals"].as_array().unwrap().iter().any(|refusal| refusal["code"] == "cgroup_limit")
}

#[test]
fn grants_stop_below_the_limit_of_qemus_cgroup_and_the_limit_is_shown() {
    let Some(group) = requires(Requirement::MemoryCgroup, MemoryGroup::new("limit")) else {
        return;
    };
    group.keep_from_swap().unwrap();
    let cgroup = Some(group.dir().to_owned());
    let guests = [MachineSpec { cgroup, ..hungry() }, idle("idle")];
    let Some(stage) = Stage::start(Mode::Observe, &guests) else { return };
    stage.until("QEMU's own memory is known", |stage| own(stage).is_some());
    let limit = own(&stage).unwrap().plus(BASE).plus(MARGIN).plus(FITS);
    group.set_limit(limit).unwrap();
    let name = group.dir().file_name().unwrap().to_str().unwrap();
    stage.until("the limit is shown", |stage| stage.says(&["vm", "hungry"]).contains(name));
    assert!(stage.says(&["explain", "hungry"]).contains(name));
    let warning = stage.says(&["check"]);
    assert!(warning.contains("hungry: its max of 256 MiB does not fit"), "{warning}");

    stage.daemon.set_mode(&stage.lab, Mode::Enforce).unwrap();
    stage.until("it is granted no more", is_refused);
    assert!(stage.balloon("hungry") < MAX);
    // A grant of what still fits may come between two refusals.
    stage.until("the limit is told", |stage| stage.says(&["status"]).contains("its QEMU's cgroup"));
    stage.throughout(Duration::from_secs(10), "QEMU lives, and has what fits", |stage| {
        // QEMU's own memory is measured now and then, and may have changed since the limit was set.
        let fits = own(stage).is_some_and(|own| stage.balloon("hungry").plus(own) <= limit);
        stage.guest("hungry").alive() && fits
    });
    drop(stage);
    drop(group);
}
