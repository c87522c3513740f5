//! Gives VMs copies of their own of all that they share, when no worker does it any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use model::Bytes;
use sys::pool_maps;

use super::dedup::{Dedup, Task};
use super::mode::{Mode, Settings};
use super::tracked::{STEP, State, Tracked};

/// How long it goes on without a page being copied.
const PATIENCE: Duration = Duration::from_secs(5);
const SLICE: Duration = Duration::from_millis(20);

/// Why a VM still shares pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StillShares {
    /// A worker of this or another daemon.
    #[error("a worker that still runs has its pool")]
    InUse,
    /// The shim's words, or ours.
    #[error("{0}")]
    Because(String),
}

/// Copies what these QEMU processes share, and empties the pools as far as nobody else shares them. Answers for
/// each that has mapped a pool how much it was, or why not. Waits as long as it gets on.
#[must_use]
pub fn unshare(pids: &[u32]) -> BTreeMap<u32, Result<Bytes, StillShares>> {
    let mut pools: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for &pid in pids {
        for mapping in pool_maps::mappings(pid).unwrap_or_default() {
            pools.entry(mapping.name).or_default().insert(pid);
        }
    }
    pools.into_iter().flat_map(|(pool, pids)| of_pool(pool, &pids)).collect()
}

fn of_pool(pool: String, pids: &BTreeSet<u32>) -> BTreeMap<u32, Result<Bytes, StillShares>> {
    let untracked = |pid: &u32| Tracked::new(*pid, Settings::new(Mode::Untracked));
    let mut vms: Vec<Tracked> = pids.iter().map(untracked).collect();
    let mut dedup = Dedup::of_pool(pool);
    dedup.set_task(Task::Unshare);
    let mut most: BTreeMap<u32, Bytes> = BTreeMap::new();
    let mut last = (Vec::new(), Instant::now());
    let mut next_step = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next_step {
            next_step = now + STEP;
            vms.iter_mut().for_each(Tracked::step);
            let shared: Vec<_> =
                pids.iter().map(|pid| dedup.reading(*pid).map(|now| now.shared)).collect();
            for (pid, shared) in pids.iter().zip(&shared) {
                let most = most.entry(*pid).or_default();
                *most = shared.unwrap_or_default().max(*most);
            }
            let is_done = pids.iter().all(|pid| dedup.is_unshared(*pid) || has_ended(*pid));
            if shared != last.0 {
                last = (shared, now);
            }
            if is_done || last.1.elapsed() > PATIENCE {
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

fn has_ended(pid: u32) -> bool {
    pool_maps::mappings(pid).is_err()
}

fn why(state: &State) -> String {
    match state {
        State::Waiting { why } | State::Unsupported { why } => why.clone(),
        State::Connecting | State::Tracking => "the shim does not get on with it".to_owned(),
    }
}
