use model::libvirt::DomainProcess;
use model::{Bytes, GuestStats};

use super::*;

/// A process with this PID.
pub(super) fn process(pid: u32) -> Identity {
    Identity { pid, start_ticks: 1000 }
}

pub(super) fn domain(name: &str, pid: u32) -> LibvirtDomain {
    let Identity { pid, start_ticks } = process(pid);
    LibvirtDomain {
        uuid: format!("uuid-of-{name}"),
        name: name.into(),
        process: Some(DomainProcess { pid, start_ticks }),
        settings: None,
        has_balloon: true,
        max: Bytes::mib(512),
        current: Some(Bytes::mib(512)),
        stats: GuestStats::default(),
        stats_date_s: 0,
        stats_period_s: 0,
        reports_free_pages: false,
        deflates_on_oom: false,
        is_busy: Some(false),
        is_suspended: false,
    }
}

#[test]
fn a_report_grows_old_and_metadata_stays() {
    let domains = Domains::new("/run/overbook/libvirt.sock".into());
    assert!(domains.of(process(7)).is_none());
    let settings = Some(Ok(DomainSettings::default()));
    domains.note(vec![LibvirtDomain { settings, ..domain("web-1", 7) }], boot_now());
    assert_eq!(domains.of(process(7)).unwrap().fault, None);
    domains.lose("connection refused".to_owned());
    assert_eq!(domains.of(process(7)).unwrap().fault, None, "it is fresh");
    domains.report().at = Time(0);
    let fault = domains.of(process(7)).unwrap().fault.unwrap();
    assert!(fault.ends_with(": connection refused"), "{fault}");
    assert_eq!(domains.settings().len(), 1);
}

#[test]
fn two_domains_of_one_process_are_not_believed() {
    let domains = Domains::new("/run/libvirt.sock".into());
    let all = ["a", "b", "c"].map(|name| domain(name, 7));
    domains.note(all.into(), boot_now());
    assert!(domains.of(process(7)).is_none());
}

#[test]
fn a_report_vouches_for_no_later_process_with_the_same_pid() {
    let domains = Domains::new("/run/libvirt.sock".into());
    domains.note(vec![domain("web-1", 7)], boot_now());
    assert!(domains.of(process(7)).is_some());
    assert!(domains.of(Identity { start_ticks: 1001, ..process(7) }).is_none());
    // No process started at that time, so none has to be looked for.
    let own = Identity::own().unwrap();
    let reused = LibvirtDomain { process: domain("web-2", own.pid).process, ..domain("web-2", 7) };
    let alive = DomainProcess { pid: own.pid, start_ticks: own.start_ticks };
    domains.note(vec![reused], boot_now());
    assert!(domains.pids().is_empty());
    domains.note(vec![LibvirtDomain { process: Some(alive), ..domain("a", 7) }], boot_now());
    assert_eq!(domains.pids(), [own.pid].into());
}

#[tokio::test]
async fn an_old_report_is_not_taken_for_a_new_one() {
    let domains = Arc::new(Domains::new("/run/libvirt.sock".into()));
    let before = boot_now();
    domains.note(vec![domain("web-1", 7)], before);
    let waiting = Arc::clone(&domains);
    let newer = tokio::spawn(async move { waiting.of_after(process(7), before).await });
    let current = Some(Bytes::mib(256));
    let next = LibvirtDomain { current, ..domain("web-1", 7) };
    // The clock has milliseconds.
    while boot_now() <= before {
        tokio::task::yield_now().await;
    }
    domains.note(vec![next], boot_now());
    assert_eq!(newer.await.unwrap().unwrap().current, current);
    let now = boot_now();
    while boot_now() <= now {
        tokio::task::yield_now().await;
    }
    domains.lose("libvirt does not answer".to_owned());
    let why = domains.of_after(process(7), now).await.unwrap_err();
    assert_eq!(why, "libvirt does not answer");
}

#[test]
fn a_record_of_a_domain_has_a_key_of_its_own() {
    let socket = Path::new("/run/overbook/libvirt.sock");
    let place = place_of(socket, &domain("a", 7));
    assert_eq!(socket_in(&place), Some(socket));
    assert!(!is_place(Path::new("/run/overbook/qmp/libvirt-1.sock")) && !is_place(socket));
}
