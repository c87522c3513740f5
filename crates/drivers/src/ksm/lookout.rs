//! Scans repeatedly which processes of the host have memory that KSM may merge, while that is
//! wanted.
//!
//! A scan takes from some milliseconds to seconds, depending on the kernel version and the host's
//! size, and the kernel may delay it behind a stuck process. So it runs apart from the loop, uses
//! at most about a hundredth of a CPU, and its result carries the time at which it began.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use model::{Mergeable, Reading};
use policy::ksm::Look;
use policy::tuning::{KSM_LOOK_PAUSE, KSM_LOOK_PAUSE_MOST};
use sys::clock::boot_now;
use sys::mergeable::Process;
use tokio::sync::watch;
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::timeout;

/// The pause after a scan is this many times as long as the scan took.
const PAUSES: u32 = 100;

/// The function that scans.
pub type Looking = fn() -> io::Result<Vec<Process>>;

/// The loop's handle of the scans. Dropping it ends them.
#[derive(Debug)]
pub struct Lookout {
    wanted: watch::Sender<bool>,
    latest: Arc<Mutex<Option<Reading<Look>>>>,
    task: AbortHandle,
}

impl Lookout {
    /// Starts without scanning. Needs a tokio runtime.
    #[must_use]
    pub fn start(look: Looking) -> Self {
        let (wanted, inbox) = watch::channel(false);
        let latest = Arc::<Mutex<Option<Reading<Look>>>>::default();
        let task = tokio::spawn(run(look, inbox, Arc::clone(&latest))).abort_handle();
        Self { wanted, latest, task }
    }

    /// Sets whether scans are wanted from now on.
    pub fn want(&self, is_wanted: bool) {
        self.wanted.send_if_modified(|last| std::mem::replace(last, is_wanted) != is_wanted);
    }

    /// Result of the last scan; `None`: none has ended since scans are wanted.
    #[must_use]
    pub fn latest(&self) -> Option<Reading<Look>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    look: Looking,
    mut wanted: watch::Receiver<bool>,
    latest: Arc<Mutex<Option<Reading<Look>>>>,
) {
    let set = |seen| *latest.lock().unwrap_or_else(PoisonError::into_inner) = seen;
    // An error means that the loop has dropped its handle.
    while wanted.wait_for(|is_wanted| *is_wanted).await.is_ok() {
        let (at, started) = (boot_now(), Instant::now());
        // An error means that the runtime is shutting down.
        let Ok(seen) = spawn_blocking(look).await else { return };
        set(Some(Reading::new(seen.map(told).map_err(|error| error.to_string()), at)));
        if let Ok(ended) = timeout(pause_after(started.elapsed()), wanted.wait_for(|is| !is)).await
        {
            set(None);
            if ended.is_err() {
                return;
            }
        }
    }
}

fn told(processes: Vec<Process>) -> Vec<Mergeable> {
    let told = |Process { pid, program, unknown }| Mergeable { pid, program, unknown };
    processes.into_iter().map(told).collect()
}

fn pause_after(took: Duration) -> Duration {
    let [least, most] = [KSM_LOOK_PAUSE, KSM_LOOK_PAUSE_MOST].map(|ms| Duration::from_millis(ms.0));
    (took * PAUSES).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> io::Result<Vec<Process>> {
        Ok(vec![Process { pid: 7, program: "qemu".to_owned(), unknown: None }])
    }

    async fn until(holds: impl Fn() -> bool) {
        let waiting = async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), waiting).await.unwrap();
    }

    #[tokio::test]
    async fn it_looks_while_somebody_wants_to_know_and_forgets_what_it_saw_before() {
        let lookout = Lookout::start(seen);
        assert_eq!(lookout.latest(), None);
        lookout.want(true);
        until(|| lookout.latest().is_some()).await;
        assert_eq!(lookout.latest().unwrap().value.unwrap()[0].pid, 7);
        lookout.want(false);
        until(|| lookout.latest().is_none()).await;
        lookout.want(true);
        until(|| lookout.latest().is_some()).await;
    }

    #[tokio::test]
    async fn who_can_see_nothing_says_so() {
        let lookout = Lookout::start(|| Err(io::Error::other("hidden")));
        lookout.want(true);
        until(|| lookout.latest().is_some()).await;
        assert_eq!(lookout.latest().unwrap().value, Err("hidden".to_owned()));
    }

    #[test]
    fn the_longer_a_look_takes_the_rarer_it_is() {
        let pause = |ms| pause_after(Duration::from_millis(ms)).as_secs();
        assert_eq!([pause(1), pause(120), pause(2_000)], [5, 12, 30]);
    }
}
