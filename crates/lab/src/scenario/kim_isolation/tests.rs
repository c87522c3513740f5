//! Figures of invented courses, without guests.

use model::{HostView, Link, Plan, Reading, Time, VmView, config};
use policy::{Case, Memory};

use super::*;
use crate::fleet::BASE;

/// Four guests of the first group and two of the other; each has `beyond_mib` more than it pays
/// for in the second tick.
fn course(speed: f64, beyond_mib: u64, guests: &[MachineSpec]) -> SharingRun {
    let tick = |second: u64, mib: u64| {
        let now = Time(second * 1000);
        let vm = |guest: &MachineSpec| {
            let used = guest.memory_base.plus(Bytes::mib(mib));
            let used = Some(Reading::new(used, now));
            (VmName::from(guest.name.as_str()), VmView { used, ..VmView::unknown(Link::Up) })
        };
        let view = HostView { vms: guests.iter().map(vm).collect(), ..HostView::default() };
        let spec = config::parse(&[]).unwrap();
        let case = Case { now, spec, view, memory: Memory::default() };
        let plan = Plan { at: now, ..Plan::default() };
        Tick { at_s: second as f64, case, plan }
    };
    let ticks = vec![tick(1, 0), tick(2, beyond_mib)];
    SharingRun { speeds: vec![speed; guests.len()], cpu_busy: 1.0, ticks }
}

/// Guests are half as fast again in groups, and the hogs take 10 MiB each without.
fn good() -> Vec<Beside> {
    let beside = |job: Job| {
        let guests = guests(job, MEMHOG, 1);
        let round = |_| vec![(GRP, course(15.0, 0, &guests)), (NOGRP, course(10.0, 10, &guests))];
        let courses = Arms((0..ROUNDS).map(round).collect());
        Beside { job: job.name, guests, courses }
    };
    MAPREDUCE.into_iter().map(beside).collect()
}

/// Figures of good courses, of which some were changed.
fn figures(change: impl Fn(&mut [Beside])) -> Figures {
    let mut all = good();
    change(&mut all);
    Figures::invented(HOG.name, |figures| add_hogs(figures, &all))
}

/// A job's course in groups or without, in the first round.
fn first<'a>(all: &'a mut [Beside], job: usize, arm: &str) -> &'a mut SharingRun {
    let round = &mut all[job].courses.0[0];
    &mut round.iter_mut().find(|(name, _)| *name == arm).unwrap().1
}

#[test]
fn groups_are_set_against_none_and_hogs_take_something_only_without() {
    assert_eq!(BASE, good()[0].guests[0].memory_base);
    let figures = figures(|_| ());
    figures.assert_near(&[
        ("mr_grp_vs_nogrp", 1.5),
        ("hog_taken_grp", 0.0),
        ("hog_taken_nogrp", 20.0),
    ]);
    assert!(figures.passed(), "{}", figures.to_table());
}

#[test]
fn ways_that_are_swapped_and_one_slow_round_of_six_miss() {
    let all = figures(|all| {
        for round in all.iter_mut().flat_map(|beside| &mut beside.courses.0) {
            (round[0].0, round[1].0) = (NOGRP, GRP);
        }
    });
    for name in ["mr_grp_vs_nogrp", "hog_taken_grp", "hog_taken_nogrp"] {
        assert!(!all.met(name), "{name}");
    }
    assert!(!figures(|all| first(all, 0, GRP).speeds = vec![1.0; 6]).met("mr_grp_vs_nogrp"));
}

#[test]
fn the_least_that_hogs_take_misses() {
    let little = figures(|all| *first(all, 1, GRP) = course(15.0, 1, &good()[1].guests));
    assert!(!little.met("hog_taken_grp"));
}

#[test]
fn a_guest_that_is_missing_or_silent_or_was_not_read_is_no_number() {
    let silent = figures(|all| first(all, 2, GRP).speeds[0] = f64::NAN);
    let missing = figures(|all| first(all, 2, NOGRP).speeds.clear());
    for figures in [silent, missing] {
        assert!(figures.value("mr_grp_vs_nogrp").is_nan());
    }
    let unread = figures(|all| first(all, 0, GRP).ticks.clear());
    assert!(unread.value("hog_taken_grp").is_nan());
}
