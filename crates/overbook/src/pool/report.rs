//! A host's report about itself: short, and written only when it changes.

use model::cluster::{HostReport, OverloadRates, VmReport};
use model::spec::PoolSpec;
use model::{Bytes, HostReading, Link, Severity, VmName, VmView};

use api::published::Published;

/// Sizes are rounded to this, so that a report changes only when the difference matters to others.
const STEP: Bytes = Bytes::mib(16);
/// Counts of paged pages are rounded to this.
const PAGES: u64 = 16 << 10;

/// A host's report after this tick. `paged`: pages since each VM's overload began; `manager`: the
/// manager that has started the VM's QEMU.
pub(super) fn of(
    tick: &Published,
    spec: &PoolSpec,
    paged: impl Fn(&VmName) -> u64,
    manager: impl Fn(&VmView) -> Option<&'static str>,
) -> HostReport {
    let vms = tick.plan.vms.iter().filter_map(|(name, decision)| {
        let view = tick.view.vms.get(name)?;
        let (limits, given) = (decision.limits?, view.balloon?.value);
        let report = VmReport {
            group: tick.spec.group_of(name)?.0.clone(),
            promised: limits.max,
            given: up(given.min(limits.max)),
            severity: severity(tick, name),
            paged: paged(name) / PAGES * PAGES,
            rates: rates(tick, name),
            immovable: immovable(name, view, spec, &manager),
            saved: down(view.dedup.map_or(Bytes::ZERO, |dedup| dedup.value.saved)),
        };
        Some((name.clone(), report))
    });
    let vms: std::collections::BTreeMap<_, _> = vms.collect();
    let given: Bytes = vms.values().map(|vm| vm.given).sum();
    let disks = tick.view.vms.values().flat_map(|vm| vm.disks.values());
    let far: Bytes = disks.filter_map(|it| Some(it.value.repositories.as_ref()?.held)).sum();
    let lender = tick.lender.unwrap_or_default();
    HostReport {
        memory: down(given.plus(room(tick, given))),
        receives: spec.receive.is_some(),
        lends: down(lender.most),
        vms,
        reserve: tick.view.host.map_or(Bytes::ZERO, |host| reserve(tick, host.value.total)),
        in_repositories: down(far),
    }
}

/// Whether a report is worth writing. One more step of free memory is not, because it may go
/// again soon.
pub(super) fn is_news(old: &HostReport, new: &HostReport) -> bool {
    let (less, more) = (old.memory.minus(new.memory), new.memory.minus(old.memory));
    let rest = HostReport { memory: old.memory, ..new.clone() };
    *old != rest || !less.is_zero() || more > STEP
}

/// Memory that the host could still give: at most its memory without reserve and promises, and at
/// most the memory available now. The repository's share is no part of it.
fn room(tick: &Published, given: Bytes) -> Bytes {
    let Some(host) = &tick.view.host else { return Bytes::ZERO };
    let reserve = reserve(tick, host.value.total);
    let pinned = tick.lender.map_or(Bytes::ZERO, |lender| lender.holds);
    let share =
        tick.lender.and(tick.pool.as_ref()).map_or(Bytes::ZERO, |pool| pool.share.repositories);
    free(host.value, given, pinned, reserve.plus(share))
}

/// Memory that a host could give in addition to `given`, without the memory that it is to `keep`.
/// `pinned` is the memory of its repository, which gives back all beyond its share when VMs want
/// it.
fn free(host: HostReading, given: Bytes, pinned: Bytes, keep: Bytes) -> Bytes {
    host.total.minus(given).min(host.available.plus(pinned)).minus(keep)
}

fn rates(tick: &Published, vm: &VmName) -> Option<OverloadRates> {
    let profile = tick.memory.learned.profiles.get(vm)?;
    OverloadRates::of(profile, tick.spec.overload.interval_s.into())
}

fn reserve(tick: &Published, total: Bytes) -> Bytes {
    policy::host_reserve(tick.spec.host.reserve, total)
}

pub(super) fn severity(tick: &Published, vm: &VmName) -> Severity {
    tick.plan.overloads.get(vm).map_or(Severity::None, |overload| overload.severity)
}

/// Why a VM whose QEMU a manager has started is not moved.
pub(super) fn managed(manager: &str) -> String {
    format!("started by {manager}, which must move it itself")
}

/// Why a VM is not moved. `None`: it can be.
fn immovable(
    name: &VmName,
    view: &VmView,
    spec: &PoolSpec,
    manager: impl Fn(&VmView) -> Option<&'static str>,
) -> Option<String> {
    if !spec.movable.iter().any(|pattern| pattern.matches(name)) {
        return Some("`movable` of [pool] does not name it".to_owned());
    }
    if view.link != Link::Up {
        return Some("its QEMU does not answer".to_owned());
    }
    if view.pid.is_none() {
        return Some("its QEMU's process is not known".to_owned());
    }
    view.immovable.clone().or_else(|| manager(view).map(managed))
}

fn down(size: Bytes) -> Bytes {
    Bytes(size.0 / STEP.0 * STEP.0)
}

fn up(size: Bytes) -> Bytes {
    Bytes(size.0.div_ceil(STEP.0) * STEP.0)
}

#[cfg(test)]
mod tests {
    use model::Time;

    use super::*;

    #[test]
    fn a_repository_takes_its_share_from_the_room_for_vms_and_no_more() {
        let gib = |n: u64| Bytes::mib(n * 1024);
        let host = |available| HostReading {
            total: gib(32),
            available: gib(available),
            ..HostReading::default()
        };
        // 2 GiB are the reserve, 4 GiB the repository's share. It has pinned nothing, its share,
        // and all that was spare.
        for pinned in [0, 4, 18] {
            assert_eq!(free(host(20 - pinned), gib(10), gib(pinned), gib(2 + 4)), gib(14));
        }
        assert_eq!(free(host(32), gib(30), Bytes::ZERO, gib(1)), gib(1), "promises count");
    }

    #[test]
    fn a_vm_that_a_manager_has_started_is_not_movable_though_the_configuration_names_it() {
        let text = "[pool]\nhost = \"a\"\netcd = [\"http://10.0.0.1:2379\"]\ninsecure = true\n\
            movable = [\"web-*\"]\n";
        let spec = model::config::parse(&[("test".to_owned(), text.to_owned())]).unwrap();
        let spec = spec.pool.unwrap();
        let view = VmView { pid: Some(7), ..VmView::unknown(Link::Up) };
        let why = |name: &str, manager| immovable(&name.into(), &view, &spec, |_| manager);
        assert_eq!(why("web-1", None), None);
        let libvirts = why("web-1", Some("libvirt"));
        assert_eq!(libvirts.as_deref(), Some("started by libvirt, which must move it itself"));
        assert!(why("db-1", None).unwrap().contains("`movable`"));
        let link = Link::Down { since: Time(0), why: "it is silent".to_owned() };
        let silent = VmView { link, ..view.clone() };
        assert!(immovable(&"web-1".into(), &silent, &spec, |_| None).is_some());
    }
}
