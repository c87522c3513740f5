//! No plan breaks an invariant, for any views in any order.
//!
//! Every invariant is computed here from the view alone, because the policy's own helpers may be
//! wrong too. 11,000 worlds of three to eight ticks each.

mod hostile;

use std::collections::BTreeMap;

use model::{
    Action, Bytes, HostView, Link, Migration, Mode, Plan, Reason, Spec, Time, VmLimits, VmName,
    VmView, plan::Change, spec::LendSpec,
};
use policy::{Case, Memory, tick, tuning};
use proptest::{prelude::*, test_runner::TestCaseResult};

use hostile::{Frame, World};

const SAFETY: u32 = 8_000;
const ISOLATION: u32 = 1_500;
const REPLAY: u32 = 1_000;
const SILENCE: u32 = 500;
const _: () = assert!(SAFETY + ISOLATION + REPLAY + SILENCE >= 10_000);

/// The requests to each VM in its present incarnation, as an observer knows them.
#[derive(Default)]
struct Onlooker {
    asked: BTreeMap<VmName, (u64, Bytes)>,
    has_swapped: BTreeMap<VmName, bool>,
    /// The largest observed size or target of each VM in its present incarnation.
    most: BTreeMap<VmName, (u64, Bytes)>,
}

impl Onlooker {
    fn look(&mut self, view: &HostView) {
        for (name, vm) in &view.vms {
            let swapped = vm.stats.and_then(|s| s.value.swap_out).is_some_and(|out| out.0 > 0);
            *self.has_swapped.entry(name.clone()).or_default() |= swapped;
            let most = self.most.entry(name.clone()).or_insert((vm.incarnation, Bytes::ZERO));
            if most.0 != vm.incarnation {
                *most = (vm.incarnation, Bytes::ZERO);
            }
            most.1 = most.1.max(stands_at(vm));
        }
    }

    fn note(&mut self, plan: &Plan) {
        for Action::Resize { vm, incarnation, target, .. } in plan.actions() {
            self.asked.insert(vm, (incarnation, target));
        }
    }

    /// The largest size or target of the VM, or its base.
    fn most_asked(&self, name: &VmName, vm: &VmView) -> Bytes {
        let most = self.most.get(name).map_or(Bytes::ZERO, |most| most.1);
        most.max(self.target(name, vm))
    }

    /// The VM's last target, or its current size.
    fn target(&self, name: &VmName, vm: &VmView) -> Bytes {
        let asked = self.asked.get(name).filter(|(life, _)| *life == vm.incarnation);
        asked.map_or(stands_at(vm), |(_, target)| *target)
    }
}

/// The balloon's size: never above the memory that QEMU gave, regardless of the guest driver's
/// figure.
fn stands_at(vm: &VmView) -> Bytes {
    vm.balloon.map_or(vm.ram, |reading| reading.value.min(vm.ram))
}

/// One change and the data to judge it by.
struct Deed<'a> {
    name: &'a VmName,
    vm: &'a VmView,
    change: &'a Change,
    limits: VmLimits,
    target: Bytes,
    actual: Bytes,
    asked: Bytes,
}

impl Deed<'_> {
    /// The tolerance between a balloon and its target, and between a target and the exact figure.
    fn slack(&self) -> Bytes {
        Bytes::mib(2).plus(Bytes(self.vm.ram.0 / 200))
    }

    fn is_in_range(&self) -> TestCaseResult {
        let lowest = self.limits.min.min(self.actual);
        // Grants are counted from the target, near which the balloon may be.
        let lowest = if self.change.is_take { lowest } else { lowest.minus(self.slack()) };
        let highest = self.limits.max.max(self.limits.base).max(self.actual).max(self.asked);
        prop_assert!(self.target >= lowest && self.target <= highest, "{self:?}");
        Ok(())
    }

    /// Memory is taken only from a guest that is reachable, at rest, and known.
    fn is_taken_knowingly(&self, now: Time) -> TestCaseResult {
        let vm = self.vm;
        prop_assert!(vm.link == Link::Up && vm.migration == Migration::None, "{self:?}");
        prop_assert!(
            vm.balloon.is_some_and(|balloon| now.since(balloon.at).0 <= 5_000),
            "{self:?}"
        );
        let Some(stats) = vm.stats else {
            return Err(TestCaseError::fail(format!("taken blindly: {self:?}")));
        };
        prop_assert!(now.since(stats.at).0 <= 5_000, "stale: {self:?}");
        let total = stats.value.total.unwrap_or(Bytes(u64::MAX));
        prop_assert!(total <= vm.ram, "more than QEMU gave: {self:?}");
        prop_assert!(stats.value.free.is_some_and(|free| free <= total), "{self:?}");
        prop_assert!(stats.value.available.is_none_or(|available| available <= total), "{self:?}");
        Ok(())
    }

    fn taken(&self) -> Bytes {
        self.asked.min(self.actual).minus(self.target)
    }

    /// A guest without swap keeps the memory that it uses and a margin, and always its base.
    fn leaves_the_swapless_alone(&self) -> TestCaseResult {
        let stats = self.vm.stats.map(|reading| reading.value).unwrap_or_default();
        let (free, total) = (stats.free.unwrap_or_default(), stats.total.unwrap_or_default());
        let left = free.min(stats.available.unwrap_or(free));
        let margin = total.percent(10).max(Bytes::mib(8));
        prop_assert!(self.taken() <= left.minus(margin).plus(self.slack()), "{self:?}");
        let step = Bytes::mib(10).max(self.asked.max(self.actual).percent(2));
        prop_assert!(self.taken() <= step.plus(self.slack()), "{self:?}");
        prop_assert!(self.target >= self.limits.base, "{self:?}");
        Ok(())
    }

    fn is_a_bounded_step(&self) -> TestCaseResult {
        let percent = match self.change.reason {
            Reason::Idle { .. } | Reason::Share { .. } => 5,
            Reason::WorthLess { .. } => 10,
            Reason::Deficit { .. } | Reason::AboveMax { .. } => 15,
            _ => 25,
        };
        let bound = Bytes::mib(10).max(self.actual.max(self.asked).percent(percent));
        prop_assert!(self.taken() <= bound.plus(self.slack()), "{self:?}");
        Ok(())
    }

    /// Memory newly granted above base and above earlier promises.
    fn gift(&self) -> Bytes {
        self.target.minus(self.actual.max(self.asked).max(self.limits.base))
    }
}

impl std::fmt::Debug for Deed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, limits, actual, asked, change, vm, .. } = self;
        write!(f, "{name} {limits:?} stands at {actual}, asked {asked}: {change:?} of {vm:?}")
    }
}

fn holds(view: &HostView, spec: &Spec, plan: &Plan, seen: &Onlooker, now: Time) -> TestCaseResult {
    let mut handed_out: BTreeMap<_, Bytes> = BTreeMap::new();
    for (name, decision) in &plan.vms {
        prop_assert!(
            decision.change.is_some() || !decision.refusals.is_empty(),
            "{name} unexplained"
        );
        let motive = decision.change.as_ref().map(|change| &change.reason);
        prop_assert!(decision.refusals.iter().chain(motive).all(|r| !r.to_string().is_empty()));
        let (Some(change), vm) = (&decision.change, &view.vms[name]) else { continue };
        let (Some(group), Some(limits)) = (&decision.group, decision.limits) else {
            return Err(TestCaseError::fail(format!("{name} is not managed, but changed")));
        };
        let Action::Resize { target, incarnation, .. } = change.action;
        prop_assert_eq!(incarnation, vm.incarnation);
        let actual = stands_at(vm);
        let asked = seen.target(name, vm);
        let deed = Deed { name, vm, change, limits, target, actual, asked };
        deed.is_in_range()?;
        if change.is_take {
            deed.is_taken_knowingly(now)?;
            deed.is_a_bounded_step()?;
            if !spec.swap_of(name).unwrap_or(seen.has_swapped[name]) && !change.is_repeat {
                deed.leaves_the_swapless_alone()?;
            }
        } else if let Reason::Withheld { .. } = change.reason {
            // The host keeps that memory for the VM in any case.
            let counted = policy::used(vm).map_or(Bytes::ZERO, |used| used.value);
            prop_assert!(target <= counted.plus(tuning::uncounted(vm.ram)), "{deed:?}");
        } else {
            // Memory that was taken from the VM is no gift: it comes back with any surplus of its
            // group.
            let comes_back =
                matches!(change.reason, Reason::Returned { .. } | Reason::KilledGiveBack { .. });
            if comes_back {
                let most = seen.most_asked(name, vm).max(limits.base);
                prop_assert!(target <= most, "{deed:?}");
            } else {
                let sum = handed_out.entry(group.clone()).or_default();
                *sum = sum.plus(deed.gift());
            }
            let is_above_base = target > limits.base.max(actual);
            prop_assert!(!(is_above_base && is_short(view, spec, now)), "short host: {deed:?}");
            let is_new = !deed.gift().is_zero();
            prop_assert!(!(is_new && is_unknown(view, now)), "unknown host: {deed:?}");
        }
    }
    for (name, ledger) in &plan.groups {
        let gifts = handed_out.get(name).copied().unwrap_or_default();
        prop_assert!(gifts <= ledger.surplus, "{name}: {gifts} of {ledger:?}");
        if !ledger.surplus.is_zero() {
            let spoken_for = ledger.used.plus(ledger.promised).plus(ledger.reserve);
            let entitled = ledger.budget.plus(ledger.borrowed);
            prop_assert!(ledger.deficit.is_zero());
            prop_assert!(
                spoken_for.plus(ledger.surplus).plus(ledger.lent) <= entitled,
                "{name}: {ledger:?}"
            );
        }
    }
    loans_are_consented_and_covered(view, spec, plan, now)?;
    actions_are_in_order(plan)
}

/// A loan is borrowed once, by consent of both groups, and only from memory that a calm group
/// leaves unused.
fn loans_are_consented_and_covered(
    view: &HostView,
    spec: &Spec,
    plan: &Plan,
    now: Time,
) -> TestCaseResult {
    let mut lent: BTreeMap<_, Bytes> = BTreeMap::new();
    let mut borrowed: BTreeMap<_, Bytes> = BTreeMap::new();
    for (lender, loan) in plan.loans.iter().filter(|(_, loan)| !loan.amount.is_zero()) {
        prop_assert!(
            spec.groups[lender].lend.includes(&spec.groups[&loan.borrower].lend),
            "{loan:?}"
        );
        prop_assert!(!is_short(view, spec, now), "short host: {loan:?}");
        let sum = borrowed.entry(&loan.borrower).or_default();
        *sum = sum.plus(loan.amount);
        lent.insert(lender, loan.amount);
        let ledger = plan.groups[lender];
        let spoken_for = ledger.used.plus(ledger.promised).plus(ledger.reserve);
        prop_assert!(spoken_for.plus(loan.amount) <= ledger.budget, "{loan:?} of {ledger:?}");
        for (name, vm) in
            view.vms.iter().filter(|(vm, _)| plan.vms[*vm].group.as_ref() == Some(lender))
        {
            prop_assert!(!says_it_has_nothing_left(plan, name, vm), "{name} is short: {loan:?}");
        }
    }
    for (name, ledger) in &plan.groups {
        prop_assert_eq!(ledger.lent, lent.get(name).copied().unwrap_or_default());
        prop_assert_eq!(ledger.borrowed, borrowed.get(name).copied().unwrap_or_default());
        prop_assert!(ledger.lent.is_zero() || ledger.borrowed.is_zero(), "{name} does both");
    }
    Ok(())
}

/// Freed memory is taken only from VMs that have some, and only while the host is known to need
/// it.
fn takes_are_needed(view: &HostView, plan: &Plan, now: Time) -> TestCaseResult {
    prop_assert!(plan.takes.is_empty() || !is_unknown(view, now), "unknown host");
    for (name, take) in &plan.takes {
        let free = view.vms[name].free_pages.map(|free| free.value).unwrap_or_default();
        prop_assert!(take.keep < free.freed && !free.lazy.is_zero(), "{name}: {take:?}");
    }
    Ok(())
}

/// Whether a guest that is believed has almost nothing available.
fn says_it_has_nothing_left(plan: &Plan, name: &VmName, vm: &VmView) -> bool {
    use Reason::{CountersWentBack, ImplausibleStats, NoStats, StaleStats};
    let is_doubt = |reason: &Reason| {
        matches!(reason, CountersWentBack | ImplausibleStats { .. } | NoStats | StaleStats { .. })
    };
    let stats = vm.stats.map(|reading| reading.value).unwrap_or_default();
    let (total, left) = (stats.total.unwrap_or_default(), stats.available.or(stats.free));
    !plan.vms[name].refusals.iter().any(is_doubt)
        && left.is_some_and(|left| left < total.percent(5))
}

fn is_unknown(view: &HostView, now: Time) -> bool {
    view.host.is_none_or(|reading| now.since(reading.at).0 > 5_000)
}

fn is_short(view: &HostView, spec: &Spec, now: Time) -> bool {
    view.host.filter(|_| !is_unknown(view, now)).is_some_and(|reading| {
        let reserve = spec.host.reserve.unwrap_or(reading.value.total.percent(5));
        reading.value.available < reserve
    })
}

/// One action per VM, takes first.
fn actions_are_in_order(plan: &Plan) -> TestCaseResult {
    let mut seen = BTreeMap::new();
    let mut gives = 0;
    for Action::Resize { vm, .. } in plan.actions() {
        let is_take = plan.vms[&vm].change.as_ref().is_some_and(|change| change.is_take);
        gives += usize::from(!is_take);
        prop_assert!(!is_take || gives == 0, "a take after a give");
        prop_assert!(seen.insert(vm, ()).is_none(), "two actions for one VM");
    }
    Ok(())
}

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    prop::collection::vec(hostile::frame(hostile::any_host()), 3..=8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(SAFETY))]
    #[test]
    fn no_plan_breaks_an_invariant(
        spec in hostile::spec(Just(Mode::Enforce)),
        rams in hostile::rams(),
        balloons in hostile::balloons(),
        frames in frames(),
    ) {
        let (mut world, mut memory) = (World::new(&spec, rams, &balloons), Memory::default());
        let mut onlooker = Onlooker::default();
        for frame in frames {
            let view = world.show(&frame);
            onlooker.look(&view);
            let plan = tick(&view, &spec, &mut memory, world.now);
            prop_assert!(plan.vms.keys().eq(view.vms.keys()), "a VM without a decision");
            holds(&view, &spec, &plan, &onlooker, world.now)?;
            takes_are_needed(&view, &plan, world.now)?;
            onlooker.note(&plan);
            if frame.is_applied {
                world.apply(&plan);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ISOLATION))]
    #[test]
    fn a_group_that_does_not_lend_is_decided_the_same_whatever_its_neighbours_do(
        mut spec in hostile::spec(Just(Mode::Enforce)),
        rams in hostile::rams(),
        balloons in hostile::balloons(),
        frames in prop::collection::vec(
            (hostile::frame(hostile::plenty()), hostile::frame(hostile::plenty())), 3..=8),
    ) {
        spec.groups.get_mut(&"g0".into()).expect("the first group").lend = LendSpec::Open(false);
        let decisions = |is_changed: bool| {
            let (mut world, mut memory) = (World::new(&spec, rams.clone(), &balloons), Memory::default());
            let mut decisions = Vec::new();
            for (frame, other) in &frames {
                let mut frame = frame.clone();
                frame.vms.resize_with(hostile::VMS, hostile::VmFrame::absent);
                let neighbours = (0..other.vms.len()).filter(|i| is_changed && hostile::GROUPS[*i] != 0);
                for i in neighbours {
                    frame.vms[i] = other.vms[i].clone();
                }
                let view = world.show(&frame);
                let plan = tick(&view, &spec, &mut memory, world.now);
                world.apply(&plan);
                let first = plan.vms.into_iter().filter(|(vm, _)| vm.as_str().starts_with("g0-"));
                decisions.push((plan.groups[&"g0".into()], first.collect::<Vec<_>>()));
            }
            decisions
        };
        prop_assert_eq!(decisions(false), decisions(true));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(REPLAY))]
    #[test]
    fn an_exported_case_decides_the_same_after_a_round_trip(
        spec in hostile::spec(Just(Mode::Enforce)),
        rams in hostile::rams(),
        balloons in hostile::balloons(),
        frames in frames(),
    ) {
        let (mut world, mut memory) = (World::new(&spec, rams, &balloons), Memory::default());
        for frame in frames {
            let view = world.show(&frame);
            let (spec, now) = (spec.clone(), world.now);
            let case = Case { now, spec, view, memory: memory.clone() };
            let text = serde_json::to_string(&case).expect("a case can be written");
            let read: Case = serde_json::from_str(&text).expect("a written case can be read");
            prop_assert_eq!(&read, &case);
            let plan = tick(&case.view, &case.spec, &mut memory, case.now);
            prop_assert_eq!(read.decide(), plan);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(SILENCE))]
    #[test]
    fn nothing_is_changed_while_observing_or_paused(
        spec in hostile::spec(prop::sample::select(vec![Mode::Observe, Mode::Enforce])),
        rams in hostile::rams(),
        balloons in hostile::balloons(),
        frames in frames(),
    ) {
        let (mut world, mut memory) = (World::new(&spec, rams, &balloons), Memory::default());
        memory.paused = spec.modes.balloon != Mode::Observe;
        for frame in frames {
            let view = world.show(&frame);
            prop_assert!(tick(&view, &spec, &mut memory, world.now).actions().is_empty());
        }
    }
}
