//! Limits of QEMU's cgroups: what a VM is granted fits below all of them.
//!
//! Beyond a limit the kernel gives nothing: it kills QEMU, or stops it. All memory
//! of the cgroup's processes counts there, QEMU's own among it. Room is also needed for the memory
//! that the guests of its VMs may still touch without being given anything. So a grant has to fit
//! between that and the limit, at each level; a give-back of base, too, for QEMU would die of it.
//! Where a limit is exceeded all the same (it was lowered, or QEMU's own memory has grown), grants
//! come back.
//!
//! Nothing below base is taken for a limit: how the two fit is the operator's business.

use std::collections::BTreeMap;

use model::{Bytes, Reason, view::MemoryLimit};

use crate::{Rule, Rules, member::Member, tuning};

/// All limits that VMs of the groups are under, and what is left below each.
#[derive(Debug)]
pub(crate) struct Ceilings {
    levels: BTreeMap<(String, String), Level>,
}

#[derive(Debug)]
struct Level {
    limit: MemoryLimit,
    /// Memory that may still be granted.
    left: Bytes,
    /// Memory that could be touched beyond the limit.
    over: Bytes,
}

impl Ceilings {
    /// Measures what is left below the limits of these members.
    pub(crate) fn measure<'a>(members: impl Iterator<Item = &'a Member>, rules: Rules) -> Self {
        let mut levels = BTreeMap::new();
        if !rules.has(Rule::CgroupLimit) {
            return Self { levels };
        }
        let mut spoken_for: BTreeMap<(String, String), Bytes> = BTreeMap::new();
        for member in members {
            for limit in &member.memory_limits {
                let untouched = member.limit().minus(member.counted);
                let sum = spoken_for.entry(key(limit)).or_insert(limit.used);
                *sum = sum.plus(untouched);
                levels.entry(key(limit)).or_insert_with(|| Level {
                    limit: limit.clone(),
                    left: Bytes::ZERO,
                    over: Bytes::ZERO,
                });
            }
        }
        for (key, level) in &mut levels {
            let spoken_for = spoken_for.get(key).copied().unwrap_or_default();
            let limit = level.limit.limit;
            level.left = limit.minus(spoken_for.plus(tuning::cgroup_margin(limit)));
            level.over = spoken_for.minus(limit);
        }
        Self { levels }
    }

    /// The limit of `member` that is exceeded most, and by how much.
    pub(crate) fn exceeded(&self, member: &Member) -> Option<(Bytes, &MemoryLimit)> {
        let levels = member.memory_limits.iter().filter_map(|limit| self.levels.get(&key(limit)));
        let over = levels.filter(|level| !level.over.is_zero());
        over.max_by_key(|level| level.over).map(|level| (level.over, &level.limit))
    }

    /// So much is taken from `member`.
    pub(crate) fn note_taken(&mut self, member: &Member, amount: Bytes) {
        for limit in &member.memory_limits {
            if let Some(level) = self.levels.get_mut(&key(limit)) {
                level.over = level.over.minus(amount);
            }
        }
    }

    /// Reserves up to `wanted` for `member`; answers what was left, or the limit that leaves
    /// nothing.
    pub(crate) fn claim(&mut self, member: &Member, wanted: Bytes) -> Result<Bytes, Reason> {
        let levels = || member.memory_limits.iter().map(key);
        let of_all = levels().filter_map(|key| self.levels.get(&key));
        let Some(least) = of_all.min_by_key(|level| level.left) else { return Ok(wanted) };
        let granted = wanted.min(least.left);
        if granted < tuning::STEP_MIN.min(wanted) {
            let MemoryLimit { cgroup, limit, used, .. } = least.limit.clone();
            return Err(Reason::CgroupLimit { cgroup, limit, used });
        }
        for key in levels() {
            if let Some(level) = self.levels.get_mut(&key) {
                level.left = level.left.minus(granted);
            }
        }
        Ok(granted)
    }
}

fn key(limit: &MemoryLimit) -> (String, String) {
    (limit.cgroup.clone(), limit.file.clone())
}
