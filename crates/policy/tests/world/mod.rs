//! A small world for tests to change: one group on a large host, with calm VMs by default.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;

use model::{
    Action, Bytes, Cold, GroupSpec, GuestStats, HostReading, HostView, KsmSpec, Link, Means,
    Migration, Mode, NamePattern, OverloadSpec, Plan, Policy, Reading, Spec, Time, VmView,
    spec::{ApiSpec, HostSpec, LimitsSpec, Modes},
};
use policy::{Memory, tick};

/// A group of VMs on a large host; the state stays the same unless a test changes it.
pub(crate) struct GroupFixture {
    /// The current time.
    pub(crate) now: Time,
    /// The configuration.
    pub(crate) spec: Spec,
    /// The observed state.
    pub(crate) view: HostView,
    /// The policy's memory.
    pub(crate) memory: Memory,
    /// The guest whose statistics are not refreshed.
    pub(crate) silent: Option<&'static str>,
    /// The VM whose balloon gives the host nothing back.
    pub(crate) pinned: Option<&'static str>,
    /// CPU utilization of the host.
    pub(crate) cpu_busy: Option<f32>,
    /// Available memory of the host, out of 1 TiB.
    pub(crate) available: Bytes,
    /// Share of time for which the host's tasks wait for memory, in percent.
    pub(crate) pressure: Option<f32>,
    /// Memory that a swapped-out byte takes.
    pub(crate) swap_cost: f32,
}

impl GroupFixture {
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
                grace: model::Millis(0),
            },
            modes: Modes { balloon: Mode::Enforce },
            api: ApiSpec {
                socket: "socket".into(),
                tcp: None,
                token_file: None,
                read_token_file: None,
            },
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

    /// A calm guest with swap whose balloon is at `actual` MiB; the guest has touched all of it.
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

    /// The same for a VM that the host may page out: all its memory is resident, and `untouched`
    /// MiB were not touched for a minute.
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

    /// The report about a paged VM, for changes.
    pub(crate) fn cold(&mut self, name: &str) -> &mut Cold {
        &mut self.see(name).cold.as_mut().expect("where its memory is").value
    }

    /// A VM whose QEMU never answered.
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

    /// The view of `name`, for changes.
    pub(crate) fn see(&mut self, name: &str) -> &mut VmView {
        self.view.vms.get_mut(&name.into()).expect("a VM of this name")
    }

    /// The statistics of `name`, for changes.
    pub(crate) fn tell(&mut self, name: &str) -> &mut GuestStats {
        &mut self.see(name).stats.as_mut().expect("statistics").value
    }

    /// Runs a second in which `name` swaps in 10 MiB.
    pub(crate) fn swap(&mut self, name: &str) -> Plan {
        let stats = self.tell(name);
        stats.swap_in = stats.swap_in.map(|sum| sum.plus(Bytes::mib(10)));
        self.second()
    }

    /// Runs a second: all readings are refreshed, then the plan is made and carried out.
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

    /// Runs `n` seconds. Returns the last plan.
    pub(crate) fn seconds(&mut self, n: u64) -> Plan {
        (1..n).for_each(|_| drop(self.second()));
        self.second()
    }

    /// The balloon's size of `name`, in MiB.
    pub(crate) fn stands_at(&self, name: &str) -> u64 {
        self.view.vms[&name.into()].balloon.map_or(0, |balloon| balloon.value.0 >> 20)
    }
}

/// The target of `name` in `plan`, if there is a change, in MiB.
pub(crate) fn target_mib(plan: &Plan, name: &str) -> Option<u64> {
    plan.vms[&name.into()].change.as_ref().map(|change| {
        let Action::Resize { target, .. } = change.action;
        target.0 >> 20
    })
}
