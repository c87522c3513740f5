//! No byte is lost while a misbehaving worker stresses the shim: the short version of the
//! scenario `shim-stress`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use model::Bytes;
use overbook_tests::{Requirement, requires, take_turn};

const DURATION: Duration = Duration::from_secs(25);
const MIB: u64 = 96;
const SEED: u64 = 7;

#[test]
fn no_byte_is_lost_and_nothing_hangs_whatever_a_worker_does() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/var/tmp").unwrap();
    let outcome = lab::stress::stand_in(dir.path(), SEED, MIB, DURATION).unwrap();
    let deeds = &outcome.toll.deeds;
    assert_eq!(deeds.complaints, Vec::<String>::new());
    assert_eq!(outcome.report.bad_bytes, 0, "{}", outcome.words);
    assert_eq!(outcome.left, Bytes::ZERO, "memory is left in staging");
    match &outcome.report.kvm_obstacle {
        None => assert!(outcome.report.done("kvm_access") > 1_000, "{:?}", outcome.report),
        Some(why) => drop(requires(Requirement::Kvm, Err::<(), _>(why))),
    }
    // The stress was heavy enough.
    assert!(outcome.toll.kills > 0 && outcome.report.operations_done() > 100_000, "{outcome:?}");
    assert!(deeds.total(|counters| counters.traps) > 1_000, "{deeds:?}");
}
