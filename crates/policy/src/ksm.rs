//! The VMs that the kernel's own merging (KSM) may serve: those whose QEMU was started without
//! the shim.
//!
//! KSM knows no groups: it merges all memory that is marked mergeable on the host, and a guest
//! can tell by the time of a write that another VM has the same page. So KSM may only work where
//! all memory belongs to one group: every VM that was found belongs to it, and every process that
//! has mergeable memory is one of these VMs. A process whose state is unknown counts as a
//! stranger. A violation stops KSM at once. The condition must hold for a while
//! ([`tuning::KSM_SETTLED`]) before KSM starts, and its failure before KSM is put back (which
//! unmerges, and costs the time and memory of copying all merged pages).
//!
//! Leaves out how the processes are found, and that a new one may have appeared since the last
//! scan: a scan older than [`tuning::KSM_LOOK_FRESH`] does not count.

use std::collections::BTreeSet;

use model::{
    GroupName, HostView, KsmOrder, KsmRefusal, KsmSpec, Mergeable, PagesPerMs, Reading, Spec, Time,
    VmName,
};

use crate::tuning;

/// The group whose VMs KSM may merge by the state of all VMs; `observed` are the VMs that are
/// known to be without the shim.
///
/// # Errors
/// The reason why KSM may merge no VM.
pub fn group_of<'a>(
    spec: &'a Spec,
    view: &HostView,
    observed: &BTreeSet<VmName>,
) -> Result<&'a GroupName, KsmRefusal> {
    if spec.host.ksm == KsmSpec::Off {
        return Err(KsmRefusal::Off);
    }
    let to_merge = |vm| spec.group_of(vm).filter(|(_, group)| group.dedup.is_on());
    let Some((group, _)) = observed.iter().find_map(to_merge) else {
        return Err(KsmRefusal::Unneeded);
    };
    for (name, vm) in &view.vms {
        // Until QEMU answers, only the name of its socket is known.
        if vm.ram.is_zero() {
            return Err(KsmRefusal::Nameless(name.clone()));
        }
        match spec.group_of(name) {
            None => return Err(KsmRefusal::Stranger(name.clone())),
            Some((other, _)) if other != group => {
                return Err(KsmRefusal::TwoGroups(group.clone(), other.clone()));
            }
            Some(_) => {}
        }
    }
    Ok(group)
}

/// The result of the latest scan for processes with mergeable memory, or its error.
pub type Look = Result<Vec<Mergeable>, String>;

/// Checks that only VMs of `view` have memory that KSM could merge, by the latest scan of all
/// processes.
///
/// # Errors
/// The process that has such memory too, or may have.
pub fn no_strangers(
    view: &HostView,
    look: Option<&Reading<Look>>,
    now: Time,
) -> Result<(), KsmRefusal> {
    let unseen = |why: String| Err(KsmRefusal::Unseen(why));
    let Some(look) = look else {
        return unseen("who has mergeable memory is being looked at".to_owned());
    };
    if look.age(now) > tuning::KSM_LOOK_FRESH {
        let age = look.age(now);
        return unseen(format!("who has mergeable memory was last looked at {age} ago"));
    }
    let processes = match &look.value {
        Ok(processes) => processes,
        Err(why) => return unseen(why.clone()),
    };
    let own: BTreeSet<u32> = view.vms.values().filter_map(|vm| vm.pid).collect();
    let Some(stranger) = processes.iter().find(|process| !own.contains(&process.pid)) else {
        return Ok(());
    };
    let Mergeable { pid, program, unknown } = stranger.clone();
    Err(match unknown {
        None => KsmRefusal::Process { pid, program },
        Some(why) => KsmRefusal::Unknown { pid, program, why },
    })
}

/// Remembers how long the answer has been the same.
#[derive(Clone, Debug, Default)]
pub struct Patience {
    last: Option<(Option<GroupName>, Time)>,
}

impl Patience {
    /// The order for KSM while it may serve `group`, or none; `rate` is that group's scan rate.
    pub fn order(
        &mut self,
        group: Option<&GroupName>,
        rate: Option<PagesPerMs>,
        now: Time,
    ) -> KsmOrder {
        let since = match &self.last {
            Some((last, since)) if last.as_ref() == group => *since,
            _ => now,
        };
        self.last = Some((group.cloned(), since));
        let is_settled = now.since(since) >= tuning::KSM_SETTLED;
        match (group, rate) {
            (Some(_), Some(rate)) if is_settled => KsmOrder::Drive(rate),
            (None, _) if is_settled => KsmOrder::PutBack,
            _ => KsmOrder::Rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use model::{Bytes, DedupSpec, GroupSpec, Link, Migration, NamePattern, VmView, config};

    use super::*;

    fn spec(groups: &[(&str, DedupSpec)]) -> Spec {
        let mut spec = config::parse(&[]).unwrap();
        spec.host.ksm = KsmSpec::Drive;
        spec.groups = groups
            .iter()
            .map(|(name, dedup)| {
                let vms = vec![NamePattern::new(format!("{name}-*"))];
                ((*name).into(), GroupSpec { vms, dedup: *dedup, ..GroupSpec::default() })
            })
            .collect();
        spec
    }

    fn view(vms: &[&str]) -> HostView {
        let vm = VmView {
            incarnation: 1,
            pid: Some(1),
            ram: Bytes::mib(128),
            migration: Migration::None,
            immovable: None,
            ..VmView::unknown(Link::Up)
        };
        let vms = vms.iter().map(|name| ((*name).into(), vm.clone())).collect();
        HostView { vms, ..HostView::default() }
    }

    fn observed(vms: &[&str]) -> BTreeSet<VmName> {
        vms.iter().map(|name| (*name).into()).collect()
    }

    const ON: DedupSpec = DedupSpec::Adaptive;

    #[test]
    fn a_host_of_one_group_may_be_merged_also_where_others_are_configured() {
        let spec = spec(&[("web", ON), ("db", ON)]);
        let view = view(&["web-1", "web-2"]);
        assert_eq!(group_of(&spec, &view, &observed(&["web-2"])), Ok(&"web".into()));
    }

    #[test]
    fn nobody_is_merged_who_is_not_to_be_or_has_the_shim() {
        let off = spec(&[("web", DedupSpec::Off)]);
        let view = view(&["web-1"]);
        let unneeded = Err(KsmRefusal::Unneeded);
        assert_eq!(group_of(&off, &view, &observed(&["web-1"])), unneeded);
        assert_eq!(group_of(&spec(&[("web", ON)]), &view, &observed(&[])), unneeded);
    }

    #[test]
    fn without_its_own_key_nobody_is_merged_whatever_else_is_written() {
        let mut spec = spec(&[("web", ON)]);
        spec.host.ksm = KsmSpec::default();
        let why = group_of(&spec, &view(&["web-1"]), &observed(&["web-1"])).unwrap_err();
        assert_eq!(why.to_string(), "kernel KSM is not driven (`ksm = \"off\"` in [host])");
    }

    /// A scan one second ago that found these processes.
    fn look(processes: &[Mergeable]) -> Reading<Look> {
        Reading::new(Ok(processes.to_vec()), Time(1_000))
    }

    fn process(pid: u32) -> Mergeable {
        Mergeable { pid, program: "qemu".to_owned(), unknown: None }
    }

    #[test]
    fn nobody_but_the_vms_may_have_mergeable_memory() {
        let mut view = view(&["web-1", "web-2"]);
        view.vms.get_mut(&"web-2".into()).unwrap().pid = Some(2);
        let judge =
            |processes: &[Mergeable]| no_strangers(&view, Some(&look(processes)), Time(2_000));
        assert_eq!(judge(&[]), Ok(()));
        assert_eq!(judge(&[process(1), process(2)]), Ok(()));
        let why = judge(&[process(1), process(2), process(3)]).unwrap_err();
        assert_eq!(why, KsmRefusal::Process { pid: 3, program: "qemu".to_owned() });
        assert!(why.to_string().contains("process 3 (\"qemu\") has mergeable memory"), "{why}");
    }

    #[test]
    fn a_process_that_cannot_be_judged_is_a_stranger_and_a_vm_is_none() {
        let unknown = |pid| Mergeable { unknown: Some("no".to_owned()), ..process(pid) };
        let judge = |of| no_strangers(&view(&["web-1"]), Some(&look(&[of])), Time(2_000));
        assert_eq!(judge(unknown(1)), Ok(()), "it is of the group in any case");
        let why = judge(unknown(3)).unwrap_err();
        assert!(why.to_string().ends_with("is not known: no"), "{why}");
    }

    #[test]
    fn who_has_not_looked_or_not_lately_or_in_vain_knows_nothing() {
        let view = view(&["web-1"]);
        let judge = |look: Option<&Reading<Look>>, now| {
            no_strangers(&view, look, Time(now)).unwrap_err().to_string()
        };
        assert!(judge(None, 0).ends_with("is being looked at"));
        let late = 1_001 + tuning::KSM_LOOK_FRESH.0;
        assert!(judge(Some(&look(&[])), late).contains("was last looked at"));
        let blind = Reading::new(Err("hidden".to_owned()), Time(0));
        assert!(judge(Some(&blind), 0).ends_with("keep groups apart: hidden"));
    }

    #[test]
    fn two_groups_are_refused_also_where_the_other_ones_dedup_is_off() {
        let spec = spec(&[("web", ON), ("db", DedupSpec::Off)]);
        let why = group_of(&spec, &view(&["db-1", "web-1"]), &observed(&["web-1"])).unwrap_err();
        assert_eq!(why, KsmRefusal::TwoGroups("web".into(), "db".into()));
        assert!(why.to_string().starts_with("kernel KSM cannot keep groups apart: "), "{why}");
    }

    #[test]
    fn a_vm_of_no_group_or_not_known_yet_is_refused() {
        let spec = spec(&[("web", ON)]);
        let seen = view(&["other", "web-1"]);
        let stranger = Err(KsmRefusal::Stranger("other".into()));
        assert_eq!(group_of(&spec, &seen, &observed(&["web-1"])), stranger);
        let mut seen = view(&["web-1", "web-2"]);
        seen.vms.get_mut(&"web-2".into()).unwrap().ram = Bytes::ZERO;
        let nameless = Err(KsmRefusal::Nameless("web-2".into()));
        assert_eq!(group_of(&spec, &seen, &observed(&["web-1"])), nameless);
    }

    #[test]
    fn it_stops_at_once_and_begins_and_is_put_back_only_when_that_is_settled() {
        let mut patience = Patience::default();
        let (web, rate) = (GroupName::from("web"), Some(PagesPerMs(5)));
        let drive = KsmOrder::Drive(PagesPerMs(5));
        let mut order = |group, s: u64| patience.order(group, rate, Time(s * 1000));
        assert_eq!(order(Some(&web), 0), KsmOrder::Rest);
        assert_eq!(order(Some(&web), 9), KsmOrder::Rest);
        assert_eq!(order(Some(&web), 10), drive);
        assert_eq!(order(None, 11), KsmOrder::Rest);
        assert_eq!(order(None, 21), KsmOrder::PutBack);
        assert_eq!(order(Some(&web), 22), KsmOrder::Rest);
        assert_eq!(order(Some(&web), 32), drive);
        assert_eq!(order(Some(&"db".into()), 33), KsmOrder::Rest, "another group begins anew");
    }

    #[test]
    fn without_a_rate_it_rests() {
        let mut patience = Patience::default();
        let web = GroupName::from("web");
        assert_eq!(patience.order(Some(&web), None, Time(0)), KsmOrder::Rest);
        assert_eq!(patience.order(Some(&web), None, Time(60_000)), KsmOrder::Rest);
    }
}
