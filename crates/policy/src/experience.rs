//! With how much memory a VM missed how much, of late.
//!
//! **Problem.** A curve ends where a VM's memory does. It does not show what the guest's kernel keeps for itself, and of a guest that
//! thrashes nobody knows what lies in its swap: pages that are read back and stay clean lie in swap and in memory. **Idea.** What it missed
//! with each size is remembered. Between two sizes misses fall evenly, for all that is known. What it lacks is what it had when it missed
//! nothing; where it never had so much it is looked for by giving: little at first, twice as much each time that did not help.
//!
//! Misses are told as the share of its time in which a VM waits for the disk: who waits all the time cannot miss more. Who was given memory
//! reads back for a while what lies in swap. That says nothing of what it has now.

use model::{Bytes, Time};
use serde::{Deserialize, Serialize};

use crate::{member::Member, memory::Asked, reprovision::balance::worth::growth, tuning};

/// What is known of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Experience {
    /// By size, from the smallest; who has more waits less.
    seen: Vec<Seen>,
    /// What it worked on at most since.
    working_set: Bytes,
    /// What it has in use …
    level: Bytes,
    /// … since.
    level_at: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Seen {
    size: Bytes,
    waits: f64,
    at: Time,
}

/// The share of its time in which a VM with so many major faults per second waits for a disk that answers `disk` of them.
pub(crate) fn waits(faults: f64, disk: f64) -> f64 {
    let share = faults / disk.max(tuning::DISK_LEAST);
    if share >= tuning::DISK_FULL { 1.0 } else { share }
}

/// Takes in how a member does with what it has.
pub(crate) fn learn(member: &mut Member, disk: f64, now: Time) {
    let working_set = member.tracking.as_ref().and_then(|tracking| tracking.working_set);
    let (held, is_short, reads_back) =
        (member.target, member.is_pressured(), reads_back(member, now));
    let Ok(guest) = &member.guest else { return };
    let unused = guest.free.minus(tuning::MARGIN_MIN);
    let memory = &mut member.memory;
    let known = &mut memory.experience;
    if !is_short {
        memory.given_at = None;
        let working_set = working_set.unwrap_or_default();
        known.working_set = known.working_set.max(working_set);
        if working_set < known.working_set.percent(tuning::SAME_SET_PERCENT) {
            *known = Experience::default();
        }
    }
    let size = held.minus(unused);
    // Whose programs grow is not short yet.
    if size >= known.level.plus(tuning::UNIT) {
        (known.level, known.level_at) = (size, now);
    }
    known.level = known.level.min(size);
    let calm_since = memory.calm_since.max(known.level_at);
    let is_calm = now.since(calm_since) >= tuning::CALM;
    let stands = memory.asked.as_ref().is_none_or(|asked| asked.reached);
    if stands && !reads_back && (is_short || is_calm) {
        known.note(size, waits(memory.faults_per_s, disk), now);
    }
}

/// What a member that is short lacks, as far as it is not known to lie in its swap.
pub(crate) fn lacking(member: &Member, now: Time) -> Bytes {
    let references = member.tracking.as_ref().map_or(0.0, |tracking| tracking.references_per_s);
    let miss_ratio = member.memory.faults_per_s / references;
    let known = &member.memory.experience;
    if reads_back(member, now) { Bytes::ZERO } else { known.lacking(member.target, miss_ratio) }
}

/// Whether it was given memory a moment ago or has not filled it yet, and may be short because of what it had before.
fn reads_back(member: &Member, now: Time) -> bool {
    let is_new = |asked: &Asked| now.since(asked.said_at) < tuning::READ_BACK_WITHIN;
    let has_free = member.guest.as_ref().is_ok_and(|guest| guest.free > tuning::MARGIN_MIN);
    member.memory.asked.as_ref().is_some_and(is_new) || member.is_pressured() && has_free
}

impl Experience {
    /// The latest counts: what contradicts it is forgotten.
    pub(crate) fn note(&mut self, size: Bytes, waits: f64, now: Time) {
        let contradicts = |seen: &Seen| match seen.size.cmp(&size) {
            std::cmp::Ordering::Less => seen.waits < waits,
            std::cmp::Ordering::Equal => true,
            std::cmp::Ordering::Greater => seen.waits > waits,
        };
        let is_near = |seen: &Seen| seen.size.0.abs_diff(size.0) < tuning::STEP_MIN.0;
        let is_old = |seen: &Seen| now.since(seen.at) >= tuning::REMEMBERED;
        self.seen.retain(|seen| !(contradicts(seen) || is_near(seen) || is_old(seen)));
        let place = self.seen.partition_point(|seen| seen.size < size);
        self.seen.insert(place, Seen { size, waits, at: now });
        if self.seen.len() > tuning::SIZES_REMEMBERED {
            let oldest = self.seen.iter().enumerate().min_by_key(|(_, seen)| seen.at);
            oldest.map(|(at, _)| at).map(|at| self.seen.remove(at));
        }
    }

    /// The sizes up to `size`, and how much it waited with each.
    pub(crate) fn below(&self, size: Bytes) -> impl DoubleEndedIterator<Item = (Bytes, f64)> {
        self.seen.iter().filter(move |seen| seen.size < size).map(|seen| (seen.size, seen.waits))
    }

    /// The sizes above `size`, and how much it waited with each.
    pub(crate) fn above(&self, size: Bytes) -> impl Iterator<Item = (Bytes, f64)> {
        self.seen.iter().filter(move |seen| seen.size > size).map(|seen| (seen.size, seen.waits))
    }

    /// What it needs at least, by all that is known.
    pub(crate) fn needed(&self) -> Bytes {
        let short = self.seen.iter().rfind(|seen| seen.is_short());
        short.map_or(Bytes::ZERO, |short| {
            self.enough(short.size).unwrap_or(short.size.plus(tuning::UNIT))
        })
    }

    /// The least above `size` with which it was not short.
    pub(crate) fn enough(&self, size: Bytes) -> Option<Bytes> {
        let seen = self.seen.iter().find(|seen| seen.size > size && !seen.is_short());
        seen.map(|seen| seen.size)
    }

    /// What it had more when it was not short, or less so and a little beside; or as much again as it was given in vain. Where all of its memory is referred to alike, it
    /// lacks the share of it that it misses; so it lacks that at least.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    fn lacking(&self, held: Bytes, miss_ratio: f64) -> Bytes {
        let is_telling = (0.0..=tuning::MISS_RATIO_MAX).contains(&miss_ratio);
        let missing = if is_telling { miss_ratio / (1.0 - miss_ratio) } else { 0.0 };
        let missing = Bytes((held.0 as f64 * missing) as u64);
        let least = self.seen.iter().find(|seen| seen.is_short()).map_or(held, |seen| seen.size);
        let looked_for = held.minus(least).max(missing).min(growth(held));
        let best = self.seen.last().map(|seen| seen.size.plus(tuning::UNIT));
        let known = self.enough(held).or(best.filter(|_| self.above(held).next().is_some()));
        known.map_or(looked_for, |known| known.minus(held)).max(tuning::UNIT)
    }
}

impl Seen {
    fn is_short(&self) -> bool {
        self.waits >= tuning::SHORT_WAITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(sizes: &[(u64, f64)]) -> Experience {
        let mut known = Experience::default();
        for (at, (size, waits)) in (0..).zip(sizes) {
            known.note(Bytes::mib(*size), *waits, Time(at));
        }
        known
    }

    fn lacking(known: &Experience, held: u64) -> u64 {
        known.lacking(Bytes::mib(held), f64::NAN).0 >> 20
    }

    #[test]
    fn what_is_lacking_is_looked_for_in_steps_that_double() {
        let known = seen(&[(300, 1.0)]);
        let mut sizes = vec![300];
        for step in 0..5 {
            sizes.push(sizes[step] + lacking(&known, sizes[step]));
        }
        assert_eq!(sizes, [300, 310, 320, 340, 380, 460]);
        assert_eq!(lacking(&known, 460), 138, "at last by no more than 30 %");
    }

    #[test]
    fn it_lacks_what_it_had_when_it_was_not_short() {
        let known = seen(&[(256, 0.0), (200, 1.0)]);
        assert_eq!([200, 225, 250, 256].map(|held| lacking(&known, held)), [56, 31, 10, 56]);
        assert_eq!(known.needed(), Bytes::mib(256));
        assert_eq!(seen(&[(200, 1.0)]).needed(), Bytes::mib(210));
    }

    #[test]
    fn who_misses_a_tenth_lacks_a_ninth_at_least() {
        let lacking =
            |miss_ratio| Experience::default().lacking(Bytes::mib(300), miss_ratio).0 >> 20;
        assert_eq!([0.0, 0.1, 0.5, 0.6, f64::INFINITY].map(lacking), [10, 33, 90, 10, 10]);
    }

    #[test]
    fn the_latest_word_counts() {
        let known = seen(&[(300, 1.0), (400, 0.0), (350, 0.5), (420, 0.7), (310, 0.0)]);
        let sizes: Vec<u64> = known.below(Bytes::mib(500)).map(|(size, _)| size.0 >> 20).collect();
        assert_eq!(sizes, [300, 310], "not short with 310: not with 420 either");
        let known = seen(&[(300, 1.0), (400, 0.0), (350, 0.5)]);
        assert_eq!(known.below(Bytes::mib(400)).count(), 2);
        assert_eq!(known.enough(Bytes::mib(350)), Some(Bytes::mib(400)));
    }

    #[test]
    fn only_so_much_is_remembered() {
        let sizes: Vec<(u64, f64)> = (0..50).map(|at| (1000 - at * 10, at as f64 / 50.0)).collect();
        assert_eq!(seen(&sizes).seen.len(), tuning::SIZES_REMEMBERED);
    }
}
