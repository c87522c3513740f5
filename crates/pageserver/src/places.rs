//! The connections of a server, and how many each client may have.
//!
//! Problem: any client that can reach a server can connect, and say nothing. Idea: a connection
//! that has not shown who its client is has one of a few places, and loses it to a newcomer when
//! these are taken: first the oldest one of the newcomer's own address or process goes, else the
//! oldest one of whichever has most. So silent clients shut out none that speaks at once. Beyond
//! that each client, by its certificate, user or address, has a bounded number of places.
//!
//! A disk of a VM belongs to one process at a time ([`Owner`]). QEMU makes a new connection when it
//! has given up the other, which may still wait for the disk; so a process has a few, and loses the
//! oldest to one more.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sys::process::{has_ended, open_pidfd};
use tokio::sync::Notify;

use crate::budget::{Account, Budget};
use crate::server::{Limits, Who};

/// Connections of one process to its disk: QEMU has one, `nbdcopy` four.
pub(crate) const OF_PROCESS: usize = 4;

/// The owner of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Only processes of this user, and of root, are served.
    pub user: u32,
    /// Processes that are served at a time.
    pub processes: usize,
}

/// A process that has connected. It is known by a descriptor, for `/proc` may hide it from us.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

/// A connection's place.
#[derive(Debug)]
pub(crate) struct Place {
    number: u64,
    process: Option<Process>,
    pub(crate) account: Account,
    end: Notify,
}

/// One connection, as all of them are kept.
#[derive(Debug)]
struct Taken {
    place: Arc<Place>,
    who: Who,
    /// It has shown who it is, and what it wants.
    is_known: bool,
}

/// Where a connection comes from: an address, or a process of a user.
type Origin = (Who, Option<u32>);

impl Process {
    /// The process that has this number now; `None`: there is none.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let pidfd = open_pidfd(pid).ok()?;
        Some(Self { pid, pidfd })
    }

    fn has_ended(&self) -> bool {
        has_ended(&self.pidfd)
    }
}

impl Taken {
    fn is_of(&self, (who, pid): &Origin) -> bool {
        self.who == *who && self.place.pid() == *pid
    }
}

/// The places of one server.
#[derive(Debug)]
pub(crate) struct Places {
    limits: Limits,
    owner: Option<Owner>,
    budget: Arc<Budget>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In the order in which they came.
    taken: Vec<Taken>,
}

/// Gives the place back.
pub(crate) struct Guard<'a> {
    places: &'a Places,
    pub(crate) place: Arc<Place>,
}

impl Places {
    pub(crate) fn new(limits: Limits, owner: Option<Owner>, budget: Arc<Budget>) -> Self {
        Self { limits, owner, budget, state: Mutex::default() }
    }

    /// A place for a connection that has just come; `None`: there is none for it, whatever it
    /// wants.
    pub(crate) fn enter(&self, who: &Who, process: Option<Process>) -> Option<Guard<'_>> {
        if let (Some(owner), Who::User(user)) = (self.owner, who)
            && *user != owner.user
            && *user != 0
        {
            return None;
        }
        let who = who.origin();
        let mut state = self.state();
        // A client that comes by TLS is known later, by another name.
        if state.known().count() >= self.limits.connections {
            return None;
        }
        let origin = (who, process.as_ref().map(|process| process.pid));
        let unknown = state.unknown().count();
        let own = state.unknown().filter(|taken| taken.is_of(&origin)).count();
        let gone = if own >= self.limits.unknown_each {
            state.oldest_unknown(&origin)
        } else if unknown >= self.limits.unknown {
            state.busiest_unknown().and_then(|origin| state.oldest_unknown(&origin))
        } else {
            None
        };
        if let Some(gone) = gone {
            state.taken.remove(gone).place.end.notify_one();
        }
        let number = state.next;
        state.next += 1;
        let account = Account::new(self.budget.clone());
        let place = Arc::new(Place { number, process, account, end: Notify::new() });
        state.taken.push(Taken { place: place.clone(), who: origin.0, is_known: false });
        Some(Guard { places: self, place })
    }

    /// The connection is `who`'s. Asked again, nothing changes.
    ///
    /// # Errors
    ///
    /// Why it may not go on.
    pub(crate) fn know(&self, place: &Place, who: &Who) -> Result<(), String> {
        let mut state = self.state();
        let Some(own) = state.taken.iter().position(|t| t.place.number == place.number) else {
            return Err("its place is another one's".to_owned());
        };
        if state.taken[own].is_known {
            return Ok(());
        }
        let who = who.origin();
        if state.known().count() >= self.limits.connections {
            return Err(format!("{} connections are served already", self.limits.connections));
        }
        let has = state.known().filter(|taken| taken.who == who).count();
        if has >= self.limits.each {
            return Err(format!("{who} has {has} connections already"));
        }
        (state.taken[own].who, state.taken[own].is_known) = (who, true);
        if let Some(owner) = self.owner {
            state.admit(place, owner).inspect_err(|_| state.taken[own].is_known = false)?;
        }
        Ok(())
    }

    /// Ends connections whose clients are stuck and hold what others need.
    pub(crate) fn end_stuck(&self) {
        for taken in self.state().taken.iter().filter(|taken| taken.place.account.is_stuck()) {
            taken.place.end.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn known(&self) -> impl Iterator<Item = &Taken> {
        self.taken.iter().filter(|taken| taken.is_known)
    }

    fn unknown(&self) -> impl Iterator<Item = &Taken> {
        self.taken.iter().filter(|taken| !taken.is_known)
    }

    fn oldest_unknown(&self, origin: &Origin) -> Option<usize> {
        self.taken.iter().position(|taken| !taken.is_known && taken.is_of(origin))
    }

    fn busiest_unknown(&self) -> Option<Origin> {
        let origins = self.unknown().map(|taken| (taken.who.clone(), taken.place.pid()));
        origins.max_by_key(|origin| self.unknown().filter(|taken| taken.is_of(origin)).count())
    }

    /// Makes this a connection of the process that has the export, if there is none or it is that.
    fn admit(&mut self, place: &Place, owner: Owner) -> Result<(), String> {
        let (mut own, mut ended, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for taken in self.known().filter(|taken| taken.place.number != place.number) {
            let (number, pid) = (taken.place.number, taken.place.pid());
            match &taken.place.process {
                // Its number may be another one's by now.
                Some(process) if process.has_ended() => ended.push(number),
                Some(_) if pid == place.pid() => own.push(number),
                Some(_) if others.contains(&pid) => {}
                _ => others.push(pid),
            }
        }
        if others.len() >= owner.processes {
            let pid = others.iter().flatten().next();
            let pid = pid.map_or_else(|| "of an unknown number".to_owned(), u32::to_string);
            let have = if others.len() == 1 { "has" } else { "and others have" };
            return Err(format!("process {pid} {have} it"));
        }
        if own.len() >= OF_PROCESS {
            ended.push(own[0]);
        }
        for taken in self.taken.extract_if(.., |taken| ended.contains(&taken.place.number)) {
            taken.place.end.notify_one();
        }
        Ok(())
    }
}

impl Place {
    fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid)
    }

    /// Waits until another one has the place, or needs what it holds.
    pub(crate) async fn ended(&self) {
        self.end.notified().await;
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let number = self.place.number;
        self.places.state().taken.retain(|taken| taken.place.number != number);
    }
}

impl Who {
    /// As it is counted: of an IPv6 address only the network, for a host has all of one.
    fn origin(&self) -> Self {
        match self {
            Self::Address(address) => Self::Address(match address.to_canonical() {
                IpAddr::V6(address) => {
                    IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
                }
                address => address,
            }),
            other => other.clone(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LIMITS: Limits = Limits {
        connections: 6,
        each: 3,
        unknown: 4,
        unknown_each: 2,
        negotiation: std::time::Duration::from_secs(1),
    };

    fn address(text: &str) -> Who {
        Who::Address(text.parse().unwrap())
    }

    fn has_ended(guard: &Guard<'_>) -> bool {
        guard.place.ended().now_or_never().is_some()
    }

    #[test]
    fn a_silent_connection_makes_room_for_a_newcomer() {
        let places = Places::new(LIMITS, None, Arc::default());
        let enter = |from| places.enter(&address(from), None).unwrap();
        let first = [enter("10.0.0.1"), enter("10.0.0.1")];
        let third = enter("10.0.0.1");
        assert!(has_ended(&first[0]) && !has_ended(&first[1]) && !has_ended(&third));
        let others = [enter("10.0.0.2"), enter("fd00::1")];
        let newest = enter("fd00::2");
        assert!(has_ended(&first[1]), "the busiest address loses one");
        assert!(!has_ended(&third) && !others.iter().any(has_ended));
        // The same network.
        drop(enter("fd00::3"));
        assert!(has_ended(&others[1]) && !has_ended(&newest));
        assert!(places.know(&others[1].place, &Who::Anybody).is_err());
    }

    #[test]
    fn known_clients_have_bounded_places_and_keep_them() {
        let places = Places::new(LIMITS, None, Arc::default());
        let certificate = |name: &str| Who::Certificate(name.to_owned());
        let enter = |name: &str| {
            let guard = places.enter(&address("10.0.0.1"), None)?;
            let known = places.know(&guard.place, &certificate(name));
            Some((known, guard))
        };
        let one: Vec<_> = (0..3).map(|_| enter("a").unwrap()).collect();
        assert!(one.iter().all(|(known, _)| known.is_ok()));
        assert!(enter("a").unwrap().0.unwrap_err().contains("has 3 connections"));
        let other: Vec<_> = (0..3).map(|_| enter("b").unwrap()).collect();
        assert!(other.iter().all(|(known, _)| known.is_ok()));
        assert!(enter("c").is_none(), "there is a place too many");
        assert!(!one.iter().chain(&other).any(|(_, guard)| has_ended(guard)));
        drop(one);
        assert!(enter("c").unwrap().0.is_ok());
    }

    #[test]
    fn an_export_is_its_owners_and_one_process_has_it() {
        let owner = Owner { user: 7, processes: 1 };
        let places = Places::new(Limits::of(owner), Some(owner), Arc::default());
        assert!(places.enter(&Who::User(8), None).is_none());
        let own = Some(std::process::id());
        let parent = Some(std::os::unix::process::parent_id());
        let enter = |pid: Option<u32>| {
            let guard = places.enter(&Who::User(7), pid.and_then(Process::of)).unwrap();
            let known = places.know(&guard.place, &Who::User(7));
            (known, guard)
        };
        let (known, first) = enter(own);
        assert!(known.is_ok());
        let (known, _other) = enter(parent);
        assert!(known.unwrap_err().contains(&std::process::id().to_string()));
        let more: Vec<_> = (1..OF_PROCESS).map(|_| enter(own)).collect();
        assert!(more.iter().all(|(known, _)| known.is_ok()) && !has_ended(&first));
        let (known, newest) = enter(own);
        assert!(known.is_ok() && has_ended(&first) && !has_ended(&newest));
        drop((more, newest));
        let mut child = std::process::Command::new("cat");
        let mut child = child.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let (known, dead) = enter(Some(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(known.is_ok());
        assert!(enter(parent).0.is_ok() && has_ended(&dead), "a process that has ended keeps it");
    }
}
