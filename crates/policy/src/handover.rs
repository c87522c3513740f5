//! How a VM changes hosts: who writes what down, and does what, so that it runs on exactly one.
//!
//! **Problem.** Two daemons move one guest, and either may die at any instant, and so may the
//! network between them. A guest that runs twice destroys its disks; one that waits for a dead
//! daemon is lost as well. **Idea.** Each host writes steps of its own, ahead of what they mean,
//! and neither remembers anything else: what comes next follows from the steps and from what its
//! QEMU says. So whoever comes back goes on.
//!
//! ```text
//! target  starts a QEMU that waits, paused       ─► Prepared
//! source  sees Prepared                          ─► Moving, then has QEMU migrate
//! source  sees its QEMU done for good            ─► Switched: it never runs again by itself
//! target  sees Switched                          ─► Runs, then lets its QEMU run
//! source  sees Runs                              ─► Left, then ends its QEMU
//! ```
//!
//! The source's QEMU alone knows whether it has handed the guest over: it says `completed` or
//! `failed`, once, and runs on by itself after the latter. The target's QEMU is started paused, so
//! it runs only when `Switched` is written. Where it dies before `Runs` is, the source takes the
//! guest back. A source's QEMU that is gone does not run, so the target may try.
//!
//! Neither host waits for one that is not heard of any more. A step is written only if the other
//! host's step is still the one that was seen when it was decided: so where both decide at once,
//! one of them is refused and looks again. (The source may take back what it has switched only
//! before the target says `Runs`, and the target may say `Runs` only before that.)
//!
//! A guest that leaves before all of it is there (postcopy) can only go on. While it is in both,
//! the death of either QEMU loses it, and where the network breaks it waits: that is not mended
//! here.

use serde::{Deserialize, Serialize};

/// What the source has written down.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum SourceStep {
    /// QEMU is told to migrate after this.
    Moving,
    /// The guest leaves before all of it is there (postcopy); QEMU is told so after this.
    Hastening,
    /// The guest does not run here any more.
    Switched,
    /// The target runs it; the QEMU here is ended after this.
    Left,
    /// Nothing came of it, and it never ran there: it runs here again after this, if its QEMU has
    /// it.
    Stayed {
        /// Why.
        why: String,
    },
}

/// What the target has written down.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum TargetStep {
    /// A QEMU waits for the guest.
    Prepared {
        /// Where, as QEMU's `migrate` has it.
        address: String,
    },
    /// The guest runs here after this.
    Runs,
    /// It never ran here, and never will by this intent; the QEMU here is ended after this.
    Refused {
        /// Why.
        why: String,
    },
}

/// What the source's QEMU says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceQemu {
    /// No migration was begun in this life of it.
    Untouched,
    /// It sends the guest, which runs here.
    Sending {
        /// It has done so for too long: the guest writes faster than it is sent.
        is_slow: bool,
    },
    /// The guest has left for the target, which still gets pages from here (postcopy).
    Serving,
    /// The guest was handed over.
    Completed,
    /// It failed or was called off, and the guest runs here.
    Failed(String),
    /// There is no such QEMU any more.
    Gone,
    /// It was not found yet, and nothing was written of it.
    Unknown,
}

/// What the target's QEMU says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetQemu {
    /// It was not started yet.
    Absent,
    /// It waits for a guest, or gets it.
    Waiting {
        /// Where it listens.
        address: String,
    },
    /// It has the guest, paused.
    Received,
    /// The guest runs in it.
    Running,
    /// It could not be started, or has ended.
    Gone(String),
}

/// What the source does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceDeed {
    /// Nothing: it waits for the other, or for QEMU.
    Wait,
    /// Nothing, ever: this intent has ended.
    Nothing,
    /// Writes this down.
    Write(SourceStep),
    /// Has everything given back that the guest has elsewhere, and QEMU send it there.
    Send(String),
    /// Has the guest leave at once, and what it lacks there follow (postcopy).
    Hasten,
    /// Calls the migration off.
    CallOff,
    /// Lets the guest run again.
    Resume,
    /// Ends QEMU.
    End,
}

/// What the target does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetDeed {
    /// Nothing: it waits for the other, or for QEMU.
    Wait,
    /// Nothing, ever: this intent has ended.
    Nothing,
    /// Writes this down.
    Write(TargetStep),
    /// Starts a QEMU that waits for the guest, paused.
    Start,
    /// Lets the guest run.
    Run,
    /// Ends QEMU.
    End,
}

/// What a host sees of an intent, beside its own QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen<'a> {
    /// What the source has written; on the target it may be old.
    pub source: Option<&'a SourceStep>,
    /// What the target has written; on the source it may be old.
    pub target: Option<&'a TargetStep>,
    /// The intent was withdrawn.
    pub is_late: bool,
    /// The other host has not been heard of for a while.
    pub is_alone: bool,
}

/// Why an intent comes to nothing.
const LATE: &str = "it took too long";
/// The same.
const ALONE: &str = "the other host is not heard of";

/// What the source does next.
#[must_use]
pub fn source(seen: Seen<'_>, qemu: &SourceQemu) -> SourceDeed {
    use SourceDeed::{CallOff, End, Hasten, Nothing, Resume, Send, Wait, Write};
    let stayed = |why: &str| Write(SourceStep::Stayed { why: why.to_owned() });
    let Seen { source, target, is_late, is_alone } = seen;
    let is_off = is_late || is_alone || matches!(target, Some(TargetStep::Refused { .. }));
    match (source, qemu) {
        (None, SourceQemu::Gone) => stayed("its QEMU has ended"),
        (None, _) => match target {
            Some(TargetStep::Refused { why }) => stayed(why),
            _ if is_late => stayed(LATE),
            _ if is_alone => stayed(ALONE),
            Some(TargetStep::Prepared { .. }) if *qemu != SourceQemu::Unknown => {
                Write(SourceStep::Moving)
            }
            _ => Wait,
        },
        (Some(_), SourceQemu::Unknown) => Wait,
        (Some(SourceStep::Moving | SourceStep::Hastening), SourceQemu::Untouched) => match target {
            Some(TargetStep::Prepared { address }) if !is_off => Send(address.clone()),
            Some(TargetStep::Refused { why }) => stayed(why),
            _ if is_alone => stayed(ALONE),
            _ => stayed(LATE),
        },
        (Some(SourceStep::Moving | SourceStep::Hastening), SourceQemu::Sending { .. })
            if is_off =>
        {
            CallOff
        }
        (Some(SourceStep::Moving), SourceQemu::Sending { is_slow: true }) => {
            Write(SourceStep::Hastening)
        }
        (Some(SourceStep::Hastening), SourceQemu::Sending { .. }) => Hasten,
        (Some(SourceStep::Moving), SourceQemu::Sending { is_slow: false }) => Wait,
        (Some(SourceStep::Moving | SourceStep::Hastening), SourceQemu::Failed(why)) => stayed(why),
        // What is gone cannot run: whether the target has it all, its QEMU knows.
        (
            Some(SourceStep::Moving | SourceStep::Hastening),
            SourceQemu::Serving | SourceQemu::Completed | SourceQemu::Gone,
        ) => Write(SourceStep::Switched),
        (Some(SourceStep::Switched), qemu) => match target {
            Some(TargetStep::Runs) if *qemu != SourceQemu::Serving => Write(SourceStep::Left),
            Some(TargetStep::Refused { why }) => stayed(why),
            _ if is_alone && *qemu == SourceQemu::Completed => stayed(ALONE),
            _ => Wait,
        },
        (Some(SourceStep::Stayed { .. }), SourceQemu::Completed) => Resume,
        (Some(SourceStep::Left), SourceQemu::Gone) => Nothing,
        (Some(SourceStep::Left), _) => End,
        (Some(SourceStep::Stayed { .. }), _) => Nothing,
    }
}

/// What the target does next.
#[must_use]
pub fn target(seen: Seen<'_>, qemu: &TargetQemu) -> TargetDeed {
    use TargetDeed::{End, Nothing, Run, Start, Wait, Write};
    let refused = |why: &str| Write(TargetStep::Refused { why: why.to_owned() });
    let Seen { source, target, is_late, is_alone } = seen;
    match target {
        None => match (source, qemu) {
            (Some(SourceStep::Stayed { why }), _) => refused(why),
            (_, TargetQemu::Gone(why)) => refused(why),
            _ if is_late => refused(LATE),
            _ if is_alone => refused(ALONE),
            (_, TargetQemu::Absent) => Start,
            (_, TargetQemu::Waiting { address }) => {
                Write(TargetStep::Prepared { address: address.clone() })
            }
            (_, TargetQemu::Received | TargetQemu::Running) => refused("its QEMU is not ours"),
        },
        Some(TargetStep::Prepared { .. }) => match (source, qemu) {
            (_, TargetQemu::Gone(why)) => refused(why),
            (_, TargetQemu::Absent) => refused("its QEMU has ended"),
            (Some(SourceStep::Switched), TargetQemu::Received) => Write(TargetStep::Runs),
            (Some(SourceStep::Stayed { why }), _) => refused(why),
            // What it has received may be all that there is of the guest (postcopy).
            (None | Some(SourceStep::Moving), TargetQemu::Waiting { .. }) if is_alone => {
                refused(ALONE)
            }
            _ => Wait,
        },
        Some(TargetStep::Runs) => match qemu {
            TargetQemu::Received => Run,
            _ => Nothing,
        },
        Some(TargetStep::Refused { .. }) => match qemu {
            TargetQemu::Waiting { .. } | TargetQemu::Received => End,
            TargetQemu::Absent | TargetQemu::Running | TargetQemu::Gone(_) => Nothing,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The whole world of one intent.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        source: Option<SourceStep>,
        target: Option<TargetStep>,
        /// What each host last read of the other's step; it may be old.
        seen_source: Option<SourceStep>,
        seen_target: Option<TargetStep>,
        here: SourceQemu,
        there: TargetQemu,
        /// What a daemon has decided and not done yet.
        does: [Option<Deed>; 2],
        is_late: bool,
        /// Whether either host hears nothing of the other.
        is_alone: [bool; 2],
        /// Whether the guest has ever run there.
        ran_there: bool,
        /// QEMUs that may yet die of themselves.
        deaths: u8,
    }

    /// Either's deed, as far as it changes anything.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    enum Deed {
        /// If the other one's step is still this one.
        WriteSource(SourceStep, Option<TargetStep>),
        WriteTarget(TargetStep, Option<SourceStep>),
        Send,
        Hasten,
        CallOff,
        Resume,
        EndSource,
        Start,
        Run,
        EndTarget,
    }

    const ADDRESS: &str = "tcp:b:4444";
    /// The hosts' places in [`World::does`].
    const HERE: usize = 0;
    const THERE: usize = 1;
    const SENDING: SourceQemu = SourceQemu::Sending { is_slow: false };

    fn why() -> String {
        "test".to_owned()
    }

    impl World {
        fn begin(deaths: u8) -> Self {
            Self {
                source: None,
                target: None,
                seen_source: None,
                seen_target: None,
                here: SourceQemu::Untouched,
                there: TargetQemu::Absent,
                does: [None, None],
                is_late: false,
                is_alone: [false; 2],
                ran_there: false,
                deaths,
            }
        }

        fn runs_here(&self) -> bool {
            matches!(
                self.here,
                SourceQemu::Untouched | SourceQemu::Sending { .. } | SourceQemu::Failed(_)
            )
        }

        fn runs_there(&self) -> bool {
            self.there == TargetQemu::Running
        }

        fn decide(&self, host: usize) -> Option<Deed> {
            if host == HERE { self.decide_source(&self.here) } else { self.decide_target() }
        }

        fn decide_source(&self, here: &SourceQemu) -> Option<Deed> {
            let seen = Seen {
                source: self.source.as_ref(),
                target: self.seen_target.as_ref(),
                is_late: self.is_late,
                is_alone: self.is_alone[HERE],
            };
            Some(match source(seen, here) {
                SourceDeed::Wait | SourceDeed::Nothing => return None,
                SourceDeed::Write(step) => Deed::WriteSource(step, self.seen_target.clone()),
                SourceDeed::Send(address) => {
                    assert_eq!(address, ADDRESS);
                    Deed::Send
                }
                SourceDeed::Hasten => Deed::Hasten,
                SourceDeed::CallOff => Deed::CallOff,
                SourceDeed::Resume => Deed::Resume,
                SourceDeed::End => Deed::EndSource,
            })
        }

        fn decide_target(&self) -> Option<Deed> {
            let seen = Seen {
                source: self.seen_source.as_ref(),
                target: self.target.as_ref(),
                is_late: self.is_late,
                is_alone: self.is_alone[THERE],
            };
            Some(match target(seen, &self.there) {
                TargetDeed::Wait | TargetDeed::Nothing => return None,
                TargetDeed::Write(step) => Deed::WriteTarget(step, self.seen_source.clone()),
                TargetDeed::Start => Deed::Start,
                TargetDeed::Run => Deed::Run,
                TargetDeed::End => Deed::EndTarget,
            })
        }

        /// A deed meets whatever QEMU does by then; QEMU refuses what makes no sense.
        fn done(&self, deed: &Deed) -> Self {
            let mut world = self.clone();
            let is_waiting = matches!(self.there, TargetQemu::Waiting { .. });
            match deed {
                Deed::WriteSource(step, seen) if *seen == self.target => {
                    world.source = Some(step.clone());
                }
                Deed::WriteTarget(step, seen) if *seen == self.source => {
                    world.target = Some(step.clone());
                }
                Deed::Send if self.here != SourceQemu::Gone && self.runs_here() => {
                    world.here = SENDING;
                }
                Deed::Hasten if matches!(self.here, SourceQemu::Sending { .. }) && is_waiting => {
                    (world.here, world.there) = (SourceQemu::Serving, TargetQemu::Received);
                }
                Deed::CallOff if matches!(self.here, SourceQemu::Sending { .. }) => {
                    world.here = SourceQemu::Failed(why());
                }
                Deed::Resume if self.here == SourceQemu::Completed => {
                    world.here = SourceQemu::Failed(why());
                }
                Deed::EndSource => world.here = SourceQemu::Gone,
                Deed::Start if self.there == TargetQemu::Absent => {
                    world.there = TargetQemu::Waiting { address: ADDRESS.to_owned() };
                }
                Deed::Run if self.there == TargetQemu::Received => {
                    (world.there, world.ran_there) = (TargetQemu::Running, true);
                }
                Deed::EndTarget => world.there = TargetQemu::Gone(why()),
                _ => {}
            }
            world
        }

        /// What the two QEMUs and their network may do by themselves.
        fn of_itself(&self) -> Vec<Self> {
            let mut next = Vec::new();
            let mut with = |here: SourceQemu, there: TargetQemu| {
                next.push(Self { here, there, ..self.clone() });
            };
            let is_waiting = matches!(self.there, TargetQemu::Waiting { .. });
            match &self.here {
                SourceQemu::Sending { .. } => {
                    with(SourceQemu::Sending { is_slow: true }, self.there.clone());
                    if is_waiting {
                        with(SENDING, TargetQemu::Received);
                    }
                    if self.there == TargetQemu::Received {
                        with(SourceQemu::Completed, TargetQemu::Received);
                    }
                    // The network breaks, before the target has all of it or after.
                    with(SourceQemu::Failed(why()), self.there.clone());
                }
                SourceQemu::Serving
                    if matches!(self.there, TargetQemu::Received | TargetQemu::Running) =>
                {
                    with(SourceQemu::Completed, self.there.clone());
                }
                SourceQemu::Failed(_) | SourceQemu::Gone if is_waiting => {
                    with(self.here.clone(), TargetQemu::Gone(why()));
                }
                _ => {}
            }
            next
        }

        /// Either host loses sight of the other, or hears of it again.
        fn by_the_network(&self) -> Vec<Self> {
            [HERE, THERE]
                .map(|host| {
                    let mut world = self.clone();
                    world.is_alone[host] ^= true;
                    world
                })
                .into()
        }

        fn deaths(&self) -> Vec<Self> {
            let Some(deaths) = self.deaths.checked_sub(1) else { return Vec::new() };
            let mut next = Vec::new();
            if self.here != SourceQemu::Gone {
                next.push(Self { here: SourceQemu::Gone, deaths, ..self.clone() });
            }
            if !matches!(self.there, TargetQemu::Absent | TargetQemu::Gone(_)) {
                next.push(Self { there: TargetQemu::Gone(why()), deaths, ..self.clone() });
            }
            next
        }

        /// What daemons do: read, decide, do; or die with what they had decided.
        fn by_daemons(&self) -> Vec<Self> {
            let mut next = Vec::new();
            if self.seen_source != self.source {
                next.push(Self { seen_source: self.source.clone(), ..self.clone() });
            }
            if self.seen_target != self.target {
                next.push(Self { seen_target: self.target.clone(), ..self.clone() });
            }
            for host in [HERE, THERE] {
                let with = |deed| {
                    let mut world = self.clone();
                    world.does[host] = deed;
                    world
                };
                match &self.does[host] {
                    Some(deed) => next.extend([with(None).done(deed), with(None)]),
                    None => next.extend(self.decide(host).map(|deed| with(Some(deed)))),
                }
            }
            // A daemon may not have found the source's QEMU yet.
            if let (None, Some(deed)) = (&self.does[HERE], self.decide_source(&SourceQemu::Unknown))
            {
                let mut world = self.clone();
                world.does[HERE] = Some(deed);
                next.push(world);
            }
            if !self.is_late {
                next.push(Self { is_late: true, ..self.clone() });
            }
            next
        }

        /// Nothing happens any more, unless a QEMU dies.
        fn is_over(&self) -> bool {
            self.by_daemons().is_empty() && self.of_itself().is_empty()
        }
    }

    /// Every world that can come of these; `look` sees each of them once.
    fn explore(begin: World, mut look: impl FnMut(&World)) -> usize {
        let mut seen = HashSet::from([begin.clone()]);
        let mut open = vec![begin];
        while let Some(world) = open.pop() {
            look(&world);
            let next =
                [world.by_daemons(), world.of_itself(), world.deaths(), world.by_the_network()];
            for next in next.into_iter().flatten() {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen.len()
    }

    #[test]
    fn a_guest_never_runs_twice_whoever_dies_when() {
        let worlds = explore(World::begin(2), |world| {
            assert!(!(world.runs_here() && world.runs_there()), "it runs twice: {world:#?}");
            // What has changed there is not to be had here any more.
            assert!(!(world.runs_here() && world.ran_there), "it runs again: {world:#?}");
        });
        assert!(worlds > 1_000, "only {worlds} worlds");
    }

    #[test]
    fn a_guest_runs_somewhere_in_the_end_if_no_qemu_dies() {
        let mut ends = [0, 0];
        explore(World::begin(0), |world| {
            if world.is_over() {
                assert!(world.runs_here() || world.runs_there(), "it runs nowhere: {world:#?}");
                ends[usize::from(world.runs_there())] += 1;
                let is_ended = |step: &Option<SourceStep>| {
                    matches!(step, Some(SourceStep::Left | SourceStep::Stayed { .. }))
                };
                assert!(is_ended(&world.source), "nobody ends it: {world:#?}");
            }
        });
        assert!(ends[0] > 0 && ends[1] > 0, "it always ends in one way: {ends:?}");
    }

    #[test]
    fn a_guest_survives_the_death_of_the_targets_qemu_until_it_runs_there() {
        explore(World::begin(1), |world| {
            let died_there = world.deaths == 0 && world.here != SourceQemu::Gone;
            if world.is_over() && died_there && !world.ran_there {
                // Of a guest half of which is there already, nobody has both halves.
                let is_split = world.here == SourceQemu::Serving;
                assert!(world.runs_here() || is_split, "it runs nowhere: {world:#?}");
            }
        });
    }
}
