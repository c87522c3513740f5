//! One group's balance in a tick: from members to what [`balance`] needs, and from its rounds to
//! moves.
//!
//! A round is held every [`tuning::BALANCE_PERIOD`] and says where everybody should be at its end;
//! in between, memory moves: what is taken passes [`guard`] in steps, what is given has to be there
//! first. After a while each move shows what it has saved.

use model::{Bytes, Ledger, Reason, Time, plan::Outcome, reason::Pressure};

use crate::{
    Rules, experience,
    group::Group,
    guard::{self, Purpose},
    headroom::Headroom,
    member::{Member, growth, margin},
    memory::{Balanced, Goal, GroupBalance, Moved, doubled},
    reads::Reads,
    reprovision::balance::{
        self, Rest, Seat,
        worth::{Condition, Worth},
    },
    tuning,
};

impl Group<'_> {
    /// Moves memory to where it saves the most misses.
    pub(crate) fn move_memory(&mut self, host: &mut Headroom, rules: Rules, now: Time) {
        let surplus = self.lasting_surplus(now);
        let Ledger { budget, borrowed, used, promised, reserve, lent, .. } = self.ledger;
        let spoken_for = used.plus(promised).plus(reserve).plus(lent);
        let overdrawn = spoken_for.minus(budget.plus(borrowed));
        for member in &mut self.members {
            member.tracking = member.memory.note_tracking(member.tracking.take(), now);
            member.note_spare(now);
            judge(member, now);
        }
        self.note_disk();
        for member in &mut self.members {
            experience::learn(member, self.balance.disk, now);
        }
        // The first waits for rates to be known.
        if now.since(*self.balance.held_at.get_or_insert(now)) >= tuning::BALANCE_PERIOD {
            self.balance.held_at = Some(now);
            self.hold_round(surplus, overdrawn, rules, now);
        }
        for member in &mut self.members {
            take(member, rules, now);
        }
        self.give(surplus, host, now);
    }

    /// Notes how much a disk answers.
    fn note_disk(&mut self) {
        let known = || self.members.iter().filter(|member| member.guest.is_ok());
        let is_asked = known().any(Member::is_short);
        let reads = known().map(|member| member.memory.reads);
        self.balance.disk = self.balance.disk.of_a_disk(reads, is_asked);
    }

    /// The surplus that can be counted on. What members use goes up and down; what was handed out
    /// and had to be taken back is not handed out again for a while, which grows each time.
    fn lasting_surplus(&mut self, now: Time) -> Bytes {
        let GroupBalance { deficits, deficit_at, pool, .. } = &mut self.balance;
        let held: Bytes = self.members.iter().map(|member| member.target).sum();
        let Ledger { surplus, deficit, .. } = self.ledger;
        let since = now.since(*deficit_at);
        if !deficit.is_zero() {
            if *deficits == 0 || since > tuning::DEFICIT_FIRST {
                *deficits = if since > tuning::DEFICIT_MAX { 1 } else { *deficits + 1 };
            }
            (*deficit_at, *pool) = (now, held.minus(deficit));
            return Bytes::ZERO;
        }
        let wait = doubled(tuning::DEFICIT_FIRST, *deficits, tuning::DEFICIT_MAX);
        if *deficits > 0 && since < wait { surplus.min(pool.minus(held)) } else { surplus }
    }

    fn hold_round(&mut self, surplus: Bytes, overdrawn: Bytes, rules: Rules, now: Time) {
        let idle =
            |member: &Member| if member.is_short() { Bytes::ZERO } else { member.memory.idle };
        let free = surplus.plus(self.members.iter().map(idle).sum());
        let seats: Vec<Seat> = self
            .members
            .iter()
            .map(|member| seat(member, free, self.balance.disk, rules, now))
            .collect();
        let rest = Rest { surplus, overdrawn, cacheable: self.cacheable };
        let balance::Round { wanted, sizes, fits } = balance::round(&seats, rest);
        let per_minute = |(seat, size): (&Seat, &Bytes)| {
            rounded((seat.worth.misses(seat.held) - seat.worth.misses(*size)) * 60.0)
        };
        let saves: Vec<i64> = seats.iter().zip(&wanted).map(per_minute).collect();
        let saved_in_all = saves.iter().fold(0i64, |sum, saves| sum.saturating_add(*saves));
        let saved_in_all = saved_in_all.max(0).unsigned_abs();
        let plan = wanted.into_iter().zip(sizes).zip(saves);
        for ((member, seat), ((wanted, size), saves)) in
            self.members.iter_mut().zip(&seats).zip(plan)
        {
            // What is taken back and forth in small change only wakes who is taken from.
            let least = if size < seat.held { tuning::UNIT } else { tuning::STEP_MIN };
            let is_worth_it = size.0.abs_diff(seat.held.0) >= least.0;
            let lowest = seat.held.minus(shrinks_by(seat.held));
            let goal = Goal { size: size.floor_mib(), lowest, wanted, saves, saved_in_all, fits };
            member.memory.balanced = Some(Balanced {
                need: seat.worth.need.min(seat.most),
                is_tracked: seat.worth.is_tracked,
                goal: is_worth_it.then_some(goal),
            });
        }
    }

    /// Gives what is there, first where a byte saves most.
    fn give(&mut self, mut surplus: Bytes, host: &mut Headroom, now: Time) {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        let urgency = |member: &Member| {
            let per_mib = goal(member).map_or(0, |goal| {
                let lacks = goal.wanted.minus(member.target).max(tuning::STEP_MIN).0 >> 20;
                goal.saves / lacks.cast_signed()
            });
            (member.share.priority, per_mib.saturating_mul(member.share.weight.into()))
        };
        order.sort_by_key(|i| std::cmp::Reverse(urgency(&self.members[*i])));
        for i in order {
            let member = &mut self.members[i];
            let Some(goal) = goal(member).filter(|goal| goal.size > member.target) else {
                if member.change.is_none() && member.is_short() {
                    member.refuse(why_no_more(member));
                }
                continue;
            };
            let wanted = goal.size.minus(member.target).min(surplus);
            if !member.can_take_more() || wanted < tuning::STEP_MIN {
                if let Some(sign) = member.demand().filter(|_| member.change.is_none()) {
                    member.refuse(Reason::NoSurplus { sign });
                }
                continue;
            }
            match host.claim(wanted) {
                Ok(granted) => {
                    surplus = surplus.minus(granted);
                    let saves = goal.saves.max(0).unsigned_abs();
                    let reason = if goal.fits && saves == 0 {
                        Reason::Bonus
                    } else {
                        Reason::Balance { saves }
                    };
                    note_move(member, &goal, now);
                    member.give(member.target.plus(granted).floor_mib(), reason);
                }
                Err(refusal) => member.refuse(refusal),
            }
        }
    }

    /// The member that is shortest, and what those that are short need beyond `surplus`.
    pub(crate) fn lacking(&self, surplus: Bytes) -> Option<(usize, Bytes)> {
        let lacks = |member: &Member| {
            let need = member.memory.balanced.as_ref().map_or(Bytes::ZERO, |b| b.need);
            if member.is_short() { need.minus(member.target) } else { Bytes::ZERO }
        };
        let lacking = self.members.iter().map(lacks).sum::<Bytes>().minus(surplus);
        let shortest = (0..self.members.len()).max_by_key(|i| lacks(&self.members[*i]))?;
        (!lacking.is_zero()).then_some((shortest, lacking))
    }
}

fn goal(member: &Member) -> Option<Goal> {
    member.memory.balanced.as_ref().and_then(|balanced| balanced.goal)
}

/// What balancing needs to know of a member, where `free` is nobody's or lies idle.
fn seat(member: &Member, free: Bytes, disk: Reads, rules: Rules, now: Time) -> Seat {
    let (held, limits) = (member.target, member.limits);
    let is_short = member.is_short();
    let waits = if is_short { member.memory.reads.wait_for(disk) } else { 0.0 };
    let idle = if is_short { Bytes::ZERO } else { member.memory.idle };
    let unfilled = if is_short { member.unfilled() } else { Bytes::ZERO };
    let condition = Condition {
        held,
        is_short,
        waits,
        experience: member.memory.experience.clone(),
        lacking: if is_short { experience::lacking(member, disk, now) } else { Bytes::ZERO },
        set_apart: member.memory.set_apart,
        idle,
        unfilled,
        disk,
    };
    let worth = Worth::of(member.tracking.as_ref(), &condition);
    let lowest = guard::lowest_target(member, shrinks_by(held), Purpose::Balance, rules, now);
    let can_shrink_soon = matches!(
        lowest,
        Ok(_)
            | Err(Reason::InFlight { .. } | Reason::NotCalm { .. } | Reason::UnderPressure { .. })
    );
    // Below its base a member is only taken what it does not need: it would get it back at once.
    let floor = if member.has_swap { limits.min } else { limits.base };
    let least = limits.base.min(worth.need.max(floor)).min(held);
    // What it lacks is being looked for: to give up now what it got so far would help nobody.
    let is_being_helped =
        is_short && member.memory.given_at.is_some_and(|at| now.since(at) < tuning::FILLED_WITHIN);
    let is_filling =
        is_being_helped && unfilled >= tuning::UNIT.max(held.percent(tuning::UNFILLED_PERCENT));
    let least = if worth.is_tracked && can_shrink_soon && !is_being_helped { least } else { held };
    let suffers = member.suffers() && !is_filling;
    let unneeded = match &member.guest {
        Ok(guest) if member.blocked.is_none() && !worth.is_tracked => {
            member.grant().min(guest.available.minus(margin(guest)))
        }
        Ok(_) if can_shrink_soon => {
            // Who is short needs more than it has; what of that it was not seen to touch, it loses
            // nothing more by.
            let needed = if is_short && !is_filling { worth.seen } else { worth.need };
            held.minus(needed.max(floor)).max(member.memory.idle.min(held.minus(floor)))
        }
        _ => Bytes::ZERO,
    };
    let is_seen_well = !worth.is_tracked || member.memory.is_well_tracked();
    let freely = member.freely();
    // Of whom little is known yet, only what it does not use can be taken.
    let least_now = if is_seen_well { least } else { least.max(held.minus(freely)) };
    let lowest = lowest.map(|lowest| lowest.min(held.minus(freely)));
    let lowest = lowest.map_or(held, |lowest| lowest.clamp(least_now, held));
    let can_grow = member.blocked.is_none() && member.avoided.is_none() && member.guest.is_ok();
    let most = if can_grow { limits.max.max(limits.base).max(held) } else { held };
    let grown = held.plus(growth(held));
    let grown = match member.guest.as_ref().ok().and_then(|guest| guest.pressure) {
        Some(Pressure::SwapIn { per_second }) if per_second >= tuning::HEAVY_SWAP_IN => {
            // How much it lacks may be more than shows; what lies idle is there to find that out.
            let lacks = worth.need.minus(held).max(free.share(1, 2));
            grown.max(held.plus(lacks.min(free)))
        }
        _ => grown,
    };
    let highest = if member.can_take_more() { grown.min(most) } else { held };
    let charged = member.used.plus(member.promised()).min(member.limit());
    let share = charged.0 as f64 / member.limit().0.max(1) as f64;
    // Merged pages are spread over all of it; what is not touched yet is what a balloon takes
    // first.
    let charge = if member.merging.is_some() { share.max(tuning::LEAST_CHARGE) } else { 1.0 };
    Seat {
        held,
        least,
        most,
        lowest,
        highest,
        unneeded,
        charged: charged.min(held),
        charge,
        idle,
        unfilled,
        suffers,
        worth,
        weight: member.share.weight,
        priority: member.share.priority,
    }
}

/// By how much a VM that uses all of its memory may shrink in a round.
fn shrinks_by(held: Bytes) -> Bytes {
    held.percent(tuning::SHRINK_PERCENT).max(tuning::UNIT)
}

fn take(member: &mut Member, rules: Rules, now: Time) {
    let Some(goal) = goal(member).filter(|goal| goal.size < member.target) else { return };
    let surely = member.target.minus(goal.size.max(goal.lowest));
    // Below that, what has come into use meanwhile is left.
    let wanted = surely.max(member.memory.idle.min(member.target.minus(goal.size)));
    match guard::lowest_target(member, wanted, Purpose::Balance, rules, now) {
        Ok(target) if member.change.is_none() => {
            let costs = goal.saves.min(0).unsigned_abs();
            note_move(member, &goal, now);
            member.take(target, Reason::WorthLess { costs, saves: goal.saved_in_all });
        }
        Ok(_) => {}
        Err(refusal) => member.refuse(refusal),
    }
}

/// Remembers what a move is for, unless it goes on with the one before.
fn note_move(member: &mut Member, goal: &Goal, now: Time) {
    let is_take = goal.size < member.target;
    let goes_on =
        |moved: &Moved| moved.is_take == is_take && now.since(moved.at) < tuning::JUDGED_AFTER;
    if member.memory.moved.as_ref().is_some_and(goes_on) {
        return;
    }
    // A rate that is not known yet can show nothing.
    let is_settled = now.since(member.memory.seen_at) >= tuning::JUDGED_AFTER;
    let Goal { saves, .. } = *goal;
    let (from, faults_before) = (member.target, member.memory.reads.faults);
    let moved = Moved { at: now, from, is_take, saves, faults_before };
    member.memory.moved = is_settled.then_some(moved);
}

/// Sees what the last move has saved, once that can be seen.
fn judge(member: &mut Member, now: Time) {
    let memory = &mut member.memory;
    let is_due = |moved: &mut Moved| now.since(moved.at) >= tuning::JUDGED_AFTER;
    if let Some(moved) = memory.moved.take_if(is_due) {
        let saved = rounded((moved.faults_before - memory.reads.faults) * 60.0);
        let Moved { at, from, saves: expected, .. } = moved;
        memory.outcome = Some(Outcome { at, from, to: member.target, expected, saved });
    }
}

/// Why a member that is short is given nothing.
fn why_no_more(member: &Member) -> Reason {
    if let Some(reason) = member.blocked.as_ref().or(member.avoided.as_ref()) {
        reason.clone()
    } else if member.has_max() {
        Reason::AtMax { max: member.limits.max }
    } else {
        Reason::BestElsewhere
    }
}

#[expect(clippy::cast_possible_truncation, reason = "saturates, and is a count")]
fn rounded(count: f64) -> i64 {
    count.round() as i64
}
