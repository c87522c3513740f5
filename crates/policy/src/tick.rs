//! One step of the loop: assign the VMs to groups, decide each group, remember, and write the
//! plan.

use std::collections::BTreeMap;

use model::{
    Action, Bytes, Decision, GroupName, HostView, Loan, Means, Mode, Plan, Policy, Reason, Scan,
    Severity, Spec, Time,
    plan::Change,
    ports::{Act, Clock, Sense},
};

use crate::{
    Memory, Rules, cache,
    ceilings::Ceilings,
    grace,
    group::Group,
    headroom::Headroom,
    ledger,
    member::{GroupVm, Intent, Terms},
    memory::VmMemory,
    overload::{self, Watched},
    reclaim,
    scan_rate::{self, Period},
    tuning,
};

/// Decides what happens to every VM of the host.
#[must_use]
pub fn tick(view: &HostView, spec: &Spec, memory: &mut Memory, now: Time) -> Plan {
    tick_with(view, spec, memory, now, Rules::ALL)
}

/// [`tick`] with some safety rules off: the simulator shows their purpose with it.
#[must_use]
pub fn tick_with(
    view: &HostView,
    spec: &Spec,
    memory: &mut Memory,
    now: Time,
    rules: Rules,
) -> Plan {
    let mode = spec.modes.balloon;
    let mut plan = Plan { at: now, mode, ..Plan::default() };
    let mut groups = assemble(view, spec, memory, &mut plan, rules, now);
    let promised: Bytes = groups.values().map(|group| group.ledger.promised).sum();
    let cached = cache::held(view, now);
    let amounts = (promised, cached, memory.kept.targets);
    let mut host = Headroom::measure(view.host, spec.host.reserve, amounts, rules, now);
    plan.host.extend(host.short.clone());
    let all = groups.values().flat_map(|group| &group.members);
    let mut ceilings = Ceilings::measure(all, rules);
    let idle_because = match mode {
        _ if memory.paused => Some(Reason::Paused),
        Mode::Observe => Some(Reason::Observing),
        Mode::Recommend | Mode::Enforce => None,
    };
    let unlendable_because = idle_because.as_ref().or(host.short.as_ref());
    plan.loans = loans(&mut groups, unlendable_because, memory, now);
    plan.scans = scans(view, &groups, &plan, memory, now);
    if !memory.paused {
        plan.takes = reclaim::decide(view, &groups, spec.host.reserve, now);
    }

    for (name, group) in &mut groups {
        match &idle_because {
            Some(reason) => group.members.iter_mut().for_each(|m| m.refuse(reason.clone())),
            None => group.decide(&mut host, &mut ceilings, rules, now),
        }
        plan.groups.insert(name.clone(), group.ledger);
        plan.over.extend(group.over.take().map(|reason| (name.clone(), reason)));
    }
    if !memory.paused {
        plan.caches = cache::quotas(&groups, spec, &host);
    }
    plan.spare = (host.covers_kept && !is_short_of_host(&groups)).then(|| host.left());
    let members = groups.values_mut().flat_map(|group| &mut group.members);
    let watched = members.map(|member| Watched {
        name: &member.name,
        watch: &mut member.memory.overload,
        is_short: member.actual < member.limits.max,
    });
    plan.overloads = overload::watch(watched, view, &spec.overload, &mut memory.learned, now);
    let counted_at = &mut memory.counted_at;
    overload::count(&plan.overloads, &spec.overload, &mut memory.learned.together, counted_at, now);
    for (name, group) in groups {
        memory.unmet_at.insert(name.clone(), group.unmet_at);
        if group.spec.policy == Policy::Balance {
            memory.balances.insert(name.clone(), group.balance);
        }
        for member in group.members {
            conclude(member, &name, mode, memory, &mut plan, now);
        }
    }
    plan
}

/// One turn of the loop over the three ports to the outside world.
pub fn cycle(
    world: &mut (impl Sense + Act),
    clock: &impl Clock,
    spec: &Spec,
    memory: &mut Memory,
) -> (HostView, Plan) {
    cycle_with(world, clock, spec, memory, Rules::ALL)
}

/// [`cycle`] with some safety rules off: for the simulator.
pub fn cycle_with(
    world: &mut (impl Sense + Act),
    clock: &impl Clock,
    spec: &Spec,
    memory: &mut Memory,
    rules: Rules,
) -> (HostView, Plan) {
    let view = world.view();
    let plan = tick_with(&view, spec, memory, clock.now(), rules);
    if plan.mode == Mode::Enforce {
        for action in plan.actions() {
            world.act(&action);
        }
    }
    world.finish(&plan);
    (view, plan)
}

/// Assigns the VMs to their groups. A VM that matches no group goes into the plan unchanged.
fn assemble<'a>(
    view: &HostView,
    spec: &'a Spec,
    memory: &mut Memory,
    plan: &mut Plan,
    rules: Rules,
    now: Time,
) -> BTreeMap<GroupName, Group<'a>> {
    let mut remembered = std::mem::take(&mut memory.vms);
    let no_takes = memory.grace.refusal(now);
    let swap_cost = view.host.map_or(0.0, |host| host.value.swap_cost);
    let host_total = view.host.map_or(Bytes(u64::MAX), |host| host.value.total);
    let mut members: BTreeMap<&GroupName, Vec<GroupVm>> = BTreeMap::new();
    for (name, vm) in &view.vms {
        let Some((group, group_spec)) = spec.group_of(name) else {
            let refusals = vec![Reason::NoGroup];
            let target = vm.balloon.map(|reading| reading.value);
            let decision = Decision { target, refusals, ..Decision::default() };
            plan.vms.insert(name.clone(), decision);
            continue;
        };
        let started_with = vm.ram.minus(vm.hotplugged);
        let limits = spec.limits_of(name, group_spec, started_with).plus(vm.hotplugged);
        let known = remembered.remove(name);
        let own = spec.vms.get(name).copied().unwrap_or_default();
        let terms =
            Terms { limits, spec: own, pages_out: group_spec.cold.is_on(), swap_cost, host_total };
        let mut member = GroupVm::assess(name, vm, terms, known, rules, now);
        member.is_relieved = memory.kept.arrived.contains(name)
            || member.memory.overload.severity() == Severity::Sustained;
        if spec.modes.balloon == Mode::Enforce {
            member.spared = no_takes
                .clone()
                .or_else(|| grace::of_new_vm(member.memory.seen_at, spec.host.grace, now));
        }
        if let Some(reason) = memory.pauses.refusal(name, Some(group)) {
            member.pause(reason);
        }
        if group_spec.policy != Policy::Balance {
            member.memory.forget_balance();
        }
        members.entry(group).or_default().push(member);
    }
    let balances = std::mem::take(&mut memory.balances);
    spec.groups
        .iter()
        .map(|(name, group_spec)| {
            let unmet_at = memory.unmet_at.get(name).copied().unwrap_or(now);
            let mut group =
                Group::new(group_spec, members.remove(name).unwrap_or_default(), unmet_at);
            group.balance = balances.get(name).copied().unwrap_or_default();
            (name.clone(), group)
        })
        .collect()
}

/// Whether the host has refused memory to a VM of these groups.
fn is_short_of_host(groups: &BTreeMap<GroupName, Group<'_>>) -> bool {
    let is_of_host = |reason: &Reason| {
        matches!(reason, Reason::HostReserve { .. } | Reason::KeptForOverloads { .. })
    };
    let mut members = groups.values().flat_map(|group| &group.members);
    members.any(|member| member.refusals.iter().any(is_of_host))
}

/// Decides the loans between groups until the next tick, and enters them in the ledgers.
fn loans(
    groups: &mut BTreeMap<GroupName, Group<'_>>,
    unlendable_because: Option<&Reason>,
    memory: &mut Memory,
    now: Time,
) -> BTreeMap<GroupName, Loan> {
    let parties = groups.iter().map(|(name, group)| (name.clone(), group.party())).collect();
    let loans = memory.lending.settle(&parties, unlendable_because, now);
    for (lender, loan) in &loans {
        if let Some(group) = groups.get_mut(lender) {
            ledger::lend(&mut group.ledger, loan.amount);
        }
        if let Some(group) = groups.get_mut(&loan.borrower) {
            ledger::borrow(&mut group.ledger, loan.amount);
        }
    }
    loans
}

/// Decides each group's scan rate for identical pages. Scanning takes nothing from any guest, so
/// the balloon's mode does not matter. Only a payer from another group needs a loan that is
/// carried out.
fn scans(
    view: &HostView,
    groups: &BTreeMap<GroupName, Group<'_>>,
    plan: &Plan,
    memory: &mut Memory,
    now: Time,
) -> BTreeMap<GroupName, Scan> {
    let host = view.host.filter(|host| host.age(now) <= tuning::STALE_AFTER);
    let cpu_busy = host.and_then(|host| host.value.cpu_busy);
    let last_rates = std::mem::take(&mut memory.scan_rates);
    let mut scans = BTreeMap::new();
    for (name, group) in groups {
        let dedup = group.spec.dedup;
        let loan = plan.loans.get(name).filter(|loan| !loan.amount.is_zero());
        let payer = loan.filter(|_| plan.mode == Mode::Enforce).map(|loan| &loan.borrower);
        let alone = || Reason::PausedAlone { name: name.to_string() };
        let paused = memory.paused.then_some(Reason::Paused);
        let paused = paused.or_else(|| memory.pauses.groups.contains_key(name).then(alone));
        let mut scan = if let Some(reason) = paused.filter(|_| dedup.is_on()) {
            Scan { rate: None, reason, payer: None }
        } else {
            let for_whom = payer.and_then(|payer| groups.get(payer)).unwrap_or(group);
            let last = Period::of(cpu_busy, &group.members, &for_whom.members);
            scan_rate::decide(dedup, last_rates.get(name).copied(), &last)
        };
        scan.payer = payer.cloned();
        if let Some(rate) = scan.rate {
            memory.scan_rates.insert(name.clone(), rate);
        }
        scans.insert(name.clone(), scan);
    }
    scans
}

/// Writes a member's decision into the plan, and into memory if it is carried out.
fn conclude(
    mut member: GroupVm,
    group: &GroupName,
    mode: Mode,
    memory: &mut Memory,
    plan: &mut Plan,
    now: Time,
) {
    let doubt = member.guest.as_ref().err().cloned();
    for reason in [member.blocked.clone(), member.avoided.clone(), doubt].into_iter().flatten() {
        member.refuse(reason);
    }
    if member.change.is_none() && member.refusals.is_empty() {
        member.refusals.push(Reason::Content);
    }
    match &member.change {
        _ if mode != Mode::Enforce || memory.paused => member.memory.stand_back(),
        Some(intent) => {
            let is_calm = !member.is_pressured();
            let held = member.ram.minus(member.actual);
            member.memory.withheld.note_change(intent.is_take, held);
            if !member.is_paged {
                note_sizes(&mut member.memory, intent, member.target);
            }
            remember(&mut member.memory, intent, member.actual, is_calm, now);
        }
        None => {}
    }
    let target = member.change.as_ref().map_or(member.target, |intent| intent.target);
    let incarnation = member.memory.incarnation;
    let by = if member.is_paged { Means::Paging } else { Means::Balloon };
    if mode == Mode::Enforce && !memory.paused && member.is_paged {
        member.memory.resident = Some(target);
    }
    let change = member.change.map(|intent| Change {
        action: Action::Resize { vm: member.name.clone(), incarnation, target, by },
        is_take: intent.is_take,
        is_repeat: intent.is_repeat,
        reason: intent.reason,
    });
    let decision = Decision {
        group: Some(group.clone()),
        limits: Some(member.limits),
        target: Some(target),
        change,
        is_at_max: member.is_at_max,
        refusals: member.refusals,
        outcome: member.memory.outcome,
    };
    plan.vms.insert(member.name.clone(), decision);
    memory.vms.insert(member.name, member.memory);
}

/// Remembers the member's size before memory was taken from it, until it has that size again.
fn note_sizes(memory: &mut VmMemory, intent: &Intent, before: Bytes) {
    if intent.is_take && !intent.is_repeat {
        memory.note_take(before);
    } else {
        memory.note_return(intent.target);
    }
}

fn remember(memory: &mut VmMemory, intent: &Intent, actual: Bytes, is_calm: bool, now: Time) {
    match &intent.reason {
        // The request is withdrawn, so there is nothing to follow.
        Reason::Uncooperative { .. } => memory.asked = None,
        reason => memory.ask(intent.target, intent.is_take, reason.clone(), actual, now),
    }
    match intent.reason {
        Reason::WorthLess { .. } => memory.moved_away_at = Some(now),
        Reason::Balance { .. } | Reason::GiveBack { .. } if !intent.is_repeat => {
            memory.note_gift(now);
        }
        _ => {}
    }
    // Where a VM was expected to miss more for others' sake, or was short already, later pressure
    // is no mistake.
    let is_not_missed = matches!(
        intent.reason,
        Reason::Idle { .. } | Reason::Share { .. } | Reason::WorthLess { costs: 0, .. }
    );
    if is_not_missed && is_calm && intent.is_take {
        memory.taken_at = Some(now);
    }
}
