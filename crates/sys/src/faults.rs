//! The single place through which the shim makes its kernel calls, where a test can inject
//! faults.
//!
//! **Problem.** The kernel refuses a call that moves a guest's memory once in a million times.
//! The shim's reaction must be right, and tested. A preloaded library that replaces functions of
//! the C library does not see these calls: they go to the kernel directly.
//!
//! **Idea.** One of the functions below makes each call, given its kind and its memory. In a
//! release build they do nothing else. With the feature `faults`, a file that a test has also
//! mapped selects the calls that are refused, done in part, done and denied, or held until the
//! test releases them. The plan can change while the process runs.
//!
//! **Cost**: none without the feature, because the functions are inlined.

use crate::userfaultfd::Range;

#[cfg(feature = "faults")]
mod plan;
#[cfg(not(feature = "faults"))]
mod shipped;

#[cfg(feature = "faults")]
pub use plan::{Fault, Faults, How, MOST_FAULTS, PLAN_ENV, call, outcome};
#[cfg(feature = "faults")]
pub(crate) use plan::{over, progress, through};
#[cfg(not(feature = "faults"))]
pub use shipped::{call, outcome};
#[cfg(not(feature = "faults"))]
pub(crate) use shipped::{over, progress, through};

/// The range of a call without memory, or whose memory is not known yet.
pub const NOWHERE: Range = Range { start: 0, len: 0 };

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident,)*) => {
        /// A kernel call, by its purpose.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call {
            $($(#[$doc])* $kind,)*
        }

        impl Call {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];
        }
    };
}

kinds! {
    /// `userfaultfd`, or its device.
    Open,
    /// `UFFDIO_API`.
    Api,
    /// `UFFDIO_REGISTER` for missing pages.
    Register,
    /// `UFFDIO_REGISTER` for writes.
    RegisterWrites,
    /// `UFFDIO_UNREGISTER`.
    Unregister,
    /// `UFFDIO_MOVE`.
    Move,
    /// `UFFDIO_COPY`.
    Copy,
    /// `UFFDIO_ZEROPAGE`.
    Zero,
    /// `UFFDIO_WAKE`.
    Wake,
    /// `UFFDIO_WRITEPROTECT`, on.
    Protect,
    /// `UFFDIO_WRITEPROTECT`, off.
    Unprotect,
    /// `read` of the userfaultfd.
    ReadFaults,
    /// `poll` of the userfaultfd.
    Poll,
    /// `PAGEMAP_SCAN`.
    Scan,
    /// `open` of a file of `/proc` about this process's memory.
    OpenProc,
    /// `mmap` at an address that the kernel chooses.
    Map,
    /// `mmap` of fresh memory over an existing mapping.
    MapFresh,
    /// `mmap` of fresh memory into a hole.
    MapIntoHole,
    /// `mmap` of a pool's pages over an existing mapping.
    MapPool,
    /// `mremap` over an existing mapping.
    Remap,
    /// `munmap`.
    Unmap,
    /// `MADV_DONTNEED`.
    DontNeed,
    /// `MADV_PAGEOUT`.
    PageOut,
    /// `MADV_POPULATE_READ`.
    PopulateRead,
    /// `MADV_POPULATE_WRITE`.
    PopulateWrite,
    /// Any other `madvise`, which changes only the treatment of the memory.
    Advise,
    /// The process's own discarding `madvise`, or a discard along with it.
    Discard,
    /// The same for `MADV_FREE`.
    HandOver,
    /// `PROCMAP_QUERY`.
    MappingAt,
    /// `msync`, used to test for a mapping.
    IsMapped,
    /// `get_mempolicy`.
    Policy,
    /// `pread` of a pool.
    ReadPool,
    /// `memfd_create`, and the calls that prepare the file for sharing.
    Memfd,
    /// `eventfd`.
    Eventfd,
}
