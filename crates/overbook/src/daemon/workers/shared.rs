//! Memory that workers have merged, remembered for as long as it may be shared.
//!
//! A worker may end and leave merged pages shared. So a VM's part of the pool counts as memory
//! that it uses, until a report says that it shares nothing (the count of its own pages excludes
//! the pool). It is also recorded which group's worker has to unshare it.

use std::collections::BTreeMap;

use model::{Bytes, Dedup, GroupName, HostView};

/// VMs that share pages by incarnation, as last reported. The key is not the name, because a VM
/// may be renamed while it shares pages.
#[derive(Debug, Default)]
pub(super) struct Shared(BTreeMap<u64, Share>);

#[derive(Debug)]
struct Share {
    group: GroupName,
    part: Bytes,
}

impl Shared {
    /// Records a report of `group`'s worker about the VM of this incarnation.
    pub(super) fn note(&mut self, incarnation: u64, group: &GroupName, dedup: Option<&Dedup>) {
        match dedup {
            None => {}
            Some(dedup) if dedup.shared.is_zero() => drop(self.0.remove(&incarnation)),
            Some(dedup) => {
                let share = Share { group: group.clone(), part: dedup.part() };
                self.0.insert(incarnation, share);
            }
        }
    }

    /// The group that the VM of this incarnation shares pages with.
    pub(super) fn group_of(&self, incarnation: u64) -> Option<&GroupName> {
        self.0.get(&incarnation).map(|share| &share.group)
    }

    /// Shows each VM's part of the pool, and forgets VMs that have ended.
    pub(super) fn show(&mut self, view: &mut HostView) {
        self.0.retain(|life, _| view.vms.values().any(|vm| vm.incarnation == *life));
        for vm in view.vms.values_mut() {
            vm.pool_part = self.0.get(&vm.incarnation).map_or(Bytes::ZERO, |share| share.part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn part(view: &HostView) -> Bytes {
        view.vms[&"web-1".into()].pool_part
    }

    #[test]
    fn a_vms_part_of_the_pool_is_shown_until_nothing_is_shared() {
        let mut shared = Shared::default();
        let web = "web".into();
        let seen = fixture::published().view;
        let shown = |shared: &mut Shared| {
            let mut view = seen.clone();
            shared.show(&mut view);
            part(&view)
        };
        let dedup = Dedup { shared: Bytes::mib(40), saved: Bytes::mib(30), ..Dedup::default() };
        shared.note(7, &web, Some(&dedup));
        assert_eq!(shown(&mut shared), Bytes::mib(10));
        shared.note(7, &web, None);
        assert_eq!(shown(&mut shared), Bytes::mib(10), "a new worker knows nothing yet");
        shared.note(7, &web, Some(&Dedup::default()));
        assert_eq!(shown(&mut shared), Bytes::ZERO);
    }

    #[test]
    fn a_vm_that_has_ended_shares_nothing() {
        let mut shared = Shared::default();
        let web = "web".into();
        let dedup = Dedup { shared: Bytes::mib(40), ..Dedup::default() };
        shared.note(6, &web, Some(&dedup));
        assert_eq!((shared.group_of(6), shared.group_of(7)), (Some(&web), None));
        let mut view = fixture::published().view;
        shared.show(&mut view);
        assert_eq!(part(&view), Bytes::ZERO);
        assert_eq!(shared.group_of(6), None);
    }
}
