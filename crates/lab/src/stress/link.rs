//! A conversation with a shim, one question at a time, each answered within a limit or not at all.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use overbook::worker::shim_of;
use protocol::layout::{Counter, Layout, LayoutError, Shared};
use protocol::{Answer, HELLO, MAX_PACKET, Refusal, Region, Request, VERSION, WireError};
use rustix::io::Errno;
use sys::process::Identity;
use sys::seqpacket::{Connection, SeqpacketError};
use sys::shared_memory::{SharedMemory, SharedMemoryError};

/// An answer that takes longer does not come any more.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long a shim may hold a worker for alive that is gone.
const BUSY_LIMIT: Duration = Duration::from_secs(3);

/// Why there was no answer to rely on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// The connection.
    #[error(transparent)]
    Socket(#[from] SeqpacketError),
    /// The packet.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The shared memory.
    #[error(transparent)]
    Memory(#[from] SharedMemoryError),
    /// What stands in the shared memory.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Hello was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Nothing came.
    #[error("no answer within {} s to {request}", ANSWER_LIMIT.as_secs())]
    Silent {
        /// What was asked.
        request: String,
    },
    /// Something else came.
    #[error("{request} was answered with {answer}")]
    Unexpected {
        /// What was asked.
        request: String,
        /// What came.
        answer: String,
    },
}

impl LinkError {
    /// Whether the other side closed the connection, which it may do at any moment.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self, Self::Socket(SeqpacketError::Closed))
    }

    /// An answer that does not fit its question.
    pub(crate) fn unexpected(request: &str, answer: &Answer) -> Self {
        Self::Unexpected { request: request.to_owned(), answer: format!("{answer:?}") }
    }
}

/// What people are told of a request.
pub(crate) fn told(request: &Request) -> String {
    let mut text = format!("{request:?}");
    text.truncate(80);
    text
}

/// A connection, and the shared memory once Hello was said.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    memory: Option<(Layout, SharedMemory)>,
    /// Guest RAM, as Hello told.
    pub(crate) regions: Vec<Region>,
    /// The answer that took longest.
    pub(crate) longest: Duration,
    last_id: u32,
}

/// What was sent and is to be answered.
#[derive(Debug)]
pub(crate) struct Sent {
    id: u32,
    /// What people are told of it.
    told: String,
    at: Instant,
}

impl Link {
    /// Connects to the shim of this process.
    pub(crate) fn connect(pid: u32) -> Result<Self, LinkError> {
        let address = Identity::of(pid).and_then(|process| shim_of(process).ok().flatten());
        let refused = SeqpacketError::Call { call: "connect", errno: Errno::CONNREFUSED };
        let connection = Connection::connect(&address.ok_or(refused)?, ANSWER_LIMIT)?;
        let (regions, longest) = (Vec::new(), Duration::ZERO);
        Ok(Self { connection, memory: None, regions, longest, last_id: HELLO })
    }

    /// Connects and says Hello; again if the shim still believes in a worker that is gone.
    pub(crate) fn greet(pid: u32) -> Result<Self, LinkError> {
        let begun = Instant::now();
        loop {
            let mut link = Self::connect(pid)?;
            match link.hello() {
                Err(LinkError::Refused(Refusal::Busy { .. })) if begun.elapsed() < BUSY_LIMIT => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                result => return result.map(|()| link),
            }
        }
    }

    /// Says Hello, again after guest RAM has changed.
    pub(crate) fn hello(&mut self) -> Result<(), LinkError> {
        let hello = self.send(&Request::Hello { version: VERSION }, None)?;
        let (answer, fd) = self.receive(&hello)?;
        let regions = match answer {
            Answer::Welcome { regions, .. } => regions,
            Answer::Refused(refusal) => return Err(refusal.into()),
            other => return Err(LinkError::unexpected("Hello", &other)),
        };
        let layout = Layout::of_regions(&regions);
        self.memory = match fd {
            Some(fd) => {
                let memory = SharedMemory::open(fd.as_fd(), layout.words(), layout.bytes())?;
                Shared::open(layout, memory.words(), memory.bytes())?;
                Some((layout, memory))
            }
            None => None,
        };
        self.regions = regions;
        Ok(())
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Answer, LinkError> {
        let sent = self.send(request, None)?;
        Ok(self.receive(&sent)?.0)
    }

    /// Asks, with a descriptor if need be; the answer is to be received.
    pub(crate) fn send(
        &mut self,
        request: &Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Sent, LinkError> {
        self.last_id = self.last_id.checked_add(1).unwrap_or(HELLO + 1);
        self.connection.send(&request.encode(self.last_id)?, fd)?;
        let id = request.numbered(self.last_id);
        Ok(Sent { id, told: told(request), at: Instant::now() })
    }

    /// Sends what is no request; a shim refuses it, and names none.
    pub(crate) fn send_raw(
        &mut self,
        packet: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Sent, LinkError> {
        self.connection.send(packet, fd)?;
        let told = format!("garbage of {} bytes", packet.len());
        Ok(Sent { id: HELLO, told, at: Instant::now() })
    }

    /// The next answer, which is to be that to what was sent.
    pub(crate) fn receive(&mut self, sent: &Sent) -> Result<(Answer, Option<OwnedFd>), LinkError> {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            if let Some(packet) = self.connection.receive(&mut buffer)? {
                self.longest = self.longest.max(sent.at.elapsed());
                let (id, answer) = Answer::decode(&buffer[..packet.length])?;
                // Whoever is turned away at the door is so before anything was read.
                let is_door = id == HELLO && matches!(answer, Answer::Refused(_));
                if id != sent.id && !is_door {
                    return Err(LinkError::unexpected(&sent.told, &answer));
                }
                return Ok((answer, packet.fd));
            }
            let left = ANSWER_LIMIT.saturating_sub(sent.at.elapsed());
            if left.is_zero() {
                return Err(LinkError::Silent { request: sent.told.clone() });
            }
            self.connection.wait(left)?;
        }
    }

    /// The shared memory; `None` when the shim has given none.
    pub(crate) fn shared(&self) -> Option<Shared<'_>> {
        let (layout, memory) = self.memory.as_ref()?;
        Shared::open(*layout, memory.words(), memory.bytes()).ok()
    }

    /// Pages of guest RAM that are marked as out of reach, and how many the gauge says.
    pub(crate) fn staged(&self) -> (u64, u64) {
        let Some(shared) = self.shared() else { return (0, 0) };
        let pages = self
            .regions
            .iter()
            .flat_map(|region| region.first_page..region.first_page.saturating_add(region.pages));
        let marked = pages.filter(|&page| shared.state(page).is_staged()).count();
        (marked as u64, shared.get(Counter::StagedPages))
    }
}
