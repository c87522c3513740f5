//! libvirt's domains, by way of the process `overbook-libvirt`.
//!
//! **Problem.** A second monitor in a domain's QEMU makes libvirt mark the domain as tainted, and
//! takes the operator an edit and a restart of each domain. A library that may hang has no place
//! in the daemon. **Idea.** Only `overbook-libvirt` links libvirt. It sends all running domains
//! once a second over a unix socket ([`link`]). A VM that was found by its process, and that
//! libvirt names, gets its name, balloon and statistics from there ([`guest`]). Its metadata may
//! name its group and limits ([`settings`]).
//!
//! **Invariants.** A host without `overbook-libvirt` is as before. A report is about processes, by
//! PID and start time: it vouches for no later process with the same PID, and a change that was
//! decided for one QEMU of a domain never reaches its next one. A VM whose domain has not been
//! reported for [`STALE_AFTER`] counts as one whose QEMU does not answer: nothing is taken from
//! it. The last known metadata stays in force meanwhile, so no VM leaves its group because a
//! process has ended. Only a process of root, or of the daemon's own user, is believed.

mod guest;
mod link;
mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::libvirt::{DomainChange, DomainSettings, LibvirtDomain};
use model::{Millis, Time, VmName};
use policy::tuning::STALE_AFTER;
use sys::clock::boot_now;
use sys::process::Identity;
use tokio::sync::Notify;
use tokio::time::timeout;

use link::DomainLink;

pub(super) use guest::{DomainGuest, Restored, Unreported, restore};
pub(super) use link::run;
pub(super) use settings::Overlay;

/// Timeout of a report that is to be newer than something else.
const NEXT_REPORT: Duration = Duration::from_secs(5);

/// The name of the manager, as in messages.
pub(super) const NAME: &str = "libvirt";

/// The settings of each VM that has any from its manager.
pub(super) type AllSettings = BTreeMap<VmName, Result<DomainSettings, String>>;

/// The latest report about the domains, and the connection that it comes from.
#[derive(Debug)]
pub(super) struct Domains {
    /// The socket of `overbook-libvirt`.
    socket: PathBuf,
    report: Mutex<DomainReport>,
    /// Notified of each report.
    news: Notify,
    link: DomainLink,
}

#[derive(Debug, Default)]
struct DomainReport {
    by_process: BTreeMap<Identity, Arc<LibvirtDomain>>,
    settings: Arc<AllSettings>,
    at: Time,
    /// Why there is no newer report, and since when.
    fault: Option<(Time, String)>,
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
        let (report, news) = (Mutex::default(), Notify::new());
        Self { socket, report, news, link: DomainLink::default() }
    }

    /// The domain of this process.
    pub(super) fn of(&self, process: Identity) -> Option<ReportedDomain> {
        let report = self.report();
        let domain = Arc::clone(report.by_process.get(&process)?);
        let (at, age) = (report.at, boot_now().since(report.at));
        let why = report.fault.as_ref().map(|(_, why)| why.as_str());
        let fault = (age > STALE_AFTER).then(|| too_old(age, why));
        Some(ReportedDomain { domain, at, fault })
    }

    /// The domain of this process, by a report for which libvirt was asked after `time`.
    ///
    /// # Errors
    /// There is no such report, or the process is not in it.
    pub(super) async fn of_after(
        &self,
        process: Identity,
        time: Time,
    ) -> Result<Arc<LibvirtDomain>, String> {
        let found = async {
            loop {
                let news = self.news.notified();
                tokio::pin!(news);
                news.as_mut().enable();
                {
                    let report = self.report();
                    if report.at > time {
                        let found = report.by_process.get(&process).cloned();
                        return found.ok_or_else(|| "libvirt does not name it".to_owned());
                    }
                    if let Some((_, why)) = report.fault.as_ref().filter(|(at, _)| *at > time) {
                        return Err(why.clone());
                    }
                }
                news.await;
            }
        };
        let silent = || Err("libvirt does not answer".to_owned());
        timeout(NEXT_REPORT, found).await.unwrap_or_else(|_| silent())
    }

    /// Changes the domain of this process.
    ///
    /// # Errors
    /// The reason why it is not known to have happened.
    pub(super) async fn change(
        &self,
        process: Identity,
        domain: &LibvirtDomain,
        change: DomainChange,
    ) -> Result<(), String> {
        self.link.change(process, &domain.uuid, change).await
    }

    /// The processes of all domains that run.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        let report = self.report();
        let alive = report.by_process.keys().filter(|process| process.is_alive());
        alive.map(|process| process.pid).collect()
    }

    fn settings(&self) -> Arc<AllSettings> {
        Arc::clone(&self.report().settings)
    }

    fn note(&self, domains: Vec<LibvirtDomain>, at: Time) {
        let told = |domain: &LibvirtDomain| Some((domain.name.clone(), domain.settings.clone()?));
        let settings: AllSettings = domains.iter().filter_map(told).collect();
        // A process cannot be two domains. Where a file says so, neither is believed.
        let mut by_process: BTreeMap<Identity, Option<Arc<LibvirtDomain>>> = BTreeMap::new();
        for domain in domains {
            let Some(process) = domain.process else { continue };
            let process = Identity { pid: process.pid, start_ticks: process.start_ticks };
            let found = by_process.entry(process);
            found.and_modify(|known| *known = None).or_insert(Some(Arc::new(domain)));
        }
        {
            let mut report = self.report();
            if *report.settings != settings {
                report.settings = Arc::new(settings);
            }
            let known = by_process.into_iter().filter_map(|(process, it)| Some((process, it?)));
            report.by_process = known.collect();
            (report.at, report.fault) = (at.min(boot_now()), None);
        }
        self.news.notify_waiters();
    }

    fn lose(&self, why: String) {
        self.report().fault = Some((boot_now(), why));
        self.news.notify_waiters();
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

/// The socket in such a key; `None`: it is another key.
pub(super) fn socket_in(place: &Path) -> Option<&Path> {
    place.parent().filter(|socket| socket.ends_with(model::libvirt::SOCKET_NAME))
}

/// Whether an undo record with this key is of a domain.
pub(super) fn is_place(place: &Path) -> bool {
    socket_in(place).is_some()
}

#[cfg(test)]
mod tests;
