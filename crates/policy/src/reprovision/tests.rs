use model::{Bytes, Policy, reason::Pressure};
use proptest::prelude::*;

use super::{Shares, Standing, policy};

fn standing(grant: u64, room: u64, contribution: u64, swap: u64) -> Standing {
    Standing {
        grant: Bytes::mib(grant),
        grant_max: Bytes::mib(grant + room),
        contribution: Bytes::mib(contribution),
        demand: (swap > 0).then_some(Pressure::Swapping { per_second: Bytes::mib(swap) }),
        is_overloaded: false,
        can_take_more: true,
    }
}

fn mib(shares: &Shares) -> Vec<u64> {
    shares.grants.iter().map(|g| g.0 >> 20).collect()
}

#[test]
fn fair_gives_everybody_the_same_and_fills_the_small_ones() {
    let members = [standing(0, 10, 0, 0), standing(0, 500, 0, 9), standing(40, 500, 0, 0)];
    assert_eq!(mib(&policy(Policy::Fair).unwrap().share(&members, Bytes::mib(110))), [10, 50, 50]);
}

#[test]
fn entitlement_gives_in_proportion_to_contributions() {
    let members = [standing(0, 500, 30, 0), standing(0, 500, 10, 9), standing(0, 500, 0, 9)];
    assert_eq!(
        mib(&policy(Policy::Entitlement).unwrap().share(&members, Bytes::mib(80))),
        [60, 20, 0]
    );
}

#[test]
fn demand_gives_one_unit_to_each_that_swaps_and_leaves_the_rest() {
    let members = [standing(5, 500, 90, 0), standing(0, 500, 0, 9), standing(20, 4, 0, 1)];
    let shares = policy(Policy::Demand).unwrap().share(&members, Bytes::mib(125));
    assert_eq!(mib(&shares), [5, 10, 24]);
    assert_eq!(shares.unmet, None);
}

#[test]
fn demand_says_who_is_shortest_when_the_surplus_does_not_reach() {
    let members = [standing(0, 500, 0, 1), standing(0, 500, 0, 9)];
    let shares = policy(Policy::Demand).unwrap().share(&members, Bytes::mib(12));
    assert_eq!(mib(&shares), [6, 6]);
    assert_eq!(shares.unmet, Some((1, Bytes::mib(8))));
}

fn any_standing() -> impl Strategy<Value = Standing> {
    (0..400u64, 0..400u64, 0..400u64, 0..3u64, any::<bool>())
        .prop_map(|(g, r, c, s, can)| Standing { can_take_more: can, ..standing(g, r, c, s) })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn no_policy_hands_out_more_than_the_pool_or_beyond_a_maximum(
        members in prop::collection::vec(any_standing(), 0..12),
        surplus in 0..2_000u64,
    ) {
        let held: Bytes = members.iter().map(|m| m.grant).sum();
        let pool = held.plus(Bytes::mib(surplus));
        for kind in [Policy::Fair, Policy::Entitlement, Policy::Demand] {
            let shares = policy(kind).unwrap().share(&members, pool);
            prop_assert_eq!(shares.grants.len(), members.len());
            prop_assert!(shares.grants.iter().copied().sum::<Bytes>() <= pool, "{kind:?}");
            for (grant, member) in shares.grants.iter().zip(&members) {
                prop_assert!(*grant <= member.grant_max, "{kind:?}");
            }
        }
    }
}

#[test]
fn who_is_overloaded_is_not_served_in_units() {
    let overloaded = Standing { is_overloaded: true, ..standing(0, 300, 0, 9) };
    let share = |members: &[Standing], pool| {
        mib(&policy(Policy::Demand).unwrap().share(members, Bytes::mib(pool)))
    };
    assert_eq!(share(std::slice::from_ref(&overloaded), 400), [300]);
    assert_eq!(share(std::slice::from_ref(&overloaded), 200), [200]);
    // Nor is it served at the cost of other members that are short.
    assert_eq!(share(&[overloaded, standing(0, 300, 0, 5)], 40), [20, 10]);
}
