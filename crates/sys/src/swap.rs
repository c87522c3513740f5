//! The host's swap: its devices, and the memory that it uses itself.
//!
//! A swapped page takes a page of a disk or, compressed, some memory: in a zram device, or in
//! zswap before a disk. The occupied memory of a process includes that. The kernel reports it for
//! whole devices; the part of a process follows from its share of the swapped memory.

use std::path::{Path, PathBuf};

use model::Bytes;

use crate::meminfo::MemInfo;
use crate::procfs::{ProcError, kib_field, read};

/// A swap device or file in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its path, as the kernel names it.
    pub path: PathBuf,
    /// Its size.
    pub size: Bytes,
    /// The used part of it.
    pub used: Bytes,
    /// The memory that it uses, compressed, if it is a device in memory (zram).
    pub memory: Option<Bytes>,
    /// The kernel fills devices of a higher priority first.
    pub priority: i32,
}

/// All of the host's swap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swap {
    /// The devices in the kernel's order.
    pub devices: Vec<Device>,
    /// The memory that zswap uses, before the devices; 0 if it is off or empty.
    pub zswap: Bytes,
}

impl Swap {
    /// Reads the state: three small files, and one for each zram device.
    ///
    /// # Errors
    /// When `/proc/swaps` or `/proc/meminfo` cannot be read.
    pub fn read() -> Result<Self, ProcError> {
        let mut devices = parse(&read(Path::new("/proc/swaps"))?);
        for device in &mut devices {
            device.memory = memory_of(&device.path);
        }
        let path = Path::new("/proc/meminfo");
        let zswap = kib_field(path, &read(path)?, "Zswap:")?.unwrap_or_default();
        Ok(Self { devices, zswap })
    }

    /// The devices that the kernel fills first.
    pub fn first(&self) -> impl Iterator<Item = &Device> + Clone {
        let highest = self.devices.iter().map(|device| device.priority).max();
        self.devices.iter().filter(move |device| Some(device.priority) == highest)
    }

    /// The free part of the devices that the kernel fills first.
    #[must_use]
    pub fn free_first(&self) -> Bytes {
        self.first().map(|device| device.size.minus(device.used)).sum()
    }

    /// The memory that all swapped pages use.
    #[must_use]
    pub fn memory(&self) -> Bytes {
        self.devices.iter().filter_map(|device| device.memory).sum::<Bytes>().plus(self.zswap)
    }

    /// The memory used for each swapped byte, of which `memory` gives the number: usually 0 to 1,
    /// and more if pages cannot be compressed.
    #[must_use]
    pub fn cost(&self, memory: &MemInfo) -> f32 {
        let swapped = memory.swap_total.minus(memory.swap_free);
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        let ratio = self.memory().0 as f32 / swapped.0.max(1) as f32;
        if swapped.is_zero() { 0.0 } else { ratio }
    }
}

fn parse(text: &str) -> Vec<Device> {
    let device = |line: &str| {
        let mut words = line.split_whitespace();
        let path = PathBuf::from(words.next()?);
        let mut kib = || words.next()?.parse::<u64>().ok().map(Bytes::kib);
        // The first word is the kind: file or partition.
        let (_, size, used) = (kib(), kib()?, kib()?);
        let priority = words.next()?.parse().ok()?;
        Some(Device { path, size, used, memory: None, priority })
    };
    text.lines().skip(1).filter_map(device).collect()
}

/// The memory that a zram device uses; `None`: it is not a zram device.
fn memory_of(device: &Path) -> Option<Bytes> {
    let name = device.strip_prefix("/dev").ok()?.to_str()?;
    let text = std::fs::read_to_string(format!("/sys/block/{name}/mm_stat")).ok()?;
    // orig_data_size, compr_data_size, mem_used_total, …
    text.split_whitespace().nth(2)?.parse().ok().map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
            /dev/zram0                              partition\t1048572\t\t2048\t\t100\n\
            /swap\\040file                           file\t\t4\t0\t-2\nnonsense\n";
        let devices = parse(text);
        let known = |device: &Device| (device.size, device.used);
        assert_eq!(devices.len(), 2);
        assert_eq!(known(&devices[0]), (Bytes::kib(1_048_572), Bytes::mib(2)));
        assert_eq!(known(&devices[1]), (Bytes::kib(4), Bytes::ZERO));
        assert!(parse("").is_empty());
    }

    #[test]
    fn what_is_swapped_out_takes_what_its_devices_do() {
        let memory = Some(Bytes::mib(30));
        let zram = Device {
            path: "/dev/zram0".into(),
            size: Bytes::mib(1),
            used: Bytes::ZERO,
            memory,
            priority: 0,
        };
        let disk = Device { path: "/swap".into(), memory: None, ..zram.clone() };
        let swap = Swap { devices: vec![zram, disk], zswap: Bytes::mib(10) };
        let host = |free| MemInfo {
            total: Bytes::mib(1),
            available: Bytes::mib(1),
            swap_total: Bytes::mib(100),
            swap_free: Bytes::mib(free),
        };
        assert!((swap.cost(&host(20)) - 0.5).abs() < 1e-6);
        assert!(swap.cost(&host(100)).abs() < 1e-6, "nothing is swapped out");
    }

    #[test]
    fn this_hosts_swap_can_be_read() {
        let swap = Swap::read().unwrap();
        assert!(swap.devices.iter().all(|device| device.used <= device.size));
    }
}
