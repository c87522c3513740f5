//! The memory that a worker reads: header, ring, page states, as one generation of guest RAM has them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use protocol::layout::{Layout, Shared};
use protocol::ring::Producer;
use protocol::{Region, Trap};
use sys::shared_memory::SharedMemory;

use crate::descriptors::Guarded;

/// Our end of the shared memory.
pub(crate) struct Channel {
    shared: Shared<'static>,
    producer: Producer,
    fd: OwnedFd,
    generation: u32,
    _guarded: Option<Guarded>,
}

impl Channel {
    /// Makes the memory for these regions; `None` when the kernel refuses.
    pub(crate) fn new(regions: &[Region], generation: u32) -> Option<Self> {
        let layout = Layout::of_regions(regions);
        let created = SharedMemory::create("overbook-shim", layout.words(), layout.bytes());
        let (memory, fd) = created.ok()?;
        // Kept for ever, so that views of it need no owner: one for each time that RAM is plugged.
        let memory: &'static SharedMemory = Box::leak(Box::new(memory));
        let shared = Shared::initialise(layout, generation, memory.words(), memory.bytes()).ok()?;
        let guarded = Guarded::new(fd.as_raw_fd());
        Some(Self { shared, producer: Producer::new(), fd, generation, _guarded: guarded })
    }

    pub(crate) fn shared(&self) -> Shared<'static> {
        self.shared
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Logs a trap for the worker.
    pub(crate) fn push(&mut self, trap: Trap) {
        self.producer.push(self.shared.ring(), trap);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
