//! The memory of one of several hosts on one machine, as its daemon reads it.
//!
//! **Problem.** A daemon reads `MemTotal` and `MemAvailable` of the machine, which all hosts of
//! the lab share. **Idea.** The daemon has a mount namespace in which a file lies over
//! `/proc/meminfo`. The file has the host's own two lines: a fixed total, and the total less
//! [`KERNEL`] and the guests' memory in this host's QEMUs. A QEMU's own memory is not counted,
//! because an emulating one has tens of megabytes of translated code.
//!
//! Nothing makes a guest suffer when this memory is exceeded; the least that was available is
//! recorded.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use model::Bytes;
use sys::memory_of::Overhead;
use sys::process::Spawn;

use crate::background::Background;
use crate::lab::LabError;

/// Memory that the kernel and programs of the host take.
pub const KERNEL: Bytes = Bytes::mib(64);
/// Interval between two looks at its QEMUs.
const PERIOD: Duration = Duration::from_millis(500);

/// Such a memory; dropping it ends the counting.
#[derive(Debug)]
pub struct OwnMemory {
    file: PathBuf,
    available: Arc<AtomicU64>,
    _thread: Background<()>,
}

impl OwnMemory {
    /// A memory of `total` for the host with its files in `dir`. Its QEMUs are those with a socket
    /// in a directory `qmp` in it, and each has guest RAM of size `ram`.
    pub fn start(dir: &Path, total: Bytes, ram: Bytes) -> Result<Self, LabError> {
        let path = dir.join("meminfo");
        let (file, available) = (File::create(&path)?, Arc::new(AtomicU64::new(total.0)));
        let (its, of) = (Arc::clone(&available), format!("{}/", dir.display()));
        write(&file, total, total.minus(KERNEL))?;
        let thread = Background::start("own-memory", move |stop| {
            while !stop.is_given() {
                let left = total.minus(KERNEL).minus(used(&of, ram));
                its.store(left.0, Ordering::Relaxed);
                // The daemon goes on with the reading before.
                let _ = write(&file, total, left);
                thread::sleep(PERIOD);
            }
        })?;
        Ok(Self { file: path, available, _thread: thread })
    }

    /// The memory that is available now.
    pub fn available(&self) -> Bytes {
        Bytes(self.available.load(Ordering::Relaxed))
    }

    /// A command that starts a program which reads this memory as the machine's.
    pub fn spawn(&self, program: &Path) -> Spawn {
        let mount = "mount --bind \"$0\" /proc/meminfo && exec \"$@\"";
        Spawn::new("unshare").args(["--mount", "sh", "-c", mount]).arg(&self.file).arg(program)
    }
}

/// Guests' memory in all QEMUs of a host.
fn used(dir: &str, ram: Bytes) -> Bytes {
    let Ok(processes) = fs::read_dir("/proc") else { return Bytes::ZERO };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let qemus = pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_qemu_of(&String::from_utf8_lossy(&line), dir)
    });
    // One that has ended has none.
    qemus.filter_map(|pid| Some(Overhead::measure(pid, &[ram]).ok()?.guest)).sum()
}

fn is_qemu_of(command_line: &str, dir: &str) -> bool {
    let has_socket =
        |word: &str| word.split_once(dir).is_some_and(|(_, rest)| rest.contains("/qmp/"));
    command_line.contains("qemu-system") && command_line.split('\0').any(has_socket)
}

/// Writes the machine's lines with these two changed. All lines keep their lengths, so a reader
/// finds a whole file.
fn write(file: &File, total: Bytes, available: Bytes) -> io::Result<()> {
    let machine = fs::read_to_string("/proc/meminfo")?;
    file.write_all_at(changed(&machine, total, available).as_bytes(), 0)
}

fn changed(machine: &str, total: Bytes, available: Bytes) -> String {
    let line = |line: &str| match line.split_once(':') {
        Some((name @ "MemTotal", _)) => row(name, total),
        Some((name @ "MemAvailable", _)) => row(name, available),
        _ => format!("{line}\n"),
    };
    machine.lines().map(line).collect()
}

fn row(name: &str, size: Bytes) -> String {
    format!("{:<15} {:>8} kB\n", format!("{name}:"), size.0 >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_lines_are_the_hosts_own() {
        let machine = "MemTotal:       24689564 kB\nMemFree:        22689564 kB\n\
                       MemAvailable:   23689564 kB\n";
        let own = changed(machine, Bytes::mib(2), Bytes::mib(1));
        let wanted = "MemTotal:           2048 kB\nMemFree:        22689564 kB\n\
                      MemAvailable:       1024 kB\n";
        assert_eq!(own, wanted);
        assert_eq!(own.len(), machine.len());
    }

    #[test]
    fn a_qemu_belongs_to_the_host_with_its_socket() {
        let line = "/usr/bin/qemu-system-x86_64\0-drive\0file=/pool/a/disks/x\0\
                    unix:/pool/b/local/qmp/x.sock,server";
        assert!(is_qemu_of(line, "/pool/b/"));
        assert!(!is_qemu_of(line, "/pool/a/") && !is_qemu_of("sh\0/pool/b/qmp/x", "/pool/b/"));
    }
}
