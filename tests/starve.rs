//! A guest without swap, in a group whose budget is much less than its guests have: a real guest
//! fills its memory, and its kernel kills nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use lab::steps;
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, idle};

/// Most of the memory that a guest of [`MAX`] has for its programs.
const FILLS_MB: u32 = 150;
const LIMIT: Duration = Duration::from_secs(180);

fn kills(stage: &Stage, name: &str) -> u64 {
    let report = stage.guest(name).last_metric().unwrap();
    report.value["oom_kills"].as_u64().expect("its kernel counts them")
}

#[test]
fn a_guest_without_swap_fills_its_memory_under_a_budget_that_is_too_small() {
    let filling = steps::guest("filling", "shop", MAX, FILLS_MB);
    let quiet = lab::MachineSpec { swap: None, memory_base: MAX, ..idle("quiet") };
    let Some(stage) = Stage::start(Mode::Enforce, &[filling, quiet]) else { return };
    // After Overbook has seen how the guest takes memory.
    steps::order(stage.guest("filling"), "write+free", LIMIT).unwrap();
    stage.configure(&[
        ("base = \"262144KiB\"", "base = \"98304KiB\""),
        ("min = \"131072KiB\"", "min = \"65536KiB\""),
        ("[group.\"shop\"]", "[group.\"shop\"]\nbudget = \"192MiB\""),
    ]);
    stage.until("memory is taken from the quiet guest", |stage| {
        stage.balloon("quiet") < MAX.minus(Bytes::mib(10))
    });
    steps::order(stage.guest("filling"), "write", LIMIT).unwrap();
    assert_eq!([kills(&stage, "filling"), kills(&stage, "quiet")], [0, 0]);
    assert_eq!(stage.guest("filling").reported("mb"), f64::from(FILLS_MB));

    stage.until("the operator is told that nothing more is taken", |stage| {
        stage.says(&["group", "shop"]).contains("over its budget and stays so")
    });
    let words = stage.says(&["explain", "filling"]);
    assert!(words.contains("not known to have swap"), "{words}");
    assert!(words.contains("a larger `budget`"), "{words}");
    // The lab's balloons do not deflate by themselves, as QEMU reports.
    assert_eq!(stage.vm("filling")["deflates_on_oom"], false);
    assert!(stage.says(&["vm", "filling"]).contains("deflate-on-oom          off"));
}
