//! The host of a pool on which one more VM of a group saves the most memory (Kim 2014, section 8.2:
//! VMs of a group belong together).
//!
//! **Idea.** Only VMs of one group share pages, so a VM shares nothing on a host without its group.
//! Where `n` VMs of the group have saved `s` bytes, one of `n` copies of each page is left, so one
//! more VM saves about `s / (n - 1)`. Where one VM of the group runs, the mean over the other hosts
//! is assumed. Measured savings count, and no tables: a table only proposes pages, and the pages
//! that it knows are among those that were merged.
//!
//! **Leaves out.** Loads of CPUs and networks. The caller starts the VM.

use std::cmp::Reverse;

use cluster::records::Records;
use model::cluster::HostReport;
use model::{Bytes, GroupName, HostName};
use serde::Serialize;

/// A host as the place of one more VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RankedHost {
    pub(crate) host: HostName,
    /// Whether the host has the memory that the VM is promised.
    pub(crate) fits: bool,
    /// The group's VMs there.
    pub(crate) vms: usize,
    /// Memory that one more VM of the group would probably save there.
    pub(crate) saves: Bytes,
    /// Memory that the host could still give.
    pub(crate) free: Bytes,
}

/// The group's VMs on a host, and the memory that they save.
fn of_group(report: &HostReport, group: &GroupName) -> (usize, Bytes) {
    let vms = report.vms.values().filter(|vm| vm.group == *group);
    vms.fold((0, Bytes::ZERO), |(n, saved), vm| (n + 1, saved.plus(vm.saved)))
}

/// The mean memory that the pool's VMs of this group are promised; `None`: there are none.
pub(crate) fn usual_memory(records: &Records, group: &GroupName) -> Option<Bytes> {
    let vms = records.reports.values().flat_map(|report| report.vms.values());
    let promised: Vec<u64> = vms.filter(|vm| vm.group == *group).map(|vm| vm.promised.0).collect();
    let count = u64::try_from(promised.len()).ok().filter(|count| *count > 0)?;
    Some(Bytes(promised.iter().sum::<u64>() / count))
}

/// The hosts that are there, the best first, for a VM of `group` that is promised `memory`: those
/// where it fits, by the memory that it saves, then by free memory.
pub(crate) fn places(records: &Records, group: &GroupName, memory: Bytes) -> Vec<RankedHost> {
    let is_there = |(host, _): &(&HostName, &HostReport)| records.seated.contains(*host);
    let hosts: Vec<_> = records.reports.iter().filter(is_there).collect();
    // VMs other than the first of their host, and the memory that these hosts save.
    let (mut further, mut saved) = (0, 0);
    for (vms, of_host) in hosts.iter().map(|(_, report)| of_group(report, group)) {
        if vms > 1 {
            (further, saved) = (further + vms - 1, saved + of_host.0);
        }
    }
    let each = |saved: u64, further: usize| saved.checked_div(further as u64).unwrap_or(0);
    let place = |(host, report): (&HostName, &HostReport)| {
        let (vms, of_host) = of_group(report, group);
        let saves = match vms {
            0 => 0,
            1 => each(saved, further),
            _ => each(of_host.0, vms - 1),
        };
        let given: Bytes = report.vms.values().map(|vm| vm.given).sum();
        let free = report.memory.minus(given);
        let saves = Bytes(saves).min(memory);
        RankedHost { host: host.clone(), fits: free >= memory, vms, saves, free }
    };
    let mut places: Vec<RankedHost> = hosts.into_iter().map(place).collect();
    places.sort_by_key(|place| Reverse((place.fits, place.saves, place.vms, place.free)));
    places
}

#[cfg(test)]
mod tests {
    use model::Severity;
    use model::cluster::VmReport;

    use super::*;

    /// A host with its memory, and the group and the saved memory of each VM, in MiB.
    type Invented<'a> = (&'a str, u64, &'a [(&'a str, u64)]);

    fn pool(hosts: &[Invented<'_>]) -> Records {
        let mut records = Records::default();
        for (host, memory, vms) in hosts {
            let vm = |(at, (group, saved)): (usize, &(&str, u64))| {
                let report = VmReport {
                    group: (*group).into(),
                    promised: Bytes::mib(512),
                    given: Bytes::mib(256),
                    severity: Severity::None,
                    paged: 0,
                    rates: None,
                    immovable: None,
                    saved: Bytes::mib(*saved),
                };
                (format!("{host}-{at}").into(), report)
            };
            let vms = vms.iter().enumerate().map(vm).collect();
            let report = HostReport { memory: Bytes::mib(*memory), vms, ..HostReport::default() };
            records.reports.insert((*host).into(), report);
            records.seated.insert((*host).into());
        }
        records
    }

    fn seen(records: &Records, memory: u64) -> Vec<(String, bool, u64)> {
        let places = places(records, &"web".into(), Bytes::mib(memory));
        let row = |place: RankedHost| (place.host.to_string(), place.fits, place.saves.0 >> 20);
        places.into_iter().map(row).collect()
    }

    #[test]
    fn a_vm_goes_where_its_group_saves_most_among_the_hosts_that_have_room() {
        let of_web = [("web", 40), ("web", 40), ("web", 40)];
        let mut records = pool(&[
            ("alone", 4096, &[("web", 0)]),
            ("full", 1200, &[("web", 300), ("web", 300), ("web", 300), ("web", 300)]),
            ("others", 8192, &[("shop", 500), ("shop", 500)]),
            ("together", 4096, &of_web),
        ]);
        let of_pool = (3 * 40 + 4 * 300) / (2 + 3);
        let expected = [
            ("alone".to_owned(), true, of_pool),
            ("together".to_owned(), true, 60),
            ("others".to_owned(), true, 0),
            ("full".to_owned(), false, 400),
        ];
        assert_eq!(seen(&records, 512), expected);
        records.seated.remove(&HostName::from("alone"));
        assert_eq!(seen(&records, 512)[0].0, "together", "a host that is gone is no place");
        assert_eq!(usual_memory(&records, &"web".into()), Some(Bytes::mib(512)));
        assert_eq!(usual_memory(&records, &"db".into()), None);
    }

    #[test]
    fn no_vm_saves_more_than_it_has_and_a_pool_that_shares_nothing_is_filled_by_room() {
        let two = [("web", 900), ("web", 900)];
        let records = pool(&[("a", 8192, &two), ("b", 2048, &[]), ("c", 4096, &[])]);
        let expected =
            [("a".to_owned(), true, 512), ("c".to_owned(), true, 0), ("b".to_owned(), true, 0)];
        assert_eq!(seen(&records, 512), expected);
        assert!(places(&Records::default(), &"web".into(), Bytes::ZERO).is_empty());
    }
}
