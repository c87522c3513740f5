//! The content of a pool's store, by writer.
//!
//! ```text
//! hosts/H/seat          host H's lease: it is alive
//! hosts/H/report        its report about itself
//! hosts/H/source/VM     its last step as the source of an intent
//! hosts/H/target/VM     its last step as the target
//! controller/seat       the controller's lease: it decides
//! controller/intents/VM the intended move
//! controller/excess     the memory that each host keeps for overloads
//! ```
//!
//! All values that a host writes are under a prefix of its own. So etcd can enforce that by the
//! name in its certificate.

use std::collections::{BTreeMap, BTreeSet};

use model::cluster::{ClusterView, ExcessPlan, HostReport, Intent};
use model::words::{is_plain, plain};
use model::{GroupName, HostName, Reading, Time, VmName};
use policy::handover::{SourceStep, TargetStep};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::store::Snapshot;

/// The key of the controller's lease.
pub const CONTROLLER_SEAT: &str = "controller/seat";
/// The prefix of intents.
pub const INTENTS: &str = "controller/intents/";

/// The key of the memory that each host keeps for overloads.
pub const EXCESS: &str = "controller/excess";

/// The prefix of all values that a host writes.
#[must_use]
pub fn of_host(host: &HostName) -> String {
    format!("hosts/{host}/")
}

/// The key of a host's lease.
#[must_use]
pub fn host_seat(host: &HostName) -> String {
    format!("hosts/{host}/seat")
}

/// The key of its report.
#[must_use]
pub fn report(host: &HostName) -> String {
    format!("hosts/{host}/report")
}

/// The key of its last step as the source.
#[must_use]
pub fn source(host: &HostName, vm: &VmName) -> String {
    format!("hosts/{host}/source/{vm}")
}

/// The key of its last step as the target.
#[must_use]
pub fn target(host: &HostName, vm: &VmName) -> String {
    format!("hosts/{host}/target/{vm}")
}

/// The key of a VM's intent.
#[must_use]
pub fn intent(vm: &VmName) -> String {
    format!("{INTENTS}{vm}")
}

/// A step that a host has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written<Step> {
    /// The generation of the intent.
    pub generation: u64,
    /// The step.
    pub step: Step,
    /// The incarnation of its QEMU; 0: unknown.
    pub incarnation: u64,
    /// Whether this is the last step.
    pub is_over: bool,
}

/// All records of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Records {
    /// The controller that holds the lease.
    pub controller: Option<String>,
    /// Hosts that hold their leases.
    pub seated: BTreeSet<HostName>,
    /// The reports of all hosts, including those without a lease.
    pub reports: BTreeMap<HostName, HostReport>,
    /// The memory that each host keeps for overloads.
    pub excess: ExcessPlan,
    /// Intents by VM.
    pub intents: BTreeMap<VmName, Intent>,
    /// VMs with unreadable intents: those of a controller of another version.
    pub unreadable: BTreeSet<VmName>,
    /// Steps of sources by host and VM.
    pub sources: BTreeMap<(HostName, VmName), Written<SourceStep>>,
    /// Steps of targets by host and VM.
    pub targets: BTreeMap<(HostName, VmName), Written<TargetStep>>,
}

impl Records {
    /// The records in a snapshot. An unreadable one is left out: it is of another version or a
    /// host's mistake, and concerns that host alone. A record with a name that no host or VM can
    /// have is also left out, because names are shown and logged.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        let mut records = Self::default();
        for (key, value) in snapshot.values.iter().filter(|(key, _)| is_plain(key)) {
            let parts: Vec<&str> = key.splitn(4, '/').collect();
            match parts.as_slice() {
                ["controller", "seat"] => {
                    records.controller = Some(plain(&String::from_utf8_lossy(value)));
                }
                ["controller", "excess"] => {
                    records.excess = serde_json::from_slice(value).unwrap_or_default();
                }
                // A VM's name may contain a slash.
                ["controller", "intents", ..] => {
                    let vm: VmName = key[INTENTS.len()..].into();
                    if !add(&mut records.intents, vm.clone(), value) {
                        records.unreadable.insert(vm);
                    }
                }
                ["hosts", host, "seat"] => drop(records.seated.insert((*host).into())),
                ["hosts", host, "report"] => {
                    add(&mut records.reports, (*host).into(), value);
                }
                ["hosts", host, "source", vm] => {
                    add(&mut records.sources, ((*host).into(), (*vm).into()), value);
                }
                ["hosts", host, "target", vm] => {
                    add(&mut records.targets, ((*host).into(), (*vm).into()), value);
                }
                _ => {}
            }
        }
        for report in records.reports.values_mut() {
            report.vms.retain(|vm, _| is_plain(vm.as_str()));
        }
        let is_known = |host: &HostName| is_plain(host.as_str());
        let unreadable = &mut records.unreadable;
        records.intents.retain(|vm, intent| {
            let is_plain = is_known(&intent.from) && is_known(&intent.to);
            if !is_plain {
                unreadable.insert(vm.clone());
            }
            is_plain
        });
        records
    }

    /// The source's record for this VM's intent.
    #[must_use]
    pub fn source_of(&self, vm: &VmName, intent: &Intent) -> Option<&Written<SourceStep>> {
        let written = self.sources.get(&(intent.from.clone(), vm.clone()));
        written.filter(|written| written.generation == intent.generation)
    }

    /// The target's record for this VM's intent.
    #[must_use]
    pub fn target_of(&self, vm: &VmName, intent: &Intent) -> Option<&Written<TargetStep>> {
        let written = self.targets.get(&(intent.to.clone(), vm.clone()));
        written.filter(|written| written.generation == intent.generation)
    }

    /// The group of a VM, as this host reports it.
    #[must_use]
    pub fn group_of(&self, vm: &VmName, host: &HostName) -> Option<GroupName> {
        Some(self.reports.get(host)?.vms.get(vm)?.group.clone())
    }

    /// The input of a decision. `since`: the time when each intent was first seen.
    #[must_use]
    pub fn view(&self, now: Time, since: &BTreeMap<VmName, (u64, Time)>) -> ClusterView {
        let is_seated = |host: &HostName| self.seated.contains(host);
        let hosts = self.reports.iter().filter(|(host, _)| is_seated(host));
        let hosts = hosts.map(|(host, report)| (host.clone(), Reading::new(report.clone(), now)));
        let intents = self.intents.iter().map(|(vm, intent)| {
            let begun = since.get(vm).map_or(now, |(_, begun)| *begun);
            (vm.clone(), Reading::new(intent.clone(), begun))
        });
        let excess = self.excess.clone();
        ClusterView { hosts: hosts.collect(), intents: intents.collect(), excess }
    }
}

/// Adds a value; returns whether it is readable.
fn add<K: Ord, V: DeserializeOwned>(to: &mut BTreeMap<K, V>, key: K, value: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice(value) else { return false };
    to.insert(key, value);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Change;

    #[test]
    fn records_are_read_back_and_what_cannot_be_read_is_left_out() {
        let (host, vm) = (HostName::from("a"), VmName::from("x/y"));
        let step = TargetStep::Runs;
        let written = Written { generation: 3, step, incarnation: 7, is_over: false };
        let intent = Intent {
            generation: 3,
            from: "b".into(),
            to: "a".into(),
            group: "web".into(),
            is_withdrawn: false,
        };
        let mut snapshot = Snapshot::default();
        for change in
            [Change::put(target(&host, &vm), &written), Change::put(super::intent(&vm), &intent)]
        {
            let Change::Put { key, value } = change else { panic!("no put") };
            snapshot.values.insert(key, value);
        }
        snapshot.values.insert(host_seat(&host), b"a".to_vec());
        snapshot.values.insert(report(&host), b"nonsense".to_vec());
        snapshot.values.insert("hosts/a/other".to_owned(), b"1".to_vec());
        let of_another_version = br#"{"generation": 9, "source": "b"}"#.to_vec();
        snapshot.values.insert(super::intent(&"y".into()), of_another_version);
        let records = Records::of(&snapshot);
        assert_eq!(records.target_of(&vm, &intent), Some(&written));
        assert_eq!(records.target_of(&vm, &Intent { generation: 4, ..intent }), None);
        assert!(records.seated.contains(&host) && records.reports.is_empty());
        assert_eq!(records.unreadable, BTreeSet::from(["y".into()]));
    }

    #[test]
    fn what_a_hostile_host_writes_can_be_shown() {
        let vm_report = r#"{"group": "web", "promised": 1, "given": 1, "severity": "none", "paged": 0,
            "immovable": "a\u001b[2Jb\ncalled off"}"#;
        let report = format!(
            r#"{{"memory": 1, "vms": {{"web\u001b[2J": {vm_report}, "web": {vm_report}}}}}"#
        );
        let stayed = r#"{"generation": 1, "incarnation": 0, "is_over": true,
            "step": {"step": "stayed", "why": "no\u001b]0;x\u0007 room"}}"#;
        let values = [
            ("hosts/a/report", report.as_str()),
            ("hosts/a\u{1b}[2J/seat", "x"),
            ("hosts/a/source/web", stayed),
            ("controller/seat", "c\u{1b}[2J"),
        ];
        let values = values.map(|(key, value)| (key.to_owned(), value.as_bytes().to_vec()));
        let records = Records::of(&Snapshot { revision: 1, values: values.into() });
        let (host, vm) = (HostName::from("a"), VmName::from("web"));
        let [(name, found)] = &records.reports[&host].vms.iter().collect::<Vec<_>>()[..] else {
            panic!("one VM: {:?}", records.reports)
        };
        assert_eq!((*name, found.immovable.as_deref()), (&vm, Some("a[2Jb called off")));
        let why = "no]0;x room".to_owned();
        assert_eq!(records.sources[&(host, vm)].step, SourceStep::Stayed { why });
        assert!(records.seated.is_empty());
        assert_eq!(records.controller.as_deref(), Some("c[2J"));
    }
}
