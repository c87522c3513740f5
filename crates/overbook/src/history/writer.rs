//! The thread between the loop and the disk.
//!
//! The loop puts ticks into a short queue; a tick that finds the queue full is dropped and
//! counted. The thread retries by itself after every failure: with the next tick if the disk was
//! full, after a pause if the file could not be opened.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread,
    time::{Duration, Instant},
};

use api::published::Published;

use super::{
    sample::Sampler,
    store::{self, HistoryStore, MOST_BYTES, StoreError},
};

/// Length of the queue. Each tick holds a whole view, so the queue is short.
const QUEUE_TICKS: usize = 16;
/// Pause between two attempts to open the file.
const RETRY: Duration = Duration::from_secs(5);
/// Interval between two thinnings.
const THIN: Duration = Duration::from_secs(60);
/// Timeout for writing the queue at the end.
const FAREWELL: Duration = Duration::from_secs(2);

/// The recorder. Dropping it writes the queued ticks, unless the disk takes too long.
#[derive(Debug)]
pub struct History {
    queue: Option<SyncSender<Arc<Published>>>,
    ended: Receiver<()>,
    health: Arc<Mutex<Health>>,
}

/// The recorder's state for the operator.
#[derive(Debug, Default)]
struct Health {
    /// Why ticks are being lost now.
    failing: Option<String>,
    /// Ticks lost since the failure began.
    lost: u64,
    /// A note about an older file that was set aside; reported until the daemon restarts.
    note: Option<String>,
}

fn lock(health: &Mutex<Health>) -> std::sync::MutexGuard<'_, Health> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}

impl History {
    /// Starts recording into the file at `path`. Faults of the file show in [`History::error`],
    /// not here.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(path: &Path) -> io::Result<Self> {
        let (queue, ticks) = mpsc::sync_channel::<Arc<Published>>(QUEUE_TICKS);
        let (end, ended) = mpsc::channel();
        let health = Arc::new(Mutex::new(Health::default()));
        let mut recorder = Recorder {
            path: path.to_owned(),
            store: None,
            sampler: Sampler::default(),
            retry_at: None,
            thin_at: Instant::now(),
            health: health.clone(),
        };
        thread::Builder::new().name("history".to_owned()).spawn(move || {
            while let Ok(tick) = ticks.recv() {
                recorder.keep(&tick);
            }
            drop(recorder);
            drop(end);
        })?;
        Ok(Self { queue: Some(queue), ended, health })
    }

    /// Queues this tick. Never waits.
    pub fn record(&self, tick: &Arc<Published>) {
        let Some(queue) = &self.queue else { return };
        if queue.try_send(tick.clone()).is_err() {
            let mut health = lock(&self.health);
            health.lost += 1;
            let slow = || "the disk is slower than the readings come".to_owned();
            health.failing.get_or_insert_with(slow);
        }
    }

    /// Queues this tick, and waits if the queue is full: tests need every row.
    #[cfg(test)]
    pub(super) fn record_surely(&self, tick: Published) {
        let queue = self.queue.as_ref().unwrap();
        queue.send(Arc::new(tick)).unwrap();
    }

    /// Why readings and decisions are not kept, or what was done with an older file.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        let health = lock(&self.health);
        let failing = health.failing.as_ref().map(|why| {
            let lost = health.lost;
            format!("readings and decisions are not being kept ({lost} ticks lost so far): {why}")
        });
        let parts: Vec<String> = failing.into_iter().chain(health.note.clone()).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

impl Drop for History {
    fn drop(&mut self) {
        self.queue = None;
        // The thread keeps the other end until it is done; a hanging disk does not block us for
        // longer.
        let ended = self.ended.recv_timeout(FAREWELL);
        debug_assert!(matches!(
            ended,
            Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout)
        ));
    }
}

struct Recorder {
    path: PathBuf,
    store: Option<HistoryStore>,
    sampler: Sampler,
    retry_at: Option<Instant>,
    thin_at: Instant,
    health: Arc<Mutex<Health>>,
}

impl Recorder {
    fn keep(&mut self, tick: &Published) {
        let rows = self.sampler.rows(tick);
        let outcome = self.open(tick.wall_ms).and_then(|ready| {
            if !ready {
                return Ok(false);
            }
            let Some(store) = &mut self.store else { return Ok(false) };
            store.append(&rows)?;
            if Instant::now() >= self.thin_at {
                self.thin_at = Instant::now() + THIN;
                store.thin(tick.wall_ms)?;
            }
            Ok(true)
        });
        match outcome {
            Ok(true) => {
                let mut health = lock(&self.health);
                health.failing = None;
                health.lost = 0;
            }
            Ok(false) => lock(&self.health).lost += 1,
            Err(error) => self.fail(&error, tick.wall_ms),
        }
    }

    /// Opens the file unless it is open. Returns `false` during the pause after a failed attempt.
    fn open(&mut self, now_ms: u64) -> Result<bool, StoreError> {
        if self.store.is_some() {
            return Ok(true);
        }
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            return Ok(false);
        }
        self.retry_at = Some(Instant::now() + RETRY);
        let store = match HistoryStore::open(&self.path, MOST_BYTES) {
            Err(error) if error.is_unusable() => {
                self.set_aside(&error, now_ms)?;
                HistoryStore::open(&self.path, MOST_BYTES)
            }
            other => other,
        }?;
        self.store = Some(store);
        Ok(true)
    }

    fn fail(&mut self, error: &StoreError, now_ms: u64) {
        if error.is_unusable() {
            self.store = None;
            self.retry_at = None;
            // If the rename fails, the next tick finds the same file and reports it.
            if self.set_aside(error, now_ms).is_ok() {
                return;
            }
        }
        let mut health = lock(&self.health);
        health.lost += 1;
        health.failing = Some(error.to_string());
    }

    fn set_aside(&mut self, error: &StoreError, now_ms: u64) -> Result<(), StoreError> {
        let aside = store::set_aside(&self.path, now_ms)?;
        let note =
            format!("{error}; it was renamed to {} and a new history begun", aside.display());
        lock(&self.health).note = Some(note);
        Ok(())
    }
}
