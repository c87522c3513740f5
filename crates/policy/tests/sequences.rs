//! Short sequences of events in which a VM could lose what it is owed, one second a line.

mod world;

use model::{Bytes, Migration, Mode, Policy, Reading, Reason, VmView, view::ManagerRecord};

use world::{GroupFixture, target_mib};

#[test]
fn a_vm_is_at_its_max_while_its_balloon_holds_nothing_of_it() {
    let mut world = GroupFixture::new(Policy::Demand, Some(512)).vm("a", 128, 60);
    let max = world.second().vms[&"a".into()].limits.expect("a member").max;
    for (balloon, is_at_max) in [(max, true), (max.minus(Bytes::mib(1)), false)] {
        world.see("a").balloon = Some(Reading::new(balloon, world.now));
        assert_eq!(world.second().vms[&"a".into()].is_at_max, is_at_max, "{balloon}");
    }
}

#[test]
fn a_vm_left_alone_in_its_group_gets_its_base_back() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 80, 8);
    world.seconds(310);
    assert_eq!(world.stands_at("a"), 128);
}

#[test]
fn a_daemon_that_forgot_who_is_short_does_not_hand_base_back_at_once() {
    let mut world = GroupFixture::new(Policy::Demand, Some(1024)).vm("a", 80, 8);
    world.seconds(30);
    assert_eq!(world.stands_at("a"), 80);
}

#[test]
fn idle_memory_moves_although_page_tables_put_the_group_over_its_budget() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    for name in ["idle", "short"] {
        world.see(name).used = Some(Reading::new(Bytes::mib(129), world.now));
    }
    (0..15).for_each(|_| drop(world.swap("short")));
    assert!(world.stands_at("idle") < 128, "the group is stuck in a deficit of 2 MiB");
}

#[test]
fn a_vm_that_was_never_reached_still_occupies_its_base() {
    let mut world =
        GroupFixture::new(Policy::Demand, Some(256)).unreached("unseen").vm("short", 128, 8);
    world.seconds(5);
    let plan = (0..5).map(|_| world.swap("short")).last().expect("five seconds");
    assert_eq!(plan.groups[&"g".into()].surplus, Bytes::ZERO);
    assert_eq!(world.stands_at("short"), 128, "it was given what the unseen VM occupies");
}

#[test]
fn a_balloon_that_could_not_follow_is_not_accused() {
    let is_accused = |r: &Reason| matches!(r, Reason::Uncooperative { .. });
    let accused = |hinder: fn(&mut VmView, bool)| {
        let mut world =
            GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
        world.see("idle").used = Some(Reading::new(Bytes::mib(128), world.now));
        while target_mib(&world.swap("short"), "idle").is_none() {}
        // For a while the guest can do nothing.
        hinder(world.see("idle"), true);
        let accused = |world: &mut GroupFixture| {
            world.see("idle").balloon = Some(Reading::new(Bytes::mib(128), world.now));
            world.second().vms[&"idle".into()].refusals.iter().any(is_accused)
        };
        let meanwhile = (0..60).filter(|_| accused(&mut world)).count();
        hinder(world.see("idle"), false);
        meanwhile > 0 || accused(&mut world)
    };
    assert!(accused(|_, _| {}), "it could follow");
    assert!(!accused(|vm, is_hindered| {
        vm.migration = if is_hindered { Migration::Active } else { Migration::None };
    }));
}

#[test]
fn a_vm_whose_manager_moves_the_balloon_is_left_alone_with_the_remedy() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    let remedy = "qm set 101 --shares 0".to_owned();
    let balances = Some(remedy.clone());
    for name in ["idle", "short"] {
        let record = ManagerRecord { balances: balances.clone(), ..ManagerRecord::default() };
        world.see(name).manager = Some(record);
    }
    for _ in 0..40 {
        let plan = world.swap("short");
        assert!(plan.actions().is_empty(), "{plan:?}");
        let expected = Reason::ManagersBalloon { remedy: remedy.clone() };
        assert!(plan.vms[&"idle".into()].refusals.contains(&expected));
    }
    for name in ["idle", "short"] {
        world.see(name).manager = None;
    }
    assert!((0..40).any(|_| target_mib(&world.swap("short"), "idle").is_some()));
}

#[test]
fn a_guest_that_was_rebooted_before_it_ever_swapped_is_left_to_settle() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    world.tell("idle").swap_out = Some(Bytes::ZERO);
    world.spec.vms.entry("idle".into()).or_default().swap = Some(true);
    world.seconds(15);
    world.tell("idle").minor_faults = Some(10);
    let plan = world.swap("short");
    assert_eq!(target_mib(&plan, "idle"), None);
    assert!(plan.vms[&"idle".into()].refusals.contains(&Reason::CountersWentBack));
}

#[test]
fn a_guest_that_came_back_without_swap_counts_as_swapless() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    world.second();
    world.tell("idle").swap_out = Some(Bytes::ZERO);
    (0..40).for_each(|_| drop(world.swap("short")));
    assert_eq!(world.stands_at("idle"), 128);
}

#[test]
fn what_was_under_way_before_a_pause_is_not_said_again_after_it() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    while target_mib(&world.swap("short"), "idle").is_none() {}
    world.see("idle").balloon = Some(Reading::new(Bytes::mib(128), world.now));
    world.memory.paused = true;
    world.seconds(300);
    world.memory.paused = false;
    assert_eq!(target_mib(&world.second(), "idle"), None);
}

#[test]
fn an_operator_who_moves_a_balloon_while_overbook_only_observes_is_no_stranger() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    while target_mib(&world.swap("short"), "idle").is_none() {}
    world.second();
    world.spec.modes.balloon = Mode::Observe;
    world.seconds(10);
    world.see("idle").balloon = Some(Reading::new(Bytes::mib(200), world.now));
    let plan = world.second();
    let is_stranger = |r: &Reason| matches!(r, Reason::MovedByOthers { .. });
    assert!(!plan.vms[&"idle".into()].refusals.iter().any(is_stranger));
}

#[test]
fn many_short_guests_share_even_a_small_surplus() {
    let names: Vec<String> = (0..20).map(|i| format!("short{i}")).collect();
    let budget = 20 * 128 * 100 / 96 + 30;
    let mut world =
        names.iter().fold(GroupFixture::new(Policy::Demand, Some(budget)), |world, name| {
            world.vm(name, 128, 8)
        });
    world.second();
    for name in &names {
        world.tell(name).swap_in = Some(Bytes::mib(10));
    }
    let plan = world.second();
    assert!(plan.groups[&"g".into()].surplus >= Bytes::mib(20), "{:?}", plan.groups);
    assert!(!plan.actions().is_empty(), "the surplus is handed to nobody");
}

#[test]
fn one_report_of_free_memory_is_not_spent_twice() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 30).vm("short", 128, 8);
    (0..10).for_each(|_| drop(world.swap("short")));
    world.silent = Some("idle");
    (0..5).for_each(|_| drop(world.swap("short")));
    assert!((110..128).contains(&world.stands_at("idle")), "{} left", world.stands_at("idle"));
}

#[test]
fn statistics_that_come_and_go_do_not_move_memory_back_and_forth() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("idle", 128, 90).vm("short", 128, 8);
    let mut given_back = 0;
    for second in 0..600 {
        let stats = world.see("idle").stats;
        if second % 20 >= 14 {
            world.see("idle").stats = None;
        }
        given_back += usize::from(target_mib(&world.swap("short"), "idle") == Some(128));
        world.see("idle").stats = stats;
    }
    assert!(given_back <= 5, "{given_back} times");
}

#[test]
fn nothing_that_cannot_be_taken_back_is_granted() {
    for policy in [Policy::Fair, Policy::Entitlement, Policy::Demand] {
        let mut world = GroupFixture::new(policy, Some(1024)).vm("silent", 128, 60);
        world.see("silent").stats = None;
        world.seconds(30);
        assert_eq!(world.stands_at("silent"), 128, "{policy:?}");
    }
}
