//! With how much memory a VM missed how much, of late.
//!
//! **Problem.** A curve ends where a VM's memory does. It does not show what the guest's kernel
//! keeps for itself, and of a guest that thrashes nobody knows what lies in its swap: pages that
//! are read back and stay clean lie in swap and in memory. **Idea.** What it missed with each size
//! is remembered. Between two sizes misses fall evenly, for all that is known. What it lacks is
//! what it had when it missed nothing; where it never had so much it is looked for by giving:
//! little at first, twice as much each time that did not help.
//!
//! Misses are compared as the share of its time in which a VM waits for the disk: who waits all the
//! time cannot miss more. Who was given memory reads back for a while what lies in swap. That says
//! nothing of what it has now. Before it ever had enough, its swap tells how much that may be
//! ([`crate::slots`]).

use model::{Bytes, Millis, Time};
use serde::{Deserialize, Serialize};

use crate::{
    member::{Member, growth},
    memory::Asked,
    reads::Reads,
    slots::Slots,
    tuning,
};

/// What is known of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Experience {
    /// By size, from the smallest; who has more waits no more.
    seen: Vec<Seen>,
    /// What it worked on at most while it was not short, since the first of them.
    working_set: Bytes,
    /// What it has in use …
    level: Bytes,
    /// … since.
    level_at: Time,
    /// What it had free beyond what its kernel keeps; of late at least, while it is short …
    #[serde(default)]
    free: Option<Bytes>,
    /// … and when that was last more because it uses less.
    #[serde(default)]
    freed_at: Option<Time>,
    #[serde(default)]
    slots: Slots,
    /// What it needs by its swap, as of when it was short.
    #[serde(default)]
    in_swap: Option<(Bytes, Time)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Seen {
    size: Bytes,
    reads: Reads,
    /// The share of its time that it waited for them: by what the disk answered then.
    #[serde(default)]
    waits: f64,
    at: Time,
}

/// Takes in how a member does with what it has.
pub(crate) fn learn(member: &mut Member, disk: Reads, now: Time) {
    let is_short = member.is_short();
    let (held, is_settling) = (member.target, is_settling(member, now));
    let Ok(guest) = &member.guest else { return };
    let free = guest.free.minus(tuning::MARGIN_MIN);
    let unused = if is_short { Bytes::ZERO } else { free };
    let working_set = member.tracking.as_ref().and_then(|tracking| tracking.working_set);
    let memory = &mut member.memory;
    let stands = |asked: &Asked| asked.reached && age(asked, now) > tuning::STALE_AFTER;
    let stands = memory.asked.as_ref().is_none_or(stands);
    let known = &mut memory.experience;
    let size = held.minus(unused);
    known.note_free(free, is_short, stands, now);
    known.follow(size, working_set.filter(|_| !is_short), now);
    let is_calm = now.since(memory.short_at.max(known.level_at)) >= tuning::CALM;
    if is_calm {
        memory.given_at = None;
    }
    learn_from_swap(member, is_calm, now);
    // The rate still knows of the seconds before it was calm.
    let memory = &mut member.memory;
    let reads = if memory.swap_in.is_zero() { Reads::default() } else { memory.reads };
    let says_something = if is_short { reads != Reads::default() } else { is_calm };
    if !is_settling && says_something {
        let waits = reads.wait_for(disk);
        memory.experience.note(Seen { size, reads, waits, at: now }, disk);
    }
}

/// Takes in what its swap tells of what it needs, while it suffers.
fn learn_from_swap(member: &mut Member, is_calm: bool, now: Time) {
    let used = member.target.minus(member.unfilled());
    let (suffers, most) = (member.suffers(), member.limits.max);
    let memory = &mut member.memory;
    let patience = if memory.is_well_tracked() { tuning::MISSED_FOR } else { Millis(0) };
    let known = &mut memory.experience;
    known.slots.note(memory.counters.map(|counters| counters.value).unwrap_or_default(), now);
    if is_calm {
        known.slots.forget();
    } else if suffers {
        let need = known.slots.need(used, memory.set_apart, most, patience, now);
        known.in_swap = need.map(|need| (need, now)).or(known.in_swap);
    }
}

/// What a member that is short lacks, as far as its tracking does not tell.
pub(crate) fn lacking(member: &Member, disk: Reads, now: Time) -> Bytes {
    let references = member.tracking.as_ref().map_or(0.0, |tracking| tracking.references_per_s);
    let miss_ratio = member.memory.reads.faults / references;
    let known = &member.memory.experience;
    if reads_back(member, now) {
        known.enough(member.target, disk).map_or(Bytes::ZERO, |enough| enough.minus(member.target))
    } else {
        known.lacking(member.target, member.unfilled(), miss_ratio, disk)
    }
}

/// Whether what it has is not what it had some seconds ago, so that its faults say nothing yet.
fn is_settling(member: &Member, now: Time) -> bool {
    let asked = member.memory.asked.as_ref();
    let is_new = |asked: &Asked| !asked.reached || age(asked, now) < tuning::READ_BACK_WITHIN;
    asked.is_some_and(is_new) || reads_back(member, now)
}

/// Whether it was given memory a moment ago or has not filled it yet, and may be short because of
/// what it had before.
fn reads_back(member: &Member, now: Time) -> bool {
    let has_free = member.guest.as_ref().is_ok_and(|guest| guest.free > tuning::MARGIN_MIN);
    let within = if has_free { tuning::FILLED_WITHIN } else { tuning::READ_BACK_WITHIN };
    let asked = member.memory.asked.as_ref();
    asked.is_some_and(|asked| !asked.is_take && age(asked, now) < within)
}

fn age(asked: &Asked, now: Time) -> Millis {
    now.since(asked.said_at)
}

impl Experience {
    /// Takes in what it has free. It has freed something if that is more while its balloon
    /// `stands`. Who is short frees and fills all the time: of that, the least counts.
    fn note_free(&mut self, free: Bytes, is_short: bool, stands: bool, now: Time) {
        let before = self.free.unwrap_or(free);
        if is_short {
            self.free = Some(before.min(free));
            return;
        }
        if stands && free.minus(before) >= tuning::UNIT {
            self.freed_at = Some(now);
            self.slots.forget();
            self.in_swap = None;
        }
        self.free = Some(free);
    }

    /// Takes in what it has in use and works on now; of that, nothing is known while it is short.
    /// What is old, or was seen of programs that have ended, is forgotten: they leave memory free.
    /// One that runs works now on this, now on that.
    fn follow(&mut self, size: Bytes, working_set: Option<Bytes>, now: Time) {
        let is_remembered = |at: Time| now.since(at) < tuning::REMEMBERED;
        self.seen.retain(|seen| is_remembered(seen.at));
        self.in_swap = self.in_swap.filter(|(_, at)| is_remembered(*at));
        if let Some(working_set) = working_set {
            self.working_set = self.working_set.max(working_set);
            let is_less = working_set < self.working_set.percent(tuning::SAME_SET_PERCENT);
            let has_freed = |at| now.since(at) < tuning::FREED_WITHIN;
            if is_less && self.freed_at.is_some_and(has_freed) {
                *self = Self { slots: self.slots, free: self.free, ..Self::default() };
            }
        }
        // Whose programs grow is not short yet.
        if size >= self.level.plus(tuning::UNIT) {
            self.level_at = now;
        }
        self.level = size;
    }

    /// The latest counts: what contradicts it is forgotten.
    fn note(&mut self, new: Seen, disk: Reads) {
        let of = |seen: &Seen| seen.reads.wait_for(disk);
        let is_better_with_less = |seen: &Seen| seen.size < new.size && of(seen) < of(&new);
        if let Some(last) = self.seen.iter().rposition(is_better_with_less) {
            // It does something else now, to which smaller sizes say nothing either.
            self.seen.drain(..=last);
            self.in_swap = None;
        }
        let is_worse_with_more = |seen: &Seen| seen.size > new.size && of(seen) > of(&new);
        let is_near = |seen: &Seen| seen.size.0.abs_diff(new.size.0) < tuning::STEP_MIN.0;
        self.seen.retain(|seen| !(is_worse_with_more(seen) || is_near(seen)));
        let place = self.seen.partition_point(|seen| seen.size < new.size);
        self.seen.insert(place, new);
        if self.seen.len() > tuning::SIZES_REMEMBERED {
            let oldest = self.seen.iter().enumerate().min_by_key(|(_, seen)| seen.at);
            oldest.map(|(at, _)| at).map(|at| self.seen.remove(at));
        }
    }

    /// All sizes, and how much it waited with each.
    pub(crate) fn waits(&self, disk: Reads) -> impl Iterator<Item = (Bytes, f64)> {
        self.seen.iter().map(move |seen| (seen.size, seen.reads.wait_for(disk)))
    }

    /// The same, by what the disk answered then if that is more: while CPUs are busy with what all
    /// VMs miss, a few misses take all of a VM's time.
    pub(crate) fn losses(&self, disk: Reads) -> Vec<(Bytes, f64)> {
        let mut losses: Vec<(Bytes, f64)> = self.waits(disk).collect();
        let mut with_more: f64 = 0.0;
        for (loss, seen) in losses.iter_mut().zip(&self.seen).rev() {
            with_more = with_more.max(seen.waits).max(loss.1);
            loss.1 = with_more;
        }
        losses
    }

    /// What it needs at least, by all that is known.
    pub(crate) fn needed(&self, disk: Reads) -> Bytes {
        let losses = self.losses(disk);
        let short = losses.iter().rfind(|(_, waits)| shows_shortage(*waits));
        short.map_or(Bytes::ZERO, |&(short, _)| {
            self.enough(short, disk).unwrap_or(short.plus(tuning::UNIT))
        })
    }

    /// The least above `size` with which it was not short; else, what it needs by its swap, unless
    /// it had as much in vain.
    pub(crate) fn enough(&self, size: Bytes, disk: Reads) -> Option<Bytes> {
        let is_enough = |(with, waits): &(Bytes, f64)| *with > size && !shows_shortage(*waits);
        let seen = self.waits(disk).find(is_enough).map(|(with, _)| with);
        let short = self.waits(disk).filter(|(_, waits)| shows_shortage(*waits)).last();
        let tried = size.max(short.map_or(Bytes::ZERO, |(with, _)| with));
        let by_swap = self.in_swap.map(|(need, _)| need);
        seen.or(by_swap.filter(|need| *need >= tried.plus(tuning::UNIT)))
    }

    /// What it had more when it was not short, or less so and a little beside; or as much again as
    /// it was given in vain. Where all of its memory is referred to alike, it lacks the share of it
    /// that it misses; so it lacks that at least.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    fn lacking(&self, held: Bytes, unfilled: Bytes, miss_ratio: f64, disk: Reads) -> Bytes {
        let is_telling = (0.0..=tuning::MISS_RATIO_MAX).contains(&miss_ratio);
        let missing = if is_telling { miss_ratio / (1.0 - miss_ratio) } else { 0.0 };
        let missing = Bytes((held.0 as f64 * missing) as u64);
        let least = self.waits(disk).find(|(_, waits)| shows_shortage(*waits));
        let by_swap = self.in_swap.map_or(Bytes::ZERO, |(need, _)| need);
        let in_vain = held.minus(least.map_or(held, |(least, _)| least).max(by_swap));
        let looked_for = in_vain.max(missing).min(growth(held)).minus(unfilled);
        let largest = self.seen.last().map(|seen| seen.size).filter(|size| *size > held);
        let largest = largest.map(|largest| largest.plus(tuning::UNIT));
        let known = self.enough(held, disk).or(largest);
        known.map_or(looked_for, |known| known.minus(held)).max(tuning::UNIT)
    }
}

fn shows_shortage(waits: f64) -> bool {
    waits >= tuning::SHORT_WAITS
}

#[cfg(test)]
impl Experience {
    /// With `size` it had so many faults per second.
    pub(crate) fn seen(size: Bytes, faults: f64) -> Self {
        let reads = Reads { faults, bytes: 0.0 };
        let seen = Seen { size, reads, waits: 0.0, at: Time::default() };
        Self { seen: vec![seen], ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Reads = Reads { faults: 1_000.0, bytes: 32e6 };

    /// Sizes in MiB and faults per second, one after the other.
    fn seen(sizes: &[(u64, f64)]) -> Experience {
        let mut known = Experience::default();
        for (at, (mib, faults)) in (0..).zip(sizes) {
            let reads = Reads { faults: *faults, bytes: 0.0 };
            let size = Bytes::mib(*mib);
            known.note(Seen { size, reads, waits: reads.wait_for(DISK), at: Time(at) }, DISK);
        }
        known
    }

    fn sizes(known: &Experience) -> Vec<u64> {
        known.seen.iter().map(|seen| seen.size.0 >> 20).collect()
    }

    fn lacking(known: &Experience, held: u64) -> u64 {
        known.lacking(Bytes::mib(held), Bytes::ZERO, f64::NAN, DISK).0 >> 20
    }

    #[test]
    fn what_is_lacking_is_looked_for_in_steps_that_double() {
        let known = seen(&[(300, 900.0)]);
        let mut sizes = vec![300];
        for step in 0..5 {
            sizes.push(sizes[step] + lacking(&known, sizes[step]));
        }
        assert_eq!(sizes, [300, 310, 320, 340, 380, 460]);
        assert_eq!(lacking(&known, 460), 138, "at last by no more than 30 %");
    }

    #[test]
    fn it_lacks_what_it_had_when_it_was_not_short() {
        let known = seen(&[(256, 0.0), (200, 900.0)]);
        assert_eq!([200, 225, 250, 256].map(|held| lacking(&known, held)), [56, 31, 10, 56]);
        assert_eq!(known.needed(DISK), Bytes::mib(256));
        assert_eq!(seen(&[(200, 900.0)]).needed(DISK), Bytes::mib(210));
        assert_eq!(lacking(&seen(&[(230, 300.0), (200, 900.0)]), 200), 40, "and a little beside");
    }

    #[test]
    fn what_would_be_lost_is_what_it_waited_when_all_waited_for_cpus() {
        let mut known = seen(&[(256, 0.0), (200, 250.0), (150, 251.0)]);
        let fast = Reads { faults: 10_000.0, ..DISK };
        let waits: Vec<f64> = known.waits(fast).map(|(_, waits)| waits).collect();
        assert_eq!(waits, [0.0251, 0.025, 0.0]);
        known.seen[0].waits = 0.1;
        let losses: Vec<f64> = known.losses(fast).into_iter().map(|(_, waits)| waits).collect();
        assert_eq!(losses, [0.25, 0.25, 0.0], "with less it loses no less");
    }

    #[test]
    fn what_lies_in_swap_tells_what_it_lacks_unless_more_was_enough_before() {
        let in_swap = Some((Bytes::mib(390), Time(0)));
        let known = Experience { in_swap, ..seen(&[(300, 900.0)]) };
        assert_eq!([300, 360, 375].map(|held| lacking(&known, held)), [90, 30, 15]);
        assert_eq!(
            [390, 400, 410].map(|held| lacking(&known, held)),
            [10, 10, 20],
            "beyond, it is looked for"
        );
        let known = Experience { in_swap, ..seen(&[(340, 0.0), (300, 900.0)]) };
        assert_eq!(lacking(&known, 300), 40);
        let known = Experience { in_swap, ..seen(&[(300, 900.0), (390, 900.0)]) };
        assert_eq!(known.enough(Bytes::mib(300), DISK), None, "it was tried");
    }

    #[test]
    fn who_misses_a_tenth_lacks_a_ninth_at_least() {
        let of = |miss_ratio| {
            Experience::default().lacking(Bytes::mib(300), Bytes::ZERO, miss_ratio, DISK)
        };
        let of = [0.0, 0.1, 0.5, 0.6, f64::INFINITY].map(|miss_ratio| of(miss_ratio).0 >> 20);
        assert_eq!(of, [10, 33, 90, 10, 10]);
    }

    #[test]
    fn the_latest_word_counts() {
        let known = seen(&[(300, 900.0), (400, 0.0), (350, 400.0)]);
        assert_eq!(sizes(&known), [300, 350, 400]);
        let known = seen(&[(300, 900.0), (350, 400.0), (400, 300.0), (310, 0.0)]);
        assert_eq!(sizes(&known), [300, 310], "not short with 310: not with more either");
        let known = seen(&[(100, 900.0), (300, 0.0), (500, 900.0)]);
        assert_eq!(sizes(&known), [500], "short with more than was enough: it does something else");
        assert_eq!(
            sizes(&seen(&[(300, 700.0), (320, 900.0)])),
            [300, 320],
            "both wait all the time"
        );
    }

    #[test]
    fn whose_programs_grow_is_not_level() {
        let mut known = Experience::default();
        let mut level_at = |second, mib| {
            let now = Time(0).after(Millis::secs(second));
            known.follow(Bytes::mib(mib), None, now);
            known.level_at.since(Time(0)).0 / 1000
        };
        assert_eq!([level_at(1, 200), level_at(2, 205), level_at(3, 230)], [1, 1, 3]);
        assert_eq!([level_at(4, 150), level_at(5, 155)], [3, 3], "who shrinks is");
    }

    #[test]
    fn what_was_seen_of_other_programs_or_long_ago_is_forgotten() {
        // In turn: what it has free of 300 MiB, and what it works on.
        let after = |readings: &[(u64, Option<u64>)], now| {
            let mut known = seen(&[(256, 0.0), (200, 900.0)]);
            for (free, mib) in readings {
                known.note_free(Bytes::mib(*free), false, true, now);
                known.follow(Bytes::mib(300 - free), mib.map(Bytes::mib), now);
            }
            known.seen.len()
        };
        let soon = Time(2);
        assert_eq!(after(&[(0, Some(200)), (40, Some(190))], soon), 2);
        assert_eq!(after(&[(0, Some(200)), (40, None)], soon), 2);
        assert_eq!(after(&[(0, Some(200)), (40, Some(50))], soon), 0);
        assert_eq!(after(&[(40, Some(200)), (40, Some(50))], soon), 2, "it has freed nothing");
        assert_eq!(after(&[(0, None)], Time(2).after(tuning::REMEMBERED)), 0);
    }

    #[test]
    fn who_was_short_has_freed_something_when_more_is_free_than_ever_was() {
        let freed = |before, readings: &[(u64, bool, bool)]| {
            let mut known = Experience { free: Some(Bytes::mib(before)), ..Experience::default() };
            for (free, is_short, stands) in readings {
                known.note_free(Bytes::mib(*free), *is_short, *stands, Time(1));
            }
            known.freed_at.is_some()
        };
        assert!(freed(200, &[(0, true, true), (200, true, true), (200, false, true)]));
        assert!(!freed(48, &[(48, true, true), (48, false, true)]), "it always keeps some");
        assert!(!freed(0, &[(100, false, false), (100, false, true)]), "it was given that");
    }

    #[test]
    fn only_so_much_is_remembered() {
        let sizes: Vec<(u64, f64)> = (0..50).map(|at| (1000 - at * 10, at as f64)).collect();
        assert_eq!(seen(&sizes).seen.len(), tuning::SIZES_REMEMBERED);
    }
}
