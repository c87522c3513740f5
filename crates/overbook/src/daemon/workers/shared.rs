//! What the workers have merged, remembered for as long as it may be shared.
//!
//! A worker that has ended may leave shared what it has merged. So until a report says that nothing
//! is shared any more, a VM's part of the pool counts as memory that it uses (the count of its own
//! pages leaves the pool out), and it is known whose worker has to unshare it.

use std::collections::BTreeMap;

use model::{Bytes, Dedup, GroupName, HostView, VmName};

/// The VMs that share pages, as last reported.
#[derive(Debug, Default)]
pub(super) struct Shared {
    vms: BTreeMap<VmName, Share>,
}

#[derive(Debug)]
struct Share {
    incarnation: u64,
    group: GroupName,
    part: Bytes,
}

impl Shared {
    /// Takes in what the worker of `group` says of a VM.
    pub(super) fn note(
        &mut self,
        vm: &VmName,
        incarnation: u64,
        group: &GroupName,
        dedup: Option<&Dedup>,
    ) {
        match dedup {
            None => {}
            Some(dedup) if dedup.shared.is_zero() => drop(self.vms.remove(vm)),
            Some(dedup) => {
                let share = Share { incarnation, group: group.clone(), part: dedup.part() };
                self.vms.insert(vm.clone(), share);
            }
        }
    }

    /// The group that this VM shares pages with.
    pub(super) fn group_of(&self, vm: &VmName, incarnation: u64) -> Option<&GroupName> {
        let share = self.vms.get(vm).filter(|share| share.incarnation == incarnation);
        share.map(|share| &share.group)
    }

    /// Adds to what each VM uses its part of the pool, and forgets VMs that have ended.
    pub(super) fn count(&mut self, view: &mut HostView) {
        self.vms.retain(|name, share| {
            view.vms.get(name).is_some_and(|vm| vm.incarnation == share.incarnation)
        });
        for (name, share) in &self.vms {
            if let Some(used) = view.vms.get_mut(name).and_then(|vm| vm.used.as_mut()) {
                used.value = used.value.plus(share.part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn used(view: &HostView) -> Bytes {
        view.vms[&"web-1".into()].used.unwrap().value
    }

    #[test]
    fn a_vms_part_of_the_pool_counts_as_used_until_nothing_is_shared() {
        let mut shared = Shared::default();
        let (vm, web) = ("web-1".into(), "web".into());
        let seen = fixture::published().view;
        let own = used(&seen);
        let counted = |shared: &mut Shared| {
            let mut view = seen.clone();
            shared.count(&mut view);
            used(&view)
        };
        let dedup = Dedup { shared: Bytes::mib(40), saved: Bytes::mib(30), ..Dedup::default() };
        shared.note(&vm, 7, &web, Some(&dedup));
        assert_eq!(counted(&mut shared), own.plus(Bytes::mib(10)));
        shared.note(&vm, 7, &web, None);
        assert_eq!(
            counted(&mut shared),
            own.plus(Bytes::mib(10)),
            "a new worker knows nothing yet"
        );
        shared.note(&vm, 7, &web, Some(&Dedup::default()));
        assert_eq!(counted(&mut shared), own);
    }

    #[test]
    fn a_vm_that_has_ended_shares_nothing() {
        let mut shared = Shared::default();
        let (vm, web) = ("web-1".into(), "web".into());
        let dedup = Dedup { shared: Bytes::mib(40), ..Dedup::default() };
        shared.note(&vm, 6, &web, Some(&dedup));
        assert_eq!((shared.group_of(&vm, 6), shared.group_of(&vm, 7)), (Some(&web), None));
        let mut view = fixture::published().view;
        shared.count(&mut view);
        assert_eq!(used(&view), used(&fixture::published().view));
        assert_eq!(shared.group_of(&vm, 6), None);
    }
}
