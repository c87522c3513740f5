//! A QEMU that lies about its RAM gains its group no memory.

use std::time::Duration;

use lab::attack::Attacker;
use model::{Bytes, Mode};
use overbook_tests::{BASE, Stage, hungry};

/// Long enough for the daemon to measure the liar's memory, and to hand out any gain.
const WATCHED: Duration = Duration::from_secs(20);
/// Maximum credible memory of the liar: its balloon's size, which counts as used.
const SMALL: Bytes = Bytes::mib(128);

#[test]
fn a_tebibyte_that_the_kernel_does_not_see_is_not_handed_out() {
    let Some(stage) = Stage::start(Mode::Enforce, &[hungry()]) else { return };
    stage.configure(&[("vms = [\"hungry\"]", "vms = [\"*\"]")]);
    let socket = stage.lab.dir().join("qmp/liar.sock");
    let liar = Attacker::start("ram_liar", &[socket.to_str().unwrap()], None).unwrap();
    stage.until("the liar is found", |stage| stage.vm("liar")["link_up"] == true);
    let honest = stage.vm("hungry")["base_bytes"].as_u64().unwrap();
    stage.throughout(WATCHED, "its group has no more to hand out", |stage| {
        let group = stage.json(&["group", "shop"]);
        group["budget_bytes"].as_u64().unwrap() <= honest + SMALL.0
            && group["surplus_bytes"].as_u64().unwrap() <= SMALL.0 / 10
            && stage.balloon("hungry") <= BASE
    });
    let seen = liar.all_seen();
    println!("the liar saw: {:?}", seen.last());
    assert!(seen.iter().any(|line| line.contains("bytes of RAM")), "{seen:?}");
    assert!(!seen.iter().any(|line| line.contains("balloon to")), "{seen:?}");
    assert!(!stage.vm("liar")["unsupported"]["host_memory"].is_null());
}
