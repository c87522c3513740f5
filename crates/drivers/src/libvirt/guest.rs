//! One domain's guest: its readings, its balloon, and the undo of changes.
//!
//! The rules are those of a QMP session. The original goes on record before the first change. It
//! is a size at which the balloon rests, by reports that are newer than all earlier changes of
//! Overbook. A request of another incarnation is void, and nothing is changed during a migration.
//! libvirt itself refuses a change while a job of it is under way.

use std::sync::Arc;

use model::libvirt::{DomainChange, LibvirtDomain};
use model::view::Mechanism;
use model::{Bytes, GuestStats, Migration, Millis, Reading};
use policy::tuning::tolerance;
use sys::clock::{boot_now, wall_now_ms};
use sys::process::Identity;
use tokio::time::{Duration, timeout};

use super::super::guest_stats::{self, Dating};
use super::super::identity;
use super::super::shared::DriverState;
use super::super::slot::{BalloonRequest, Restore, Slot};
use super::super::undo::{self, RestoreError, Undo, Undone};
use super::super::vm::OF_THE_BALLOON;
use super::{Domains, ReportedDomain, place_of};
use crate::journal::UndoRecord;

/// Timeout of a balloon that is to follow a release.
const FOLLOWS: Duration = Duration::from_secs(3);
/// A balloon that keeps its size for this time rests.
const RESTS: Millis = Millis::secs(1);
/// The longest wait for the reports that show it. Orders wait meanwhile, for at most
/// [`crate::ORDER_DEADLINE`].
const AT_REST: Duration = Duration::from_secs(6);
const NOT_AT_REST: &str = "libvirt did not report it soon enough";
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
    process: Identity,
    incarnation: u64,
    dating: Dating,
    /// Whether the view shows a report.
    is_shown: bool,
}

impl<'a> DomainGuest<'a> {
    pub(crate) fn new(shared: &'a DriverState, slot: &'a Slot, process: Identity) -> Self {
        let (incarnation, dating) = (identity::of_process(process), Dating::default());
        Self { shared, slot, process, incarnation, dating, is_shown: false }
    }

    /// Shows the latest report, if libvirt names this VM.
    ///
    /// # Errors
    /// There was a report.
    pub(crate) async fn look(&mut self) -> Result<(), Unreported> {
        let Some(reported) = self.shared.domains.of(self.process) else {
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
        state.up();
        let view = &mut state.view;
        view.balloon = domain.current.map(|size| Reading::new(size, *at));
        view.deflates_on_oom = domain.has_balloon.then_some(domain.deflates_on_oom);
        view.immovable = Some(MOVED_BY_LIBVIRT.to_owned());
        view.migration = match domain.is_busy {
            Some(true) => Migration::Active,
            Some(false) => Migration::None,
            None => Migration::Unknown,
        };
        view.suspended = domain.is_suspended;
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
        // A QEMU that owes libvirt an answer gets no further question.
        let can_answer = domain.has_balloon && domain.is_busy.is_some();
        if !can_answer || is_enough || self.shared.is_hands_off(self.slot) {
            return;
        }
        let set = |undo: &mut UndoRecord| undo.stats_interval_s = Some(domain.stats_period_s);
        if let Err(why) = self.record(domain, set).await {
            return self.slot.failed(why);
        }
        let period = DomainChange::StatsPeriod(wanted);
        if let Err(why) = self.shared.domains.change(self.process, domain, period).await {
            self.slot.failed(format!("statistics every {wanted} s: {why}"));
        }
    }

    /// Sets the balloon as the slot asks.
    pub(crate) async fn grant_wish(&self) {
        let Some(wish) = self.slot.take_wish() else { return };
        if wish.incarnation != self.incarnation || self.shared.is_hands_off(self.slot) {
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

    async fn set_balloon(&self, mut wish: BalloonRequest) -> Result<(), String> {
        let domains = &self.shared.domains;
        let undo = self.shared.records.of_life(self.incarnation).await;
        let domain = if undo.is_some_and(|undo| undo.balloon.is_some()) {
            let reported = domains.of(self.process).ok_or("libvirt does not name it")?;
            reported.fault.map_or(Ok(reported.domain), Err)?
        } else {
            let domain = timeout(AT_REST, self.at_rest()).await;
            let domain = domain.map_err(|_| NOT_AT_REST.to_owned())??;
            // Orders may have changed meanwhile.
            if self.shared.is_hands_off(self.slot) {
                return Ok(());
            }
            if let Some(newer) = self.slot.take_wish() {
                wish = newer;
            }
            domain
        };
        if wish.incarnation != self.incarnation {
            return Ok(());
        }
        self.slot.check_limits(self.process.pid)?;
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
        domains.change(self.process, &domain, DomainChange::Memory(size)).await
    }

    /// The domain while its balloon rests. An older report may show a size that Overbook has set
    /// itself, and a balloon that moves may come from there.
    async fn at_rest(&self) -> Result<Arc<LibvirtDomain>, String> {
        let domains = &self.shared.domains;
        let first = domains.of_after(self.process, boot_now()).await?;
        let second = domains.of_after(self.process, boot_now().after(RESTS)).await?;
        let size = |domain: &LibvirtDomain| domain.current.unwrap_or_default().0;
        if size(&first).abs_diff(size(&second)) > tolerance(second.max).0 {
            return Err("not changed while another program moves it".to_owned());
        }
        Ok(second)
    }

    /// Records an original before it is changed. Originals that are on record stay: the journal
    /// merges both.
    async fn record(
        &self,
        domain: &LibvirtDomain,
        set: impl FnOnce(&mut UndoRecord),
    ) -> Result<(), String> {
        let records = &self.shared.records;
        let place = place_of(&self.shared.domains.socket, domain);
        let fresh = UndoRecord::untouched(domain.name.clone(), place, self.incarnation);
        let mut undo = records.adopt(fresh).await;
        set(&mut undo);
        let kept = records.keep(undo).await;
        kept.map_err(|why| format!("not changed, as the original could not be recorded: {why}"))
    }

    /// Restores what is on record of this incarnation.
    pub(crate) async fn obey(&self, Restore { undo, reply }: Restore) {
        let outcome = match self.shared.records.of_life(self.incarnation).await {
            Some(record) => {
                let (records, domains) = (&self.shared.records, Some(&self.shared.domains));
                Some(undo::restore_at(records, &record, undo, domains).await.1)
            }
            None => None,
        };
        // The caller may have stopped waiting.
        drop(reply.send(outcome));
    }
}

/// The restored settings of a domain.
pub(crate) struct Restored {
    /// Description.
    pub(crate) done: Undone,
    /// Whether the guest has followed; if not, its size is one that Overbook has set.
    pub(crate) has_followed: bool,
}

/// Restores the settings in the record of a domain.
pub(crate) async fn restore(
    domains: &Domains,
    record: &UndoRecord,
    undo: Undo,
) -> Result<Restored, RestoreError> {
    let Some(process) = identity::alive(record.incarnation) else {
        return Ok(Restored { done: Undone::nothing(undo::GONE), has_followed: true });
    };
    let by_libvirt = RestoreError::Libvirt;
    let domain = domains.of_after(process, boot_now()).await.map_err(by_libvirt)?;
    let Some(is_busy) = domain.is_busy else {
        return Err(by_libvirt("its QEMU does not answer libvirt".to_owned()));
    };
    let (mut done, mut gives) = (Vec::new(), Bytes::ZERO);
    let mut has_followed = true;
    if let Some(seconds) = record.stats_interval_s {
        let period = DomainChange::StatsPeriod(seconds);
        if undo == Undo::Now {
            domains.change(process, &domain, period).await.map_err(by_libvirt)?;
        }
        let off = if seconds == 0 { " (off)" } else { "" };
        done.push(format!("statistics every {seconds} s{off} again"));
    }
    if let (Some(recorded), Some(actual)) = (record.balloon, domain.current) {
        let original = undo::original(recorded, record.ram, domain.max);
        if is_busy {
            return Err(RestoreError::Migrating { actual, original });
        }
        let spare = match guest_stats::check(&domain.stats, domain.stats_date_s) {
            Ok(()) => undo::spare_of(&domain.stats, domain.stats_date_s, wall_now_ms()),
            Err(_) => None,
        };
        let size = original.max(actual.minus(spare.unwrap_or_default())).min(domain.max);
        if undo == Undo::Now {
            let change = DomainChange::Memory(size);
            domains.change(process, &domain, change).await.map_err(by_libvirt)?;
            has_followed = follows(domains, process, size).await;
        }
        done.push(undo::told(size, original));
        gives = size.minus(actual);
    }
    Ok(Restored { done: Undone::of(&done, gives), has_followed })
}

/// Whether the balloon reaches this size soon.
async fn follows(domains: &Domains, process: Identity, size: Bytes) -> bool {
    let reached = async {
        loop {
            let domain = domains.of_after(process, boot_now()).await.ok()?;
            let distance = domain.current?.0.abs_diff(size.0);
            if distance <= tolerance(domain.max).0 {
                return Some(());
            }
        }
    };
    matches!(timeout(FOLLOWS, reached).await, Ok(Some(())))
}

#[cfg(test)]
mod tests;
