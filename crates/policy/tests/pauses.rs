//! A paused VM or group is left as it is: nothing is taken, and nothing is given.

mod world;

use model::{
    Bytes, DedupSpec, FreePages, Hold, Plan, Policy, Reading, Reason, Scope, spec::HostSpec,
};

use world::{GroupFixture, target_mib};

/// `idle` has 256 MiB above its base, and the group has to get by with less.
fn over_budget() -> GroupFixture {
    GroupFixture::new(Policy::Demand, Some(400)).vm("idle", 384, 300).vm("calm", 128, 60)
}

fn pause(world: &mut GroupFixture, scope: &Scope) {
    world.memory.pauses.add(scope, Hold::Kept);
}

fn first_refusal(plan: &Plan, vm: &str) -> String {
    plan.vms[&vm.into()].refusals.first().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn nothing_is_taken_from_a_paused_vm_and_its_reason_says_so() {
    for scope in [Scope::Vm("idle".into()), Scope::Group("g".into())] {
        let mut world = over_budget();
        pause(&mut world, &scope);
        world.seconds(120);
        assert_eq!(world.stands_at("idle"), 384, "{scope:?}");
        let said = first_refusal(&world.second(), "idle");
        assert!(said.starts_with("paused by the operator: nothing is changed on it"), "{said}");
        assert!(world.memory.pauses.remove(&scope));
        world.seconds(120);
        assert!(world.stands_at("idle") < 384, "after the pause, {scope:?}");
    }
}

#[test]
fn a_vm_that_is_resumed_by_name_has_the_time_of_grace_of_a_new_one() {
    let (mut world, scope) = (over_budget(), Scope::Vm("idle".into()));
    world.spec.host.grace = HostSpec::GRACE;
    pause(&mut world, &scope);
    world.seconds(120);
    assert!(world.memory.pauses.remove(&scope));
    // As the daemon does.
    world.memory.forget(|vm| vm.as_str() == "idle");
    for second in 1..HostSpec::GRACE.0 / 1_000 {
        let plan = world.second();
        assert_eq!(world.stands_at("idle"), 384, "{second}");
        let is_told = |reason: &Reason| matches!(reason, Reason::NewVm { .. });
        assert!(plan.vms[&"idle".into()].refusals.iter().any(is_told), "{second}");
    }
    world.seconds(120);
    assert!(world.stands_at("idle") < 384, "after the time of grace");
}

#[test]
fn a_pause_holds_what_was_taken_also_where_the_host_is_short() {
    let mut world = over_budget();
    world.seconds(120);
    let before = world.stands_at("idle");
    assert!(before < 384);
    pause(&mut world, &Scope::Vm("idle".into()));
    // The guest asks for its memory, and then the host for the guest's.
    for _ in 0..30 {
        assert_eq!(target_mib(&world.swap("idle"), "idle"), None);
    }
    world.available = Bytes::mib(1 << 10);
    world.seconds(60);
    assert_eq!(world.stands_at("idle"), before);
}

#[test]
fn the_other_vms_of_its_group_go_on() {
    let mut world = over_budget().vm("other", 384, 300);
    pause(&mut world, &Scope::Vm("idle".into()));
    world.seconds(120);
    assert_eq!(world.stands_at("idle"), 384);
    assert!(world.stands_at("other") < 384, "{}", world.stands_at("other"));
}

#[test]
fn no_freed_memory_is_taken_from_a_paused_vm() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 128, 40).vm("b", 128, 40);
    for name in ["a", "b"] {
        let gib = Bytes::mib(10 << 10);
        let free = FreePages { freed: gib, lazy: gib, handed_over: gib, ..FreePages::default() };
        let now = world.now;
        world.see(name).free_pages = Some(Reading::new(free, now));
    }
    pause(&mut world, &Scope::Vm("a".into()));
    world.available = Bytes::mib(60 << 10);
    let plan = world.seconds(3);
    assert_eq!(plan.takes.keys().map(model::VmName::as_str).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn a_paged_vm_is_announced_and_paged_only_after_its_pause() {
    let mut world = GroupFixture::new(Policy::Demand, Some(200)).paged_vm("cold", 384, 300);
    world.spec.groups.get_mut(&"g".into()).unwrap().cold = model::ColdSpec::WhenNeeded;
    pause(&mut world, &Scope::Vm("cold".into()));
    for _ in 0..60 {
        assert_eq!(world.second().actions(), []);
    }
    assert!(world.memory.pauses.remove(&Scope::Vm("cold".into())));
    let change = world.second().vms[&"cold".into()].change.clone().expect("an announcement");
    assert_eq!(change.reason, Reason::Paged);
}

#[test]
fn a_paused_group_is_not_scanned_for_identical_pages() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 128, 40);
    world.spec.groups.get_mut(&"g".into()).unwrap().dedup = DedupSpec::Adaptive;
    pause(&mut world, &Scope::Group("g".into()));
    let scan = world.second().scans[&"g".into()].clone();
    assert_eq!((scan.rate, scan.reason), (None, Reason::PausedAlone { name: "g".into() }));
}
