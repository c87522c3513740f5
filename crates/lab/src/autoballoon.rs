//! Balloons moved by a simple rule, as Proxmox VE moves them (`pvestatd`), for comparison.
//!
//! ```text
//! to take = used − 80 % of the host's memory        (below zero: to give)
//! from each guest in proportion to what it has above its least (to each: below its RAM),
//! at most 100 MiB per guest in one step
//! ```
//!
//! Proxmox takes a step every ten seconds; here each call of [`step`] takes one. The guest
//! chooses the memory that it gives up: first its page cache, then memory that it swaps out
//! itself.

use model::Bytes;

use crate::lab::{Lab, LabError};

/// Target occupancy of the host, in percent.
const FULL_PERCENT: u64 = 80;
/// The most that a guest loses or gets in one step.
const MOST: Bytes = Bytes::mib(100);
/// A smaller change is not worth a balloon operation.
const LITTLE: Bytes = Bytes::mib(1);

/// One step of a host that has `memory`, of which `used` is in use. No guest gets below `least`.
pub fn step(lab: &Lab, used: Bytes, memory: Bytes, least: Bytes) -> Result<(), LabError> {
    let mut has = Vec::new();
    for machine in lab.machines() {
        has.push((machine.balloon()?, machine.spec().memory_max));
    }
    let goal = memory.percent(FULL_PERCENT);
    for ((machine, (now, _)), target) in
        lab.machines().iter().zip(&has).zip(targets(&has, used, goal, least))
    {
        if Bytes(now.0.abs_diff(target.0)) > LITTLE {
            machine.set_balloon(target)?;
        }
    }
    Ok(())
}

/// The target of each guest. `has` holds a guest's present memory and its RAM.
fn targets(has: &[(Bytes, Bytes)], used: Bytes, goal: Bytes, least: Bytes) -> Vec<Bytes> {
    let is_take = used > goal;
    let amount = if is_take { used.minus(goal) } else { goal.minus(used) };
    let room = |&(now, ram): &(Bytes, Bytes)| {
        if is_take { now.minus(least) } else { ram.minus(now) }
    };
    let all: Bytes = has.iter().map(room).sum();
    let target = |guest: &(Bytes, Bytes)| {
        let room = room(guest);
        let part = amount.share(room.0, all.0.max(1)).min(MOST).min(room);
        if is_take { guest.0.minus(part) } else { guest.0.plus(part) }
    };
    has.iter().map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(has: [u64; 2], used: u64) -> Vec<u64> {
        let has = has.map(|now| (Bytes::mib(now), Bytes::mib(256)));
        let targets = targets(&has, Bytes::mib(used), Bytes::mib(800), Bytes::mib(128));
        targets.into_iter().map(|target| target.0 >> 20).collect()
    }

    #[test]
    fn what_is_above_the_goal_is_taken_in_proportion_and_no_guest_gets_below_its_least() {
        assert_eq!(of([256, 192], 896), [192, 160]);
        assert_eq!(of([256, 128], 900), [156, 128]);
        assert_eq!(of([140, 128], 2000), [128, 128]);
    }

    #[test]
    fn what_is_below_the_goal_is_given_back_up_to_the_ram() {
        assert_eq!(of([128, 192], 704), [192, 224]);
        assert_eq!(of([250, 256], 100), [256, 256]);
    }
}
