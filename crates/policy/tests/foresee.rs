//! The expected changes under a configuration are those that the policy then makes.

mod world;

use model::{Bytes, Mode, Policy, spec::HostSpec};
use policy::Case;

use world::GroupFixture;

fn case(world: &GroupFixture) -> Case {
    let GroupFixture { now, spec, view, memory, .. } = world;
    Case { now: *now, spec: spec.clone(), view: view.clone(), memory: memory.clone() }
}

/// A group within its budget.
fn within_budget() -> GroupFixture {
    let mut world =
        GroupFixture::new(Policy::Demand, Some(1024)).vm("a", 228, 150).vm("b", 128, 40);
    world.seconds(20);
    world
}

#[test]
fn a_smaller_budget_takes_what_was_foreseen() {
    let mut world = within_budget();
    assert!(case(&world).foresee().is_empty(), "nothing changes without a change");
    let group = world.spec.groups.values_mut().next().unwrap();
    group.budget = Some(Bytes::mib(256));
    // Neither the time of grace nor a pause hides the outcome.
    world.spec.host.grace = HostSpec::GRACE;
    world.memory.begin_grace(HostSpec::GRACE, world.now);
    world.memory.paused = true;
    let foreseen = case(&world).foresee();
    assert_eq!(foreseen.keys().map(|name| name.as_str()).collect::<Vec<_>>(), ["a"]);
    let change = &foreseen[&"a".into()];
    assert_eq!(change.from, Bytes::mib(228));
    world.memory.paused = false;
    world.seconds(200);
    assert_eq!(change.to, Bytes::mib(world.stands_at("a")), "{change:?}");
    assert!(change.to < change.from && change.within.0 > 0, "{change:?}");
}

#[test]
fn a_mode_that_changes_nothing_has_no_expected_changes() {
    let mut world = within_budget();
    world.spec.groups.values_mut().next().unwrap().budget = Some(Bytes::mib(256));
    for mode in [Mode::Observe, Mode::Recommend] {
        world.spec.modes.balloon = mode;
        assert!(case(&world).foresee().is_empty(), "{mode}");
    }
}
