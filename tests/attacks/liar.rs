//! A hostile QEMU: this process, which makes false claims about its memory.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use protocol::layout::{Counter, Layout, PageState, Shared};
use protocol::{
    Answer, MAX_PACKET, Merged, Region, Request, State, Status, VERSION, address, listener_name,
};
use sys::seqpacket::{Connection, Listener};
use sys::shared_memory::SharedMemory;

const PAGE: usize = 4096;
const COUNTERS: [Counter; 11] = [
    Counter::Traps,
    Counter::TrapNs,
    Counter::MovedOut,
    Counter::MovedIn,
    Counter::Pinned,
    Counter::Discarded,
    Counter::StagedPages,
    Counter::RoundTripNs,
    Counter::ControlNs,
    Counter::GivenBack,
    Counter::MergedPages,
];

/// Only one at a time, because they use this process's address.
static ALONE: Mutex<()> = Mutex::new(());

/// Returns an answer in place of the shim's; `None`: the shim's answer is sent.
pub(crate) type Lie = Box<dyn FnMut(&Request) -> Option<Answer>>;

/// The hostile QEMU. It merges nothing, but may claim to.
pub(crate) struct Liar {
    listener: Listener,
    connection: Option<Connection>,
    memory: SharedMemory,
    fd: OwnedFd,
    regions: Vec<Region>,
    pub(crate) lie: Lie,
    /// Number of greetings that it got.
    pub(crate) greetings: u32,
    /// Its RAM, and the offset of the first page in it.
    ram: (Vec<u8>, usize),
    _named: NamedThread,
    _alone: MutexGuard<'static, ()>,
}

/// Gives this thread the name of the shim's listener until this is dropped.
struct NamedThread;

impl Drop for NamedThread {
    fn drop(&mut self) {
        let _ = rustix::thread::set_name(c"done");
    }
}

impl Liar {
    /// A hostile QEMU with `pages` pages of RAM.
    pub(crate) fn with_ram(pages: u32) -> Self {
        let ram = vec![1_u8; (pages as usize + 1) * PAGE];
        let skip = ram.as_ptr().addr().next_multiple_of(PAGE) - ram.as_ptr().addr();
        let address = (ram.as_ptr().addr() + skip) as u64;
        let new = Self::claiming(vec![Region { first_page: 0, pages, address }]);
        Self { ram: (ram, skip), ..new }
    }

    /// A hostile QEMU without RAM that claims these regions.
    pub(crate) fn claiming(regions: Vec<Region>) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, fd) = shared_memory(&regions);
        let nonce = sys::random::word();
        rustix::thread::set_name(&CString::new(listener_name(nonce)).unwrap()).unwrap();
        Self {
            listener: Listener::bind(&address(std::process::id(), nonce)).unwrap(),
            _named: NamedThread,
            connection: None,
            memory,
            fd,
            regions,
            lie: Box::new(|_| None),
            greetings: 0,
            ram: (Vec::new(), 0),
            _alone: alone,
        }
    }

    /// Claims these regions as its RAM, from the next greeting on.
    pub(crate) fn claim(&mut self, regions: Vec<Region>) {
        (self.memory, self.fd) = shared_memory(&regions);
        self.regions = regions;
        self.connection = None;
    }

    pub(crate) fn regions(&self) -> Vec<Region> {
        self.regions.clone()
    }

    /// Fills its RAM as a stand-in's `fill` with this seed does.
    pub(crate) fn fill(&mut self, seed: u64) {
        let (ram, skip) = &mut self.ram;
        for (page, bytes) in (1_u64..).zip(ram[*skip..].as_chunks_mut::<PAGE>().0) {
            let stamp = page << 20 | seed;
            for (index, word) in (1_u64..).zip(bytes.as_chunks_mut::<8>().0) {
                *word = stamp.wrapping_mul(index).to_ne_bytes();
            }
        }
    }

    /// Reports this state for every page.
    pub(crate) fn say(&self, state: PageState) {
        self.say_of_each(|_| state);
    }

    /// Reports a state for each page.
    pub(crate) fn say_of_each(&self, state: impl Fn(u32) -> PageState) {
        let layout = Layout::of_regions(&self.regions);
        let pages = u32::try_from(layout.bytes()).unwrap();
        (0..pages).for_each(|page| self.shared().set_state(page, state(page)));
    }

    /// Sets random counters, which may run backwards.
    pub(crate) fn count_nonsense(&self) {
        COUNTERS.iter().for_each(|counter| self.shared().set(*counter, fastrand::u64(..)));
    }

    /// Answers pending requests.
    pub(crate) fn serve(&mut self) {
        if let Some(connection) = self.listener.accept().unwrap() {
            self.connection = Some(connection);
        }
        let mut buffer = vec![0; MAX_PACKET];
        while let Some(connection) = &self.connection {
            match connection.receive(&mut buffer) {
                Ok(Some(packet)) => {
                    let (id, request) = Request::decode(&buffer[..packet.length]);
                    self.answer(id, &request.unwrap());
                }
                Ok(None) => return,
                Err(_) => self.connection = None,
            }
        }
    }

    fn answer(&mut self, id: u32, request: &Request) {
        let is_greeting = matches!(request, Request::Hello { .. });
        self.greetings += u32::from(is_greeting);
        let answer = (self.lie)(request).unwrap_or_else(|| self.truth(request));
        let fd = is_greeting.then(|| self.fd.as_fd());
        if let Some(connection) = &self.connection {
            // The next poll notices a worker that has disconnected.
            let _ = connection.send(&answer.encode(id).unwrap(), fd);
        }
    }

    fn truth(&self, request: &Request) -> Answer {
        match request {
            Request::Hello { .. } => {
                Answer::Welcome { version: VERSION, regions: self.regions(), state: State::Off }
            }
            Request::Status => {
                let generation = self.shared().generation();
                Answer::Status(Status { state: State::Off, generation, staging: vec![u64::MAX] })
            }
            Request::About => Answer::About { release: "1.2.3".to_owned() },
            Request::Merge { .. } => Answer::Merged(Merged::default()),
            _ => Answer::Done { count: 0 },
        }
    }

    fn shared(&self) -> Shared<'_> {
        let layout = Layout::of_regions(&self.regions);
        Shared::open(layout, self.memory.words(), self.memory.bytes()).unwrap()
    }
}

fn shared_memory(regions: &[Region]) -> (SharedMemory, OwnedFd) {
    let layout = Layout::of_regions(regions);
    let (memory, fd) = SharedMemory::create("liar", layout.words(), layout.bytes()).unwrap();
    Shared::initialise(layout, 1, memory.words(), memory.bytes()).unwrap();
    (memory, fd)
}
