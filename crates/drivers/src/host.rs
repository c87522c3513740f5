//! Readings of the host itself: its memory, and how busy its CPUs are.
//!
//! A reading takes a few small files and about 150 µs. Without PSI the reading lacks it. If
//! meminfo cannot be read there is no reading, and the policy grants no memory.

use model::{HostReading, Reading};
use sys::cpu_time::CpuTime;
use sys::meminfo::MemInfo;
use sys::procfs::ProcError;
use sys::swap::Swap;
use sys::{clock, pressure};

/// Reads the host repeatedly.
#[derive(Debug, Default)]
pub struct HostMeter {
    cpu: Option<CpuTime>,
}

impl HostMeter {
    /// Reads the host now.
    ///
    /// # Errors
    /// `/proc/meminfo` or the PSI file is invalid.
    pub fn read(&mut self) -> Result<Reading<HostReading>, ProcError> {
        let cpu_busy = self.cpu_busy();
        let memory = MemInfo::read()?;
        let pressure = pressure::of_host()?;
        let swap_cost = Swap::read()?.cost(&memory);
        let value = HostReading {
            total: memory.total,
            available: memory.available,
            swap_total: memory.swap_total,
            swap_free: memory.swap_free,
            swap_cost,
            psi_some_avg10: pressure.map(|p| p.some.avg10),
            psi_full_avg10: pressure.map(|p| p.full.avg10),
            cpu_busy,
        };
        Ok(Reading::new(value, clock::boot_now()))
    }

    /// Busy share of the CPUs since the last reading; `None` at the first one.
    fn cpu_busy(&mut self) -> Option<f32> {
        let now = CpuTime::read().ok();
        let before = std::mem::replace(&mut self.cpu, now);
        now?.busy_since(before?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_can_be_read() {
        let mut meter = HostMeter::default();
        let reading = meter.read().unwrap();
        assert!(reading.value.available <= reading.value.total);
        assert!(reading.age(clock::boot_now()).0 < 1000);
        assert_eq!(reading.value.cpu_busy, None, "a share takes two readings");
        std::thread::sleep(std::time::Duration::from_millis(50));
        let busy = meter.read().unwrap().value.cpu_busy.unwrap();
        assert!((0.0..=1.0).contains(&busy), "{busy}");
    }
}
