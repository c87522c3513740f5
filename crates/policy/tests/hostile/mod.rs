//! Arbitrary hostile worlds: any valid configuration, and any state of guests and hosts.
//!
//! Values are mostly sane, so that decisions occur, mixed with absent, absurd, old and future
//! ones. A world is a list of [`Frame`]s; a VM's balloon follows the actions unless the frame
//! says otherwise.

use std::collections::BTreeMap;

use model::{
    Action, Bytes, FreePages, GroupSpec, GuestStats, HostReading, HostView, KsmSpec, Link,
    Migration, Mode, NamePattern, OverloadSpec, Plan, Policy, Reading, Spec, Time, VmName, VmView,
    spec::{ApiSpec, HostSpec, LendSpec, LimitsSpec, Modes, ShareSpec, VmSpec},
    tracking::{CurvePoint, Tracking, TrackingCost},
};
use proptest::prelude::*;

/// The most VMs in a world.
pub(crate) const VMS: usize = 8;

/// The group of each VM; the last VM belongs to no group.
pub(crate) const GROUPS: [usize; VMS] = [0, 1, 0, 2, 0, 1, 0, 3];

/// The name of VM `i`.
pub(crate) fn name(i: usize) -> VmName {
    VmName::from(format!("g{}-{i}", GROUPS[i]))
}

/// The state of one VM in one tick.
#[derive(Clone, Debug)]
pub(crate) struct VmFrame {
    /// The incarnation; `None`: the VM is absent.
    pub(crate) incarnation: Option<u64>,
    /// Whether QEMU answers.
    pub(crate) is_up: bool,
    /// The balloon: `None` follows the actions, `Some(None)` is absent, otherwise moved by
    /// another program.
    pub(crate) balloon: Option<Option<Bytes>>,
    /// Age of the balloon's reading, in ms.
    pub(crate) balloon_age: u64,
    /// The guest's statistics, with swap counters as increments, and their age in ms.
    pub(crate) stats: Option<(GuestStats, i64)>,
    /// Occupied memory (`None`: just the base, so that the group has neither surplus nor
    /// deficit), and the reading's age.
    pub(crate) used: Option<(Option<Bytes>, u64)>,
    /// Migration.
    pub(crate) migration: Migration,
    /// Freed memory, and the reading's age.
    pub(crate) freed: Option<(FreePages, u64)>,
    /// Tracking, and the reading's age.
    pub(crate) tracking: Option<(Tracking, u64)>,
}

impl VmFrame {
    /// No such VM.
    pub(crate) fn absent() -> Self {
        Self {
            incarnation: None,
            is_up: true,
            balloon: None,
            balloon_age: 0,
            stats: None,
            used: None,
            migration: Migration::None,
            freed: None,
            tracking: None,
        }
    }
}

/// The state of the world in one tick.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    /// Time since the previous tick, in ms.
    pub(crate) elapsed: u64,
    /// The host's total and available memory, and the reading's age.
    pub(crate) host: Option<(Bytes, Bytes, u64)>,
    /// The VMs.
    pub(crate) vms: Vec<VmFrame>,
    /// Whether the actions of this tick are carried out.
    pub(crate) is_applied: bool,
}

/// The state of a world between ticks.
pub(crate) struct World {
    /// The current time.
    pub(crate) now: Time,
    /// The RAM that each VM was started with.
    pub(crate) rams: Vec<Bytes>,
    /// The balloons' sizes.
    pub(crate) balloons: BTreeMap<VmName, Bytes>,
    counters: BTreeMap<VmName, (Bytes, Bytes)>,
    spec: Spec,
}

impl World {
    /// A world of VMs started with `rams`, whose balloons are at `balloons` or at their base.
    pub(crate) fn new(spec: &Spec, rams: Vec<Bytes>, balloons: &[Option<Bytes>]) -> Self {
        let stands = |(i, at): (usize, &Option<Bytes>)| at.map(|at| (name(i), at));
        let balloons = balloons.iter().enumerate().filter_map(stands).collect();
        let (now, counters) = (Time(1_000_000), BTreeMap::new());
        Self { now, rams, balloons, counters, spec: spec.clone() }
    }

    /// The view of `frame`.
    pub(crate) fn show(&mut self, frame: &Frame) -> HostView {
        self.now = Time(self.now.0 + frame.elapsed);
        let host = frame.host.map(|(total, available, age)| {
            let reading = HostReading { total, available, ..HostReading::default() };
            Reading::new(reading, Time(self.now.0 - age))
        });
        let mut view = HostView { host, ..HostView::default() };
        for (i, shown) in frame.vms.iter().enumerate() {
            if let Some(incarnation) = shown.incarnation {
                let vm = self.vm(i, incarnation, shown);
                view.vms.insert(name(i), vm);
            }
        }
        view
    }

    fn vm(&mut self, i: usize, incarnation: u64, shown: &VmFrame) -> VmView {
        let ram = self.rams[i];
        let limits =
            self.spec.group_of(&name(i)).map(|(_, g)| self.spec.limits_of(&name(i), g, ram));
        let base = limits.map_or(ram, |limits| limits.base);
        let stands = self.balloons.entry(name(i)).or_insert(base);
        if let Some(Some(moved)) = shown.balloon {
            *stands = moved;
        }
        let balloon = (shown.balloon != Some(None)).then_some(*stands);
        let counters = self.counters.entry(name(i)).or_default();
        let stats = shown.stats.map(|(mut stats, age)| {
            counters.0 = counters.0.plus(stats.swap_in.unwrap_or_default());
            counters.1 = counters.1.plus(stats.swap_out.unwrap_or_default());
            stats.swap_in = stats.swap_in.map(|_| counters.0);
            stats.swap_out = stats.swap_out.map(|_| counters.1);
            Reading::new(stats, Time(self.now.0.saturating_add_signed(-age)))
        });
        let down = Link::Down { since: Time(0), why: "connection refused".into() };
        VmView {
            manager: None,
            immovable: None,
            deflates_on_oom: None,
            incarnation,
            link: if shown.is_up { Link::Up } else { down },
            ram,
            hotplugged: Bytes::ZERO,
            devices: Bytes::ZERO,
            memory_limits: None,
            balloon: balloon.map(|at| Reading::new(at, Time(self.now.0 - shown.balloon_age))),
            stats,
            used: shown
                .used
                .map(|(used, age)| Reading::new(used.unwrap_or(base), Time(self.now.0 - age))),
            pool_part: ram.share(1, 16),
            migration: shown.migration,
            suspended: false,
            own: None,
            shim: None,
            cgroup_cpu_us: None,
            pid: None,
            tracking: shown
                .tracking
                .clone()
                .map(|(tracking, age)| Reading::new(tracking, Time(self.now.0 - age))),
            dedup: None,
            free_pages: shown.freed.map(|(freed, age)| Reading::new(freed, Time(self.now.0 - age))),
            cold: None,
            limits: BTreeMap::new(),
            last_error: None,
            disks: BTreeMap::new(),
        }
    }

    /// Carries out `plan` at once.
    pub(crate) fn apply(&mut self, plan: &Plan) {
        for Action::Resize { vm, target, .. } in plan.actions() {
            self.balloons.insert(vm, target);
        }
    }
}

fn mib(range: core::ops::Range<u64>) -> impl Strategy<Value = Bytes> + Clone {
    range.prop_map(Bytes::mib)
}

fn any_bytes() -> impl Strategy<Value = Bytes> + Clone {
    prop_oneof![20 => mib(0..1024), 1 => any::<u64>().prop_map(Bytes), 1 => Just(Bytes(u64::MAX))]
}

fn age() -> impl Strategy<Value = u64> {
    prop_oneof![20 => 0..2_000u64, 1 => 4_900..5_100u64, 1 => 5_000..900_000u64]
}

fn stats() -> impl Strategy<Value = GuestStats> {
    let faults = || prop::option::of(any::<u64>());
    let quiet = prop_oneof![7 => Just(Bytes::ZERO), 1 => mib(0..50)];
    let sane = (mib(64..400), 0..100u64, 0..100u64, quiet.clone(), quiet, faults()).prop_map(
        |(total, free, more, swap_in, swap_out, major_faults)| GuestStats {
            major_faults,
            total: Some(total),
            free: Some(total.percent(free)),
            available: Some(total.percent(free.max(more))),
            swap_in: Some(swap_in),
            swap_out: Some(swap_out),
            ..GuestStats::default()
        },
    );
    let field = || prop::option::of(any_bytes());
    let absurd = (field(), field(), field(), field(), field(), faults()).prop_map(
        |(total, free, available, swap_in, swap_out, major_faults)| GuestStats {
            total,
            free,
            available,
            swap_in,
            swap_out,
            major_faults,
            ..GuestStats::default()
        },
    );
    prop_oneof![6 => sane, 1 => absurd]
}

fn freed() -> impl Strategy<Value = FreePages> {
    (any_bytes(), any_bytes(), any_bytes()).prop_map(|(freed, lazy, handed_over)| FreePages {
        freed,
        lazy,
        handed_over,
        ..FreePages::default()
    })
}

/// Mostly falling curves; also rising ones, and ones with implausible numbers.
fn tracking() -> impl Strategy<Value = Tracking> {
    let absurd = prop::sample::select(vec![-1.0, 1e300, 0.0]);
    let references = prop_oneof![8 => 0.0..1e5f64, 1 => absurd.clone()];
    let ratio = prop_oneof![40 => 0.0..1.0f64, 1 => absurd];
    let point =
        (any_bytes(), ratio).prop_map(|(memory, miss_ratio)| CurvePoint { memory, miss_ratio });
    let curve = (prop::collection::vec(point, 0..6), prop::bool::weighted(0.9));
    let working_set = prop::option::weighted(0.9, any_bytes());
    (working_set, any_bytes(), curve, references, any_bytes()).prop_map(
        |(working_set, swapped, (mut curve, is_falling), references_per_s, granule)| {
            if is_falling {
                curve.sort_by_key(|point| point.memory);
                curve.dedup_by_key(|point| point.memory);
                let mut ratios: Vec<f64> = curve.iter().map(|point| point.miss_ratio).collect();
                ratios.sort_by(|a, b| b.total_cmp(a));
                curve.iter_mut().zip(ratios).for_each(|(point, ratio)| point.miss_ratio = ratio);
            }
            let cost = TrackingCost::default();
            let seen_through = None;
            Tracking { working_set, swapped, curve, references_per_s, granule, seen_through, cost }
        },
    )
}

fn shown() -> impl Strategy<Value = VmFrame> {
    let incarnation = prop_oneof![30 => Just(Some(1)), 1 => Just(Some(2)), 2 => Just(None)];
    let balloon = prop_oneof![
        20 => Just(None),
        1 => Just(Some(None)),
        1 => any_bytes().prop_map(|at| Some(Some(at))),
    ];
    let stats_age = prop_oneof![20 => 0..2_000i64, 1 => 4_900..5_100i64, 1 => -900_000..900_000i64];
    let migration = prop_oneof![
        30 => Just(Migration::None), 1 => Just(Migration::Active), 1 => Just(Migration::Unknown)
    ];
    (
        incarnation,
        prop::bool::weighted(0.95),
        balloon,
        age(),
        prop::option::weighted(0.95, (stats(), stats_age)),
        prop::option::weighted(0.95, (prop::option::weighted(0.1, any_bytes()), age())),
        (
            migration,
            prop::option::weighted(0.3, (freed(), age())),
            prop::option::weighted(0.7, (tracking(), age())),
        ),
    )
        .prop_map(|(incarnation, is_up, balloon, balloon_age, stats, used, others)| VmFrame {
            incarnation,
            is_up,
            balloon,
            balloon_age,
            stats,
            used,
            migration: others.0,
            freed: others.1,
            tracking: others.2,
        })
}

/// Any frame with a host reading from `host`.
pub(crate) fn frame(
    host: impl Strategy<Value = Option<(Bytes, Bytes, u64)>>,
) -> impl Strategy<Value = Frame> {
    let elapsed = prop_oneof![10 => Just(1_000u64), 6 => Just(12_000), 1 => 0..100_000u64];
    let vms = prop::collection::vec(shown(), 0..=VMS);
    (elapsed, host, vms, prop::bool::weighted(0.7))
        .prop_map(|(elapsed, host, vms, is_applied)| Frame { elapsed, host, vms, is_applied })
}

/// Any host reading.
pub(crate) fn any_host() -> impl Strategy<Value = Option<(Bytes, Bytes, u64)>> {
    let sane = (mib(3_000..5_000), mib(0..3_000), age());
    prop_oneof![
        8 => sane.prop_map(Some),
        1 => (any_bytes(), any_bytes(), age()).prop_map(Some),
        1 => Just(None),
    ]
}

/// A host with more memory than the VMs can use.
pub(crate) fn plenty() -> impl Strategy<Value = Option<(Bytes, Bytes, u64)>> {
    Just(Some((Bytes(1 << 50), Bytes(1 << 49), 0)))
}

/// The RAM that the VMs were started with.
pub(crate) fn rams() -> impl Strategy<Value = Vec<Bytes>> {
    let ram = prop_oneof![20 => mib(64..1024), 1 => mib(0..1_000_000)];
    prop::collection::vec(ram, VMS)
}

/// The balloons' sizes at the start; `None`: at base.
pub(crate) fn balloons() -> impl Strategy<Value = Vec<Option<Bytes>>> {
    let stands = prop::option::weighted(0.4, mib(32..600));
    prop_oneof![prop::collection::vec(stands, VMS), Just(vec![None; VMS])]
}

fn limits() -> impl Strategy<Value = LimitsSpec> {
    let often = || prop::option::weighted(0.9, mib(1..600));
    let three = (often(), often(), prop::option::weighted(0.4, mib(1..600)));
    three.prop_map(|(min, base, max)| {
        let three = [min, base, max];
        // Sorts the written values, so that min ≤ base ≤ max with any of them left out.
        let mut written: Vec<Bytes> = three.iter().flatten().copied().collect();
        written.sort();
        let mut next = written.into_iter();
        let mut slot = |value: Option<Bytes>| value.and_then(|_| next.next());
        LimitsSpec { min: slot(three[0]), base: slot(three[1]), max: slot(three[2]) }
    })
}

/// Any configuration that `check` would accept, with one to three groups.
pub(crate) fn spec(mode: impl Strategy<Value = Mode>) -> impl Strategy<Value = Spec> {
    let policy = prop::sample::select(vec![
        Policy::Fair,
        Policy::Entitlement,
        Policy::Demand,
        Policy::Demand,
        Policy::Balance,
        Policy::Balance,
    ]);
    let lend = prop_oneof![
        1 => Just(LendSpec::Open(false)),
        3 => Just(LendSpec::Open(true)),
        2 => "[ab]".prop_map(LendSpec::Circle),
    ];
    let group = (policy, prop::option::weighted(0.3, mib(0..3_000)), limits(), lend);
    let groups = prop::collection::vec(group, 1..=3);
    let swap = prop::option::of(prop::bool::weighted(0.8));
    let swaps = prop::collection::vec((swap, 1..100u32, 0..3u8), VMS);
    let reserve = prop::option::of(mib(0..1_000));
    (groups, swaps, reserve, mode).prop_map(|(groups, swaps, reserve, balloon)| Spec {
        host: HostSpec {
            reserve,
            qmp: vec![],
            state: "state".into(),
            ksm: KsmSpec::Off,
            attach: model::AttachSpec::On,
            grace: model::Millis(0),
        },
        modes: Modes { balloon },
        api: ApiSpec {
            socket: "socket".into(),
            tcp: None,
            token_file: None,
            read_token_file: None,
        },
        overload: OverloadSpec::default(),
        pool: None,
        groups: (0..)
            .zip(groups)
            .map(|(i, (policy, budget, limits, lend))| {
                let vms = vec![NamePattern::new(format!("g{i}-*"))];
                (
                    format!("g{i}").into(),
                    GroupSpec { policy, vms, budget, limits, lend, ..GroupSpec::default() },
                )
            })
            .collect(),
        disks: BTreeMap::new(),
        vms: swaps
            .into_iter()
            .enumerate()
            .map(|(i, (swap, weight, priority))| {
                let share = ShareSpec { weight, priority };
                (name(i), VmSpec { swap, share, ..VmSpec::default() })
            })
            .collect(),
    })
}
