//! One guest tracked by this process: observations of every second, and their cost.
//!
//! **Idea.** A separate thread does the work of the worker's loop for a VM, with the worker's own
//! code: a step every 100 ms. It can be put on a given CPU. On the guest's own CPU, the whole
//! cost of tracking shows in the guest's speed; elsewhere, only the traps do.
//!
//! **Invariant.** Every time stamp is on the clock of traps and traces (`CLOCK_MONOTONIC`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use model::{Bytes, Tracking};
use pages::curve::MissRatioCurve;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use sys::process::Identity;
use worker::{STEP, Settings, State, Tracked};

use crate::background::{Background, Stop};
use crate::lab::{Lab, LabError};

/// Timeout for the start of a guest's tracking.
const START_LIMIT: Duration = Duration::from_secs(20);

/// An observation at one moment.
#[derive(Debug, Clone)]
pub struct TrackingSample {
    /// Its time, in microseconds of `CLOCK_MONOTONIC`.
    pub at_us: u64,
    /// The worker's report for the daemon.
    pub tracking: Tracking,
    pub curve: MissRatioCurve,
    /// The rate of the event that wakes intermittent tracking; `None`: the mode has none.
    pub event: Option<f64>,
}

/// The result of a watch.
#[derive(Debug, Clone)]
pub struct Record {
    /// The observations, in order.
    pub seen: Vec<TrackingSample>,
    pub lasted: Duration,
    /// CPU time of the tracker.
    pub cpu: Duration,
    /// Traps that were lost because they came too fast to be read.
    pub lost: u64,
    /// The share of time for which granules were revoked; it is 1 without intermittent tracking.
    pub up_ratio: f64,
}

impl Record {
    /// The tracker's CPU time as a share of one CPU.
    pub fn cpu_share(&self) -> f64 {
        self.cpu.as_secs_f64() / self.lasted.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Traps of the whole watch.
    pub fn traps(&self) -> u64 {
        self.seen.last().map_or(0, |seen| seen.tracking.cost.traps)
    }
}

/// A guest that is being tracked. Dropping it ends the tracking, too.
#[derive(Debug)]
pub struct Watch {
    swapped: Arc<AtomicU64>,
    held: Arc<Mutex<Option<WatchState>>>,
    shown: Arc<Mutex<Shown>>,
    thread: Background<Record>,
}

/// The most of a guest that may be in memory, and the memory that its QEMU has besides the guest.
#[derive(Debug, Clone, Copy)]
struct WatchState {
    resident: Bytes,
    own: Bytes,
}

/// State that the thread publishes while it runs.
#[derive(Debug, Default)]
struct Shown {
    latest: Option<TrackingSample>,
    is_tracking: bool,
    why_not: Option<String>,
    cpu: Duration,
}

impl Watch {
    /// Begins to track the guest of QEMU process `pid`; an observation is kept every `every`.
    pub fn start(
        pid: u32,
        settings: Settings,
        cpus: &[usize],
        every: Duration,
    ) -> Result<Self, LabError> {
        Self::begin(identity(pid)?, |process| Tracked::new(process, settings), cpus, every)
    }

    /// The same from outside, for a guest with `ram` of RAM.
    pub fn attached(
        pid: u32,
        ram: Bytes,
        settings: Settings,
        cpus: &[usize],
        every: Duration,
    ) -> Result<Self, LabError> {
        let track = |process| Tracked::attached(process, ram, settings);
        Self::begin(identity(pid)?, track, cpus, every)
    }

    fn begin(
        process: Identity,
        track: impl FnOnce(Identity) -> Tracked,
        cpus: &[usize],
        every: Duration,
    ) -> Result<Self, LabError> {
        let swapped = Arc::new(AtomicU64::new(0));
        let (held, shown) = (Arc::default(), Arc::new(Mutex::new(Shown::default())));
        let mut set = CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu));
        let is_pinned = !cpus.is_empty();
        let mut driver = Driver {
            tracked: track(process),
            swapped: Arc::clone(&swapped),
            held: Arc::clone(&held),
            shown: Arc::clone(&shown),
            every,
        };
        let run = move |stop: &Stop| {
            if is_pinned {
                // The CPU may be gone meanwhile; then any other will do.
                let _ = sched_setaffinity(None, &set);
            }
            let record = driver.run(stop);
            driver.tracked.release();
            record
        };
        Ok(Self { swapped, held, shown, thread: Background::start("watch", run)? })
    }

    /// Sets the amount of the guest that lies in its swap.
    pub fn set_swapped(&self, swapped: Bytes) {
        self.swapped.store(swapped.0, Ordering::Relaxed);
    }

    /// Limits the guest to `resident` in memory; the rest is paged out. `own` is the memory that
    /// its QEMU has besides the guest.
    pub fn hold(&self, resident: Bytes, own: Bytes) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(WatchState { resident, own });
    }

    pub fn latest(&self) -> Option<TrackingSample> {
        self.shown().latest.clone()
    }

    pub fn is_tracking(&self) -> bool {
        self.shown().is_tracking
    }

    /// CPU time of the tracker since it began, as of its last step.
    pub fn cpu(&self) -> Duration {
        self.shown().cpu
    }

    /// The reason why it does not track, if it does not.
    pub fn why_not(&self) -> Option<String> {
        self.shown().why_not.clone()
    }

    /// Ends tracking; all revoked memory is restored.
    ///
    /// # Errors
    /// When the tracker failed, which is a fault of Overbook.
    pub fn stop(self) -> Result<Record, LabError> {
        self.thread.stop().ok_or(LabError::Tracker)
    }

    fn shown(&self) -> std::sync::MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until every guest of the lab is tracked; `watches` in the lab's order.
///
/// # Errors
/// When a guest is not tracked, with the reason.
pub fn wait_until_tracked(lab: &Lab, watches: &[Watch]) -> Result<(), LabError> {
    let what = "every guest to be tracked";
    let waited = lab.wait_for(what, START_LIMIT, |_| Ok(watches.iter().all(Watch::is_tracking)));
    if let Err(LabError::Timeout { .. }) = &waited {
        for (machine, watch) in lab.machines().iter().zip(watches) {
            if let Some(why) = watch.why_not() {
                return Err(LabError::NotTracked { name: machine.spec().name.clone(), why });
            }
        }
    }
    waited
}

fn identity(pid: u32) -> Result<Identity, LabError> {
    let gone = || std::io::Error::other(format!("process {pid} has ended"));
    Ok(Identity::of(pid).ok_or_else(gone)?)
}

struct Driver {
    tracked: Tracked,
    swapped: Arc<AtomicU64>,
    held: Arc<Mutex<Option<WatchState>>>,
    shown: Arc<Mutex<Shown>>,
    every: Duration,
}

impl Driver {
    fn run(&mut self, stop: &Stop) -> Record {
        let (began, cpu_before) = (Instant::now(), own_cpu());
        let mut seen = Vec::new();
        let (mut steps, mut steps_on, mut due) = (0.0_f64, 0.0_f64, began + self.every);
        while !stop.is_given() {
            let next = Instant::now() + STEP;
            self.tracked.set_swapped(Bytes(self.swapped.load(Ordering::Relaxed)));
            if let Some(held) = *self.held.lock().unwrap_or_else(PoisonError::into_inner) {
                self.tracked.set_own(Some(held.own));
                self.tracked.set_resident(Some(held.resident));
            }
            self.tracked.step();
            steps += 1.0;
            steps_on += f64::from(u8::from(self.tracked.is_following()));
            if Instant::now() >= due {
                due += self.every;
                seen.extend(self.look());
            }
            self.show(seen.last());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        seen.extend(self.look());
        Record {
            seen,
            lasted: began.elapsed(),
            cpu: own_cpu().saturating_sub(cpu_before),
            lost: self.tracked.lost(),
            up_ratio: steps_on / steps.max(1.0),
        }
    }

    fn look(&self) -> Option<TrackingSample> {
        let (tracking, curve) = (self.tracked.reading()?.value, self.tracked.curve()?);
        Some(TrackingSample { at_us: now_us(), tracking, curve, event: self.tracked.event() })
    }

    fn show(&self, latest: Option<&TrackingSample>) {
        let state = self.tracked.state();
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.is_tracking = *state == State::Tracking;
        shown.cpu = own_cpu();
        shown.why_not = match state {
            State::Waiting { why } | State::Unsupported { why } => Some(why.clone()),
            State::Connecting | State::Tracking => None,
        };
        if latest.map(|seen| seen.at_us) != shown.latest.as_ref().map(|seen| seen.at_us) {
            shown.latest = latest.cloned();
        }
    }
}

/// The present time, in microseconds of `CLOCK_MONOTONIC`.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1_000_000 + part(now.tv_nsec) / 1000
}

/// CPU time of the calling thread.
pub(crate) fn own_cpu() -> Duration {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    Duration::from_secs(part(used.tv_sec)) + Duration::from_nanos(part(used.tv_nsec))
}
