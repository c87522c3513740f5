//! Waiting for a child without blocking: the daemon has one thread.

use std::process::ExitStatus;
use std::time::Duration;

use sys::process::Child;
use tokio::time::{Instant, sleep};

/// How often it is looked.
const LOOK: Duration = Duration::from_millis(10);

/// Its exit status, if it ends within `limit`.
pub(super) async fn ended(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if Instant::now() >= deadline {
            return None;
        }
        sleep(LOOK).await;
    }
}
