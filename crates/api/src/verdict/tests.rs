//! Verdicts on pages with one trouble after the other.

use std::sync::Arc;

use super::*;
use crate::fixture;
use crate::shown::TickView;
use crate::wire::{ColdStatus, OverloadStatus, StatusPage, WorkerStatus};

/// The fixture's page without its troubles.
fn fine() -> StatusPage {
    let mut page = StatusPage::of(&TickView::first(Arc::new(fixture::published())));
    page.host.tick_age_ms = 300;
    for vm in &mut page.vms {
        (vm.link_up, vm.link_error) = (true, None);
        vm.refusals.clear();
        vm.unsupported.clear();
    }
    page
}

fn verdict(page: &StatusPage) -> HostVerdict {
    HostVerdict::judge(&page.host, &page.groups, &page.vms)
}

fn text(page: &StatusPage) -> String {
    verdict(page).text
}

#[test]
fn a_host_in_good_order_is_ok() {
    let verdict = verdict(&fine());
    assert_eq!(
        verdict.text,
        "OK: 3 VMs (1 in no group, 1 short of memory now), 1 group, 6 GiB of 16 GiB available, mode enforce"
    );
    assert_eq!((verdict.level, verdict.troubles.len()), (StateLevel::Ok, 0));
}

#[test]
fn the_exit_codes_are_those_of_a_monitoring_plugin() {
    let levels = [StateLevel::Ok, StateLevel::Warning, StateLevel::Critical, StateLevel::Unknown];
    assert_eq!(levels.map(StateLevel::exit_code), [0, 1, 2, 3]);
}

#[test]
fn each_trouble_is_named_and_the_worst_stands_first() {
    let mut page = fine();
    let mut worst = Vec::new();
    let mut expect = |page: &StatusPage, begin: &str| {
        worst.push(begin.to_owned());
        assert!(text(page).starts_with(begin), "{}", text(page));
        assert_eq!(verdict(page).troubles.len(), worst.len(), "{page:#?}");
    };
    page.host.ksm_trouble = Some("KSM is set by another program".to_owned());
    expect(&page, "WARNING: KSM is set by another program");
    page.host.pool_trouble = Some("the store is away".to_owned());
    expect(&page, "WARNING: the pool: the store is away (and 1 more)");
    page.host.history_error = Some("disk full".to_owned());
    expect(&page, "WARNING: history is not being kept: disk full (and 2 more)");
    page.host.paused = true;
    expect(&page, "WARNING: paused");
    let over = Reason::StaysOver { deficit: Bytes::mib(9) };
    page.groups[0].stays_over = Some(Words::of(&over));
    expect(&page, "WARNING: group web: ");
    let mut paused = page.clone();
    let why = [HOST_PAUSED, "paused by the operator"].map(str::to_owned);
    paused.vms[0].unsupported.insert("tracking".to_owned(), why[0].clone());
    paused.vms[2].unsupported.insert("tracking".to_owned(), why[1].clone());
    paused.vms[2].paused = true;
    assert_eq!(text(&paused), text(&page), "the pause itself is told");
    let manager = ("managers_balloon".to_owned(), "Proxmox moves its balloon".to_owned());
    paused.vms[2].refusals.push(Words { code: manager.0, text: manager.1 });
    assert!(text(&paused).starts_with("WARNING: web-2: Proxmox moves its balloon"));
    page.vms[2].unsupported.insert("tracking".to_owned(), "an old shim".to_owned());
    expect(&page, "WARNING: web-2: it cannot be tracked: an old shim");
    page.vms[2].refusals.push(Words::of(&Reason::NoStats));
    expect(&page, "WARNING: web-2: its guest sends no usable statistics");
    (page.vms[0].link_up, page.vms[0].link_error) = (false, Some("no such socket".to_owned()));
    expect(&page, "WARNING: db-1: no connection to its QEMU: no such socket");
    let last_error = Some("ended (signal: 9)".to_owned());
    page.groups[0].worker = Some(WorkerStatus { last_error, ..WorkerStatus::default() });
    expect(&page, "WARNING: the worker of group web is not running: the last one ended");
    page.host.waits_for_restart = Some("the change of [api] waits".to_owned());
    expect(&page, "WARNING: the change of [api] waits");
    page.host.config_error = Some("overbook.toml:3: unknown key".to_owned());
    expect(&page, "WARNING: the newest configuration is not used: overbook.toml:3");
    let sign = model::reason::Pressure::Swapping { per_second: Bytes::mib(3) };
    page.vms[1].refusals.push(Words::of(&Reason::NoSurplus { sign }));
    expect(&page, "WARNING: web-1: it is short of memory (it swaps 3 MiB/s) but its group");
    page.vms[2].cold = Some(ColdStatus { wait_ratio: 0.12, ..ColdStatus::default() });
    expect(&page, "WARNING: web-2: it waits 12 % of its time for pages that are out");
    let (available, reserve) = (Bytes::mib(9), Bytes::mib(99));
    page.host.reasons.push(Words::of(&Reason::HostShort { available, reserve }));
    expect(&page, "CRITICAL: the host has 9 MiB left, less than its reserve of 99 MiB");
    page.vms[1].overload =
        Some(OverloadStatus { severity: "sustained".to_owned(), ..OverloadStatus::default() });
    expect(&page, "CRITICAL: web-1: ");
    let sign = model::reason::KillSign::Counted { kills: 2 };
    page.vms[1].refusals.push(Words::of(&Reason::Killed { sign, wait: Millis::secs(60) }));
    expect(&page, "CRITICAL: web-1: its kernel has killed 2 programs");
    page.host.tick_age_ms = 11_000;
    expect(&page, "CRITICAL: the daemon stands still: its last tick was 11 s ago (and 16 more)");
}

#[test]
fn several_vms_with_one_trouble_are_one_sentence() {
    let mut page = fine();
    let vm = page.vms[0].clone();
    let down = |n: u32| VmStatus {
        name: format!("vm-{n}"),
        link_up: false,
        link_error: Some("no such socket".to_owned()),
        ..vm.clone()
    };
    page.vms = (0..100).map(down).collect();
    assert_eq!(text(&page), "WARNING: 100 VMs are unreachable: vm-0, vm-1, vm-10, 97 more");
    page.vms[99].swap_bytes_per_second = Some(1 << 20);
    let trouble = &verdict(&page).troubles[0];
    assert_eq!(trouble.text, "100 VMs are unreachable: vm-99, vm-0, vm-1, 97 more");
    assert_eq!(trouble.vms.len(), 100);
}

#[test]
fn a_vm_has_one_trouble_and_the_gravest_vm_is_the_first() {
    let mut page = fine();
    let of = |page: &StatusPage| {
        page.vms.iter().map(|vm| VmTrouble::of(vm, &page.groups)).collect::<Vec<_>>()
    };
    let looked_after = VmTrouble {
        level: StateLevel::Ok,
        lacks_memory: true,
        text: "it waits for its pages (812/s)".to_owned(),
    };
    assert_eq!(of(&page), [None, Some(looked_after), None]);
    page.vms[1].overload.as_mut().unwrap().severity = "sustained".to_owned();
    page.vms[1].swap_bytes_per_second = Some(3 << 20);
    let refusal = Words::of(&Reason::NoStats);
    page.vms[1].refusals.push(refusal.clone());
    page.vms[2].refusals.push(refusal);
    let [None, Some(worst), Some(bad)] = &of(&page)[..] else { panic!("{:?}", of(&page)) };
    assert_eq!((worst.level, worst.lacks_memory), (StateLevel::Critical, true));
    assert!(worst.text.starts_with("it waits for its swap (3 MiB/s): "), "{}", worst.text);
    assert_eq!((bad.level, bad.lacks_memory), (StateLevel::Warning, false));
    sort_by_gravity(&mut page.vms, &page.groups);
    let names: Vec<&str> = page.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["web-1", "web-2", "db-1"]);
}

#[test]
fn a_page_without_a_verdict_is_unknown() {
    let mut page = serde_json::to_value(fine()).unwrap();
    page.as_object_mut().unwrap().remove("verdict").unwrap();
    let page: StatusPage = serde_json::from_value(page).unwrap();
    assert_eq!(page.verdict.level, StateLevel::Unknown);
}

#[test]
fn tracking_that_is_switched_off_is_no_trouble() {
    let mut page = fine();
    page.vms[2].unsupported.insert("tracking".to_owned(), "switched off".to_owned());
    page.groups[0].tracking = "off".to_owned();
    assert_eq!(verdict(&page).level, StateLevel::Ok);
}

#[test]
fn a_daemon_that_does_not_answer_is_critical_and_any_other_failure_unknown() {
    let (socket, limit) = ("/s".into(), std::time::Duration::from_secs(5));
    let verdict = HostVerdict::of_failure(&ClientError::NoDaemon("/s".into()));
    assert!(verdict.text.starts_with("CRITICAL: no daemon answers at /s"), "{verdict:?}");
    let verdict = HostVerdict::of_failure(&ClientError::Silent { socket, limit });
    assert_eq!(verdict.level, StateLevel::Critical);
    let verdict = HostVerdict::of_failure(&ClientError::NotPermitted("/s".into()));
    assert!(verdict.text.starts_with("UNKNOWN: not permitted"), "{verdict:?}");
}
