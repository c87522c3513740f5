//! The group that KSM serves in each tick, and its state in the view.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use drivers::Records;
use drivers::journal::Journal;
use model::{DedupSpec, GroupSpec, KsmSpec, NamePattern};
use sys::ksm::Ksm;
use sys::mergeable::Process;

use super::*;
use crate::fixture;

/// One VM of group `web`, and one without a group.
fn world() -> (Spec, HostView) {
    let tick = fixture::published();
    let mut view = tick.view.clone();
    view.vms.remove(&"web-2".into());
    for (vm, pid) in view.vms.values_mut().zip([7, 8]) {
        (vm.pid, vm.incarnation) = (Some(pid), pid.into());
        vm.limits.insert(Mechanism::Dedup, NO_SHIM.to_owned());
    }
    ((*tick.spec).clone(), view)
}

fn all(view: &HostView) -> BTreeSet<VmName> {
    view.vms.keys().cloned().collect()
}

/// KSM of a host on which only VMs have mergeable memory.
fn host_ksm(dir: &Path) -> HostKsm {
    looking(dir, || Ok(Vec::new()))
}

fn looking(dir: &Path, look: Looking) -> HostKsm {
    let records = Records::new(Journal::open(dir).unwrap());
    HostKsm::new(Hand::new(Ksm::at(dir), records), look)
}

/// Ticks as the loop does, until `holds` returns true.
async fn until(
    ksm: &mut HostKsm,
    spec: &Spec,
    view: &mut HostView,
    holds: impl Fn(&HostKsm, &HostView) -> bool,
) {
    let waiting = async {
        loop {
            ksm.tick(spec, &BTreeMap::new(), view);
            if holds(ksm, view) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap();
}

fn why_not_merged(view: &HostView) -> &str {
    &view.vms[&"web-1".into()].limits[&Mechanism::Dedup]
}

#[test]
fn a_vm_that_is_merged_has_no_limit_and_one_that_is_not_says_why() {
    let (spec, mut view) = world();
    let (observed, web) = (all(&view), VmName::from("web-1"));
    let groups = show(&spec, &observed, Some("kernel KSM cannot keep groups apart: x"), &mut view);
    assert_eq!(groups.len(), 1, "a VM of no group is nobody's");
    let why = &view.vms[&web].limits[&Mechanism::Dedup];
    assert_eq!(*why, format!("{NO_SHIM}, and kernel KSM cannot keep groups apart: x"));
    assert_eq!(view.vms[&"db-1".into()].limits[&Mechanism::Dedup], NO_SHIM);
    let groups = show(&spec, &observed, None, &mut view);
    assert_eq!(groups, BTreeMap::from([("web".into(), None)]));
    assert!(!view.vms[&web].limits.contains_key(&Mechanism::Dedup));
}

#[test]
fn a_group_that_is_not_to_be_merged_keeps_its_own_reason() {
    let (mut spec, mut view) = world();
    spec.groups.get_mut(&"web".into()).unwrap().dedup = DedupSpec::Off;
    let observed = all(&view);
    assert!(show(&spec, &observed, Some("x"), &mut view).is_empty());
    assert_eq!(view.vms[&"web-1".into()].limits[&Mechanism::Dedup], NO_SHIM);
}

#[test]
fn the_reason_is_the_refusal_then_the_pause_then_the_trouble() {
    let web = GroupName::from("web");
    let trouble = KsmStatus { trouble: Some("broken".to_owned()), ..KsmStatus::default() };
    let refused = Err(KsmRefusal::Stranger("db-1".into()));
    let why = why_not(&refused, &trouble, true).unwrap();
    assert!(why.ends_with("VM db-1 belongs to no group"), "{why}");
    assert_eq!(why_not(&Ok(&web), &trouble, true).unwrap(), "Overbook is paused");
    assert_eq!(why_not(&Ok(&web), &trouble, false).unwrap(), "broken");
    let driven = KsmStatus { is_driven: true, ..KsmStatus::default() };
    assert_eq!(why_not(&Ok(&web), &driven, false), None);
    assert!(why_not(&Ok(&web), &KsmStatus::default(), false).unwrap().contains("for 10 s"));
}

fn qemu(pid: u32) -> (Identity, String) {
    (Identity { pid, start_ticks: 0 }, "web-1".to_owned())
}

#[tokio::test]
async fn it_serves_the_group_of_a_host_of_one_group_and_lets_go_with_a_second_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut ksm = host_ksm(dir.path());
    let (mut spec, mut view) = world();
    ksm.tick(&spec, &BTreeMap::new(), &mut view);
    assert_eq!(ksm.group, None, "db-1 belongs to no group");
    let stranger = view.vms.remove(&"db-1".into()).unwrap();
    ksm.tick(&spec, &BTreeMap::new(), &mut view);
    assert_eq!(ksm.group, None, "nobody has looked yet who else there is");
    until(&mut ksm, &spec, &mut view, |ksm, _| ksm.group == Some("web".into())).await;
    ksm.tick(&spec, &[qemu(7), qemu(8)].into(), &mut view);
    assert_eq!(ksm.group, None, "with the shim its worker merges it");
    let db = GroupSpec { vms: vec![NamePattern::new("db-*")], ..GroupSpec::default() };
    spec.groups.insert("db".into(), db);
    view.vms.insert("db-1".into(), stranger);
    ksm.tick(&spec, &BTreeMap::new(), &mut view);
    assert_eq!(ksm.group, None, "two groups");
    let why = &view.vms[&"web-1".into()].limits[&Mechanism::Dedup];
    assert!(why.contains("cannot keep groups apart: this host has VMs of"), "{why}");
}

#[tokio::test]
async fn a_process_that_is_no_vm_and_has_mergeable_memory_is_named_and_ends_it() {
    static HAS_STRANGER: AtomicBool = AtomicBool::new(false);
    let look = || {
        let process = |pid| Process { pid, program: "qemu".to_owned(), unknown: None };
        let strangers = HAS_STRANGER.load(Ordering::Relaxed).then(|| process(9));
        Ok([process(8)].into_iter().chain(strangers).collect())
    };
    let dir = tempfile::tempdir().unwrap();
    let mut ksm = looking(dir.path(), look);
    let (spec, mut view) = world();
    view.vms.remove(&"db-1".into());
    until(&mut ksm, &spec, &mut view, |ksm, _| ksm.group == Some("web".into())).await;
    HAS_STRANGER.store(true, Ordering::Relaxed);
    until(&mut ksm, &spec, &mut view, |ksm, _| ksm.group.is_none()).await;
    let why = why_not_merged(&view);
    assert!(why.contains("process 9 (\"qemu\") has mergeable memory"), "{why}");
}

#[tokio::test]
async fn without_its_key_it_serves_nobody_and_looks_at_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let mut ksm = looking(dir.path(), || panic!("nobody wants to know"));
    let (mut spec, mut view) = world();
    spec.host.ksm = KsmSpec::Off;
    view.vms.remove(&"db-1".into());
    ksm.tick(&spec, &BTreeMap::new(), &mut view);
    let why = why_not_merged(&view);
    assert_eq!(
        *why,
        format!("{NO_SHIM}, and kernel KSM is not driven (`ksm = \"off\"` in [host])")
    );
    assert_eq!((ksm.group.clone(), ksm.lookout.latest()), (None, None));
}

#[tokio::test]
async fn where_there_is_no_ksm_nothing_is_shown_and_a_release_has_nothing_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let mut ksm = host_ksm(dir.path());
    let (spec, mut view) = world();
    ksm.tick(&spec, &BTreeMap::new(), &mut view);
    assert_eq!(view.ksm, None);
    ksm.set_paused(true);
    assert_eq!(ksm.release().await, Ok(None));
}
