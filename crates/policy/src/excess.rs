//! Excess space: memory to keep free for overloads, and the number of VMs that then fit (Williams
//! 2011 §4.2).
//!
//! **Problem.** Memory that is promised twice must exist when both VMs want it. Of `n` VMs that
//! are overloaded with probability `p` each, at most `k` are overloaded at once with probability
//! Σ C(n,i) pⁱ (1−p)ⁿ⁻ⁱ, i ≤ k. **Rule.** For the `k` that suffices with a given certainty: each
//! sustained overload needs room for a whole VM, as promised, on one host; each transient one
//! needs the VM's missing memory, on any host.
//!
//! Here each VM has its own probability ([`at_most`] convolves them; the paper takes the highest
//! for all). And overloads that come together are correlated: where simultaneous overloads were
//! counted ([`Together`]), that count applies, and the result also gives the number for
//! independent overloads.
//!
//! **In a pool** the controller shares the need out ([`share_out`], §4.3): room for a VM to move to
//! lies whole on one host, room for pages on any host with a repository. A share stays where it is
//! while it fits there. Each host keeps its share free of grants ([`crate::headroom`]). A VM that
//! has all of its promise needs no more, so memory that an overload has used is kept anew
//! elsewhere only for the VMs that are left. When the VM gives its memory back, the share is free
//! again without a grant that comes back: no VM is squeezed for it, so nothing cascades.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use model::cluster::{ClusterView, ExcessPlan, ExcessSpace, HostReport, OverloadRates, VmReport};
use model::{Bytes, HostName, Severity, Together};
use serde::{Deserialize, Serialize};

/// Smaller probabilities are cut off a distribution's tail.
const NEGLIGIBLE: f64 = 1e-12;
/// Counts of overloads at once from which on they apply: one each minute.
const ENOUGH_COUNTS: u64 = 60;
/// Counts of a week.
const MOST_COUNTS: u64 = 7 * 24 * 60;
/// More VMs at once are counted as this many.
const MOST_COUNTED: usize = 10_000;

/// A VM's promise, and how often the VM is overloaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Promise {
    /// Memory that the VM was promised.
    pub promised: Bytes,
    /// Memory that the VM was given of that.
    pub given: Bytes,
    /// Probability at any moment that the VM is in a transient overload.
    pub transient: f64,
    /// Probability of a sustained overload.
    pub sustained: f64,
}

/// The largest number of VMs that are overloaded at once, with some certainty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtOnce {
    /// The number of VMs.
    pub vms: u32,
    /// The number if overloads were independent of each other.
    pub if_independent: u32,
}

/// Memory to keep free for a number of VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// Overloads that are sustained.
    pub sustained: AtOnce,
    /// Overloads that are transient.
    pub transient: AtOnce,
    /// Room for VMs that are moved; each lies on one host.
    pub targets: Bytes,
    /// Room for swapped-out pages, on any hosts.
    pub repositories: Bytes,
}

impl Need {
    /// The need of these VMs, with this certainty (0 to 1). `together`: the counts of
    /// simultaneous overloads among them, where there are counts.
    #[must_use]
    pub fn of(vms: &[Promise], together: &Together, certainty: f64) -> Self {
        let at_once = |p: fn(&Promise) -> f64, counted: &[u64]| {
            let if_independent = at_most(vms.iter().map(p), certainty);
            let vms = counted_at_most(counted, certainty).max(if_independent);
            AtOnce { vms, if_independent }
        };
        let transient = at_once(|vm| vm.transient, &together.transient);
        let sustained = at_once(|vm| vm.sustained, &together.sustained);
        Self::for_overloads(vms, sustained, transient)
    }

    fn for_overloads(vms: &[Promise], sustained: AtOnce, transient: AtOnce) -> Self {
        let targets = largest(vms.iter().map(|vm| vm.promised), sustained.vms);
        let withheld = vms.iter().map(|vm| vm.promised.minus(vm.given));
        Self { sustained, transient, targets, repositories: largest(withheld, transient.vms) }
    }

    /// The total.
    #[must_use]
    pub const fn sum(&self) -> Bytes {
        self.targets.plus(self.repositories)
    }
}

/// Shares out the excess space of a pool, with this certainty (0 to 1; 0: none is kept). `before`
/// is the plan in force; a plan is made each minute.
///
/// A VM whose overloads were not measured counts as an average one of the pool. VMs that are moved
/// often are never measured for long, so overloads at once are counted as well. Nothing is kept
/// before there is a measured VM or an hour of counts.
#[must_use]
pub fn share_out(view: &ClusterView, certainty: f64, before: &ExcessPlan) -> ExcessPlan {
    let vms: Vec<&VmReport> =
        view.hosts.values().flat_map(|host| host.value.vms.values()).collect();
    let together = counted(before.together.clone(), &vms);
    let is_known = vms.iter().any(|vm| vm.rates.is_some())
        || together.transient.iter().sum::<u64>() >= ENOUGH_COUNTS;
    let nothing = ExcessPlan { certainty, together, ..ExcessPlan::default() };
    if certainty <= 0.0 || !is_known {
        return nothing;
    }
    let mut promises = promises(&vms);
    let sustained = Need::of(&promises, &nothing.together, certainty);
    // A sustained overload pages to repositories, too, until its VM has moved.
    for vm in &mut promises {
        vm.transient += vm.sustained;
    }
    let transient = Need::of(&promises, &nothing.together, certainty);
    let need = ExcessSpace { targets: sustained.targets, repositories: transient.repositories };
    let mut places: BTreeMap<&HostName, Place> = view
        .hosts
        .iter()
        .map(|(name, host)| {
            let had = before.shares.get(name).copied().unwrap_or_default();
            (name, Place::of(&host.value, had))
        })
        .collect();
    let mut missing = ExcessSpace::default();
    let mut sizes: Vec<Bytes> = promises.iter().map(|vm| vm.promised).collect();
    sizes.sort_unstable_by_key(|size| Reverse(*size));
    for size in sizes.into_iter().take(sustained.sustained.vms as usize) {
        match places.values_mut().filter(|place| place.has_room(size)).max_by_key(|p| p.rank(size))
        {
            Some(place) => place.take_in(size),
            None => missing.targets = missing.targets.plus(size),
        }
    }
    missing.repositories = lend(&mut places, need.repositories);
    let share = |(name, place): (&HostName, Place)| (name.clone(), place.share);
    let shares =
        places.into_iter().map(share).filter(|(_, share)| *share != ExcessSpace::default());
    ExcessPlan { need, missing, shares: shares.collect(), ..nothing }
}

/// Adds the overloads of this moment. Counts of more than a week lose half of their weight.
fn counted(mut together: Together, vms: &[&VmReport]) -> Together {
    let number = |of: fn(&Severity) -> bool| vms.iter().filter(|vm| of(&vm.severity)).count();
    let all = number(|severity| *severity != Severity::None);
    let sustained = number(|severity| *severity == Severity::Sustained);
    for (counts, n) in [(&mut together.transient, all), (&mut together.sustained, sustained)] {
        let n = n.min(MOST_COUNTED);
        counts.resize(counts.len().max(n + 1), 0);
        counts[n] += 1;
        if counts.iter().sum::<u64>() > MOST_COUNTS {
            counts.iter_mut().for_each(|count| *count /= 2);
        }
    }
    together
}

/// A host, while shares are dealt out.
struct Place {
    /// Whether VMs can move here.
    receives: bool,
    /// Memory that no VM has, with its repository's share of the last plan.
    beside: Bytes,
    /// The most that its repository would hold.
    lends: Bytes,
    /// Its share of the last plan that is not dealt out again.
    had: ExcessSpace,
    share: ExcessSpace,
}

impl Place {
    fn of(host: &HostReport, had: ExcessSpace) -> Self {
        let given: Bytes = host.vms.values().map(|vm| vm.given).sum();
        // The whole space is dealt out anew, room for VMs first.
        let beside = host.memory.minus(given).plus(had.repositories);
        let HostReport { receives, lends, .. } = *host;
        Self { receives, beside, lends, had, share: ExcessSpace::default() }
    }

    fn has_room(&self, size: Bytes) -> bool {
        self.receives && self.beside >= size
    }

    /// Memory that its repository can hold.
    fn lendable(&self) -> Bytes {
        self.beside.min(self.lends)
    }

    /// Its rank among places for a VM of this size: first where most of it is kept already.
    fn rank(&self, size: Bytes) -> (Bytes, Bytes) {
        (self.had.targets.min(size), self.beside)
    }

    fn take_in(&mut self, size: Bytes) {
        self.had.targets = self.had.targets.minus(size);
        self.share.targets = self.share.targets.plus(size);
        self.beside = self.beside.minus(size);
    }
}

/// Deals out room for pages in proportion to what each repository can hold. Returns the rest.
fn lend(places: &mut BTreeMap<&HostName, Place>, need: Bytes) -> Bytes {
    let all: Bytes = places.values().map(|place| place.lendable()).sum();
    let dealt = need.min(all);
    for place in places.values_mut() {
        place.share.repositories = dealt.share(place.lendable().0, all.0.max(1));
    }
    need.minus(dealt)
}

/// The promises of these VMs that can be overloaded.
fn promises(vms: &[&VmReport]) -> Vec<Promise> {
    let known: Vec<_> = vms.iter().filter_map(|vm| vm.rates).collect();
    let mean = |of: fn(&OverloadRates) -> u16| {
        let sum = known.iter().map(|rates| f64::from(of(rates))).sum::<f64>();
        sum / (known.len() as f64).max(1.0)
    };
    let mean = (mean(|rates| rates.transient), mean(|rates| rates.sustained));
    let lacks = vms.iter().filter(|vm| vm.given < vm.promised);
    let promise = |vm: &&VmReport| {
        let own = vm.rates.map(|rates| (rates.transient.into(), rates.sustained.into()));
        let (transient, sustained) = own.unwrap_or(mean);
        let (transient, sustained) = (transient / 1000.0, sustained / 1000.0);
        Promise { promised: vm.promised, given: vm.given, transient, sustained }
    };
    lacks.map(promise).collect()
}

/// The sum of the `n` largest ones, because any VMs may be the ones overloaded.
fn largest(sizes: impl Iterator<Item = Bytes>, n: u32) -> Bytes {
    let mut sizes: Vec<Bytes> = sizes.collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.into_iter().take(n as usize).sum()
}

/// The least `k` such that at most `k` of these independent events happen at once, with this
/// certainty. The distribution of their number is the convolution of the events' distributions.
#[must_use]
pub fn at_most(probabilities: impl Iterator<Item = f64>, certainty: f64) -> u32 {
    // `of[i]` is the probability that `first + i` of the events so far happen; negligible ends
    // are cut off.
    let (mut of, mut first) = (vec![1.0_f64], 0);
    for p in probabilities.map(|p| p.clamp(0.0, 1.0)).filter(|p| *p > 0.0) {
        of.push(0.0);
        for i in (1..of.len()).rev() {
            of[i] = of[i] * (1.0 - p) + of[i - 1] * p;
        }
        of[0] *= 1.0 - p;
        while of.last().is_some_and(|p| *p < NEGLIGIBLE) && of.len() > 1 {
            of.pop();
        }
        let low = of.iter().take_while(|p| **p < NEGLIGIBLE).count();
        of.drain(..low);
        first += low;
    }
    let mut sum = 0.0;
    let enough = of.iter().position(|p| {
        sum += p;
        sum >= certainty
    });
    u32::try_from(first + enough.unwrap_or(of.len() - 1)).unwrap_or(u32::MAX)
}

/// The least number that was not exceeded in this share of all counts; `counts[n]` is the
/// frequency of `n`.
fn counted_at_most(counts: &[u64], certainty: f64) -> u32 {
    let all: u64 = counts.iter().sum();
    let mut sum = 0;
    let enough = counts.iter().position(|n| {
        sum += n;
        sum as f64 >= certainty * all as f64
    });
    enough.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
}

/// The number of VMs like `vm` that fit into `memory` with the memory to keep free for them (Fig.
/// 5). `factor` is the ratio of simultaneous overloads to their number under independence.
#[must_use]
pub fn most(vm: Promise, memory: Bytes, certainty: f64, factor: f64) -> (u32, Need) {
    let need = |n: u32| {
        let all = vec![vm; n as usize];
        let at_once = |p: f64| {
            let if_independent = at_most(std::iter::repeat_n(p, n as usize), certainty);
            let vms = (f64::from(if_independent) * factor).ceil();
            // At most `n`, and never a number that does not fit the type.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            AtOnce { vms: (vms as u32).min(n), if_independent }
        };
        Need::for_overloads(&all, at_once(vm.sustained), at_once(vm.transient))
    };
    let fits = |n: u32| Bytes(vm.given.0 * u64::from(n)).plus(need(n).sum()) <= memory;
    let most = u32::try_from(memory.0 / vm.given.0.max(1)).unwrap_or(u32::MAX);
    // The need of n VMs grows with n: the last number that fits lies between these two.
    let (mut fit, mut unfit) = (0, most.saturating_add(1));
    while unfit - fit > 1 {
        let middle = fit + (unfit - fit) / 2;
        if fits(middle) { fit = middle } else { unfit = middle }
    }
    (fit, need(fit))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paper's example: given 640 of 1,024 MB, overloaded for 16 % of the time, 96 % of that
    /// for less than a minute (§4.2).
    const WEB: Promise = Promise {
        promised: Bytes::mib(1024),
        given: Bytes::mib(640),
        transient: 0.16 * 0.96,
        sustained: 0.16 * 0.04,
    };
    /// The paper rounds this to 0.97.
    const CERTAINTY: f64 = 0.965;

    #[test]
    fn of_150_vms_3_are_in_sustained_and_31_in_transient_overload_at_most() {
        let need = Need::of(&[WEB; 150], &Together::default(), CERTAINTY);
        assert_eq!((need.sustained.vms, need.transient.vms), (3, 31));
        assert_eq!(need.targets, Bytes::mib(3 * 1024));
        assert_eq!(need.repositories, Bytes::mib(31 * 384));
    }

    #[test]
    fn more_vms_fit_than_if_each_overload_was_migrated() {
        let memory = Bytes::mib(100 * 1000);
        let migrated = Promise { transient: 0.0, sustained: 0.16, ..WEB };
        let ((ours, _), (migration, _)) =
            (most(WEB, memory, CERTAINTY, 1.0), most(migrated, memory, CERTAINTY, 1.0));
        let share = |n: u32| f64::from(n) * 640.0 / 100_000.0;
        let more = share(ours) - share(migration);
        assert!((0.11..0.14).contains(&more), "{ours} and {migration}: {more}");
    }

    fn vm(given: u64) -> VmReport {
        VmReport {
            group: "web".into(),
            promised: Bytes::mib(1024),
            given: Bytes::mib(given),
            severity: model::Severity::None,
            paged: 0,
            rates: Some(model::cluster::OverloadRates { transient: 154, sustained: 6 }),
            immovable: None,
            saved: Bytes::ZERO,
        }
    }

    /// Hosts with `vms` VMs each, and this much memory besides.
    fn pool(beside: &[u64], vms: usize) -> ClusterView {
        let mut view = ClusterView::default();
        for (i, beside) in beside.iter().enumerate() {
            let memory = Bytes::mib(beside + vms as u64 * 640);
            let vms = (0..vms).map(|n| (format!("{i}-{n}").as_str().into(), vm(640)));
            let vms = vms.collect();
            let (receives, lends) = (true, Bytes::mib(100_000));
            let report = HostReport { memory, receives, lends, vms, ..HostReport::default() };
            let name = format!("host-{i}").as_str().into();
            view.hosts.insert(name, model::Reading::new(report, model::Time(0)));
        }
        view
    }

    #[test]
    fn each_share_lies_where_it_fits_and_stays_there() {
        let mut view = pool(&[5_000, 5_000, 7_000], 50);
        let plan = share_out(&view, CERTAINTY, &ExcessPlan::default());
        assert_eq!(plan.need.targets, Bytes::mib(3 * 1024));
        assert_eq!(plan.missing, ExcessSpace::default());
        let sum = |of: fn(&ExcessSpace) -> Bytes| plan.shares.values().map(of).sum::<Bytes>();
        assert_eq!(sum(|share| share.targets), plan.need.targets);
        let pages = sum(|share| share.repositories);
        assert!(plan.need.repositories.minus(pages) < Bytes::mib(1), "{plan:?}");
        for (host, share) in &plan.shares {
            let HostReport { memory, vms, .. } = &view.hosts[host].value;
            let given: Bytes = vms.values().map(|vm| vm.given).sum();
            assert!(share.targets.plus(share.repositories) <= memory.minus(given), "{host}");
            assert_eq!(share.targets.0 % Bytes::mib(1024).0, 0, "a VM lies on one host");
        }
        // Room elsewhere moves no room for a VM.
        for host in view.hosts.values_mut() {
            host.value.memory = host
                .value
                .memory
                .plus(Bytes::mib(if host.value.memory > Bytes::mib(38_000) { 0 } else { 9_000 }));
        }
        let again = share_out(&view, CERTAINTY, &plan);
        let targets = |plan: &ExcessPlan| -> Vec<Bytes> {
            plan.shares.values().map(|share| share.targets).collect()
        };
        assert_eq!(targets(&again), targets(&plan));
    }

    #[test]
    fn memory_that_repositories_keep_is_still_theirs() {
        let mut view = pool(&[9_000, 9_000], 30);
        let plan = share_out(&view, CERTAINTY, &ExcessPlan::default());
        let kept =
            |plan: &ExcessPlan| plan.shares.values().map(|it| it.repositories).sum::<Bytes>();
        assert!(kept(&plan) > Bytes::mib(2_000) && plan.missing == ExcessSpace::default());
        // Hosts report no memory that their repositories keep.
        for (name, host) in &mut view.hosts {
            host.value.memory = host.value.memory.minus(plan.shares[name].repositories);
        }
        let again = share_out(&view, CERTAINTY, &plan);
        assert_eq!((kept(&again), again.missing), (kept(&plan), ExcessSpace::default()));
    }

    #[test]
    fn a_vm_that_moves_in_uses_memory_and_not_the_repositorys_bound() {
        let mut view = pool(&[20_000], 50);
        let host = view.hosts.values_mut().next().unwrap();
        host.value.lends = Bytes::mib(4_000);
        let plan = share_out(&view, CERTAINTY, &ExcessPlan::default());
        assert!(plan.need.targets >= Bytes::mib(1_024));
        assert_eq!(plan.missing.targets, Bytes::ZERO);
        let share = plan.shares.values().next().unwrap();
        assert_eq!(share.repositories, plan.need.repositories.min(Bytes::mib(4_000)));
    }

    #[test]
    fn missing_room_and_unknown_rates_are_told() {
        let plan = share_out(&pool(&[900, 900], 75), CERTAINTY, &ExcessPlan::default());
        assert_eq!(plan.missing.targets, plan.need.targets, "no host has room for a VM");
        assert!(plan.missing.repositories > plan.need.repositories.minus(Bytes::mib(1_801)));
        let mut unknown = pool(&[5_000], 10);
        let host = unknown.hosts.values_mut().next().unwrap();
        host.value.vms.values_mut().for_each(|vm| vm.rates = None);
        let plan = share_out(&unknown, CERTAINTY, &ExcessPlan::default());
        assert!(plan.shares.is_empty() && plan.need == ExcessSpace::default());
        let plan = share_out(&pool(&[5_000], 10), 0.0, &ExcessPlan::default());
        assert!(plan.shares.is_empty(), "nothing is kept with certainty 0");
    }

    #[test]
    fn a_vm_that_has_all_of_its_promise_needs_no_more() {
        let mut view = pool(&[20_000], 20);
        let host = view.hosts.values_mut().next().unwrap();
        host.value.vms.values_mut().for_each(|vm| vm.given = vm.promised);
        let plan = share_out(&view, CERTAINTY, &ExcessPlan::default());
        assert!(plan.shares.is_empty(), "{plan:?}");
    }

    #[test]
    fn independent_events_follow_the_binomial_distribution() {
        let choose =
            |n: u32, k: u32| (0..k).fold(1.0, |all, i| all * f64::from(n - i) / f64::from(i + 1));
        for (n, p) in [(1, 0.5), (10, 0.3), (40, 0.05), (60, 0.9)] {
            for certainty in [0.5, 0.9, 0.99, 0.9999] {
                let found = at_most(std::iter::repeat_n(p, n as usize), certainty);
                let mut sum = 0.0;
                let expected = (0..=n).find(|k| {
                    let rest = i32::try_from(n - k).unwrap_or(0);
                    let own = i32::try_from(*k).unwrap_or(0);
                    sum += choose(n, *k) * p.powi(own) * (1.0 - p).powi(rest);
                    sum >= certainty - 1e-9
                });
                assert_eq!(Some(found), expected, "{n} times {p} at {certainty}");
            }
        }
        assert_eq!(at_most(std::iter::empty(), 0.99), 0);
        assert_eq!(at_most([1.0, 1.0, 0.0].into_iter(), 0.99), 2);
        assert_eq!(at_most([f64::NAN, 7.0, -1.0].into_iter(), 0.99), 1, "nonsense is bounded");
    }

    #[test]
    fn what_was_counted_together_stands_and_shows_what_independence_hides() {
        // Ten VMs, each overloaded for a tenth of the time: all at once, because their clients
        // are.
        let vms = [Promise { transient: 0.1, sustained: 0.0, ..WEB }; 10];
        let mut transient = vec![0; 11];
        (transient[0], transient[10]) = (900, 100);
        let together = Together { transient, sustained: vec![1000] };
        let need = Need::of(&vms, &together, 0.97);
        assert_eq!(need.transient, AtOnce { vms: 10, if_independent: 3 });
        assert_eq!(need.sustained.vms, 0);
    }
}
