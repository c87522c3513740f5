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
fn good() -> Round {
    let pair = |job: Job| {
        let first = jobs::group(FIRST, &[job, job, MASTER, MASTER], 1);
        let guests = [first, jobs::group(SECOND, &[MEMHOG; OTHERS], 100)].concat();
        let (group, system) = (course(15.0, 0, &guests), course(10.0, 10, &guests));
        Pair { job: job.name, guests, group, system }
    };
    MAPREDUCE.into_iter().map(pair).collect()
}

fn rounds(change: impl Fn(&mut Round)) -> Vec<Round> {
    let mut rounds: Vec<Round> = (0..ROUNDS).map(|_| good()).collect();
    change(&mut rounds[0]);
    rounds
}

fn figures(rounds: &[Round]) -> Figures {
    Figures::invented(HOG.name, |figures| add_hogs(figures, rounds))
}

#[test]
fn groups_are_set_against_none_and_hogs_take_something_only_without() {
    assert_eq!(BASE, good()[0].guests[0].memory_base);
    let figures = figures(&rounds(|_| ()));
    figures.assert_near(&[
        ("mr_grp_vs_nogrp", 1.5),
        ("hog_taken_grp", 0.0),
        ("hog_taken_nogrp", 20.0),
    ]);
    assert!(figures.passed(), "{}", figures.to_table());
}

#[test]
fn ways_that_are_swapped_and_one_slow_round_of_six_miss() {
    let swapped = rounds(|_| ());
    let swap = |pair: Pair| Pair { group: pair.system, system: pair.group, ..pair };
    let swapped: Vec<Round> =
        swapped.into_iter().map(|round| round.into_iter().map(swap).collect()).collect();
    let all = figures(&swapped);
    for name in ["mr_grp_vs_nogrp", "hog_taken_grp", "hog_taken_nogrp"] {
        assert!(!all.met(name), "{name}");
    }
    let slow = figures(&rounds(|round| round[0].group.speeds = vec![1.0; 6]));
    assert!(!slow.met("mr_grp_vs_nogrp"));
}

#[test]
fn the_least_that_hogs_take_misses() {
    let little = rounds(|round| round[1].group = course(15.0, 1, &round[1].guests));
    assert!(!figures(&little).met("hog_taken_grp"));
}

#[test]
fn a_guest_that_is_missing_or_silent_or_was_not_read_is_no_number() {
    let silent = figures(&rounds(|round| round[2].group.speeds[0] = f64::NAN));
    let missing = figures(&rounds(|round| round[2].system.speeds.clear()));
    for figures in [silent, missing] {
        assert!(figures.value("mr_grp_vs_nogrp").is_nan());
    }
    let unread = figures(&rounds(|round| round[0].group.ticks.clear()));
    assert!(unread.value("hog_taken_grp").is_nan());
}
