//! A QEMU that hangs, dies or comes back affects only its own VM.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use lab::machine;
use model::{Mode, VmName};
use overbook_tests::{BASE, Stage, hungry, idle};
use sys::process::Signal;

/// Whether QEMU answers and its statistics are recent.
fn is_served(stage: &Stage, name: &str) -> bool {
    let vm = stage.vm(name);
    vm["link_up"] == true && vm["stats_age_ms"].as_u64().is_some_and(|age| age < 6000)
}

fn incarnation(stage: &Stage, name: &str) -> u64 {
    let case = stage.daemon.case().unwrap();
    case.view.vms.get(&VmName::from(name)).map_or(0, |vm| vm.incarnation)
}

#[test]
fn a_stopped_qemu_is_unreachable_alone_and_fine_again_when_it_goes_on() {
    let guests = [hungry(), idle("calm"), idle("stuck")];
    let Some(stage) = Stage::start(Mode::Observe, &guests) else { return };
    let all = ["hungry", "calm", "stuck"];
    stage.until("all are served", |stage| all.iter().all(|guest| is_served(stage, guest)));
    stage.guest("stuck").process().signal(Signal::STOP).unwrap();
    stage.until("it is unreachable", |stage| stage.vm("stuck")["link_up"] == false);
    stage.daemon.set_mode(&stage.lab, Mode::Enforce).unwrap();
    stage.throughout(Duration::from_secs(5), "the others are served", |stage| {
        is_served(stage, "hungry") && is_served(stage, "calm")
    });
    stage.until("the hungry guest gets a grant", |stage| stage.balloon("hungry") > BASE);
    assert_eq!(stage.host()["unreachable_vms"], 1);
    assert_eq!(stage.vm("stuck")["link_up"], false);

    stage.guest("stuck").process().signal(Signal::CONT).unwrap();
    stage.until("it is served again", |stage| is_served(stage, "stuck"));
}

#[test]
fn a_killed_qemu_disappears_and_is_another_vm_when_it_is_started_again() {
    let Some(mut stage) = Stage::start(Mode::Enforce, &[hungry(), idle("calm")]) else { return };
    stage.until("hungry is being given memory", |stage| stage.balloon("hungry") > BASE);
    let first = incarnation(&stage, "hungry");
    stage.guest("hungry").process().signal(Signal::KILL).unwrap();
    stage.until("it has disappeared", |stage| stage.vm("hungry").is_null());
    assert!(is_served(&stage, "calm"));
    assert_eq!(stage.balloon("calm"), BASE);

    let (again, with) = (stage.guest("hungry"), &stage.provisions);
    let (spec, files) = (again.spec().clone(), again.files().clone());
    let command = machine::command(&spec, &files, &with.qemu, &with.image, with.accel);
    stage.lab.spawn("hungry-again", command).unwrap();
    stage.until("it is found", |stage| is_served(stage, "hungry"));
    assert_ne!(incarnation(&stage, "hungry"), first);
    assert!(stage.guest("calm").alive());
}
