//! `page-server-kill`: the processes that serve a guest's swap are killed again and again, while
//! the guest swaps hard and checks every byte.
//!
//! Four parts die at random, alone and in pairs: the process that serves the disk, the
//! repository, the daemon, and the network between the first two. (To simulate a dead network,
//! the repository is stopped: no answer comes, and no connection breaks.) Each comes back after a
//! while. The guest may wait; it must not see an error, and no byte may change.

use serde_json::json;

use super::prelude::*;
use crate::remote_swap::{Disk, RemoteSwap};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "page-server-kill",
    summary: "what serves a guest's swap is killed 200 times, and no byte is lost",
    measures: &[&[file!()], measured::DISKS],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "The parts that serve a guest's swap may die at any moment, alone and in pairs, and \
             no byte is lost (200 kills)";
        "guest_io_errors" == 0.0 => "count", "The guest sees no error of its disk meanwhile";
        "forged" == 0.0 => "count", "No page comes back that was not written";
        "recovery_s_max" <= 1.0 => "s", "The guest's swap works again soon after a kill";
    },
    run,
};

const KILLS: u32 = 200;
const GUEST: &str = "swaps";
const MEMORY: Bytes = Bytes::mib(80);
/// Memory that the guest was started with. A guest that has all of that uses no repositories.
const PROMISED: Bytes = Bytes::mib(128);
const WORKLOAD: &str = "verify --mb 112";
const DISK: Disk =
    Disk { size: Bytes::mib(256), read_delay_us: 0, lent: Bytes::mib(256), cache: false };
/// How long a part is dead, and how long all parts then live.
const DEAD_MS: (u64, u64) = (0, 1_500);
const ALIVE_MS: (u64, u64) = (200, 2_500);
/// When to stop waiting for a part to work again; the figure's target is lower.
const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

/// A part that can die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KillTarget {
    Disks,
    Repository,
    Network,
    Daemon,
}

const PARTS: [KillTarget; 4] =
    [KillTarget::Disks, KillTarget::Repository, KillTarget::Network, KillTarget::Daemon];

/// Totals over the run.
#[derive(Default)]
struct ServerKills {
    kills: u32,
    io_errors: u32,
    slowest: Duration,
    near: u64,
    late: u64,
    forged: u64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let swap_dir = context.dir.with_extension("swap");
    let mut swap = RemoteSwap::start(&swap_dir, GUEST, DISK)?;
    let guest = context.guest(GUEST, "swapping", MEMORY, WORKLOAD).up_to(PROMISED);
    let mut lab = context.start([swap.given_to(guest)])?;
    let mut daemon = Daemon::start(&mut lab, Mode::Observe)?;
    progress::wait_until_working(&lab)?;
    let mut random = Random::new(context.seed);
    let mut toll = ServerKills::default();
    let pick = |random: &mut Random| PARTS[usize::try_from(random.between(0, 3)).unwrap_or(0)];
    while toll.kills < KILLS {
        let (first, second) = (pick(&mut random), pick(&mut random));
        let is_pair = random.between(0, 1) == 1 && can_both(first, second);
        let parts = if is_pair { vec![first, second] } else { vec![first] };
        for part in &parts {
            // The process's counters die with it.
            if *part == KillTarget::Disks {
                toll.note(&swap);
            }
            kill(*part, &mut swap, &mut daemon, &mut lab)?;
            toll.kills += 1;
        }
        interrupt::sleep(random.millis(DEAD_MS))?;
        for part in &parts {
            bring_back(*part, &mut swap, &mut daemon, &mut lab)?;
        }
        let back = Instant::now();
        lab.wait_for("the disk and its repository to answer", LIMIT, |_| {
            let status = swap.status().unwrap_or_default();
            let works = status.reads + status.writes > 0;
            let connected = status.repositories.is_some_and(|r| r.connected == 1);
            interrupt::sleep(POLL)?;
            Ok(works && connected)
        })?;
        toll.slowest = toll.slowest.max(back.elapsed());
        let state = lab.machine(GUEST)?.qmp("query-status", json!({}))?;
        toll.io_errors += u32::from(state["running"] != true);
        interrupt::sleep(random.millis(ALIVE_MS))?;
    }
    toll.note(&swap);
    let bad_bytes = fleet::bad_bytes(&lab)?;
    let checked = lab.machine(GUEST)?.told("ops");
    lab.stop()?;
    swap.end()?;
    Ok(figures(context, &toll, bad_bytes, checked))
}

impl ServerKills {
    /// Adds the counters of the process that serves the disk.
    fn note(&mut self, swap: &RemoteSwap) {
        if let Some(repositories) = swap.status().and_then(|status| status.repositories) {
            self.near += repositories.reads;
            self.late += repositories.late;
            self.forged += repositories.forged;
        }
    }
}

/// Whether both parts can be dead at once: the network's death needs a live repository.
fn can_both(first: KillTarget, second: KillTarget) -> bool {
    let both = [first, second];
    first != second
        && !(both.contains(&KillTarget::Network) && both.contains(&KillTarget::Repository))
}

fn kill(
    part: KillTarget,
    swap: &mut RemoteSwap,
    daemon: &mut Daemon,
    lab: &mut Lab,
) -> Result<(), LabError> {
    match part {
        KillTarget::Disks => swap.kill_disks(),
        KillTarget::Repository => swap.kill_repository(),
        KillTarget::Network => swap.silence_repository(true),
        KillTarget::Daemon => daemon.kill(lab),
    }
}

fn bring_back(
    part: KillTarget,
    swap: &mut RemoteSwap,
    daemon: &mut Daemon,
    lab: &mut Lab,
) -> Result<(), LabError> {
    match part {
        // The process that keeps its sockets has restarted it already.
        KillTarget::Disks => Ok(()),
        KillTarget::Repository => swap.start_repository(),
        KillTarget::Network => swap.silence_repository(false),
        KillTarget::Daemon => daemon.restart(lab),
    }
}

fn figures(context: &Context, toll: &ServerKills, bad_bytes: u64, work: f64) -> Figures {
    let mut figures = context.figures(SCENARIO.name, toll.kills);
    let count = |n: u64| n as f64;
    figures.tell("bad_bytes", count(bad_bytes), "B", "wrong bytes found by `verify`");
    let note = "times that the guest had been stopped";
    figures.tell("guest_io_errors", toll.io_errors.into(), "count", note);
    let note = "from a part's return until it works again";
    figures.tell("recovery_s_max", toll.slowest.as_secs_f64(), "s", note);
    let note = "parts killed, alone and in pairs";
    figures.check("kills", toll.kills.into(), "count", note, Target::AtLeast(KILLS.into()));
    let note = "reads that a repository answered, as far as it was asked in time";
    figures.check("near_reads", count(toll.near), "count", note, Target::AtLeast(1.0));
    figures.tell("late_reads", count(toll.late), "count", "reads that it did not answer in time");
    let note = "pages that were not what had been written";
    figures.tell("forged", count(toll.forged), "count", note);
    let note = "MiB that the guest has checked, one after the other";
    figures.check("work", work, "count", note, Target::AtLeast(1.0));
    figures
}
