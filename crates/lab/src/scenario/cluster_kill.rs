//! `cluster-kill`: a permanently overloaded guest moves to and fro between two hosts, and one of
//! the processes involved is killed every few seconds.
//!
//! The two hosts are two directories of this one, each with a daemon. Etcd has three members, and
//! a controller decides as usual: each move follows a real overload. The guest has the shim, so a
//! worker tracks it on either host. It swaps to a disk by NBD that also has a repository, and
//! verifies its memory. At any moment at most one QEMU runs the guest, and the lock of its disk
//! ensures that, too. The scenario does not cut the network between the QEMUs: a guest that is in
//! both of them would be lost (see the guide, "Failures").

use std::collections::BTreeMap;
use std::fs;

use model::VmName;
use serde_json::Value;

use super::prelude::*;
use crate::machine::Files;
use crate::pool::{HostPool, PoolSettings};
use crate::remote_swap::{Disk, RemoteSwap};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cluster-kill",
    summary: "all that moves a guest is killed 100 times while it changes hosts",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON, measured::DISKS, measured::POOL],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "A guest that goes to and fro loses no byte while all parts of its pool are killed \
             (100 kills)";
        "runs_twice" == 0.0 => "count", "It never runs on two hosts";
        "lost" == 0.0 => "count", "It is never lost";
        "intent_s_max" <= 60.0 => "s", "Each move ends";
        "standstill_s_max" => "s", "It stands still for a moment only";
    },
    run,
};

const KILLS: u32 = 100;
/// Between two kills.
const PAUSE_MS: (u64, u64) = (300, 4_000);
/// The time that a killed process stays down.
const AWAY_MS: (u64, u64) = (0, 1_500);
/// Numbers of the processes to kill, after the daemons. Members of etcd follow.
const CONTROLLER: usize = 2;
const WORKER: usize = CONTROLLER + 1;
const REPOSITORY: usize = CONTROLLER + 2;
const GUEST: &str = "guest";
const POLL: Duration = Duration::from_millis(100);
/// A guest that stands still for this long is lost.
const LOST: Duration = Duration::from_secs(60);
/// The longest time for the first move to begin, and for the last intent to end.
const LIMIT: Duration = Duration::from_secs(120);

/// Observations over the whole run.
#[derive(Default)]
struct KillCounts {
    twice: u32,
    moves: u32,
    /// The longest time for which no QEMU ran the guest.
    still: Duration,
    stands_since: Option<Instant>,
    /// When each intent was first seen, by its number.
    intents: BTreeMap<u64, Instant>,
    longest: Duration,
    verified: u64,
    bad_bytes: u64,
    on: Option<usize>,
}

struct WatchedGuest {
    pool: HostPool,
    seen: KillCounts,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut random = Random::new(context.seed);
    let (base, max) = (Bytes::mib(128), Bytes::mib(256));
    let spec = MachineSpec::new(GUEST, "pool", base, max, "verify --mb 112").with_shim(true);
    let (near, far) = (context.dir.join("a"), context.dir.join("b"));
    context.make_dir()?;
    let disk = Disk { size: max, read_delay_us: 0, lent: max, cache: false };
    let mut swap = RemoteSwap::start(&context.dir.join("swap"), GUEST, disk)?;
    let mut lab = Lab::start(&near, &context.provisions, &[swap.given_to(spec)])?;
    let settings = PoolSettings {
        guest: GUEST,
        given: base,
        promised: max,
        others: &[],
        budget: max,
        balloon: &["observe"; 2],
        host: "",
        overload: "interval_s = 2\npages_per_s = 10\nwindow = 2\nsustained = 2",
        pool: "rest_s = 1\nprecopy_s = 4",
        members: 3,
    };
    let pool = HostPool::new(&lab, &[far], &settings)?;
    let mut watched = WatchedGuest { pool, seen: KillCounts::default() };
    for i in 0..=CONTROLLER {
        watched.pool.start(i)?;
    }
    let begun = Instant::now();
    while watched.seen.intents.is_empty() {
        watched.watch(POLL)?;
        if begun.elapsed() > LIMIT {
            return Err(LabError::Timeout { what: "the first move".to_owned(), limit: LIMIT });
        }
    }
    for _ in 0..KILLS {
        watched.watch(random.millis(PAUSE_MS))?;
        let which = usize::try_from(random.between(0, 5)).unwrap_or(0);
        let away = random.millis(AWAY_MS);
        if which <= CONTROLLER {
            watched.pool.kill(which)?;
            watched.watch(away)?;
            watched.pool.start(which)?;
        } else if which == WORKER {
            watched.pool.kill_worker(0)?;
            watched.pool.kill_worker(1)?;
        } else if which == REPOSITORY {
            swap.kill_repository()?;
            watched.watch(away)?;
            swap.start_repository()?;
        } else {
            let member = usize::try_from(random.between(0, 2)).unwrap_or(0);
            watched.pool.members.kill(member)?;
            watched.watch(away)?;
            watched.pool.members.revive(member)?;
        }
    }
    // Nothing new is decided, and moves in progress end.
    watched.pool.kill(CONTROLLER)?;
    let begun = Instant::now();
    while begun.elapsed() < LIMIT && !watched.is_at_rest() {
        watched.watch(POLL)?;
    }
    // The controller removes intents that have ended.
    watched.pool.start(CONTROLLER)?;
    watched.watch(Duration::from_secs(15))?;
    let WatchedGuest { pool, seen } = watched;
    drop(pool);
    lab.stop()?;
    swap.end()?;
    Ok(figures(context, &seen))
}

fn figures(context: &Context, seen: &KillCounts) -> Figures {
    let mut figures = context.figures(SCENARIO.name, KILLS);
    let (bad, verified) = (seen.bad_bytes as f64, seen.verified as f64);
    let moves = f64::from(seen.moves);
    figures.tell("bad_bytes", bad, "B", "wrong bytes found by `verify`");
    figures.tell("runs_twice", f64::from(seen.twice), "count", "samples in which two QEMUs ran it");
    let lost = f64::from(u8::from(seen.on.is_none() || seen.still >= LOST));
    figures.tell("lost", lost, "count", "guests that run nowhere");
    let note = "from an intent to its end on both hosts, worst";
    figures.tell("intent_s_max", seen.longest.as_secs_f64(), "s", note);
    let note = "times the guest was seen on another host";
    figures.check("moves", moves, "count", note, Target::AtLeast(10.0));
    let still = seen.still.as_secs_f64();
    figures.tell("standstill_s_max", still, "s", "no QEMU ran it, worst");
    let note = "that one QEMU's guest verified, most";
    figures.check("verified", verified, "MB", note, Target::AtLeast(1.0));
    figures
}

impl WatchedGuest {
    /// Samples for this long, and at least once.
    fn watch(&mut self, time: Duration) -> Result<(), LabError> {
        let end = Instant::now() + time;
        loop {
            self.look();
            if Instant::now() >= end {
                return Ok(());
            }
            interrupt::sleep(POLL)?;
        }
    }

    fn look(&mut self) {
        let [first, second] = [0, 1].map(|host| self.pool.runs(host));
        let seen = &mut self.seen;
        match (first, second) {
            (false, false) => {
                let since = *seen.stands_since.get_or_insert_with(Instant::now);
                seen.still = seen.still.max(since.elapsed());
            }
            _ => seen.stands_since = None,
        }
        let now_on = [first, second].iter().position(|runs| *runs);
        if now_on.is_some() {
            let is_new = self.seen.on.is_some() && self.seen.on != now_on;
            self.seen.moves += u32::from(is_new);
            self.seen.on = now_on;
        } else if self.seen.still >= LOST {
            self.seen.on = None;
        }
        // The guest may have gone from one host to the other between the two samples, but not
        // back.
        if first && second && self.pool.runs(0) {
            self.seen.twice += 1;
        }
        self.read_metrics();
        if let Some(records) = self.pool.records() {
            let current: Vec<u64> = records.intents.values().map(|i| i.generation).collect();
            for generation in &current {
                self.seen.intents.entry(*generation).or_insert_with(Instant::now);
            }
            for (generation, begun) in &self.seen.intents {
                let is_open = current.contains(generation);
                if is_open {
                    self.seen.longest = self.seen.longest.max(begun.elapsed());
                }
            }
        }
    }

    /// Whether both hosts have finished all moves.
    fn is_at_rest(&self) -> bool {
        let Some(records) = self.pool.records() else { return false };
        records.intents.iter().all(|(vm, intent): (&VmName, _)| {
            records.source_of(vm, intent).is_some_and(|written| written.is_over)
                && records.target_of(vm, intent).is_some_and(|written| written.is_over)
        })
    }

    fn read_metrics(&mut self) {
        for dir in &self.pool.dirs {
            let text = fs::read_to_string(Files::new(dir, GUEST).metrics).unwrap_or_default();
            // The first line of a QEMU's file may have begun in the other one's.
            let values = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            for value in values {
                let number = |key: &str| value[key].as_u64().unwrap_or(0);
                self.seen.bad_bytes = self.seen.bad_bytes.max(number("bad_bytes"));
                self.seen.verified = self.seen.verified.max(number("ops"));
            }
        }
    }
}
