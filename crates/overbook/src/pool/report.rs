//! A host's report about itself: short, and written only when it changes.

use model::cluster::{HostReport, VmReport};
use model::spec::PoolSpec;
use model::{Bytes, Link, Severity, VmName, VmView};

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
            immovable: immovable(name, view, spec).or_else(|| manager(view).map(managed)),
        };
        Some((name.clone(), report))
    });
    let vms: std::collections::BTreeMap<_, _> = vms.collect();
    let given: Bytes = vms.values().map(|vm| vm.given).sum();
    HostReport { memory: down(given.plus(room(tick, given))), vms }
}

/// Whether a report is worth writing. One more step of free memory is not, because it may go
/// again soon.
pub(super) fn is_news(old: &HostReport, new: &HostReport) -> bool {
    let (less, more) = (old.memory.minus(new.memory), new.memory.minus(old.memory));
    old.vms != new.vms || !less.is_zero() || more > STEP
}

/// Memory that the host could still give: at most its memory without reserve and promises, and at
/// most the memory available now.
fn room(tick: &Published, given: Bytes) -> Bytes {
    let Some(host) = &tick.view.host else { return Bytes::ZERO };
    let usual = host.value.total.percent(policy::tuning::HOST_RESERVE_PERCENT);
    let reserve = tick.spec.host.reserve.unwrap_or(usual);
    let beside = host.value.total.minus(reserve).minus(given);
    beside.min(host.value.available.minus(reserve))
}

pub(super) fn severity(tick: &Published, vm: &VmName) -> Severity {
    tick.plan.overloads.get(vm).map_or(Severity::None, |overload| overload.severity)
}

/// Why a VM whose QEMU a manager has started is not moved.
pub(super) fn managed(manager: &str) -> String {
    format!("started by {manager}, which must move it itself")
}

fn immovable(name: &VmName, view: &VmView, spec: &PoolSpec) -> Option<String> {
    if !spec.movable.iter().any(|pattern| pattern.matches(name)) {
        return Some("`movable` of [pool] does not name it".to_owned());
    }
    if view.link != Link::Up {
        return Some("its QEMU does not answer".to_owned());
    }
    if view.pid.is_none() {
        return Some("its QEMU's process is not known".to_owned());
    }
    view.immovable.clone()
}

fn down(size: Bytes) -> Bytes {
    Bytes(size.0 / STEP.0 * STEP.0)
}

fn up(size: Bytes) -> Bytes {
    Bytes(size.0.div_ceil(STEP.0) * STEP.0)
}
