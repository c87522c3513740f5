//! A swap file of the host for experiments in which it swaps, and the counts of pages swapped.
//!
//! Dropping it swaps everything in and removes the file. Processes with much memory in it should
//! have ended by then.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::Bytes;
use rustix::fs::{FallocateFlags, fallocate};
use sys::process::Spawn;

use crate::command;
use crate::lab::LabError;

/// Timeout for `swapoff`.
const OFF: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub struct SwapFile {
    path: PathBuf,
}

impl SwapFile {
    /// Makes one at `path` with the extension `swap`, and has the kernel use it. A file that a
    /// killed run left there is replaced.
    ///
    /// # Errors
    /// When this is not root, or the disk is full, or its file system cannot hold swap files.
    pub fn new(path: &Path, size: Bytes) -> Result<Self, LabError> {
        let path = path.with_extension("swap");
        if path.exists() {
            remove(&path);
        }
        let file = File::options().write(true).create_new(true).open(&path)?;
        let swap = Self { path };
        file.set_permissions(PermissionsExt::from_mode(0o600))?;
        fallocate(&file, FallocateFlags::empty(), 0, size.0).map_err(io::Error::from)?;
        for program in ["mkswap", "swapon"] {
            command::run(program, Spawn::new(program).arg(&swap.path))?;
        }
        Ok(swap)
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Does not use [`command::run`]: this must be done after Ctrl-C, too.
fn remove(path: &Path) {
    let off = Spawn::new("swapoff").arg(path).stderr(std::process::Stdio::null()).spawn();
    let _ = off.and_then(|mut child| child.wait_for(OFF));
    let _ = std::fs::remove_file(path);
}

/// Memory that the host as a whole has swapped since it booted, in MiB.
#[derive(Debug, Clone, Copy, Default)]
pub struct Swapped {
    /// Read back.
    pub in_mib: f64,
    /// Written.
    pub out_mib: f64,
}

impl Swapped {
    pub fn read() -> Result<Self, LabError> {
        let text = std::fs::read_to_string("/proc/vmstat")?;
        let mib = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
            value.unwrap_or(f64::NAN) / 256.0
        };
        Ok(Self { in_mib: mib("pswpin "), out_mib: mib("pswpout ") })
    }

    pub fn since(self, before: Self) -> Self {
        Self { in_mib: self.in_mib - before.in_mib, out_mib: self.out_mib - before.out_mib }
    }
}

/// A process's memory in swap, in MiB; NaN when the process is gone.
pub fn swapped_mib(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmSwap:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
