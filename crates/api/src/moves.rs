//! News of VMs that change hosts, and their counts.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;

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
    #[must_use]
    pub fn of_source(step: &SourceStep, to: &HostName) -> Self {
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
    #[must_use]
    pub fn of_target(step: &TargetStep, from: &HostName) -> Option<Self> {
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
    pub fn add(&mut self, vm: VmName, progress: Progress) {
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
