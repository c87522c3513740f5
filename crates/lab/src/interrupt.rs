//! Ctrl-C and SIGTERM: one flag that every wait of the lab polls.
//!
//! **Idea.** A signal only raises a flag. Code that waits (for a download, a guest, a
//! measurement) polls the flag and leaves by the ordinary error path, which ends everything that
//! was started in order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The exit code after an interruption, as shells use it (128 + SIGINT).
pub const EXIT_INTERRUPTED: u8 = 130;

fn flag() -> &'static Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    FLAG.get_or_init(Arc::default)
}

/// From now on SIGINT, SIGTERM and SIGHUP raise the flag instead of ending the process.
pub fn watch_signals() -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag()))?;
    }
    Ok(())
}

/// Whether a signal asked the lab to end.
pub fn interrupted() -> bool {
    flag().load(Ordering::Relaxed)
}

/// A signal asked the lab to end.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Sleeps for `time`, or until the interruption.
pub fn sleep(time: Duration) -> Result<(), Interrupted> {
    let deadline = std::time::Instant::now() + time;
    loop {
        if interrupted() {
            return Err(Interrupted);
        }
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}
