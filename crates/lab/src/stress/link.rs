//! A connection to a shim with one request at a time; each is answered within a limit or fails.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use protocol::layout::{Counter, Layout, LayoutError, Shared};
use protocol::{Answer, HELLO, MAX_PACKET, Refusal, Region, Request, VERSION, WireError};
use rustix::io::Errno;
use sys::process::Identity;
use sys::seqpacket::{Connection, SeqpacketError};
use sys::shared_memory::{SharedMemory, SharedMemoryError};
use worker::shim_of;

/// Timeout for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Timeout for a shim to notice that its worker has gone.
const BUSY_LIMIT: Duration = Duration::from_secs(3);

/// Why there was no valid answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// An error of the connection.
    #[error(transparent)]
    Socket(#[from] SeqpacketError),
    /// An invalid packet.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// An error of the shared memory.
    #[error(transparent)]
    Memory(#[from] SharedMemoryError),
    /// The content of the shared memory is invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Hello was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No answer came in time.
    #[error("no answer within {} s to {request}", ANSWER_LIMIT.as_secs())]
    Silent {
        /// The request.
        request: String,
    },
    /// An answer of another kind came.
    #[error("{request} was answered with {answer}")]
    Unexpected {
        /// The request.
        request: String,
        /// The answer.
        answer: String,
    },
}

impl LinkError {
    /// Whether the peer closed the connection, which it may do at any moment.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self, Self::Socket(SeqpacketError::Closed))
    }

    /// The error for an answer that does not fit its request.
    pub(crate) fn unexpected(request: &str, answer: &Answer) -> Self {
        Self::Unexpected { request: request.to_owned(), answer: format!("{answer:?}") }
    }
}

/// A request as text for messages.
pub(crate) fn told(request: &Request) -> String {
    let mut text = format!("{request:?}");
    text.truncate(80);
    text
}

/// A connection, and the shared memory after Hello.
#[derive(Debug)]
pub(crate) struct StressLink {
    pub(crate) connection: Connection,
    memory: Option<(Layout, SharedMemory)>,
    /// Guest RAM, as told by Hello's answer.
    pub(crate) regions: Vec<Region>,
    /// The longest time for an answer.
    pub(crate) longest: Duration,
    last_id: u32,
}

/// A request that was sent and not answered yet.
#[derive(Debug)]
pub(crate) struct Sent {
    id: u32,
    /// The request as text for messages.
    told: String,
    at: Instant,
}

impl StressLink {
    /// Connects to the shim of this process.
    pub(crate) fn connect(pid: u32) -> Result<Self, LinkError> {
        let address = Identity::of(pid).and_then(|process| shim_of(process).ok().flatten());
        let refused = SeqpacketError::Call { call: "connect", errno: Errno::CONNREFUSED };
        let connection = Connection::connect(&address.ok_or(refused)?, ANSWER_LIMIT)?;
        let (regions, longest) = (Vec::new(), Duration::ZERO);
        Ok(Self { connection, memory: None, regions, longest, last_id: HELLO })
    }

    /// Connects and sends Hello; retries while the shim still has a worker that is gone.
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

    /// Sends Hello; again after guest RAM has changed.
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

    /// Sends a request, and waits for the answer.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Answer, LinkError> {
        let sent = self.send(request, None)?;
        Ok(self.receive(&sent)?.0)
    }

    /// Sends a request, with a descriptor if there is one; the answer has to be received later.
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

    /// Sends a packet that is no request; a shim refuses it, and names no request.
    pub(crate) fn send_raw(
        &mut self,
        packet: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Sent, LinkError> {
        self.connection.send(packet, fd)?;
        let told = format!("garbage of {} bytes", packet.len());
        Ok(Sent { id: HELLO, told, at: Instant::now() })
    }

    /// Receives the next answer, which must belong to `sent`.
    pub(crate) fn receive(&mut self, sent: &Sent) -> Result<(Answer, Option<OwnedFd>), LinkError> {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            if let Some(packet) = self.connection.receive(&mut buffer)? {
                self.longest = self.longest.max(sent.at.elapsed());
                let (id, answer) = Answer::decode(&buffer[..packet.length])?;
                // A shim that refuses a connection does so before it has read any request.
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

    /// The shared memory; `None` when the shim has not sent it.
    pub(crate) fn shared(&self) -> Option<Shared<'_>> {
        let (layout, memory) = self.memory.as_ref()?;
        Shared::open(*layout, memory.words(), memory.bytes()).ok()
    }

    /// Pages of guest RAM that are marked as staged, and the gauge's count of them.
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
