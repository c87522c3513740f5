//! One group's balance in a tick: from members to the input of [`balance`], and from its rounds
//! to moves.
//!
//! A round is held every [`tuning::BALANCE_PERIOD`] and sets each member's size at its end. In
//! between, memory moves: a take passes [`guard`], and a grant needs free memory first. A member
//! that is short meanwhile gets a unit of unplanned surplus, as under `demand`. After a while
//! each move shows its saving.
//!
//! A VM has a whole curve if the host pages it out and it is tracked. Any other VM keeps its
//! memory, and claims the amount that `demand` would grant it until the next round.

use model::{Bytes, Ledger, Reason, Time, plan::Outcome};

use crate::{
    Rules, cold,
    group::Group,
    guard::{self, Purpose},
    headroom::Headroom,
    member::GroupVm,
    memory::{Balanced, Goal, GroupBalance, Moved, doubled},
    reprovision::balance::{
        self, BalanceInput,
        worth::{Curves, Worth},
    },
    tuning,
};

impl Group<'_> {
    /// Moves memory to where it saves the most waiting.
    pub(crate) fn move_memory(&mut self, host: &mut Headroom, rules: Rules, now: Time) {
        let surplus = self.lasting_surplus(now);
        let Ledger { budget, borrowed, used, promised, reserve, lent, .. } = self.ledger;
        let spoken_for = used.plus(promised).plus(reserve).plus(lent);
        let overshoot = self.members.iter().map(GroupVm::overshoot).sum();
        let overdrawn = spoken_for.minus(budget.plus(borrowed)).minus(overshoot);
        for member in &mut self.members {
            note(member, now);
            judge(member, now);
        }
        // The first round waits for rates to be known.
        let held_at = self.balance.held_at.get_or_insert(now);
        if now.since(*held_at) >= tuning::BALANCE_PERIOD {
            *held_at = now;
            self.hold_round(surplus, overdrawn, rules, now);
        }
        for member in &mut self.members {
            take(member, rules, now);
        }
        self.give(surplus, host, now);
    }

    /// The surplus that is stable. Use by members varies. Memory that was handed out and had to
    /// be taken back is not handed out again for a while, which grows each time.
    fn lasting_surplus(&mut self, now: Time) -> Bytes {
        // Memory that is paged out is available at once.
        if self.members.iter().all(|member| member.is_paged) {
            return self.ledger.surplus;
        }
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
        let seats: Vec<BalanceInput> = self.members.iter().map(|m| seat(m, rules, now)).collect();
        let balance::Round { wanted, sizes } = balance::round(&seats, surplus, overdrawn);
        let per_minute = |(seat, size): (&BalanceInput, &Bytes)| {
            rounded((seat.worth.misses(seat.held) - seat.worth.misses(*size)) * 60.0)
        };
        let saves: Vec<i64> = seats.iter().zip(&wanted).map(per_minute).collect();
        let saved_in_all = saves.iter().fold(0i64, |sum, saves| sum.saturating_add(*saves));
        let saved_in_all = saved_in_all.max(0).unsigned_abs();
        let plan = wanted.into_iter().zip(sizes).zip(saves);
        let members = self.members.iter_mut().zip(&seats).zip(plan);
        for ((member, seat), ((wanted, size), saves)) in members {
            let is_worth_it = size.0.abs_diff(seat.held.0) >= tuning::STEP_MIN.0;
            let is_take = size < seat.held;
            let goal = Goal { size: size.floor_mib(), is_take, wanted, saves, saved_in_all };
            member.memory.balanced = Some(Balanced {
                enough: seat.worth.enough(),
                has_curve: member.memory.curves.is_some(),
                goal: is_worth_it.then_some(goal),
            });
        }
    }

    /// Gives the memory that is free, first where a byte saves most.
    fn give(&mut self, mut surplus: Bytes, host: &mut Headroom, now: Time) {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        let urgency = |member: &GroupVm| {
            let per_mib = goal(member).map_or(0, |goal| {
                let lacks = goal.wanted.minus(member.target).max(tuning::STEP_MIN).0 >> 20;
                goal.saves / lacks.cast_signed()
            });
            (member.share.priority, per_mib.saturating_mul(member.share.weight.into()))
        };
        order.sort_by_key(|i| std::cmp::Reverse(urgency(&self.members[*i])));
        // Surplus that the plan needs is not spare.
        let mut spare = surplus.minus(self.members.iter().map(planned).sum());
        for i in order {
            let member = &mut self.members[i];
            let is_short = member.is_short();
            let planned = planned(member);
            let goal = goal(member).filter(|_| !planned.is_zero());
            let unit = if is_short { tuning::UNIT.min(spare) } else { Bytes::ZERO };
            let wanted = planned.max(unit.min(member.limits.max.minus(member.target)));
            let wanted = wanted.min(surplus);
            if !member.can_take_more() || wanted < tuning::STEP_MIN {
                if is_short && member.change.is_none() {
                    member.refuse(why_no_more(member));
                }
                continue;
            }
            match host.claim_for(member.is_relieved, wanted) {
                Ok(granted) => {
                    surplus = surplus.minus(granted);
                    spare = spare.minus(granted.minus(planned));
                    if let Some(goal) = goal {
                        note_move(member, &goal, now);
                    }
                    let saves = goal.map_or(0, |goal| goal.saves.max(0).unsigned_abs());
                    let target = member.target.plus(granted).floor_mib();
                    member.give(target, Reason::Balance { saves });
                }
                Err(refusal) => member.refuse(refusal),
            }
        }
    }

    /// The member that is shortest, and the need of all short members beyond `surplus`.
    pub(crate) fn lacking(&self, surplus: Bytes) -> Option<(usize, Bytes)> {
        let lacks = |member: &GroupVm| {
            if !member.is_short() {
                return Bytes::ZERO;
            }
            let enough = member.memory.balanced.map_or(Bytes::ZERO, |balanced| balanced.enough);
            // A guest without swap shows no misses: it lacks what `demand` would grant it.
            let has_curve = member.memory.curves.is_some();
            let unit = if has_curve { Bytes::ZERO } else { member.target.plus(tuning::UNIT) };
            enough.max(unit).min(member.limits.max).minus(member.target)
        };
        let lacking = self.members.iter().map(lacks).sum::<Bytes>().minus(surplus);
        let shortest = (0..self.members.len()).max_by_key(|i| lacks(&self.members[*i]))?;
        (!lacking.is_zero()).then_some((shortest, lacking))
    }
}

/// The rest of the member's planned grant.
fn planned(member: &GroupVm) -> Bytes {
    let goal = goal(member).filter(|goal| !goal.is_take);
    goal.map_or(Bytes::ZERO, |goal| goal.size.minus(member.target))
}

fn goal(member: &GroupVm) -> Option<Goal> {
    member.memory.balanced.and_then(|balanced| balanced.goal)
}

/// Updates the member's curves and waits.
fn note(member: &mut GroupVm, now: Time) {
    let known = member.memory.curves.take();
    if let (Some(cold), Some(tracking), Ok(_)) = (&member.cold, &member.tracking, &member.guest) {
        let (waits, ram) = (cold::waits(cold), member.ram);
        member.memory.curves = Curves::with(known, tracking, waits, ram, now);
    }
    member.memory.note_waits(waits(member), now);
}

/// The share of its time for which the member waits for memory.
fn waits(member: &GroupVm) -> f64 {
    let waits = match &member.cold {
        Some(cold) => cold::waits(cold),
        None => misses(member) * tuning::SWAP_READ_S,
    };
    waits.clamp(0.0, 1.0)
}

/// The member's misses per second.
fn misses(member: &GroupVm) -> f64 {
    match &member.cold {
        Some(cold) => cold.refaults_per_s,
        None => member.memory.swap_in.0 as f64 / tuning::READ_AHEAD.0 as f64,
    }
}

/// Makes the input of balancing for a member.
fn seat(member: &GroupVm, rules: Rules, now: Time) -> BalanceInput {
    let (held, limits) = (member.target, member.limits);
    let paged = member.memory.curves.as_ref().zip(member.cold.as_ref());
    let claim = tuning::UNIT.share(tuning::BALANCE_PERIOD.0, tuning::PERIOD.0);
    let worth = match paged {
        Some((curves, cold)) => Worth::of_paged(curves, cold, held),
        None => Worth::of_swapping(held, member.memory.swap_in, claim),
    };
    let lowest = guard::lowest_target(member, held, Purpose::Balance, rules, now);
    // Below its base, a member loses only memory that it does not need: otherwise the memory
    // would come back at once.
    let needed = limits.base.min(worth.enough().max(limits.min));
    let least = match lowest {
        Ok(lowest) => lowest.max(needed),
        // The take will be possible soon.
        Err(
            Reason::InFlight { .. }
            | Reason::NotCalm { .. }
            | Reason::Grace { .. }
            | Reason::NewVm { .. },
        ) => needed,
        Err(_) => held,
    };
    let can_grow = member.blocked.is_none() && member.avoided.is_none() && member.guest.is_ok();
    let most = if can_grow { limits.max.max(limits.base) } else { held };
    let (least, most) =
        if paged.is_some() { (least, most) } else { (held, most.min(held.plus(claim))) };
    let charged = member.used.plus(member.promised()).minus(member.overshoot()).min(member.limit());
    let share = charged.0 as f64 / member.limit().0.max(1) as f64;
    // Merged pages are spread over all memory of the VM, and paged-out memory leaves a part in
    // swap.
    let share = if member.merging.is_some() { share } else { 1.0 };
    let frees = (share * (1.0 - f64::from(member.swap_cost))).clamp(tuning::LEAST_CHARGE, 1.0);
    let cold = member.cold.unwrap_or_default();
    BalanceInput {
        held,
        least: least.min(held),
        most: most.max(held),
        untouched: held.minus(cold.resident).plus(cold.untouched[0].minus(cold.out)),
        out: cold.out,
        granule: member.tracking.as_ref().map_or(Bytes::ZERO, |tracking| tracking.granule),
        charged: charged.min(held),
        frees,
        worth,
        weight: f64::from(member.share.weight)
            * (1.0 + tuning::WAITED_COUNTS * member.memory.waited),
        suffers: member.suffers(),
        priority: member.share.priority,
    }
}

fn take(member: &mut GroupVm, rules: Rules, now: Time) {
    let is_due = |goal: &Goal| goal.is_take && goal.size < member.target;
    let Some(goal) = goal(member).filter(is_due) else { return };
    let wanted = member.target.minus(goal.size);
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

/// Remembers the purpose of a move, unless it continues the previous one.
fn note_move(member: &mut GroupVm, goal: &Goal, now: Time) {
    let goes_on =
        |moved: &Moved| moved.is_take == goal.is_take && now.since(moved.at) < tuning::JUDGED_AFTER;
    if member.memory.moved.as_ref().is_some_and(goes_on) {
        return;
    }
    // A rate that is not known yet can show nothing.
    let is_settled = now.since(member.memory.seen_at) >= tuning::JUDGED_AFTER;
    let (from, saves, missed) = (member.target, goal.saves, misses(member));
    let moved = Moved { at: now, from, is_take: goal.is_take, saves, missed };
    member.memory.moved = is_settled.then_some(moved);
}

/// Measures the saving of the last move, once it shows.
fn judge(member: &mut GroupVm, now: Time) {
    let misses = misses(member);
    let is_due = |moved: &mut Moved| now.since(moved.at) >= tuning::JUDGED_AFTER;
    if let Some(moved) = member.memory.moved.take_if(is_due) {
        let saved = rounded((moved.missed - misses) * 60.0);
        let Moved { at, from, saves: expected, .. } = moved;
        member.memory.outcome = Some(Outcome { at, from, to: member.target, expected, saved });
    }
}

/// The reason why a member that is short gets nothing.
fn why_no_more(member: &GroupVm) -> Reason {
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
