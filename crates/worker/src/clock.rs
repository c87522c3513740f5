//! The shim's time: microseconds of `CLOCK_MONOTONIC`, of which a trap contains the lower half.

use std::time::Duration;

use model::Time;
use rustix::time::{ClockId, clock_gettime};
use sys::clock::boot_now;

/// The present time.
pub(super) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000).saturating_add(u64::try_from(now.tv_nsec / 1000).unwrap_or(0))
}

/// The same in milliseconds, the unit of the algorithms.
pub(super) fn time(us: u64) -> Time {
    Time(us / 1_000)
}

/// The same moment on the boot clock, which the daemon uses for dates; never later than now.
pub(super) fn boot(at: Time) -> Time {
    let ago = time(now_us()).since(at);
    Time(boot_now().0.saturating_sub(ago.0))
}

/// The moment on the boot clock that was `ago` before now.
pub(super) fn boot_ago(ago: Duration) -> Time {
    Time(boot_now().0.saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX)))
}

/// CPU time of the calling thread, in nanoseconds.
pub(super) fn own_cpu_ns() -> u64 {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(used.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(used.tv_nsec).unwrap_or(0))
}

/// The moment whose lower half is `lower`: at most half a round (36 minutes) before `now_us`, and
/// never after it, for any value from a shim.
pub(super) fn moment(lower: u32, now_us: u64) -> Time {
    time(moment_us(lower, now_us))
}

fn moment_us(lower: u32, now_us: u64) -> u64 {
    let [a, b, c, d, ..] = now_us.to_le_bytes();
    let age = u32::from_le_bytes([a, b, c, d]).wrapping_sub(lower);
    if age > u32::MAX / 2 { now_us } else { now_us.saturating_sub(age.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_found_again_across_the_turn_of_the_lower_half() {
        let now = (7 << 32) + 5;
        assert_eq!(moment_us(5, now), now);
        assert_eq!(moment_us(u32::MAX, now), now - 6);
        assert_eq!(moment_us(6, now), now, "a trap is never ahead of us");
        assert_eq!(moment_us(9, 4), 4);
    }
}
