//! Reports the news of VMs that change hosts, each once.
//!
//! The news come from the steps that this host has written, not from the act of writing, so a write
//! whose answer was lost is also reported. Steps that a daemon finds at its start are no news.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};

use api::moves::{Moves, Progress};
use cluster::records::Records;
use model::cluster::Intent;
use model::{HostName, VmName};

/// Remembers which news were reported.
#[derive(Debug, Default)]
pub(super) struct Teller {
    has_looked: bool,
    /// Keyed by VM and intent.
    known: BTreeMap<(VmName, u64), ReportedMove>,
}

#[derive(Debug)]
struct ReportedMove {
    other: HostName,
    told: Option<Discriminant<Progress>>,
}

impl Teller {
    /// Adds news. `mine` are the intents that concern this host, `written` its own steps.
    pub(super) fn look(
        &mut self,
        moves: &mut Moves,
        host: &HostName,
        mine: &BTreeMap<VmName, Intent>,
        written: &Records,
    ) {
        for (vm, intent) in mine {
            let other = if intent.from == *host { &intent.to } else { &intent.from };
            let known = || ReportedMove { other: other.clone(), told: None };
            self.known.entry((vm.clone(), intent.generation)).or_insert_with(known);
        }
        let of = |vm: &VmName, n: u64| (vm.clone(), n);
        let sources = written.sources.iter().filter_map(|((_, vm), found)| {
            let known = self.known.get(&of(vm, found.generation))?;
            Some((of(vm, found.generation), Progress::of_source(&found.step, &known.other)))
        });
        let targets = written.targets.iter().filter_map(|((_, vm), found)| {
            let known = self.known.get(&of(vm, found.generation))?;
            Some((of(vm, found.generation), Progress::of_target(&found.step, &known.other)?))
        });
        let found: BTreeMap<(VmName, u64), Progress> = sources.chain(targets).collect();
        moves.under_way = mine
            .iter()
            .filter(|(vm, intent)| {
                let progress = found.get(&of(vm, intent.generation));
                progress.is_none_or(|progress| matches!(progress, Progress::Leaving { .. }))
            })
            .map(|(vm, _)| vm.clone())
            .collect();
        let is_current = |vm: &VmName, n: u64| mine.get(vm).is_some_and(|i| i.generation == n);
        let is_written = |vm: &VmName, n: u64| {
            let key = (host.clone(), vm.clone());
            written.sources.get(&key).is_some_and(|found| found.generation == n)
                || written.targets.get(&key).is_some_and(|found| found.generation == n)
        };
        self.known.retain(|(vm, n), _| is_current(vm, *n) || is_written(vm, *n));
        for (key, progress) in found {
            let Some(known) = self.known.get_mut(&key) else { continue };
            let kind = discriminant(&progress);
            if known.told.replace(kind) != Some(kind) && self.has_looked {
                moves.add(key.0, progress);
            }
        }
        self.has_looked = true;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use cluster::records::Written;
    use policy::handover::{SourceStep, TargetStep};

    use super::*;

    /// Host `a`, and its steps for intent 7 of `web-1`.
    #[derive(Default)]
    struct Scene {
        teller: Teller,
        moves: Moves,
        written: Records,
        intents: BTreeMap<VmName, Intent>,
    }

    fn vm() -> VmName {
        "web-1".into()
    }

    impl Scene {
        fn look(&mut self) -> Vec<String> {
            let before = self.moves.latest();
            self.teller.look(&mut self.moves, &"a".into(), &self.intents, &self.written);
            self.moves.since(before).map(|news| news.progress.to_string()).collect()
        }

        fn intent(&mut self, from: &str, to: &str) {
            let intent = Intent {
                generation: 7,
                from: from.into(),
                to: to.into(),
                group: "web".into(),
                is_withdrawn: false,
            };
            self.intents.insert(vm(), intent);
        }

        fn source(&mut self, step: SourceStep) -> Vec<String> {
            let step = Written { generation: 7, step, incarnation: 1, is_over: false };
            self.written.sources.insert(("a".into(), vm()), step);
            self.look()
        }

        fn target(&mut self, step: TargetStep) -> Vec<String> {
            let step = Written { generation: 7, step, incarnation: 1, is_over: false };
            self.written.targets.insert(("a".into(), vm()), step);
            self.look()
        }
    }

    #[test]
    fn each_thing_is_told_once() {
        let mut scene = Scene::default();
        assert!(scene.look().is_empty());
        scene.intent("a", "b");
        assert!(scene.look().is_empty());
        assert_eq!(scene.moves.under_way, BTreeSet::from([vm()]));
        assert_eq!(scene.source(SourceStep::Moving), ["it begins to move to host b"]);
        assert!(scene.source(SourceStep::Hastening).is_empty());
        assert!(scene.source(SourceStep::Switched).is_empty());
        assert_eq!(scene.source(SourceStep::Left), ["it has moved to host b"]);
        assert!(scene.look().is_empty());
        assert!(scene.moves.under_way.is_empty());
        assert_eq!((scene.moves.left, scene.moves.stayed), (1, 0));
    }

    #[test]
    fn a_target_that_refuses_after_its_intent_has_gone_says_so() {
        let mut scene = Scene::default();
        scene.look();
        scene.intent("b", "a");
        assert!(scene.target(TargetStep::Prepared { address: "tcp:a:1".to_owned() }).is_empty());
        scene.intents.clear();
        let why = "its intent is gone".to_owned();
        assert_eq!(
            scene.target(TargetStep::Refused { why }),
            ["it was refused, and does not come from host b: its intent is gone"]
        );
        assert_eq!((scene.moves.refused, scene.moves.arrived), (1, 0));
    }

    #[test]
    fn what_was_over_when_the_daemon_started_is_no_news_and_what_follows_is() {
        let mut scene = Scene::default();
        scene.intent("b", "a");
        assert!(scene.target(TargetStep::Runs).is_empty());
        assert_eq!(scene.moves, Moves::default());
        let mut scene = Scene::default();
        scene.intent("a", "b");
        assert!(scene.source(SourceStep::Moving).is_empty());
        let why = "it took too long".to_owned();
        assert_eq!(
            scene.source(SourceStep::Stayed { why }),
            ["it stays, and does not move to host b: it took too long"]
        );
        assert_eq!(scene.moves.stayed, 1);
    }
}
