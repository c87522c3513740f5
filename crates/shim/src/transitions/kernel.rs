//! The kernel's operations that the steps use: of the running kernel, or of a model.

use protocol::Content;
use rustix::io::Errno;
use sys::memory_map::{PageSet, Range};
use sys::userfaultfd::Progress;

use crate::time::Nanos;

/// The kernel's operations that the steps use.
pub(crate) trait Kernel {
    /// `UFFDIO_MOVE`; see `Userfaultfd::move_pages`.
    ///
    /// # Safety
    /// As said there.
    unsafe fn move_pages(&self, dst: u64, src: u64, len: u64) -> Progress;

    /// `UFFDIO_COPY`; see `Userfaultfd::copy_pages`.
    ///
    /// # Safety
    /// As said there.
    unsafe fn copy_pages(&self, dst: u64, src: u64, len: u64) -> Progress;

    /// Discards memory of the shim: staging or buffer.
    ///
    /// # Safety
    /// The content is not needed.
    unsafe fn discard(&self, ours: Range) -> Result<(), Errno>;

    /// The pages that have content, in memory or swapped out. At most [`PageSet::MOST`] pages.
    fn populated(&self, range: Range) -> Result<PageSet, Errno>;

    /// The time, for the limit of a wait.
    fn now(&self) -> Nanos;

    /// Lets some time pass before a step tries again what the kernel was busy with; `before` is
    /// the number of pauses of this step so far.
    fn pause(&self, before: u32);

    /// Records that a step has tried to move `home` back, and that the pages `away` are still
    /// away. Ends QEMU when a page has been late for too long.
    fn tried(&self, home: Range, away: &PageSet);

    /// Ends QEMU.
    fn end(&self, what: &str, errno: Errno) -> !;
}

/// A type that offers more operations than a [`Kernel`], based on one.
pub(crate) trait HasKernel {
    /// The kernel that it uses.
    type Kernel: Kernel;

    fn kernel(&self) -> &Self::Kernel;
}

/// The additional operations for replacing pages.
pub(crate) trait Fresh: HasKernel {
    /// Maps untouched memory that traps over `home`; returns whether it is mapped. If not,
    /// nothing has changed.
    ///
    /// # Safety
    /// The old content is in the buffer.
    unsafe fn map_fresh(&self, home: Range) -> bool;
}

/// The additional operations for merging.
pub(crate) trait Mapper: HasKernel {
    /// Compares the readable pages of `aside` with `content`: one verdict each.
    fn judge(&self, aside: Range, content: Content, verdicts: &mut [PageComparison]);

    /// Maps slots of the pool over `home`, and looks them up; returns whether they are mapped. If
    /// not, memory that traps is still there, or again.
    ///
    /// # Safety
    /// The old content is in the buffer.
    unsafe fn map_slots(&self, slot: u32, home: Range) -> bool;
}

/// The result of comparing a page that is in the buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PageComparison {
    /// The page is not there, or cannot be read.
    #[default]
    Absent,
    Different,
    Same,
}
