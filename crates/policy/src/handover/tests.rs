//! Every interleaving of two daemons, two QEMUs and a network that fails and recovers.

use std::collections::HashSet;

use super::*;

/// The state of one intent on both hosts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IntentState {
    source: Option<SourceStep>,
    target: Option<TargetStep>,
    /// Each host's last read of the other's step; it may be old.
    seen_source: Option<SourceStep>,
    seen_target: Option<TargetStep>,
    here: SourceQemu,
    there: TargetQemu,
    /// A daemon's decision that is not carried out yet.
    does: [Option<Deed>; 2],
    is_late: bool,
    /// Whether a host hears nothing from the other.
    is_alone: [bool; 2],
    /// Whether the guest has ever run on the target.
    ran_there: bool,
    /// The number of QEMU deaths that may still occur.
    deaths: u8,
}

/// An action of either host that changes the world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Deed {
    /// Succeeds only if the other host's step is still this one.
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

const ADDRESS: &str = "tcp:10.0.0.2:4444";
/// The hosts' indexes in [`IntentState::does`].
const HERE: usize = 0;
const THERE: usize = 1;
const SENDING: SourceQemu = SourceQemu::Sending { is_slow: false };

fn why() -> String {
    "test".to_owned()
}

impl IntentState {
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
        let seen = IntentView {
            source: self.source.as_ref(),
            target: self.seen_target.as_ref(),
            is_late: self.is_late,
            is_alone: self.is_alone[HERE],
            bar: None,
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
        let seen = IntentView {
            source: self.seen_source.as_ref(),
            target: self.target.as_ref(),
            is_late: self.is_late,
            is_alone: self.is_alone[THERE],
            bar: None,
        };
        Some(match target(seen, &self.there) {
            TargetDeed::Wait | TargetDeed::Nothing => return None,
            TargetDeed::Write(step) => Deed::WriteTarget(step, self.seen_source.clone()),
            TargetDeed::Start => Deed::Start,
            TargetDeed::Run => Deed::Run,
            TargetDeed::End => Deed::EndTarget,
        })
    }

    /// An action meets QEMU in any later state; QEMU refuses an impossible command.
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

    /// Events of the two QEMUs and their network.
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
                // The network breaks, before or after the target has all of the guest.
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

    /// Either host loses contact with the other, or regains it.
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

    /// Events of the daemons: read, decide, act; or die with a pending decision.
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
        if let (None, Some(deed)) = (&self.does[HERE], self.decide_source(&SourceQemu::Unknown)) {
            let mut world = self.clone();
            world.does[HERE] = Some(deed);
            next.push(world);
        }
        if !self.is_late {
            next.push(Self { is_late: true, ..self.clone() });
        }
        next
    }

    /// Whether nothing can happen any more, except the death of a QEMU.
    fn is_over(&self) -> bool {
        self.by_daemons().is_empty() && self.of_itself().is_empty()
    }
}

/// Visits every world that is reachable from `begin`; `look` sees each of them once.
fn explore(begin: IntentState, mut look: impl FnMut(&IntentState)) -> usize {
    let mut seen = HashSet::from([begin.clone()]);
    let mut open = vec![begin];
    while let Some(world) = open.pop() {
        look(&world);
        let next = [world.by_daemons(), world.of_itself(), world.deaths(), world.by_the_network()];
        for next in next.into_iter().flatten() {
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    seen.len()
}

#[test]
fn what_another_host_says_is_no_command_and_no_book() {
    let asked = |target: &TargetStep| {
        let seen = IntentView { target: Some(target), ..IntentView::default() };
        source(seen, &SourceQemu::Untouched)
    };
    for address in ["exec:reboot", "tcp:b:1", "tcp:10.0.0.2:0", "unix:/x", "tcp:[::1]:4,x", ""] {
        let step = TargetStep::Prepared { address: address.to_owned() };
        assert!(matches!(asked(&step), SourceDeed::Write(SourceStep::Stayed { .. })), "{address}");
    }
    let step = TargetStep::Prepared { address: "tcp:[fd00::2]:4444".to_owned() };
    assert_eq!(asked(&step), SourceDeed::Write(SourceStep::Moving));
    let why = "\u{1b}[2J\noverbook: all is well".repeat(100);
    let SourceDeed::Write(SourceStep::Stayed { why }) = asked(&TargetStep::Refused { why }) else {
        panic!("it is refused")
    };
    assert!(model::words::is_plain(&why), "{why:?}");
}

#[test]
fn only_what_both_configurations_name_alike_changes_hosts() {
    let movable = ["web-*", "db-1"].map(NamePattern::new);
    let (web, db) = (GroupName::from("web"), GroupName::from("db"));
    let bar = |vm: &str, group: &GroupName, own: Option<&GroupName>| {
        barred(&vm.into(), group, &movable, own)
    };
    assert_eq!(bar("web-1", &web, Some(&web)), None);
    let other = bar("web-1", &db, Some(&web)).unwrap();
    assert_eq!(other, "it is in group web of this host, and was sent as one of db");
    assert!(bar("web-1", &web, None).unwrap().contains("in no group"));
    assert!(bar("db-2", &db, Some(&db)).unwrap().contains("`movable` of this host"));
    // A name becomes an argument of the command that starts QEMUs.
    for odd in ["web-/../../x", "web-1;reboot", "web-1\n", "web- 1", "-web-1"] {
        let why = barred(&odd.into(), &web, &[NamePattern::new("*")], Some(&web)).unwrap();
        assert!(why.starts_with("its name "), "{odd:?}: {why}");
    }
}

#[test]
fn a_bar_holds_on_either_host_before_anything_is_begun_and_not_afterwards() {
    let bar = Some("not here");
    let prepared = TargetStep::Prepared { address: ADDRESS.to_owned() };
    let seen = IntentView { target: Some(&prepared), bar, ..IntentView::default() };
    let why = "not here".to_owned();
    let stays = SourceDeed::Write(SourceStep::Stayed { why: why.clone() });
    assert_eq!(source(seen, &SourceQemu::Untouched), stays);
    let seen = IntentView { bar, ..IntentView::default() };
    let refused = TargetDeed::Write(TargetStep::Refused { why });
    assert_eq!(target(seen, &TargetQemu::Absent), refused);
    // A guest that has arrived runs, even if the configuration has changed meanwhile.
    let switched = SourceStep::Switched;
    let seen = IntentView {
        source: Some(&switched),
        target: Some(&prepared),
        bar,
        ..IntentView::default()
    };
    assert_eq!(target(seen, &TargetQemu::Received), TargetDeed::Write(TargetStep::Runs));
}

#[test]
fn a_guest_never_runs_twice_whoever_dies_when() {
    let worlds = explore(IntentState::begin(2), |world| {
        assert!(!(world.runs_here() && world.runs_there()), "it runs twice: {world:#?}");
        // Changes made on the target are not available here any more.
        assert!(!(world.runs_here() && world.ran_there), "it runs again: {world:#?}");
    });
    assert!(worlds > 1_000, "only {worlds} worlds");
}

#[test]
fn a_guest_runs_somewhere_in_the_end_if_no_qemu_dies() {
    let mut ends = [0, 0];
    explore(IntentState::begin(0), |world| {
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
    explore(IntentState::begin(1), |world| {
        let died_there = world.deaths == 0 && world.here != SourceQemu::Gone;
        if world.is_over() && died_there && !world.ran_there {
            // During postcopy each host has only a part of the guest, so a death loses it.
            let is_split = world.here == SourceQemu::Serving;
            assert!(world.runs_here() || is_split, "it runs nowhere: {world:#?}");
        }
    });
}
