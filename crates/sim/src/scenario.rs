//! A scenario: the guests on the host, the operator's specification, and the events of the run.
//!
//! ```text
//! Scenario::new(seed)
//!     .group("shop", Policy::Demand, limits(64, 128, 384), [Fake::idle("a"), …])
//!     .run(60)
//! ```

use std::collections::BTreeMap;

use model::{
    Bytes, ColdSpec, GroupName, GroupSpec, HostView, KsmSpec, Mode, NamePattern, OverloadSpec,
    Plan, Policy, Spec, VmLimits, VmName,
    ports::Clock as _,
    spec::{ApiSpec, HostSpec, LendSpec, LimitsSpec, Modes, ShareSpec, VmSpec},
};
use policy::{Memory, Rules};

use crate::{
    fake::{Fake, Load, Nature},
    guest::Guest,
    harm::{Harm, Judge},
    host::{Host, SimClock},
};

/// Limits in MiB: `min`, `base`, `max`.
#[must_use]
pub const fn limits(min: u64, base: u64, max: u64) -> VmLimits {
    VmLimits { min: Bytes::mib(min), base: Bytes::mib(base), max: Bytes::mib(max) }
}

/// A host, its tenants, and the events of their run.
#[derive(Clone, Debug)]
pub struct Scenario {
    seed: u64,
    spec: Spec,
    total: Bytes,
    others: Load,
    guests: Vec<Guest>,
    restarts: Vec<u64>,
    lost_percent: u8,
}

impl Scenario {
    /// A large host (64 GiB, 1 GiB of reserve) without guests.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let host = HostSpec {
            reserve: Some(Bytes::mib(1024)),
            qmp: vec![],
            state: "state".into(),
            ksm: KsmSpec::Off,
            attach: model::AttachSpec::On,
            grace: model::Millis(0),
        };
        let api =
            ApiSpec { socket: "socket".into(), tcp: None, token_file: None, read_token_file: None };
        let modes = Modes { balloon: Mode::Enforce };
        let (groups, vms, disks) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let overload = OverloadSpec::default();
        Self {
            seed,
            spec: Spec { host, modes, api, overload, pool: None, groups, vms, disks },
            total: Bytes::mib(64 * 1024),
            others: Load::steady(Bytes::ZERO),
            guests: Vec::new(),
            restarts: Vec::new(),
            lost_percent: 0,
        }
    }

    /// The host has `total_mib`, of which `reserve_mib` are never lent, and `others` occupy part
    /// of it.
    #[must_use]
    pub fn host(mut self, total_mib: u64, reserve_mib: u64, others: Load) -> Self {
        self.total = Bytes::mib(total_mib);
        self.spec.host.reserve = Some(Bytes::mib(reserve_mib));
        self.others = others;
        self
    }

    /// A tenant whose guests are called `name-…` and share these limits.
    #[must_use]
    pub fn group(
        mut self,
        name: &str,
        policy: Policy,
        limits: VmLimits,
        fakes: impl IntoIterator<Item = Fake>,
    ) -> Self {
        let VmLimits { min, base, max } = limits;
        let limits = LimitsSpec { min: Some(min), base: Some(base), max: Some(max) };
        let vms = vec![NamePattern::new(format!("{name}-*"))];
        self.spec
            .groups
            .insert(name.into(), GroupSpec { policy, vms, limits, ..GroupSpec::default() });
        for fake in fakes {
            let vm = VmName::from(format!("{name}-{}", fake.name));
            let swap = Some(!fake.natures.contains(&Nature::Swapless));
            self.spec.vms.insert(vm.clone(), VmSpec { swap, ..VmSpec::default() });
            self.guests.push(Guest::boot(vm, fake));
        }
        self
    }

    /// This tenant pays for `mib` MiB.
    #[must_use]
    pub fn paying(mut self, name: &str, mib: u64) -> Self {
        self.spec.groups.entry(name.into()).or_default().budget = Some(Bytes::mib(mib));
        self
    }

    /// The host pages out memory that this tenant's VMs do not touch, if they are tracked.
    #[must_use]
    pub fn paging(mut self, name: &str) -> Self {
        self.spec.groups.entry(name.into()).or_default().cold = ColdSpec::WhenNeeded;
        self
    }

    /// The misses of this VM count `weight` times, and it belongs to this class.
    #[must_use]
    pub fn weighing(mut self, vm: &str, weight: u32, priority: u8) -> Self {
        self.spec.vms.entry(vm.into()).or_default().share = ShareSpec { weight, priority };
        self
    }

    /// These tenants consent to lending.
    #[must_use]
    pub fn lending(mut self, names: impl IntoIterator<Item = &'static str>) -> Self {
        for name in names {
            self.spec.groups.entry(name.into()).or_default().lend = LendSpec::Open(true);
        }
        self
    }

    /// The daemon forgets everything in each of these seconds.
    #[must_use]
    pub fn restarts_at(mut self, seconds: impl IntoIterator<Item = u64>) -> Self {
        self.restarts.extend(seconds);
        self
    }

    /// `percent` of all actions are lost on their way.
    #[must_use]
    pub const fn losing(mut self, percent: u8) -> Self {
        self.lost_percent = percent;
        self
    }

    /// The operator's specification.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The host before its first second.
    #[must_use]
    pub fn begin(&self) -> Host {
        let mut host = Host::new(self.total, self.guests.clone(), self.seed);
        host.others = self.others.clone();
        host.lost_percent = self.lost_percent;
        host
    }

    /// Runs it with every safety rule on.
    #[must_use]
    pub fn run(&self, seconds: u64) -> Run {
        self.run_with(Rules::ALL, seconds)
    }

    /// Runs it for `seconds` with the given safety rules.
    #[must_use]
    pub fn run_with(&self, rules: Rules, seconds: u64) -> Run {
        let mut host = self.begin();
        let mut run = Run::default();
        for second in 0..seconds {
            if self.restarts.contains(&second) {
                run.memory = Memory::default();
            }
            host.live(second);
            let before = host.clone();
            let clock = SimClock::at(second);
            let (view, plan) =
                policy::cycle_with(&mut host, &clock, &self.spec, &mut run.memory, rules);
            debug_assert_eq!(plan.at, clock.now());
            let harms = run.judge.judge(second, &before, &self.spec, &plan);
            run.seconds.push(Second { view, plan, harms, guests: before.guests });
        }
        run
    }
}

/// One second of a run.
#[derive(Debug)]
pub struct Second {
    /// The policy's view.
    pub view: HostView,
    /// The policy's decisions.
    pub plan: Plan,
    /// The harm that became visible in this second.
    pub harms: Vec<Harm>,
    /// The real state of the guests.
    pub guests: Vec<Guest>,
}

/// A whole run, second by second.
#[derive(Debug, Default)]
pub struct Run {
    /// Its seconds.
    pub seconds: Vec<Second>,
    /// The policy's memory at the end of the run.
    pub memory: Memory,
    judge: Judge,
}

impl Run {
    /// Every harm that was done.
    pub fn harms(&self) -> impl Iterator<Item = (usize, &Harm)> {
        self.seconds.iter().enumerate().flat_map(|(s, of)| of.harms.iter().map(move |h| (s, h)))
    }

    /// The harm done in words, one per line; empty when there was none.
    #[must_use]
    pub fn harm_report(&self) -> String {
        self.harms().map(|(second, harm)| format!("{second} s: {harm}\n")).collect()
    }

    /// Memory that `vm` may use in `second`, in whole MiB; 0 if there is no such VM.
    #[must_use]
    pub fn actual_mib(&self, vm: &str, second: usize) -> u64 {
        self.guest(vm, second).map_or(0, |guest| guest.actual.0 >> 20)
    }

    /// The real state of `vm` in `second`.
    #[must_use]
    pub fn guest(&self, vm: &str, second: usize) -> Option<&Guest> {
        self.seconds.get(second)?.guests.iter().find(|guest| guest.name.as_str() == vm)
    }

    /// The number of times that memory of `vm` was taken and given back.
    #[must_use]
    pub fn reversals(&self, vm: &str) -> usize {
        self.judge.reversals(&vm.into())
    }

    /// The most that `group` occupied beyond its budget in any second.
    #[must_use]
    pub fn leaked_max(&self, group: &str) -> Bytes {
        let group = GroupName::from(group);
        let over = self.seconds.iter().filter_map(|second| {
            second.plan.groups.get(&group).map(|ledger| ledger.used.minus(ledger.budget))
        });
        over.max().unwrap_or_default()
    }
}
