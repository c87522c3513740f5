//! Makes rows of ticks: a reading per VM and tick, means of coarser steps, and changes without
//! repetitions.
//!
//! The sampler does no I/O: time comes with the ticks. A coarse row stands for the step that
//! *began* at its time. Its swap rate is the mean over the step, so a short burst is not lost;
//! its sizes are the last ones of the step.

use std::collections::BTreeMap;

use model::{
    Action, Bytes, Cold, Dedup, FreePages, GroupName, Loan, Millis, Mode, PagesPerMs, Reading,
    Reason, Time, VmName, VmView, plan::Outcome,
};

use api::published::Published;
use api::swap_meter::SwapMeter;
use policy::tuning;

use crate::loan_news::LoanNews;

/// The coarser steps, in seconds. Every tick is also kept, as step [`FINEST_S`].
pub(super) const COARSE_S: [u32; 2] = [10, 60];
/// The step that stands for "every tick".
pub(super) const FINEST_S: u32 = 1;
/// A repeated recommendation is written once in this time.
const ECHO_MS: u64 = 60_000;

/// Readings of one VM at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct VmSample {
    pub(super) used: Option<Bytes>,
    pub(super) balloon: Option<Bytes>,
    pub(super) target: Option<Bytes>,
    pub(super) swap_per_s: Option<Bytes>,
    pub(super) working_set: Option<Bytes>,
    pub(super) dedup: Option<Dedup>,
    pub(super) free_pages: Option<FreePages>,
    /// Its resident and paged-out memory, if the host pages it out.
    pub(super) cold: Option<Cold>,
    /// The disks that Overbook serves.
    pub(super) disks: Option<Disks>,
    /// The scan rate of its group.
    pub(super) scan_rate: Option<PagesPerMs>,
}

/// All disks of a VM that Overbook serves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Disks {
    /// The part of them that is in repositories.
    pub(super) in_repositories: Bytes,
    /// Median read time of the slowest disk, in microseconds.
    pub(super) read_us: u64,
}

/// A row of readings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReadingRow {
    pub(super) step_s: u32,
    pub(super) wall_ms: u64,
    pub(super) vm: VmName,
    pub(super) sample: VmSample,
}

/// A row of decisions.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ChangeRow {
    pub(super) wall_ms: u64,
    pub(super) vm: VmName,
    pub(super) mode: Mode,
    pub(super) is_take: bool,
    pub(super) target: Bytes,
    pub(super) reason: Reason,
}

/// A row of loans.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LoanRecord {
    pub(super) wall_ms: u64,
    pub(super) mode: Mode,
    pub(super) lender: GroupName,
    pub(super) loan: Loan,
}

/// A row of moves between hosts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MoveRow {
    pub(super) wall_ms: u64,
    pub(super) vm: VmName,
    pub(super) words: String,
}

/// Everything that one tick adds.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) readings: Vec<ReadingRow>,
    pub(super) changes: Vec<ChangeRow>,
    pub(super) loans: Vec<LoanRecord>,
    pub(super) moves: Vec<MoveRow>,
}

/// State kept between ticks.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    vms: BTreeMap<VmName, Track>,
    loans: LoanNews,
    /// The number of the latest recorded news of a move.
    moves: u64,
}

#[derive(Debug, Default)]
struct Track {
    meter: SwapMeter,
    steps: [CoarseStep; COARSE_S.len()],
    last_change: Option<(u64, Bytes)>,
    last_outcome: Option<Outcome>,
}

impl Sampler {
    /// The rows of one tick.
    pub(super) fn rows(&mut self, tick: &Published) -> Rows {
        let mut rows = Rows::default();
        let gone: Vec<VmName> =
            self.vms.keys().filter(|vm| !tick.view.vms.contains_key(*vm)).cloned().collect();
        for vm in gone {
            let track = self.vms.remove(&vm).unwrap_or_default();
            let ended = track.steps.iter().zip(COARSE_S).filter_map(|(s, len)| s.row(len, &vm));
            rows.readings.extend(ended);
        }
        for (vm, view) in &tick.view.vms {
            let track = self.vms.entry(vm.clone()).or_default();
            track.readings(vm, view, tick, &mut rows.readings);
            rows.changes.extend(track.change(vm, tick));
            rows.changes.extend(track.outcome(vm, tick));
        }
        let (wall_ms, mode) = (tick.wall_ms, tick.plan.mode);
        let loans = self.loans.of(&tick.plan, wall_ms).into_iter();
        let row = |(lender, loan): (&GroupName, &Loan)| LoanRecord {
            wall_ms,
            mode,
            lender: lender.clone(),
            loan: loan.clone(),
        };
        rows.loans.extend(loans.map(row));
        if let Some(pool) = &tick.pool {
            rows.moves.extend(pool.moves.since(self.moves).map(|news| MoveRow {
                wall_ms,
                vm: news.vm.clone(),
                words: news.progress.to_string(),
            }));
            self.moves = pool.moves.latest();
        }
        rows
    }
}

impl Track {
    fn readings(
        &mut self,
        vm: &VmName,
        view: &VmView,
        tick: &Published,
        rows: &mut Vec<ReadingRow>,
    ) {
        let decision = tick.plan.vms.get(vm);
        let group = decision.and_then(|decision| decision.group.as_ref());
        let sample = VmSample {
            used: policy::used(view).map(|r| r.value),
            balloon: view.balloon.map(|r| r.value),
            target: decision.and_then(|decision| decision.target),
            swap_per_s: self.meter.rate(view, tick.at),
            working_set: young(view.tracking.as_ref(), tick.at, tuning::USED_STALE_AFTER)
                .and_then(|t| t.working_set),
            dedup: young(view.dedup.as_ref(), tick.at, tuning::USED_STALE_AFTER).copied(),
            free_pages: young(view.free_pages.as_ref(), tick.at, tuning::FREED_STALE_AFTER)
                .copied(),
            cold: young(view.cold.as_ref(), tick.at, tuning::USED_STALE_AFTER).copied(),
            disks: disks(view, tick.at),
            scan_rate: group.and_then(|group| tick.plan.scans.get(group)?.rate),
        };
        let wall_ms = tick.wall_ms;
        rows.push(ReadingRow { step_s: FINEST_S, wall_ms, vm: vm.clone(), sample });
        for (step, length_s) in self.steps.iter_mut().zip(COARSE_S) {
            let start_ms = wall_ms - wall_ms % (u64::from(length_s) * 1000);
            if step.count > 0 && step.start_ms != start_ms {
                rows.extend(step.row(length_s, vm));
                *step = CoarseStep::default();
            }
            step.add(start_ms, sample);
        }
    }

    fn change(&mut self, vm: &VmName, tick: &Published) -> Option<ChangeRow> {
        let change = tick.plan.vms.get(vm)?.change.as_ref()?;
        let Action::Resize { target, .. } = change.action;
        let is_echo = self
            .last_change
            .is_some_and(|(at, last)| last == target && tick.wall_ms.saturating_sub(at) < ECHO_MS);
        if change.is_repeat || is_echo {
            return None;
        }
        self.last_change = Some((tick.wall_ms, target));
        Some(ChangeRow {
            wall_ms: tick.wall_ms,
            vm: vm.clone(),
            mode: tick.plan.mode,
            is_take: change.is_take,
            target,
            reason: change.reason.clone(),
        })
    }
}

/// The VM's disks together. `None`: Overbook serves none, or their process does not answer.
fn disks(view: &VmView, now: Time) -> Option<Disks> {
    let disks = view.disks.values();
    let known = disks.filter_map(|disk| young(Some(disk), now, tuning::USED_STALE_AFTER));
    known.fold(None, |all: Option<Disks>, disk| {
        let all = all.unwrap_or(Disks { in_repositories: Bytes::ZERO, read_us: 0 });
        let in_repositories =
            disk.repositories.map_or(Bytes::ZERO, |repositories| repositories.held);
        let read_us = all.read_us.max(disk.read_us_median);
        Some(Disks { in_repositories: all.in_repositories.plus(in_repositories), read_us })
    })
}

/// The value if it is at most `most` old. An older one does not belong to the time of the row.
fn young<T>(reading: Option<&Reading<T>>, now: Time, most: Millis) -> Option<&T> {
    let reading = reading.filter(|reading| reading.age(now) <= most)?;
    Some(&reading.value)
}

impl Track {
    /// The saving of a move that was recorded earlier, once.
    fn outcome(&mut self, vm: &VmName, tick: &Published) -> Option<ChangeRow> {
        let outcome = tick.plan.vms.get(vm)?.outcome?;
        if self.last_outcome.replace(outcome) == Some(outcome) {
            return None;
        }
        let Outcome { from, to, expected, saved, .. } = outcome;
        Some(ChangeRow {
            wall_ms: tick.wall_ms,
            vm: vm.clone(),
            mode: tick.plan.mode,
            is_take: to < from,
            target: to,
            reason: Reason::Saved { expected, saved },
        })
    }
}

/// An open coarse step.
#[derive(Debug, Default)]
struct CoarseStep {
    start_ms: u64,
    count: u64,
    last: VmSample,
    swap_sum: Bytes,
    swap_count: u64,
}

impl CoarseStep {
    fn add(&mut self, start_ms: u64, sample: VmSample) {
        self.start_ms = start_ms;
        self.count += 1;
        self.last = sample;
        if let Some(rate) = sample.swap_per_s {
            self.swap_sum = self.swap_sum.plus(rate);
            self.swap_count += 1;
        }
    }

    fn row(&self, length_s: u32, vm: &VmName) -> Option<ReadingRow> {
        let mean = (self.swap_count > 0).then(|| self.swap_sum.share(1, self.swap_count));
        let sample = VmSample { swap_per_s: mean, ..self.last };
        let row = ReadingRow { step_s: length_s, wall_ms: self.start_ms, vm: vm.clone(), sample };
        (self.count > 0).then_some(row)
    }
}
