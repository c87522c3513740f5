//! A shim without QEMU, for tests: it speaks the protocol, and misbehaves on request.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use protocol::layout::{BLOCK_PAGES, Counter, GiveBack, Layout, PageState, Shared};
use protocol::ring::Producer;
use protocol::{
    Answer, MAX_PACKET, Pages, Refusal, Region, Request, State, Status, Taken, Tracking, Trap,
    VERSION,
};
use sys::seqpacket::{Connection, Listener};
use sys::shared_memory::SharedMemory;

use crate::clock::now_us;

/// Only one fake at a time, because its address is that of this process.
static TURN: Mutex<()> = Mutex::new(());

/// A false answer to the request with this number; an empty packet: no answer.
pub(super) type Lie = Box<dyn Fn(u32, &Request) -> Option<Vec<u8>>>;

/// The shim of this process.
pub(super) struct FakeShim {
    nonce: u32,
    listener: Listener,
    connection: Option<Connection>,
    memory: SharedMemory,
    fd: OwnedFd,
    layout: Layout,
    regions: Vec<Region>,
    producer: Producer,
    /// The tracking that was last requested.
    pub(super) tracking: Option<Tracking>,
    /// The number of such requests.
    pub(super) tracks: u32,
    /// Whether it was told to hand over freed memory.
    pub(super) hands_over: bool,
    /// The number of requests to give everything back.
    pub(super) releases: u32,
    /// All granules that it was asked to revoke, with repetitions.
    pub(super) asked: Vec<u32>,
    /// The newest version of the protocol that it speaks.
    pub(super) newest: u16,
    /// The source of its false answers.
    pub(super) lie: Lie,
    /// The requests that it has read and not answered.
    unanswered: Vec<(u32, Request)>,
    _turn: MutexGuard<'static, ()>,
}

impl FakeShim {
    /// A VM with this much memory in one region, which does not exist.
    pub(super) fn new(pages: u32) -> Self {
        Self::of_region(Region { first_page: 0, pages, address: 0 })
    }

    /// A VM with this memory of this process.
    pub(super) fn of_region(region: Region) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let regions = vec![region];
        let layout = Layout::of_regions(&regions);
        let (memory, fd) =
            SharedMemory::create("fake-shim", layout.words(), layout.bytes()).unwrap();
        Shared::initialise(layout, 1, memory.words(), memory.bytes()).unwrap();
        let nonce = sys::random::word();
        let name = std::ffi::CString::new(protocol::listener_name(nonce)).unwrap();
        rustix::thread::set_name(&name).unwrap();
        let fake = Self {
            nonce,
            listener: Listener::bind(&protocol::address(std::process::id(), nonce)).unwrap(),
            connection: None,
            memory,
            fd,
            layout,
            regions,
            producer: Producer::new(),
            tracking: None,
            tracks: 0,
            hands_over: false,
            releases: 0,
            asked: Vec::new(),
            newest: VERSION,
            lie: Box::new(|_, _| None),
            unanswered: Vec::new(),
            _turn: turn,
        };
        fake.shared().set(Counter::RoundTripNs, 20_000);
        fake
    }

    /// The address on which it listens; this thread's name contains it.
    pub(super) fn address(&self) -> String {
        protocol::address(std::process::id(), self.nonce)
    }

    pub(super) fn shared(&self) -> Shared<'_> {
        Shared::open(self.layout, self.memory.words(), self.memory.bytes()).unwrap()
    }

    /// Whether a worker is connected.
    pub(super) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Answers all requests.
    pub(super) fn serve(&mut self) {
        self.collect();
        for (id, request) in std::mem::take(&mut self.unanswered) {
            self.send_answer(id, &request);
        }
    }

    /// Answers the collected requests, the newest first.
    pub(super) fn answer_backwards(&mut self) {
        self.unanswered.reverse();
        self.serve();
    }

    /// The number of requests without an answer.
    pub(super) fn waiting(&self) -> usize {
        self.unanswered.len()
    }

    /// The requests without an answer.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.unanswered.iter().map(|(_, request)| request)
    }

    /// Reads all requests without answering them.
    pub(super) fn collect(&mut self) {
        if let Some(connection) = self.listener.accept().unwrap() {
            self.connection = Some(connection);
            self.unanswered.clear();
        }
        let mut buffer = vec![0; MAX_PACKET];
        while let Some(connection) = &self.connection {
            let packet = match connection.receive(&mut buffer) {
                Ok(Some(packet)) => packet,
                Ok(None) => return,
                Err(_) => {
                    self.connection = None;
                    self.unanswered.clear();
                    return self.give_back(None);
                }
            };
            let (id, request) = Request::decode(&buffer[..packet.length]);
            self.unanswered.push((id, request.unwrap()));
        }
    }

    fn send_answer(&mut self, id: u32, request: &Request) {
        let is_hello = matches!(request, Request::Hello { .. });
        let truth = self.answer(request).encode(id).unwrap();
        let answer = (self.lie)(id, request).unwrap_or(truth);
        let fd = is_hello.then(|| self.fd.as_fd());
        if let Some(connection) = &self.connection
            && !answer.is_empty()
        {
            // A worker that is gone is noticed at the next read.
            let _ = connection.send(&answer, fd);
        }
    }

    fn answer(&mut self, request: &Request) -> Answer {
        match request {
            Request::Hello { version } if *version > self.newest => {
                Answer::Refused(Refusal::Version { shim: self.newest, worker: *version })
            }
            Request::Hello { version } => {
                let regions = self.regions.clone();
                Answer::Welcome { version: *version, regions, state: State::Off }
            }
            Request::About => Answer::About { release: "1.2.3".to_owned() },
            Request::Track(tracking) => {
                self.tracking = Some(*tracking);
                self.tracks += 1;
                Answer::Done { count: 0 }
            }
            Request::Revoke { granules } => {
                self.asked.extend(granules);
                for granule in granules {
                    self.set(*granule, PageState::Staged);
                }
                Answer::Done { count: u32::try_from(granules.len()).unwrap() }
            }
            Request::Recall { granules } => {
                for granule in granules {
                    self.set(*granule, PageState::Plain);
                }
                Answer::Done { count: u32::try_from(granules.len()).unwrap() }
            }
            Request::Pool { .. } | Request::Unshare { .. } => Answer::Done { count: 0 },
            Request::Merge { .. } => Answer::Merged(protocol::Merged::default()),
            Request::HandOver { lazily } => {
                self.hands_over = *lazily;
                Answer::Done { count: 0 }
            }
            Request::Take { runs } => {
                Answer::Taken(Taken { taken: self.end_free(runs), ..Taken::default() })
            }
            Request::Keep { runs } => Answer::Done { count: self.end_free(runs) },
            Request::Release => {
                self.releases += 1;
                self.give_back(None);
                Answer::Done { count: 0 }
            }
            Request::Status => {
                let state = self.tracking.map_or(State::Off, State::On);
                let generation = self.shared().generation();
                Answer::Status(Status { state, generation, staging: Vec::new() })
            }
        }
    }

    /// The guest has freed these pages of a block at that moment.
    pub(super) fn free(&self, block: u32, pages: std::ops::Range<u32>, at_ms: u64) {
        let shared = self.shared();
        pages.for_each(|page| shared.set_state(block * BLOCK_PAGES + page, PageState::Freed));
        shared.set_freed_at_ms(block, at_ms);
    }

    /// The freed pages.
    pub(super) fn freed(&self) -> Vec<u32> {
        let pages = u32::try_from(self.layout.bytes()).unwrap();
        (0..pages).filter(|page| self.shared().state(*page) == PageState::Freed).collect()
    }

    fn end_free(&self, runs: &[Pages]) -> u32 {
        let shared = self.shared();
        let mut count = 0;
        for page in runs.iter().flat_map(|run| run.page..run.page + run.pages) {
            count += u32::from(shared.state(page) == PageState::Freed);
            shared.set_state(page, PageState::Plain);
            let block = page / BLOCK_PAGES;
            if !self.freed().iter().any(|page| page / BLOCK_PAGES == block) {
                shared.set_freed_at_ms(block, 0);
            }
        }
        count
    }

    fn set(&self, granule: u32, state: PageState) {
        let pages = self.tracking.map_or(1, |tracking| tracking.granule_pages);
        let moves = [PageState::Plain, PageState::Staged];
        for page in granule * pages..(granule + 1) * pages {
            if moves.contains(&self.shared().state(page)) {
                self.shared().set_state(page, state);
            }
        }
    }

    /// The guest touches a granule.
    pub(super) fn touch(&mut self, granule: u32) {
        let pages = self.tracking.map_or(1, |tracking| tracking.granule_pages);
        if self.shared().is_staged(granule, pages) {
            self.set(granule, PageState::Plain);
            self.shared().add(Counter::Traps, 1);
            let at_us = u32::try_from(now_us() & u64::from(u32::MAX)).unwrap();
            self.push(Trap { granule, at_us });
        }
    }

    /// Writes into the ring.
    pub(super) fn push(&mut self, trap: Trap) {
        let layout = self.layout;
        let shared = Shared::open(layout, self.memory.words(), self.memory.bytes()).unwrap();
        self.producer.push(shared.ring(), trap);
    }

    /// Gives everything back.
    pub(super) fn give_back(&mut self, unasked: Option<GiveBack>) {
        self.tracking = None;
        for page in 0..u32::try_from(self.layout.bytes()).unwrap() {
            if self.shared().state(page).is_staged() {
                self.shared().set_state(page, PageState::Plain);
            }
        }
        if let Some(why) = unasked {
            self.shared().note_given_back(why);
        }
    }

    /// The number of revoked pages.
    pub(super) fn revoked(&self) -> usize {
        let pages = u32::try_from(self.layout.bytes()).unwrap();
        let staged = (0..pages).filter(|page| self.shared().state(*page).is_staged());
        staged.count()
    }
}

impl Drop for FakeShim {
    fn drop(&mut self) {
        // The next fake uses another thread.
        let _ = rustix::thread::set_name(c"done");
    }
}
