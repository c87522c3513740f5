//! The same guests with fixed memory, under each policy, and with enough memory: the benefit of
//! balancing (MEB §5.3).
//!
//! There are two baselines with fixed memory. In one a guest swaps by itself, to the stated disk,
//! as in the paper. In the other the host pages it out to compressed memory, as it does under a
//! policy: the guest has all that it may have, and the kernel is asked ten times a second for what
//! its QEMU holds above the fixed size. (At a limit that stays, the kernel kills a QEMU in which it
//! finds nothing to reclaim.) So only the first baseline has a slower swap than the policies. The
//! compressed memory counts for no guest there, and for the group under a policy, whose budget is
//! the sum of the guests' fixed memory.
//!
//! Every round has all courses, so each ratio is of two courses of one round.
//!
//! Each course has fresh guests. The work that they get done counts after Overbook has had some
//! time to move memory. A run of the paper takes minutes to hours, of which that time is a small
//! part.
//!
//! Guests have no huge pages. Swap and a balloon split them, so a guest with enough memory would
//! have more of them than the others. Their effect under emulation says nothing about a real CPU.

use std::time::Duration;

use model::{Bytes, ColdSpec, Mode, Policy};

use crate::arms::{ArmOrder, Arms, across, geometric_mean};
use crate::background::Background;
use crate::daemon::DaemonSettings;
use crate::figures::{Figure, Figures};
use crate::kim::course::{self, SharingRun};
use crate::kim::setting::Setting;
use crate::lab::LabError;
use crate::machine::MachineSpec;
use crate::meb::progress;
use crate::memory_group::MemoryGroup;
use crate::recording::{Extremes, mean, median};
use crate::scenario::Context;
use crate::zram::Zram;

const GROUP: &str = "meb";
/// Each guest's swap disk, and its operations per second: a general volume of a cloud.
const SWAP: Bytes = Bytes::mib(1024);
const SWAP_IOPS: u32 = 3_000;
/// Rounds of all arms.
pub const ROUNDS: u32 = 3;
/// The longest warm-up where no memory moves, because such guests soon reach a steady state.
const MOST_WARM_UP_FIXED: Duration = Duration::from_secs(60);
/// Time between two requests to page out what a guest holds above its fixed memory.
const HOLD_EVERY: Duration = Duration::from_millis(100);
const SMALL_PAGES: &str = "transparent_hugepage=never";

/// One guest.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Its name in figures.
    pub name: &'static str,
    /// The command that it runs.
    pub command: &'static str,
    pub initial: Bytes,
    /// The most memory that it may have.
    pub high: Bytes,
}

#[derive(Debug, Clone, Copy)]
pub struct Table {
    pub members: &'static [Member],
    /// The least memory that each guest keeps.
    pub low: Bytes,
    /// Warm-up: guests run, and memory moves, before their work counts. Where no memory moves, it
    /// is a minute at most.
    pub warm_up: Duration,
    /// Length of the measurement, which also ends when the guests' work has ended.
    pub window: Duration,
}

/// The regime that guests run under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BalanceArm {
    /// Each guest keeps its initial memory, and swaps to its own disk.
    Baseline,
    /// Each guest keeps its initial memory, and the host pages it out to compressed memory.
    SameSwap,
    /// Overbook moves memory.
    Under(Policy),
    /// Each guest has the most memory that it may have.
    Best,
}

const BALANCE: BalanceArm = BalanceArm::Under(Policy::Balance);
/// The arms of every round.
const ARMS: [BalanceArm; 7] = [
    BalanceArm::Baseline,
    BalanceArm::SameSwap,
    BALANCE,
    BalanceArm::Under(Policy::Demand),
    BalanceArm::Under(Policy::Entitlement),
    BalanceArm::Under(Policy::Fair),
    BalanceArm::Best,
];
const POLICIES: [Policy; 4] = [Policy::Balance, Policy::Demand, Policy::Entitlement, Policy::Fair];

impl BalanceArm {
    fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::SameSwap => "baseline on zram",
            Self::Best => "best",
            Self::Under(policy) => policy.name(),
        }
    }
}

#[derive(Debug)]
pub struct BalanceResult {
    table: Table,
    courses: Arms<SharingRun>,
}

impl Table {
    pub fn run(self, context: &Context) -> Result<BalanceResult, LabError> {
        let mut courses = Arms::default();
        for number in 1..=ROUNDS {
            context.say(&format!("Round {number} of {ROUNDS} ..."));
            let arms = ARMS.map(|arm| (arm.name(), arm));
            courses.turn(ArmOrder::Listed, &arms, |_, arm| self.course(context, *arm))?;
        }
        Ok(BalanceResult { table: self, courses })
    }

    /// Runs under balance alone: how often memory moves, and whether that rate falls.
    pub fn moves(self, context: &Context, mut figures: Figures) -> Result<Figures, LabError> {
        let course = self.course(context, BALANCE)?;
        add_moves(&mut figures, &[&course]);
        let note = "the same in the second half of the time";
        figures.tell("moves_per_hour_later", course.second_half().moves_per_hour(), "count", note);
        Ok(figures)
    }

    fn course(&self, context: &Context, way: BalanceArm) -> Result<SharingRun, LabError> {
        context.say(&format!("{} ...", way.name()));
        let (guests, setting) = (self.guests(way, context.seed), self.setting(way));
        let warm_up = self.warm_up(way);
        let all: Bytes = self.members.iter().map(|member| member.high).sum();
        let has_zram = matches!(way, BalanceArm::Under(_) | BalanceArm::SameSwap);
        let _swap = has_zram.then(|| Zram::new(all)).transpose()?;
        match way {
            BalanceArm::SameSwap => self.held(context, guests, &setting),
            _ => course::run(context, &guests, &setting, warm_up, self.window),
        }
    }

    /// A course in which the host pages out what each guest holds above its initial memory.
    fn held(
        &self,
        context: &Context,
        mut guests: Vec<MachineSpec>,
        setting: &Setting,
    ) -> Result<SharingRun, LabError> {
        let mut groups = Vec::new();
        for guest in &mut guests {
            let group = MemoryGroup::new(&format!("{GROUP}-{}", guest.name))?;
            guest.cgroup = Some(group.dir().to_owned());
            groups.push(group);
        }
        let lab = context.start(guests)?;
        progress::wait_until_working(&lab)?;
        let mut most = Vec::new();
        for ((machine, group), member) in lab.machines().iter().zip(&groups).zip(self.members) {
            // QEMU's own memory, and its page tables, are not the guest's.
            most.push(group.usage()?.plus(member.initial).minus(machine.overhead()?.guest));
        }
        // The groups go with it, once their guests have ended.
        let _hold = Background::start("hold", move |stop| {
            while !stop.is_given() {
                for (group, most) in groups.iter().zip(&most) {
                    // A guest that has just ended has no group that could be asked.
                    let is_above = group.usage().is_ok_and(|usage| usage > *most);
                    let _ = is_above.then(|| group.reclaim_to(*most));
                }
                std::thread::sleep(HOLD_EVERY);
            }
        })?;
        let warm_up = self.warm_up(BalanceArm::SameSwap);
        let course = course::follow(lab, setting, warm_up, self.window)?;
        context.say(&course.in_words());
        Ok(course)
    }

    fn warm_up(&self, way: BalanceArm) -> Duration {
        let moves = matches!(way, BalanceArm::Under(_));
        if moves { self.warm_up } else { self.warm_up.min(MOST_WARM_UP_FIXED) }
    }

    fn guests(&self, way: BalanceArm, seed: u64) -> Vec<MachineSpec> {
        let guest = |(place, member): (u64, &Member)| {
            let base = match way {
                BalanceArm::Best | BalanceArm::SameSwap => member.high,
                BalanceArm::Baseline | BalanceArm::Under(_) => member.initial,
            };
            MachineSpec {
                seed: seed + place,
                shim: true,
                kernel_options: SMALL_PAGES.to_owned(),
                ..MachineSpec::new(member.name, GROUP, base, member.high, member.command)
                    .with_swap(SWAP, Some(SWAP_IOPS))
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
            BalanceArm::Baseline | BalanceArm::SameSwap | BalanceArm::Best => None,
        };
        Setting { name: way.name(), daemon }
    }
}

impl BalanceResult {
    /// Under each policy: the speed-up of each guest over fixed memory, with the paper's swap and
    /// with the policies' own, and its speed relative to enough memory. The names of the figures
    /// of a policy other than `balance` end with that.
    pub fn add_speeds(&self, figures: &mut Figures) {
        let kinds = [
            ("speedup", BalanceArm::Baseline, "with fixed memory and its own disk"),
            ("speedup_zram", BalanceArm::SameSwap, "with fixed memory and the same swap"),
            ("qos", BalanceArm::Best, "with enough memory"),
        ];
        for policy in POLICIES {
            let is_balance = policy == Policy::Balance;
            let end = if is_balance { String::new() } else { format!("_{}", policy.name()) };
            for (kind, other, words) in kinds {
                let of = |guest: usize| {
                    let speed = |course: &SharingRun| course.speed(guest);
                    self.courses.ratios(policy.name(), other.name(), speed)
                };
                let ratios: Vec<Vec<f64>> = (0..self.table.members.len()).map(of).collect();
                for (member, each) in self.table.members.iter().zip(&ratios) {
                    let note = format!("{}: its speed to that {words}", member.command);
                    let name = format!("{kind}_{}{end}", member.name);
                    figures.tell_rounds(&name, each.clone(), "ratio", note);
                }
                let geometric = median(across(&ratios, geometric_mean));
                let note =
                    format!("of all guests, to that {words}; their geometric mean {geometric:.2}");
                let means = across(&ratios, mean);
                figures.tell_rounds(&format!("{kind}_mean{end}"), means, "ratio", note);
                let least = across(&ratios, |guests| guests.into_iter().smallest());
                let note = "of the guest that has it worst";
                figures.tell_rounds(&format!("{kind}_min{end}"), least, "ratio", note);
            }
        }
    }

    /// Misses of all guests under each policy, and the rate at which memory moves.
    pub fn add_misses(&self, figures: &mut Figures) {
        let misses = POLICIES.map(|policy| self.courses.each(policy.name(), SharingRun::misses));
        for (policy, misses) in POLICIES.iter().zip(&misses) {
            let note = "of all guests, in their swap and the host's";
            figures.tell_rounds(
                &format!("misses_{}", policy.name()),
                misses.clone(),
                "count",
                note,
            );
        }
        let [balance, others @ ..] = &misses;
        figures.add("misses_to_next", misses_to_next(balance, others));
        add_moves(figures, &self.courses.of(BALANCE.name()).collect::<Vec<_>>());
    }
}

/// In each round: the misses of the policy that comes next, to those of `balance`.
fn misses_to_next(balance: &[f64], others: &[Vec<f64>]) -> Figure {
    let next = across(others, |misses| misses.into_iter().smallest());
    let ratios = across(&[next, balance.to_vec()], |both| both[0] / both[1]);
    let note = "of the policy that comes next to what balance misses in the same round";
    Figure::of_rounds(ratios, "ratio", note)
}

fn add_moves(figures: &mut Figures, courses: &[&SharingRun]) {
    let mut add = |name: &str, measure: fn(&SharingRun) -> f64, note: &str| {
        let rounds = courses.iter().map(|course| measure(course)).collect();
        figures.tell_rounds(name, rounds, "count", note);
    };
    let words = "targets that balance changed, in an hour at this pace";
    add("moves_per_hour", SharingRun::moves_per_hour, words);
    let words = "of a guest that balance took from and gave to in turn";
    add("reversals_per_hour", SharingRun::reversals_per_hour, words);
}

#[cfg(test)]
mod tests;
