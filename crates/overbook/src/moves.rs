//! News of VMs that change hosts, each reported once.
//!
//! The news come from the steps that this host has written, not from the act of writing, so a write
//! whose answer was lost is also reported. Steps that a daemon finds at its start are no news.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::mem::{Discriminant, discriminant};

use cluster::records::Records;
use model::cluster::Intent;
use model::{HostName, VmName};
use policy::handover::{SourceStep, TargetStep};
use serde::{Deserialize, Serialize};

/// Number of news that are kept for readers that poll once a second.
const KEPT: usize = 64;

/// The progress of a VM that is to change hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "move")]
pub enum Progress {
    /// The migration has started.
    Leaving {
        /// The target host.
        to: HostName,
    },
    /// The VM runs on the target host.
    Left {
        /// The target host.
        to: HostName,
    },
    /// The move has failed: the VM runs here.
    Stayed {
        /// The target host.
        to: HostName,
        /// The reason.
        why: String,
    },
    /// The VM runs here.
    Arrived {
        /// The source host.
        from: HostName,
    },
    /// The move has failed: the VM never ran here.
    Refused {
        /// The source host.
        from: HostName,
        /// The reason.
        why: String,
    },
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaving { to } => write!(f, "it begins to move to host {to}"),
            Self::Left { to } => write!(f, "it has moved to host {to}"),
            Self::Stayed { to, why } => {
                write!(f, "it stays, and does not move to host {to}: {why}")
            }
            Self::Arrived { from } => write!(f, "it has come from host {from}"),
            Self::Refused { from, why } => {
                write!(f, "it was refused, and does not come from host {from}: {why}")
            }
        }
    }
}

impl Progress {
    /// Progress of a VM that goes to host `to`, from the source's step.
    fn of_source(step: &SourceStep, to: &HostName) -> Self {
        let to = to.clone();
        match step {
            SourceStep::Moving | SourceStep::Hastening | SourceStep::Switched => {
                Self::Leaving { to }
            }
            SourceStep::Left => Self::Left { to },
            SourceStep::Stayed { why } => Self::Stayed { to, why: why.clone() },
        }
    }

    /// Progress of a VM that comes from host `from`, from the target's step. `None`: still waiting.
    fn of_target(step: &TargetStep, from: &HostName) -> Option<Self> {
        let from = from.clone();
        match step {
            TargetStep::Prepared { .. } => None,
            TargetStep::Runs => Some(Self::Arrived { from }),
            TargetStep::Refused { why } => Some(Self::Refused { from, why: why.clone() }),
        }
    }
}

/// One piece of news about a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveEvent {
    /// Counts from 1 since the daemon started.
    pub number: u64,
    /// The VM.
    pub vm: VmName,
    /// Its progress.
    pub progress: Progress,
}

/// Counts of a host's moves since its daemon started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moves {
    /// VMs that are moving and have not arrived, left, or stayed yet.
    pub under_way: BTreeSet<VmName>,
    /// VMs that have left.
    pub left: u64,
    /// VMs whose move away failed.
    pub stayed: u64,
    /// VMs that have arrived.
    pub arrived: u64,
    /// VMs whose arrival failed.
    pub refused: u64,
    /// The latest news, oldest first.
    news: VecDeque<MoveEvent>,
}

impl Moves {
    /// News after this number; some may have been dropped.
    pub fn since(&self, number: u64) -> impl Iterator<Item = &MoveEvent> {
        self.news.iter().filter(move |news| news.number > number)
    }

    /// The number of the latest news; 0: there is none.
    #[must_use]
    pub fn latest(&self) -> u64 {
        self.news.back().map_or(0, |news| news.number)
    }

    /// Adds a piece of news.
    pub(crate) fn add(&mut self, vm: VmName, progress: Progress) {
        match progress {
            Progress::Leaving { .. } => {}
            Progress::Left { .. } => self.left += 1,
            Progress::Stayed { .. } => self.stayed += 1,
            Progress::Arrived { .. } => self.arrived += 1,
            Progress::Refused { .. } => self.refused += 1,
        }
        let number = self.latest() + 1;
        self.news.push_back(MoveEvent { number, vm, progress });
        if self.news.len() > KEPT {
            self.news.pop_front();
        }
    }
}

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
    use cluster::records::Written;

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
