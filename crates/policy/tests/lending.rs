//! Lending between groups, second by second.

mod world;

use model::{
    Bytes, DedupSpec, GroupName, GroupSpec, Loan, Mode, NamePattern, Plan, Policy, Reading, Reason,
    Time, spec::LendSpec,
};
use policy::Memory;
use proptest::prelude::*;

use world::{GroupFixture, target_mib};

/// Group `g` whose VM `hungry` fills its budget, and group `rich`, which pays for 400 MiB and
/// leaves most of it unused; both take part.
fn world() -> GroupFixture {
    let mut world =
        GroupFixture::new(Policy::Demand, None).vm("hungry", 128, 8).vm("owner", 128, 60);
    world.see("hungry").used = Some(Reading::new(Bytes::mib(120), world.now));
    let group = world.spec.groups.get_mut(&"g".into()).expect("the world's group");
    (group.vms, group.lend) = (vec![NamePattern::new("hungry")], LendSpec::Open(true));
    let vms = vec![NamePattern::new("owner")];
    let rich = GroupSpec { vms, budget: Some(Bytes::mib(400)), ..group.clone() };
    world.spec.groups.insert("rich".into(), rich);
    world
}

/// Runs seconds in which `hungry` swaps, and touches all memory that it is given.
fn starve(world: &mut GroupFixture, seconds: u64) -> Plan {
    let mut plan = Plan::default();
    for _ in 0..seconds {
        let has = world.see("hungry").balloon;
        world.see("hungry").used = has;
        plan = world.swap("hungry");
    }
    plan
}

fn lent(plan: &Plan) -> u64 {
    plan.loans.get(&"rich".into()).map_or(0, |loan| loan.amount.0 >> 20)
}

fn why(plan: &Plan) -> &Reason {
    &plan.loans[&"rich".into()].reason
}

#[test]
fn what_one_group_leaves_idle_is_granted_to_another_that_swaps() {
    let mut world = world();
    let plan = starve(&mut world, 30);
    assert!(lent(&plan) > 100, "{:?}", plan.loans);
    assert!(world.stands_at("hungry") > 128 + 100, "{}", world.stands_at("hungry"));
    let (g, rich) = (plan.groups[&"g".into()], plan.groups[&"rich".into()]);
    assert_eq!((g.borrowed, rich.lent), (rich.lent, g.borrowed));
    assert!(g.deficit.is_zero() && rich.deficit.is_zero());
}

#[test]
fn a_loan_ends_when_its_owner_swaps_who_is_granted_its_own_in_the_same_second() {
    let mut world = world();
    starve(&mut world, 30);
    let plan = world.swap("owner");
    assert_eq!(lent(&plan), 0);
    assert!(matches!(why(&plan), Reason::LoanRecalled { .. }), "{:?}", why(&plan));
    assert_eq!(target_mib(&plan, "owner"), Some(138));
    let before = world.stands_at("hungry");
    let change = plan.vms[&"hungry".into()].change.clone().expect("a grant that comes back");
    assert!(change.is_take && matches!(change.reason, Reason::Deficit { .. }), "{change:?}");
    for _ in 0..30 {
        let has = world.see("hungry").balloon;
        world.see("hungry").used = has;
        world.swap("owner");
    }
    assert!(before > 228 && world.stands_at("hungry") <= 128, "{}", world.stands_at("hungry"));
}

#[test]
fn the_owners_base_comes_back_at_once_while_it_lends() {
    let mut world = world();
    world.see("owner").balloon = Some(Reading::new(Bytes::mib(80), world.now));
    world.see("owner").used = Some(Reading::new(Bytes::mib(80), world.now));
    assert!(lent(&starve(&mut world, 30)) > 0);
    assert_eq!(target_mib(&world.swap("owner"), "owner"), Some(128));
}

#[test]
fn without_consent_of_both_nobody_lends_and_a_vm_that_is_short_says_so() {
    for silent in ["g", "rich"] {
        let mut world = world();
        world.spec.groups.get_mut(&silent.into()).expect("a group").lend = LendSpec::Open(false);
        let plan = starve(&mut world, 30);
        assert_eq!(plan.loans.len(), 0, "{silent}");
        let refusals = &plan.vms[&"hungry".into()].refusals;
        assert_eq!(refusals.contains(&Reason::NoLender), silent == "rich", "{refusals:?}");
    }
}

#[test]
fn a_daemon_that_has_forgotten_a_loan_takes_back_what_was_borrowed() {
    let mut world = world();
    starve(&mut world, 30);
    world.memory = Memory::default();
    starve(&mut world, 2);
    assert!(!world.second().groups[&"g".into()].deficit.is_zero());
    world.seconds(3);
    assert!(world.stands_at("hungry") < 228, "{}", world.stands_at("hungry"));
}

#[test]
fn a_paused_overbook_lends_nothing() {
    let mut world = world();
    starve(&mut world, 30);
    world.memory.paused = true;
    let plan = starve(&mut world, 1);
    assert_eq!((lent(&plan), why(&plan)), (0, &Reason::Paused));
    assert!(starve(&mut world, 1).loans.is_empty());
}

#[test]
fn a_groups_own_idle_memory_is_taken_while_it_borrows() {
    let mut world = world().vm("hungry-too", 128, 90);
    world.spec.groups.get_mut(&"g".into()).expect("a group").vms.push(NamePattern::new("hungry-*"));
    let plan = starve(&mut world, 30);
    assert!(lent(&plan) > 0);
    assert!(world.stands_at("hungry-too") < 128, "{}", world.stands_at("hungry-too"));
}

#[test]
fn while_it_lends_a_groups_worker_scans_for_the_borrower_and_at_its_cost() {
    let mut world = world();
    world.cpu_busy = Some(1.0);
    for group in world.spec.groups.values_mut() {
        group.dedup = DedupSpec::Adaptive;
    }
    let scan = |plan: &Plan| plan.scans[&"rich".into()].clone();
    let before = scan(&starve(&mut world, 9));
    assert_eq!((before.payer, before.reason), (None, Reason::CpuBusy { busy_percent: 100 }));
    let lending = scan(&starve(&mut world, 10));
    assert_eq!(lending.payer, Some("g".into()));
    assert_eq!(lending.reason, Reason::ScanUnproductive { swapped: Bytes::mib(10) });
    assert_eq!(scan(&world.swap("owner")).payer, None);
    world.spec.modes.balloon = Mode::Recommend;
    let plan = starve(&mut world, 30);
    assert!(lent(&plan) > 0 && scan(&plan).payer.is_none(), "what is not lent is not paid for");
}

/// The events of a second: the VMs that swap, and the memory that the owner's group occupies, in
/// MiB.
type Second = (bool, bool, u64);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn loans_never_exceed_what_is_idle_and_end_when_the_owner_is_short(
        seconds in prop::collection::vec(
            (prop::bool::weighted(0.9), prop::bool::weighted(0.05), 60..300u64), 40..80),
    ) {
        let mut world = world();
        let budgets = Bytes::mib(128 + 400);
        let mut has_lent = false;
        for (i, (is_hungry, is_owner_short, used)) in seconds.into_iter().enumerate() {
            let settled = if i < 20 { (true, false, 100) } else { (is_hungry, is_owner_short, used) };
            let plan = live(&mut world, settled);
            let (g, rich) = (plan.groups[&"g".into()], plan.groups[&"rich".into()]);
            prop_assert_eq!(g.borrowed, rich.lent);
            prop_assert_eq!(g.budget.plus(g.borrowed).plus(rich.budget.minus(rich.lent)), budgets);
            let idle = Bytes::mib(400).minus(Bytes::mib(settled.2).plus(rich.reserve));
            prop_assert!(rich.lent <= idle, "{rich:?}");
            prop_assert!(!settled.1 || rich.lent.is_zero(), "the owner is short: {rich:?}");
            has_lent |= !rich.lent.is_zero();
        }
        prop_assert!(has_lent);
    }
}

fn live(world: &mut GroupFixture, (is_hungry, is_owner_short, used): Second) -> Plan {
    world.see("owner").used = Some(Reading::new(Bytes::mib(used), world.now));
    let has = world.see("hungry").balloon;
    world.see("hungry").used = has;
    let swapping = [("hungry", is_hungry), ("owner", is_owner_short)];
    for (name, _) in swapping.into_iter().filter(|(_, swaps)| *swaps) {
        let swapped = world.tell(name).swap_in.unwrap_or_default();
        world.tell(name).swap_in = Some(swapped.plus(Bytes::mib(10)));
    }
    world.second()
}

#[test]
fn what_was_remembered_before_there_was_lending_still_reads() {
    let mut world = world();
    world.second();
    let mut memory = serde_json::to_value(&world.memory).unwrap();
    memory.as_object_mut().unwrap().remove("lending").unwrap();
    world.memory = serde_json::from_value(memory).unwrap();
    assert!(lent(&starve(&mut world, 30)) > 0);
}

#[test]
fn a_loan_survives_an_export() {
    let mut world = world();
    starve(&mut world, 30);
    let text = serde_json::to_string(&world.memory).unwrap();
    assert_eq!(serde_json::from_str::<Memory>(&text).unwrap(), world.memory);
    let plan = serde_json::to_string(&starve(&mut world, 1)).unwrap();
    let plan: Plan = serde_json::from_str(&plan).unwrap();
    let loans: Vec<(&GroupName, &Loan)> = plan.loans.iter().collect();
    assert_eq!(loans.len(), 1);
    assert!(plan.at > Time(0));
}
