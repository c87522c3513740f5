//! The two clocks of the host.
//!
//! The boot clock never jumps, continues while the machine sleeps, and keeps its meaning for a
//! restarted daemon: all times that Overbook keeps are on it. The wall clock is for people, and
//! for the few dates that arrive on it (such as QEMU's dates of a guest's statistics); it may
//! jump at any moment.

use model::Time;
use rustix::time::{ClockId, clock_gettime};

/// The present time on the boot clock.
#[must_use]
pub fn boot_now() -> Time {
    Time(millis(ClockId::Boottime))
}

/// The present time in milliseconds since the Unix epoch; zero before it.
#[must_use]
pub fn wall_now_ms() -> u64 {
    millis(ClockId::Realtime)
}

fn millis(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1000).saturating_add(nanos / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_clock_goes_forward_with_uptime() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let seconds: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        #[expect(clippy::cast_precision_loss, reason = "a test to the second")]
        let now = boot_now().0 as f64 / 1000.0;
        assert!((now - seconds).abs() < 1.0, "{now} against {seconds}");
    }
}
