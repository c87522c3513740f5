//! Gives VMs their own copies of all shared pages when there is no worker that does it any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use model::Bytes;
use sys::pool_maps;
use sys::process::Identity;

use super::dedup::{Dedup, Task};
use super::mode::{Mode, Settings};
use super::tracked::{STEP, State, Tracked};

/// The timeout without a copied page. It is longer while pages are still being looked at, because
/// a pass over a large VM takes longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The passes over all pages without a copied one, after which no more are expected.
const ROUNDS: u64 = 2;
const SLICE: Duration = Duration::from_millis(20);

/// The reason why a VM still shares pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StillShares {
    /// A worker of this or another daemon has the pool.
    #[error("a worker that still runs has its pool")]
    InUse,
    /// Another reason, from the shim or from this process.
    #[error("{0}")]
    Because(String),
}

/// Copies the pages that these QEMU processes share, and empties the pools that then have no
/// other sharer. Returns for each process that has mapped a pool the amount that it shared, or
/// the reason for a failure. Waits as long as there is progress.
#[must_use]
pub fn unshare(processes: &[Identity]) -> BTreeMap<u32, Result<Bytes, StillShares>> {
    let mut pools: BTreeMap<String, BTreeSet<Identity>> = BTreeMap::new();
    let mut outcomes = BTreeMap::new();
    for &process in processes {
        match pool_maps::pools_of(process.pid).and_then(|found| process.still(found)) {
            Ok(found) => found.into_iter().for_each(|name| {
                pools.entry(name).or_default().insert(process);
            }),
            Err(_) if !process.is_alive() => {}
            // It is unknown whether this process shares pages, which differs from sharing none.
            Err(error) => drop(outcomes.insert(process.pid, Err(unreadable(process, &error)))),
        }
    }
    // All pools at the same time: no VM waits for one of another group that makes no progress.
    std::thread::scope(|scope| {
        let of_each = |(pool, members)| scope.spawn(move || of_pool(pool, &members));
        let all: Vec<_> = pools.into_iter().map(of_each).collect();
        outcomes.extend(all.into_iter().filter_map(|pool| pool.join().ok()).flatten());
    });
    outcomes
}

fn unreadable(process: Identity, error: &std::io::Error) -> StillShares {
    StillShares::Because(format!("what process {} maps cannot be read: {error}", process.pid))
}

fn of_pool(
    pool: String,
    processes: &BTreeSet<Identity>,
) -> BTreeMap<u32, Result<Bytes, StillShares>> {
    let untracked = |process: &Identity| Tracked::new(*process, Settings::new(Mode::Untracked));
    let mut vms: Vec<Tracked> = processes.iter().map(untracked).collect();
    let pids: BTreeSet<u32> = processes.iter().map(|process| process.pid).collect();
    let has_ended = |pid: u32| !processes.iter().any(|it| it.pid == pid && it.is_alive());
    let mut dedup = Dedup::of_pool(pool);
    dedup.set_task(Task::Unshare);
    let mut most: BTreeMap<u32, Bytes> = BTreeMap::new();
    let mut progress = UnshareProgress::begin();
    let mut next_step = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next_step {
            next_step = now + STEP;
            vms.iter_mut().for_each(Tracked::step);
            let shared: Vec<_> =
                pids.iter().map(|pid| dedup.reading(*pid).map(|now| now.value.shared)).collect();
            for (pid, shared) in pids.iter().zip(&shared) {
                let most = most.entry(*pid).or_default();
                *most = shared.unwrap_or_default().max(*most);
            }
            let is_done = pids.iter().all(|pid| dedup.is_unshared(*pid) || has_ended(*pid));
            if is_done || progress.has_ended(shared, dedup.looked(), dedup.pages()) {
                break;
            }
        }
        let mut all: Vec<&mut Tracked> = vms.iter_mut().collect();
        std::thread::sleep(dedup.work(&mut all, now + SLICE).min(STEP));
    }
    let outcome = |vm: &Tracked| {
        let pid = vm.pid();
        let unshared = if dedup.is_unshared(pid) {
            Ok(most.get(&pid).copied().unwrap_or_default())
        } else if dedup.is_without_pool() {
            Err(StillShares::InUse)
        } else {
            Err(StillShares::Because(dedup.why_not(pid).unwrap_or_else(|| why(vm.state()))))
        };
        (pid, unshared)
    };
    vms.iter().filter(|vm| !has_ended(vm.pid())).map(outcome).collect()
}

/// Watches whether there is progress.
struct UnshareProgress {
    shared: Vec<Option<Bytes>>,
    /// The time of the last change of `shared`, and the number of pages looked at by then.
    changed: (Instant, u64),
    /// The time when another page was last looked at.
    looked: (Instant, u64),
}

impl UnshareProgress {
    fn begin() -> Self {
        let now = (Instant::now(), 0);
        Self { shared: Vec::new(), changed: now, looked: now }
    }

    /// Takes the shared amounts, the number of pages looked at so far, and the number of pages.
    fn has_ended(&mut self, shared: Vec<Option<Bytes>>, looked: u64, pages: u64) -> bool {
        let now = Instant::now();
        if looked != self.looked.1 {
            self.looked = (now, looked);
        }
        if shared != self.shared {
            (self.shared, self.changed) = (shared, (now, looked));
        }
        let is_late = |since: Instant| now.duration_since(since) > PATIENCE;
        let has_seen_all = looked - self.changed.1 > pages * ROUNDS;
        is_late(self.changed.0) && (has_seen_all || is_late(self.looked.0))
    }
}

fn why(state: &State) -> String {
    match state {
        State::Waiting { why } | State::Unsupported { why } => why.clone(),
        State::Connecting | State::Tracking => "the shim does not get on with it".to_owned(),
    }
}
