//! Frames, mappings, descriptors and cgroups that processes share, by the kernel's own data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use sys::pool_maps::{self, FileId};
use sys::{cgroup, frames};

use crate::lab::LabError;

/// The QEMU processes of a group's guests, and its worker.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) qemus: Vec<u32>,
    pub(super) worker: u32,
}

/// Resident pages that several guests share.
#[derive(Debug)]
pub(super) struct Pages {
    /// Different pages that guests of different groups share.
    pub(super) across: usize,
    /// The number of pages that each guest, by its QEMU's process, shares with others of its
    /// group.
    pub(super) within: BTreeMap<u32, usize>,
}

impl Pages {
    /// Counts now, twice, and returns the lower counts. A frame that one guest freed and another
    /// one got between their readings is not shared.
    pub(super) fn of(groups: &[Group]) -> Result<Self, LabError> {
        let (first, mut pages) = (Self::once(groups)?, Self::once(groups)?);
        pages.across = pages.across.min(first.across);
        for (qemu, shared) in &mut pages.within {
            *shared = (*shared).min(first.within.get(qemu).copied().unwrap_or(0));
        }
        Ok(pages)
    }

    fn once(groups: &[Group]) -> Result<Self, LabError> {
        // By frame: its owners.
        let mut owners: BTreeMap<u64, Vec<(usize, u32)>> = BTreeMap::new();
        let mut within = BTreeMap::new();
        for (group, members) in groups.iter().enumerate() {
            for &qemu in &members.qemus {
                within.insert(qemu, 0);
                for frame in frames::of_guest(qemu)? {
                    owners.entry(frame).or_default().push((group, qemu));
                }
            }
        }
        owners.retain(|_, owners| owners.len() > 1);
        for zeros in frames::zeros(owners.keys().copied())? {
            owners.remove(&zeros);
        }
        let mut across = 0;
        for owners in owners.values() {
            let groups: BTreeSet<usize> = owners.iter().map(|owner| owner.0).collect();
            across += usize::from(groups.len() > 1);
            for (group, qemu) in owners {
                let has_mate = owners.iter().any(|other| other.0 == *group && other.1 != *qemu);
                *within.entry(*qemu).or_default() += usize::from(has_mate);
            }
        }
        Ok(Self { across, within })
    }
}

/// The groups' pools, and the processes with access to them.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// The number of pools that the guests map.
    pub(super) pools: usize,
    /// Processes that hold a pool of another group.
    pub(super) foreign_holders: usize,
    /// Descriptors of workers to guests of their own groups.
    pub(super) own_descriptors: usize,
    /// Descriptors of workers to guests of other groups.
    pub(super) foreign_descriptors: usize,
    /// The number of cgroups with workers in them, without the daemon's; `None` without cgroup
    /// v2.
    pub(super) cgroups: Option<usize>,
}

impl Reach {
    /// Measures now.
    pub(super) fn of(groups: &[Group], daemon: u32) -> Result<Self, LabError> {
        let mut reach = Self::default();
        let mut cgroups = BTreeSet::new();
        let mut pools = BTreeSet::new();
        for group in groups {
            let is_of_group = |pid: &u32| group.qemus.contains(pid) || *pid == group.worker;
            let own_pools = pools_of(&group.qemus)?;
            let holders = own_pools.iter().flat_map(|pool| pool_maps::holders(*pool));
            reach.foreign_holders += holders.filter(|pid| !is_of_group(pid)).count();
            pools.extend(own_pools);
            for pid in descriptors_into(group.worker)? {
                if is_of_group(&pid) {
                    reach.own_descriptors += 1;
                } else {
                    reach.foreign_descriptors += 1;
                }
            }
            cgroups.extend(cgroup_of(group.worker)?);
        }
        reach.pools = pools.len();
        reach.cgroups = cgroup_of(daemon)?.map(|daemons| {
            cgroups.remove(&daemons);
            cgroups.len()
        });
        Ok(reach)
    }
}

fn cgroup_of(pid: u32) -> Result<Option<PathBuf>, LabError> {
    Ok(cgroup::of_process(pid).map_err(std::io::Error::other)?)
}

fn pools_of(qemus: &[u32]) -> Result<BTreeSet<FileId>, LabError> {
    let mut pools = BTreeSet::new();
    for qemu in qemus {
        pools.extend(pool_maps::mappings(*qemu)?.into_iter().map(|mapping| mapping.file));
    }
    Ok(pools)
}

/// Owners of the `/proc/<pid>/…` files that a process has open, without itself; once for each
/// descriptor.
fn descriptors_into(pid: u32) -> Result<Vec<u32>, LabError> {
    let mut pids = Vec::new();
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // The descriptor may be closed meanwhile.
        let target = std::fs::read_link(descriptor?.path()).unwrap_or_default();
        let whose = target.strip_prefix("/proc").ok().and_then(|below| below.iter().next());
        pids.extend(whose.and_then(|whose| whose.to_str()?.parse::<u32>().ok()));
    }
    pids.retain(|whose| *whose != pid);
    Ok(pids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_into_another_process_is_seen_and_others_are_not() {
        let pid = std::process::id();
        let _own = std::fs::File::open(format!("/proc/{pid}/maps")).unwrap();
        let _other = std::fs::File::open("/proc/1/stat").unwrap();
        let _none = std::fs::File::open("/proc/uptime").unwrap();
        assert_eq!(descriptors_into(pid).unwrap(), [1]);
    }
}
