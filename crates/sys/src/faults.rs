//! The one place through which each kernel call goes that the shim makes: where a test can have it
//! fail.
//!
//! **Problem.** The kernel refuses a call that moves a guest's memory once in a million times. What
//! the shim does then must be right, and be seen to be. A library that stands before the C
//! library's functions does not see these calls: they go to the kernel directly.
//!
//! **Idea.** Each call is made by one of the functions below, with what it does and the memory that
//! it concerns. As shipped they do nothing else. With the feature `faults` a file that a test has
//! mapped, too, says which calls are refused, done by half, done and denied, or held until the test
//! lets them go on: the plan can change while the process runs.
//!
//! **Cost**: none without the feature: the functions vanish.

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

/// What concerns no memory, or not yet.
pub const NOWHERE: Range = Range { start: 0, len: 0 };

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident,)*) => {
        /// A kernel call, by what it does.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call {
            $($(#[$doc])* $kind,)*
        }

        impl Call {
            /// All of them.
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
    /// `mmap` where the kernel chooses.
    Map,
    /// `mmap` of fresh memory over something.
    MapFresh,
    /// `mmap` of fresh memory where nothing is.
    MapIntoHole,
    /// `mmap` of a pool's pages over something.
    MapPool,
    /// `mremap` over something.
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
    /// Any other `madvise`: nothing changes but how memory is treated.
    Advise,
    /// The process's own `madvise` that discards, or what is discarded along with it.
    Discard,
    /// The same, handed over (`MADV_FREE`).
    HandOver,
    /// `PROCMAP_QUERY`.
    MappingAt,
    /// `msync`: whether something is mapped.
    IsMapped,
    /// `get_mempolicy`.
    Policy,
    /// `pread` of a pool.
    ReadPool,
    /// `memfd_create`, and what makes it fit to be shared.
    Memfd,
    /// `eventfd`.
    Eventfd,
}
