//! A simulated week of a pool whose hosts keep the computed space for overloads (Williams 2011
//! §4.2, §4.3).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use model::{Bytes, OverloadSpec};
use sim::pool::{Excess, Outcome, Pool, Setting, Strategy, example};

const CERTAINTY: f64 = 0.97;
/// Hours until each VM's overloads are measured.
const WARM_UP: u64 = 24;
const WEEK: u64 = 7 * 24;
/// Time of calm after which a VM gives back the memory that it got for an overload.
const CALM_S: u64 = 120;

/// The paper's VMs, overloaded for 16 % of the time. The hosts have room for the computed space.
fn setting(excess: Excess) -> Setting {
    Setting {
        hosts: 15,
        vms_per_host: 10,
        memory: Bytes::mib(8 * 1024),
        promised: example::PROMISED,
        given: example::GIVEN,
        overloaded: example::OVERLOADED,
        pages_per_s: 2_000,
        overload: OverloadSpec::default(),
        learns: true,
        misbehaving: 0.0,
        calm_s: CALM_S,
        strategy: Strategy::Both,
        excess,
    }
}

fn week(excess: Excess, seed: u64) -> (Outcome, Pool) {
    let mut pool = Pool::new(seed, setting(excess));
    pool.run(WARM_UP);
    pool.warmed_up();
    let outcome = pool.run(WEEK);
    pool.check().unwrap();
    (outcome, pool)
}

#[test]
fn space_that_is_kept_suffices_with_its_certainty_and_comes_back() {
    let (outcome, mut pool) = week(Excess::Kept(CERTAINTY), 1);
    let share = |intervals: u64| intervals as f64 / outcome.intervals as f64;
    assert!(outcome.overloads > 10_000 && outcome.moves > 100, "{outcome:?}");
    assert!(share(outcome.without_pages) <= 1.0 - CERTAINTY, "{outcome:?}");
    assert!(share(outcome.without_target) <= 1.0 - CERTAINTY, "{outcome:?}");
    assert_eq!(outcome.second_moves, 0, "{outcome:?}");
    assert!(!pool.lent().is_zero());
    pool.calm_down();
    for _ in 0..CALM_S / 10 + 1 {
        pool.step();
    }
    assert_eq!(pool.lent(), Bytes::ZERO);
}

#[test]
fn space_that_was_granted_away_is_missing_in_an_overload() {
    let (outcome, _) = week(Excess::Granted, 1);
    assert_eq!(outcome.moves, 0);
    assert_eq!(outcome.disk_s, outcome.overloaded_s);
}
