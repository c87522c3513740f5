//! What the steps ask of the kernel: the real one, or a model.

use protocol::Content;
use rustix::io::Errno;
use sys::memory_map::{PageSet, Range};
use sys::userfaultfd::Progress;

use crate::time::Nanos;

/// What the steps ask of the kernel.
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

    /// Discards memory of ours: staging or buffer.
    ///
    /// # Safety
    /// Nobody needs what it holds.
    unsafe fn discard(&self, ours: Range) -> Result<(), Errno>;

    /// Which pages have content, in memory or swapped out. At most [`PageSet::MOST`] pages.
    fn populated(&self, range: Range) -> Result<PageSet, Errno>;

    /// Which pages are swapped out. At most [`PageSet::MOST`] pages.
    fn swapped(&self, range: Range) -> Result<PageSet, Errno>;

    /// The time, as far as waiting goes.
    fn now(&self) -> Nanos;

    /// Lets others run for a moment.
    fn pause(&self);

    /// A step has tried to bring `home` back, and these pages of it are still away. Ends QEMU when
    /// that has gone on for too long.
    fn tried(&self, home: Range, away: &PageSet);

    /// Ends QEMU.
    fn end(&self, what: &str, errno: Errno) -> !;
}

/// Who asks more than a [`Kernel`] is asked, on one.
pub(crate) trait HasKernel {
    /// That one.
    type Kernel: Kernel;

    fn kernel(&self) -> &Self::Kernel;
}

/// What replacing pages asks beside.
pub(crate) trait Fresh: HasKernel {
    /// Maps memory that nobody has touched and that traps over `home`; answers whether it is
    /// mapped. If not, nothing has changed.
    ///
    /// # Safety
    /// What was there is aside.
    unsafe fn map_fresh(&self, home: Range) -> bool;
}

/// What merging asks beside.
pub(crate) trait Mapper: HasKernel {
    /// What the pages of `aside` that can be read hold: one verdict each.
    fn judge(&self, aside: Range, content: Content, verdicts: &mut [Verdict]);

    /// Maps slots of the pool over `home`, and looks them up; answers whether they are mapped. If
    /// not, memory that traps is there still, or again.
    ///
    /// # Safety
    /// What was there is aside.
    unsafe fn map_slots(&self, slot: u32, home: Range) -> bool;
}

/// What was found of a page that is aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is not there, or cannot be read.
    #[default]
    Absent,
    Different,
    Same,
}
