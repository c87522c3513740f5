//! A balloon that gives the host nothing back, because QEMU's memory is locked: memory that the
//! balloon takes from the guest stays resident. Overbook detects this and gives the memory back
//! to the guest.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::MachineSpec;
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, hungry, idle};

/// The guest's loss until detection: some steps of a tenth, until 32 MiB do not come back.
const FOUND_OUT: Bytes = Bytes::mib(100);

#[test]
fn what_is_taken_of_locked_memory_goes_back_and_the_vm_is_left_alone() {
    // All of its memory is its base, but it is idle, so its balloon could free memory for the
    // hungry guest.
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
