//! What this host's kernel can do, found out by trying.
//!
//! Problem: version numbers lie. Distributions backport, containers forbid, the administrator
//! switches off. Idea: each feature is used once, on a few pages of our own or on a file that only
//! answers, and what happens is the finding. Nothing on the host is changed.
//!
//! The findings hold for this process: its user, its container. What they cost whom is not the
//! kernel's business and stands with `overbook check --host`.

mod memory;
mod paging;
mod tlb;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::procfs::read;
use crate::{cgroup, pressure};

/// Something that the kernel may be able to do.
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

/// All of them, what matters most first.
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

/// What came of trying: in both cases, in words, how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// It works.
    Works(String),
    /// It does not.
    Missing(String),
}

impl Finding {
    /// Whether it works.
    #[must_use]
    pub const fn works(&self) -> bool {
        matches!(self, Self::Works(_))
    }

    /// How, or why not.
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

/// Which file lets whom. Not tried: that would need every user's identity.
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
