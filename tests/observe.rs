//! Mode `observe` reads and changes nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use model::Mode;
use overbook_tests::{BASE, Stage, hungry, idle};

#[test]
fn observing_moves_no_balloon_and_what_it_set_up_to_observe_can_be_released() {
    let guests = ["hungry", "calm"];
    let Some(mut stage) = Stage::start(Mode::Observe, &[hungry(), idle("calm")]) else { return };
    stage.throughout(Duration::from_secs(15), "no balloon moves", |stage| {
        guests.iter().all(|guest| stage.balloon(guest) == BASE)
    });
    let swapping = stage.vm("hungry")["swap_bytes_per_second"].as_u64();
    assert!(swapping.is_some_and(|rate| rate > 64 << 10), "nothing tempted it: {swapping:?}");

    // A table is made from a guest's memory; only root can read it.
    if std::fs::File::open("/proc/kpageflags").is_ok() {
        let table = stage.lab.dir().join("run").join("calm.spt");
        let said = stage.says(&["static", "capture", "calm", "-o", table.to_str().unwrap()]);
        assert!(said.contains("calm") && table.exists(), "{said}");
    }

    stage.lab.end_helper("daemon", false).unwrap();
    let undo = stage.undo();
    assert_eq!(undo.len(), 2);
    for record in &undo {
        assert!(record["balloon"].is_null() && record["stats_interval_s"] == 0, "{record}");
    }
    let said = stage.says(&["release"]);
    assert!(!said.contains("balloon"), "{said}");
    assert_eq!(guests.map(|guest| stage.polling_s(guest)), [0, 0]);
    assert_eq!(guests.map(|guest| stage.balloon(guest)), [BASE, BASE]);
}
