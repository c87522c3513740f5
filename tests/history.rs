//! The daemon's history, and its account of its own changes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use model::Mode;
use overbook_tests::{BASE, Stage, hungry, idle};
use serde_json::Value;

/// Times of a VM's readings; none before the daemon begins to write.
fn times(stage: &Stage, vm: &str) -> Vec<u64> {
    let said = stage.overbook(&["history", vm, "--limit", "1000", "--json"]);
    let Ok(rows) = serde_json::from_slice::<Value>(&said.stdout) else { return Vec::new() };
    rows.as_array().unwrap().iter().map(|row| row["wall_ms"].as_u64().unwrap()).collect()
}

#[test]
fn history_survives_the_daemons_sudden_death_and_goes_on_after_it() {
    let Some(mut stage) = Stage::start(Mode::Enforce, &[idle("one")]) else { return };
    stage.until("there are readings", |stage| times(stage, "one").len() >= 3);
    let before = times(&stage, "one");
    stage.daemon.kill(&mut stage.lab).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    let last = *before.iter().max().unwrap();
    stage.until("there are newer ones", |s| times(s, "one").iter().any(|time| *time > last));
    let after = times(&stage, "one");
    assert!(before.iter().all(|time| after.contains(time)), "{before:?} {after:?}");
}

#[test]
fn a_change_is_explained_in_words_and_its_plan_can_be_made_again_elsewhere() {
    let guests = [hungry(), idle("calm")];
    let Some(stage) = Stage::start(Mode::Enforce, &guests) else { return };
    stage.until("hungry is given memory", |stage| stage.balloon("hungry") > BASE);
    let words = stage.says(&["explain", "hungry"]);
    assert!(words.contains("it is short of memory (it swaps"), "{words}");
    let history = stage.says(&["history", "hungry"]);
    assert!(history.contains("it is short of memory (it swaps"), "{history}");

    let file = stage.lab.dir().join("etc/case.json");
    stage.until("the same tick is caught twice", |stage| {
        let made = stage.json(&["plan"]);
        std::fs::write(&file, stage.says(&["plan", "--export"])).unwrap();
        let again: Value = stage.json(&["plan", "--from", file.to_str().unwrap()]);
        if made["at_ms"] != again["at_ms"] {
            return false;
        }
        assert_eq!(made, again);
        true
    });
}
