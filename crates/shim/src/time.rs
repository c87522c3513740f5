//! The monotonic clock, read without allocating, as numbers that atomics can hold.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`; 0 never happens on a running machine and means "no time".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Nanos(pub(crate) u64);

/// The current time.
pub(crate) fn now() -> Nanos {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Nanos(seconds * 1_000_000_000 + nanos)
}

/// CPU time of the calling thread since it began.
pub(crate) fn own_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanos)
}

impl Nanos {
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    pub(crate) fn after(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time.as_nanos_u64()))
    }

    /// Microseconds modulo 2^32, as [`protocol::Trap`] carries them.
    pub(crate) fn micros_wrapping(self) -> u32 {
        // The truncation is intended.
        #[allow(clippy::cast_possible_truncation)]
        let low = (self.0 / 1000) as u32;
        low
    }
}

/// Conversion to nanoseconds. Durations here are minutes at most.
pub(crate) trait AsNanos {
    fn as_nanos_u64(&self) -> u64;
}

impl AsNanos for Duration {
    fn as_nanos_u64(&self) -> u64 {
        u64::try_from(self.as_nanos()).unwrap_or(u64::MAX)
    }
}
