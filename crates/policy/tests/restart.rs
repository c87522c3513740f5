//! A daemon that has just started must not act on what it does not know yet.

use std::collections::BTreeMap;

use model::{
    Bytes, GroupSpec, GuestStats, HostReading, HostView, Link, Migration, NamePattern, Plan,
    Reading, Spec, Time, VmView,
    spec::{ApiSpec, HostSpec, LimitsSpec, Modes},
};
use policy::Memory;

fn spec() -> Spec {
    let limits = LimitsSpec {
        min: Some(Bytes::mib(64)),
        base: Some(Bytes::mib(128)),
        max: Some(Bytes::mib(384)),
    };
    let vms = vec![NamePattern::new("*")];
    let group = GroupSpec { vms, limits, ..GroupSpec::default() };
    Spec {
        host: HostSpec { reserve: None, qmp: Vec::new(), state: "/".into() },
        modes: Modes { balloon: model::Mode::Enforce },
        api: ApiSpec { socket: "/".into(), tcp: None, token_file: None },
        groups: BTreeMap::from([("shop".into(), group)]),
        vms: BTreeMap::new(),
    }
}

fn vm(balloon: u64, used: Option<u64>, now: Time) -> VmView {
    let stats = GuestStats {
        total: Some(Bytes::mib(87)),
        free: Some(Bytes::mib(40)),
        available: Some(Bytes::mib(40)),
        ..GuestStats::default()
    };
    VmView {
        incarnation: 1,
        link: Link::Up,
        ram: Bytes::mib(384),
        balloon: Some(Reading::new(Bytes::mib(balloon), now)),
        stats: Some(Reading::new(stats, now)),
        used: used.map(|used| Reading::new(Bytes::mib(used), now)),
        block: None,
        migration: Migration::None,
        limits: BTreeMap::new(),
        last_error: None,
    }
}

/// One guest with a grant of 100 MiB beside three that occupy 76 of their 128 MiB, if they are counted.
fn plan_at(second: u64, memory: &mut Memory, is_counted: bool) -> Plan {
    let now = Time(second * 1000);
    let used = |used| is_counted.then_some(used);
    let host = HostReading {
        total: Bytes::mib(8192),
        available: Bytes::mib(4096),
        ..HostReading::default()
    };
    let mut vms = BTreeMap::from([("hungry".into(), vm(228, used(228), now))]);
    vms.extend(["a", "b", "c"].map(|name| (name.into(), vm(128, used(76), now))));
    let view = HostView { host: Some(Reading::new(host, now)), vms };
    policy::tick(&view, &spec(), memory, now)
}

#[test]
fn no_grant_is_revoked_over_a_deficit_that_is_only_a_guess() {
    let mut memory = Memory::default();
    for second in 1..5 {
        let plan = plan_at(second, &mut memory, false);
        assert!(plan.actions().is_empty(), "{second}: {:?}", plan.actions());
    }
    assert!(plan_at(6, &mut memory, true).actions().is_empty());
}

#[test]
fn a_vm_that_cannot_be_counted_at_all_is_taken_to_use_what_it_may() {
    let mut memory = Memory::default();
    let revoked = (1..20).any(|second| !plan_at(second, &mut memory, false).actions().is_empty());
    assert!(revoked);
}

#[test]
fn a_guest_below_base_has_a_moment_to_speak_before_it_counts_as_silent() {
    let mut memory = Memory::default();
    let given_at = (1..20).find(|second| {
        let now = Time(second * 1000);
        let silent = VmView { stats: None, ..vm(90, Some(76), now) };
        let host = HostReading { total: Bytes::mib(8192), ..HostReading::default() };
        let vms = BTreeMap::from([("a".into(), silent)]);
        let view = HostView { host: Some(Reading::new(host, now)), vms };
        !policy::tick(&view, &spec(), &mut memory, now).actions().is_empty()
    });
    assert_eq!(given_at, Some(7));
}
