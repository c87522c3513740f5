//! The features of this host's kernel, determined by trying them.
//!
//! Problem: version numbers are unreliable, because distributions backport, containers forbid,
//! and administrators disable features. Idea: each feature is used once, on a few pages of our
//! own or on a file that can be read without effect; the result is the finding. Nothing on the
//! host is changed.
//!
//! The findings hold for this process: its user and its container. `overbook check --host`
//! describes the consequences of a missing feature.

mod memory;
mod paging;
mod tlb;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::procfs::read;
use crate::{cgroup, pressure};

/// A feature that the kernel may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// A userfaultfd that also catches the kernel's own accesses.
    Userfaultfd,
    /// `UFFDIO_MOVE`, Linux 6.8.
    UffdioMove,
    /// `PAGEMAP_SCAN`, Linux 6.7.
    PagemapScan,
    /// A full userfaultfd for processes that are not root.
    UserfaultfdForUsers,
    /// `MADV_FREE`.
    MadvFree,
    /// `MADV_PAGEOUT`.
    MadvPageout,
    /// Memory pressure (PSI).
    Pressure,
    /// CPU time per cgroup.
    CgroupCpu,
    /// Memory per cgroup, version 2 or 1.
    CgroupMemory,
    /// Merging of identical pages by the kernel.
    Ksm,
    /// A hardware counter of data-TLB misses.
    TlbMisses,
    /// Transparent huge pages.
    HugePages,
    /// Swap space.
    Swap,
    /// Moving pages that are being swapped.
    MovesSwapped,
    /// Paging out another process's memory, to compressed memory.
    PagesOutside,
}

/// All features, the most important first.
pub const ALL: [Feature; 15] = [
    Feature::Userfaultfd,
    Feature::UffdioMove,
    Feature::PagemapScan,
    Feature::UserfaultfdForUsers,
    Feature::MadvFree,
    Feature::MadvPageout,
    Feature::Pressure,
    Feature::CgroupCpu,
    Feature::CgroupMemory,
    Feature::Ksm,
    Feature::TlbMisses,
    Feature::HugePages,
    Feature::Swap,
    Feature::MovesSwapped,
    Feature::PagesOutside,
];

/// The result of a trial, with a description in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The feature works.
    Works(String),
    /// The feature does not work.
    Missing(String),
}

impl Finding {
    /// Whether the feature works.
    #[must_use]
    pub const fn works(&self) -> bool {
        matches!(self, Self::Works(_))
    }

    /// The description: how it works, or why it does not.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self {
            Self::Works(detail) | Self::Missing(detail) => detail,
        }
    }
}

impl From<Result<String, String>> for Finding {
    fn from(result: Result<String, String>) -> Self {
        result.map_or_else(Self::Missing, Self::Works)
    }
}

/// Tries a feature.
#[must_use]
pub fn probe(feature: Feature) -> Finding {
    let result = match feature {
        Feature::Userfaultfd => memory::userfaultfd(),
        Feature::UffdioMove => memory::uffdio_move(),
        Feature::PagemapScan => memory::pagemap_scan(),
        Feature::UserfaultfdForUsers => userfaultfd_for_users(Path::new("/")),
        Feature::MadvFree => memory::advice(rustix::mm::Advice::LinuxFree),
        Feature::MadvPageout => memory::advice(rustix::mm::Advice::LinuxPageOut),
        Feature::Pressure => psi(),
        Feature::CgroupCpu => cgroup_cpu(),
        Feature::CgroupMemory => cgroup_memory(Path::new("/")),
        Feature::Ksm => memory::advice(rustix::mm::Advice::LinuxMergeable),
        Feature::TlbMisses => tlb::misses(),
        Feature::HugePages => huge_pages(Path::new("/")),
        Feature::Swap => swap(Path::new("/")),
        Feature::MovesSwapped => paging::moves_swapped(),
        Feature::PagesOutside => paging::from_outside(),
    };
    result.into()
}

/// Finds who may use userfaultfd, from file modes. A trial would need the identity of every user.
fn userfaultfd_for_users(root: &Path) -> Result<String, String> {
    let sysctl = root.join("proc/sys/vm/unprivileged_userfaultfd");
    if read(&sysctl).is_ok_and(|text| text.trim() == "1") {
        return Ok("vm.unprivileged_userfaultfd is 1".to_owned());
    }
    let device = root.join("dev/userfaultfd");
    let Ok(metadata) = fs::metadata(&device) else {
        return Err("vm.unprivileged_userfaultfd is 0, and there is no /dev/userfaultfd".to_owned());
    };
    let mode = metadata.mode() & 0o777;
    if mode & 0o006 == 0o006 {
        return Ok(format!("/dev/userfaultfd has mode {mode:04o}"));
    }
    let group = metadata.gid();
    if mode & 0o060 == 0o060 && group != 0 {
        return Ok(format!("/dev/userfaultfd lets group {group} in (mode {mode:04o})"));
    }
    Err(format!("/dev/userfaultfd has mode {mode:04o}: root alone may use it"))
}

fn psi() -> Result<String, String> {
    match pressure::of_host() {
        Ok(Some(_)) => Ok("/proc/pressure/memory".to_owned()),
        Ok(None) => Err("built without PSI, or switched off by psi=0 at boot".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn cgroup_cpu() -> Result<String, String> {
    let dir = cgroup::of_process(std::process::id()).map_err(|error| error.to_string())?;
    let dir = dir.ok_or("no cgroup v2 tree is mounted")?;
    cgroup::cpu_usage_us(&dir).map_err(|error| error.to_string())?;
    Ok("cgroup v2, cpu.stat".to_owned())
}

fn cgroup_memory(root: &Path) -> Result<String, String> {
    let base = root.join("sys/fs/cgroup");
    for tree in [base.clone(), base.join("unified")] {
        let controllers = read(&tree.join("cgroup.controllers")).unwrap_or_default();
        if controllers.split_whitespace().any(|controller| controller == "memory") {
            return Ok("cgroup v2".to_owned());
        }
    }
    if base.join("memory/memory.usage_in_bytes").exists() {
        return Ok("cgroup v1".to_owned());
    }
    Err("neither cgroup v2 nor v1 has the memory controller here".to_owned())
}

fn huge_pages(root: &Path) -> Result<String, String> {
    let path = root.join("sys/kernel/mm/transparent_hugepage/enabled");
    let text = read(&path).map_err(|error| error.to_string())?;
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("unreadable").to_owned();
    if matches!(chosen.as_str(), "always" | "madvise") {
        Ok(chosen)
    } else {
        Err(format!("{} is {chosen:?}", path.display()))
    }
}

fn swap(root: &Path) -> Result<String, String> {
    let text = read(&root.join("proc/swaps")).map_err(|error| error.to_string())?;
    let kib: u64 = text
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok())
        .sum();
    if kib == 0 {
        return Err("no swap space is on".to_owned());
    }
    let zswap = read(&root.join("sys/module/zswap/parameters/enabled"));
    let zswap = if zswap.is_ok_and(|text| text.trim() == "Y") { ", behind zswap" } else { "" };
    Ok(format!("{} MiB{zswap}", kib >> 10))
}

#[cfg(test)]
mod tests;
