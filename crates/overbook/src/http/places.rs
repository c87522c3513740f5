//! Limits the peers that may be connected to a listener at once.
//!
//! **Problem.** A client that sends no request could occupy connections that the operator needs.
//!
//! **Idea.** A connection first *waits*, until its first permitted request. That request (on TCP
//! with the token) *admits* it. The two states have separate limits. When too many connections
//! wait, the oldest of the peer with the most waiting ones is closed. So a peer that sends many
//! incomplete requests loses its own connections; a complete request takes a millisecond and is
//! never the oldest. One peer has at most half of the admitted connections, and further requests
//! are refused.
//!
//! A peer is a user on the unix socket and an address on TCP. Of IPv6 it is a network of 64 bits,
//! because one machine has that many addresses.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Maximum number of waiting connections of a listener.
pub(super) const MAX_WAITING: usize = 64;
/// Maximum number of admitted connections of a listener.
pub(super) const MAX_ADMITTED: usize = 64;
/// Maximum number of admitted connections of one peer.
pub(super) const MAX_OF_A_PEER: usize = MAX_ADMITTED / 2;

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionPeer {
    /// A process on this host.
    Local {
        /// Its user. `None`: the kernel does not tell.
        uid: Option<u32>,
        /// Its pid, if it is visible from here.
        pid: Option<i32>,
    },
    /// Another host, or a process on this one.
    Remote(SocketAddr),
}

/// The key by which a peer's connections are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    User(Option<u32>),
    Address(IpAddr),
}

impl ConnectionPeer {
    fn origin(self) -> Origin {
        match self {
            Self::Local { uid, .. } => Origin::User(uid),
            Self::Remote(address) => Origin::Address(match address.ip().to_canonical() {
                IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
                ip @ IpAddr::V4(_) => ip,
            }),
        }
    }
}

impl fmt::Display for ConnectionPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local { uid: Some(uid), pid: Some(pid) } => {
                write!(f, "uid {uid} (process {pid})")
            }
            Self::Local { uid: Some(uid), pid: None } => write!(f, "uid {uid}"),
            Self::Local { uid: None, .. } => f.write_str("a user who is not known"),
            Self::Remote(address) => write!(f, "{address} with the token"),
        }
    }
}

/// The connections of one listener.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionSlots(Arc<Mutex<OpenConnections>>);

#[derive(Debug, Default)]
struct OpenConnections {
    /// The next number. It grows, so the oldest connection has the smallest number.
    next: u64,
    by_number: BTreeMap<u64, OpenConnection>,
}

#[derive(Debug)]
struct OpenConnection {
    origin: Origin,
    is_admitted: bool,
    /// Dropping it ends the connection.
    _keeps: oneshot::Sender<()>,
}

/// One connection's place; dropping it frees the place.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    peer: ConnectionPeer,
    number: u64,
    places: ConnectionSlots,
}

/// There is no place for this request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "too many connections: {MAX_ADMITTED} are answered at once, {MAX_OF_A_PEER} of one address or \
     user"
)]
pub(super) struct Crowded;

impl ConnectionSlots {
    /// A waiting place, and a channel that closes when another connection needs it.
    pub(super) fn enter(&self, peer: ConnectionPeer) -> (ConnectionSlot, oneshot::Receiver<()>) {
        let (keeps, lost) = oneshot::channel();
        let mut taken = self.lock();
        taken.make_room();
        let number = taken.next;
        taken.next += 1;
        let connection =
            OpenConnection { origin: peer.origin(), is_admitted: false, _keeps: keeps };
        taken.by_number.insert(number, connection);
        let place = ConnectionSlot { peer, number, places: self.clone() };
        (place, lost)
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnections {
    /// Closes a waiting connection if there is no room for another.
    fn make_room(&mut self) {
        let waiting = || self.by_number.iter().filter(|(_, one)| !one.is_admitted);
        if waiting().count() < MAX_WAITING {
            return;
        }
        let mut of_each: BTreeMap<Origin, (usize, u64)> = BTreeMap::new();
        for (number, one) in waiting() {
            of_each.entry(one.origin).or_insert((0, *number)).0 += 1;
        }
        if let Some((_, oldest)) = of_each.into_values().max_by_key(|(count, _)| *count) {
            self.by_number.remove(&oldest);
        }
    }
}

impl ConnectionSlot {
    /// The peer of the connection.
    pub(super) const fn peer(&self) -> ConnectionPeer {
        self.peer
    }

    /// Marks the connection as admitted.
    pub(super) fn admit(&self) -> Result<(), Crowded> {
        let mut taken = self.places.lock();
        let admitted = || taken.by_number.values().filter(|one| one.is_admitted);
        let origin = self.peer.origin();
        let of_peer = admitted().filter(|one| one.origin == origin).count();
        let is_full = admitted().count() >= MAX_ADMITTED || of_peer >= MAX_OF_A_PEER;
        match taken.by_number.get_mut(&self.number) {
            Some(one) if one.is_admitted => Ok(()),
            Some(one) if !is_full => {
                one.is_admitted = true;
                Ok(())
            }
            _ => Err(Crowded),
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.places.lock().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    fn at(address: &str) -> ConnectionPeer {
        ConnectionPeer::Remote(address.parse().unwrap())
    }

    #[test]
    fn too_many_of_one_address_end_their_own_oldest() {
        let places = ConnectionSlots::default();
        let (_other, mut lost) = places.enter(at("10.0.0.2:1"));
        let mut many: Vec<_> = (0..200).map(|_| places.enter(at("10.0.0.1:1"))).collect();
        assert_eq!(
            lost.try_recv(),
            Err(TryRecvError::Empty),
            "the other one's is the oldest of all"
        );
        let gone: Vec<bool> =
            many.iter_mut().map(|(_, lost)| lost.try_recv() == Err(TryRecvError::Closed)).collect();
        assert_eq!(gone.iter().filter(|is_gone| !**is_gone).count(), MAX_WAITING - 1);
        assert!(gone.is_sorted_by(|a, b| a >= b), "the oldest first: {gone:?}");
    }

    #[test]
    fn one_peer_has_half_of_the_places_and_gives_them_back() {
        let places = ConnectionSlots::default();
        let mut all: Vec<ConnectionSlot> = Vec::new();
        let admitted = |peer: ConnectionPeer| {
            let (place, _) = places.enter(peer);
            (place.admit().is_ok(), place)
        };
        for number in 0..100 {
            let (is_admitted, place) = admitted(at("10.0.0.1:1"));
            assert_eq!(is_admitted, number < MAX_OF_A_PEER);
            all.push(place);
        }
        assert!(admitted(at("10.0.0.2:1")).0);
        all.clear();
        assert!(admitted(at("10.0.0.1:1")).0);
    }

    #[test]
    fn all_admitted_together_have_an_end_and_those_who_are_stay() {
        let places = ConnectionSlots::default();
        let mut all = Vec::new();
        for uid in 0..80 {
            let (place, lost) = places.enter(ConnectionPeer::Local { uid: Some(uid), pid: None });
            assert_eq!(place.admit().is_ok(), all.len() < MAX_ADMITTED);
            all.push((place, lost));
        }
        assert!(all[0].0.admit().is_ok(), "its next request");
        drop(all.pop());
    }

    #[test]
    fn one_machine_has_one_origin() {
        let same = |a: &str, b: &str| at(a).origin() == at(b).origin();
        assert!(same("10.0.0.1:1", "10.0.0.1:2") && !same("10.0.0.1:1", "10.0.0.2:1"));
        assert!(same("[2001:db8::1]:1", "[2001:db8::ffff:1]:1"));
        assert!(!same("[2001:db8::1]:1", "[2001:db8:0:1::1]:1"));
        assert!(same("10.0.0.1:1", "[::ffff:10.0.0.1]:1"));
    }
}
