//! One group in one tick: the order of the steps is the order of precedence.

use model::{Bytes, ColdSpec, GroupSpec, Ledger, Policy, Reason, Time};

use crate::{
    Rule, Rules,
    ceilings::Ceilings,
    cold,
    guard::{self, Purpose},
    headroom::Headroom,
    idle, ledger,
    lending::{Lacking, Party},
    member::GroupVm,
    memory::GroupBalance,
    reprovision::{self, Shares, Standing},
    returning, revoke, tuning,
};

/// A group in a tick.
#[derive(Debug)]
pub(crate) struct Group<'a> {
    pub(crate) spec: &'a GroupSpec,
    pub(crate) members: Vec<GroupVm>,
    pub(crate) ledger: Ledger,
    /// The last time at which a VM was known to be short of memory that the group did not have.
    pub(crate) unmet_at: Time,
    pub(crate) balance: GroupBalance,
    /// Set when the group stays over its budget, with the reason.
    pub(crate) over: Option<Reason>,
}

impl<'a> Group<'a> {
    pub(crate) fn new(spec: &'a GroupSpec, members: Vec<GroupVm>, unmet_at: Time) -> Self {
        let ledger = ledger::draw_up(spec.budget, &members);
        Self { spec, members, ledger, unmet_at, balance: GroupBalance::default(), over: None }
    }

    /// The group's state for lending, before it has lent or borrowed.
    pub(crate) fn party(&self) -> Party {
        let Ledger { budget, used, promised, reserve, surplus, .. } = self.ledger;
        let short = self.members.iter().find_map(|m| Some((m.name.clone(), m.demand()?)));
        let lacking = self.unmet(self.own_surplus()).and_then(|(shortest, amount)| {
            let GroupVm { name, .. } = &self.members[shortest];
            Some(Lacking { vm: name.clone(), sign: self.members[shortest].demand()?, amount })
        });
        let held = used.plus(promised).plus(reserve).minus(budget);
        Party { lend: self.spec.lend.clone(), surplus, reserve, held, short, lacking }
    }

    /// Decides the change of every member.
    pub(crate) fn decide(
        &mut self,
        host: &mut Headroom,
        ceilings: &mut Ceilings,
        rules: Rules,
        now: Time,
    ) {
        self.withdraw_from_the_stuck(rules, now);
        self.return_what_is_withheld(rules, now);
        self.give_back_on_stress(rules, now);
        returning::give_back(&mut self.members, host, rules, now);
        self.take_above_max(rules, now);
        self.take_above_ceilings(ceilings, rules, now);
        if let Some(reason) = host.short.clone() {
            let all = Bytes(u64::MAX);
            revoke::take_back(&mut self.members, all, Purpose::Emergency, &reason, rules, now);
        } else {
            let deficit = self.ledger.deficit;
            let reason = Reason::Deficit { deficit };
            let members = &mut self.members;
            let returning =
                revoke::take_back(members, deficit, Purpose::Deficit, &reason, rules, now);
            self.reprovision(returning, host, rules, now);
            self.restore_base(now);
            self.page_out_ahead(rules, now);
            self.say_that_it_stays_over(returning);
        }
        self.stay_below_ceilings(ceilings);
        for member in &mut self.members {
            member.repeat(host.short.is_some(), now);
        }
    }

    /// A balloon that does not follow is asked to stay where it is: a target that is reached
    /// later was decided for another state. Only a give-back of base is kept up.
    fn withdraw_from_the_stuck(&mut self, rules: Rules, now: Time) {
        for member in &mut self.members {
            let is_known = member.memory.stuck.is_some_and(|stuck| now < stuck.retry_at);
            // The worker's report explains why a paged VM does not shrink further.
            let is_stuck = !member.is_paged && member.memory.is_stuck(now);
            if !rules.has(Rule::Uncooperative) || is_known || !is_stuck {
                continue;
            }
            let wanted = member.target;
            member.memory.mark_stuck(wanted, now);
            let is_give_back = wanted > member.actual && wanted <= member.limits.base;
            member.plan_around(!is_give_back, now);
        }
    }

    /// Returns memory to the guest that a balloon has taken and the host has not received.
    fn return_what_is_withheld(&mut self, rules: Rules, now: Time) {
        if !rules.has(Rule::GivesBack) {
            return;
        }
        for member in self.members.iter_mut().filter(|member| member.blocked.is_none()) {
            let Some((withheld, before)) = member.memory.withheld.turns_out(now) else { continue };
            let target = before.map_or(member.target, |held| member.ram.minus(held));
            let counted = member.counted.unwrap_or_default();
            // The host already backs that much memory for the guest, so nothing is handed out.
            let target = target.min(counted.plus(tuning::uncounted(member.ram)));
            if target > member.target {
                member.give(target, Reason::Withheld { withheld });
            }
            member.plan_around(false, now);
        }
    }

    /// A guest below base gets all of its base back at once when it suffers, or when it cannot be
    /// believed: a guest that thrashes may be too busy to send statistics.
    fn give_back_on_stress(&mut self, rules: Rules, now: Time) {
        if !rules.has(Rule::GiveBack) {
            return;
        }
        for member in &mut self.members {
            let base = member.limits.base;
            if member.target >= base || member.blocked.is_some() {
                continue;
            }
            let reason = match &member.guest {
                Ok(guest) => guest.pressure.map(|pressure| Reason::GiveBack { pressure, base }),
                // A guest that was just found has not had the time to send statistics.
                Err(_) if now.since(member.memory.seen_at) <= tuning::STALE_AFTER => None,
                Err(_) => Some(Reason::BlindGiveBack { base }),
            };
            if let Some(reason) = reason {
                member.give(base, reason);
            }
        }
    }

    /// Tells the operator when the group is over its budget and nothing is on its way back, now
    /// or soon.
    fn say_that_it_stays_over(&mut self, returning: Bytes) {
        let deficit = self.ledger.deficit;
        let is_soon = |reason: &Reason| {
            matches!(
                reason,
                Reason::InFlight { .. }
                    | Reason::NotWatched { .. }
                    | Reason::Grace { .. }
                    | Reason::NewVm { .. }
            )
        };
        let gives = |member: &GroupVm| {
            member.change.as_ref().is_some_and(|change| change.is_take)
                || member.refusals.iter().any(is_soon)
        };
        if deficit < tuning::STEP_MIN || !returning.is_zero() || self.members.iter().any(gives) {
            return;
        }
        let reason = Reason::StaysOver { deficit };
        for member in self.members.iter_mut().filter(|m| !m.grant().is_zero()) {
            member.refuse(reason.clone());
        }
        self.over = Some(reason);
    }

    fn take_above_max(&mut self, rules: Rules, now: Time) {
        for member in self.members.iter_mut().filter(|m| m.target > m.limits.max) {
            let max = member.limits.max;
            let excess = member.target.minus(max);
            match guard::lowest_target(member, excess, Purpose::Maximum, rules, now) {
                Ok(target) => member.take(target, Reason::AboveMax { max }),
                Err(refusal) => member.refuse(refusal),
            }
        }
    }

    /// Takes grants back while the memory that may be touched does not fit below a cgroup's
    /// limit.
    fn take_above_ceilings(&mut self, ceilings: &mut Ceilings, rules: Rules, now: Time) {
        for member in self.members.iter_mut().filter(|m| !m.grant().is_zero()) {
            // Memory that is being taken for another reason counts here, too.
            if let Some(change) = &member.change {
                ceilings.note_taken(member, member.target.minus(change.target));
                continue;
            }
            let Some((over, limit)) = ceilings.exceeded(member) else { continue };
            let (cgroup, limit) = (limit.cgroup.clone(), limit.limit);
            match guard::lowest_target(member, over, Purpose::Deficit, rules, now) {
                Ok(target) => {
                    ceilings.note_taken(member, member.target.minus(target));
                    member.take(target, Reason::CgroupExceeded { cgroup, limit, over });
                }
                Err(refusal) => member.refuse(refusal),
            }
        }
    }

    /// Cuts grants that were decided to the amount that fits below the limits of cgroups.
    fn stay_below_ceilings(&mut self, ceilings: &mut Ceilings) {
        for member in &mut self.members {
            let Some(change) = member.change.as_ref().filter(|change| !change.is_take) else {
                continue;
            };
            let (has, wanted) = (member.limit(), change.target.minus(member.limit()));
            let (fits, refusal) = match ceilings.claim(member, wanted) {
                Ok(granted) if granted == wanted => continue,
                Ok(granted) => (has.plus(granted).floor_mib(), None),
                Err(refusal) => (has, Some(refusal)),
            };
            refusal.into_iter().for_each(|refusal| member.refuse(refusal));
            member.change = member.change.take().filter(|_| fits > member.target);
            member.change.iter_mut().for_each(|change| change.target = fits);
        }
    }

    /// Hands out the surplus by the group's policy, and collects idle memory for VMs that are
    /// short. A deficit leaves nothing to hand out, but where no grant is `returning`, only idle
    /// memory can end it. The same holds where the host cannot back the surplus.
    fn reprovision(&mut self, returning: Bytes, host: &mut Headroom, rules: Rules, now: Time) {
        // Borrowed memory does not spare the group's own idle memory.
        let own = self.own_surplus();
        let is_relieved = |member: &GroupVm| member.is_relieved && member.is_short();
        let grantable = host.grantable(self.members.iter().any(is_relieved));
        if let Some((shortest, lacking)) = self.unmet(own.min(grantable)) {
            self.unmet_at = now;
            let is_over_budget = self.unmet(own).is_some();
            if is_over_budget && self.spec.lend.takes_part() && self.ledger.borrowed.is_zero() {
                self.members[shortest].refuse(Reason::NoLender);
            }
            if returning.is_zero() {
                let needed_by = self.members[shortest].name.clone();
                let taken = idle::collect(&mut self.members, lacking, &needed_by, rules, now);
                if !rules.has(Rule::TakeFirst) {
                    self.ledger.surplus = self.ledger.surplus.plus(taken);
                }
            }
        }
        let Some(shares) = self.shares(self.ledger.surplus) else {
            return self.move_memory(host, rules, now);
        };
        let before = self.ledger.surplus;
        let mut surplus = before;
        for (member, share) in self.members.iter_mut().zip(shares.grants) {
            let reason = match member.demand() {
                Some(sign) if self.spec.policy == Policy::Demand => {
                    Reason::Demand { sign, surplus: before }
                }
                _ => Reason::Share { share },
            };
            // Memory that others give up counts once the host has it, so the surplus bounds every
            // grant.
            let wanted = share.minus(member.grant()).min(tuning::UNIT).min(surplus);
            if self.ledger.deficit.is_zero() && member.grant().minus(share) >= tuning::UNIT {
                shrink_to_share(member, share, rules, now);
            } else if member.can_take_more() && wanted >= tuning::STEP_MIN {
                match host.claim_for(member.is_relieved, wanted) {
                    Ok(granted) => {
                        surplus = surplus.minus(granted);
                        member.give(member.target.plus(granted).floor_mib(), reason);
                    }
                    Err(refusal) => member.refuse(refusal),
                }
            } else if member.change.is_none() && member.demand().is_some() {
                member.refuse(why_no_more(member, reason));
            }
        }
    }

    /// The group's own surplus that no VM needs, after all decisions.
    pub(crate) fn spare(&self) -> Bytes {
        let given = |member: &GroupVm| {
            let target = member.change.as_ref().map(|change| change.target);
            target.map_or(Bytes::ZERO, |target| target.minus(member.target))
        };
        let given: Bytes = self.members.iter().map(given).sum();
        self.own_surplus().minus(given)
    }

    /// The surplus without borrowed memory.
    fn own_surplus(&self) -> Bytes {
        self.ledger.surplus.minus(self.ledger.borrowed)
    }

    /// The member that is shortest, and the need of all short members beyond this surplus.
    fn unmet(&self, surplus: Bytes) -> Option<(usize, Bytes)> {
        self.shares(surplus).map_or_else(|| self.lacking(surplus), |shares| shares.unmet)
    }

    /// Each member's memory above its base by the group's policy with this `surplus`; `None`: the
    /// policy does not share out a surplus but all memory.
    fn shares(&self, surplus: Bytes) -> Option<Shares> {
        let policy = reprovision::policy(self.spec.policy)?;
        let standings: Vec<Standing> = self.members.iter().map(standing).collect();
        let grants: Bytes = self.members.iter().map(GroupVm::grant).sum();
        Some(policy.share(&standings, grants.plus(surplus)))
    }

    /// Gives base back to members that were shrunk, once no VM is short any more. Base is
    /// guaranteed: it needs no surplus, and where grants are in its way, the deficit that follows
    /// takes them back.
    fn restore_base(&mut self, now: Time) {
        if now.since(self.unmet_at) < tuning::RESTORE_AFTER {
            return;
        }
        for member in &mut self.members {
            let base = member.limits.base;
            let goes_ahead = member.is_paged && matches!(self.spec.cold, ColdSpec::Ahead(_));
            if member.target < base && member.can_take_more() && !goes_ahead {
                member.give(base, Reason::Restore { base });
            }
        }
    }

    /// Pages out untouched memory of VMs ahead of need, up to the group's bound on refaults.
    fn page_out_ahead(&mut self, rules: Rules, now: Time) {
        let ColdSpec::Ahead(points) = self.spec.cold else { return };
        for member in self.members.iter_mut().filter(|member| member.change.is_none()) {
            let Some(cold) = member.cold else { continue };
            match cold::may_go(&cold, member.tracking.as_ref(), points) {
                Ok(()) => {
                    let spare = member.spare();
                    let refaults = cold.refaulted_per_s.share(60, 1);
                    match guard::lowest_target(member, spare, Purpose::Idle, rules, now) {
                        Ok(target) => member.take(target, Reason::Ahead { spare, refaults }),
                        Err(refusal) => member.refuse(refusal),
                    }
                }
                Err(more) if member.target < member.limits.base && member.can_take_more() => {
                    let target = member.target.plus(more).min(member.limits.base);
                    member.give(target, Reason::Returns { more });
                }
                Err(_) => {}
            }
        }
    }
}

fn standing(member: &GroupVm) -> Standing {
    let base = member.limits.base;
    Standing {
        grant: member.grant(),
        grant_max: member.limits.max.minus(base).max(member.grant()),
        contribution: base.minus(member.used),
        demand: member.demand(),
        is_overloaded: member.memory.overload.is_overloaded(),
        can_take_more: member.can_take_more(),
    }
}

fn shrink_to_share(member: &mut GroupVm, share: Bytes, rules: Rules, now: Time) {
    let excess = member.grant().minus(share);
    match guard::lowest_target(member, excess, Purpose::Share, rules, now) {
        Ok(target) => member.take(target, Reason::Share { share }),
        Err(refusal) => member.refuse(refusal),
    }
}

/// Why a member that is short gets nothing; `motive` is the reason that a grant would have had.
fn why_no_more(member: &GroupVm, motive: Reason) -> Reason {
    if let Some(reason) = member.blocked.as_ref().or(member.avoided.as_ref()) {
        reason.clone()
    } else if member.has_max() {
        Reason::AtMax { max: member.limits.max }
    } else if let Reason::Demand { sign, .. } = motive {
        Reason::NoSurplus { sign }
    } else {
        motive
    }
}
