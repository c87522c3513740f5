//! The protocol between the shim inside QEMU and its group's worker.
//!
//! There are three channels:
//!
//! * **messages** ([`Request`], [`Answer`]): a `SEQPACKET` socket, one message per packet. Each
//!   request has a number and gets one answer, which names that number. Messages make all changes
//!   of what is tracked.
//! * **the ring** ([`ring`], [`Trap`]): faults, written by the shim's fault thread and read by the
//!   worker, in shared memory, without a system call.
//! * **the page states and counters** ([`layout`]): in the same memory, which only the shim can
//!   write.
//!
//! The two sides may be of different releases ([`versions`]).
//!
//! Neither side trusts the other: the reader checks lengths, numbers and positions. The crate has
//! no `unsafe` and does no I/O: `sys::seqpacket` carries the packets, `sys::shared_memory`
//! provides the memory.

use serde::{Deserialize, Serialize};

pub mod layout;
pub mod ring;
mod sync;
mod versions;
mod wire;

pub use versions::{VERSION, VERSIONS, Versions};
pub use wire::{MAX_GRANULE_PAGES, MIN_HOT_SET, WireError};

/// The number of [`Request::Hello`], and of no other request; it is not written in the packet. An
/// answer with this number belongs to Hello, or is a refusal: of a packet that was not
/// understood, or without a request.
pub const HELLO: u32 = 0;

/// The longest packet that either side sends or accepts, in bytes.
pub const MAX_PACKET: usize = 16 << 10;

/// The most granules in one [`Request::Revoke`] or [`Request::Recall`].
pub const MAX_REVOKE: usize = 2048;

/// The most runs in one [`Request::Merge`].
pub const MAX_MERGE: usize = 512;

/// The most pages in one [`Request::Merge`]; the shim processes far fewer at a time.
pub const MAX_MERGE_PAGES: u32 = 4096;

/// The most pages in one [`Request::Unshare`]: those of a huge page.
pub const MAX_UNSHARE: u32 = 512;

/// The most runs in one [`Request::Take`].
pub const MAX_TAKE: usize = 512;

/// The most pages in one [`Request::Take`].
pub const MAX_TAKE_PAGES: u32 = 4096;

/// The most slots in a pool: 4 TiB of content.
pub const MAX_SLOTS: u32 = 1 << 30;

/// The most regions in [`Answer::Welcome`].
pub const MAX_REGIONS: usize = 512;

/// Each region's first page number is a multiple of this, so no granule is in two regions.
pub const REGION_ALIGN_PAGES: u32 = 512;

/// The prefix of the name of the thread that waits for the worker's connection.
const LISTENER: &str = "ob-ctl-";

/// The abstract Unix address (without its leading zero byte) on which the shim of process `pid`
/// listens. An abstract address belongs to the process that binds it first. `nonce` is random, so
/// that no other process can have bound this address before.
#[must_use]
pub fn address(pid: u32, nonce: u32) -> String {
    format!("overbook-shim.{pid}.{nonce:08x}")
}

/// The name of the thread that listens at [`address`]: at most 15 bytes, the kernel's limit. The
/// worker reads it in `/proc`. No other process can name a thread of QEMU.
#[must_use]
pub fn listener_name(nonce: u32) -> String {
    format!("{LISTENER}{nonce:08x}")
}

/// The address on which a thread of process `pid` listens, from its name; `None`: it is not the
/// shim's listener.
#[must_use]
pub fn address_of_listener(pid: u32, thread: &str) -> Option<String> {
    let nonce = u32::from_str_radix(thread.strip_prefix(LISTENER)?, 16).ok()?;
    (listener_name(nonce) == thread).then(|| address(pid, nonce))
}

/// The most granules of this size that may be revoked at a time. A thread of QEMU may have to
/// wait until all are back, some 8 µs for one of 128 KiB, some 40 µs for one of 2 MiB.
#[must_use]
pub const fn most_revoked(granule_pages: u32) -> u32 {
    const GRANULES: u32 = 8_192;
    const PAGES: u32 = 1 << 20;
    let by_pages = PAGES / if granule_pages == 0 { 1 } else { granule_pages };
    if by_pages < GRANULES { by_pages } else { GRANULES }
}

/// A request of a worker to a shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The first message; answered with [`Answer::Welcome`] and the descriptor of the shared
    /// memory.
    Hello {
        /// The version that the worker proposes: its [`VERSION`], or after a refusal the shim's.
        version: u16,
    },
    /// Starts tracking, or changes its parameters. If the granule changes, everything that is
    /// revoked is given back first. Answered with [`Answer::Done`].
    Track(Tracking),
    /// Revokes the guest's access to these granules until their next touch. Answered with
    /// [`Answer::Done`]: the number of newly revoked granules.
    Revoke {
        /// Numbers of granules; at most [`MAX_REVOKE`].
        granules: Vec<u32>,
    },
    /// Restores the guest's access to these granules; no trap reports it. Pages in the host's swap
    /// stay there. Answered with [`Answer::Done`]: the number of granules that were revoked.
    Recall {
        /// Numbers of granules; at most [`MAX_REVOKE`].
        granules: Vec<u32>,
    },
    /// Gives everything back and stops tracking. Pages in the host's swap stay there. Answered
    /// with [`Answer::Done`].
    Release,
    /// Asks for the state; also the keep-alive without which the shim gives everything back.
    Status,
    /// From now on [`Content::Slot`] means a slot of this pool. Its descriptor, opened for
    /// reading, comes with the message. Pages merged with another pool stay as they are. Answered
    /// with [`Answer::Done`].
    Pool {
        /// The capacity of the pool in pages; at most [`MAX_SLOTS`].
        slots: u32,
    },
    /// Replaces pages with equal shared pages. A page stays as it is if it is not equal at that
    /// moment, is pinned by I/O, is revoked, or is not an ordinary page of the guest. Answered
    /// with [`Answer::Merged`]; the page states show which pages share a slot now.
    Merge {
        /// The pages with their expected content; at most [`MAX_MERGE`] runs, [`MAX_MERGE_PAGES`]
        /// in all.
        runs: Vec<Merge>,
    },
    /// Gives the guest copies of its own of those of these pages that are merged; they then need
    /// no pool. They become plain pages. Pages that the guest had written stay mapped as they
    /// are, so the page states still show them as merged; so do all pages if the shim cannot
    /// replace a page with a copy. Answered with [`Answer::Done`]: the number of pages.
    Unshare {
        /// The first page's number.
        page: u32,
        /// The number of pages; at most [`MAX_UNSHARE`].
        pages: u32,
    },
    /// Selects the treatment of memory that the guest reports free, until the worker disconnects.
    /// Either it is handed over to the kernel (`MADV_FREE`), which drops it when memory is short
    /// and the guest has not written to it, or it is discarded at once, as QEMU itself does.
    /// Where it must be discarded (an incoming migration, memory that is locked or passed
    /// through), it is. Answered with [`Answer::Done`].
    HandOver {
        /// Whether it is handed over.
        lazily: bool,
    },
    /// Makes the kernel drop those of these pages that are [`layout::PageState::Freed`] and not
    /// written by the guest since. With swap, a page that was dropped and filled again would be
    /// swapped out, so the worker checks before (`kpageflags`). Answered with [`Answer::Taken`];
    /// none of the pages counts as freed any more.
    Take {
        /// The pages; at most [`MAX_TAKE`] runs of [`MAX_TAKE_PAGES`] in all.
        runs: Vec<Pages>,
    },
    /// The guest uses these pages again, independent of the page states: none counts as freed any
    /// more. Answered with [`Answer::Done`]: the number of pages that did.
    Keep {
        /// The pages, as for [`Self::Take`].
        runs: Vec<Pages>,
    },
    /// Asks for the shim's release. Answered with [`Answer::About`].
    About,
}

/// The parameters of tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracking {
    /// Pages of 4 KiB per granule: a power of two, 1 to 512.
    pub granule_pages: u32,
    /// `Some`: every sampled granule is revoked at once, and again when it leaves a FIFO of this
    /// number of accessible granules (MEB §3.4), at least [`MIN_HOT_SET`]. `None`: only the
    /// granules in [`Request::Revoke`].
    pub hot_set: Option<u32>,
    /// The sample: granules whose hash ([`layout::hash`]) is below this share of 2^32; `u32::MAX`
    /// = all.
    pub sample: u32,
    /// The fuse: after more than this number of traps in one second everything is given back, and
    /// tracking pauses until the next [`Request::Track`]. At least 1.
    pub max_traps_per_s: u32,
}

/// Consecutive pages with their expected content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// The first page's number.
    pub page: u32,
    /// The number of pages.
    pub pages: u32,
    /// The expected content.
    pub content: Content,
}

impl Merge {
    /// The expected content of a page of this run.
    #[must_use]
    pub fn content_at(&self, page: u32) -> Content {
        match self.content {
            Content::Zeros => Content::Zeros,
            Content::Slot(slot) => {
                Content::Slot(slot.saturating_add(page.saturating_sub(self.page)))
            }
        }
    }
}

/// The expected content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Zeros: the page is dropped and leaves a hole.
    Zeros,
    /// The content of this slot of the pool; each following page has that of the following slot.
    Slot(u32),
}

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// The first one's number.
    pub page: u32,
    /// The number of pages.
    pub pages: u32,
}

/// An answer of a shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Request::Hello`]; carries the shared memory's descriptor.
    Welcome {
        /// The version that the worker has proposed.
        version: u16,
        /// Guest RAM, in the order of its page numbers.
        regions: Vec<Region>,
        /// Whether it can be tracked, and if not, the reason.
        state: State,
    },
    /// Done; with the number of granules, or pages, that changed.
    Done {
        /// Granules, or pages.
        count: u32,
    },
    /// Refused; nothing has changed.
    Refused(Refusal),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Merge`], in pages.
    Merged(Merged),
    /// To [`Request::Take`], in pages.
    Taken(Taken),
    /// To [`Request::About`].
    About {
        /// The release of Overbook that the shim belongs to.
        release: String,
    },
}

/// The result of a [`Request::Take`], in pages that were freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Pages that belong to the host now.
    pub taken: u32,
    /// Pages that the kernel had dropped before.
    pub gone: u32,
    /// Pages that the guest uses again, or that I/O has pinned.
    pub kept: u32,
}

impl std::ops::AddAssign for Taken {
    fn add_assign(&mut self, more: Self) {
        self.taken += more.taken;
        self.gone += more.gone;
        self.kept += more.kept;
    }
}

/// The result of a [`Request::Merge`], in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// Pages that share a slot now.
    pub shared: u32,
    /// Pages that held zeros and are dropped.
    pub dropped: u32,
    /// Pages whose content has changed.
    pub different: u32,
    /// Pages that could not be taken: I/O has pinned them, they are revoked, or they do not
    /// exist.
    pub kept: u32,
    /// Pages for which QEMU may not have more mappings (`vm.max_map_count`).
    pub no_room: u32,
}

impl std::ops::AddAssign for Merged {
    fn add_assign(&mut self, more: Self) {
        self.shared += more.shared;
        self.dropped += more.dropped;
        self.different += more.different;
        self.kept += more.kept;
        self.no_room += more.no_room;
    }
}

/// A piece of guest RAM. Page numbers run through all regions; each region begins at a multiple
/// of 512, so no granule is in two regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Its first page's number.
    pub first_page: u32,
    /// The number of pages of 4 KiB.
    pub pages: u32,
    /// Its address in QEMU's address space.
    pub address: u64,
}

/// The state of a shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Nothing is registered, and no fault is handled.
    Off,
    /// Tracking.
    On(Tracking),
    /// Tracking is not possible now: QEMU needs its memory for itself, or the fuse blew. The next
    /// [`Request::Track`] tries it again.
    Suspended {
        /// The reason, for people.
        why: String,
    },
    /// Tracking is never possible on this VM.
    Unsupported {
        /// The reason, for people.
        why: String,
    },
}

/// The status of a shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its state.
    pub state: State,
    /// Grows with each change of the regions (hot-plugged RAM); another [`Request::Hello`]
    /// returns the new ones.
    pub generation: u32,
    /// For each region the address in QEMU's address space at which its first page is staged;
    /// empty: nothing is tracked.
    pub staging: Vec<u64>,
}

/// The reason why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The shim does not speak the version of the greeting.
    #[error(
        "the shim speaks version {shim} of the protocol, the worker {worker}: restart the VM to load \
         the new shim"
    )]
    Version {
        /// The newest version of the shim.
        shim: u16,
        /// The version of the greeting.
        worker: u16,
    },
    /// The packet could not be read.
    #[error("malformed message of {length} bytes")]
    Malformed {
        /// The packet's length.
        length: u32,
    },
    /// A value is out of its range.
    #[error("{field}: {value}: {valid}")]
    Invalid {
        /// The field.
        field: String,
        /// The value sent.
        value: u64,
        /// The valid range.
        valid: String,
    },
    /// Merging is not possible now.
    #[error("not merging: {why}")]
    NotMerging {
        /// The reason.
        why: String,
    },
    /// Tracking is not possible now.
    #[error("not tracking: {why}")]
    NotTracking {
        /// The reason.
        why: String,
    },
    /// Another worker is connected; the shim closes this connection.
    #[error("process {pid} manages this VM already")]
    Busy {
        /// Its process id.
        pid: u32,
    },
    /// The caller is neither root nor the user who runs QEMU by hand; the shim closes this
    /// connection.
    #[error(
        "user {uid} may not manage this VM: run as root, or as the user who started QEMU by hand"
    )]
    NotPermitted {
        /// The caller's user id.
        uid: u32,
    },
    /// The kernel refused.
    #[error("{call}: errno {errno}")]
    Kernel {
        /// The system call.
        call: String,
        /// Its error.
        errno: i32,
    },
    /// Taking freed memory is not possible now.
    #[error("not taking: {why}")]
    NotTaking {
        /// The reason.
        why: String,
    },
}

/// One fault in the format of the ring: 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// The granule that was touched (page number / granule pages).
    pub granule: u32,
    /// The time of the touch, in microseconds of `CLOCK_MONOTONIC`, modulo 2^32.
    pub at_us: u32,
}
