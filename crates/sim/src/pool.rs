//! A pool of hosts whose VMs are overloaded now and then, decided by the real policy from one seed.
//!
//! A step is an interval of 10 s. Each VM is overloaded at random: how often differs, how long
//! follows the paper's Fig. 3 (58.9 % for one interval, 96.9 % for less than two minutes, the rest
//! for some minutes more). While it has less than it was promised it pages. What becomes of that is
//! told for three strategies: both remedies, each overload migrated at once, and none ever.
//!
//! Some hosts misbehave: they fall silent, claim memory that they have not, lose their lease every
//! other minute, or report late. A VM is always on one host, and no host holds more than it has:
//! [`Pool::check`] says so after each step.

use std::collections::BTreeMap;

use fastrand::Rng;
use model::cluster::{ClusterView, HostReport, Intent, Move, VmReport};
use model::{Bytes, HostName, OverloadSpec, Profile, Reading, Severity, Time, VmName};
use policy::cluster::{self, ClusterMemory};
use policy::overload::Intervals;

/// What overloaded VMs page, in pages a second.
const PAGES_PER_S: u64 = 2_000;
/// What a migration sends, in bytes a second: 1 Gbit/s.
const SENT_PER_S: u64 = 125_000_000;
/// A VM that has been calm for so long gives back what it was given for an overload, in steps.
const CALM_STEPS: u32 = 60;
const STEP_S: u64 = 10;
const PAGE: u64 = 4096;

/// What is done about overloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Short ones go to the network's memory, long ones are migrated.
    Both,
    /// Each is migrated at once.
    Migrate,
    /// All go to the network's memory, however long they are.
    Swap,
}

/// A pool.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Hosts.
    pub hosts: usize,
    /// VMs on each of them in the beginning.
    pub vms_per_host: usize,
    /// Memory of each host, without its reserve.
    pub memory: Bytes,
    /// What each VM was promised.
    pub promised: Bytes,
    /// What it is given.
    pub given: Bytes,
    /// Share of time that a VM is overloaded, on average.
    pub overloaded: f64,
    /// Share of hosts that misbehave.
    pub misbehaving: f64,
    /// What is done.
    pub strategy: Strategy,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// VM seconds of overload.
    pub overloaded_s: u64,
    /// Those of them borne by other hosts' memory, in overloads that were not sustained.
    pub short_s: u64,
    /// Those borne by other hosts' memory in sustained overloads: too slow for too long.
    pub long_s: u64,
    /// Those that went to a disk: no room was free elsewhere, or nothing else is done.
    pub disk_s: u64,
    /// VMs that changed hosts.
    pub moves: u64,
    /// Moves that came to nothing: the target had not what it said, or not any more.
    pub failed: u64,
    /// Sent over the network.
    pub traffic: Bytes,
    /// Most memory that lay in repositories at once.
    pub most_swapped: Bytes,
}

/// How a host behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Well,
    /// It says nothing for minutes.
    Silent,
    /// It has a quarter of what it says.
    Lies,
    /// It has no lease every other minute.
    Flaps,
    /// What it says is half a minute old.
    Late,
}

struct Host {
    name: HostName,
    memory: Bytes,
    manner: Manner,
}

struct Vm {
    name: VmName,
    host: usize,
    given: Bytes,
    /// How often an overload begins, a step.
    begins: f64,
    /// Steps that this overload lasts on.
    left: u32,
    calm_for: u32,
    intervals: Intervals,
    profile: Profile,
    paged: u64,
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
    spec: OverloadSpec,
    random: Rng,
    hosts: Vec<Host>,
    vms: Vec<Vm>,
    by_name: BTreeMap<VmName, usize>,
    host_by_name: BTreeMap<HostName, usize>,
    given: Vec<Bytes>,
    underway: Vec<Underway>,
    memory: ClusterMemory,
    step: u64,
    outcome: Outcome,
}

impl Pool {
    /// A pool in which nothing has happened yet.
    #[must_use]
    pub fn new(seed: u64, setting: Setting) -> Self {
        let mut random = Rng::with_seed(seed);
        let manners = [Manner::Silent, Manner::Lies, Manner::Flaps, Manner::Late];
        let hosts: Vec<Host> = (0..setting.hosts)
            .map(|i| {
                let is_bad = random.f64() < setting.misbehaving;
                let manner = if is_bad { manners[random.usize(0..4)] } else { Manner::Well };
                let memory = match manner {
                    // Its VMs fit, and nothing else does.
                    Manner::Lies => Bytes(setting.given.0 * setting.vms_per_host as u64),
                    _ => setting.memory,
                };
                Host { name: format!("host-{i}").into(), memory, manner }
            })
            .collect();
        // One step is the mean's shortest; long ones are rare and long.
        let mean_steps = 0.589 + 0.38 * 4.0 + 0.031 * 40.0;
        let vms: Vec<Vm> = (0..setting.hosts * setting.vms_per_host)
            .map(|i| {
                let share = setting.overloaded * random.f64() * 2.0;
                Vm {
                    name: format!("vm-{i}").into(),
                    host: i / setting.vms_per_host,
                    given: setting.given,
                    begins: share / (1.0 - share) / mean_steps,
                    left: 0,
                    calm_for: 0,
                    intervals: Intervals::default(),
                    profile: Profile::default(),
                    paged: 0,
                }
            })
            .collect();
        let given = vec![Bytes(setting.given.0 * setting.vms_per_host as u64); setting.hosts];
        let by_name = vms.iter().enumerate().map(|(i, vm)| (vm.name.clone(), i)).collect();
        let host_by_name = hosts.iter().enumerate().map(|(i, h)| (h.name.clone(), i)).collect();
        Self {
            setting,
            spec: OverloadSpec::default(),
            random,
            hosts,
            vms,
            by_name,
            host_by_name,
            given,
            underway: Vec::new(),
            memory: ClusterMemory::default(),
            step: 0,
            outcome: Outcome::default(),
        }
    }

    /// Lets so many hours go by.
    pub fn run(&mut self, hours: u64) -> Outcome {
        for _ in 0..hours * 3600 / STEP_S {
            self.step();
        }
        self.outcome
    }

    /// One interval.
    pub fn step(&mut self) {
        self.step += 1;
        self.load();
        self.arrive();
        self.bear();
        let is_due = match self.setting.strategy {
            Strategy::Swap => false,
            Strategy::Both | Strategy::Migrate => self.wants().next().is_some(),
        };
        if is_due {
            let (view, now) = (self.view(), self.now());
            let plan = cluster::decide(&view, &mut self.memory, now);
            for (name, chosen) in plan.moves {
                self.begin(&name, chosen);
            }
        }
    }

    fn now(&self) -> Time {
        Time(self.step * STEP_S * 1000)
    }

    /// What this VM's overload is to the strategy.
    fn severity(&self, vm: &Vm) -> Severity {
        match (self.setting.strategy, vm.intervals.severity()) {
            // Whatever pages is moved.
            (Strategy::Migrate, Severity::Transient) => Severity::Sustained,
            (_, severity) => severity,
        }
    }

    fn wants(&self) -> impl Iterator<Item = &Vm> {
        self.vms.iter().filter(|vm| self.severity(vm) == Severity::Sustained)
    }

    /// Overloads begin and end; who has been calm gives back what it was given.
    fn load(&mut self) {
        let Setting { promised, given: usual, .. } = self.setting;
        for vm in &mut self.vms {
            vm.left = match vm.left {
                0 if self.random.f64() < vm.begins => length(&mut self.random),
                left => left.saturating_sub(1),
            };
            let is_high = vm.left > 0;
            vm.calm_for = if is_high { 0 } else { vm.calm_for + 1 };
            if vm.calm_for >= CALM_STEPS && vm.given > usual {
                let back = vm.given.minus(usual);
                self.given[vm.host] = self.given[vm.host].minus(back);
                vm.given = usual;
            }
            let is_overloaded = is_high && vm.given < promised;
            vm.intervals.push(is_overloaded, &self.spec, &mut vm.profile);
            vm.paged = match vm.intervals.severity() {
                Severity::None => 0,
                _ => vm.paged + if is_overloaded { PAGES_PER_S * STEP_S } else { 0 },
            };
        }
    }

    /// What is paged goes to other hosts' memory as far as that reaches, else to disks.
    fn bear(&mut self) {
        let Setting { promised, strategy, .. } = self.setting;
        let all: Bytes = self.hosts.iter().map(|host| host.memory).sum();
        let used: Bytes = self.given.iter().copied().sum();
        let mut room = all.minus(used);
        let mut swapped = Bytes::ZERO;
        for vm in self.vms.iter().filter(|vm| vm.left > 0 && vm.given < promised) {
            self.outcome.overloaded_s += STEP_S;
            let lacks = promised.minus(vm.given);
            if strategy == Strategy::Migrate || room < lacks {
                self.outcome.disk_s += STEP_S;
                continue;
            }
            room = room.minus(lacks);
            swapped = swapped.plus(lacks);
            let seconds = match vm.intervals.severity() {
                Severity::Sustained => &mut self.outcome.long_s,
                _ => &mut self.outcome.short_s,
            };
            *seconds += STEP_S;
            let paged = Bytes(PAGES_PER_S * STEP_S * PAGE);
            self.outcome.traffic = self.outcome.traffic.plus(paged);
        }
        self.outcome.most_swapped = self.outcome.most_swapped.max(swapped);
    }

    /// What a controller is told.
    fn view(&mut self) -> ClusterView {
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
                Manner::Lies => Bytes(host.memory.0 * 4),
                _ => host.memory,
            };
            let report = HostReport { memory: claims, vms: BTreeMap::new() };
            view.hosts.insert(host.name.clone(), Reading::new(report, at));
        }
        for vm in &self.vms {
            let Some(host) = view.hosts.get_mut(&self.hosts[vm.host].name) else { continue };
            let report = VmReport {
                promised: self.setting.promised,
                given: vm.given,
                severity: self.severity(vm),
                // Who migrates at once asks for no price.
                paged: if self.setting.strategy == Strategy::Migrate { u64::MAX } else { vm.paged },
                immovable: None,
            };
            host.value.vms.insert(vm.name.clone(), report);
        }
        for underway in &self.underway {
            let Move { from, to, .. } = underway.chosen.clone();
            let intent = Intent { generation: 1, from, to, is_withdrawn: false };
            let name = self.vms[underway.vm].name.clone();
            view.intents.insert(name, Reading::new(intent, underway.begun));
        }
        view
    }

    fn begin(&mut self, name: &VmName, chosen: Move) {
        let (vm, to) = (self.by_name[name], self.host_by_name[&chosen.to]);
        let now = self.now();
        if !self.has_room(vm, to, &chosen) {
            self.outcome.failed += 1;
            self.memory.refused(&chosen.to, now);
            return;
        }
        let seconds = chosen.cost.0.div_ceil(SENT_PER_S);
        let until = self.step + seconds.div_ceil(STEP_S).max(1);
        self.outcome.traffic = self.outcome.traffic.plus(chosen.cost);
        self.underway.push(Underway { vm, chosen, to, begun: now, until });
    }

    /// What a VM that moves is given there.
    fn needs(&self, vm: usize, chosen: &Move) -> Bytes {
        let is_own = self.vms[vm].name == chosen.for_whom;
        if is_own { self.setting.promised } else { self.vms[vm].given }
    }

    fn has_room(&self, vm: usize, to: usize, chosen: &Move) -> bool {
        self.given[to].plus(self.needs(vm, chosen)) <= self.hosts[to].memory
    }

    /// Migrations end; a target that is full by then takes nobody.
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
                continue;
            }
            self.memory.accepted(&chosen.to);
            let from = self.vms[moved].host;
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
                }
            }
            // It has other memory now, so what was learned says nothing any more.
            let relieved = &mut self.vms[for_whom];
            (relieved.profile, relieved.intervals) = (Profile::default(), Intervals::default());
        }
    }

    /// Whether each host holds no more than it has, and what is written of it is right.
    ///
    /// # Errors
    ///
    /// What is wrong.
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

/// How many steps an overload lasts (Fig. 3b at 640 MB).
fn length(random: &mut Rng) -> u32 {
    match random.f64() {
        ..0.589 => 1,
        ..0.969 => random.u32(2..=7),
        _ => random.u32(12..=68),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(strategy: Strategy) -> Setting {
        Setting {
            hosts: 60,
            vms_per_host: 10,
            memory: Bytes::mib(8 * 1024),
            promised: Bytes::mib(1024),
            given: Bytes::mib(640),
            overloaded: 0.05,
            misbehaving: 0.2,
            strategy,
        }
    }

    #[test]
    fn no_host_holds_more_than_it_has_whatever_hosts_claim() {
        for strategy in [Strategy::Both, Strategy::Migrate, Strategy::Swap] {
            let mut pool = Pool::new(7, setting(strategy));
            for _ in 0..720 {
                pool.step();
                pool.check().unwrap_or_else(|why| panic!("{strategy:?}: {why}"));
            }
            let Outcome { overloaded_s, short_s, long_s, disk_s, moves, .. } = pool.outcome;
            assert_eq!(overloaded_s, short_s + long_s + disk_s);
            assert_eq!(moves > 0, strategy != Strategy::Swap, "{strategy:?}");
        }
    }

    #[test]
    fn one_seed_is_one_outcome() {
        let run = |seed| Pool::new(seed, setting(Strategy::Both)).run(1);
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
    }

    #[test]
    fn both_remedies_together_move_less_and_bear_more() {
        let run = |strategy| Pool::new(5, setting(strategy)).run(6);
        let (both, migrate, swap) =
            (run(Strategy::Both), run(Strategy::Migrate), run(Strategy::Swap));
        assert!(both.moves * 4 < migrate.moves, "{both:?} {migrate:?}");
        assert!(both.disk_s * 10 < migrate.disk_s, "{both:?} {migrate:?}");
        assert!(both.long_s < swap.long_s, "{both:?} {swap:?}");
    }
}
