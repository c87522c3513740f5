//! Runs that are short: what a pool never does, and what its strategies differ in.

use model::OverloadSpec;

use super::*;

fn setting(strategy: Strategy) -> Setting {
    Setting {
        hosts: 60,
        vms_per_host: 10,
        memory: Bytes::mib(8 * 1024),
        promised: Bytes::mib(1024),
        given: Bytes::mib(640),
        overloaded: 0.05,
        pages_per_s: 2_000,
        overload: OverloadSpec::default(),
        learns: true,
        misbehaving: 0.2,
        calm_s: 600,
        strategy,
        excess: Excess::Idle,
    }
}

#[test]
fn no_host_holds_more_than_it_has_whatever_hosts_claim() {
    for strategy in [Strategy::Both, Strategy::Migrate, Strategy::Swap] {
        let mut pool = Pool::new(7, setting(strategy));
        for _ in 0..720 {
            pool.step();
            pool.check().unwrap_or_else(|why| panic!("{strategy:?}: {why}"));
        }
        let Outcome { overloaded_s, short_s, long_s, disk_s, moves, .. } = pool.outcome;
        assert_eq!(overloaded_s, short_s + long_s + disk_s);
        assert_eq!(moves > 0, strategy != Strategy::Swap, "{strategy:?}");
    }
}

#[test]
fn one_seed_is_one_outcome() {
    let run = |seed| Pool::new(seed, setting(Strategy::Both)).run(1);
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn both_remedies_together_move_less_and_bear_more() {
    let run = |strategy| Pool::new(5, setting(strategy)).run(6);
    let (both, migrate, swap) = (run(Strategy::Both), run(Strategy::Migrate), run(Strategy::Swap));
    assert!(both.moves * 4 < migrate.moves, "{both:?} {migrate:?}");
    assert!(both.disk_s * 10 < migrate.disk_s, "{both:?} {migrate:?}");
    assert!(both.long_s < swap.long_s, "{both:?} {swap:?}");
    assert!(both.excess_byte_s < migrate.excess_byte_s, "{both:?} {migrate:?}");
    // VMs swap no more memory than they lack, and swapping sets no memory free.
    assert_eq!(swap.excess_most, swap.most_swapped);
    assert_eq!(swap.excess_byte_s, swap.net_byte_s);
    assert!(swap.excess_byte_s <= swap.overloaded_s * Bytes::mib(1024 - 640).0);
    assert_eq!(swap.needless, 0);
}

#[test]
fn who_waits_longer_for_a_move_moves_less_for_nothing() {
    let run = |window, sustained| {
        let overload = OverloadSpec { window, sustained, ..OverloadSpec::default() };
        let setting = Setting { overload, learns: false, ..setting(Strategy::Both) };
        Pool::new(5, setting).run(6)
    };
    let (soon, late) = (run(12, 8), run(20, 14));
    assert!(late.long_wait_s > soon.long_wait_s, "{soon:?} {late:?}");
    assert!(late.needless < soon.needless, "{soon:?} {late:?}");
}
