//! The connections of a server, and how many each client may have.
//!
//! Problem: any client that can reach a server can connect and send nothing. Idea: a connection
//! that has not identified its client has one of a few places. When these are taken, it loses its
//! place to a newcomer. The oldest connection of the newcomer's own address or process goes
//! first, or else the oldest one of the origin with the most places. So silent clients do not
//! keep out a client that speaks at once. In addition, each client, by its certificate, user or
//! address, has a bounded number of places.
//!
//! A disk of a VM belongs to one process at a time ([`Owner`]). QEMU opens a new connection when
//! it has given up the old one, which may still wait for the disk. So a process may have a few
//! connections, and loses the oldest one when it opens one more.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sys::process::{has_ended, open_pidfd};
use tokio::sync::Notify;

use crate::budget::{Account, Budget};
use crate::server::{Limits, Who};

/// Connections that one process may have to its disk: QEMU has one, `nbdcopy` four.
pub(crate) const OF_PROCESS: usize = 4;

/// The owner of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Only processes of this user and of root are served.
    pub user: u32,
    /// Number of processes that are served at a time.
    pub processes: usize,
}

/// A process that has connected. A pidfd identifies it, because `/proc` may hide it from us.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

/// Place of a connection.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    number: u64,
    process: Option<Process>,
    pub(crate) account: Account,
    end: Notify,
}

/// Entry of one connection in the table of places.
#[derive(Debug)]
struct ConnectionEntry {
    place: Arc<ConnectionSlot>,
    who: Who,
    /// Whether the client has shown a certificate or asked for an export.
    is_known: bool,
}

/// Origin of a connection: an address, or a process of a user.
type Origin = (Who, Option<u32>);

impl Process {
    /// The process that has this PID now; `None`: there is none.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let pidfd = open_pidfd(pid).ok()?;
        Some(Self { pid, pidfd })
    }

    fn has_ended(&self) -> bool {
        has_ended(&self.pidfd)
    }
}

impl ConnectionEntry {
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
    state: Mutex<ConnectionTable>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    next: u64,
    /// In order of arrival.
    taken: Vec<ConnectionEntry>,
}

/// Gives the place back when dropped.
pub(crate) struct Guard<'a> {
    places: &'a Places,
    pub(crate) place: Arc<ConnectionSlot>,
}

impl Places {
    pub(crate) fn new(limits: Limits, owner: Option<Owner>, budget: Arc<Budget>) -> Self {
        Self { limits, owner, budget, state: Mutex::default() }
    }

    /// A place for a new connection; `None`: the connection cannot be served, for any export.
    pub(crate) fn enter(&self, who: &Who, process: Option<Process>) -> Option<Guard<'_>> {
        if let (Some(owner), Who::User(user)) = (self.owner, who)
            && *user != owner.user
            && *user != 0
        {
            return None;
        }
        let who = who.origin();
        let mut state = self.state();
        // A client with TLS is identified later, by another name.
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
        let place = Arc::new(ConnectionSlot { number, process, account, end: Notify::new() });
        state.taken.push(ConnectionEntry { place: place.clone(), who: origin.0, is_known: false });
        Some(Guard { places: self, place })
    }

    /// Identifies the client of a connection as `who`. A second call changes nothing.
    ///
    /// # Errors
    ///
    /// Why the connection has to end.
    pub(crate) fn know(&self, place: &ConnectionSlot, who: &Who) -> Result<(), String> {
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

    /// Ends connections whose clients are stuck and that hold memory which others need.
    pub(crate) fn end_stuck(&self) {
        for taken in self.state().taken.iter().filter(|taken| taken.place.account.is_stuck()) {
            taken.place.end.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, ConnectionTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionTable {
    fn known(&self) -> impl Iterator<Item = &ConnectionEntry> {
        self.taken.iter().filter(|taken| taken.is_known)
    }

    fn unknown(&self) -> impl Iterator<Item = &ConnectionEntry> {
        self.taken.iter().filter(|taken| !taken.is_known)
    }

    fn oldest_unknown(&self, origin: &Origin) -> Option<usize> {
        self.taken.iter().position(|taken| !taken.is_known && taken.is_of(origin))
    }

    fn busiest_unknown(&self) -> Option<Origin> {
        let origins = self.unknown().map(|taken| (taken.who.clone(), taken.place.pid()));
        origins.max_by_key(|origin| self.unknown().filter(|taken| taken.is_of(origin)).count())
    }

    /// Admits the connection if the export has a free process slot, or this process already has
    /// one.
    fn admit(&mut self, place: &ConnectionSlot, owner: Owner) -> Result<(), String> {
        let (mut own, mut ended, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for taken in self.known().filter(|taken| taken.place.number != place.number) {
            let (number, pid) = (taken.place.number, taken.place.pid());
            match &taken.place.process {
                // The PID may belong to another process by now.
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

impl ConnectionSlot {
    fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid)
    }

    /// Waits until the connection loses its place, or has to give up its memory.
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
    /// The key by which a client is counted. It contains only the network of an IPv6 address,
    /// because one host owns all addresses of its network.
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
        // The address is in the same network.
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
