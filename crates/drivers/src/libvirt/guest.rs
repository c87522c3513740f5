//! One domain's guest: its readings, its balloon, and the undo of changes.
//!
//! The rules are those of a QMP session. The original goes on record before the first change. A
//! request of another incarnation is void, and nothing is changed during a migration. libvirt
//! itself refuses a change while a job of it is under way.

use std::path::Path;

use model::libvirt::{DomainChange, FromLibvirt, LibvirtDomain};
use model::view::Mechanism;
use model::{GuestStats, Migration, Reading};
use sys::clock::{boot_now, wall_now_ms};
use tokio::time::{Duration, timeout};

use super::super::guest_stats::{self, Dating};
use super::super::identity;
use super::super::shared::DriverState;
use super::super::slot::{BalloonRequest, Restore, Slot};
use super::super::undo::{self, RestoreError};
use super::super::vm::OF_THE_BALLOON;
use super::link::{LibvirtConnection, change};
use super::{ReportedDomain, in_place, place_of};
use crate::journal::UndoRecord;

/// Timeout of the first report on a new connection.
const FIRST_REPORT: Duration = Duration::from_secs(5);
const NO_BALLOON: &str = "libvirt's domain has no virtio memballoon";
const NO_REPORTING: &str = "the domain's memballoon was started without freePageReporting='on'";
const MOVED_BY_LIBVIRT: &str = "started by libvirt, which must move it itself";

/// Why a VM that libvirt has named has no report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unreported {
    /// The latest one is too old, for this reason.
    TooOld(String),
    /// The latest one does not have the VM.
    Gone,
}

/// The guest of a VM that libvirt names.
pub(crate) struct DomainGuest<'a> {
    shared: &'a DriverState,
    slot: &'a Slot,
    pid: u32,
    incarnation: u64,
    dating: Dating,
    /// Whether the view shows a report.
    is_shown: bool,
}

impl<'a> DomainGuest<'a> {
    pub(crate) fn new(shared: &'a DriverState, slot: &'a Slot, pid: u32, incarnation: u64) -> Self {
        Self { shared, slot, pid, incarnation, dating: Dating::default(), is_shown: false }
    }

    /// Shows the latest report, if libvirt names this VM.
    ///
    /// # Errors
    /// There was a report.
    pub(crate) async fn look(&mut self) -> Result<(), Unreported> {
        let Some(reported) = self.shared.domains.of(self.pid) else {
            if std::mem::take(&mut self.is_shown) {
                return Err(Unreported::Gone);
            }
            return Ok(());
        };
        if let Some(fault) = reported.fault {
            return Err(Unreported::TooOld(fault));
        }
        self.is_shown = true;
        self.show(&reported);
        self.ensure_polling(&reported.domain).await;
        Ok(())
    }

    fn show(&mut self, ReportedDomain { domain, at, .. }: &ReportedDomain) {
        let stats = self.date_stats(domain);
        let mut state = self.slot.state();
        let view = &mut state.view;
        view.balloon = domain.current.map(|size| Reading::new(size, *at));
        view.deflates_on_oom = domain.has_balloon.then_some(domain.deflates_on_oom);
        view.immovable = Some(MOVED_BY_LIBVIRT.to_owned());
        view.migration = match domain.is_busy {
            Some(true) => Migration::Active,
            Some(false) => Migration::None,
            None => Migration::Unknown,
        };
        for mechanism in OF_THE_BALLOON {
            view.limits.remove(&mechanism);
        }
        if !domain.has_balloon {
            for mechanism in OF_THE_BALLOON {
                view.limits.insert(mechanism, NO_BALLOON.to_owned());
            }
            return;
        }
        if !domain.reports_free_pages {
            view.limits.insert(Mechanism::FreePageReporting, NO_REPORTING.to_owned());
        }
        match stats {
            Ok(stats) => view.stats = Some(stats),
            Err(why) => drop(view.limits.insert(Mechanism::Statistics, why)),
        }
    }

    /// Bad statistics leave the last good ones in place, which then age.
    fn date_stats(&mut self, domain: &LibvirtDomain) -> Result<Reading<GuestStats>, String> {
        let date = domain.stats_date_s;
        let checked = guest_stats::check(&domain.stats, date);
        let dated = checked.and_then(|()| self.dating.moment(date, boot_now(), wall_now_ms()));
        dated.map(|at| Reading::new(domain.stats, at)).map_err(|error| error.to_string())
    }

    /// Makes libvirt ask the guest for statistics once in a period.
    async fn ensure_polling(&self, domain: &LibvirtDomain) {
        let wanted = self.shared.period.as_secs().max(1);
        let is_enough = (1..=wanted).contains(&domain.stats_period_s);
        if !domain.has_balloon || is_enough || self.shared.is_hands_off() {
            return;
        }
        let set = |undo: &mut UndoRecord| undo.stats_interval_s = Some(domain.stats_period_s);
        if let Err(why) = self.record(domain, set).await {
            return self.slot.failed(why);
        }
        let period = DomainChange::StatsPeriod(wanted);
        if let Err(why) = change(&self.shared.domains.socket, &domain.uuid, period).await {
            self.slot.failed(format!("statistics every {wanted} s: {why}"));
        }
    }

    /// Sets the balloon as the slot asks.
    pub(crate) async fn grant_wish(&self) {
        let Some(wish) = self.slot.take_wish() else { return };
        if wish.incarnation != self.incarnation || self.shared.is_hands_off() {
            return;
        }
        let outcome = self.set_balloon(wish).await;
        if let Err(why) = &outcome {
            let target = wish.target.map_or_else(|| "all".to_owned(), |target| target.to_string());
            self.slot.failed(format!("balloon to {target}: {why}"));
        } else {
            self.slot.state().view.last_error = None;
        }
    }

    async fn set_balloon(&self, wish: BalloonRequest) -> Result<(), String> {
        let reported = self.shared.domains.of(self.pid).ok_or("libvirt does not name it")?;
        if let Some(fault) = reported.fault {
            return Err(fault);
        }
        let domain = reported.domain;
        let current = domain.current.ok_or(NO_BALLOON)?;
        if domain.is_busy != Some(false) {
            return Err("not while a migration is, or may be, under way".to_owned());
        }
        let set = |undo: &mut UndoRecord| {
            (undo.balloon, undo.ram) = (Some(current), Some(domain.max));
        };
        self.record(&domain, set).await?;
        // A DIMM that was plugged since then belongs to the guest.
        let target = wish.target.map(|target| target.plus(domain.max).minus(wish.ram));
        let size = target.unwrap_or(domain.max).min(domain.max);
        change(&self.shared.domains.socket, &domain.uuid, DomainChange::Memory(size)).await
    }

    /// Records an original before it is changed. Originals that are on record stay: the journal
    /// merges both.
    async fn record(
        &self,
        domain: &LibvirtDomain,
        set: impl FnOnce(&mut UndoRecord),
    ) -> Result<(), String> {
        let place = place_of(&self.shared.domains.socket, domain);
        let name = domain.name.clone();
        let mut undo = UndoRecord::untouched(name, place, self.incarnation);
        set(&mut undo);
        let kept = self.shared.records.keep(undo).await;
        kept.map_err(|why| format!("not changed, as the original could not be recorded: {why}"))
    }

    /// Restores what is on record of this incarnation.
    pub(crate) async fn obey(&self, Restore { reply }: Restore) {
        let outcome = match self.shared.records.of_life(self.incarnation).await {
            Some(undo) if super::is_place(&undo.socket) => {
                Some(undo::restore_at(&self.shared.records, &undo).await.1)
            }
            _ => None,
        };
        // The caller may have stopped waiting.
        drop(reply.send(outcome));
    }
}

/// Restores the settings in the record of a domain; describes in words what was done.
pub(crate) async fn restore(undo: &UndoRecord) -> Result<String, RestoreError> {
    if identity::has_ended(undo.incarnation) {
        return Ok(undo::GONE.to_owned());
    }
    let by_libvirt = RestoreError::Libvirt;
    let (socket, uuid) = in_place(&undo.socket).ok_or(RestoreError::Unreachable)?;
    let domain = report(socket, uuid).await.map_err(by_libvirt)?;
    let mut done = Vec::new();
    if let Some(seconds) = undo.stats_interval_s {
        let period = DomainChange::StatsPeriod(seconds);
        change(socket, uuid, period).await.map_err(by_libvirt)?;
        let off = if seconds == 0 { " (off)" } else { "" };
        done.push(format!("statistics every {seconds} s{off} again"));
    }
    if let (Some(recorded), Some(actual)) = (undo.balloon, domain.current) {
        let original = undo::original(recorded, undo.ram, domain.max);
        if domain.is_busy != Some(false) {
            return Err(RestoreError::Migrating { actual, original });
        }
        let spare = match guest_stats::check(&domain.stats, domain.stats_date_s) {
            Ok(()) => undo::spare_of(&domain.stats, domain.stats_date_s, wall_now_ms()),
            Err(_) => None,
        };
        let size = original.max(actual.minus(spare.unwrap_or_default())).min(domain.max);
        change(socket, uuid, DomainChange::Memory(size)).await.map_err(by_libvirt)?;
        done.push(undo::told(size, original));
    }
    Ok(if done.is_empty() { "nothing had been changed".to_owned() } else { done.join(", ") })
}

/// A new report about one domain.
async fn report(socket: &Path, uuid: &str) -> Result<LibvirtDomain, String> {
    let read = async {
        let mut connection = LibvirtConnection::open(socket).await?;
        // The first message may have been made before a change by this process.
        let mut reports = 0;
        loop {
            match connection.next(FIRST_REPORT).await? {
                FromLibvirt::Domains { .. } if reports == 0 => reports += 1,
                FromLibvirt::Domains { domains, .. } => {
                    let found = domains.into_iter().find(|domain| domain.uuid == uuid);
                    return Ok(found.ok_or_else(|| "libvirt does not name it".to_owned()));
                }
                FromLibvirt::Lost { why } => return Ok(Err(why)),
                FromLibvirt::Answer { .. } => {}
            }
        }
    };
    let told = |error: std::io::Error| format!("overbook-libvirt: {error}");
    match timeout(FIRST_REPORT, read).await {
        Ok(read) => read.map_err(told)?,
        Err(_) => Err("libvirt does not answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{Bytes, VmName};

    use super::super::super::records::Records;
    use super::super::tests::domain;
    use super::*;
    use crate::journal::Journal;

    fn stage(domain: LibvirtDomain) -> (tempfile::TempDir, DriverState, Arc<Slot>) {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::new(Journal::open(dir.path()).unwrap());
        let socket = dir.path().join(model::libvirt::SOCKET_NAME);
        let shared = DriverState::new(Duration::from_secs(1), records, socket);
        shared.domains.note(vec![domain], boot_now());
        (dir, shared, Arc::new(Slot::new("/proc/7".into()).0))
    }

    #[tokio::test]
    async fn a_report_fills_the_view() {
        let stats = GuestStats { free: Some(Bytes::mib(100)), ..GuestStats::default() };
        let stats_date_s = wall_now_ms() / 1000;
        let stats_period_s = 1;
        let web = LibvirtDomain { stats, stats_date_s, stats_period_s, ..domain("web-1", 7) };
        let (_dir, shared, slot) = stage(web);
        let mut guest = DomainGuest::new(&shared, &slot, 7, 1);
        guest.look().await.unwrap();
        let view = slot.state().view.clone();
        assert_eq!(view.balloon.unwrap().value, Bytes::mib(512));
        assert_eq!(view.stats.unwrap().value, stats);
        assert_eq!((view.migration, view.immovable.is_some()), (Migration::None, true));
        assert_eq!(view.limits.keys().collect::<Vec<_>>(), [&Mechanism::FreePageReporting]);
    }

    #[tokio::test]
    async fn impossible_statistics_are_refused_and_the_reason_is_shown() {
        let stats = GuestStats { free: Some(Bytes(u64::MAX)), ..GuestStats::default() };
        let lies = LibvirtDomain { stats, stats_date_s: wall_now_ms() / 1000, ..domain("a", 7) };
        let (_dir, shared, slot) = stage(LibvirtDomain { stats_period_s: 1, ..lies });
        DomainGuest::new(&shared, &slot, 7, 1).look().await.unwrap();
        let view = slot.state().view.clone();
        assert_eq!(view.stats, None);
        assert!(view.limits[&Mechanism::Statistics].contains("not usable"));
    }

    #[tokio::test]
    async fn nothing_is_set_in_a_job_of_libvirt_nor_without_a_record() {
        for (is_busy, why) in [(Some(true), "not while a migration"), (None, "not while")] {
            let (_dir, shared, slot) = stage(LibvirtDomain { is_busy, ..domain("a", 7) });
            let guest = DomainGuest::new(&shared, &slot, 7, 1);
            let target = Some(Bytes::mib(256));
            let wish = BalloonRequest { incarnation: 1, target, ram: Bytes::mib(512) };
            let error = guest.set_balloon(wish).await.unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
        // Nothing answers at the socket, but the original is on record before it is tried.
        let (_dir, shared, slot) = stage(domain("a", 7));
        let guest = DomainGuest::new(&shared, &slot, 7, 1);
        let target = Some(Bytes::mib(256));
        let wish = BalloonRequest { incarnation: 1, target, ram: Bytes::mib(512) };
        assert!(guest.set_balloon(wish).await.unwrap_err().starts_with("overbook-libvirt: "));
        let record = shared.records.of_life(1).await.unwrap();
        assert_eq!((record.balloon, record.vm), (Some(Bytes::mib(512)), VmName::from("a")));
        assert!(super::super::is_place(&record.socket));
    }
}
