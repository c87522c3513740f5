//! The same guests with fixed memory, under each policy, and with enough memory: what balancing is
//! worth (MEB §5.3).
//!
//! With fixed memory a guest swaps by itself, to the stated disk, as in the paper. Under a policy
//! the host pages out what guests do not touch, to compressed memory; what that takes is charged to
//! the group, whose memory is as much as all guests have where it is fixed.
//!
//! Fresh guests each time. What they get done is counted when Overbook has had some time to move
//! memory; a paper's run takes minutes to hours, of which that is a small part.
//!
//! Guests have no huge pages: swap and a balloon take them apart, so that a guest with enough
//! memory would have others than the rest, and how much that matters under emulation says nothing
//! of a CPU.

use std::time::Duration;

use model::{Bytes, ColdSpec, DedupSpec, FreePagesSpec, Mode, Policy, TrackingBudget};

use crate::daemon::Settings;
use crate::figures::{Figure, Figures, Target};
use crate::kim::course::{self, Course};
use crate::kim::setting::Setting;
use crate::kim::trial::{geometric_mean, middle};
use crate::lab::LabError;
use crate::machine::MachineSpec;
use crate::scenario::Context;
use crate::zram::Zram;

const GROUP: &str = "meb";
const SWAP: Bytes = Bytes::mib(1024);
/// What is asserted of simulated guests: ten in twenty minutes.
const MOST_REVERSALS: f64 = 30.0;
/// … and fifty in the second ten.
const MOST_MOVES_LATER: f64 = 300.0;
/// Where no memory moves, guests are soon as they stay.
const MOST_WARM_UP_FIXED: Duration = Duration::from_secs(60);
const SMALL_PAGES: &str = "transparent_hugepage=never";

/// One guest.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Its name in figures.
    pub name: &'static str,
    /// What it runs.
    pub command: &'static str,
    /// What it has at first.
    pub initial: Bytes,
    /// What it may have at most.
    pub high: Bytes,
}

/// One of the paper's tables.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// The guests.
    pub members: &'static [Member],
    /// What each is left at least.
    pub low: Bytes,
    /// Operations per second of each guest's swap disk.
    pub swap_iops: u32,
    /// How long guests run, and memory moves, before it counts what they get done; where none
    /// moves, a minute at most …
    pub warm_up: Duration,
    /// … for so long, or until their work has ended.
    pub window: Duration,
    /// So many times.
    pub rounds: u32,
}

/// Under what guests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Each keeps what it has at first.
    Baseline,
    /// Overbook moves memory.
    Under(Policy),
    /// Each has as much as it may have.
    Best,
}

const BALANCE: Way = Way::Under(Policy::Balance);
/// In every round.
const WAYS: [Way; 3] = [Way::Baseline, BALANCE, Way::Best];
/// Beside the first round's.
const OTHERS: [Way; 3] =
    [Way::Under(Policy::Demand), Way::Under(Policy::Entitlement), Way::Under(Policy::Fair)];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Best => "best",
            Self::Under(Policy::Balance) => "balance",
            Self::Under(Policy::Demand) => "demand",
            Self::Under(Policy::Entitlement) => "entitlement",
            Self::Under(Policy::Fair) => "fair",
        }
    }
}

/// A figure's name, what the paper measured, and what it is to be at least.
pub type Paper = (&'static str, &'static str, Option<f64>);

/// What all rounds have shown.
#[derive(Debug)]
pub struct Outcome {
    table: Table,
    /// By round, and by [`WAYS`].
    rounds: Vec<Vec<Course>>,
    /// By [`OTHERS`].
    others: Vec<Course>,
}

impl Table {
    /// Runs it.
    ///
    /// # Errors
    /// As for [`course::run`].
    pub fn run(self, context: &Context) -> Result<Outcome, LabError> {
        let courses = |ways: [Way; 3]| {
            ways.into_iter().map(|way| self.course(context, way)).collect::<Result<_, LabError>>()
        };
        let mut rounds = vec![courses(WAYS)?];
        let others = courses(OTHERS)?;
        for _ in 1..self.rounds {
            rounds.push(courses(WAYS)?);
        }
        Ok(Outcome { table: self, rounds, others })
    }

    /// Under balance alone: how often memory moves, and whether that dies down.
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

    fn course(&self, context: &Context, way: Way) -> Result<Course, LabError> {
        context.say(&format!("{} ...", way.name()));
        let (guests, setting) = (self.guests(way, context.seed), self.setting(way));
        let warm_up = self.warm_up(way);
        let all: Bytes = self.members.iter().map(|member| member.high).sum();
        let _swap = setting.daemon.is_some().then(|| Zram::new(all)).transpose()?;
        let course = course::run(context, &guests, &setting, warm_up, self.window)?;
        context.say(&course.in_words());
        Ok(course)
    }

    fn warm_up(&self, way: Way) -> Duration {
        let moves = matches!(way, Way::Under(_));
        if moves { self.warm_up } else { self.warm_up.min(MOST_WARM_UP_FIXED) }
    }

    fn guests(&self, way: Way, seed: u64) -> Vec<MachineSpec> {
        let guest = |(place, member): (u64, &Member)| {
            let base = if way == Way::Best { member.high } else { member.initial };
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

    fn setting(&self, way: Way) -> Setting {
        let daemon = match way {
            Way::Under(policy) => Some(Settings {
                mode: Mode::Enforce,
                dedup: DedupSpec::Off,
                free_pages: FreePagesSpec::Off,
                tracking: TrackingBudget::default(),
                cold: ColdSpec::WhenNeeded,
                policy,
                lend: false,
                guaranteed: Some(self.low),
            }),
            Way::Baseline | Way::Best => None,
        };
        Setting { name: way.name(), daemon }
    }
}

impl Outcome {
    /// The speed of each guest under one way to that under another, by guest and round.
    fn ratios(&self, one: Way, other: Way) -> Vec<Vec<f64>> {
        let at = |way| WAYS.iter().position(|known| *known == way).unwrap_or_default();
        let (one, other) = (at(one), at(other));
        let of = |guest: usize| {
            let ratio = |round: &Vec<Course>| round[one].speeds[guest] / round[other].speeds[guest];
            self.rounds.iter().map(ratio).collect()
        };
        (0..self.table.members.len()).map(of).collect()
    }

    /// How many times faster each guest is than with fixed memory, and how near to what it does
    /// with enough.
    pub fn add_speeds(&self, figures: &mut Figures, paper: &[Paper]) {
        let mut add = |name: &str, value, note: String| {
            let known = paper.iter().find(|(known, ..)| *known == name);
            let target = known.and_then(|(.., least)| *least).map(Target::AtLeast);
            let paper = known.map(|(_, paper, _)| (*paper).to_owned());
            figures.add(name, Figure { paper, target, ..Figure::new(value, "ratio", note) });
        };
        let kinds = [
            ("speedup", Way::Baseline, "with fixed memory"),
            ("qos", Way::Best, "with enough memory"),
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

    /// What all guests miss under each policy, and how often memory moves.
    pub fn add_misses(&self, figures: &mut Figures) {
        let balanced: Vec<&Course> = self.rounds.iter().map(|round| &round[1]).collect();
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

fn add_moves(figures: &mut Figures, courses: &[&Course], most_reversals: Option<Target>) {
    let mut add = |name: &str, measure: fn(&Course) -> f64, target, words: &str| {
        let (value, rounds) = middle(courses.iter().map(|course| measure(course)).collect());
        let note = format!("{words}; rounds {rounds}");
        figures.add(name, Figure { target, ..Figure::new(value, "count", note) });
    };
    let words = "targets that balance changed, in an hour at this pace";
    add("moves_per_hour", Course::moves_per_hour, None, words);
    let words = "of a guest that balance took from and gave to in turn";
    add("reversals_per_hour", Course::reversals_per_hour, most_reversals, words);
}
