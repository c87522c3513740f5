//! Limits of QEMU's cgroups: a VM's grants must fit below all of them.
//!
//! Beyond a limit the kernel gives no memory: it kills QEMU, or stops it. All memory of the
//! cgroup's processes counts there, including QEMU's own. The guests of the cgroup's VMs may also
//! touch further memory without a grant, and that needs room. So a grant has to fit between that
//! and the limit, at each level. That holds for a give-back of base, too, because it could get
//! QEMU killed. Where a limit is exceeded anyway (it was lowered, or QEMU's own memory has
//! grown), grants come back.
//!
//! A VM that has not been counted yet may have touched all its memory, which the cgroup's own
//! count then includes. So room is kept only for its grant, nothing is taken for it, and it does
//! not limit the give-back of base.
//!
//! No limit causes a take below base: the operator must make the two fit.

use std::collections::BTreeMap;

use model::{Bytes, Reading, Reason, view::MemoryLimit};

use crate::{Rule, Rules, member::GroupVm, tuning};

/// All limits that apply to VMs of the groups, with the room below each.
#[derive(Debug)]
pub(crate) struct Ceilings {
    levels: BTreeMap<(String, String), Level>,
}

#[derive(Debug)]
struct Level {
    /// The youngest reading of all VMs there.
    limit: Reading<MemoryLimit>,
    /// Memory that the VMs there may still touch without a grant.
    untouched: Bytes,
    /// Memory that is already being taken from the VMs.
    on_its_way: Bytes,
    /// Whether one of the VMs has not been counted.
    is_guessed: bool,
    /// Memory that may still be granted.
    left: Bytes,
    /// Memory that could be touched beyond the limit.
    over: Bytes,
}

impl Level {
    const fn new(limit: Reading<MemoryLimit>) -> Self {
        let [untouched, on_its_way, left, over] = [Bytes::ZERO; 4];
        Self { limit, untouched, on_its_way, is_guessed: false, left, over }
    }

    /// The amount that may be granted to `member`.
    fn room(&self, member: &GroupVm) -> Bytes {
        let below_base = member.limits.base.minus(member.limit());
        if self.is_guessed { self.left.max(below_base) } else { self.left }
    }
}

impl Ceilings {
    /// Measures the room below the limits of these members.
    pub(crate) fn measure<'a>(members: impl Iterator<Item = &'a GroupVm>, rules: Rules) -> Self {
        let mut levels = BTreeMap::new();
        if !rules.has(Rule::CgroupLimit) {
            return Self { levels };
        }
        for member in members {
            for limit in &member.memory_limits {
                let reading = Reading::new(limit.clone(), member.limits_at);
                let new = || Level::new(reading.clone());
                let level: &mut Level = levels.entry(key(limit)).or_insert_with(new);
                if level.limit.at < reading.at {
                    level.limit = reading;
                }
                level.untouched = level.untouched.plus(member.untouched());
                level.on_its_way = level.on_its_way.plus(member.actual.minus(member.target));
                level.is_guessed |= member.counted.is_none();
            }
        }
        for level in levels.values_mut() {
            let MemoryLimit { limit, used, .. } = level.limit.value;
            let spoken_for = used.plus(level.untouched);
            level.left = limit.minus(spoken_for.plus(tuning::cgroup_margin(limit)));
            if !level.is_guessed {
                level.over = spoken_for.minus(limit.plus(level.on_its_way));
            }
        }
        Self { levels }
    }

    /// The limit of `member` that is exceeded most, and the excess.
    pub(crate) fn exceeded(&self, member: &GroupVm) -> Option<(Bytes, &MemoryLimit)> {
        let levels = member.memory_limits.iter().filter_map(|limit| self.levels.get(&key(limit)));
        let over = levels.filter(|level| !level.over.is_zero());
        over.max_by_key(|level| level.over).map(|level| (level.over, &level.limit.value))
    }

    /// Notes that `amount` is taken from `member`.
    pub(crate) fn note_taken(&mut self, member: &GroupVm, amount: Bytes) {
        for limit in &member.memory_limits {
            if let Some(level) = self.levels.get_mut(&key(limit)) {
                level.over = level.over.minus(amount);
            }
        }
    }

    /// Reserves up to `wanted` for `member`. Returns the amount reserved, or the limit that
    /// leaves nothing.
    pub(crate) fn claim(&mut self, member: &GroupVm, wanted: Bytes) -> Result<Bytes, Reason> {
        let levels = || member.memory_limits.iter().map(key);
        let of_all = levels().filter_map(|key| self.levels.get(&key));
        let Some(least) = of_all.min_by_key(|level| level.room(member)) else {
            return Ok(wanted);
        };
        let granted = wanted.min(least.room(member));
        if granted < tuning::STEP_MIN.min(wanted) {
            let MemoryLimit { cgroup, limit, used, .. } = least.limit.value.clone();
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
