//! The QEMU that the lab runs: the system's when it is new enough, else one unpacked privately.
//!
//! **Problem.** QEMU 7.2, which Debian 12 has, corrupts guest memory when it migrates an emulated
//! guest, so no measurement on it can be trusted. [`OLDEST`] is the first version that does not.
//!
//! **Idea.** An unpacked QEMU runs anywhere when it knows the paths of its firmware (`-L`) and
//! its libraries (`LD_LIBRARY_PATH`). It is tried before it is used: if the machine has changed
//! since (a library was removed), QEMU is unpacked again.

use std::path::{Path, PathBuf};

use sys::process::Spawn;

use crate::cache::{Cache, CacheError};
use crate::command::{self, CommandError};
use crate::packages::{Apt, PackageError, Unpacked};

/// The oldest QEMU that the lab uses.
pub const OLDEST: Version = Version(8, 2);

const PROGRAM: &str = "qemu-system-x86_64";

/// Major and minor version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}.{}", self.0, self.1)
    }
}

/// Why there is no QEMU to run.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// The lab's guests are x86_64 only.
    #[error("the lab runs on x86_64 only; this machine is {0}")]
    Architecture(&'static str),
    /// The distribution's newest is too old.
    #[error("the newest QEMU to be had is {found}, the lab needs {OLDEST}: install a newer one")]
    TooOld {
        /// The version in the backports.
        found: Version,
    },
    /// The program's answer to `--version` is not QEMU's.
    #[error("{program} --version says {output:?}, which is no version of QEMU")]
    NotQemu {
        /// The program.
        program: PathBuf,
        /// Its first line.
        output: String,
    },
    /// It could not be downloaded.
    #[error("no QEMU of at least {OLDEST} is installed, and getting one failed: {0}")]
    Package(#[from] PackageError),
    /// The program does not run.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A QEMU that has run once.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// The program.
    pub program: PathBuf,
    /// The version that it reports.
    pub version: Version,
    /// The root under which it was unpacked; `None` for the system's.
    unpacked: Option<PathBuf>,
}

impl Qemu {
    /// The system's QEMU if it is new enough, else the cache's; downloaded when it is in neither.
    pub fn provide(cache: &Cache) -> Result<Self, QemuError> {
        if std::env::consts::ARCH != "x86_64" {
            return Err(QemuError::Architecture(std::env::consts::ARCH));
        }
        if let Some(system) = find_in_path().and_then(|program| Self::probe(program, None).ok())
            && system.version >= OLDEST
        {
            return Ok(system);
        }
        let entry = "qemu";
        if let Some(root) = cache.find(entry) {
            match Self::probe_unpacked(root.clone()) {
                Ok(qemu) if qemu.version >= OLDEST => return Ok(qemu),
                _ => std::fs::remove_dir_all(&root)
                    .map_err(|source| CacheError::Io { path: root, source })?,
            }
        }
        eprintln!(
            "lab: no QEMU of at least {OLDEST} here; unpacking one into {}",
            cache.root().display()
        );
        let root = cache.directory(entry, |dir| -> Result<(), QemuError> {
            Apt::open(cache)?.unpack_with_dependencies("qemu-system-x86", dir)?;
            // Only a QEMU that runs gets into the cache.
            let found = Self::probe_unpacked(dir.to_owned())?.version;
            if found < OLDEST { Err(QemuError::TooOld { found }) } else { Ok(()) }
        })?;
        Self::probe_unpacked(root)
    }

    /// The root under which it was unpacked; `None` for the system's.
    pub fn unpacked(&self) -> Option<&Path> {
        self.unpacked.as_deref()
    }

    /// A command for this QEMU, with the paths of its parts.
    pub fn command(&self) -> Spawn {
        let spawn = Spawn::new(&self.program);
        let Some(root) = &self.unpacked else { return spawn };
        let share = root.join("usr/share");
        spawn
            .env("LD_LIBRARY_PATH", Unpacked::at(root).libraries())
            .args(["-L".as_ref(), share.join("qemu").as_os_str()])
            .args(["-L".as_ref(), share.join("seabios").as_os_str()])
    }

    fn probe_unpacked(root: PathBuf) -> Result<Self, QemuError> {
        Self::probe(root.join("usr/bin").join(PROGRAM), Some(root))
    }

    fn probe(program: PathBuf, unpacked: Option<PathBuf>) -> Result<Self, QemuError> {
        let mut qemu = Self { program, version: Version(0, 0), unpacked };
        let output = command::run(PROGRAM, qemu.command().arg("--version"))?;
        let output = String::from_utf8_lossy(&output).into_owned();
        qemu.version = parse_version(&output).ok_or_else(|| QemuError::NotQemu {
            program: qemu.program.clone(),
            output: output.lines().next().unwrap_or_default().to_owned(),
        })?;
        Ok(qemu)
    }
}

fn find_in_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(PROGRAM)).find(|file| Path::is_file(file))
}

/// The version in `QEMU emulator version 10.0.2 (Debian ...)`.
fn parse_version(output: &str) -> Option<Version> {
    let number = output.split_once(" version ")?.1.split_whitespace().next()?;
    let mut parts = number.split('.').map(str::parse);
    Some(Version(parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers_not_as_text() {
        let version = parse_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds)").unwrap();
        assert!(version == Version(10, 0) && version > OLDEST);
        assert!(parse_version("QEMU emulator version 7.2.15").unwrap() < OLDEST);
    }

    #[test]
    fn what_is_no_version_is_refused() {
        assert_eq!(parse_version("busybox"), None);
        assert_eq!(parse_version("QEMU emulator version new"), None);
    }
}
