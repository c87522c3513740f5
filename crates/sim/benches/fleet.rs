//! 1,000 VMs whose memory is balanced, on curves recorded in real guests.
//!
//! Each VM draws one of the ten recordings of `meb-accuracy` (the true curves: every access of a
//! guest was seen), a scale of 1 to 15 for its size, a pace, and the place at which the recording
//! begins. The group pays for 85 % of the memory that the VMs want on average. Second by second
//! the policy sees a tracker's view: the curve up to the VM's memory. Every five seconds the VMs'
//! misses are compared with the least possible under the same budget. The solver finds these from
//! the whole curves.
//!
//! The bench runs twice: once each VM stays where its recording begins, once it goes through the
//! recording.

use std::{sync::Arc, time::Instant};

use fastrand::Rng;
use model::{
    Bytes, Policy,
    ports::{Act as _, Clock as _, Sense as _},
};
use policy::{
    Memory,
    optimum::{Choice, place},
};
use serde::Deserialize;
use sim::{Access, Fake, Host, Load, Scenario, SimClock, TURN, limits};

const RECORDINGS: &str = include_str!("curves.json");
const VMS: u32 = 1_000;
const SECONDS: u64 = 600;
/// Seconds that are not compared, while memory moves to its places.
const WARM_UP: u64 = 120;
const SCALE: (f64, f64) = (1.0, 15.0);
const PACE: (f64, f64) = (0.2, 5.0);
const MIN: Bytes = Bytes::mib(64);
const MAX: Bytes = Bytes::mib(4096);
const PAYS_PERCENT: u64 = 85;
const UNIT: Bytes = Bytes::mib(4);

#[derive(Deserialize)]
struct Recording {
    name: String,
    every_s: u64,
    curves: Vec<Curve>,
}

#[derive(Deserialize)]
struct Curve {
    references_per_s: f64,
    /// Memory in MiB, and the share of references that miss with that memory.
    points: Vec<(f64, f64)>,
}

/// Results of one run.
#[derive(Default)]
struct FleetResult {
    /// Sum over all comparisons, as is `least`.
    misses: f64,
    least: f64,
    moves: usize,
    tick_ms: Vec<f64>,
}

fn main() {
    let recordings: Vec<Recording> =
        serde_json::from_str(RECORDINGS).expect("the recordings are what meb-accuracy wrote");
    let names: Vec<&str> = recordings.iter().map(|recording| recording.name.as_str()).collect();
    assert!(recordings.iter().all(|recording| recording.every_s == TURN));
    println!("{VMS} VMs for {SECONDS} s, of {}", names.join(", "));
    let mut late = Vec::new();
    for (kind, moving) in [("staying", false), ("going on", true)] {
        for policy in [Policy::Balance, Policy::Demand, Policy::Entitlement, Policy::Fair] {
            let fleet = fleet(&recordings, policy, moving);
            let FleetResult { misses, least, moves, mut tick_ms } = run(&fleet);
            tick_ms.sort_by(f64::total_cmp);
            let (median, longest) = (tick_ms[tick_ms.len() / 2], tick_ms[tick_ms.len() - 1]);
            let hours = (SECONDS - WARM_UP) as f64 / 3600.0;
            println!(
                "{kind}, {policy:?}: {:.3} of the least misses ({:.0} per VM and second), {:.0} moves per VM and hour, a tick takes \
                 {median:.1} ms, at most {longest:.1}",
                misses / least,
                least / f64::from(VMS) / comparisons(),
                moves as f64 / hours / f64::from(VMS),
            );
            if policy == Policy::Balance && median >= 20.0 {
                late.push(format!("{kind}: {median:.1} ms"));
            }
        }
    }
    assert!(late.is_empty(), "too slow: {late:?}");
}

fn comparisons() -> f64 {
    ((SECONDS - WARM_UP) / TURN) as f64
}

fn fleet(recordings: &[Recording], policy: Policy, moving: bool) -> Scenario {
    let mut rng = Rng::with_seed(1);
    let mut wanted = 0;
    let fakes: Vec<Fake> = (0..VMS)
        .map(|number| {
            let recording = &recordings[rng.usize(0..recordings.len())];
            let (scale, pace) = (between(SCALE, &mut rng), between(PACE, &mut rng));
            let mut curves: Vec<&Curve> = recording.curves.iter().collect();
            curves.rotate_left(rng.usize(0..recording.curves.len()));
            curves.truncate(if moving { curves.len() } else { 1 });
            let sizes: Arc<[Bytes]> = curves.iter().map(|curve| curve.wants(scale)).collect();
            wanted += sizes.iter().map(|size| Fake::KERNEL.plus(*size).0).sum::<u64>()
                / sizes.len() as u64;
            Fake {
                accesses: curves.iter().map(|curve| curve.access(pace)).collect(),
                ..Fake::new(format!("{number}"), Load::InTurn(sizes))
                    .with_ram(MAX.0 >> 20)
                    .hoarding()
            }
        })
        .collect();
    let budget = Bytes(wanted).percent(PAYS_PERCENT);
    let initial = budget.share(1, VMS.into()).0 >> 20;
    let fakes = fakes.into_iter().map(|fake| fake.standing_at(initial));
    Scenario::new(1)
        .host(8 << 20, 1024, Load::steady(Bytes::ZERO))
        .group("all", policy, limits(MIN.0 >> 20, MIN.0 >> 20, MAX.0 >> 20), fakes)
        .paying("all", budget.0 >> 20)
        .paging("all")
}

impl Curve {
    fn end(&self) -> f64 {
        self.points.last().map_or(0.0, |point| point.0)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    fn wants(&self, scale: f64) -> Bytes {
        Bytes::mib((self.end() * scale) as u64)
    }

    fn access(&self, pace: f64) -> Access {
        let share = |(mib, ratio): &(f64, f64)| (mib / self.end(), *ratio);
        Access {
            references_per_s: self.references_per_s * pace,
            curve: self.points.iter().map(share).collect(),
        }
    }
}

/// A random number, as likely between 1 and 2 as between 2 and 4.
fn between((low, high): (f64, f64), rng: &mut Rng) -> f64 {
    low * (high / low).powf(rng.f64())
}

fn run(scenario: &Scenario) -> FleetResult {
    let (mut host, mut memory, mut shown) =
        (scenario.begin(), Memory::default(), FleetResult::default());
    let budget = scenario.spec().groups.values().find_map(|group| group.budget).unwrap_or_default();
    for second in 0..SECONDS {
        host.live(second);
        let (view, now) = (host.view(), SimClock::at(second).now());
        let start = Instant::now();
        let plan = policy::tick(&view, scenario.spec(), &mut memory, now);
        let took = start.elapsed();
        if second >= WARM_UP {
            shown.tick_ms.push(took.as_secs_f64() * 1e3);
            shown.moves += plan.vms.values().filter(|decision| decision.change.is_some()).count();
            if (second + 1).is_multiple_of(TURN) {
                let misses =
                    |guest: &sim::Guest| guest.misses_with(guest.actual).unwrap_or_default();
                shown.misses += host.guests.iter().map(misses).sum::<f64>();
                shown.least += least(&host, budget);
            }
        }
        plan.actions().iter().for_each(|action| host.act(action));
    }
    shown
}

/// The least misses of all guests together that are possible in this second with `budget`.
fn least(host: &Host, budget: Bytes) -> f64 {
    let units = |size: Bytes| u32::try_from(size.0 / UNIT.0).unwrap_or(u32::MAX);
    let choice = |guest: &sim::Guest| Choice {
        least: units(MIN),
        misses: (units(MIN)..=units(MAX))
            .map(|at| guest.misses_with(Bytes(UNIT.0 * u64::from(at))).unwrap_or_default())
            .collect(),
    };
    let choices: Vec<Choice> = host.guests.iter().map(choice).collect();
    place(&choices, budget.0 / UNIT.0).misses
}
