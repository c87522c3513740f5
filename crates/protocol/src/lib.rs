//! What the shim inside QEMU and its group's worker say to each other.
//!
//! Three channels, each for what it is good at:
//!
//! * **messages** ([`Request`], [`Answer`]): a `SEQPACKET` socket, one message per packet. Each
//!   request has a number and is answered once; the answer names it. Everything that changes what
//!   is tracked.
//! * **the ring** ([`ring`], [`Trap`]): faults, written by the shim's fault thread and read by the
//!   worker, in shared memory, without a system call.
//! * **the page states and counters** ([`layout`]): in the same memory, which the shim alone can
//!   write.
//!
//! Neither side trusts the other: lengths, numbers and positions are checked by whoever reads them.
//! The crate has no `unsafe` and does no I/O: `sys::seqpacket` carries the packets,
//! `sys::shared_memory` hands out the memory.

use serde::{Deserialize, Serialize};

pub mod layout;
pub mod ring;
mod sync;
mod wire;

pub use wire::{MAX_GRANULE_PAGES, MIN_HOT_SET, WireError};

/// Changes whenever a message or the layout does. Both sides must have the same.
pub const VERSION: u16 = 8;

/// The number of [`Request::Hello`], and of no other request: nothing stands in its packet for it.
/// An answer of this number belongs to Hello, or is a refusal of what was not understood or not
/// asked for.
pub const HELLO: u32 = 0;

/// Longest packet that either side sends or accepts, in bytes.
pub const MAX_PACKET: usize = 16 << 10;

/// Most granules in one [`Request::Revoke`], [`Request::Recall`] or [`Request::PageOut`].
pub const MAX_REVOKE: usize = 2048;

/// Most runs in one [`Request::Merge`].
pub const MAX_MERGE: usize = 512;

/// Most pages in one [`Request::Merge`]: what the shim does of it at a time is far less.
pub const MAX_MERGE_PAGES: u32 = 4096;

/// Most pages in one [`Request::Unshare`]: what a huge page holds.
pub const MAX_UNSHARE: u32 = 512;

/// Most runs in one [`Request::Take`].
pub const MAX_TAKE: usize = 512;

/// Most pages in one [`Request::Take`].
pub const MAX_TAKE_PAGES: u32 = 4096;

/// Most slots in a pool: 4 TiB of content.
pub const MAX_SLOTS: u32 = 1 << 30;

/// Most regions in [`Answer::Welcome`].
pub const MAX_REGIONS: usize = 512;

/// Each region's first page number is a multiple of this, so that no granule stands in two.
pub const REGION_ALIGN_PAGES: u32 = 512;

/// The prefix of the name of the thread that listens for the worker.
const LISTENER: &str = "ob-ctl-";

/// The abstract unix address (without its leading zero byte) that the shim of process `pid` listens
/// on. An abstract address belongs to the process that binds it first: `nonce` is drawn at random,
/// so that no process can have bound this one before.
#[must_use]
pub fn address(pid: u32, nonce: u32) -> String {
    format!("overbook-shim.{pid}.{nonce:08x}")
}

/// The name of the thread that listens at [`address`]: at most 15 bytes, as the kernel has it. The
/// worker reads it in `/proc`. No other process can name a thread of QEMU's.
#[must_use]
pub fn listener_name(nonce: u32) -> String {
    format!("{LISTENER}{nonce:08x}")
}

/// The address that a thread of process `pid` listens on, by its name; `None`: it is not the shim's
/// listener.
#[must_use]
pub fn address_of_listener(pid: u32, thread: &str) -> Option<String> {
    let nonce = u32::from_str_radix(thread.strip_prefix(LISTENER)?, 16).ok()?;
    (listener_name(nonce) == thread).then(|| address(pid, nonce))
}

/// So many granules of this size may be out of the guest's reach at a time: a thread of QEMU's may
/// have to wait until all are back, some 8 µs for one of 128 KiB, some 40 µs for one of 2 MiB.
#[must_use]
pub const fn most_revoked(granule_pages: u32) -> u32 {
    const GRANULES: u32 = 8_192;
    const PAGES: u32 = 1 << 20;
    let by_pages = PAGES / if granule_pages == 0 { 1 } else { granule_pages };
    if by_pages < GRANULES { by_pages } else { GRANULES }
}

/// What a worker asks of a shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The first message; answered with [`Answer::Welcome`] and the descriptor of the shared
    /// memory.
    Hello {
        /// The worker's [`VERSION`].
        version: u16,
    },
    /// Starts tracking, or changes how it is done. What is revoked at that moment is given back
    /// first if the granule changes. Answered with [`Answer::Done`].
    Track(Tracking),
    /// Takes these granules out of the guest's reach until their next touch. Answered with
    /// [`Answer::Done`] (how many are now revoked that were not before).
    Revoke {
        /// Numbers of granules; at most [`MAX_REVOKE`].
        granules: Vec<u32>,
    },
    /// Brings these granules within the guest's reach again; no trap tells of it. What of them is
    /// paged out is read, as long as the host has memory for it, and as much as a tenth of a second
    /// allows. Answered with [`Answer::Done`] (how many were out of reach).
    Recall {
        /// Numbers of granules; at most [`MAX_REVOKE`].
        granules: Vec<u32>,
    },
    /// Gives everything back and stops tracking. What is paged out is read, as long as the host has
    /// memory for it. Answered with [`Answer::Done`].
    Release,
    /// Where things stand; also the sign of life that keeps the shim from giving everything back.
    Status,
    /// From now on [`Content::Slot`] means a slot of this pool, whose descriptor, opened for
    /// reading, comes with the message. What was merged with another pool stays as it is. Answered
    /// with [`Answer::Done`].
    Pool {
        /// Pages that the pool has room for; at most [`MAX_SLOTS`].
        slots: u32,
    },
    /// Puts shared pages in the place of equal ones. A page that is not equal at that moment, that
    /// I/O holds, that is out of reach or no ordinary page of the guest's stays as it is. Answered
    /// with [`Answer::Merged`]; which pages share a slot now is to be seen in the page states.
    Merge {
        /// What to merge with what; at most [`MAX_MERGE`] of them, [`MAX_MERGE_PAGES`] in all.
        runs: Vec<Merge>,
    },
    /// Has the guest have copies of its own of these pages, as far as they are merged: no pool is
    /// needed for them any more. They are plain pages again; those that the guest had written stay
    /// mapped as they are, so they still count as merged in the page states, and so do all where
    /// the shim cannot put a copy in a page's place. Answered with [`Answer::Done`]: how many
    /// pages.
    Unshare {
        /// The first page's number.
        page: u32,
        /// How many; at most [`MAX_UNSHARE`].
        pages: u32,
    },
    /// What becomes of memory that the guest reports free, until the worker is gone: it is handed
    /// over to the kernel, which drops it when memory is short and the guest has not written to it
    /// (`MADV_FREE`), or it is discarded at once, as QEMU does by itself. Where a discard must be
    /// one (an incoming migration, memory that is locked or passed through) it is. Answered with
    /// [`Answer::Done`].
    HandOver {
        /// Whether it is handed over.
        lazily: bool,
    },
    /// Has the kernel drop these pages, as far as they are [`layout::PageState::Freed`] and the
    /// guest has not written to them since. Where there is swap, a page that was dropped and filled
    /// again would be swapped out: the worker looks before (`kpageflags`). Answered with
    /// [`Answer::Taken`]; none of the pages counts as freed any more.
    Take {
        /// Which pages; at most [`MAX_TAKE`] runs of [`MAX_TAKE_PAGES`] in all.
        runs: Vec<Pages>,
    },
    /// The guest has these pages in use again, whatever the page states say: none counts as freed
    /// any more. Answered with
    /// [`Answer::Done`]: how many did.
    Keep {
        /// Which pages, as for [`Self::Take`].
        runs: Vec<Pages>,
    },
    /// Has the kernel page out what these granules have out of the guest's reach, as many of them
    /// as a tenth of a second allows; what is within reach stays. Which pages are out is to be seen
    /// in the page states. Answered with [`Answer::Done`]: how many granules, from the first on, it
    /// came to.
    PageOut {
        /// Numbers of granules; at most [`MAX_REVOKE`].
        granules: Vec<u32>,
    },
}

/// How to track.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracking {
    /// Pages of 4 KiB per granule: a power of two, 1 to 512.
    pub granule_pages: u32,
    /// `Some`: every sampled granule is revoked at once, and again when it leaves a FIFO of this
    /// many accessible granules (MEB §3.4), at least [`MIN_HOT_SET`]. `None`: only what
    /// [`Request::Revoke`] names.
    pub hot_set: Option<u32>,
    /// Sampled are granules whose hash ([`layout::hash`]) is below this share of 2^32; `u32::MAX` =
    /// all.
    pub sample: u32,
    /// The fuse: past this many traps in one second everything is given back, and tracking pauses
    /// until the next [`Request::Track`]. At least 1.
    pub max_traps_per_s: u32,
}

/// Pages that follow each other and what they are thought to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// The first page's number.
    pub page: u32,
    /// How many.
    pub pages: u32,
    /// What they hold.
    pub content: Content,
}

impl Merge {
    /// What this page of the run is thought to hold.
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

/// What a page is thought to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Zeros: the page is dropped, and its place left empty.
    Zeros,
    /// What this slot of the pool holds, and the next page what the next one does.
    Slot(u32),
}

/// Pages that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// The first one's number.
    pub page: u32,
    /// How many.
    pub pages: u32,
}

/// What a shim answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Request::Hello`]; carries the shared memory's descriptor.
    Welcome {
        /// The shim's [`VERSION`].
        version: u16,
        /// Guest RAM, in the order of its page numbers.
        regions: Vec<Region>,
        /// Whether it can be tracked, and if not, why.
        state: State,
    },
    /// Done; how many granules, or pages, changed.
    Done {
        /// Granules, or pages.
        count: u32,
    },
    /// Not done, nothing changed.
    Refused(Refusal),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Merge`], in pages.
    Merged(Merged),
    /// To [`Request::Take`], in pages.
    Taken(Taken),
}

/// What a [`Request::Take`] came to, in pages that were freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// They are the host's now.
    pub taken: u32,
    /// The kernel had dropped them before.
    pub gone: u32,
    /// The guest has taken them back in use, or I/O holds them.
    pub kept: u32,
}

impl std::ops::AddAssign for Taken {
    fn add_assign(&mut self, more: Self) {
        self.taken += more.taken;
        self.gone += more.gone;
        self.kept += more.kept;
    }
}

/// What a [`Request::Merge`] came to, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// They share a slot now.
    pub shared: u32,
    /// They held zeros and are dropped.
    pub dropped: u32,
    /// They hold something else by now.
    pub different: u32,
    /// They could not be taken: I/O holds them, they are out of reach, or not there.
    pub kept: u32,
    /// QEMU may not have more mappings (`vm.max_map_count`).
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

/// A piece of guest RAM. Page numbers run through all regions; each region begins at a multiple of
/// 512, so that no granule stands in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Its first page's number.
    pub first_page: u32,
    /// How many pages of 4 KiB.
    pub pages: u32,
    /// Where it stands in QEMU's address space.
    pub address: u64,
}

/// What the shim is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Nothing is registered and no fault is taken.
    Off,
    /// Tracking.
    On(Tracking),
    /// Not now: QEMU needs its memory for itself, or the fuse blew; tried again by
    /// [`Request::Track`].
    Suspended {
        /// Why, for people.
        why: String,
    },
    /// Never on this VM.
    Unsupported {
        /// Why, for people.
        why: String,
    },
}

/// Where a shim stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// What it is doing.
    pub state: State,
    /// Grows with each change of the regions (hot-plugged RAM); [`Request::Hello`] again for the
    /// new ones.
    pub generation: u32,
}

/// Why a request was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The two sides are of different releases.
    #[error(
        "the shim speaks version {shim} of the protocol, the worker {worker}: restart the VM to load \
         the new shim"
    )]
    Version {
        /// The shim's.
        shim: u16,
        /// The worker's.
        worker: u16,
    },
    /// The packet could not be read.
    #[error("malformed message of {length} bytes")]
    Malformed {
        /// The packet's length.
        length: u32,
    },
    /// A value out of its range.
    #[error("{field}: {value}: {valid}")]
    Invalid {
        /// The field.
        field: String,
        /// What was sent.
        value: u64,
        /// What would do.
        valid: String,
    },
    /// Not merging now.
    #[error("not merging: {why}")]
    NotMerging {
        /// Why.
        why: String,
    },
    /// Not tracking now.
    #[error("not tracking: {why}")]
    NotTracking {
        /// Why.
        why: String,
    },
    /// Somebody else is connected; the shim closes this connection.
    #[error("process {pid} manages this VM already")]
    Busy {
        /// Its process.
        pid: u32,
    },
    /// The caller is neither root nor the user who runs QEMU by hand; the shim closes this
    /// connection.
    #[error(
        "user {uid} may not manage this VM: run as root, or as the user who started QEMU by hand"
    )]
    NotPermitted {
        /// The caller's.
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
    /// Not taking freed memory now.
    #[error("not taking: {why}")]
    NotTaking {
        /// Why.
        why: String,
    },
}

/// One fault as the ring carries it: 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    /// The granule that was touched (page number / granule pages).
    pub granule: u32,
    /// When, in microseconds of `CLOCK_MONOTONIC`, modulo 2^32.
    pub at_us: u32,
}
