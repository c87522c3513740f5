//! Features of memory, each tried on two pages of our own.

use rustix::io::Errno;
use rustix::mm::Advice;

use crate::memory_map::{PAGE_BYTES, Pagemap, Range, Reserved};
use crate::userfaultfd::{OpenError, Userfaultfd};

const MARK: u8 = 7;

pub(super) fn userfaultfd() -> Result<String, String> {
    match Userfaultfd::open() {
        // Without the move it is still a full userfaultfd; the next feature covers the move.
        Ok(_) | Err(OpenError::NoMove) => Ok("full: the kernel's own accesses trap too".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Moves a page from one place to another and checks that its content came along.
pub(super) fn uffdio_move() -> Result<String, String> {
    let uffd = Userfaultfd::open().map_err(|error| error.to_string())?;
    let failed = |call: &'static str| move |errno: Errno| format!("{call}: {errno}");
    let from = marked()?;
    let to = Reserved::new(PAGE_BYTES).map_err(failed("mmap"))?;
    let page = Range { start: to.range().start, len: PAGE_BYTES };
    // SAFETY: only this function touches the page, and only after the move has put something
    // there.
    unsafe { uffd.register(page) }.map_err(failed("UFFDIO_REGISTER"))?;
    // SAFETY: no code relies on the content at the source.
    let moved = unsafe { uffd.move_pages(page.start, from.range().start, PAGE_BYTES) };
    if let Some(errno) = moved.stopped {
        return Err(format!("UFFDIO_MOVE: {errno}"));
    }
    // SAFETY: the page is ours, mapped, and present since the move.
    let mark = unsafe { at(page.start).read_volatile() };
    if mark == MARK {
        Ok("a page moved with its content".to_owned())
    } else {
        Err(format!("UFFDIO_MOVE: the content did not come along ({mark} instead of {MARK})"))
    }
}

pub(super) fn pagemap_scan() -> Result<String, String> {
    let memory = marked()?;
    let pagemap = Pagemap::open().map_err(|error| format!("/proc/self/pagemap: {error}"))?;
    match pagemap.populated(memory.range()) {
        Ok(1) => Ok("one page of two was found to be there".to_owned()),
        Ok(found) => Err(format!("PAGEMAP_SCAN found {found} pages instead of 1")),
        Err(Errno::NOTTY) => Err("PAGEMAP_SCAN: Linux 6.7 or later is needed".to_owned()),
        Err(errno) => Err(format!("PAGEMAP_SCAN: {errno}")),
    }
}

pub(super) fn advice(advice: Advice) -> Result<String, String> {
    let memory = marked()?;
    // SAFETY: no code relies on the content.
    match unsafe { memory.advise(advice) } {
        Ok(()) => Ok("accepted".to_owned()),
        Err(Errno::INVAL) => Err("the kernel does not know it".to_owned()),
        Err(errno) => Err(errno.to_string()),
    }
}

/// Two pages; the first has content.
fn marked() -> Result<Reserved, String> {
    let memory = Reserved::new(2 * PAGE_BYTES).map_err(|errno| format!("mmap: {errno}"))?;
    // A huge page would make both pages present. A kernel without huge pages refuses the advice,
    // which is fine.
    // SAFETY: the advice discards nothing.
    let _ = unsafe { memory.advise(Advice::LinuxNoHugepage) };
    // SAFETY: the page is ours and mapped for writing.
    unsafe { at(memory.range().start).write_volatile(MARK) };
    Ok(memory)
}

/// A pointer to memory that the kernel mapped for us; no Rust object is there.
fn at(address: u64) -> *mut u8 {
    // The addresses came from pointers of this process, so they fit.
    #[allow(clippy::cast_possible_truncation)]
    std::ptr::with_exposed_provenance_mut(address as usize)
}
