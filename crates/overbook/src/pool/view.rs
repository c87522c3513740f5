//! The records of a pool as people see them: the hosts and the moves, in figures and words.

use api::wire::{PoolHost, PoolMove, PoolRecords};
use cluster::records::Records;
use model::cluster::{HostReport, VmReport};
use model::{Bytes, HostName, Severity};
use policy::handover::{SourceStep, TargetStep};

/// All hosts and moves.
pub(crate) fn of(records: &Records) -> PoolRecords {
    let hosts = records.reports.iter();
    PoolRecords {
        controller: records.controller.clone(),
        hosts: hosts.map(|(name, report)| host(records, name, report)).collect(),
        moves: moves(records),
    }
}

fn host(records: &Records, name: &HostName, report: &HostReport) -> PoolHost {
    let sum = |of: fn(&VmReport) -> Bytes| report.vms.values().map(of).sum::<Bytes>().0;
    let kept = records.excess.shares.get(name).copied().unwrap_or_default();
    let count = |severity| report.vms.values().filter(|vm| vm.severity == severity).count();
    PoolHost {
        host: name.to_string(),
        is_there: records.seated.contains(name),
        vms: report.vms.len(),
        memory_bytes: report.memory.0,
        given_bytes: sum(|vm| vm.given),
        promised_bytes: sum(|vm| vm.promised),
        reserve_bytes: report.reserve.0,
        kept_for_vms_bytes: kept.targets.0,
        kept_for_pages_bytes: kept.repositories.0,
        in_repositories_bytes: report.in_repositories.0,
        transient_overloads: count(Severity::Transient),
        sustained_overloads: count(Severity::Sustained),
    }
}

fn moves(records: &Records) -> Vec<PoolMove> {
    let step_of_source = |step: &SourceStep| match step {
        SourceStep::Moving => "sends it".to_owned(),
        SourceStep::Hastening => "sends it, in a hurry".to_owned(),
        SourceStep::Switched => "has sent it".to_owned(),
        SourceStep::Left => "done".to_owned(),
        SourceStep::Stayed { why } => format!("keeps it: {why}"),
    };
    let step_of_target = |step: &TargetStep| match step {
        TargetStep::Prepared { address } => format!("waits at {address}"),
        TargetStep::Runs => "runs it".to_owned(),
        TargetStep::Refused { why } => format!("refuses it: {why}"),
    };
    let all = records.intents.iter();
    all.map(|(vm, intent)| {
        let (source, target) = (records.source_of(vm, intent), records.target_of(vm, intent));
        PoolMove {
            vm: vm.to_string(),
            from: intent.from.to_string(),
            to: intent.to.to_string(),
            is_withdrawn: intent.is_withdrawn,
            source: source.map_or("waits".to_owned(), |w| step_of_source(&w.step)),
            target: target.map_or("prepares".to_owned(), |w| step_of_target(&w.step)),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cluster::records::Written;
    use model::cluster::Intent;

    #[test]
    fn hosts_are_added_up_and_moves_told_in_words() {
        let mut records = Records::default();
        let vm = |given, severity| VmReport {
            group: "web".into(),
            promised: Bytes::mib(512),
            given: Bytes::mib(given),
            severity,
            paged: 0,
            rates: None,
            immovable: None,
            saved: Bytes::ZERO,
        };
        let vms = [
            ("web-1".into(), vm(256, Severity::Sustained)),
            ("web-2".into(), vm(512, Severity::None)),
        ];
        let report =
            HostReport { memory: Bytes::mib(900), vms: vms.into(), ..HostReport::default() };
        records.reports.insert("a".into(), report);
        records.reports.insert("b".into(), HostReport::default());
        records.seated.insert("a".into());
        let (from, to) = (HostName::from("a"), HostName::from("b"));
        let intent = Intent {
            generation: 3,
            from: from.clone(),
            to,
            group: "web".into(),
            is_withdrawn: false,
        };
        records.intents.insert("web-1".into(), intent);
        let sent =
            Written { generation: 3, step: SourceStep::Moving, incarnation: 1, is_over: false };
        records.sources.insert((from, "web-1".into()), sent);
        let PoolRecords { controller, hosts, moves } = of(&records);
        assert_eq!(controller, None);
        let [a, b] = &hosts[..] else { panic!("{hosts:?}") };
        let mib = |n: u64| n << 20;
        assert_eq!((a.given_bytes, a.promised_bytes), (mib(768), mib(1024)));
        assert_eq!((a.vms, a.transient_overloads, a.sustained_overloads), (2, 0, 1));
        assert!(a.is_there && !b.is_there);
        let [PoolMove { source, target, .. }] = &moves[..] else { panic!("{moves:?}") };
        assert_eq!((source.as_str(), target.as_str()), ("sends it", "prepares"));
    }
}
