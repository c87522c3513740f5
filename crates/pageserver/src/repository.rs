//! A repository: pinned memory that hosts lend each other for swapped pages (Overdriver §4.4.2).
//!
//! All of the memory is pinned when the repository starts, in slabs. A client that chooses the
//! export `lease/N` gets at most N slabs for itself, as a new export whose name is a capability:
//! 32 random bytes, which the server tells only that client (`NBD_INFO_NAME`). Without that name
//! the slabs can be neither found, read nor written. The lease ends with the last connection that
//! uses it. Its slabs are zeroed before another client gets them. A client that asks meanwhile
//! for more slabs than are free has to retry.
//!
//! A client is the host that a certificate names, or a user of this host ([`Who`]). A quota
//! limits the total of all its leases.
//!
//! A host can lose its pages here at any moment, and must have them elsewhere as well. If time
//! permits, a slab is given notice first: writes to it are refused (`ENOSPC`), and its pages can
//! be read for a while.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};

use bytes::Bytes;
use ring::rand::{SecureRandom, SystemRandom};
use sys::slab::Slab;

use crate::layer::{Answer, Layer, Read, Zeros};
use crate::layers::memory::{Memory, SLAB};
use crate::nbd::reply::Extent;
use crate::nbd::request::Export;
use crate::server::{Catalogue, Opened, Who, of_layer};

/// Prefix of the name of an export that creates a lease.
pub const LEASE: &str = "lease/";
/// The export that only tells how much a lease would get now. It cannot be opened.
pub const ROOM: &str = "lease/0";

/// A repository and its counters.
pub struct Repository {
    shared: Arc<RepositoryShared>,
    /// Total number of slabs, as long as the host needs none of them back.
    all: usize,
    /// Maximum number of slabs of one client.
    most: usize,
    /// Leases that were refused for lack of slabs or quota.
    refused: AtomicU64,
}

struct RepositoryShared {
    state: Mutex<RepositoryState>,
    /// Sends slabs to the thread that zeroes them.
    used: mpsc::Sender<Vec<Slab>>,
}

#[derive(Default)]
struct RepositoryState {
    free: Vec<Slab>,
    /// Number of slabs that are being zeroed.
    used: usize,
    /// Keyed by capability.
    leases: HashMap<String, Arc<Lease>>,
}

/// Slabs that a client has leased.
struct Lease {
    who: Who,
    memory: Memory,
    connections: AtomicUsize,
    reads: AtomicU64,
    writes: AtomicU64,
}

/// All leases of a client together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Number of leases.
    pub leases: usize,
    /// Number of slabs.
    pub slabs: usize,
    /// Reads of the present leases.
    pub reads: u64,
    /// Writes to the present leases.
    pub writes: u64,
}

/// A lease as one connection uses it.
struct Attached {
    lease: Arc<Lease>,
    capability: String,
    shared: Weak<RepositoryShared>,
}

/// Summary of the slabs of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Slabs that are free.
    pub free: usize,
    /// Slabs that are leased.
    pub lent: usize,
    /// Leased slabs that have notice.
    pub leaving: usize,
    /// Number of leases.
    pub leases: usize,
}

impl Repository {
    /// Pins memory for `slabs` slabs; one client gets at most `most` of them.
    ///
    /// # Errors
    ///
    /// The memory is not available, it may not be pinned (`RLIMIT_MEMLOCK`), or the thread cannot
    /// be started.
    pub fn new(slabs: usize, most: usize) -> io::Result<Self> {
        let free: io::Result<Vec<_>> = (0..slabs).map(|_| pinned()).collect();
        let (used, dirty) = mpsc::channel::<Vec<Slab>>();
        let state = Mutex::new(RepositoryState { free: free?, used: 0, leases: HashMap::new() });
        let shared = Arc::new(RepositoryShared { state, used });
        let keeper = Arc::downgrade(&shared);
        std::thread::Builder::new().name("zeroing".to_owned()).spawn(move || {
            for slab in dirty.into_iter().flatten() {
                let mut slab = slab;
                slab.bytes_mut().fill(0);
                let Some(shared) = keeper.upgrade() else { return };
                let mut state = shared.state();
                state.used -= 1;
                state.free.push(slab);
            }
        })?;
        Ok(Self { shared, all: slabs, most, refused: AtomicU64::new(0) })
    }

    /// The present state of the slabs.
    #[must_use]
    pub fn lent(&self) -> Lent {
        let state = self.shared.state();
        let lent = state.lent();
        let leaving = state.leases.values().map(|lease| lease.memory.leaving()).sum();
        Lent { free: state.free.len(), lent, leaving, leases: state.leases.len() }
    }

    /// Leases of each client.
    #[must_use]
    pub fn clients(&self) -> HashMap<Who, Client> {
        let mut clients: HashMap<Who, Client> = HashMap::new();
        for lease in self.shared.state().leases.values() {
            let client = clients.entry(lease.who.clone()).or_default();
            client.leases += 1;
            client.slabs += lease.memory.there();
            client.reads += lease.reads.load(Ordering::Relaxed);
            client.writes += lease.writes.load(Ordering::Relaxed);
        }
        clients
    }

    /// Number of refused leases: no slab was free, or the client had used up its quota.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Gives up to `slabs` slabs back to the host: free ones first, then the last ones of the
    /// largest leases. Returns their number.
    pub fn take_back(&self, slabs: usize) -> usize {
        let mut taken = Vec::new();
        let mut state = self.shared.state();
        state.take_free(slabs, &mut taken);
        while taken.len() < slabs {
            let largest = state.leases.values().max_by_key(|lease| lease.memory.there());
            let Some(slab) = largest.and_then(|lease| lease.memory.take_last()) else { break };
            taken.push(slab);
        }
        drop(state);
        give_back(taken)
    }

    /// Gives up to `slabs` slabs back to the host: free ones at once. It gives notice to the last
    /// ones of the largest leases. Returns the number of both together.
    pub fn give_notice(&self, slabs: usize) -> usize {
        let mut taken = Vec::new();
        let mut state = self.shared.state();
        state.take_free(slabs, &mut taken);
        let mut done = taken.len();
        while done < slabs {
            let stays = |lease: &&Arc<Lease>| lease.memory.there() - lease.memory.leaving();
            let largest = state.leases.values().max_by_key(stays);
            if !largest.is_some_and(|lease| lease.memory.give_notice_of_last()) {
                break;
            }
            done += 1;
        }
        drop(state);
        give_back(taken);
        done
    }

    /// Gives all slabs that have notice back to the host; returns their number.
    pub fn take_back_noticed(&self) -> usize {
        let state = self.shared.state();
        let taken: Vec<_> = state.leases.values().flat_map(|l| l.memory.take_noticed()).collect();
        drop(state);
        give_back(taken)
    }

    /// Pins one more slab if some were given back before; returns whether it did.
    pub fn pin_one(&self) -> bool {
        if self.shared.state().all() >= self.all {
            return false;
        }
        // Pinning takes a while; clients that ask for a lease must not wait for it.
        let Ok(slab) = pinned() else { return false };
        let mut state = self.shared.state();
        let is_missing = state.all() < self.all;
        if is_missing {
            state.free.push(slab);
        }
        is_missing
    }

    fn wanted(&self, name: &str) -> Option<usize> {
        let wanted: usize = name.strip_prefix(LEASE)?.parse().ok()?;
        (wanted > 0).then(|| wanted.min(self.most))
    }
}

impl RepositoryShared {
    fn state(&self) -> MutexGuard<'_, RepositoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the lease unless a connection uses it.
    fn end_if_left(&self, capability: &str) {
        let mut state = self.state();
        let is_left = |lease: &Arc<Lease>| lease.connections.load(Ordering::SeqCst) == 0;
        if state.leases.get(capability).is_some_and(is_left)
            && let Some(lease) = state.leases.remove(capability)
        {
            let slabs = lease.memory.take_all();
            state.used += slabs.len();
            drop(state);
            // If the zeroing thread is gone, the slabs are freed here.
            let _ = self.used.send(slabs);
        }
    }
}

impl Catalogue for Repository {
    fn list(&self) -> Vec<String> {
        Vec::new()
    }

    fn find(&self, name: &str, who: &Who) -> Option<Export> {
        let state = self.shared.state();
        let wanted = if name == ROOM { Some(usize::MAX) } else { self.wanted(name) };
        if let Some(wanted) = wanted {
            let slabs =
                wanted.min(self.most.saturating_sub(state.lent_to(who))).min(state.free.len());
            let size = (slabs * SLAB) as u64;
            return (size > 0 || name == ROOM).then_some(Export {
                size,
                read_only: false,
                block: 1,
            });
        }
        state.leases.get(name).map(|lease| of_layer(&lease.memory))
    }

    fn open(&self, name: &str, who: &Who) -> Option<Opened> {
        let mut state = self.shared.state();
        let (capability, lease) = if let Some(wanted) = self.wanted(name) {
            let wanted = wanted.min(self.most.saturating_sub(state.lent_to(who)));
            let free = state.free.len();
            if wanted == 0 || free == 0 || (free < wanted && state.used > 0) {
                self.refused.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            let slabs: Vec<Slab> = state.free.drain(free.saturating_sub(wanted)..).collect();
            let lease = Arc::new(Lease {
                who: who.clone(),
                memory: Memory::of(slabs),
                connections: AtomicUsize::new(0),
                reads: AtomicU64::new(0),
                writes: AtomicU64::new(0),
            });
            let capability = capability()?;
            state.leases.insert(capability.clone(), lease.clone());
            (capability, lease)
        } else {
            (name.to_owned(), state.leases.get(name)?.clone())
        };
        lease.connections.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::downgrade(&self.shared);
        let layer = Arc::new(Attached { lease, capability: capability.clone(), shared });
        Some(Opened { name: capability, layer })
    }
}

impl RepositoryState {
    /// Number of slabs that are pinned.
    fn all(&self) -> usize {
        self.free.len() + self.used + self.lent()
    }

    /// Number of slabs that are leased.
    fn lent(&self) -> usize {
        self.leases.values().map(|lease| lease.memory.there()).sum()
    }

    /// Number of slabs that this client has leased.
    fn lent_to(&self, who: &Who) -> usize {
        let own = self.leases.values().filter(|lease| lease.who == *who);
        own.map(|lease| lease.memory.there()).sum()
    }

    /// Takes up to `slabs` of the free slabs.
    fn take_free(&mut self, slabs: usize, taken: &mut Vec<Slab>) {
        taken.extend(self.free.drain(self.free.len().saturating_sub(slabs)..));
    }
}

/// Gives slabs back to the host by dropping them; returns their number. This takes a while, so
/// the caller must not hold a lock.
fn give_back(slabs: Vec<Slab>) -> usize {
    slabs.len()
}

fn pinned() -> io::Result<Slab> {
    let mut slab = Slab::new(SLAB)?;
    slab.prefer_huge();
    slab.lock()?;
    Ok(slab)
}

/// 32 random bytes, in hexadecimal digits; `None`: the kernel has no random numbers.
fn capability() -> Option<String> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).ok()?;
    Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.lease.connections.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            shared.end_if_left(&self.capability);
        }
    }
}

impl Layer for Attached {
    fn size(&self) -> u64 {
        self.lease.memory.size()
    }

    fn describe(&self) -> String {
        format!("a lease of {} slabs", self.lease.memory.there())
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        self.lease.reads.fetch_add(1, Ordering::Relaxed);
        self.lease.memory.read(offset, into)
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        self.lease.writes.fetch_add(1, Ordering::Relaxed);
        self.lease.memory.write(offset, data)
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        self.lease.memory.zero(offset, length, zeros)
    }

    fn flush(&self) -> Answer<'_> {
        Answer::Now(Ok(()))
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        self.lease.memory.extents(offset, length)
    }
}
