//! The same guests with fixed memory, under each policy, and with enough memory: what balancing is worth (MEB §5.3).
//!
//! Fresh guests each time. What they get done is counted when Overbook has had some time to move memory; a paper's run takes minutes
//! to hours, of which that is a small part.

use std::time::Duration;

use model::{Bytes, DedupSpec, Mode, Policy, TrackingBudget};

use crate::daemon::Settings;
use crate::figures::{Figure, Figures, Target};
use crate::kim::course::{self, Course};
use crate::kim::setting::Setting;
use crate::kim::trial::{geometric_mean, middle};
use crate::lab::LabError;
use crate::machine::MachineSpec;
use crate::scenario::Context;

/// Operations per second of the guests' swap disks: a volume of a cloud, not a hard disk of one's own.
pub const SWAP_IOPS: u32 = 1_000;
const GROUP: &str = "meb";
const SWAP: Bytes = Bytes::mib(1024);

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
    /// How long memory moves before it counts what guests get done …
    pub warm_up: Duration,
    /// … for so long.
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

const WAYS: [Way; 6] = [
    Way::Baseline,
    Way::Under(Policy::Balance),
    Way::Best,
    Way::Under(Policy::Demand),
    Way::Under(Policy::Entitlement),
    Way::Under(Policy::Fair),
];

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
    /// By round and way.
    rounds: Vec<Vec<Course>>,
}

impl Table {
    /// Runs it.
    ///
    /// # Errors
    /// As for [`course::run`].
    pub fn run(self, context: &Context) -> Result<Outcome, LabError> {
        let mut rounds = Vec::new();
        for round in 1..=self.rounds {
            let mut courses = Vec::new();
            for way in WAYS {
                context.say(&format!("round {round}: {} ...", way.name()));
                let (guests, setting) = (self.guests(way, context.seed), self.setting(way));
                let course = course::run(context, &guests, &setting, self.warm_up, self.window)?;
                context.say(&course.in_words());
                courses.push(course);
            }
            rounds.push(courses);
        }
        Ok(Outcome { table: self, rounds })
    }

    fn guests(&self, way: Way, seed: u64) -> Vec<MachineSpec> {
        let guest = |(place, member): (u64, &Member)| {
            let base = if way == Way::Best { member.high } else { member.initial };
            MachineSpec {
                seed: seed + place,
                shim: true,
                ..MachineSpec::new(member.name, GROUP, base, member.high, member.command)
                    .with_swap(SWAP, Some(SWAP_IOPS))
            }
        };
        (0..).zip(self.members).map(guest).collect()
    }

    fn setting(&self, way: Way) -> Setting {
        let daemon = match way {
            Way::Under(policy) => Some(Settings {
                mode: Mode::Enforce,
                dedup: DedupSpec::Off,
                tracking: TrackingBudget::default(),
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

    /// How many times faster each guest is than with fixed memory, and how near to what it does with enough.
    pub fn add_speeds(&self, figures: &mut Figures, paper: &[Paper]) {
        let mut add = |name: &str, value, note: String| {
            let known = paper.iter().find(|(known, ..)| *known == name);
            let target = known.and_then(|(.., least)| *least).map(Target::AtLeast);
            let paper = known.map(|(_, paper, _)| (*paper).to_owned());
            figures.add(name, Figure { paper, target, ..Figure::new(value, "ratio", note) });
        };
        let balance = Way::Under(Policy::Balance);
        let kinds = [
            ("speedup", Way::Baseline, "with fixed memory"),
            ("qos", Way::Best, "with enough memory"),
        ];
        for (kind, other, words) in kinds {
            let mut all = Vec::new();
            for (member, ratios) in self.table.members.iter().zip(self.ratios(balance, other)) {
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

    /// What all guests miss under each policy: major faults.
    pub fn add_misses(&self, figures: &mut Figures) {
        for (index, way) in WAYS.iter().enumerate().filter(|(_, way)| matches!(way, Way::Under(_)))
        {
            let faults = |round: &Vec<Course>| round[index].major_faults();
            let (middle, rounds) = middle(self.rounds.iter().map(faults).collect());
            let note = format!("major faults of all guests, from the beginning; rounds {rounds}");
            figures.add(&format!("misses_{}", way.name()), Figure::new(middle, "count", note));
        }
        let moves = |round: &Vec<Course>| round[1].moves_per_hour();
        let (moves, rounds) = middle(self.rounds.iter().map(moves).collect());
        let note = format!(
            "balloon targets that balance changed, in an hour at this pace; rounds {rounds}"
        );
        figures.add("moves_per_hour", Figure::new(moves, "count", note));
    }
}
