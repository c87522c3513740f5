//! A small world to be changed by hand: one group on a large host, its VMs calm until told
//! otherwise.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;

use model::{
    Action, Bytes, Cold, GroupSpec, GuestStats, HostReading, HostView, KsmSpec, Link, Means,
    Migration, Mode, NamePattern, OverloadSpec, Plan, Policy, Reading, Spec, Time, VmView,
    spec::{ApiSpec, HostSpec, LimitsSpec, Modes},
};
use policy::{Memory, tick};

/// A group of VMs on a large host; what a test does not change stays as it is.
pub(crate) struct World {
    /// Now.
    pub(crate) now: Time,
    /// What the operator wants.
    pub(crate) spec: Spec,
    /// What is seen.
    pub(crate) view: HostView,
    /// What the policy remembers.
    pub(crate) memory: Memory,
    /// The guest whose statistics are not renewed.
    pub(crate) silent: Option<&'static str>,
    /// The VM whose balloon gives the host nothing back.
    pub(crate) pinned: Option<&'static str>,
    /// How busy the host's CPUs are.
    pub(crate) cpu_busy: Option<f32>,
    /// What the host has available, of 1 TiB.
    pub(crate) available: Bytes,
    /// For how long its tasks wait for memory, in percent.
    pub(crate) pressure: Option<f32>,
    /// What memory a byte takes that is swapped out.
    pub(crate) swap_cost: f32,
}

impl World {
    /// VMs with `min` 64, `base` 128 and `max` 384 MiB, in a group that pays for `budget_mib`.
    pub(crate) fn new(policy: Policy, budget_mib: Option<u64>) -> Self {
        let limits = LimitsSpec {
            min: Some(Bytes::mib(64)),
            base: Some(Bytes::mib(128)),
            max: Some(Bytes::mib(384)),
        };
        let vms = vec![NamePattern::new("*")];
        let budget = budget_mib.map(Bytes::mib);
        let group = GroupSpec { policy, vms, budget, limits, ..GroupSpec::default() };
        let spec = Spec {
            host: HostSpec {
                reserve: None,
                qmp: vec![],
                state: "state".into(),
                ksm: KsmSpec::Off,
                attach: model::AttachSpec::On,
            },
            modes: Modes { balloon: Mode::Enforce },
            api: ApiSpec { socket: "socket".into(), tcp: None, token_file: None },
            overload: OverloadSpec::default(),
            pool: None,
            groups: [("g".into(), group)].into(),
            vms: BTreeMap::new(),
            disks: BTreeMap::new(),
        };
        let (view, memory) = (HostView::default(), Memory::default());
        let (silent, cpu_busy, available, pressure) = (None, None, Bytes(1 << 39), None);
        let swap_cost = 0.0;
        Self {
            now: Time(1_000_000),
            spec,
            view,
            memory,
            silent,
            pinned: None,
            cpu_busy,
            available,
            pressure,
            swap_cost,
        }
    }

    /// A calm guest with swap whose balloon stands at `actual` MiB, which it has all touched.
    pub(crate) fn vm(mut self, name: &str, actual: u64, free: u64) -> Self {
        let stats = GuestStats {
            total: Some(Bytes::mib(actual)),
            free: Some(Bytes::mib(free)),
            available: Some(Bytes::mib(free)),
            swap_in: Some(Bytes::ZERO),
            swap_out: Some(Bytes::mib(1)),
            minor_faults: Some(1_000_000),
            ..GuestStats::default()
        };
        let vm = VmView {
            incarnation: 1,
            ram: Bytes::mib(384),
            balloon: Some(Reading::new(Bytes::mib(actual), self.now)),
            stats: Some(Reading::new(stats, self.now)),
            used: Some(Reading::new(Bytes::mib(actual), self.now)),
            migration: Migration::None,
            immovable: None,
            ..VmView::unknown(Link::Up)
        };
        self.view.vms.insert(name.into(), vm);
        self
    }

    /// The same where the host may page out what it does not touch: all of it is in memory, and so
    /// much was not touched for a minute.
    pub(crate) fn paged_vm(mut self, name: &str, resident: u64, untouched: u64) -> Self {
        self = self.vm(name, resident, 0);
        let cold = Cold {
            resident: Bytes::mib(resident),
            untouched: [untouched, untouched, 0].map(Bytes::mib),
            refault_ns: 100_000,
            ..Cold::default()
        };
        let now = self.now;
        self.see(name).cold = Some(Reading::new(cold, now));
        self
    }

    /// What a VM that is paged shows, to be changed.
    pub(crate) fn cold(&mut self, name: &str) -> &mut Cold {
        &mut self.see(name).cold.as_mut().expect("where its memory is").value
    }

    /// A VM that was never reached.
    pub(crate) fn unreached(mut self, name: &str) -> Self {
        self = self.vm(name, 0, 0);
        let vm = self.see(name);
        *vm = VmView {
            incarnation: 0,
            link: Link::Down { since: Time(0), why: "refused".into() },
            ram: Bytes::ZERO,
            balloon: None,
            stats: None,
            used: None,
            migration: Migration::Unknown,
            ..vm.clone()
        };
        self
    }

    /// What is seen of `name`, to be changed.
    pub(crate) fn see(&mut self, name: &str) -> &mut VmView {
        self.view.vms.get_mut(&name.into()).expect("a VM of this name")
    }

    /// The statistics of `name`, to be changed.
    pub(crate) fn tell(&mut self, name: &str) -> &mut GuestStats {
        &mut self.see(name).stats.as_mut().expect("statistics").value
    }

    /// Lets a second pass in which `name` swaps in 10 MiB.
    pub(crate) fn swap(&mut self, name: &str) -> Plan {
        let stats = self.tell(name);
        stats.swap_in = stats.swap_in.map(|sum| sum.plus(Bytes::mib(10)));
        self.second()
    }

    /// Lets a second pass: everything is read anew, then decided and done.
    pub(crate) fn second(&mut self) -> Plan {
        self.now = Time(self.now.0 + 1000);
        let host = HostReading {
            total: Bytes(1 << 40),
            available: self.available,
            cpu_busy: self.cpu_busy,
            psi_some_avg10: self.pressure,
            swap_cost: self.swap_cost,
            ..HostReading::default()
        };
        self.view.host = Some(Reading::new(host, self.now));
        for (name, vm) in self.view.vms.iter_mut().filter(|(_, vm)| vm.link == Link::Up) {
            vm.balloon.iter_mut().for_each(|reading| reading.at = self.now);
            vm.used.iter_mut().for_each(|reading| reading.at = self.now);
            vm.free_pages.iter_mut().for_each(|reading| reading.at = self.now);
            vm.cold.iter_mut().for_each(|reading| reading.at = self.now);
            let is_silent = self.silent == Some(name.as_str());
            vm.stats.iter_mut().filter(|_| !is_silent).for_each(|reading| reading.at = self.now);
        }
        let plan = tick(&self.view, &self.spec, &mut self.memory, self.now);
        for Action::Resize { vm: name, target, by, .. } in plan.actions() {
            let vm = self.view.vms.get_mut(&name).expect("a VM that was shown");
            let ram = vm.ram;
            let stands = if by == Means::Balloon { target } else { ram };
            vm.balloon.iter_mut().for_each(|balloon| balloon.value = stands);
            let is_pinned = self.pinned == Some(name.as_str());
            let used = vm.used.iter_mut().filter(|_| by == Means::Balloon && !is_pinned);
            used.for_each(|used| used.value = used.value.min(stands));
            if let Some(cold) = vm.cold.as_mut().filter(|_| by == Means::Paging) {
                let goes = cold.value.resident.minus(target);
                cold.value.resident = cold.value.resident.minus(goes);
                cold.value.out = cold.value.out.plus(goes);
                vm.used.iter_mut().for_each(|used| used.value = used.value.minus(goes));
            }
        }
        plan
    }

    /// Lets `n` seconds pass; answers the last one's plan.
    pub(crate) fn seconds(&mut self, n: u64) -> Plan {
        (1..n).for_each(|_| drop(self.second()));
        self.second()
    }

    /// Where the balloon of `name` stands, in MiB.
    pub(crate) fn stands_at(&self, name: &str) -> u64 {
        self.view.vms[&name.into()].balloon.map_or(0, |balloon| balloon.value.0 >> 20)
    }
}

/// Where `plan` asks `name` to stand, if it asks for a change, in MiB.
pub(crate) fn target_mib(plan: &Plan, name: &str) -> Option<u64> {
    plan.vms[&name.into()].change.as_ref().map(|change| {
        let Action::Resize { target, .. } = change.action;
        target.0 >> 20
    })
}
