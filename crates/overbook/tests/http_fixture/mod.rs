//! An invented tick of a host with three VMs, for the tests of everything that shows one.

use std::{collections::BTreeMap, sync::Arc};

use model::{
    Action, Bytes, CacheReading, Decision, Dedup, DedupSpec, DiskReading, FreePages, GroupSpec,
    GuestStats, HostReading, HostView, KsmReading, KsmSpec, Learned, Ledger, Link, Loan, Migration,
    Mode, NamePattern, Overload, OverloadSpec, PagesPerMs, Plan, Policy, Profile, Quota, Reading,
    Reason, RepositoriesReading, Scan, Severity, Spec, Take, Time, Together, Tracking, VmLimits,
    VmView, WorkerReading,
    plan::Change,
    reason::Pressure,
    spec::{ApiSpec, HostSpec, Modes},
    tracking::{CurvePoint, TrackingCost},
    view::Mechanism,
};
use overbook::published::{Published, TickTimes};
use policy::Memory;

/// The time of the tick, on the boot clock.
pub(crate) const NOW: Time = Time(1_000_000);

/// `web-1` swaps and gets memory; `web-2` does not follow its target; `db-1` has no group and its
/// QEMU is gone.
pub(crate) fn published() -> Published {
    Published {
        at: NOW,
        wall_ms: 1_780_000_000_000,
        spec: Arc::new(spec()),
        view: view(),
        memory: memory(),
        plan: plan(),
        paused: false,
        config_error: None,
        waits_for_restart: None,
        history_error: None,
        pool: None,
        ticks: TickTimes::default(),
    }
}

fn memory() -> Memory {
    let profile = Profile {
        intervals: 360,
        transient: 6,
        sustained: 9,
        lengths: vec![2, 2],
        sustained_overloads: 1,
    };
    let profiles = BTreeMap::from([("web-1".into(), profile)]);
    let together = Together { transient: vec![350, 10], sustained: vec![351, 9] };
    Memory::fresh(false, Learned { profiles, together })
}

fn spec() -> Spec {
    let web = GroupSpec {
        policy: Policy::Demand,
        vms: vec![NamePattern::new("web-*")],
        dedup: DedupSpec::Adaptive,
        ..GroupSpec::default()
    };
    Spec {
        host: HostSpec {
            reserve: Some(Bytes::mib(2048)),
            qmp: vec![],
            state: "/x".into(),
            ksm: KsmSpec::Drive,
            attach: model::AttachSpec::On,
        },
        modes: Modes { balloon: Mode::Enforce },
        api: ApiSpec { socket: "/x/s".into(), tcp: None, token_file: None, read_token_file: None },
        overload: OverloadSpec::default(),
        pool: None,
        groups: BTreeMap::from([("web".into(), web)]),
        vms: BTreeMap::new(),
        disks: std::collections::BTreeMap::new(),
    }
}

fn view() -> HostView {
    let host = HostReading {
        total: Bytes::mib(16_384),
        available: Bytes::mib(6_144),
        swap_total: Bytes::mib(1_024),
        swap_free: Bytes::mib(1_000),
        swap_cost: 0.0,
        psi_some_avg10: Some(0.5),
        psi_full_avg10: Some(0.0),
        cpu_busy: Some(0.4),
    };
    let link = Link::Down { since: Time(940_000), why: "no such socket".to_owned() };
    let gone = VmView { link, balloon: None, stats: None, used: None, ..vm(512, 0, 0) };
    let unable = (Mechanism::FreePageReporting, "the balloon was made without it".to_owned());
    let mut stuck = vm(384, 384, 300);
    let untracked = (Mechanism::Tracking, "QEMU was started without Overbook's shim".to_owned());
    stuck.limits.extend([unable, untracked]);
    let tracked = VmView {
        tracking: Some(Reading::new(tracking(), NOW)),
        dedup: Some(Reading::new(dedup(), NOW)),
        free_pages: Some(Reading::new(free_pages(), NOW)),
        disks: BTreeMap::from([("swap".to_owned(), Reading::new(disk(), NOW))]),
        pool_part: Bytes::mib(10),
        ..vm(384, 192, 220)
    };
    let worker = WorkerReading {
        pid: Some(4711),
        cpu_us: 1_500_000,
        resident: Bytes::mib(6),
        restarts: 1,
        last_error: Some("the worker ended (signal: 9)".to_owned()),
        pool: Bytes::mib(10),
        ..WorkerReading::default()
    };
    HostView {
        host: Some(Reading::new(host, NOW)),
        workers: BTreeMap::from([("web".into(), Reading::new(worker, NOW))]),
        ksm: Some(Reading::new(ksm(), NOW)),
        caches: BTreeMap::from([("web".into(), Reading::new(cache(), NOW))]),
        vms: BTreeMap::from([
            ("web-1".into(), tracked),
            ("web-2".into(), stuck),
            ("db-1".into(), gone),
        ]),
    }
}

/// A disk with two connected repositories.
fn disk() -> DiskReading {
    let repositories = RepositoriesReading { admits: true, connected: 2, ..Default::default() };
    DiskReading {
        made_of: "file /srv/web-1".to_owned(),
        reads: 2,
        read: Bytes(8192),
        read_us_median: 64,
        read_us_p99: 512,
        repositories: Some(repositories),
        ..DiskReading::default()
    }
}

fn cache() -> CacheReading {
    CacheReading {
        capacity: Bytes::mib(64),
        held: Bytes::mib(60),
        hits: 300,
        misses: 100,
        curve: vec![(Bytes::mib(64), 0.75), (Bytes::mib(128), 0.9)],
    }
}

/// KSM saves 200 MiB for group `web`.
fn ksm() -> KsmReading {
    KsmReading {
        saved: Bytes::mib(200),
        shared: Bytes::mib(20),
        is_driven: true,
        trouble: None,
        groups: BTreeMap::from([("web".into(), None)]),
    }
}

fn vm(ram: u64, balloon: u64, used: u64) -> VmView {
    let stats = GuestStats {
        total: Some(Bytes::mib(balloon)),
        free: Some(Bytes::mib(8)),
        available: Some(Bytes::mib(12)),
        disk_caches: Some(Bytes::mib(6)),
        swap_in: Some(Bytes::mib(40)),
        swap_out: Some(Bytes::mib(60)),
        major_faults: Some(1_000),
        minor_faults: Some(50_000),
        oom_kills: Some(0),
    };
    VmView {
        incarnation: 7,
        link: Link::Up,
        ram: Bytes::mib(ram),
        hotplugged: Bytes::ZERO,
        devices: Bytes::ZERO,
        memory_limits: None,
        balloon: Some(Reading::new(Bytes::mib(balloon), NOW)),
        stats: Some(Reading::new(stats, Time(NOW.0 - 800))),
        used: Some(Reading::new(Bytes::mib(used), NOW)),
        pool_part: Bytes::ZERO,
        migration: Migration::None,
        immovable: None,
        deflates_on_oom: Some(false),
        limits: BTreeMap::new(),
        last_error: None,
        block: None,
        own: None,
        cgroup_cpu_us: None,
        pid: None,
        tracking: None,
        dedup: None,
        free_pages: None,
        cold: None,
        disks: BTreeMap::new(),
    }
}

/// A working set of 150 MiB, of which 20 MiB are in swap, with a curve of three points.
fn tracking() -> Tracking {
    let point = |mib, miss_ratio| CurvePoint { memory: Bytes::mib(mib), miss_ratio };
    Tracking {
        working_set: Some(Bytes::mib(150)),
        swapped: Bytes::mib(20),
        curve: vec![point(10, 1.0), point(100, 0.25), point(130, 0.05)],
        references_per_s: 12_000.0,
        granule: Bytes::kib(128),
        seen_through: None,
        cost: TrackingCost {
            traps_per_s: 210.0,
            traps: 42_000,
            held_us: 2_000_000,
            vcpu_share: 0.0095,
        },
    }
}

/// 40 MiB that four VMs share.
fn dedup() -> Dedup {
    Dedup {
        shared: Bytes::mib(40),
        saved: Bytes::mib(30),
        merged: Bytes::mib(45),
        broken: Bytes::mib(5),
        dropped: Bytes::mib(2),
        passes: 3,
    }
}

/// 60 MiB that were freed and not taken; 10 MiB of them are in use again.
fn free_pages() -> FreePages {
    FreePages {
        freed: Bytes::mib(60),
        lazy: Bytes::mib(50),
        handed_over: Bytes::mib(300),
        taken: Bytes::mib(200),
        dropped: Bytes::mib(15),
        taken_back: Bytes::mib(25),
        refaulted: Bytes::mib(40),
    }
}

fn plan() -> Plan {
    let mib = Bytes::mib;
    let limits = VmLimits { min: mib(96), base: mib(128), max: mib(384) };
    let by = model::Means::Balloon;
    let action = Action::Resize { vm: "web-1".into(), incarnation: 7, target: mib(202), by };
    let sign = Pressure::Swapping { per_second: Bytes::kib(3_200) };
    let reason = Reason::Demand { sign, surplus: mib(100) };
    let member = |target, change, refusals| Decision {
        group: Some("web".into()),
        limits: Some(limits),
        target: Some(target),
        change,
        is_at_max: false,
        refusals,
        outcome: None,
    };
    let stuck = Reason::Uncooperative {
        actual: mib(384),
        target: mib(128),
        stuck: model::Millis::secs(40),
        wait: model::Millis::secs(60),
    };
    let pressed =
        Reason::UnderPressure { pressure: Pressure::SwapIn { per_second: Bytes::kib(3_200) } };
    let alone = Decision { refusals: vec![Reason::NoGroup], ..Decision::default() };
    let change = Change { action, is_take: false, is_repeat: false, reason };
    let ledger = Ledger {
        budget: mib(580),
        used: mib(480),
        promised: mib(12),
        reserve: mib(48),
        lent: Bytes::ZERO,
        borrowed: mib(60),
        surplus: mib(100),
        deficit: Bytes::ZERO,
    };
    let lend = Reason::Lend {
        needed_by: "web-1".into(),
        sign: Pressure::Swapping { per_second: Bytes::kib(3_200) },
        idle: mib(300),
    };
    let reason = Reason::CpuIdle { busy_percent: 40 };
    let scan = Scan { rate: Some(PagesPerMs(25)), reason, payer: None };
    let reason = Reason::FreedHostShort { left: mib(2_000), wanted: mib(3_072) };
    let take = Take { keep: mib(20), reason };
    let quota = Quota { amount: mib(70), reason: Reason::Spare { surplus: mib(70) } };
    let reason =
        Reason::OverloadTransient { intervals: 2, window: 12, sustained: 8, learned_from: 0 };
    let overload = Overload { severity: Severity::Transient, pages_per_s: 812, reason };
    let loan = Loan { borrower: "web".into(), amount: mib(60), reason: lend };
    Plan {
        at: NOW,
        mode: Mode::Enforce,
        groups: BTreeMap::from([("web".into(), ledger)]),
        over: BTreeMap::new(),
        loans: BTreeMap::from([("shop".into(), loan)]),
        scans: BTreeMap::from([("web".into(), scan)]),
        takes: BTreeMap::from([("web-1".into(), take)]),
        caches: BTreeMap::from([("web".into(), quota)]),
        overloads: BTreeMap::from([("web-1".into(), overload)]),
        vms: BTreeMap::from([
            ("web-1".into(), member(mib(202), Some(change), vec![pressed])),
            ("web-2".into(), member(mib(128), None, vec![stuck])),
            ("db-1".into(), alone),
        ]),
        host: vec![],
    }
}
