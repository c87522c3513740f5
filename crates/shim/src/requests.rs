//! A worker's requests that move pages, turn by turn: between two turns the lock is free, and
//! faults are served.

use protocol::layout::{BLOCK_PAGES, PageState};
use protocol::{Merge, Merged, Pages, Refusal, State, Taken, Tracking};
use sys::memory_map::{HUGE_PAGE_BYTES, PAGE_BYTES};
use sys::pool_maps;

use crate::buffer::AT_ONCE;
use crate::channel::Channel;
use crate::disks::DiskCheck;
use crate::engine::{Engine, give_back, lock, lock_settled};
use crate::page_ops::PageOps;
use crate::process::{pagemap, userfaultfd};
use crate::time::{Nanos, now};
use crate::tracker::Tracker;
use crate::turns::turn;
use crate::{alerts, cuts, disks, freed, hot_set, merge, unshare};

/// Starts or changes tracking; returns the number of granules that were revoked.
///
/// # Errors
/// Nothing can be tracked now, with the reason; or the kernel's.
pub(crate) fn track(tracking: Tracking) -> Result<u32, Refusal> {
    if let (Some(granules), false) = (tracking.hot_set, hot_set::IS_HERE) {
        let why = format!("hot_set: {granules}: this shim was built without (feature hot-set)");
        return Err(Refusal::NotTracking { why });
    }
    let current = lock().ops.tracker.as_ref().map(Tracker::tracking);
    if current.is_some_and(|current| current.granule_pages != tracking.granule_pages) {
        give_back(None);
    }
    let before = {
        let mut engine = lock();
        match &mut engine.ops.tracker {
            Some(tracker) if tracker.is_releasing() => {
                let why = "everything is being given back".to_owned();
                return Err(Refusal::NotTracking { why });
            }
            Some(tracker) => {
                let before = tracker.tracking();
                tracker.change(tracking);
                Some(before)
            }
            None => {
                engine.begin_tracking(tracking)?;
                None
            }
        }
    };
    let same = |before: Tracking| before.hot_set.is_some() && before.sample == tracking.sample;
    if tracking.hot_set.is_none() || before.is_some_and(same) {
        return Ok(in_turns(Tracker::shrink_hot_set));
    }
    if let Some(tracker) = &mut lock().ops.tracker {
        tracker.begin_arming();
    }
    Ok(in_turns(Tracker::arm_some) + in_turns(Tracker::shrink_hot_set))
}

/// Revokes granules; returns how many were accessible before.
///
/// # Errors
/// Tracking is off, with the reason.
pub(crate) fn revoke(granules: &[u32]) -> Result<u32, Refusal> {
    each(granules, Tracker::revoke)
}

/// Brings granules back; returns how many were revoked.
///
/// # Errors
/// Tracking is off, with the reason.
pub(crate) fn recall(granules: &[u32]) -> Result<u32, Refusal> {
    each(granules, Tracker::recall)
}

/// Applies `act` to these granules, turn by turn; returns for how many it succeeded.
fn each(
    granules: &[u32],
    mut act: impl FnMut(&mut Tracker, &Channel, u32) -> bool,
) -> Result<u32, Refusal> {
    let (state, is_on) = {
        let engine = lock();
        let tracker = engine.ops.tracker.as_ref();
        (engine.state(), tracker.is_some_and(|tracker| !tracker.is_releasing()))
    };
    if !is_on {
        let why = match state {
            State::Suspended { why } | State::Unsupported { why } => why,
            State::Off | State::On(_) => "send Track first".to_owned(),
        };
        return Err(Refusal::NotTracking { why });
    }
    let mut rest = granules.iter();
    Ok(in_turns(|tracker, channel, deadline| {
        let mut done = 0;
        while now() <= deadline {
            let Some(&granule) = rest.next() else { return (done, true) };
            done += u32::from(act(tracker, channel, granule));
        }
        (done, false)
    }))
}

/// Does work turn by turn until it reports that it is done, or everything is being given back.
fn in_turns(mut work: impl FnMut(&mut Tracker, &Channel, Nanos) -> (u32, bool)) -> u32 {
    let mut total = 0;
    loop {
        let mut engine = lock();
        let PageOps { tracker: Some(tracker), channel: Some(channel), .. } = &mut engine.ops else {
            return total;
        };
        if tracker.is_releasing() {
            return total;
        }
        let (count, done) = work(tracker, channel, turn());
        total += count;
        if done {
            return total;
        }
    }
}

/// Replaces the merged pages of this run by copies; returns their number. The kernel copies in
/// place those that cannot be replaced, unless QEMU watches them.
///
/// # Errors
/// QEMU watches writes to these pages itself; or the kernel's.
pub(crate) fn unshare(page: u32, pages: u32) -> Result<u32, Refusal> {
    let merged = || {
        let of = |channel: &Channel| channel.parts(page, pages, PageState::Merged);
        lock().ops.channel.as_ref().map(of).into_iter().flatten()
    };
    let count: u64 = merged().map(|part| part.range.len / PAGE_BYTES).sum();
    let is_possible = userfaultfd().is_ok_and(cuts::is_possible) && lock().obstacle().is_none();
    let last = page.saturating_add(pages);
    let turns = || (page..last).step_by(AT_ONCE as usize).map(|at| (at, AT_ONCE.min(last - at)));
    if count > 0 && is_possible {
        merged().for_each(|part| unshare::look_up(part.range));
        for (page, pages) in turns() {
            let replaced = {
                let Engine { ops, inhibitors, .. } = &mut *lock();
                cuts::unshare_turn(ops, inhibitors, page, pages)
            };
            for part in replaced {
                let Engine { ops, inhibitors, cuts, .. } = &mut *lock();
                cuts.join_at_ends(ops, inhibitors, part, HUGE_PAGE_BYTES);
            }
        }
    }
    for (page, pages) in turns() {
        let engine = lock_settled();
        cuts::copy_turn(&engine.ops, &engine.inhibitors, page, pages)?;
    }
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Merges equal pages, turn by turn, while `is_wanted` holds. The next worker relies on no merge
/// of the last one being under way.
///
/// # Errors
/// Nothing can be merged now, with the reason, and nothing was merged.
pub(crate) fn merge(runs: &[Merge], is_wanted: impl Fn() -> bool) -> Result<Merged, Refusal> {
    recount_if_due();
    let mut disks = DiskCheck::new();
    let mut all: Option<Merged> = None;
    for turn in merge::turns(runs) {
        let mut rest = turn.as_slice();
        while !rest.is_empty() && is_wanted() {
            let turn = merge_next(&mut disks, rest);
            let (done, merged) = match (turn, &all) {
                (Ok(done), _) => done,
                (Err(refusal), None) => return Err(refusal),
                // The merges so far stay done.
                (Err(_), Some(_)) => {
                    (rest.len(), Merged { kept: merge::page_sum(rest), ..Merged::default() })
                }
            };
            *all.get_or_insert_default() += merged;
            rest = &rest[done..];
        }
    }
    let all = all.unwrap_or_default();
    if all.shared > 0 {
        // The watchdog may have seen nothing to watch, and sleep.
        alerts::ring();
    }
    Ok(all)
}

/// Does a turn of merging if all disks are known to pin. A file opened meanwhile is checked
/// first: QEMU does not get it before the turn is over.
fn merge_next(disks: &mut DiskCheck, runs: &[Merge]) -> Result<(usize, Merged), Refusal> {
    loop {
        let seen = disks::opened();
        if let Some(why) = disks.objection(seen) {
            return Err(Refusal::NotMerging { why: why.to_owned() });
        }
        let mut engine = lock();
        if disks::opened() == seen {
            let Engine { ops, inhibitors, cuts, pool, .. } = &mut *engine;
            return merge::merge_turn(ops, inhibitors, pool.as_ref(), cuts.is_written, runs);
        }
    }
}

/// Counts the mappings again if there was no room for more. Not called by the fault thread.
fn recount_if_due() {
    if !lock().cuts.is_recount_due() {
        return;
    }
    let all = pool_maps::count(std::process::id()).unwrap_or(u32::MAX);
    let mut engine = lock();
    let runs = engine.ops.channel.as_ref().map_or(0, Channel::merged_runs);
    engine.cuts.recounted(all, runs);
}

/// Has the kernel drop the freed pages of these runs while `is_wanted` holds; returns the result.
///
/// # Errors
/// Nothing can be taken now, with the reason, and nothing was taken; or the kernel's.
pub(crate) fn take(runs: &[Pages], is_wanted: impl Fn() -> bool) -> Result<Taken, Refusal> {
    let mut all = None;
    for turn in runs.iter().flat_map(|run| freed::blocks(*run)) {
        if !is_wanted() {
            break;
        }
        let taken = take_turn(turn);
        match (taken, &mut all) {
            (Ok(taken), all) => *all.get_or_insert_default() += taken,
            (Err(refusal), None) => return Err(refusal),
            // The pages taken so far stay taken.
            (Err(_), Some(_)) => break,
        }
    }
    Ok(all.unwrap_or_default())
}

/// Takes a part of one block.
fn take_turn(of: Pages) -> Result<Taken, Refusal> {
    let no_tables = || Refusal::NotTaking { why: "no page tables".to_owned() };
    let pagemap = pagemap().ok_or_else(no_tables)?;
    let parts = {
        let engine = lock();
        freed::to_take(&engine.ops, &engine.inhibitors, of)?
    };
    let mut taken = Taken::default();
    for (at, part) in parts.iter().enumerate() {
        match freed::take_part(pagemap, part.range) {
            Ok(of_part) => {
                taken += of_part;
                let engine = lock();
                let Engine { ops, inhibitors, .. } = &*engine;
                freed::taken(ops, inhibitors, pagemap, part.range, of_part.kept);
            }
            Err(refusal) if at == 0 => return Err(refusal),
            // The pages taken so far stay taken.
            Err(_) => break,
        }
    }
    if let Some(channel) = &lock().ops.channel {
        channel.forget_empty_block(of.page / BLOCK_PAGES);
    }
    Ok(taken)
}

/// Makes the freed pages of these runs plain; returns their number.
pub(crate) fn keep(runs: &[Pages]) -> u32 {
    let turns = runs.iter().flat_map(|run| freed::blocks(*run));
    turns.map(|turn| freed::keep(&lock().ops, turn)).sum()
}
