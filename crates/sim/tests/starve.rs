//! Guests without swap in a group that pays for much less than they have: no program of theirs
//! dies for this.

use fastrand::Rng;
use model::{Bytes, Policy, Reason};
use sim::{Fake, Harm, Nature, Run, Scenario, limits};

const FLEETS: u64 = 40;
const SECONDS: u32 = 900;
/// MiB per second for which a guest has room after ten minutes of sleep: by then half of the pace
/// that is first assumed of it is forgotten.
const SLOW: u64 = policy::tuning::FIRST_PACE.0 >> 21;

fn quiet(name: &str) -> Fake {
    Fake::idle(name).that(Nature::Swapless)
}

/// All guests begin with 384 MiB; the group pays for 128 MiB of each.
fn shop(seed: u64, fakes: impl IntoIterator<Item = Fake>) -> Scenario {
    Scenario::new(seed).group("shop", Policy::Demand, limits(64, 128, 384), fakes)
}

fn killed(run: &Run) -> Vec<(usize, String)> {
    let killed = run.harms().filter(|(_, harm)| matches!(harm, Harm::Killed { .. }));
    killed.map(|(second, harm)| (second, harm.to_string())).collect()
}

/// A guest that takes up to 300 MiB, at up to 300 MiB/s. A fast guest has its first burst within
/// the first minute. A guest that sleeps at first has only slow bursts.
fn any_bursting(number: usize, rng: &mut Rng) -> Fake {
    let is_late = rng.bool();
    let (slowest, fastest) = (10, if is_late { SLOW } else { 300 });
    let from = if is_late { rng.u64(60..400) } else { rng.u64(0..60) };
    let (size, pace) = (rng.u64(60..300), rng.u64(slowest..=fastest));
    Fake::bursting(format!("{number}"), size, pace, from, rng.u64(60..400))
}

#[test]
fn no_program_dies_at_whatever_pace_guests_take_memory() {
    let mut faults = String::new();
    for seed in 0..FLEETS {
        let mut rng = Rng::with_seed(seed);
        let count = rng.usize(1..5);
        let bursting: Vec<Fake> = (0..count).map(|i| any_bursting(i, &mut rng)).collect();
        let run = shop(seed, bursting.into_iter().chain([quiet("quiet")])).run(SECONDS.into());
        for (second, words) in killed(&run) {
            faults += &format!("seed {seed}, {second} s: {words}\n");
        }
        let left = run.actual_mib("shop-quiet", run.seconds.len() - 1);
        if left > 250 {
            faults += &format!("seed {seed}: the quiet guest has kept {left} MiB\n");
        }
    }
    assert!(faults.is_empty(), "{faults}");
}

#[test]
fn a_kill_brings_back_what_was_taken_and_the_next_minutes_take_nothing() {
    // The burst comes without warning: a quarter of an hour of sleep, then 300 MiB within a
    // second.
    let sudden = Fake::bursting("sudden", 300, 300, 900, 100).that(Nature::CountsKills);
    let run = shop(1, [sudden, quiet("quiet")]).run(1_500);
    let killed = killed(&run);
    assert_eq!(killed.len(), 1, "one is more than all after it: {killed:?}");
    let second = killed[0].0;
    let had = run.actual_mib("shop-sudden", second);
    assert!(had < 300, "nothing was taken from it before: {had} MiB");
    let after = second + 5..second + 5 + 300;
    let kept: Vec<u64> = after.map(|second| run.actual_mib("shop-sudden", second)).collect();
    assert!(kept.iter().all(|kept| *kept == 384), "{kept:?}");
    let is_told = |reason: &Reason| matches!(reason, Reason::Killed { .. });
    let said = &run.seconds[second + 60].plan.vms[&"shop-sudden".into()].refusals;
    assert!(said.iter().any(is_told), "{said:?}");
}

#[test]
fn a_slow_burst_gets_back_what_was_taken_before_it_dies_of_that() {
    let slow = Fake::bursting("slow", 300, 20, 600, 1_000);
    let run = shop(1, [slow, quiet("quiet")]).run(700);
    assert_eq!(killed(&run), []);
    assert!(run.actual_mib("shop-slow", 599) < 250, "nothing was taken from it");
    assert!(run.actual_mib("shop-slow", 620) > 320, "it did not come back");
}

#[test]
fn a_group_whose_guests_need_all_that_they_have_stays_over_its_budget_and_says_so() {
    let full = |name: &str| Fake::busy(name, 300).that(Nature::Swapless);
    let run = shop(1, [full("a"), full("b")]).run(200);
    assert_eq!(killed(&run), []);
    assert!((0..200).all(|second| run.actual_mib("shop-a", second) == 384));
    let plan = &run.seconds[199].plan;
    let group = "shop".into();
    assert!(plan.groups[&group].deficit > Bytes::mib(300));
    assert!(matches!(plan.over.get(&group), Some(Reason::StaysOver { .. })), "{:?}", plan.over);
    let said = &plan.vms[&"shop-a".into()].refusals;
    assert!(said.iter().any(|reason| matches!(reason, Reason::Swapless { .. })), "{said:?}");
    assert!(said.contains(&plan.over[&group]), "{said:?}");
}

#[test]
fn a_guest_that_is_said_to_have_swap_and_does_not_use_it_is_not_squeezed() {
    // The guest's swap is full, or was never switched on.
    let full = Fake::busy("full", 340).standing_at(384);
    let idle = |name: &str| Fake::idle(name).standing_at(128).preallocated();
    let run = shop(1, [full, idle("a"), idle("b")]).run(200);
    assert!((0..200).all(|second| run.actual_mib("shop-full", second) == 384));
    assert!((0..200).all(|s| run.guest("shop-full", s).is_some_and(|g| g.swapped.is_zero())));
}

#[test]
fn a_host_that_is_short_takes_small_steps_from_guests_without_swap() {
    let others = sim::Load::Steps(vec![(0, Bytes::ZERO), (100, Bytes::mib(900))]);
    let bursting = Fake::bursting("brisk", 200, 100, 20, 90);
    let run = shop(1, [bursting, quiet("quiet")]).host(1_400, 200, others).run(400);
    assert_eq!(killed(&run), []);
    let largest = (1..400).filter_map(|s| run.guest("shop-quiet", s)).map(|g| g.inflated).max();
    assert!(largest.unwrap() <= Bytes::mib(10), "{largest:?} at once");
    assert!(run.actual_mib("shop-quiet", 399) < 384, "nothing was taken at all");
}
