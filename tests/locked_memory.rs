//! A balloon that gives the host nothing back: QEMU's memory is locked, so what the balloon takes
//! from the guest stays where it is. Overbook finds that out and gives it back to the guest.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::MachineSpec;
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, hungry, idle};

/// The guest's loss until that is found out: some steps of a tenth, until 32 MiB do not come back.
const FOUND_OUT: Bytes = Bytes::mib(100);

#[test]
fn what_is_taken_of_locked_memory_goes_back_and_the_vm_is_left_alone() {
    // All that it has is its base: the host keeps what it does not use, and its balloon could free
    // that for the hungry one.
    let locked = MachineSpec { memory_base: MAX, ..idle("locked") };
    let locked = locked.with_qemu("-overcommit mem-lock=on");
    let Some(stage) = Stage::start(Mode::Enforce, &[locked, hungry()]) else { return };
    let tells = |stage: &Stage| {
        let vm = stage.vm("locked");
        vm["refusals"].as_array().unwrap().iter().any(|r| r["code"] == "gives_nothing_back")
    };
    stage.until("its memory is taken, and it is found out that the host gets none", |stage| {
        assert!(stage.balloon("locked") >= MAX.minus(FOUND_OUT), "too much was taken");
        tells(stage)
    });
    stage.until("what was taken is the guest's again", |stage| stage.balloon("locked") == MAX);
    let words = stage.says(&["explain", "locked"]);
    assert!(words.contains("gives the host nothing back"), "{words}");
}
