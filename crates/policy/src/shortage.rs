//! What is learned of a VM while it is short of memory.
//!
//! **Problem.** No curve shows what a guest's kernel keeps free, and of a guest that thrashes nobody knows what lies in its swap: pages that are
//! read back and stay clean lie in swap and in memory. **Idea.** With how much memory it was short is remembered, and with how much it was
//! not before some was taken; and what it lacks is found by giving: little at first, twice as much each time that did not help.
//!
//! Who was given memory reads back for a while what lies in swap. That says nothing of what it has now.

use model::{Bytes, Time};
use serde::{Deserialize, Serialize};

use crate::{member::Member, memory::Asked, reprovision::balance::worth::growth, tuning};

/// A VM was short of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Short {
    /// With so much.
    pub(crate) with: Bytes,
    /// When it began to be short it had so much; 0: it is not short now.
    #[serde(default)]
    pub(crate) began_with: Bytes,
    /// The least with which it was not short; 0: that is not known.
    #[serde(default)]
    pub(crate) enough: Bytes,
    /// Major faults per second then.
    pub(crate) faults: f64,
    /// What it worked on at most since, when it was not short any more.
    pub(crate) working_set: Bytes,
    /// For so long that counts.
    pub(crate) until: Time,
}

/// Remembers with how much memory it was short, as long as it works on as much as it did when it was not any more.
pub(crate) fn learn(member: &mut Member, now: Time) {
    let held = member.target;
    let working_set = member.tracking.as_ref().and_then(|tracking| tracking.working_set);
    let (is_pressured, reads_back) = (member.is_pressured(), reads_back(member, now));
    let enough = enough(member, now);
    let memory = &mut member.memory;
    if is_pressured {
        let before = memory.short.unwrap_or_default();
        let fewer = before.faults * tuning::STILL_SHORT_PERCENT as f64 / 100.0;
        let says_nothing = reads_back || memory.faults_per_s < fewer;
        let is_first = before.began_with.is_zero();
        let with = if says_nothing { before.with } else { before.with.max(held) };
        let taken_from = memory.moved.filter(|moved| moved.is_take).map(|moved| moved.from);
        let enough = [Some(before.enough), taken_from];
        memory.short = Some(Short {
            with,
            began_with: if is_first { held } else { before.began_with.min(held) },
            enough: enough.into_iter().flatten().find(|size| *size > with).unwrap_or_default(),
            faults: before.faults.max(memory.faults_per_s),
            working_set: Bytes::ZERO,
            until: now.after(tuning::SHORT_FOR),
        });
    } else if let Some(short) = &mut memory.short {
        let working_set = working_set.unwrap_or_default();
        memory.given_at = None;
        short.began_with = Bytes::ZERO;
        short.working_set = short.working_set.max(working_set);
        let seen = short.working_set.plus(memory.set_apart);
        let most = held.percent(tuning::UNSEEN_PERCENT);
        if !(seen.is_zero() || short.with.is_zero()) {
            memory.unseen = short.with.plus(tuning::UNIT).minus(seen).min(most);
        }
        if let (Some(enough), false) = (enough, short.with.is_zero()) {
            let least = if short.enough.is_zero() { enough } else { enough.min(short.enough) };
            short.enough = least.max(short.with.plus(tuning::UNIT));
        }
        if now >= short.until || working_set < short.working_set.percent(tuning::SAME_SET_PERCENT) {
            memory.short = None;
        }
    }
}

/// With how much it would do as it does now, once it was calm with what it has for a while.
fn enough(member: &Member, now: Time) -> Option<Bytes> {
    let guest = member.guest.as_ref().ok()?;
    let memory = &member.memory;
    let stood = |asked: &Asked| asked.reached && now.since(asked.said_at) >= tuning::CALM;
    let is_calm = now.since(memory.calm_since) >= tuning::CALM;
    let is_settled = is_calm && memory.asked.as_ref().is_none_or(stood);
    is_settled.then(|| member.target.minus(guest.free.minus(tuning::MARGIN_MIN)))
}

/// What a member that is short lacks, as far as it is not known to lie in its swap.
pub(crate) fn lacking(member: &Member, now: Time) -> Bytes {
    let short = member.memory.short.unwrap_or_default();
    let references = member.tracking.as_ref().map_or(0.0, |tracking| tracking.references_per_s);
    let miss_ratio = member.memory.faults_per_s / references;
    if reads_back(member, now) { Bytes::ZERO } else { short.lacking(member.target, miss_ratio) }
}

/// Whether it was given memory a moment ago, and may be short because of what it had before.
fn reads_back(member: &Member, now: Time) -> bool {
    let is_new =
        |asked: &Asked| !asked.is_take && now.since(asked.said_at) < tuning::READ_BACK_WITHIN;
    member.memory.asked.as_ref().is_some_and(is_new)
}

impl Short {
    /// What it had more when it was not short.
    pub(crate) fn known_to_lack(self, held: Bytes) -> Option<Bytes> {
        Some(self.enough.minus(held)).filter(|taken| !taken.is_zero())
    }

    /// What it had more when it was not short; or as much again as it was given in vain. Where all of its memory is referred to alike, it
    /// lacks the share of it that it misses; so it lacks that at least.
    fn lacking(self, held: Bytes, miss_ratio: f64) -> Bytes {
        let is_telling = (0.0..=tuning::MISS_RATIO_MAX).contains(&miss_ratio);
        let missing = if is_telling { miss_ratio / (1.0 - miss_ratio) } else { 0.0 };
        let missing = Bytes((held.0 as f64 * missing) as u64);
        let in_vain = if self.began_with.is_zero() { held } else { self.began_with };
        let looked_for = held.minus(in_vain).max(missing).min(growth(held));
        self.known_to_lack(held).unwrap_or(looked_for).max(tuning::UNIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_is_looked_for_in_steps_that_double() {
        let short = Short { began_with: Bytes::mib(300), ..Short::default() };
        let mut held = Bytes::mib(300);
        let mut sizes = Vec::new();
        for _ in 0..6 {
            held = held.plus(short.lacking(held, f64::NAN));
            sizes.push(held.0 >> 20);
        }
        assert_eq!(sizes, [310, 320, 340, 380, 460, 598], "at last by no more than 30 %");
    }

    #[test]
    fn what_was_taken_is_given_back_and_no_more() {
        let short =
            Short { began_with: Bytes::mib(200), enough: Bytes::mib(256), ..Short::default() };
        let lacking = |mib| short.lacking(Bytes::mib(mib), f64::NAN).0 >> 20;
        assert_eq!([200, 225, 240, 256].map(lacking), [56, 31, 16, 56]);
        let lacking = |miss_ratio| Short::default().lacking(Bytes::mib(300), miss_ratio).0 >> 20;
        assert_eq!([0.0, 0.1, 0.5, 0.6, f64::INFINITY].map(lacking), [10, 33, 90, 10, 10]);
    }
}
