//! The VM to move from a host in sustained overload, and its target (Williams 2011 §4, §4.1).
//!
//! **Problem.** A sustained overload ends only when the VM has more memory, and its host has
//! none. A move sends all of the VM's memory once; a move of the wrong VM, or to the wrong host,
//! causes another overload. **Rule.** For a VM in sustained overload one VM leaves its host: the
//! VM itself, or one that has the missing memory; of these, the one with the least memory to
//! send. The target is the host with most room, if that is enough. Room is memory not given to
//! its VMs. A host with an overloaded VM is a target only within the room that it keeps for
//! this ([`crate::excess`]). A host to which a VM is already on its way is no target.
//!
//! Nothing is moved until the overload has paged as much as the move will send. Until then it may
//! end at any moment, and the total cost stays within twice the minimum. One VM at a time leaves
//! a host, and one comes to it. A move changes the load: for a while no other VM is moved for the
//! same VM or host, so a VM does not go to and fro. A host that refuses a VM although it reported
//! room is not asked again for a while, longer each time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use model::cluster::{ClusterPlan, ClusterView, HostReport, Intent, Move, MoveRefusal, VmReport};
use model::{Bytes, HostName, Millis, Reading, Severity, Time, VmName};
use serde::{Deserialize, Serialize};

use crate::memory::doubled;

/// An older report is ignored.
const STALE_AFTER: Millis = Millis::secs(30);
/// Default time after a move for which the source host loses no other VM and the same VM stays:
/// three times the shortest sustained overload, 8 intervals of 10 s.
const REST: Millis = model::spec::PoolSpec::REST;
/// Time for which a host that lacked the reported room receives nothing; twice as long each time
/// …
const DISTRUST: Millis = Millis::secs(600);
/// … up to a day.
const LONGEST_DISTRUST: Millis = Millis::secs(24 * 3600);
/// An older intent is withdrawn, unless the VM has left.
const INTENT_LIMIT: Millis = Millis::secs(600);
/// An intent with a host that is missing for longer is withdrawn.
const MISSING_LIMIT: Millis = Millis::secs(20);

const PAGE: u64 = 4096;

/// State from one decision to the next. Its loss is harmless: a new controller moves nothing
/// until it has observed for the time of a rest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterMemory {
    /// The rest of hosts and VMs after a move.
    rest: Millis,
    began: Option<Time>,
    /// Time of the last departure from each host.
    left: BTreeMap<HostName, Time>,
    /// Time of each VM's last move.
    moved: BTreeMap<VmName, Time>,
    /// Hosts that refused a VM although they reported room: the number of refusals, and the time
    /// until which the host receives nothing.
    distrusted: BTreeMap<HostName, (u32, Time)>,
    /// Missing hosts of intents, each with the time since when.
    missing: BTreeMap<HostName, Time>,
}

impl Default for ClusterMemory {
    fn default() -> Self {
        Self::resting(REST)
    }
}

impl ClusterMemory {
    /// Memory for a pool whose hosts and VMs rest for this time after a move.
    #[must_use]
    pub const fn resting(rest: Millis) -> Self {
        Self {
            rest,
            began: None,
            left: BTreeMap::new(),
            moved: BTreeMap::new(),
            distrusted: BTreeMap::new(),
            missing: BTreeMap::new(),
        }
    }

    /// Notes that a host refused a VM although it had reported room.
    pub fn refused(&mut self, host: &HostName, now: Time) {
        let (times, until) = self.distrusted.entry(host.clone()).or_insert((0, now));
        *times += 1;
        *until = now.after(doubled(DISTRUST, *times, LONGEST_DISTRUST));
    }

    /// Notes that a host has received a VM.
    pub fn accepted(&mut self, host: &HostName) {
        self.distrusted.remove(host);
    }

    /// Whether a host that this intent needs has been missing for too long.
    fn is_missing(&mut self, view: &ClusterView, intent: &Intent, now: Time) -> bool {
        [&intent.from, &intent.to].into_iter().any(|host| {
            let is_here = view.hosts.contains_key(host);
            !is_here && now.since(*self.missing.entry(host.clone()).or_insert(now)) > MISSING_LIMIT
        })
    }

    fn is_distrusted(&self, host: &HostName, now: Time) -> bool {
        self.distrusted.get(host).is_some_and(|(_, until)| now < *until)
    }
}

/// Possible target hosts by their room.
struct Rooms<'a> {
    by_host: BTreeMap<&'a HostName, Bytes>,
    ordered: BTreeSet<(Bytes, &'a HostName)>,
}

impl<'a> Rooms<'a> {
    fn of(view: &'a ClusterView, memory: &ClusterMemory, now: Time) -> Self {
        let taken: BTreeSet<&HostName> =
            view.intents.values().map(|intent| &intent.value.to).collect();
        let is_calm =
            |report: &HostReport| report.vms.values().all(|vm| vm.severity == Severity::None);
        let kept = |host: &HostName| {
            view.excess.shares.get(host).map_or(Bytes::ZERO, |share| share.targets)
        };
        let open = view.hosts.iter().filter(|(host, report)| {
            let is_known = report.age(now) <= STALE_AFTER && !memory.is_distrusted(host, now);
            is_known && report.value.receives && !taken.contains(host)
        });
        let by_host: BTreeMap<&HostName, Bytes> = open
            .map(|(host, report)| {
                let given = report.value.vms.values().map(|vm| vm.given).sum();
                let room = report.value.memory.minus(given);
                if is_calm(&report.value) { (host, room) } else { (host, room.min(kept(host))) }
            })
            .collect();
        let ordered = by_host.iter().map(|(host, room)| (*room, *host)).collect();
        Self { by_host, ordered }
    }

    /// The host with most room, if that is enough.
    fn best(&self, needed: Bytes, from: &HostName) -> Option<(&'a HostName, Bytes)> {
        let best = self.ordered.iter().rev().find(|(_, host)| *host != from);
        best.filter(|(room, _)| *room >= needed).map(|(room, host)| (*host, *room))
    }

    fn close(&mut self, host: &HostName) {
        if let Some((host, room)) = self.by_host.remove_entry(host) {
            self.ordered.remove(&(room, host));
        }
    }
}

/// Decides the moves.
#[must_use]
pub fn decide(view: &ClusterView, memory: &mut ClusterMemory, now: Time) -> ClusterPlan {
    let began = *memory.began.get_or_insert(now);
    let mut plan = ClusterPlan { at: now, ..ClusterPlan::default() };
    let mut leaving: BTreeMap<&HostName, &VmName> = BTreeMap::new();
    for (vm, intent) in &view.intents {
        leaving.insert(&intent.value.from, vm);
        memory.left.insert(intent.value.from.clone(), now);
        memory.moved.insert(vm.clone(), now);
        let is_stuck = memory.is_missing(view, &intent.value, now);
        if !intent.value.is_withdrawn && (intent.age(now) > INTENT_LIMIT || is_stuck) {
            plan.withdrawn.push(vm.clone());
        }
    }
    memory.missing.retain(|host, _| !view.hosts.contains_key(host));
    let claimed = claimed_twice(view);
    let rest = memory.rest;
    memory.left.retain(|_, at| now.since(*at) <= rest);
    memory.moved.retain(|_, at| now.since(*at) <= rest);
    let mut rooms = Rooms::of(view, memory, now);
    for (host, vm, report) in overloaded(view, now) {
        let chosen = if let Some(other) =
            claimed.get(vm).and_then(|by| by.iter().find(|by| *by != host))
        {
            Err(MoveRefusal::Claimed { other: other.clone() })
        } else if let Some(other) = leaving.get(host) {
            Err(MoveRefusal::Leaving { vm: (*other).clone() })
        } else {
            choose((host, vm, report), &rooms, memory, (began, now), &|vm| claimed.contains_key(vm))
        };
        match chosen {
            Ok((name, chosen)) => {
                rooms.close(&chosen.to);
                // A host that is being relieved receives no VM.
                rooms.close(&chosen.from);
                leaving.insert(host, name);
                memory.left.insert(host.clone(), now);
                memory.moved.insert(name.clone(), now);
                plan.moves.insert(name.clone(), chosen);
            }
            Err(refusal) => {
                plan.refusals.insert(vm.clone(), refusal);
            }
        }
    }
    plan
}

/// VMs that more than one host claims, with those hosts, except VMs with an intent. A host that
/// claims another host's VM must not have it moved.
fn claimed_twice(view: &ClusterView) -> BTreeMap<VmName, Vec<HostName>> {
    let mut by: BTreeMap<&VmName, Vec<HostName>> = BTreeMap::new();
    for (host, report) in &view.hosts {
        for vm in report.value.vms.keys().filter(|vm| !view.intents.contains_key(*vm)) {
            by.entry(vm).or_default().push(host.clone());
        }
    }
    let twice = by.into_iter().filter(|(_, hosts)| hosts.len() > 1);
    twice.map(|(vm, hosts)| (vm.clone(), hosts)).collect()
}

/// VMs in sustained overload, those that page most first.
fn overloaded(view: &ClusterView, now: Time) -> Vec<(&HostName, &VmName, &Reading<HostReport>)> {
    let known = view.hosts.iter().filter(|(_, report)| report.age(now) <= STALE_AFTER);
    let mut found: Vec<_> = known
        .flat_map(|(host, report)| {
            let vms = report.value.vms.iter();
            let vms = vms.filter(|(_, vm)| vm.severity == Severity::Sustained);
            vms.map(move |(name, vm)| (Reverse(vm.paged), host, name, report))
        })
        .collect();
    found.sort_by_key(|(paged, host, name, _)| (*paged, *host, *name));
    found.into_iter().map(|(_, host, name, report)| (host, name, report)).collect()
}

/// Chooses the VM that leaves `host` for the sake of `vm`, and its target.
fn choose<'a>(
    (host, vm, report): (&HostName, &'a VmName, &'a Reading<HostReport>),
    rooms: &Rooms<'_>,
    memory: &ClusterMemory,
    (began, now): (Time, Time),
    is_claimed: &dyn Fn(&VmName) -> bool,
) -> Result<(&'a VmName, Move), MoveRefusal> {
    let latest = memory.left.get(host).max(memory.moved.get(vm)).copied();
    let ago = now.since(latest.unwrap_or(began));
    if ago < memory.rest {
        return Err(MoveRefusal::TooSoon { ago_s: ago.0 / 1000 });
    }
    let own = &report.value.vms[vm];
    let lacks = own.promised.minus(own.given);
    // The overloaded VM gets all its promised memory on the target; a VM that makes room for it
    // keeps its current memory.
    let mut ways: Vec<(&VmName, &VmReport, Bytes)> = report
        .value
        .vms
        .iter()
        .filter(|(name, other)| {
            let makes_room = other.severity == Severity::None && other.given >= lacks;
            let has_rested = !memory.moved.contains_key(*name);
            let is_free = other.immovable.is_none() && !is_claimed(name);
            is_free && has_rested && (*name == vm || makes_room)
        })
        .map(|(name, other)| (name, other, if name == vm { other.promised } else { other.given }))
        .collect();
    ways.sort_by_key(|(name, other, _)| (other.given, *name));
    let Some((_, cheapest, needed)) = ways.first().copied() else {
        let why = own.immovable.clone().unwrap_or_else(|| "it has just been moved".to_owned());
        return Err(MoveRefusal::Immovable { why });
    };
    let paged = Bytes(own.paged.saturating_mul(PAGE));
    if paged < cheapest.given {
        return Err(MoveRefusal::NotWorth { paged, cost: cheapest.given });
    }
    let with_target = ways.iter().find_map(|(name, other, needed)| {
        let (to, room) = rooms.best(*needed, host)?;
        let (from, for_whom, to) = (host.clone(), vm.clone(), to.clone());
        Some((*name, Move { from, to, for_whom, room, cost: other.given }))
    });
    let (name, chosen) = with_target.ok_or(MoveRefusal::NoTarget { needed })?;
    if paged < chosen.cost {
        return Err(MoveRefusal::NotWorth { paged, cost: chosen.cost });
    }
    Ok((name, chosen))
}

#[cfg(test)]
mod tests {
    use model::cluster::ExcessSpace;

    use super::*;

    const NOW: Time = Time(10_000_000);

    fn vm(promised: u64, given: u64, severity: Severity) -> VmReport {
        let (promised, given) = (Bytes::mib(promised), Bytes::mib(given));
        let (group, paged, rates) = ("web".into(), 1 << 20, None);
        let (immovable, saved) = (None, Bytes::ZERO);
        VmReport { group, promised, given, severity, paged, rates, immovable, saved }
    }

    fn host(memory: u64, vms: &[(&str, VmReport)]) -> Reading<HostReport> {
        let vms = vms.iter().map(|(name, vm)| ((*name).into(), vm.clone())).collect();
        let memory = Bytes::mib(memory);
        let report = HostReport { memory, receives: true, vms, ..HostReport::default() };
        Reading::new(report, NOW)
    }

    fn pool(hosts: &[(&str, Reading<HostReport>)]) -> ClusterView {
        let hosts = hosts.iter().map(|(name, host)| ((*name).into(), host.clone())).collect();
        ClusterView { hosts, ..ClusterView::default() }
    }

    /// A controller that has observed for long enough.
    fn rested() -> ClusterMemory {
        ClusterMemory { began: Some(Time(0)), ..ClusterMemory::default() }
    }

    use Severity::{None as Calm, Sustained, Transient};

    #[test]
    fn the_one_that_has_least_to_send_goes_where_most_room_is() {
        let a = host(
            2000,
            &[
                ("hot", vm(1024, 640, Sustained)),
                ("small", vm(512, 256, Calm)),
                ("fits", vm(512, 400, Calm)),
                ("large", vm(700, 700, Calm)),
            ],
        );
        let view = pool(&[("a", a), ("b", host(600, &[])), ("c", host(2000, &[]))]);
        let plan = decide(&view, &mut rested(), NOW);
        let found = &plan.moves[&"fits".into()];
        // 384 MiB are missing, and `small` does not have that much.
        assert_eq!((found.to.as_str(), found.for_whom.as_str()), ("c", "hot"));
        assert_eq!((plan.moves.len(), plan.refusals.len()), (1, 0));
    }

    #[test]
    fn nothing_goes_where_it_would_not_fit_or_where_others_suffer() {
        let a = || host(1024, &[("hot", vm(1024, 640, Sustained))]);
        let full = host(2000, &[("x", vm(1000, 1000, Calm))]);
        let suffers = host(9000, &[("x", vm(1000, 500, Transient))]);
        let view = pool(&[("a", a()), ("b", full), ("c", suffers)]);
        let plan = decide(&view, &mut rested(), NOW);
        let needed = Bytes::mib(1024);
        assert_eq!(plan.refusals[&"hot".into()], MoveRefusal::NoTarget { needed });
        let old = Reading { at: Time(0), ..host(9000, &[]) };
        let plan = decide(&pool(&[("a", a()), ("b", old)]), &mut rested(), NOW);
        assert!(plan.moves.is_empty(), "of a host that says nothing nothing is known");
    }

    #[test]
    fn kept_room_is_there_beside_an_overload() {
        let a = host(1024, &[("hot", vm(1024, 640, Sustained))]);
        let busy = host(9000, &[("x", vm(1000, 500, Transient))]);
        let mut view = pool(&[("a", a), ("b", busy)]);
        let mut keep = |mib| {
            let share = ExcessSpace { targets: Bytes::mib(mib), ..ExcessSpace::default() };
            view.excess.shares.insert("b".into(), share);
            decide(&view, &mut rested(), NOW).moves.len()
        };
        assert_eq!((keep(1000), keep(1024)), (0, 1));
    }

    #[test]
    fn one_leaves_a_host_and_one_comes_to_it_at_a_time() {
        let hot = |name| (name, vm(1024, 640, Sustained));
        let both = host(1280, &[hot("hot-1"), hot("hot-2")]);
        let other = host(640, &[hot("hot-3")]);
        let view = pool(&[("a", both), ("b", other), ("c", host(9000, &[]))]);
        let plan = decide(&view, &mut rested(), NOW);
        assert_eq!(plan.moves.len(), 1, "{plan:#?}");
        let refusal = &plan.refusals[&"hot-2".into()];
        assert_eq!(*refusal, MoveRefusal::Leaving { vm: "hot-1".into() });
        assert!(matches!(plan.refusals[&"hot-3".into()], MoveRefusal::NoTarget { .. }));
    }

    #[test]
    fn what_was_moved_rests_and_so_does_its_host() {
        let a = host(1280, &[("hot", vm(1024, 640, Sustained)), ("x", vm(500, 500, Calm))]);
        let mut view = pool(&[("a", a), ("b", host(9000, &[]))]);
        let mut memory = rested();
        let first = decide(&view, &mut memory, NOW);
        assert_eq!(first.moves.len(), 1);
        let again = |memory: &mut ClusterMemory, view: &mut ClusterView, after: Millis| {
            let now = NOW.after(after);
            view.hosts.values_mut().for_each(|report| report.at = now);
            decide(view, memory, now)
        };
        let soon = again(&mut memory, &mut view, Millis::secs(30));
        assert_eq!(soon.refusals[&"hot".into()], MoveRefusal::TooSoon { ago_s: 30 });
        assert_eq!(again(&mut memory, &mut view, Millis(REST.0 - 1)).moves.len(), 0);
        assert_eq!(again(&mut memory, &mut view, Millis(REST.0 + 1)).moves.len(), 1);
        // A new controller knows of no moves, and waits.
        let fresh = decide(&view, &mut ClusterMemory::default(), NOW);
        assert!(fresh.moves.is_empty());
    }

    #[test]
    fn nothing_is_moved_for_less_than_it_costs() {
        let hot = VmReport { paged: 1000, ..vm(1024, 640, Sustained) };
        let view = pool(&[("a", host(640, &[("hot", hot)])), ("b", host(9000, &[]))]);
        let plan = decide(&view, &mut rested(), NOW);
        let refusal = MoveRefusal::NotWorth { paged: Bytes(1000 * PAGE), cost: Bytes::mib(640) };
        assert_eq!(plan.refusals[&"hot".into()], refusal);
    }

    #[test]
    fn a_host_that_has_not_what_it_says_is_asked_less_and_less() {
        let a = host(640, &[("hot", vm(1024, 640, Sustained))]);
        let view = pool(&[("a", a), ("b", host(2000, &[])), ("liar", host(9000, &[]))]);
        let mut memory = rested();
        let to = |memory: &ClusterMemory, now: Time| {
            let mut view = view.clone();
            view.hosts.values_mut().for_each(|report| report.at = now);
            let plan = decide(&view, &mut memory.clone(), now);
            plan.moves[&"hot".into()].to.to_string()
        };
        assert_eq!(to(&memory, NOW), "liar");
        memory.refused(&"liar".into(), NOW);
        assert_eq!(to(&memory, NOW), "b");
        let later = NOW.after(DISTRUST);
        assert_eq!(to(&memory, later), "liar", "it may have learned");
        memory.refused(&"liar".into(), later);
        assert_eq!(to(&memory, later.after(DISTRUST)), "b", "twice as long");
        memory.accepted(&"liar".into());
        assert_eq!(to(&memory, later), "liar");
    }

    #[test]
    fn who_cannot_be_moved_is_told_why() {
        let stuck = VmReport { immovable: Some("VFIO".to_owned()), ..vm(1024, 640, Sustained) };
        let view = pool(&[("a", host(640, &[("hot", stuck)])), ("b", host(9000, &[]))]);
        let plan = decide(&view, &mut rested(), NOW);
        let why = "VFIO".to_owned();
        assert_eq!(plan.refusals[&"hot".into()], MoveRefusal::Immovable { why });
    }

    #[test]
    fn what_takes_too_long_is_withdrawn_once() {
        let mut view = pool(&[]);
        let intent = |is_withdrawn| Intent {
            generation: 1,
            from: "a".into(),
            to: "b".into(),
            group: "web".into(),
            is_withdrawn,
        };
        let begun = Time(NOW.0 - INTENT_LIMIT.0 - 1);
        view.intents.insert("slow".into(), Reading::new(intent(false), begun));
        view.intents.insert("told".into(), Reading::new(intent(true), begun));
        view.intents.insert("new".into(), Reading::new(intent(false), NOW));
        view.hosts.insert("a".into(), host(1024, &[]));
        view.hosts.insert("b".into(), host(1024, &[]));
        let plan = decide(&view, &mut rested(), NOW);
        assert_eq!(plan.withdrawn, [VmName::from("slow")]);
    }

    #[test]
    fn nobody_moves_what_another_host_says_is_its_own() {
        let hot = || vm(1024, 640, Sustained);
        let a = host(1280, &[("x", hot())]);
        let b = host(1280, &[("x", vm(1024, 1024, Calm))]);
        let view = pool(&[("a", a), ("b", b), ("c", host(9000, &[]))]);
        let plan = decide(&view, &mut rested(), NOW);
        assert!(plan.moves.is_empty());
        assert_eq!(plan.refusals[&"x".into()], MoveRefusal::Claimed { other: "b".into() });
    }

    #[test]
    fn an_intent_whose_host_is_missing_is_withdrawn() {
        let mut view = pool(&[("a", host(1024, &[]))]);
        let (from, to) = ("a".into(), "b".into());
        let intent = Intent { generation: 1, from, to, group: "web".into(), is_withdrawn: false };
        view.intents.insert("x".into(), Reading::new(intent, NOW));
        let mut memory = rested();
        assert!(decide(&view, &mut memory, NOW).withdrawn.is_empty());
        let later = NOW.after(Millis(MISSING_LIMIT.0 + 1));
        let mut back = view.clone();
        back.hosts.insert("b".into(), host(1024, &[]));
        assert!(decide(&back, &mut memory.clone(), later).withdrawn.is_empty());
        assert_eq!(decide(&view, &mut memory, later).withdrawn, [VmName::from("x")]);
    }
}
