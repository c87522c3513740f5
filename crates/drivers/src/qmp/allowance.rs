//! Limits the number of events that a QEMU may send.
//!
//! A guest can make its QEMU send events (a disk that fails, over and over), and a compromised
//! QEMU can send any number. Reading them costs time that the other VMs' tasks need. So each
//! connection has an allowance of bytes that grows with time, up to [`BURST`]. A QEMU that
//! exceeds it is disconnected, and connected to again after a pause.

use std::time::Instant;

/// Bytes of events in a burst. An event of QEMU's has 100 to 500 bytes.
pub(super) const BURST: u32 = 256 << 10;
/// Bytes of events per second, in the long run.
pub(super) const RATE: u32 = 64 << 10;
/// Minimum cost of a line: its processing time does not only depend on its length.
const LEAST: u32 = 512;

/// The remaining allowance of one connection.
#[derive(Debug)]
pub(super) struct Allowance {
    left: f64,
    at: Instant,
}

impl Allowance {
    /// A full allowance.
    pub(super) fn new(now: Instant) -> Self {
        Self { left: f64::from(BURST), at: now }
    }

    /// Spends the cost of a line of `length` bytes. `false`: the allowance is exceeded.
    pub(super) fn spend(&mut self, length: usize, now: Instant) -> bool {
        let grown = now.saturating_duration_since(self.at).as_secs_f64() * f64::from(RATE);
        self.at = now;
        let cost = u32::try_from(length).unwrap_or(u32::MAX).max(LEAST);
        self.left = (self.left + grown).min(f64::from(BURST)) - f64::from(cost);
        self.left >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_passes_and_a_flood_does_not() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        let burst = (0..).take_while(|_| allowance.spend(100, now)).count();
        assert_eq!(burst, 512, "short lines cost {LEAST} bytes each");
        assert!(!Allowance::new(now).spend(1 << 20, now));
    }

    #[test]
    fn events_at_the_rate_pass_for_ever() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        let moments = (0..100_000).map(|n| start + Duration::from_millis(8) * n);
        assert!(moments.into_iter().all(|now| allowance.spend(300, now)), "125 a second");
    }
}
