//! A real guest that swaps because it has less memory than promised is overloaded. The daemon's
//! findings about it survive a restart, and tell how many such guests fit.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;

use model::Mode;
use overbook_tests::{Stage, hungry, idle};
use serde_json::Value;

/// Short intervals, so that the test takes seconds instead of minutes.
const QUICK: &str = "\n[overload]\ninterval_s = 2\npages_per_s = 20\nwindow = 4\nsustained = 3\n";

#[test]
fn a_guest_that_swaps_for_long_is_told_from_one_that_does_not_and_is_remembered() {
    // In mode `observe`, because the daemon's help would end the swapping.
    let guests = [hungry(), idle("calm")];
    let Some(mut stage) = Stage::start(Mode::Observe, &guests) else { return };
    let config = fs::read_to_string(stage.config()).unwrap() + QUICK;
    fs::write(stage.config(), config).unwrap();
    stage.hang_up();
    let overload = |stage: &Stage, vm: &str| stage.vm(vm)["overload"].clone();
    let is = |found: &Value, severity: &str| found["severity"] == severity;
    stage.until("it is overloaded", |stage| is(&overload(stage, "hungry"), "sustained"));
    stage.until("the other one is known", |stage| is(&overload(stage, "calm"), "none"));
    let explained = stage.says(&["explain", "hungry"]);
    assert!(explained.contains("Overload     sustained: it was overloaded in"), "{explained}");
    let sustained = |stage: &Stage| stage.json(&["capacity"])["sustained"]["vms"].as_u64();
    stage.until("room is kept for it", |stage| sustained(stage) == Some(1));
    let capacity = stage.json(&["capacity"]);
    assert_eq!((&capacity["vms"], &capacity["measured_vms"]), (&2.into(), &2.into()));

    let count = |stage: &Stage| overload(stage, "hungry")["intervals_total"].as_u64();
    let before = count(&stage).unwrap();
    stage.lab.end_helper("daemon", false).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    // Its first interval after the restart adds to the count.
    stage.until("it is known again", |stage| count(stage).is_some_and(|now| now > before));
    let sustained = overload(&stage, "hungry")["sustained_overloads_total"].as_u64().unwrap();
    assert!(sustained >= 1, "what was learned is forgotten");
}
