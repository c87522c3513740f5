//! The host's own memory, as one reading.
//!
//! Two small files, about 40 µs. A host without PSI has a reading without it; a host whose meminfo
//! cannot be read has no reading, and the policy hands nothing out.

use model::{HostReading, Reading};
use sys::meminfo::MemInfo;
use sys::procfs::ProcError;
use sys::{clock, pressure};

/// Reads the host's memory now.
///
/// # Errors
/// When `/proc/meminfo` or the PSI file makes no sense.
pub fn read() -> Result<Reading<HostReading>, ProcError> {
    let memory = MemInfo::read()?;
    let pressure = pressure::of_host()?;
    let value = HostReading {
        total: memory.total,
        available: memory.available,
        swap_total: memory.swap_total,
        swap_free: memory.swap_free,
        psi_some_avg10: pressure.map(|p| p.some.avg10),
        psi_full_avg10: pressure.map(|p| p.full.avg10),
    };
    Ok(Reading::new(value, clock::boot_now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_can_be_read() {
        let reading = read().unwrap();
        assert!(reading.value.available <= reading.value.total);
        assert!(reading.age(clock::boot_now()).0 < 1000);
    }
}
