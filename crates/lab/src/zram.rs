//! A swap device of the host in compressed memory (zram), for experiments with memory that the
//! host pages out.
//!
//! Dropping it swaps everything in and removes the device. Processes with much memory in it
//! should have ended by then.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::Bytes;
use sys::process::Spawn;

use crate::command;
use crate::lab::LabError;

const CONTROL: &str = "/sys/class/zram-control";
/// Timeout for `swapoff` and the removal.
const OFF: Duration = Duration::from_secs(120);
/// Pause between two attempts to remove it.
const AGAIN: Duration = Duration::from_millis(50);
/// A higher priority than all other swap.
const PRIORITY: &str = "1000";

/// A device in use.
#[derive(Debug)]
pub struct Zram {
    number: u32,
}

impl Zram {
    /// Makes one for `size` of pages, before compression, and has the kernel use it.
    ///
    /// # Errors
    /// When this is not root, or the kernel has no zram.
    pub fn new(size: Bytes) -> Result<Self, LabError> {
        let hot_add = Path::new(CONTROL).join("hot_add");
        let number = fs::read_to_string(&hot_add).map_err(|error| {
            io::Error::other(format!("{}: {error}: the kernel has no zram", hot_add.display()))
        })?;
        let device = Self { number: number.trim().parse().map_err(io::Error::other)? };
        let attribute = |name: &str| device.sys().join(name);
        // A kernel without lz4 keeps its default.
        let _ = fs::write(attribute("comp_algorithm"), "lz4");
        fs::write(attribute("disksize"), size.0.to_string())?;
        command::run("mkswap", Spawn::new("mkswap").arg(device.path()))?;
        command::run("swapon", Spawn::new("swapon").args(["-p", PRIORITY]).arg(device.path()))?;
        Ok(device)
    }

    /// Bytes of pages in it, and the memory that they take.
    pub fn stored(&self) -> Result<(Bytes, Bytes), LabError> {
        let text = fs::read_to_string(self.sys().join("mm_stat"))?;
        let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap_or(0));
        let (pages, _, memory) = (numbers.next(), numbers.next(), numbers.next());
        Ok((Bytes(pages.unwrap_or(0)), Bytes(memory.unwrap_or(0))))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.number))
    }

    fn sys(&self) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}", self.number))
    }
}

/// Does not use [`command::run`]: this must be done after Ctrl-C, too.
impl Drop for Zram {
    fn drop(&mut self) {
        let swapoff = || {
            let off = Spawn::new("swapoff").arg(self.path()).stderr(std::process::Stdio::null());
            off.spawn()?.wait_for(OFF)
        };
        let remove = || fs::write(Path::new(CONTROL).join("hot_remove"), self.number.to_string());
        let until = Instant::now() + OFF;
        loop {
            let is_off = swapoff();
            // A program that probes new disks may still have it open.
            let Err(error) = remove() else { return };
            if !self.sys().exists() {
                return;
            }
            if Instant::now() > until {
                // Later experiments would swap to it.
                let path = self.path();
                eprintln!("{} stays: swapoff: {is_off:?}; hot_remove: {error}", path.display());
                return;
            }
            std::thread::sleep(AGAIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn a_device_is_used_and_gone_when_dropped() {
        let Some(device) = requires(Requirement::Zram, Zram::new(Bytes::mib(64))) else { return };
        let path = device.path().display().to_string();
        let is_used = || fs::read_to_string("/proc/swaps").unwrap().contains(&path);
        assert!(is_used());
        assert!(device.stored().unwrap().0 < Bytes::mib(64));
        let sys = device.sys();
        drop(device);
        assert!(!is_used() && !sys.exists());
    }
}
