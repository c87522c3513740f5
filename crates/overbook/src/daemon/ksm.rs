//! The kernel's KSM, as the loop sees it. Every tick checks which group KSM may merge, turns the
//! group's scan rate into an order, and puts the result into the view.
//!
//! KSM serves VMs without the shim, whose pages no worker can merge. The operator must allow it
//! (`ksm` in `[host]`), and all mergeable memory of the host must belong to one group
//! ([`policy::ksm`]). While Overbook is paused, and when the daemon ends, KSM stops scanning,
//! because a VM of another group could come unnoticed. Merged pages then stay merged; `overbook
//! release` restores everything.

use api::verdict::HOST_PAUSED;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drivers::identity::process_of;
use drivers::ksm::{Hand, KsmDriver, KsmStatus, Looking, Lookout};
use model::view::Mechanism;
use model::{
    GroupName, HostView, KsmOrder, KsmReading, KsmRefusal, PagesPerMs, Reading, Spec, VmName,
};
use policy::ksm::Patience;
use sys::clock::boot_now;
use sys::process::Identity;

use super::{log, workers::NO_SHIM};

/// Timeout for a release to unmerge all pages. The client's timeout is a little longer.
const UNMERGED: Duration = Duration::from_secs(25);
/// Timeout for KSM when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// The loop's state for KSM.
#[derive(Debug)]
pub(super) struct HostKsm {
    driver: KsmDriver,
    lookout: Lookout,
    patience: Patience,
    /// The group that KSM may serve, as of this tick.
    group: Option<GroupName>,
    is_paused: bool,
    said: Said,
}

/// State as of the last log line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    is_driven: bool,
    is_troubled: bool,
}

impl HostKsm {
    /// Needs a tokio runtime. `looking` tells which processes have mergeable memory.
    pub(super) fn new(hand: Hand, looking: Looking) -> Self {
        Self {
            driver: KsmDriver::start(hand),
            lookout: Lookout::start(looking),
            patience: Patience::default(),
            group: None,
            is_paused: false,
            said: Said::default(),
        }
    }

    /// Decides which group may be merged, and puts KSM's state into the view.
    pub(super) fn tick(
        &mut self,
        spec: &Spec,
        with_shim: &BTreeMap<Identity, String>,
        view: &mut HostView,
    ) {
        let is_observed =
            |vm| process_of(vm).is_some_and(|process| !with_shim.contains_key(&process));
        let observed: BTreeSet<VmName> = view
            .vms
            .iter()
            .filter(|(_, vm)| is_observed(vm))
            .map(|(name, _)| name.clone())
            .collect();
        let of_vms = policy::ksm::group_of(spec, view, &observed);
        self.lookout.want(of_vms.is_ok());
        let look = self.lookout.latest();
        let no_strangers = || policy::ksm::no_strangers(view, look.as_ref(), boot_now());
        let may = of_vms.and_then(|group| no_strangers().map(|()| group));
        let known = self.driver.known();
        let why_not = why_not(&may, &known, self.is_paused);
        self.say(&known, may.as_ref().ok().copied(), why_not.as_deref());
        let groups = show(spec, &observed, why_not.as_deref(), view);
        view.ksm = known.counters.map(|Reading { value, at }| {
            let (saved, shared) = (value.saved, value.shared);
            let KsmStatus { is_driven, trouble, .. } = known;
            Reading::new(KsmReading { saved, shared, is_driven, trouble, groups }, at)
        });
        self.group = may.ok().cloned();
        if self.is_paused {
            self.driver.order(KsmOrder::Rest);
        } else if self.group.is_none() {
            self.driver.order(self.patience.order(None, None, boot_now()));
        }
    }

    /// Passes the scan rate of a group to KSM, if KSM serves that group.
    pub(super) fn scan(&mut self, group: &GroupName, rate: Option<PagesPerMs>) {
        if self.group.as_ref() == Some(group) && !self.is_paused {
            self.driver.order(self.patience.order(Some(group), rate, boot_now()));
        }
    }

    /// Stops KSM while paused.
    pub(super) fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused {
            self.driver.order(KsmOrder::Rest);
        }
    }

    /// Unmerges all pages and restores KSM's settings. Call it only while paused.
    pub(super) fn release(
        &self,
    ) -> impl Future<Output = Result<Option<String>, String>> + Send + use<> {
        let asked = self.driver.ask(KsmOrder::PutBack, UNMERGED);
        async move {
            let late =
                || Err("it is still being put back; `overbook release` asks again".to_owned());
            asked.await.map_or_else(late, |outcome| outcome.map_err(|error| error.to_string()))
        }
    }

    /// Whether Overbook has changed KSM's settings.
    pub(super) fn is_driven(&self) -> bool {
        self.driver.known().is_driven
    }

    /// Waits until KSM has stopped scanning.
    pub(super) async fn rested(&self) {
        if let Some(Err(error)) = self.driver.ask(KsmOrder::Rest, FAREWELL).await {
            log::warn(&error.to_string());
        }
    }

    /// Logs changes of state.
    fn say(&mut self, known: &KsmStatus, group: Option<&GroupName>, why_not: Option<&str>) {
        let now = Said { is_driven: known.is_driven, is_troubled: known.trouble.is_some() };
        if now.is_driven != self.said.is_driven {
            log::info(&match now.is_driven {
                true => {
                    let group = self.group.as_ref().or(group).map_or("", GroupName::as_str);
                    format!("kernel KSM merges pages of the VMs of group {group}")
                }
                false => {
                    let why = why_not.unwrap_or("the daemon starts it anew");
                    format!("kernel KSM is not driven any more: {why}")
                }
            });
        }
        if let Some(trouble) = known.trouble.as_ref().filter(|_| !self.said.is_troubled) {
            log::warn(trouble);
        }
        self.said = now;
    }
}

/// Why KSM merges nothing now. `None`: it merges.
fn why_not(
    may: &Result<&GroupName, KsmRefusal>,
    known: &KsmStatus,
    is_paused: bool,
) -> Option<String> {
    match may {
        Err(refusal) => Some(refusal.to_string()),
        Ok(_) if is_paused => Some(HOST_PAUSED.to_owned()),
        Ok(_) if known.is_driven => None,
        Ok(_) => Some(known.trouble.clone().unwrap_or_else(|| {
            format!(
                "kernel KSM waits until nothing has changed for {}",
                policy::tuning::KSM_SETTLED
            )
        })),
    }
}

/// Records in the VMs that KSM could merge why it does not. Returns their groups.
fn show(
    spec: &Spec,
    observed: &BTreeSet<VmName>,
    why_not: Option<&str>,
    view: &mut HostView,
) -> BTreeMap<GroupName, Option<String>> {
    let mut groups = BTreeMap::new();
    for name in observed {
        let Some((group, _)) = spec.group_of(name).filter(|(_, group)| group.dedup.is_on()) else {
            continue;
        };
        groups.insert(group.clone(), why_not.map(str::to_owned));
        let Some(vm) = view.vms.get_mut(name) else { continue };
        match why_not {
            Some(why) => {
                vm.limits.insert(Mechanism::Dedup, format!("{NO_SHIM}, and {why}"));
            }
            None => drop(vm.limits.remove(&Mechanism::Dedup)),
        }
    }
    groups
}

#[cfg(test)]
mod tests;
