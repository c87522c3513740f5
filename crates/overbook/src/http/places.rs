//! The peers that may be connected to a listener at once.
//!
//! **Problem.** A place that is held by a client that asks nothing is a place that the operator
//! cannot have.
//!
//! **Idea.** A connection first *waits*: it has not asked anything yet that it may ask. It is
//! *admitted* by its first request, on TCP with the token. The two are counted apart. When too many
//! wait, one of them ends: the oldest of the peer that has most of them. So a peer that sends
//! many halves of requests ends its own; a whole one takes a millisecond and is never the oldest.
//! Of the admitted one peer has half of the places at most, and the next request is refused.
//!
//! A peer is a user on the unix socket, an address on TCP, and of IPv6 a network of 64 bits, which
//! is what one machine has.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Connections of a listener that have not asked anything yet.
pub(super) const MAX_WAITING: usize = 64;
/// Connections of a listener that have.
pub(super) const MAX_ADMITTED: usize = 64;
/// Those of one peer.
pub(super) const MAX_OF_A_PEER: usize = MAX_ADMITTED / 2;

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process on this host, by its user and number.
    Local {
        /// Its user; `None`: the kernel does not say.
        uid: Option<u32>,
        /// Its number, if it is to be seen from here.
        pid: Option<i32>,
    },
    /// Another host, or a process on this one.
    Remote(SocketAddr),
}

/// The key by which the places of a peer are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    User(Option<u32>),
    Address(IpAddr),
}

impl Peer {
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

impl fmt::Display for Peer {
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

/// The places of one listener.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(Arc<Mutex<Taken>>);

#[derive(Debug, Default)]
struct Taken {
    /// Grows, so the oldest connection has the smallest.
    next: u64,
    by_number: BTreeMap<u64, Connection>,
}

#[derive(Debug)]
struct Connection {
    origin: Origin,
    is_admitted: bool,
    /// Dropped with it: then the connection ends.
    _keeps: oneshot::Sender<()>,
}

/// One connection's place; given up with the value.
#[derive(Debug)]
pub(super) struct Place {
    peer: Peer,
    number: u64,
    places: Places,
}

/// There is no place for this request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "too many connections: {MAX_ADMITTED} are answered at once, {MAX_OF_A_PEER} of one address or \
     user"
)]
pub(super) struct Crowded;

impl Places {
    /// A place to wait, and a channel that closes when another connection needs it.
    pub(super) fn enter(&self, peer: Peer) -> (Place, oneshot::Receiver<()>) {
        let (keeps, lost) = oneshot::channel();
        let mut taken = self.lock();
        taken.make_room();
        let number = taken.next;
        taken.next += 1;
        let connection = Connection { origin: peer.origin(), is_admitted: false, _keeps: keeps };
        taken.by_number.insert(number, connection);
        let place = Place { peer, number, places: self.clone() };
        (place, lost)
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// Ends one that waits if one more would be too many.
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

impl Place {
    /// The peer that has it.
    pub(super) const fn peer(&self) -> Peer {
        self.peer
    }

    /// Counts the connection as one that has asked what it may ask.
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

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    fn at(address: &str) -> Peer {
        Peer::Remote(address.parse().unwrap())
    }

    #[test]
    fn too_many_of_one_address_end_their_own_oldest() {
        let places = Places::default();
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
        let places = Places::default();
        let mut all: Vec<Place> = Vec::new();
        let admitted = |peer: Peer| {
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
        let places = Places::default();
        let mut all = Vec::new();
        for uid in 0..80 {
            let (place, lost) = places.enter(Peer::Local { uid: Some(uid), pid: None });
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
