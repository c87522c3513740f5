//! Controls the kernel's KSM: drives it, pauses it, and restores the original settings.
//!
//! **Originals first.** Before a setting is changed for the first time, the journal has its
//! value. The record covers every setting that is, or may be, changed. So a restarted daemon
//! never takes its own settings for the operator's, and a daemon that was killed between two
//! writes simply repeats them.
//!
//! **Other writers.** Before each order it checks whether the settings still have the values that
//! it wrote. A setting that differs now belongs to another writer: it is removed from the record
//! and never written again. KSM is not driven any more, and our other settings are restored. Only
//! restoring everything ends that state. Changes that others make while no daemon runs are not
//! noticed.
//!
//! **Unmerging** copies all merged pages of the whole host. It is done only if KSM did not run
//! before and had merged nothing, and if the host has room for the copies. Otherwise the pages
//! stay merged until guests write to them, and the record stays, so that unmerging is retried.
//!
//! All of this waits for the kernel and the disk, so it runs on a blocking thread ([`task`]).

mod lookout;
mod task;

use model::{Bytes, KsmOrder, PagesPerMs};
use policy::tuning;
use sys::ksm::{Counters, Knob, Ksm, Settings};
use sys::meminfo::MemInfo;
use sys::procfs::ProcError;

use super::records::Records;
use crate::journal::{JournalError, KsmRecord};

pub use lookout::{Looking, Lookout};
pub use task::{KsmDriver, KsmStatus};

/// Pause between two batches of pages: the kernel's own default. The rate determines the batch
/// size.
const SLEEP_MS: u32 = 20;

/// Why KSM does not do what was ordered.
#[derive(Debug, thiserror::Error)]
pub enum KsmTrouble {
    /// The kernel was built without KSM.
    #[error("the kernel has no KSM")]
    Absent,
    /// The kernel refuses, or its files are invalid.
    #[error("kernel KSM cannot be driven: {0}")]
    Kernel(ProcError),
    /// The original settings cannot be recorded.
    #[error("kernel KSM is not touched: {0}")]
    Journal(#[from] JournalError),
    /// An administrator, or a program like ksmtuned, drives it.
    #[error(
        "kernel KSM is left alone: another program changed {0} (`overbook release` and `resume` begin anew)"
    )]
    TakenOver(String),
    /// Unmerging would use up the host's memory.
    #[error(
        "kernel KSM has stopped, but {merged} of pages stay merged until the guests write to them: the host \
         has room for copies of {room} only"
    )]
    NoRoom {
        /// Memory that unmerging would take.
        merged: Bytes,
        /// Memory that the host has beyond its reserve.
        room: Bytes,
    },
}

impl From<ProcError> for KsmTrouble {
    fn from(error: ProcError) -> Self {
        match error {
            ProcError::Gone { .. } => Self::Absent,
            error => Self::Kernel(error),
        }
    }
}

/// Description of the actions taken; `None`: no action was needed.
pub type Outcome = Result<Option<String>, KsmTrouble>;

/// The writer of KSM's settings. There is only one at a time: it belongs to the holder of the
/// state's lock.
#[derive(Debug)]
pub struct Hand {
    ksm: Ksm,
    records: Records,
    /// Memory that unmerged copies may take now.
    room: fn() -> Bytes,
    /// The settings that it wrote and expects to find.
    written: Settings,
}

impl Hand {
    /// A writer that has not written anything yet.
    #[must_use]
    pub fn new(ksm: Ksm, records: Records) -> Self {
        Self { ksm, records, room: room_of_host, written: Settings::new() }
    }

    /// Carries out an order; repeating it is harmless.
    ///
    /// # Errors
    /// Why the order is not, or not wholly, carried out.
    pub fn obey(&mut self, order: KsmOrder) -> Outcome {
        match order {
            KsmOrder::Undecided => Ok(None),
            KsmOrder::Drive(rate) => self.drive(rate).map(|()| None),
            KsmOrder::Rest => self.rest().map(|()| None),
            KsmOrder::PutBack => self.put_back(),
        }
    }

    /// KSM's counters; `None`: the kernel has no KSM.
    #[must_use]
    pub fn counters(&self) -> Option<Counters> {
        self.ksm.counters().ok()
    }

    fn drive(&mut self, rate: PagesPerMs) -> Result<(), KsmTrouble> {
        let now = self.ksm.settings()?;
        let mut record = match self.records.ksm() {
            Some(record) => self.yield_to_others(record, &now)?,
            None => self.first_record()?,
        };
        if let Some(change) = record.taken_over.clone() {
            self.undo_settings(record, &now)?;
            return Err(KsmTrouble::TakenOver(change));
        }
        let is_complete = now.keys().all(|knob| record.before(*knob).is_some());
        if !is_complete {
            // If no setting can be written, no record is needed.
            self.ksm.check_writable(&now)?;
            for (knob, value) in &now {
                record.before.entry(knob.name().to_owned()).or_insert_with(|| value.clone());
            }
            self.records.set_ksm(Some(record))?;
        }
        let wanted = settings_at(rate);
        wanted.into_iter().filter(|(knob, _)| now.contains_key(knob)).try_for_each(
            |(knob, value)| {
                self.set(&now, knob, &value)?;
                self.written.insert(knob, value);
                Ok(())
            },
        )
    }

    fn first_record(&self) -> Result<KsmRecord, KsmTrouble> {
        let had_merged = !self.ksm.counters()?.shared.is_zero();
        Ok(KsmRecord { had_merged, ..KsmRecord::default() })
    }

    fn rest(&mut self) -> Result<(), KsmTrouble> {
        let Some(record) = self.records.ksm() else { return Ok(()) };
        let now = self.ksm.settings()?;
        let record = self.yield_to_others(record, &now)?;
        let taken_over = record.taken_over.clone();
        self.undo_settings(record, &now)?;
        taken_over.map_or(Ok(()), |change| Err(KsmTrouble::TakenOver(change)))
    }

    fn put_back(&mut self) -> Outcome {
        let Some(record) = self.records.ksm() else { return Ok(None) };
        let now = self.ksm.settings()?;
        let record = self.yield_to_others(record, &now)?;
        let record = self.undo_settings(record, &now)?;
        let mut done = vec![match &record.taken_over {
            Some(change) => format!("left to the program that changed {change}"),
            None => "its settings are what they were".to_owned(),
        }];
        if let Some(run) = record.before(Knob::Run) {
            let merged = self.ksm.counters()?;
            let merged = merged.saved.plus(merged.shared);
            if record.had_merged && run != "2" {
                done.push("what is merged stays merged, as pages were before Overbook".to_owned());
            } else if run == "2" || !merged.is_zero() {
                let room = (self.room)();
                if merged > room {
                    return Err(KsmTrouble::NoRoom { merged, room });
                }
                self.ksm.set(Knob::Run, "2")?;
                self.ksm.set(Knob::Run, run)?;
                done.push(format!("{merged} unmerged"));
            }
        }
        self.records.set_ksm(None)?;
        self.written.clear();
        Ok(Some(done.join(", ")))
    }

    /// Gives up the settings that another writer has changed.
    fn yield_to_others(
        &mut self,
        mut record: KsmRecord,
        now: &Settings,
    ) -> Result<KsmRecord, KsmTrouble> {
        let is_other = |(knob, ours): &(&Knob, &String)| now.get(*knob) != Some(*ours);
        let others: Settings =
            self.written.iter().filter(is_other).map(|(k, v)| (*k, v.clone())).collect();
        for (knob, ours) in &others {
            let theirs = now.get(knob).map_or("nothing", String::as_str);
            record.before.remove(knob.name());
            record.taken_over = Some(format!("{} from {ours} to {theirs}", knob.name()));
        }
        if !others.is_empty() {
            self.records.set_ksm(Some(record.clone()))?;
            self.written.retain(|knob, _| !others.contains_key(knob));
        }
        Ok(record)
    }

    /// Stops KSM if it did not run before, and restores the other settings. Afterwards the record
    /// only covers unmerging, if that is still to be done.
    fn undo_settings(
        &mut self,
        mut record: KsmRecord,
        now: &Settings,
    ) -> Result<KsmRecord, KsmTrouble> {
        let before = record.clone();
        // KSM is stopped first.
        for knob in Knob::ALL.into_iter().rev() {
            let Some(value) = before.before(knob) else { continue };
            let is_unmerging_left = knob == Knob::Run && value != "1";
            let value = if is_unmerging_left { "0" } else { value };
            // While the advisor chooses the number of pages, the kernel accepts no other value.
            let is_advised = knob == Knob::PagesToScan
                && now.get(&Knob::AdvisorMode).is_some_and(|mode| mode != "none");
            if !is_advised {
                self.set(now, knob, value)?;
            }
            if is_unmerging_left {
                self.written.insert(knob, value.to_owned());
            } else {
                self.written.remove(&knob);
                record.before.remove(knob.name());
            }
        }
        let is_done = record.before.is_empty() && record.taken_over.is_none();
        self.records.set_ksm((!is_done).then(|| record.clone()))?;
        Ok(record)
    }

    /// Sets a knob, unless it has the value already.
    fn set(&self, now: &Settings, knob: Knob, value: &str) -> Result<(), KsmTrouble> {
        if now.get(&knob).is_some_and(|now| now != value) {
            self.ksm.set(knob, value)?;
        }
        Ok(())
    }
}

/// The settings with which KSM scans this many pages in a millisecond, apart from the time that
/// scanning takes.
fn settings_at(rate: PagesPerMs) -> Settings {
    let pages = rate.0.saturating_mul(SLEEP_MS);
    Settings::from([
        (Knob::AdvisorMode, "none".to_owned()),
        (Knob::PagesToScan, pages.to_string()),
        (Knob::SleepMillisecs, SLEEP_MS.to_string()),
        (Knob::Run, "1".to_owned()),
    ])
}

/// Memory that the host has beyond the default reserve. It does not depend on the configuration,
/// because `release` must work without it.
fn room_of_host() -> Bytes {
    MemInfo::read().map_or(Bytes::ZERO, |host| {
        host.available.minus(host.total.percent(tuning::HOST_RESERVE_PERCENT))
    })
}

#[cfg(test)]
mod tests;
