//! The hand on the kernel's KSM: drives it, has it rest, and puts back what was there before.
//!
//! **Originals first.** Before a setting is changed for the first time its value is in the journal.
//! What is on record is what is, or may be, other than it was; so a daemon that starts again never
//! takes its own settings for the operator's, and whoever was killed between two writes just writes
//! again.
//!
//! **Others.** Before it does anything it looks whether the settings still are what it wrote. One
//! that is not is somebody else's from then on: it is struck from the record and never written
//! again; KSM is not driven any more, and what is left of ours goes back. Only putting everything
//! back ends that. What others change while no daemon runs is not noticed.
//!
//! **Unmerging** copies all that is merged, on the whole host. It is done if KSM did not run before
//! and had merged nothing, and only if the host has the room; else the pages stay merged until
//! guests write to them, and the record stays, so that it is tried again.
//!
//! All of this waits for the kernel and the disk: it runs on a thread that may ([`task`]).

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
pub use task::{Known, KsmDriver};

/// The pause between two batches of pages: the kernel's own default. The rate makes the batch.
const SLEEP_MS: u32 = 20;

/// Why KSM is not as it was ordered to be.
#[derive(Debug, thiserror::Error)]
pub enum KsmTrouble {
    /// The kernel was built without it.
    #[error("the kernel has no KSM")]
    Absent,
    /// The kernel refuses, or says what makes no sense.
    #[error("kernel KSM cannot be driven: {0}")]
    Kernel(ProcError),
    /// What was there before cannot be recorded.
    #[error("kernel KSM is not touched: {0}")]
    Journal(#[from] JournalError),
    /// An admin, or a program like ksmtuned, drives it.
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
        /// What unmerging would take.
        merged: Bytes,
        /// What the host has beyond its reserve.
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

/// What was done, in words; `None`: nothing was to be done.
pub type Outcome = Result<Option<String>, KsmTrouble>;

/// Whoever writes KSM's settings. There is one at a time: it belongs to the holder of the state's
/// lock.
#[derive(Debug)]
pub struct Hand {
    ksm: Ksm,
    records: Records,
    /// Memory that copies may take now.
    room: fn() -> Bytes,
    /// What it has written and expects to find.
    written: Settings,
}

impl Hand {
    /// A hand that has not done anything yet.
    #[must_use]
    pub fn new(ksm: Ksm, records: Records) -> Self {
        Self { ksm, records, room: room_of_host, written: Settings::new() }
    }

    /// Does what is ordered; harmless to repeat.
    ///
    /// # Errors
    /// Why it is not, or not wholly, done.
    pub fn obey(&mut self, order: KsmOrder) -> Outcome {
        match order {
            KsmOrder::Undecided => Ok(None),
            KsmOrder::Drive(rate) => self.drive(rate).map(|()| None),
            KsmOrder::Rest => self.rest().map(|()| None),
            KsmOrder::PutBack => self.put_back(),
        }
    }

    /// What KSM has come to; `None` where there is none.
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
            // Where nothing can be written nothing needs to be on record.
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

    /// Gives up the settings that somebody else has changed.
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

    /// Stops what did not run before, and puts back the other settings. What is left on record is
    /// what is left to undo: unmerging.
    fn undo_settings(
        &mut self,
        mut record: KsmRecord,
        now: &Settings,
    ) -> Result<KsmRecord, KsmTrouble> {
        let before = record.clone();
        // KSM stops first.
        for knob in Knob::ALL.into_iter().rev() {
            let Some(value) = before.before(knob) else { continue };
            let is_unmerging_left = knob == Knob::Run && value != "1";
            let value = if is_unmerging_left { "0" } else { value };
            // While the advisor chooses the number of pages the kernel takes no other.
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

    /// Sets a knob that says something else.
    fn set(&self, now: &Settings, knob: Knob, value: &str) -> Result<(), KsmTrouble> {
        if now.get(&knob).is_some_and(|now| now != value) {
            self.ksm.set(knob, value)?;
        }
        Ok(())
    }
}

/// The settings with which KSM looks at so many pages in a millisecond, as far as its own time
/// allows.
fn settings_at(rate: PagesPerMs) -> Settings {
    let pages = rate.0.saturating_mul(SLEEP_MS);
    Settings::from([
        (Knob::AdvisorMode, "none".to_owned()),
        (Knob::PagesToScan, pages.to_string()),
        (Knob::SleepMillisecs, SLEEP_MS.to_string()),
        (Knob::Run, "1".to_owned()),
    ])
}

/// What the host has beyond the default reserve. It must do without the configuration, as `release`
/// must.
fn room_of_host() -> Bytes {
    MemInfo::read().map_or(Bytes::ZERO, |host| {
        host.available.minus(host.total.percent(tuning::HOST_RESERVE_PERCENT))
    })
}

#[cfg(test)]
mod tests;
