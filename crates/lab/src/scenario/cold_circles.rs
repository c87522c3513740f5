//! `cold-circles`: four busy guests on a host that has 0.6 of the memory that they hold. Does
//! paging by Overbook cost them more than the kernel's reclaim alone?
//!
//! All four run in one memory cgroup whose limit is the host's memory, in both arms:
//!
//! * **kernel**: nothing else;
//! * **ours**: Overbook's daemon holds their group to the same memory, in addition. Nothing is
//!   loaded into their QEMUs.
//!
//! Both swap to the same compressed memory. The scenario compares each guest's work, and the time
//! that the host's CPUs spend in the kernel. Pages that go out and come back again and again
//! (circles) show in that time, and in the rate of reading back. It needs root.

use std::path::Path;

use model::{ColdSpec, Policy};

use super::prelude::*;
use crate::meb::progress::Lines;
use crate::swap_file::Swapped;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cold-circles",
    summary: "four busy guests with 0.6 of what they want: our paging against the kernel's own",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SYS,
        measured::POLICY,
        measured::ARMS,
    ],
    claims: claims! {
        "system_time" <= 1.2 => "ratio",
            "Four busy guests at 0.6 of their memory cost no more system time than with the \
             kernel's own reclaim";
    },
    run,
};

/// Name and workload of each guest. `kv` has the pace of a service; `check` sweeps through its
/// memory.
const GUESTS: [(&str, &str); 4] = [
    ("kv", "kv --mb 140 --rate 4000"),
    ("web", "web --mb 140"),
    ("phases", "phases --mb 140 --parts 4 --length 10"),
    ("check", "verify --mb 120"),
];
const RAM: Bytes = Bytes::mib(256);
/// The share of their memory that the guests keep, in percent.
const KEPT: u64 = 60;
const ZRAM: Bytes = Bytes::mib(2048);
const ADJUSTED: Duration = Duration::from_secs(40);
const MEASURED: Duration = Duration::from_secs(60);
/// Number of rounds; each measures both arms in turn.
const ROUNDS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum PagingArm {
    Kernel,
    Ours,
}

const ARMS: [(&str, PagingArm); 2] = [("kernel", PagingArm::Kernel), ("ours", PagingArm::Ours)];

/// One arm of a round: the guests' work, and the host's.
struct PagingRun {
    speeds: Vec<f64>,
    system_s: f64,
    read_mib_s: f64,
    memory: Bytes,
    bad_bytes: u64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let _zram = Zram::new(ZRAM)?;
    let mut courses = Arms::default();
    for round in 1..=ROUNDS {
        courses.turn(ArmOrder::Listed, &ARMS, |name, way| {
            let course = course(context, *way)?;
            context.say(&format!("{round}, {name}: {}", course.words()));
            Ok(course)
        })?;
    }
    Ok(figures(context, &courses))
}

fn course(context: &Context, way: PagingArm) -> Result<PagingRun, LabError> {
    let group = MemoryGroup::new("circles")?;
    let guest = |(name, command): (&str, &str)| MachineSpec {
        small_pages: true,
        ..context.guest(name, "circles", RAM, command).in_cgroup(group.dir())
    };
    let mut lab = context.start(GUESTS.map(guest))?;
    progress::wait_until_working(&lab)?;
    let mut held = Bytes::ZERO;
    for machine in lab.machines() {
        held = held.plus(machine.overhead()?.guest);
    }
    let kept = held.percent(KEPT);
    group.set_limit(group.usage()?.minus(held.minus(kept)))?;
    let daemon = match way {
        PagingArm::Kernel => None,
        PagingArm::Ours => {
            let settings = DaemonSettings {
                cold: ColdSpec::WhenNeeded,
                policy: Policy::Balance,
                guaranteed: Some(Bytes(kept.0 / 8)),
                ..DaemonSettings::from(Mode::Enforce)
            };
            let overbooked = Overbooked { budget: kept, tables: Vec::new() };
            Some(Daemon::start_overbooked(&mut lab, settings, overbooked)?)
        }
    };
    let mut lines = Lines::of(&lab);
    lines.look_for(&lab, ADJUSTED)?;
    lines.clear();
    let (swapped, system) = (Swapped::read()?, system_s()?);
    lines.look_for(&lab, MEASURED)?;
    let course = PagingRun {
        speeds: (0..GUESTS.len()).map(|place| lines.rate(place)).collect(),
        system_s: system_s()? - system,
        read_mib_s: (Swapped::read()?.in_mib - swapped.in_mib) / MEASURED.as_secs_f64(),
        memory: group.usage()?,
        bad_bytes: fleet::bad_bytes(&lab)?,
    };
    if let Some(daemon) = daemon {
        daemon.ensure_alive()?;
    }
    lab.stop()?;
    Ok(course)
}

/// Time that the host's CPUs have spent in the kernel since boot, in seconds.
fn system_s() -> Result<f64, LabError> {
    let path = Path::new("/proc/stat");
    let text = std::fs::read_to_string(path)?;
    let ticks = text.split_whitespace().nth(3).and_then(|word| word.parse::<f64>().ok());
    let ticks = ticks.ok_or_else(|| std::io::Error::other("/proc/stat makes no sense"))?;
    // USER_HZ, which programs see on every architecture.
    Ok(ticks / 100.0)
}

impl PagingRun {
    fn words(&self) -> String {
        let speeds: Vec<String> = GUESTS
            .iter()
            .zip(&self.speeds)
            .map(|((name, _), speed)| format!("{name} {speed:.0}"))
            .collect();
        format!(
            "{} operations/s, {:.1} s of the kernel's, {:.1} MiB/s read back, {} in memory",
            speeds.join(", "),
            self.system_s,
            self.read_mib_s,
            self.memory
        )
    }
}

fn figures(context: &Context, courses: &Arms<PagingRun>) -> Figures {
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    let of = |arm: &str, of: &dyn Fn(&PagingRun) -> f64| mean(courses.each(arm, of));
    let ratio = |what: &dyn Fn(&PagingRun) -> f64| of("ours", what) / of("kernel", what);
    for (place, (name, _)) in GUESTS.iter().enumerate() {
        let value = ratio(&|course| course.speeds[place]);
        let note = "work with our paging, to that with the kernel's own";
        figures.check(&format!("work_{name}"), value, "ratio", note, Target::AtLeast(1.0));
    }
    let note = "time in the kernel, ours to that with its own reclaim";
    figures.tell("system_time", ratio(&|course| course.system_s), "ratio", note);
    let note = "memory of the guests' cgroup, ours to that with the kernel's own";
    figures.tell("memory", ratio(&|course| course.memory.as_mib()), "ratio", note);
    for (name, _) in ARMS {
        let value = of(name, &|course| course.read_mib_s);
        figures.tell(&format!("read_{name}"), value, "MiB/s", "read back");
        let value = of(name, &|course| course.bad_bytes as f64);
        figures.check(&format!("bad_bytes_{name}"), value, "B", "wrong bytes", Target::Equals(0.0));
    }
    figures
}
