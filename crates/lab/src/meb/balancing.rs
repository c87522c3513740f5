//! The same guests with fixed memory, under each policy, and with enough memory: the benefit of
//! balancing (MEB §5.3).
//!
//! With fixed memory a guest swaps by itself, to the stated disk, as in the paper. Under a policy
//! the host pages out memory that guests do not touch, to compressed memory. The group is charged
//! for that compressed memory; its budget is the sum of the guests' fixed memory.
//!
//! Each course has fresh guests. The work that they get done counts after Overbook has had some
//! time to move memory. A run of the paper takes minutes to hours, of which that time is a small
//! part.
//!
//! Guests have no huge pages. Swap and a balloon split them, so a guest with enough memory would
//! have more of them than the others. Their effect under emulation says nothing about a real CPU.

use std::time::Duration;

use model::{Bytes, ColdSpec, Mode, Policy};

use crate::daemon::DaemonSettings;
use crate::figures::{Figure, Figures, Target};
use crate::kim::course::{self, SharingRun};
use crate::kim::setting::Setting;
use crate::kim::trial::{geometric_mean, middle};
use crate::lab::LabError;
use crate::machine::MachineSpec;
use crate::scenario::Context;
use crate::zram::Zram;

const GROUP: &str = "meb";
const SWAP: Bytes = Bytes::mib(1024);
/// Limit per hour, as asserted for simulated guests: ten in twenty minutes.
const MOST_REVERSALS: f64 = 30.0;
/// The simulated guests' limit for the second ten minutes: fifty.
const MOST_MOVES_LATER: f64 = 300.0;
/// The longest warm-up where no memory moves, because such guests soon reach a steady state.
const MOST_WARM_UP_FIXED: Duration = Duration::from_secs(60);
const SMALL_PAGES: &str = "transparent_hugepage=never";

/// One guest.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Its name in figures.
    pub name: &'static str,
    /// The command that it runs.
    pub command: &'static str,
    /// Memory that it has at first.
    pub initial: Bytes,
    /// The most memory that it may have.
    pub high: Bytes,
}

/// One of the paper's tables.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// The guests.
    pub members: &'static [Member],
    /// The least memory that each guest keeps.
    pub low: Bytes,
    /// Operations per second of each guest's swap disk.
    pub swap_iops: u32,
    /// Warm-up: guests run, and memory moves, before their work counts. Where no memory moves, it
    /// is a minute at most.
    pub warm_up: Duration,
    /// Length of the measurement, which also ends when the guests' work has ended.
    pub window: Duration,
    /// Number of rounds.
    pub rounds: u32,
}

/// The regime that guests run under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BalanceArm {
    /// Each guest keeps its initial memory.
    Baseline,
    /// Overbook moves memory.
    Under(Policy),
    /// Each guest has the most memory that it may have.
    Best,
}

const BALANCE: BalanceArm = BalanceArm::Under(Policy::Balance);
/// The ways of every round.
const WAYS: [BalanceArm; 3] = [BalanceArm::Baseline, BALANCE, BalanceArm::Best];
/// The further ways of the first round.
const OTHERS: [BalanceArm; 3] = [
    BalanceArm::Under(Policy::Demand),
    BalanceArm::Under(Policy::Entitlement),
    BalanceArm::Under(Policy::Fair),
];

impl BalanceArm {
    fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Best => "best",
            Self::Under(policy) => policy.name(),
        }
    }
}

/// A figure's name, the paper's result, and the least value of its target.
pub type Paper = (&'static str, &'static str, Option<f64>);

/// The courses of all rounds.
#[derive(Debug)]
pub struct BalanceResult {
    table: Table,
    /// By round, and by [`WAYS`].
    rounds: Vec<Vec<SharingRun>>,
    /// By [`OTHERS`].
    others: Vec<SharingRun>,
}

impl Table {
    /// Runs all rounds.
    ///
    /// # Errors
    /// As for [`course::run`].
    pub fn run(self, context: &Context) -> Result<BalanceResult, LabError> {
        let courses = |ways: [BalanceArm; 3]| {
            ways.into_iter().map(|way| self.course(context, way)).collect::<Result<_, LabError>>()
        };
        let mut rounds = vec![courses(WAYS)?];
        let others = courses(OTHERS)?;
        for _ in 1..self.rounds {
            rounds.push(courses(WAYS)?);
        }
        Ok(BalanceResult { table: self, rounds, others })
    }

    /// Runs under balance alone: how often memory moves, and whether that rate falls.
    ///
    /// # Errors
    /// As for [`course::run`].
    pub fn moves(self, context: &Context, mut figures: Figures) -> Result<Figures, LabError> {
        let course = self.course(context, BALANCE)?;
        add_moves(&mut figures, &[&course], Some(Target::AtMost(MOST_REVERSALS)));
        let note = "the same in the second half of the time";
        let later = Figure::new(course.second_half().moves_per_hour(), "count", note);
        figures.add("moves_per_hour_later", later.target(Target::AtMost(MOST_MOVES_LATER)));
        Ok(figures)
    }

    fn course(&self, context: &Context, way: BalanceArm) -> Result<SharingRun, LabError> {
        context.say(&format!("{} ...", way.name()));
        let (guests, setting) = (self.guests(way, context.seed), self.setting(way));
        let warm_up = self.warm_up(way);
        let all: Bytes = self.members.iter().map(|member| member.high).sum();
        let _swap = setting.daemon.is_some().then(|| Zram::new(all)).transpose()?;
        let course = course::run(context, &guests, &setting, warm_up, self.window)?;
        context.say(&course.in_words());
        Ok(course)
    }

    fn warm_up(&self, way: BalanceArm) -> Duration {
        let moves = matches!(way, BalanceArm::Under(_));
        if moves { self.warm_up } else { self.warm_up.min(MOST_WARM_UP_FIXED) }
    }

    fn guests(&self, way: BalanceArm, seed: u64) -> Vec<MachineSpec> {
        let guest = |(place, member): (u64, &Member)| {
            let base = if way == BalanceArm::Best { member.high } else { member.initial };
            MachineSpec {
                seed: seed + place,
                shim: true,
                kernel_options: SMALL_PAGES.to_owned(),
                ..MachineSpec::new(member.name, GROUP, base, member.high, member.command)
                    .with_swap(SWAP, Some(self.swap_iops))
            }
        };
        (0..).zip(self.members).map(guest).collect()
    }

    fn setting(&self, way: BalanceArm) -> Setting {
        let daemon = match way {
            BalanceArm::Under(policy) => Some(DaemonSettings {
                cold: ColdSpec::WhenNeeded,
                policy,
                guaranteed: Some(self.low),
                ..Mode::Enforce.into()
            }),
            BalanceArm::Baseline | BalanceArm::Best => None,
        };
        Setting { name: way.name(), daemon }
    }
}

impl BalanceResult {
    /// The ratio of each guest's speed under `one` to its speed under `other`, by guest and
    /// round.
    fn ratios(&self, one: BalanceArm, other: BalanceArm) -> Vec<Vec<f64>> {
        let at = |way| WAYS.iter().position(|known| *known == way).unwrap_or_default();
        let (one, other) = (at(one), at(other));
        let of = |guest: usize| {
            let ratio =
                |round: &Vec<SharingRun>| round[one].speeds[guest] / round[other].speeds[guest];
            self.rounds.iter().map(ratio).collect()
        };
        (0..self.table.members.len()).map(of).collect()
    }

    /// The speed-up of each guest over fixed memory, and its speed relative to enough memory.
    pub fn add_speeds(&self, figures: &mut Figures, paper: &[Paper]) {
        let mut add = |name: &str, value, note: String| {
            let known = paper.iter().find(|(known, ..)| *known == name);
            let target = known.and_then(|(.., least)| *least).map(Target::AtLeast);
            let paper = known.map(|(_, paper, _)| (*paper).to_owned());
            figures.add(name, Figure { paper, target, ..Figure::new(value, "ratio", note) });
        };
        let kinds = [
            ("speedup", BalanceArm::Baseline, "with fixed memory"),
            ("qos", BalanceArm::Best, "with enough memory"),
        ];
        for (kind, other, words) in kinds {
            let mut all = Vec::new();
            for (member, ratios) in self.table.members.iter().zip(self.ratios(BALANCE, other)) {
                let (ratio, rounds) = middle(ratios);
                all.push(ratio);
                let name = format!("{kind}_{}", member.name);
                let note =
                    format!("{}: its speed to that {words}; rounds {rounds}", member.command);
                add(&name, ratio, note);
            }
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let note =
                format!("of all guests; their geometric mean {:.2}", geometric_mean(all.clone()));
            add(&format!("{kind}_mean"), mean, note);
            let least = all.into_iter().fold(f64::INFINITY, f64::min);
            add(&format!("{kind}_min"), least, "of the guest that has it worst".to_owned());
        }
    }

    /// Misses of all guests under each policy, and the rate at which memory moves.
    pub fn add_misses(&self, figures: &mut Figures) {
        let balanced: Vec<&SharingRun> = self.rounds.iter().map(|round| &round[1]).collect();
        let (misses, rounds) = middle(balanced.iter().map(|course| course.misses()).collect());
        let note = format!("of all guests, in their swap and the host's; rounds {rounds}");
        figures.add("misses_balance", Figure::new(misses, "count", note));
        let mut least = f64::INFINITY;
        for (way, course) in OTHERS.iter().zip(&self.others) {
            let (misses, note) = (course.misses(), "beside the first round");
            least = least.min(misses);
            figures.add(&format!("misses_{}", way.name()), Figure::new(misses, "count", note));
        }
        let ratio = least / balanced[0].misses();
        let note = "of the policy that comes next to what balance misses in the same round";
        figures
            .add("misses_to_next", Figure::new(ratio, "ratio", note).target(Target::AtLeast(1.0)));
        add_moves(figures, &balanced, None);
    }
}

fn add_moves(figures: &mut Figures, courses: &[&SharingRun], most_reversals: Option<Target>) {
    let mut add = |name: &str, measure: fn(&SharingRun) -> f64, target, words: &str| {
        let (value, rounds) = middle(courses.iter().map(|course| measure(course)).collect());
        let note = format!("{words}; rounds {rounds}");
        figures.add(name, Figure { target, ..Figure::new(value, "count", note) });
    };
    let words = "targets that balance changed, in an hour at this pace";
    add("moves_per_hour", SharingRun::moves_per_hour, None, words);
    let words = "of a guest that balance took from and gave to in turn";
    add("reversals_per_hour", SharingRun::reversals_per_hour, most_reversals, words);
}
