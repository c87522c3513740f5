//! The connection to one VM's shim: requests out, answers and traps in, nothing believed.
//!
//! **Problem.** One worker serves all VMs of a group, and each shim lives inside a QEMU that may be
//! stopped, stuck, of another release or hostile. None of them may hold up the others.
//!
//! **Idea.** Nothing here waits. Each request has a number, under which one table keeps what was
//! asked for; answers are looked for at every step, and one that does not come within [`PATIENCE`]
//! ends the connection. What the shim shares is mapped for reading only, and each number in it is
//! held against its bounds.
//!
//! **Invariants.** An answer belongs to the request that it names, in whatever order answers come.
//! One that names a request that is not in flight, or is of another kind, ends the connection. At
//! most [`MOST_IN_FLIGHT`] are open: whoever asks keeps to a number of his own, and comes again in
//! the next step where that is reached. A connection that failed once is not used again: dropping
//! it is the sign for the shim to give everything back.
//!
//! What merges may have come to outlives the connection; `dedup` keeps that, under the same number.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use model::Time;
use protocol::layout::{BLOCK_PAGES, Counter, GiveBack, Layout, LayoutError, PageState, Shared};
use protocol::ring::{Consumer, Drained};
use protocol::{
    Answer, HELLO, MAX_PACKET, Merge, Merged, Pages, Refusal, Region, Request, State, Status,
    Taken, Tracking, Trap, VERSION, WireError,
};
use sys::peer::{Peer, PeerError};
use sys::process::Identity;
use sys::seqpacket::{Connection, SeqpacketError};
use sys::shared_memory::{SharedMemory, SharedMemoryError};

use super::granules::TooLarge;
use super::shim_of::shim_of;
use super::words;

/// How long a shim may take to answer: longer than any pause of a busy machine.
const PATIENCE: Duration = Duration::from_secs(3);
/// The same for giving everything back: some GiB, page by page where it is in swap.
const RELEASE_PATIENCE: Duration = Duration::from_secs(30);
/// How long a full backlog is waited for: the shim's only other client is an older worker.
const CONNECT_PATIENCE: Duration = Duration::from_millis(20);
/// Requests in flight: what the kernel holds of packets that a shim has not read, by default
/// (`net.unix.max_dgram_qlen`).
const MOST_IN_FLIGHT: usize = 10;

/// Why there is no connection, or no more.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Nobody listens.
    #[error("QEMU (process {pid}) was started without Overbook's shim, or has not begun to run")]
    NoShim {
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has ended, or may not be looked into.
    #[error("QEMU (process {pid}): {why}")]
    Gone {
        /// Its process.
        pid: u32,
        /// The kernel's error.
        why: std::io::Error,
    },
    /// Another process listens at the address.
    #[error("the address of the shim of process {pid} belongs to process {found}")]
    Impostor {
        /// QEMU's process.
        pid: u32,
        /// The other one.
        found: u32,
    },
    /// It is not known which process listens at the address.
    #[error("the address of the shim of process {pid}: {error}")]
    Unidentified {
        /// QEMU's process.
        pid: u32,
        /// Why.
        error: PeerError,
    },
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] SeqpacketError),
    /// What came is no answer.
    #[error("the shim's answer makes no sense: {0}")]
    Wire(#[from] WireError),
    /// The answer to something else.
    #[error("the shim answered something else than it was asked for ({0})")]
    Unexpected(&'static str),
    /// The answer to nothing.
    #[error("the shim answered request {id}, which is not in flight")]
    Unknown {
        /// The number that it named.
        id: u32,
    },
    /// Whoever asks has not kept to his number of requests.
    #[error("{MOST_IN_FLIGHT} requests wait for the shim's answers already")]
    TooMany,
    /// The shim said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The shim shares nothing usable.
    #[error(transparent)]
    Memory(#[from] SharedMemoryError),
    /// What the shim shares is not what was agreed upon.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// More memory than can be.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// No answer.
    #[error("the shim has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// The guest's memory has changed: the connection has to be made anew.
    #[error("guest RAM was added or removed")]
    RegionsChanged,
}

/// What was asked for, and what its answer is needed for.
#[derive(Debug)]
enum Asked {
    Hello,
    Track,
    /// Granules by index, at that moment.
    Revoke(Vec<u32>, Time),
    Recall,
    Status,
    Release,
    Pool,
    Merge,
    Unshare,
    HandOver,
    Take(Vec<Pages>),
    Keep(Vec<Pages>),
}

impl Asked {
    /// The longest time that its answer may take.
    fn patience(&self) -> Duration {
        if matches!(self, Self::Release) { RELEASE_PATIENCE } else { PATIENCE }
    }
}

/// What has come from the shim.
#[derive(Debug)]
pub(super) enum News {
    /// It is there; what its memory is, and whether it can be tracked.
    Welcome(State),
    /// It tracks now as it was asked to.
    Tracking,
    /// These granules, by index, were to be taken out of reach at that moment, and were as far as
    /// they could be.
    Revoked(Vec<u32>, Time),
    /// The named granules are accessible again.
    Recalled,
    /// It cannot do what it was asked to.
    Refused(Refusal),
    /// Its state, and where it keeps revoked pages ([`Status::staging`]).
    Status(State, Vec<u64>),
    /// Everything has been given back.
    Released,
    /// What became of the request of this number: for a pool, a merge, or copies of their own for
    /// shared pages.
    Merged(u32, Result<Merged, Refusal>),
    /// What the guest frees is handed over from now on, or discarded.
    HandingOver,
    /// What became of these pages, which were to be taken.
    Taken(Vec<Pages>, Taken),
    /// So many of these pages do not count as freed any more.
    Kept(Vec<Pages>, u32),
    /// It takes nothing now.
    NotTaken(Refusal),
}

/// What the shim shares.
#[derive(Debug)]
struct Memory {
    map: SharedMemory,
    layout: Layout,
    regions: Vec<Region>,
    consumer: Consumer,
    generation: u32,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    connection: Connection,
    /// The process that listened, which was QEMU's.
    peer: Peer,
    /// By number, since when.
    in_flight: BTreeMap<u32, (Asked, Instant)>,
    last_id: u32,
    memory: Option<Memory>,
    buffer: Vec<u8>,
}

/// The shim's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) traps: u64,
    pub(super) trap_ns: u64,
    pub(super) round_trip_ns: u64,
    pub(super) control_ns: u64,
    pub(super) given_back: u64,
}

impl Link {
    /// Connects to the shim of this process, and greets it.
    pub(super) fn connect(process: Identity) -> Result<Self, LinkError> {
        let pid = process.pid;
        let address = shim_of(process).map_err(|why| LinkError::Gone { pid, why })?;
        let address = address.ok_or(LinkError::NoShim { pid })?;
        let connection = Connection::connect(&address, CONNECT_PATIENCE).map_err(|error| {
            if is_nobody(&error) { LinkError::NoShim { pid } } else { error.into() }
        })?;
        let peer = connection.process().map_err(|error| LinkError::Unidentified { pid, error })?;
        if peer.process != process {
            return Err(LinkError::Impostor { pid, found: peer.process.pid });
        }
        let (in_flight, buffer) = (BTreeMap::new(), vec![0; MAX_PACKET]);
        let mut link = Self { connection, peer, in_flight, last_id: HELLO, memory: None, buffer };
        link.ask(&Request::Hello { version: VERSION }, Asked::Hello)?;
        Ok(link)
    }

    /// Asks for tracking of this kind.
    pub(super) fn track(&mut self, tracking: Tracking) -> Result<(), LinkError> {
        self.ask(&Request::Track(tracking), Asked::Track)
    }

    /// Asks to take granules out of reach, at this moment: their numbers, at most `MAX_REVOKE`, and
    /// their indexes.
    pub(super) fn revoke(
        &mut self,
        numbers: Vec<u32>,
        indexes: Vec<u32>,
        at: Time,
    ) -> Result<(), LinkError> {
        self.ask(&Request::Revoke { granules: numbers }, Asked::Revoke(indexes, at))
    }

    /// Asks for granules back: their numbers, at most `MAX_REVOKE`.
    pub(super) fn recall(&mut self, granules: Vec<u32>) -> Result<(), LinkError> {
        self.ask(&Request::Recall { granules }, Asked::Recall)
    }

    /// Asks how things stand, which is also a sign of life.
    pub(super) fn status(&mut self) -> Result<(), LinkError> {
        self.ask(&Request::Status, Asked::Status)
    }

    /// Asks to give everything back.
    pub(super) fn release(&mut self) -> Result<(), LinkError> {
        self.ask(&Request::Release, Asked::Release)
    }

    /// Gives it the pool that slots are of: its file, to read, and how many there are.
    ///
    /// # Errors
    /// [`LinkError::Gone`]: its process has ended, and what is left of the connection may be in
    /// other hands.
    pub(super) fn use_pool(&mut self, file: BorrowedFd<'_>, slots: u32) -> Result<(), LinkError> {
        if !self.peer.is_alive() {
            let (pid, why) = (self.peer.process.pid, rustix::io::Errno::SRCH.into());
            return Err(LinkError::Gone { pid, why });
        }
        self.ask_with(&Request::Pool { slots }, Asked::Pool, Some(file))
    }

    /// Asks to merge runs of pages; at most `MAX_MERGE`.
    pub(super) fn merge(&mut self, runs: Vec<Merge>) -> Result<(), LinkError> {
        self.ask(&Request::Merge { runs }, Asked::Merge)
    }

    /// Asks for copies of their own of these pages, at most `MAX_UNSHARE`.
    pub(super) fn unshare(&mut self, page: u32, pages: u32) -> Result<(), LinkError> {
        self.ask(&Request::Unshare { page, pages }, Asked::Unshare)
    }

    /// Has what the guest frees handed over from now on, or discarded.
    pub(super) fn hand_over(&mut self, lazily: bool) -> Result<(), LinkError> {
        self.ask(&Request::HandOver { lazily }, Asked::HandOver)
    }

    /// Asks to take what is freed of these pages: at most `MAX_TAKE` runs.
    pub(super) fn take(&mut self, runs: Vec<Pages>) -> Result<(), LinkError> {
        self.ask(&Request::Take { runs: runs.clone() }, Asked::Take(runs))
    }

    /// Says that the guest has these pages in use: at most `MAX_TAKE` runs.
    pub(super) fn keep(&mut self, runs: Vec<Pages>) -> Result<(), LinkError> {
        self.ask(&Request::Keep { runs: runs.clone() }, Asked::Keep(runs))
    }

    /// Whether it still has something to answer.
    pub(super) fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Whether it is just revoking.
    pub(super) fn is_revoking(&self) -> bool {
        self.awaits(|asked| matches!(asked, Asked::Revoke(..)))
    }

    /// Whether it is just recalling.
    pub(super) fn is_recalling(&self) -> bool {
        self.awaits(|asked| matches!(asked, Asked::Recall))
    }

    /// Whether it is just giving everything back.
    pub(super) fn is_releasing(&self) -> bool {
        self.awaits(|asked| matches!(asked, Asked::Release))
    }

    /// Whether it has still to say how things stand.
    pub(super) fn is_asked_for_status(&self) -> bool {
        self.awaits(|asked| matches!(asked, Asked::Status))
    }

    /// Whether it has still to say what becomes of what the guest frees.
    pub(super) fn is_handing_over(&self) -> bool {
        self.awaits(|asked| matches!(asked, Asked::HandOver))
    }

    /// Whether it is just taking, or keeping, what is freed.
    pub(super) fn is_taking(&self) -> bool {
        self.awaits(|asked| matches!(asked, Asked::Take(_) | Asked::Keep(_)))
    }

    fn awaits(&self, is: impl Fn(&Asked) -> bool) -> bool {
        self.in_flight.values().any(|(asked, _)| is(asked))
    }

    /// The number that the next request has.
    pub(super) fn next_id(&self) -> u32 {
        self.last_id.checked_add(1).unwrap_or(HELLO + 1)
    }

    fn ask(&mut self, request: &Request, asked: Asked) -> Result<(), LinkError> {
        self.ask_with(request, asked, None)
    }

    fn ask_with(
        &mut self,
        request: &Request,
        asked: Asked,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), LinkError> {
        if self.in_flight.len() == MOST_IN_FLIGHT {
            return Err(LinkError::TooMany);
        }
        let id = request.numbered(self.next_id());
        self.connection.send(&request.encode(id)?, fd)?;
        self.last_id = id;
        self.in_flight.insert(id, (asked, Instant::now()));
        Ok(())
    }

    /// The next answer that is there; `None`: none now.
    pub(super) fn poll(&mut self) -> Result<Option<News>, LinkError> {
        let Some(packet) = self.connection.receive(&mut self.buffer)? else {
            let is_late = |(asked, since): &(Asked, Instant)| since.elapsed() > asked.patience();
            return if self.in_flight.values().any(is_late) {
                Err(LinkError::Silent(PATIENCE))
            } else {
                Ok(None)
            };
        };
        let (id, answer) = words::decode(&self.buffer[..packet.length])?;
        match (self.in_flight.remove(&id), answer) {
            (Some((asked, _)), answer) => self.match_up(id, asked, answer, packet.fd).map(Some),
            // It names no request: that was not understood, or nobody is to ask anything.
            (None, Answer::Refused(refusal)) if id == HELLO => Err(refusal.into()),
            (None, _) => Err(LinkError::Unknown { id }),
        }
    }

    fn match_up(
        &mut self,
        id: u32,
        asked: Asked,
        answer: Answer,
        fd: Option<OwnedFd>,
    ) -> Result<News, LinkError> {
        match (asked, answer) {
            // Without a greeting there is nothing to go on with.
            (Asked::Hello, Answer::Refused(refusal)) => Err(refusal.into()),
            (Asked::Pool | Asked::Merge | Asked::Unshare, Answer::Refused(refusal)) => {
                Ok(News::Merged(id, Err(refusal)))
            }
            (Asked::Take(_) | Asked::Keep(_), Answer::Refused(refusal)) => {
                Ok(News::NotTaken(refusal))
            }
            (_, Answer::Refused(refusal)) => Ok(News::Refused(refusal)),
            (Asked::Hello, Answer::Welcome { version, regions, state }) => {
                if version != VERSION {
                    return Err(Refusal::Version { shim: version, worker: VERSION }.into());
                }
                if !matches!(state, State::Unsupported { .. }) {
                    let fd = fd.ok_or(LinkError::Unexpected("no shared memory came"))?;
                    self.memory = Some(Memory::open(&fd, regions)?);
                }
                Ok(News::Welcome(state))
            }
            (Asked::Track, Answer::Done { .. }) => Ok(News::Tracking),
            (Asked::Revoke(granules, at), Answer::Done { .. }) => Ok(News::Revoked(granules, at)),
            (Asked::Recall, Answer::Done { .. }) => Ok(News::Recalled),
            (Asked::Release, Answer::Done { .. }) => Ok(News::Released),
            (Asked::Pool | Asked::Unshare, Answer::Done { .. }) => {
                Ok(News::Merged(id, Ok(Merged::default())))
            }
            (Asked::Merge, Answer::Merged(merged)) => Ok(News::Merged(id, Ok(merged))),
            (Asked::HandOver, Answer::Done { .. }) => Ok(News::HandingOver),
            (Asked::Take(runs), Answer::Taken(taken)) => Ok(News::Taken(runs, taken)),
            (Asked::Keep(runs), Answer::Done { count }) => Ok(News::Kept(runs, count)),
            (Asked::Status, Answer::Status(Status { state, generation, staging })) => {
                if self.memory.as_ref().is_some_and(|memory| memory.generation != generation) {
                    return Err(LinkError::RegionsChanged);
                }
                Ok(News::Status(state, staging))
            }
            _ => Err(LinkError::Unexpected("an answer of another kind")),
        }
    }

    /// Guest RAM; empty before the welcome.
    pub(super) fn regions(&self) -> &[Region] {
        self.memory.as_ref().map_or(&[], |memory| &memory.regions)
    }

    /// Forgets the traps so far: before tracking began they were of other granules.
    pub(super) fn forget_traps(&mut self) -> Result<(), LinkError> {
        if let Some(memory) = &mut self.memory {
            let ring = shared(&memory.map, memory.layout)?.ring();
            memory.consumer.skip(ring);
        }
        Ok(())
    }

    /// Passes on the traps since the last call whose granule's number is below `end`.
    pub(super) fn drain(&mut self, end: u32, each: impl FnMut(Trap)) -> Result<Drained, LinkError> {
        let Some(memory) = &mut self.memory else { return Ok(Drained::default()) };
        let ring = shared(&memory.map, memory.layout)?.ring();
        Ok(memory.consumer.drain(ring, end, each))
    }

    /// Whether any page of the granule is out of the guest's reach.
    pub(super) fn is_staged(&self, granule: u32, granule_pages: u32) -> Result<bool, LinkError> {
        let Some(memory) = &self.memory else { return Ok(false) };
        Ok(shared(&memory.map, memory.layout)?.is_staged(granule, granule_pages))
    }

    /// Where the content of a page is.
    pub(super) fn page_state(&self, page: u32) -> Result<PageState, LinkError> {
        let Some(memory) = &self.memory else { return Ok(PageState::Unknown) };
        Ok(shared(&memory.map, memory.layout)?.state(page))
    }

    /// The same of these pages.
    pub(super) fn page_states(&self, pages: Range<u32>) -> Result<Vec<PageState>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(vec![PageState::Unknown; pages.len()]) };
        let shared = shared(&memory.map, memory.layout)?;
        Ok(pages.map(|page| shared.state(page)).collect())
    }

    /// Pages that are out of the guest's reach.
    pub(super) fn staged_pages(&self) -> Result<u64, LinkError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        Ok(shared(&memory.map, memory.layout)?.get(Counter::StagedPages))
    }

    /// Pages whose state is merged: they share a page of some pool, or did.
    pub(super) fn merged_pages(&self) -> Result<u64, LinkError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        Ok(shared(&memory.map, memory.layout)?.get(Counter::MergedPages))
    }

    /// The blocks of which something was handed over, the oldest first, with the moment in
    /// milliseconds.
    pub(super) fn freed_blocks(&self) -> Result<Vec<(u64, u32)>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(Vec::new()) };
        let shared = shared(&memory.map, memory.layout)?;
        let blocks = 0..memory.layout.blocks();
        let mut freed: Vec<_> =
            blocks.filter_map(|block| Some((shared.freed_at_ms(block)?, block))).collect();
        freed.sort_unstable();
        Ok(freed)
    }

    /// When something of a block was last handed over, if something of it is still freed.
    pub(super) fn freed_at_ms(&self, block: u32) -> Result<Option<u64>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(None) };
        Ok(shared(&memory.map, memory.layout)?.freed_at_ms(block))
    }

    /// The runs of pages of a block that are freed.
    pub(super) fn freed_in(&self, block: u32) -> Result<Vec<Pages>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(Vec::new()) };
        let shared = shared(&memory.map, memory.layout)?;
        let mut runs: Vec<Pages> = Vec::new();
        let first = block.saturating_mul(BLOCK_PAGES);
        let is_freed = |page: &u32| shared.state(*page) == PageState::Freed;
        for page in (first..first.saturating_add(BLOCK_PAGES)).filter(is_freed) {
            match runs.last_mut() {
                Some(last) if last.page + last.pages == page => last.pages += 1,
                _ => runs.push(Pages { page, pages: 1 }),
            }
        }
        Ok(runs)
    }

    /// Pages that were handed over, again and again.
    pub(super) fn handed_over(&self) -> Result<u64, LinkError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        Ok(shared(&memory.map, memory.layout)?.get(Counter::HandedOver))
    }

    /// The shim's counters.
    pub(super) fn counters(&self) -> Result<Counters, LinkError> {
        let Some(memory) = &self.memory else { return Ok(Counters::default()) };
        let shared = shared(&memory.map, memory.layout)?;
        Ok(Counters {
            traps: shared.get(Counter::Traps),
            trap_ns: shared.get(Counter::TrapNs),
            round_trip_ns: shared.get(Counter::RoundTripNs),
            control_ns: shared.get(Counter::ControlNs),
            given_back: shared.get(Counter::GivenBack),
        })
    }

    /// Why everything was last given back unasked.
    pub(super) fn last_given_back(&self) -> Option<GiveBack> {
        let memory = self.memory.as_ref()?;
        shared(&memory.map, memory.layout).ok()?.last_given_back()
    }
}

impl Memory {
    fn open(fd: &OwnedFd, regions: Vec<Region>) -> Result<Self, LinkError> {
        let layout = Layout::of_regions(&regions);
        let map = SharedMemory::open(fd.as_fd(), layout.words(), layout.bytes())?;
        let view = shared(&map, layout)?;
        let (consumer, generation) = (Consumer::new(view.ring()), view.generation());
        Ok(Self { map, layout, regions, consumer, generation })
    }
}

fn shared(map: &SharedMemory, layout: Layout) -> Result<Shared<'_>, LayoutError> {
    Shared::open(layout, map.words(), map.bytes())
}

fn is_nobody(error: &SeqpacketError) -> bool {
    matches!(error, SeqpacketError::Call { call: "connect", errno }
        if *errno == rustix::io::Errno::CONNREFUSED)
}
