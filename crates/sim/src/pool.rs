//! A pool of hosts whose VMs are overloaded now and then. The real policy decides, and one seed
//! fixes the run.
//!
//! A step is an interval of 10 s. Each VM is overloaded at random. The rate of overloads differs
//! from VM to VM; their length follows the paper: 58.9 % last for one interval, 96 % for less than
//! one minute, 96.9 % for less than two, and the rest for some minutes more (Fig. 3 and §4.2, at
//! 640 of 1,024 MB). An overloaded VM pages while it has less memory than promised. Three
//! strategies are compared: both remedies, migration of each overload at once, and no migration.
//!
//! Both remedies take space at other hosts. A VM that is moved takes its memory at the target. A
//! VM that swaps takes as much as it has written, which is half of its paging, up to the memory
//! that it lacks (§5.2). A repository may drop its pages, for the disk has them too. Pages
//! therefore count only while their VM is overloaded, and the space of a moved VM until it gives
//! memory back.
//!
//! The space may be idle, or its hosts may have granted all of it, or they keep the shares that the
//! policy deals out ([`Excess`]). In the last two cases memory beyond the shares is granted to VMs,
//! which give it back within a minute where a share grows.
//!
//! Some hosts misbehave: they fall silent, claim more memory than they have, lose their lease
//! every other minute, or report late. A VM is always on one host, and no host gives its VMs more
//! memory than it has: [`Pool::check`] verifies this after each step.

use std::collections::BTreeMap;

use fastrand::Rng;
use model::cluster::{
    ClusterView, ExcessPlan, HostReport, Intent, Move, MoveRefusal, OverloadRates, VmReport,
};
use model::{Bytes, HostName, Millis, Profile, Reading, Severity, Time, VmName};
use policy::cluster::{self, ClusterMemory};
use policy::overload::Intervals;

mod setting;

pub use setting::{Excess, Outcome, Setting, Strategy, example};

/// Throughput of a migration, in bytes a second: 1 Gbit/s.
const SENT_PER_S: u64 = 125_000_000;
/// Steps from which on an overload is a long one: two minutes.
const LONG_STEPS: u32 = 12;
const STEP_S: u64 = 10;
const PAGE: u64 = 4096;

/// The behaviour of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Well,
    /// It sends no report in five of every ten minutes.
    Silent,
    /// It has a quarter of the memory that it claims.
    Lies,
    /// It loses its lease every other minute.
    Flaps,
    /// Its reports are half a minute old.
    Late,
}

struct PoolHost {
    name: HostName,
    memory: Bytes,
    manner: Manner,
}

struct PoolVm {
    name: VmName,
    host: usize,
    given: Bytes,
    /// Probability that an overload begins in a step.
    begins: f64,
    /// Remaining steps of this overload.
    left: u32,
    calm_for: u32,
    intervals: Intervals,
    profile: Profile,
    paged: u64,
    /// Whether this overload, or the latest one, lasts for two minutes or more.
    is_long: bool,
    /// Memory that it has in repositories.
    swapped: Bytes,
    /// Memory that moves for it have taken at other hosts.
    taken: Bytes,
    /// Memory that these moves set free at the hosts that they left.
    freed: Bytes,
    /// Moves for this overload, or for the latest one.
    moves: u32,
}

struct Underway {
    vm: usize,
    chosen: Move,
    to: usize,
    begun: Time,
    /// The step in which it ends.
    until: u64,
}

/// Hosts and their VMs.
pub struct Pool {
    setting: Setting,
    random: Rng,
    hosts: Vec<PoolHost>,
    vms: Vec<PoolVm>,
    by_name: BTreeMap<VmName, usize>,
    host_by_name: BTreeMap<HostName, usize>,
    given: Vec<Bytes>,
    underway: Vec<Underway>,
    memory: ClusterMemory,
    plan: ExcessPlan,
    /// Memory for arrivals that each host has kept and not used since the last plan.
    targets: Vec<Bytes>,
    step: u64,
    outcome: Outcome,
}

impl Pool {
    /// A pool in which nothing has happened yet.
    #[must_use]
    pub fn new(seed: u64, setting: Setting) -> Self {
        let mut random = Rng::with_seed(seed);
        let manners = [Manner::Silent, Manner::Lies, Manner::Flaps, Manner::Late];
        let hosts: Vec<PoolHost> = (0..setting.hosts)
            .map(|i| {
                let is_bad = random.f64() < setting.misbehaving;
                let manner = if is_bad { manners[random.usize(0..4)] } else { Manner::Well };
                let memory = match manner {
                    // Its VMs fit, and nothing else does.
                    Manner::Lies => Bytes(setting.given.0 * setting.vms_per_host as u64),
                    _ => setting.memory,
                };
                PoolHost { name: format!("host-{i}").into(), memory, manner }
            })
            .collect();
        let mean_steps = 0.589 + 0.371 * 3.5 + 0.009 * 8.5 + 0.031 * 40.0;
        let vms: Vec<PoolVm> = (0..setting.hosts * setting.vms_per_host)
            .map(|i| {
                let share = setting.overloaded * random.f64() * 2.0;
                PoolVm {
                    name: format!("vm-{i}").into(),
                    host: i / setting.vms_per_host,
                    given: setting.given,
                    begins: share / (1.0 - share) / mean_steps,
                    left: 0,
                    calm_for: 0,
                    intervals: Intervals::default(),
                    profile: Profile::default(),
                    paged: 0,
                    is_long: false,
                    swapped: Bytes::ZERO,
                    taken: Bytes::ZERO,
                    freed: Bytes::ZERO,
                    moves: 0,
                }
            })
            .collect();
        // With `Migrate`, hosts and VMs do not rest between moves.
        let memory = match setting.strategy {
            Strategy::Migrate => ClusterMemory::resting(Millis(0)),
            Strategy::Both | Strategy::Swap => ClusterMemory::default(),
        };
        let given = vec![Bytes(setting.given.0 * setting.vms_per_host as u64); setting.hosts];
        let by_name = vms.iter().enumerate().map(|(i, vm)| (vm.name.clone(), i)).collect();
        let host_by_name = hosts.iter().enumerate().map(|(i, h)| (h.name.clone(), i)).collect();
        Self {
            setting,
            random,
            hosts,
            vms,
            by_name,
            host_by_name,
            given,
            underway: Vec::new(),
            memory,
            plan: ExcessPlan::default(),
            targets: vec![Bytes::ZERO; setting.hosts],
            step: 0,
            outcome: Outcome::default(),
        }
    }

    /// Simulates `hours` hours.
    pub fn run(&mut self, hours: u64) -> Outcome {
        for _ in 0..hours * 3600 / STEP_S {
            self.step();
        }
        self.outcome
    }

    /// Forgets the outcome so far: it was of a pool that had measured nothing yet.
    pub fn warmed_up(&mut self) {
        self.outcome = Outcome::default();
    }

    /// Ends all overloads, and lets none begin.
    pub fn calm_down(&mut self) {
        for vm in &mut self.vms {
            (vm.begins, vm.left) = (0.0, 0);
        }
    }

    /// Memory that remedies take at other hosts now.
    #[must_use]
    pub fn lent(&self) -> Bytes {
        let usual = self.setting.given;
        self.vms.iter().map(|vm| vm.swapped.plus(vm.given.minus(usual))).sum()
    }

    /// Simulates one interval.
    pub fn step(&mut self) {
        self.step += 1;
        self.outcome.intervals += 1;
        self.load();
        self.share_out();
        self.arrive();
        self.bear();
        let is_due = match self.setting.strategy {
            Strategy::Swap => false,
            Strategy::Both | Strategy::Migrate => self.wants().next().is_some(),
        };
        if is_due {
            let now = self.now();
            let view = self.reported();
            let plan = cluster::decide(&view, &mut self.memory, now);
            let is_without =
                |refusal: &MoveRefusal| matches!(refusal, MoveRefusal::NoTarget { .. });
            self.outcome.without_target += u64::from(plan.refusals.values().any(is_without));
            for (name, chosen) in plan.moves {
                self.begin(&name, chosen);
            }
        }
    }

    /// Each minute, hosts learn their shares of the space for remedies.
    fn share_out(&mut self) {
        let Excess::Kept(certainty) = self.setting.excess else { return };
        if !self.step.is_multiple_of(60 / STEP_S) {
            return;
        }
        let view = self.view(|host| {
            let share = self.plan.shares.get(&host.name).copied().unwrap_or_default();
            host.memory.minus(share.repositories)
        });
        self.plan = policy::excess::share_out(&view, certainty, &self.plan);
        for (host, targets) in self.hosts.iter().zip(&mut self.targets) {
            *targets = self.plan.shares.get(&host.name).map_or(Bytes::ZERO, |share| share.targets);
        }
    }

    fn now(&self) -> Time {
        Time(self.step * STEP_S * 1000)
    }

    /// The severity of this VM's overload under the strategy.
    fn severity(&self, vm: &PoolVm) -> Severity {
        match (self.setting.strategy, vm.intervals.severity()) {
            // Each VM that pages is to be moved.
            (Strategy::Migrate, Severity::Transient) => Severity::Sustained,
            (_, severity) => severity,
        }
    }

    fn wants(&self) -> impl Iterator<Item = &PoolVm> {
        self.vms.iter().filter(|vm| self.severity(vm) == Severity::Sustained)
    }

    /// Overloads begin and end. A VM that has been calm gives back the memory that it got for
    /// them.
    fn load(&mut self) {
        let Setting { promised, given: usual, overload, learns, pages_per_s, calm_s, .. } =
            self.setting;
        for vm in &mut self.vms {
            vm.left = match vm.left {
                0 if self.random.f64() < vm.begins => {
                    let steps = length(&mut self.random);
                    vm.is_long = steps >= LONG_STEPS;
                    vm.moves = 0;
                    let lacks = vm.given < promised;
                    self.outcome.overloads += u64::from(lacks);
                    self.outcome.long_ones += u64::from(lacks && vm.is_long);
                    steps
                }
                left => left.saturating_sub(1),
            };
            let is_high = vm.left > 0;
            vm.calm_for = if is_high { 0 } else { vm.calm_for + 1 };
            let is_calm = u64::from(vm.calm_for) * STEP_S >= calm_s;
            if is_calm && vm.given > usual {
                let back = vm.given.minus(usual);
                self.given[vm.host] = self.given[vm.host].minus(back);
                vm.given = usual;
            }
            if is_calm {
                (vm.taken, vm.freed) = (Bytes::ZERO, Bytes::ZERO);
            }
            let is_short = vm.given < promised;
            let is_overloaded = is_high && is_short;
            vm.intervals.push(is_short.then_some(is_high), &overload, &mut vm.profile);
            if !learns {
                vm.profile = Profile::default();
            }
            vm.paged = match vm.intervals.severity() {
                Severity::None => 0,
                _ => vm.paged + if is_overloaded { pages_per_s * STEP_S } else { 0 },
            };
        }
    }

    /// Paging goes to other hosts' memory while that has room, else to disks.
    fn bear(&mut self) {
        let Setting { promised, strategy, pages_per_s, .. } = self.setting;
        let all: Bytes = self.hosts.iter().map(|host| host.memory).sum();
        let used: Bytes = self.given.iter().copied().sum();
        let mut room = match self.setting.excess {
            Excess::Idle => all.minus(used),
            Excess::Granted => Bytes::ZERO,
            Excess::Kept(_) => self.plan.shares.values().map(|share| share.repositories).sum(),
        };
        let mut is_without = false;
        let paged = Bytes(pages_per_s * STEP_S * PAGE);
        let (mut swapped, mut taken, mut freed) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        let outcome = &mut self.outcome;
        for vm in &mut self.vms {
            (taken, freed) = (taken.plus(vm.taken), freed.plus(vm.freed));
            if vm.left == 0 || vm.given == promised {
                vm.swapped = Bytes::ZERO;
                continue;
            }
            outcome.overloaded_s += STEP_S;
            outcome.long_wait_s += if vm.is_long { STEP_S } else { 0 };
            let lacks = promised.minus(vm.given);
            if strategy == Strategy::Migrate || room < lacks {
                outcome.disk_s += STEP_S;
                is_without = true;
                vm.swapped = Bytes::ZERO;
                continue;
            }
            room = room.minus(lacks);
            vm.swapped = vm.swapped.plus(Bytes(paged.0 / 2)).min(lacks);
            swapped = swapped.plus(vm.swapped);
            let seconds = match vm.intervals.severity() {
                Severity::Sustained => &mut outcome.long_s,
                _ => &mut outcome.short_s,
            };
            *seconds += STEP_S;
            outcome.traffic = outcome.traffic.plus(paged);
        }
        outcome.without_pages += u64::from(is_without);
        outcome.most_swapped = outcome.most_swapped.max(swapped);
        let excess = swapped.plus(taken);
        outcome.excess_most = outcome.excess_most.max(excess);
        outcome.excess_byte_s += excess.0 * STEP_S;
        outcome.net_byte_s += excess.minus(freed).0 * STEP_S;
    }

    /// The view of a controller. Memory that was granted is no room.
    fn reported(&self) -> ClusterView {
        if self.setting.excess == Excess::Idle {
            return self.view(|host| host.memory);
        }
        let room = |host: &PoolHost| {
            let i = self.host_by_name[&host.name];
            self.given[i].plus(self.targets[i])
        };
        ClusterView { excess: self.plan.clone(), ..self.view(room) }
    }

    /// The same for hosts with this much memory.
    fn view(&self, memory: impl Fn(&PoolHost) -> Bytes) -> ClusterView {
        let now = self.now();
        let mut view = ClusterView::default();
        for host in &self.hosts {
            let minute = self.step * STEP_S / 60;
            let at = match host.manner {
                Manner::Silent if minute % 10 < 5 => continue,
                Manner::Flaps if minute.is_multiple_of(2) => continue,
                Manner::Late => Time(now.0.saturating_sub(30_000)),
                _ => now,
            };
            let claims = match host.manner {
                Manner::Lies => Bytes(memory(host).0 * 4),
                _ => memory(host),
            };
            let report = HostReport {
                memory: claims,
                receives: true,
                lends: claims,
                ..HostReport::default()
            };
            view.hosts.insert(host.name.clone(), Reading::new(report, at));
        }
        for vm in &self.vms {
            let Some(host) = view.hosts.get_mut(&self.hosts[vm.host].name) else { continue };
            let report = VmReport {
                group: "pool".into(),
                promised: self.setting.promised,
                given: vm.given,
                severity: self.severity(vm),
                // With `Migrate`, no move is too expensive.
                paged: if self.setting.strategy == Strategy::Migrate { u64::MAX } else { vm.paged },
                rates: OverloadRates::of(&vm.profile, STEP_S),
                immovable: None,
                saved: Bytes::ZERO,
            };
            host.value.vms.insert(vm.name.clone(), report);
        }
        for underway in &self.underway {
            let Move { from, to, .. } = underway.chosen.clone();
            let intent =
                Intent { generation: 1, from, to, group: "pool".into(), is_withdrawn: false };
            let name = self.vms[underway.vm].name.clone();
            view.intents.insert(name, Reading::new(intent, underway.begun));
        }
        view
    }

    fn begin(&mut self, name: &VmName, chosen: Move) {
        let (vm, to) = (self.by_name[name], self.host_by_name[&chosen.to]);
        let now = self.now();
        let keeps = match self.setting.excess {
            Excess::Idle => true,
            Excess::Granted => false,
            Excess::Kept(_) => self.targets[to] >= self.needs(vm, &chosen),
        };
        if !keeps || !self.has_room(vm, to, &chosen) {
            self.outcome.failed += 1;
            self.memory.refused(&chosen.to, now);
            return;
        }
        let seconds = chosen.cost.0.div_ceil(SENT_PER_S);
        let until = self.step + seconds.div_ceil(STEP_S).max(1);
        self.outcome.traffic = self.outcome.traffic.plus(chosen.cost);
        let needs = self.needs(vm, &chosen);
        self.targets[to] = self.targets[to].minus(needs);
        let relieved = &mut self.vms[self.by_name[&chosen.for_whom]];
        self.outcome.second_moves += u64::from(relieved.moves > 0);
        relieved.moves += 1;
        // The target reserves room for it from now on.
        relieved.taken = relieved.taken.plus(needs);
        self.underway.push(Underway { vm, chosen, to, begun: now, until });
    }

    /// Memory that a moved VM is given at the target.
    fn needs(&self, vm: usize, chosen: &Move) -> Bytes {
        let is_own = self.vms[vm].name == chosen.for_whom;
        if is_own { self.setting.promised } else { self.vms[vm].given }
    }

    fn has_room(&self, vm: usize, to: usize, chosen: &Move) -> bool {
        self.given[to].plus(self.needs(vm, chosen)) <= self.hosts[to].memory
    }

    /// Migrations end. A target that is full by then refuses the VM.
    fn arrive(&mut self) {
        let (promised, now) = (self.setting.promised, self.now());
        let (done, underway): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.underway).into_iter().partition(|u| u.until <= self.step);
        self.underway = underway;
        for Underway { vm: moved, chosen, to, .. } in done {
            let for_whom = self.by_name[&chosen.for_whom];
            let is_own = for_whom == moved;
            let needs = self.needs(moved, &chosen);
            if !self.has_room(moved, to, &chosen) {
                self.outcome.failed += 1;
                self.memory.refused(&chosen.to, now);
                let relieved = &mut self.vms[for_whom];
                relieved.taken = relieved.taken.minus(needs);
                continue;
            }
            self.memory.accepted(&chosen.to);
            let from = self.vms[moved].host;
            let mut freed = self.vms[moved].given;
            self.given[from] = self.given[from].minus(self.vms[moved].given);
            self.given[to] = self.given[to].plus(needs);
            let vm = &mut self.vms[moved];
            (vm.host, vm.given) = (to, needs);
            self.outcome.moves += 1;
            let relieved = &mut self.vms[for_whom];
            if !is_own && relieved.host == from {
                let more = promised.minus(relieved.given);
                if self.given[from].plus(more) <= self.hosts[from].memory {
                    relieved.given = promised;
                    self.given[from] = self.given[from].plus(more);
                    freed = freed.minus(more);
                }
            }
            // The VM's memory may have changed, so its history no longer applies.
            let relieved = &mut self.vms[for_whom];
            self.outcome.needless += u64::from(!relieved.is_long);
            relieved.freed = relieved.freed.plus(freed);
            (relieved.profile, relieved.intervals) = (Profile::default(), Intervals::default());
        }
    }

    /// Checks that no host gives more memory than it has, and that the pool's books agree with the
    /// VMs.
    ///
    /// # Errors
    ///
    /// When a VM or a host violates this, with a description.
    pub fn check(&self) -> Result<(), String> {
        let mut given = vec![Bytes::ZERO; self.hosts.len()];
        for vm in &self.vms {
            given[vm.host] = given[vm.host].plus(vm.given);
            if vm.given < self.setting.given || vm.given > self.setting.promised {
                return Err(format!("{} is given {}", vm.name, vm.given));
            }
        }
        for (i, host) in self.hosts.iter().enumerate() {
            if given[i] != self.given[i] || given[i] > host.memory {
                let (has, books) = (host.memory, self.given[i]);
                return Err(format!(
                    "{} gives {} of {has}, and books {books}",
                    host.name, given[i]
                ));
            }
        }
        Ok(())
    }
}

/// Length of an overload in steps (Fig. 3b and §4.2, at 640 MB).
fn length(random: &mut Rng) -> u32 {
    match random.f64() {
        ..0.589 => 1,
        ..0.96 => random.u32(2..=5),
        ..0.969 => random.u32(6..LONG_STEPS),
        _ => random.u32(LONG_STEPS..=68),
    }
}

#[cfg(test)]
mod tests;
