//! libvirt's domains, by way of the process `overbook-libvirt`.
//!
//! **Problem.** A second monitor in a domain's QEMU makes libvirt mark the domain as tainted, and
//! takes the operator an edit and a restart of each domain. A library that may hang has no place
//! in the daemon. **Idea.** Only `overbook-libvirt` links libvirt. It sends all running domains
//! once a second over a unix socket ([`link`]). A VM that was found by its process, and that
//! libvirt names, gets its name, balloon and statistics from there ([`guest`]). Its metadata may
//! name its group and limits ([`settings`]).
//!
//! **Invariants.** A host without `overbook-libvirt` is as before. A VM whose domain has not been
//! reported for [`STALE_AFTER`] counts as one whose QEMU does not answer: nothing is taken from
//! it. The last known metadata stays in force meanwhile, so no VM leaves its group because a
//! process has ended. Only a process of root, or of the daemon's own user, is believed.

mod guest;
mod link;
mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::libvirt::{DomainSettings, LibvirtDomain};
use model::{Millis, Time, VmName};
use policy::tuning::STALE_AFTER;
use sys::clock::boot_now;

pub(super) use guest::{DomainGuest, Unreported, restore};
pub(super) use link::run;
pub(super) use settings::Overlay;

/// The name of the manager, as in messages.
pub(super) const NAME: &str = "libvirt";

/// The metadata of each domain that has any.
type AllSettings = BTreeMap<VmName, Result<DomainSettings, String>>;

/// The latest report about the domains.
#[derive(Debug)]
pub(super) struct Domains {
    /// The socket of `overbook-libvirt`.
    socket: PathBuf,
    report: Mutex<DomainReport>,
}

#[derive(Debug, Default)]
struct DomainReport {
    by_pid: BTreeMap<u32, Arc<LibvirtDomain>>,
    settings: Arc<AllSettings>,
    at: Time,
    /// Why there is no newer report.
    fault: Option<String>,
}

/// A domain as last reported.
#[derive(Clone, Debug)]
pub(super) struct ReportedDomain {
    pub(super) domain: Arc<LibvirtDomain>,
    /// The time at which libvirt was asked.
    pub(super) at: Time,
    /// Why that was too long ago.
    pub(super) fault: Option<String>,
}

impl Domains {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, report: Mutex::default() }
    }

    /// The domain of this process.
    pub(super) fn of(&self, pid: u32) -> Option<ReportedDomain> {
        let report = self.report();
        let domain = Arc::clone(report.by_pid.get(&pid)?);
        let (at, age) = (report.at, boot_now().since(report.at));
        let fault = (age > STALE_AFTER).then(|| too_old(age, report.fault.as_deref()));
        Some(ReportedDomain { domain, at, fault })
    }

    /// The processes of all domains.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        self.report().by_pid.keys().copied().collect()
    }

    fn settings(&self) -> Arc<AllSettings> {
        Arc::clone(&self.report().settings)
    }

    fn note(&self, domains: Vec<LibvirtDomain>, at: Time) {
        let told = |domain: &LibvirtDomain| Some((domain.name.clone(), domain.settings.clone()?));
        let settings: AllSettings = domains.iter().filter_map(told).collect();
        let mut report = self.report();
        if *report.settings != settings {
            report.settings = Arc::new(settings);
        }
        // A process cannot be two domains. Where a file says so, neither is believed.
        let mut by_pid: BTreeMap<u32, Option<Arc<LibvirtDomain>>> = BTreeMap::new();
        for domain in domains {
            let Some(pid) = domain.pid else { continue };
            by_pid.entry(pid).and_modify(|known| *known = None).or_insert(Some(Arc::new(domain)));
        }
        report.by_pid = by_pid.into_iter().filter_map(|(pid, it)| Some((pid, it?))).collect();
        (report.at, report.fault) = (at.min(boot_now()), None);
    }

    fn lose(&self, why: String) {
        self.report().fault = Some(why);
    }

    fn report(&self) -> MutexGuard<'_, DomainReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn too_old(age: Millis, why: Option<&str>) -> String {
    let why = why.unwrap_or("overbook-libvirt is silent");
    format!("libvirt has not told of it for {age}: {why}")
}

/// The key of a domain's undo record: the socket of `overbook-libvirt`, and the UUID.
fn place_of(socket: &Path, domain: &LibvirtDomain) -> PathBuf {
    socket.join(&domain.uuid)
}

/// The socket and UUID in such a key; `None`: it is another key.
fn in_place(place: &Path) -> Option<(&Path, &str)> {
    let socket = place.parent()?;
    let uuid = place.file_name()?.to_str()?;
    (socket.file_name()? == model::libvirt::SOCKET_NAME).then_some((socket, uuid))
}

/// Whether an undo record with this key is of a domain.
pub(super) fn is_place(place: &Path) -> bool {
    in_place(place).is_some()
}

#[cfg(test)]
mod tests {
    use model::{Bytes, GuestStats};

    use super::*;

    pub(super) fn domain(name: &str, pid: u32) -> LibvirtDomain {
        LibvirtDomain {
            uuid: format!("uuid-of-{name}"),
            name: name.into(),
            pid: Some(pid),
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
        }
    }

    #[test]
    fn a_report_grows_old_and_metadata_stays() {
        let domains = Domains::new("/run/overbook/libvirt.sock".into());
        assert!(domains.of(7).is_none());
        let settings = Some(Ok(DomainSettings::default()));
        domains.note(vec![LibvirtDomain { settings, ..domain("web-1", 7) }], boot_now());
        assert_eq!(domains.of(7).unwrap().fault, None);
        domains.lose("connection refused".to_owned());
        assert_eq!(domains.of(7).unwrap().fault, None, "it is fresh");
        domains.report().at = Time(0);
        let fault = domains.of(7).unwrap().fault.unwrap();
        assert!(fault.ends_with(": connection refused"), "{fault}");
        assert_eq!(domains.settings().len(), 1);
    }

    #[test]
    fn two_domains_of_one_process_are_not_believed() {
        let domains = Domains::new("/run/libvirt.sock".into());
        let all = ["a", "b", "c"].map(|name| domain(name, 7));
        domains.note(all.into(), boot_now());
        assert!(domains.of(7).is_none());
    }

    #[test]
    fn a_record_of_a_domain_has_a_key_of_its_own() {
        let place = place_of(Path::new("/run/overbook/libvirt.sock"), &domain("a", 7));
        let socket = Path::new("/run/overbook/libvirt.sock");
        assert_eq!(in_place(&place), Some((socket, "uuid-of-a")));
        assert!(!is_place(Path::new("/run/overbook/qmp/libvirt-1.sock")) && !is_place(socket));
    }
}
