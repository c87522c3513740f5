//! Who shares what with whom, by the kernel: physical frames, mappings, descriptors, cgroups.

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

/// Pages in memory that several guests share.
#[derive(Debug)]
pub(super) struct Pages {
    /// How many different ones are shared by guests of different groups.
    pub(super) across: usize,
    /// How many each guest, by its QEMU's process, shares with others of its group.
    pub(super) within: BTreeMap<u32, usize>,
}

impl Pages {
    /// Now. It is looked twice, and the less counts: a frame that one guest has freed and another
    /// one got while they were looked at, one after the other, is not shared.
    pub(super) fn of(groups: &[Group]) -> Result<Self, LabError> {
        let (first, mut pages) = (Self::once(groups)?, Self::once(groups)?);
        pages.across = pages.across.min(first.across);
        for (qemu, shared) in &mut pages.within {
            *shared = (*shared).min(first.within.get(qemu).copied().unwrap_or(0));
        }
        Ok(pages)
    }

    fn once(groups: &[Group]) -> Result<Self, LabError> {
        // By frame: whose it is.
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

/// The pools, and who can reach what.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// How many pools the guests map.
    pub(super) pools: usize,
    /// Processes that hold a pool of a group that they are not of.
    pub(super) foreign_holders: usize,
    /// Descriptors of workers that lead into guests of their own groups.
    pub(super) own_descriptors: usize,
    /// … of other groups.
    pub(super) foreign_descriptors: usize,
    /// In how many cgroups the workers are, without the daemon's; `None` without cgroup v2.
    pub(super) cgroups: Option<usize>,
}

impl Reach {
    /// Now.
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

/// Whose `/proc/<pid>/…` a process has open, its own left out; once for each descriptor.
fn descriptors_into(pid: u32) -> Result<Vec<u32>, LabError> {
    let mut pids = Vec::new();
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // It may be closed meanwhile.
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
