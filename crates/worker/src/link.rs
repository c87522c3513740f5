//! The connection to one VM's shim: it sends requests, and checks all answers and traps.
//!
//! **Problem.** One worker serves all VMs of a group, and each shim runs inside a QEMU that may be
//! stopped, stuck, of another release or hostile. None of them may block the others.
//!
//! **Idea.** No call blocks. Each request has a number, and one table keeps the requests in flight.
//! Each step polls for answers. A request without an answer within [`PATIENCE`]
//! ([`RELEASE_PATIENCE`] for a release) ends the connection. The shim's shared memory is mapped
//! read-only, and each number in it is checked against its bounds.
//!
//! **Invariants.** An answer belongs to the request that it names; answers may come in any order.
//! An answer that names no request in flight, or is of another kind, ends the connection. At most
//! [`MOST_IN_FLIGHT`] requests are in flight: each caller has a limit of its own, and retries in
//! the next step when it is reached. A connection that failed once is not used again: when it is
//! dropped, the shim gives everything back.
//!
//! The possible results of merges outlive the connection; `dedup` keeps them by request number.

mod error;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use model::{ShimVersion, Time};
use protocol::layout::{BLOCK_PAGES, Counter, GiveBack, Layout, LayoutError, PageState, Shared};
use protocol::ring::{Consumer, Drained};
use protocol::{
    Answer, HELLO, MAX_PACKET, Merge, Merged, Pages, Refusal, Region, Request, State, Status,
    Taken, Tracking, Trap, VERSION, VERSIONS,
};
use sys::peer::Peer;
use sys::process::Identity;
use sys::seqpacket::{Connection, SeqpacketError};
use sys::shared_memory::SharedMemory;

pub use error::LinkError;

use super::shim_of::{shim_of, version_of};
use super::words;

/// The time in which a shim must answer: longer than any pause of a busy machine.
const PATIENCE: Duration = Duration::from_secs(3);
/// The same for a release: it moves some GiB, page by page where they are in swap.
const RELEASE_PATIENCE: Duration = Duration::from_secs(30);
/// The longest wait for a full backlog: the shim's only other client is an older worker.
const CONNECT_PATIENCE: Duration = Duration::from_millis(20);
/// How often the shim's status is requested; it gives everything back after two seconds of silence.
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// The most requests in flight: the number of unread packets that the kernel queues by default
/// (`net.unix.max_dgram_qlen`).
const MOST_IN_FLIGHT: usize = 10;

/// A request in flight, with the data that its answer is needed for.
#[derive(Debug)]
enum PendingRequest {
    Hello,
    About,
    Track,
    /// The granules by index, and the time of the request.
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

impl PendingRequest {
    /// The time in which its answer must come.
    fn patience(&self) -> Duration {
        if matches!(self, Self::Release) { RELEASE_PATIENCE } else { PATIENCE }
    }
}

/// A message from the shim.
#[derive(Debug)]
pub(super) enum LinkEvent {
    /// The answer to the greeting: whether the VM can be tracked. The memory is open.
    Welcome(State),
    /// It has told its release ([`Link::shim`]).
    Introduced,
    /// It tracks now as requested.
    Tracking,
    /// The granules, by index, for which a revocation was requested at that time. Access is
    /// revoked to those pages for which it was possible.
    Revoked(Vec<u32>, Time),
    /// The named granules are accessible again.
    Recalled,
    /// It refused a request.
    Refused(Refusal),
    /// Its state, and the addresses of revoked pages ([`Status::staging`]).
    Status(State, Vec<u64>),
    /// Everything has been given back.
    Released,
    /// The result of the request of this number: to use a pool, to merge pages, or to unshare
    /// them.
    Merged(u32, Result<Merged, Refusal>),
    /// Pages that the guest frees are handed over from now on, or discarded.
    HandingOver,
    /// The result of a request to take these pages.
    Taken(Vec<Pages>, Taken),
    /// The number of these pages that no longer count as freed.
    Kept(Vec<Pages>, u32),
    /// It takes and keeps no pages now.
    NotTaken(Refusal),
}

/// The shim's shared memory.
#[derive(Debug)]
struct ShimMemory {
    map: SharedMemory,
    layout: Layout,
    regions: Vec<Region>,
    consumer: Consumer,
    generation: u32,
}

/// The connection to a shim.
#[derive(Debug)]
pub(super) struct Link {
    connection: Connection,
    /// The process that listened: QEMU's, as checked at the connection.
    peer: Peer,
    /// The version of the protocol: proposed by the last greeting, and agreed on by its answer.
    version: u16,
    /// The release of the shim; `None`: it has not told it.
    release: Option<String>,
    /// Requests by number, each with the time at which it was sent.
    in_flight: BTreeMap<u32, (PendingRequest, Instant)>,
    last_id: u32,
    asked_status: Instant,
    memory: Option<ShimMemory>,
    buffer: Vec<u8>,
}

/// The shim's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ShimCounters {
    pub(super) traps: u64,
    pub(super) trap_ns: u64,
    pub(super) round_trip_ns: u64,
    pub(super) control_ns: u64,
    pub(super) given_back: u64,
}

impl Link {
    /// Connects to the shim of this process, and sends the greeting.
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
        let (last_id, asked_status) = (HELLO, Instant::now());
        let mut link = Self {
            connection,
            peer,
            version: VERSION,
            release: None,
            in_flight,
            last_id,
            asked_status,
            memory: None,
            buffer,
        };
        link.greet(VERSION)?;
        Ok(link)
    }

    /// Proposes a version of the protocol to the shim.
    fn greet(&mut self, version: u16) -> Result<(), LinkError> {
        self.version = version;
        self.ask(&Request::Hello { version }, PendingRequest::Hello)
    }

    /// The shim, as it has introduced itself.
    pub(super) fn shim(&self) -> ShimVersion {
        version_of(self.version, self.release.clone())
    }

    /// Requests tracking of this kind.
    pub(super) fn track(&mut self, tracking: Tracking) -> Result<(), LinkError> {
        self.ask(&Request::Track(tracking), PendingRequest::Track)
    }

    /// Requests to revoke access to granules at this time. Takes their numbers, at most
    /// `MAX_REVOKE`, and their indexes.
    pub(super) fn revoke(
        &mut self,
        numbers: Vec<u32>,
        indexes: Vec<u32>,
        at: Time,
    ) -> Result<(), LinkError> {
        self.ask(&Request::Revoke { granules: numbers }, PendingRequest::Revoke(indexes, at))
    }

    /// Requests to make granules accessible again. Takes their numbers, at most `MAX_REVOKE`.
    pub(super) fn recall(&mut self, granules: Vec<u32>) -> Result<(), LinkError> {
        self.ask(&Request::Recall { granules }, PendingRequest::Recall)
    }

    /// Requests the shim's state, if that is due: it shows the shim that the worker is alive.
    pub(super) fn keep_alive(&mut self) -> Result<(), LinkError> {
        let is_asked = self.awaits(|asked| matches!(asked, PendingRequest::Status));
        if is_asked || self.asked_status.elapsed() < STATUS_EVERY {
            return Ok(());
        }
        self.asked_status = Instant::now();
        self.ask(&Request::Status, PendingRequest::Status)
    }

    /// Requests to give everything back.
    pub(super) fn release(&mut self) -> Result<(), LinkError> {
        self.ask(&Request::Release, PendingRequest::Release)
    }

    /// Passes the pool to the shim: its file, read-only, and the number of its slots.
    ///
    /// # Errors
    /// [`LinkError::Gone`]: its process has ended, and another process may hold the other end of
    /// the connection.
    pub(super) fn use_pool(&mut self, file: BorrowedFd<'_>, slots: u32) -> Result<(), LinkError> {
        if !self.peer.is_alive() {
            let (pid, why) = (self.peer.process.pid, rustix::io::Errno::SRCH.into());
            return Err(LinkError::Gone { pid, why });
        }
        self.ask_with(&Request::Pool { slots }, PendingRequest::Pool, Some(file))
    }

    /// Requests to merge runs of pages, at most `MAX_MERGE`.
    pub(super) fn merge(&mut self, runs: Vec<Merge>) -> Result<(), LinkError> {
        self.ask(&Request::Merge { runs }, PendingRequest::Merge)
    }

    /// Requests private copies of these pages, at most `MAX_UNSHARE`.
    pub(super) fn unshare(&mut self, page: u32, pages: u32) -> Result<(), LinkError> {
        self.ask(&Request::Unshare { page, pages }, PendingRequest::Unshare)
    }

    /// Requests that pages freed by the guest are handed over from now on (`lazily`), or discarded.
    pub(super) fn hand_over(&mut self, lazily: bool) -> Result<(), LinkError> {
        self.ask(&Request::HandOver { lazily }, PendingRequest::HandOver)
    }

    /// Requests to take the freed ones of these pages, at most `MAX_TAKE` runs.
    pub(super) fn take(&mut self, runs: Vec<Pages>) -> Result<(), LinkError> {
        self.ask(&Request::Take { runs: runs.clone() }, PendingRequest::Take(runs))
    }

    /// Tells that the guest uses these pages, at most `MAX_TAKE` runs.
    pub(super) fn keep(&mut self, runs: Vec<Pages>) -> Result<(), LinkError> {
        self.ask(&Request::Keep { runs: runs.clone() }, PendingRequest::Keep(runs))
    }

    /// Whether any request is in flight.
    pub(super) fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Whether a revocation is in flight.
    pub(super) fn is_revoking(&self) -> bool {
        self.awaits(|asked| matches!(asked, PendingRequest::Revoke(..)))
    }

    /// Whether a recall is in flight.
    pub(super) fn is_recalling(&self) -> bool {
        self.awaits(|asked| matches!(asked, PendingRequest::Recall))
    }

    /// Whether a release is in flight.
    pub(super) fn is_releasing(&self) -> bool {
        self.awaits(|asked| matches!(asked, PendingRequest::Release))
    }

    /// Whether a request about freed pages (hand over, or discard) is in flight.
    pub(super) fn is_handing_over(&self) -> bool {
        self.awaits(|asked| matches!(asked, PendingRequest::HandOver))
    }

    /// Whether a request to take or keep freed pages is in flight.
    pub(super) fn is_taking(&self) -> bool {
        self.awaits(|asked| matches!(asked, PendingRequest::Take(_) | PendingRequest::Keep(_)))
    }

    fn awaits(&self, is: impl Fn(&PendingRequest) -> bool) -> bool {
        self.in_flight.values().any(|(asked, _)| is(asked))
    }

    /// The number of the next request.
    pub(super) fn next_id(&self) -> u32 {
        self.last_id.checked_add(1).unwrap_or(HELLO + 1)
    }

    fn ask(&mut self, request: &Request, asked: PendingRequest) -> Result<(), LinkError> {
        self.ask_with(request, asked, None)
    }

    fn ask_with(
        &mut self,
        request: &Request,
        asked: PendingRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), LinkError> {
        if self.in_flight.len() == MOST_IN_FLIGHT {
            return Err(LinkError::TooMany);
        }
        let id = request.numbered(self.next_id());
        self.connection.send(&request.encode_for(self.version, id)?, fd)?;
        self.last_id = id;
        self.in_flight.insert(id, (asked, Instant::now()));
        Ok(())
    }

    /// The next answer that has come; `None`: there is none now.
    pub(super) fn poll(&mut self) -> Result<Option<LinkEvent>, LinkError> {
        let Some(packet) = self.connection.receive(&mut self.buffer)? else {
            // Requests wait for a release that was asked for before them.
            let patience = |asked: &PendingRequest| {
                if self.is_releasing() { RELEASE_PATIENCE } else { asked.patience() }
            };
            let is_late =
                |(asked, since): &&(PendingRequest, Instant)| since.elapsed() > patience(asked);
            return if let Some((late, _)) = self.in_flight.values().find(is_late) {
                Err(LinkError::Silent(patience(late)))
            } else {
                Ok(None)
            };
        };
        let (id, answer) = words::decode(&self.buffer[..packet.length])?;
        match (self.in_flight.remove(&id), answer) {
            (
                Some((PendingRequest::Hello, _)),
                Answer::Refused(refusal @ Refusal::Version { shim, .. }),
            ) => {
                // A refused greeting ends the connection, unless an older version is common.
                let older = VERSIONS.after_refusal(self.version, shim).ok_or(refusal)?;
                self.greet(older).map(|()| None)
            }
            (Some((asked, _)), answer) => self.match_up(id, asked, answer, packet.fd).map(Some),
            // A refusal without a request: the shim did not understand one, or accepts none.
            (None, Answer::Refused(refusal)) if id == HELLO => Err(refusal.into()),
            (None, _) => Err(LinkError::Unknown { id }),
        }
    }

    fn match_up(
        &mut self,
        id: u32,
        asked: PendingRequest,
        answer: Answer,
        fd: Option<OwnedFd>,
    ) -> Result<LinkEvent, LinkError> {
        match (asked, answer) {
            (PendingRequest::Hello, Answer::Refused(refusal)) => Err(refusal.into()),
            (
                PendingRequest::Pool | PendingRequest::Merge | PendingRequest::Unshare,
                Answer::Refused(refusal),
            ) => Ok(LinkEvent::Merged(id, Err(refusal))),
            (PendingRequest::Take(_) | PendingRequest::Keep(_), Answer::Refused(refusal)) => {
                Ok(LinkEvent::NotTaken(refusal))
            }
            (_, Answer::Refused(refusal)) => Ok(LinkEvent::Refused(refusal)),
            (PendingRequest::Hello, Answer::Welcome { version, regions, state }) => {
                if version != self.version {
                    return Err(Refusal::Version { shim: version, worker: self.version }.into());
                }
                if Request::About.since() <= version {
                    self.ask(&Request::About, PendingRequest::About)?;
                }
                if !matches!(state, State::Unsupported { .. }) {
                    let fd = fd.ok_or(LinkError::Unexpected("no shared memory came"))?;
                    self.memory = Some(ShimMemory::open(&fd, regions)?);
                }
                Ok(LinkEvent::Welcome(state))
            }
            (PendingRequest::About, Answer::About { release }) => {
                self.release = Some(release);
                Ok(LinkEvent::Introduced)
            }
            (PendingRequest::Track, Answer::Done { .. }) => Ok(LinkEvent::Tracking),
            (PendingRequest::Revoke(granules, at), Answer::Done { .. }) => {
                Ok(LinkEvent::Revoked(granules, at))
            }
            (PendingRequest::Recall, Answer::Done { .. }) => Ok(LinkEvent::Recalled),
            (PendingRequest::Release, Answer::Done { .. }) => {
                let now = Instant::now();
                self.in_flight.values_mut().for_each(|(_, since)| *since = now);
                Ok(LinkEvent::Released)
            }
            (PendingRequest::Pool | PendingRequest::Unshare, Answer::Done { .. }) => {
                Ok(LinkEvent::Merged(id, Ok(Merged::default())))
            }
            (PendingRequest::Merge, Answer::Merged(merged)) => {
                Ok(LinkEvent::Merged(id, Ok(merged)))
            }
            (PendingRequest::HandOver, Answer::Done { .. }) => Ok(LinkEvent::HandingOver),
            (PendingRequest::Take(runs), Answer::Taken(taken)) => Ok(LinkEvent::Taken(runs, taken)),
            (PendingRequest::Keep(runs), Answer::Done { count }) => {
                Ok(LinkEvent::Kept(runs, count))
            }
            (PendingRequest::Status, Answer::Status(Status { state, generation, staging })) => {
                if self.memory.as_ref().is_some_and(|memory| memory.generation != generation) {
                    return Err(LinkError::RegionsChanged);
                }
                Ok(LinkEvent::Status(state, staging))
            }
            _ => Err(LinkError::Unexpected("an answer of another kind")),
        }
    }

    /// Guest RAM; empty before the welcome.
    pub(super) fn regions(&self) -> &[Region] {
        self.memory.as_ref().map_or(&[], |memory| &memory.regions)
    }

    /// Skips the traps so far: they may name granules of the size before tracking began.
    pub(super) fn forget_traps(&mut self) -> Result<(), LinkError> {
        if let Some(memory) = &mut self.memory {
            let ring = shared(&memory.map, memory.layout)?.ring();
            memory.consumer.skip(ring);
        }
        Ok(())
    }

    /// Passes the traps since the last call to `each`, those of granule numbers below `end`.
    pub(super) fn drain(&mut self, end: u32, each: impl FnMut(Trap)) -> Result<Drained, LinkError> {
        let Some(memory) = &mut self.memory else { return Ok(Drained::default()) };
        let ring = shared(&memory.map, memory.layout)?.ring();
        Ok(memory.consumer.drain(ring, end, each))
    }

    /// Whether access to any page of the granule is revoked.
    pub(super) fn is_staged(&self, granule: u32, granule_pages: u32) -> Result<bool, LinkError> {
        let Some(memory) = &self.memory else { return Ok(false) };
        Ok(shared(&memory.map, memory.layout)?.is_staged(granule, granule_pages))
    }

    /// The state of a page: where its content is.
    pub(super) fn page_state(&self, page: u32) -> Result<PageState, LinkError> {
        let Some(memory) = &self.memory else { return Ok(PageState::Unknown) };
        Ok(shared(&memory.map, memory.layout)?.state(page))
    }

    /// The states of these pages.
    pub(super) fn page_states(&self, pages: Range<u32>) -> Result<Vec<PageState>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(vec![PageState::Unknown; pages.len()]) };
        let shared = shared(&memory.map, memory.layout)?;
        Ok(pages.map(|page| shared.state(page)).collect())
    }

    /// The number of pages to which access is revoked.
    pub(super) fn staged_pages(&self) -> Result<u64, LinkError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        Ok(shared(&memory.map, memory.layout)?.get(Counter::StagedPages))
    }

    /// The number of pages whose state is merged: they share a slot of a pool, or did.
    pub(super) fn merged_pages(&self) -> Result<u64, LinkError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        Ok(shared(&memory.map, memory.layout)?.get(Counter::MergedPages))
    }

    /// The blocks of which pages were handed over, the oldest first, each with the time of the
    /// last hand-over in milliseconds.
    pub(super) fn freed_blocks(&self) -> Result<Vec<(u64, u32)>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(Vec::new()) };
        let shared = shared(&memory.map, memory.layout)?;
        let blocks = 0..memory.layout.blocks();
        let mut freed: Vec<_> =
            blocks.filter_map(|block| Some((shared.freed_at_ms(block)?, block))).collect();
        freed.sort_unstable();
        Ok(freed)
    }

    /// When pages of a block were last handed over, if any of its pages is still freed.
    pub(super) fn freed_at_ms(&self, block: u32) -> Result<Option<u64>, LinkError> {
        let Some(memory) = &self.memory else { return Ok(None) };
        Ok(shared(&memory.map, memory.layout)?.freed_at_ms(block))
    }

    /// The runs of freed pages in a block.
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

    /// The number of pages handed over so far, each counted every time.
    pub(super) fn handed_over(&self) -> Result<u64, LinkError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        Ok(shared(&memory.map, memory.layout)?.get(Counter::HandedOver))
    }

    /// The shim's counters.
    pub(super) fn counters(&self) -> Result<ShimCounters, LinkError> {
        let Some(memory) = &self.memory else { return Ok(ShimCounters::default()) };
        let shared = shared(&memory.map, memory.layout)?;
        Ok(ShimCounters {
            traps: shared.get(Counter::Traps),
            trap_ns: shared.get(Counter::TrapNs),
            round_trip_ns: shared.get(Counter::RoundTripNs),
            control_ns: shared.get(Counter::ControlNs),
            given_back: shared.get(Counter::GivenBack),
        })
    }

    /// The reason why the shim last gave everything back unasked.
    pub(super) fn last_given_back(&self) -> Option<GiveBack> {
        let memory = self.memory.as_ref()?;
        shared(&memory.map, memory.layout).ok()?.last_given_back()
    }
}

impl ShimMemory {
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
