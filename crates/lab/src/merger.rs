//! Overbook's merging under an experiment's control: the worker's own engine on a separate
//! thread.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use model::PagesPerMs;
use model::dedup::Dedup as Reading;
use pages::dedup::KnownPages;
use sys::process::Identity;
use worker::{Dedup, Hash, Mode, STEP, Settings, Task, Tracked};

use crate::background::{Background, Stop};
use crate::ksm::Ksm;
use crate::lab::LabError;
use crate::meb::watch::own_cpu;

/// Time that it works before it checks for messages.
const SLICE: Duration = Duration::from_millis(2);
/// Owner of its pool: the group of an experiment's guests.
const GROUP: &str = "lab";
/// No limit to the rate.
const FLAT_OUT: u32 = u32::MAX;

/// Guests' memory that is worth merging: [`SAME_MB`] are the same in all, as much is their own,
/// and the rest is zero.
pub const COPIES: &str = "copies --same-mb 60 --own-mb 60 --zero-mb 20";
/// The part that is the same.
pub const SAME_MB: u32 = 60;
/// All of it.
pub const COPIES_MB: u32 = 140;

/// Merging by either of the two, until it is dropped.
#[derive(Debug)]
pub enum Merging {
    /// The worker's engine.
    Ours(Merger),
    /// The kernel.
    Kernel(Ksm),
}

impl Merging {
    /// Memory that Overbook's pool takes.
    pub fn pool_mib(&self) -> f64 {
        match self {
            Self::Ours(merger) => merger.pool_bytes() as f64 / (1 << 20) as f64,
            Self::Kernel(_) => 0.0,
        }
    }
}

/// Merging that goes on until it is stopped; what is merged stays merged.
#[derive(Debug)]
pub struct Merger {
    told: Arc<Told>,
    thread: Background<Vec<Reading>>,
}

/// State that both sides share.
#[derive(Debug, Default)]
struct Told {
    rate: AtomicU32,
    cpu_ns: AtomicU64,
    pool_bytes: AtomicU64,
    is_asked: AtomicBool,
    readings: Mutex<Vec<Reading>>,
}

impl Merger {
    /// Merges identical pages of these QEMU processes, at `pages_per_ms` or (`None`) without a
    /// limit. `tracking`: also tracks them, at this share of a vCPU.
    pub fn start(
        pids: &[u32],
        pages_per_ms: Option<u32>,
        tracking: Option<f64>,
    ) -> Result<Self, LabError> {
        Self::start_with(Dedup::new(GROUP), pids, pages_per_ms, tracking)
    }

    /// Same as [`Self::start`], for pages that are known before the guests run.
    pub fn start_knowing(
        pids: &[u32],
        pages_per_ms: Option<u32>,
        known: KnownPages,
    ) -> Result<Self, LabError> {
        let mut dedup = Dedup::new(GROUP);
        dedup.set_known(Some(known));
        Self::start_with(dedup, pids, pages_per_ms, None)
    }

    /// The same with a hash under which most pages collide: it has 4096 values, spread over the
    /// index.
    pub fn start_colliding(pids: &[u32]) -> Result<Self, LabError> {
        // Times 2^64 over the golden ratio: values that differ only in their low bits would fall
        // into one bucket.
        let weak: Hash = |page, _| {
            let sum = page.iter().map(|byte| u64::from(*byte)).sum::<u64>() % 4096;
            (sum + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        Self::start_with(Dedup::new(GROUP).hashing_with(weak), pids, None, None)
    }

    fn start_with(
        mut dedup: Dedup,
        pids: &[u32],
        pages_per_ms: Option<u32>,
        tracking: Option<f64>,
    ) -> Result<Self, LabError> {
        let mode = tracking.map_or(Mode::Untracked, |budget| Mode::Probes { budget });
        let told = Arc::new(Told::default());
        told.rate.store(pages_per_ms.unwrap_or(FLAT_OUT), Ordering::Relaxed);
        let processes: Vec<Identity> = pids.iter().filter_map(|pid| Identity::of(*pid)).collect();
        let mut vms: Vec<Tracked> =
            processes.iter().map(|it| Tracked::new(*it, Settings::new(mode))).collect();
        let (ours, pids) = (Arc::clone(&told), pids.to_vec());
        let work = move |stop: &Stop| {
            let readings = |dedup: &Dedup| {
                pids.iter().filter_map(|pid| Some(dedup.reading(*pid)?.value)).collect()
            };
            let mut step = Instant::now();
            while !stop.is_given() {
                let now = Instant::now();
                if now >= step {
                    step = now + STEP;
                    vms.iter_mut().for_each(Tracked::step);
                }
                let rate = ours.rate.load(Ordering::Relaxed);
                dedup.set_task(Task::Merge((rate != FLAT_OUT).then_some(PagesPerMs(rate))));
                let mut all: Vec<&mut Tracked> = vms.iter_mut().collect();
                let idle = dedup.work(&mut all, now + SLICE);
                if !idle.is_zero() {
                    std::thread::sleep(idle);
                }
                let cpu_ns = u64::try_from(own_cpu().as_nanos()).unwrap_or(u64::MAX);
                ours.cpu_ns.store(cpu_ns, Ordering::Relaxed);
                ours.pool_bytes.store(dedup.pool_bytes(), Ordering::Relaxed);
                // Only on request: it takes longer than the work itself when there is no work.
                if ours.is_asked.load(Ordering::Acquire) {
                    *ours.readings.lock().unwrap_or_else(PoisonError::into_inner) =
                        readings(&dedup);
                    ours.is_asked.store(false, Ordering::Release);
                }
            }
            readings(&dedup)
        };
        Ok(Self { told, thread: Background::start("merger", work)? })
    }

    /// Changes the rate from now on.
    pub fn set_rate(&self, pages_per_ms: u32) {
        self.told.rate.store(pages_per_ms, Ordering::Relaxed);
    }

    /// CPU time that it has taken, in seconds, without the shims' CPU time.
    pub fn cpu_s(&self) -> f64 {
        self.told.cpu_ns.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Memory that the pool takes.
    pub fn pool_bytes(&self) -> u64 {
        self.told.pool_bytes.load(Ordering::Relaxed)
    }

    /// Its present knowledge of each VM.
    pub fn readings(&self) -> Vec<Reading> {
        self.told.is_asked.store(true, Ordering::Release);
        while self.told.is_asked.load(Ordering::Acquire) && !self.thread.has_ended() {
            std::thread::sleep(SLICE);
        }
        self.told.readings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it; returns its last knowledge of each VM.
    pub fn stop(self) -> Vec<Reading> {
        self.thread.stop().unwrap_or_default()
    }
}
