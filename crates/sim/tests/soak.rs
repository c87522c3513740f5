//! Whole fleets of random guests: no guest is harmed except by its own misbehaviour.

use fastrand::Rng;
use model::{Bytes, Policy, VmName};
use sim::{Access, Fake, Harm, Lie, Load, Nature, Scenario, limits};

const FLEETS: u64 = 150;
const SECONDS: u64 = 300;
const START_S: usize = 5;

/// A random guest that wants up to `most` MiB, and may misbehave.
fn any_guest(name: usize, most: u64, rng: &mut Rng) -> Fake {
    let mut some = || Bytes::mib(rng.u64(5..most));
    let (low, high) = (some().min(Bytes::mib(60)), some());
    let load = match rng.u8(0..4) {
        0 => Load::steady(high),
        1 => Load::Oscillating { low, high, period: rng.u64(10..120), busy: rng.u64(3..60) },
        _ => Load::Steps(vec![(0, low), (rng.u64(20..200), high), (rng.u64(200..280), low)]),
    };
    let fake = Fake::new(format!("{name}"), load).standing_at(rng.u64(128..384));
    let fake = fake.caching(rng.choice([0, 0, 50, 200]).unwrap_or(0));
    let fake = if rng.bool() { fake.preallocated() } else { fake };
    let references = 10f64.powf(rng.f64() * 4.0);
    let fake = match rng.u8(0..3) {
        0 => fake.accessing(Access::even(references)),
        1 => fake.accessing(Access::cyclic(references)),
        _ => fake,
    };
    let from = rng.u64(0..SECONDS);
    match rng.u8(0..16) {
        0 => fake.that(Nature::StuckBalloon { from }),
        1 => fake.that(Nature::SlowBalloon { per_second: Bytes::mib(rng.u64(1..20)) }),
        2 => fake.that(Nature::LyingStats(Lie::Hungry)),
        3 => fake.that(Nature::LyingStats(Lie::Impossible)),
        4 => fake.that(Nature::FrozenStats { from }),
        5 => fake.that(Nature::SwapStorm),
        6 => fake.that(Nature::VanishingVm { at: from, away: rng.u64(1..40) }),
        7 => fake.that(Nature::Migrating { from, until: from + 40 }),
        8 => fake.that(Nature::LyingStats(Lie::Idle)),
        _ => fake,
    }
}

/// Whether the policy is to blame: the guests in question are what they seem to be.
///
/// Right after the start, guests that have not yet sent statistics are spared, and the others bear
/// a deficit alone. The shares of `fair` and `entitlement` follow the surplus by design, up and
/// down.
fn is_to_blame(second: usize, harm: &Harm, policy: Policy, fleet: &[(String, Fake)]) -> bool {
    let is_plain = |vm: &VmName| {
        fleet.iter().any(|(name, fake)| name == vm.as_str() && fake.natures.is_empty())
    };
    match harm {
        Harm::TakenFromSuffering { vm, instead } => {
            second > START_S && is_plain(vm) && is_plain(instead)
        }
        Harm::Oscillation { vm } => {
            matches!(policy, Policy::Demand | Policy::Balance) && is_plain(vm)
        }
        Harm::OverBudget { .. } => fleet.iter().all(|(_, fake)| fake.natures.is_empty()),
        harm => harm.victim().is_none_or(is_plain),
    }
}

#[test]
fn no_fleet_is_harmed_whatever_its_members_do() {
    let (mut faults, mut lent) = (String::new(), 0);
    for seed in 0..FLEETS {
        let mut rng = Rng::with_seed(seed);
        let mut scenario = Scenario::new(seed);
        let mut fleet = Vec::new();
        let policies = [Policy::Fair, Policy::Entitlement, Policy::Demand, Policy::Balance];
        let policy = policies[rng.usize(0..4)];
        let lends = rng.bool();
        for group in ["shop", "lab"] {
            // A group that needs all its memory, or has granted it, lends nothing.
            let is_lender = lends && group == "lab";
            let most = if is_lender { 150 } else { 300 };
            let count = rng.usize(2..7);
            let fakes = (0..count).map(|i| any_guest(i, most, &mut rng));
            let at_base = |fake: Fake| if is_lender { fake.standing_at(128) } else { fake };
            let fakes: Vec<Fake> = fakes.map(at_base).collect();
            fleet.extend(fakes.iter().map(|f| (format!("{group}-{}", f.name), f.clone())));
            scenario = scenario.group(group, policy, limits(64, 128, 384), fakes);
        }
        if lends {
            scenario = scenario.lending(["shop", "lab"]);
        }
        let run = scenario.restarts_at([2]).run(SECONDS);
        lent += run.seconds.iter().filter(|second| !second.plan.loans.is_empty()).count();
        let is_fault = |(second, harm): &(usize, &Harm)| is_to_blame(*second, harm, policy, &fleet);
        for (second, harm) in run.harms().filter(is_fault) {
            faults += &format!("seed {seed}, {second} s: {harm}\n");
        }
    }
    assert!(faults.is_empty(), "{faults}");
    assert!(lent > 1_000, "hardly anybody lends: {lent} seconds in all");
}
