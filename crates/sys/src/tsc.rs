//! The rate of this machine's time stamp counter.
//!
//! **Problem.** An emulated guest reads the host's counter and calibrates it against an emulated
//! timer. On a busy host that timer stutters, and the guest's clock may then be wrong by a
//! multiple. A guest that is given the right rate need not calibrate.
//!
//! **Idea.** Two readings of counter and clock, some time apart. Each is the closest of several
//! tries, so an interruption between counter and clock does not spoil it.

use std::time::{Duration, Instant};

/// The interval between the readings. The error of each is below a microsecond: 1 in 100,000.
const APART: Duration = Duration::from_millis(100);

/// Ticks per millisecond, measured once.
#[cfg(target_arch = "x86_64")]
pub fn khz() -> u64 {
    static KHZ: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *KHZ.get_or_init(|| {
        let (ticks_before, before) = read();
        std::thread::sleep(APART);
        let (ticks_after, after) = read();
        let ticks = u128::from(ticks_after.wrapping_sub(ticks_before));
        let nanos = after.duration_since(before).as_nanos().max(1);
        u64::try_from(ticks * 1_000_000 / nanos).unwrap_or(u64::MAX)
    })
}

/// Reads counter and clock at the same moment.
#[cfg(target_arch = "x86_64")]
fn read() -> (u64, Instant) {
    // SAFETY: every x86_64 processor has the instruction, and it touches no memory.
    let ticks = || unsafe { core::arch::x86_64::_rdtsc() };
    let one = |_| {
        let (before, now, after) = (ticks(), Instant::now(), ticks());
        (after.wrapping_sub(before), before, now)
    };
    let (_, ticks, now) = (0..32).map(one).min().unwrap_or_else(|| one(0));
    (ticks, now)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_rate_predicts_the_counter() {
        let (ticks_before, before) = read();
        std::thread::sleep(Duration::from_millis(50));
        let (ticks_after, after) = read();
        let micros = after.duration_since(before).as_micros();
        let expected = micros * u128::from(khz()) / 1000;
        let seen = u128::from(ticks_after - ticks_before);
        assert!(seen.abs_diff(expected) * 1000 < expected, "{seen} ticks, {expected} expected");
    }
}
