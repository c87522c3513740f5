use std::mem::{offset_of, size_of};

use linux_raw_sys::{general as kernel, ioctl as requests};

use super::*;
use crate::memory_map::{Over, PAGE_BYTES, Pagemap, Reserved, Untouched};

fn at(range: Range) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(range.start).unwrap())
}

fn two_pages(uffd: &Userfaultfd) -> (Range, Range, Reserved) {
    let memory = Reserved::new(2 * PAGE_BYTES).unwrap();
    let guest = Range { len: PAGE_BYTES, ..memory.range() };
    let staging = Range { start: guest.start + PAGE_BYTES, ..guest };
    // SAFETY: fresh memory of ours; it is touched only when its page exists, or with a reader.
    unsafe {
        memory.advise(rustix::mm::Advice::LinuxNoHugepage).unwrap();
        at(guest).write(7);
        uffd.register(memory.range()).unwrap();
    }
    (guest, staging, memory)
}

#[test]
fn the_structures_are_the_kernels() {
    assert_eq!(size_of::<ApiArg>(), size_of::<kernel::uffdio_api>());
    assert_eq!(size_of::<Range>(), size_of::<kernel::uffdio_range>());
    assert_eq!(size_of::<RegisterArg>(), size_of::<kernel::uffdio_register>());
    assert_eq!(size_of::<CopyArg>(), size_of::<kernel::uffdio_copy>());
    assert_eq!(size_of::<CopyArg>(), size_of::<kernel::uffdio_move>());
    assert_eq!(size_of::<ZeroArg>(), size_of::<kernel::uffdio_zeropage>());
    assert_eq!(size_of::<ProtectArg>(), size_of::<kernel::uffdio_writeprotect>());
    assert_eq!(size_of::<Message>(), size_of::<kernel::uffd_msg>());
    assert_eq!(offset_of!(CopyArg, done), offset_of!(kernel::uffdio_move, move_));
    assert_eq!(offset_of!(RegisterArg, mode), offset_of!(kernel::uffdio_register, mode));
    assert_eq!(offset_of!(Message, flags), offset_of!(kernel::uffd_msg, arg));
}

#[test]
fn the_requests_are_the_kernels() {
    assert_eq!(REGISTER, requests::UFFDIO_REGISTER);
    assert_eq!(UNREGISTER, requests::UFFDIO_UNREGISTER);
    assert_eq!(WAKE, requests::UFFDIO_WAKE);
    assert_eq!(COPY, requests::UFFDIO_COPY);
    assert_eq!(ZEROPAGE, requests::UFFDIO_ZEROPAGE);
    assert_eq!(WRITEPROTECT, requests::UFFDIO_WRITEPROTECT);
    assert_eq!(API, requests::UFFDIO_API);
    assert_eq!(MOVE & 0xFF, kernel::_UFFDIO_MOVE);
    assert_eq!(FEATURE_MOVE, kernel::UFFD_FEATURE_MOVE.into());
    assert_eq!(FEATURE_WRITES, kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP.into());
    assert_eq!(FEATURE_EVENT_REMAP, kernel::UFFD_FEATURE_EVENT_REMAP.into());
    assert_eq!(FEATURE_WRITES_TO_FILES, kernel::UFFD_FEATURE_WP_HUGETLBFS_SHMEM.into());
    assert_eq!(EVENT_PAGEFAULT, u8::try_from(kernel::UFFD_EVENT_PAGEFAULT).unwrap());
}

#[test]
fn a_page_that_was_moved_out_traps_and_comes_back_with_its_content() {
    let uffd = Userfaultfd::open().unwrap();
    let (guest, staging, _memory) = two_pages(&uffd);
    // SAFETY: memory of this test, which no other code reads.
    let moved = unsafe { uffd.move_pages(staging.start, guest.start, PAGE_BYTES) };
    assert_eq!(moved, Progress { bytes: PAGE_BYTES, stopped: None });
    std::thread::scope(|scope| {
        // SAFETY: the page is there again when the read ends.
        let reader = scope.spawn(move || unsafe { at(guest).read_volatile() });
        let mut faults = [PageFault::default(); MAX_FAULTS];
        assert!(uffd.wait(None));
        assert_eq!(uffd.read_faults(&mut faults), Ok(1));
        assert_eq!(uffd.read_faults(&mut [PageFault::default(); MAX_FAULTS]), Err(Errno::AGAIN));
        assert_eq!(faults[0].address & !(PAGE_BYTES - 1), guest.start);
        assert!(!faults[0].is_protected);
        // SAFETY: back to where it was.
        let moved = unsafe { uffd.move_pages(guest.start, staging.start, PAGE_BYTES) };
        assert_eq!(moved.stopped, None);
        uffd.wake(guest).unwrap();
        assert_eq!(reader.join().unwrap(), 7);
    });
}

#[test]
fn holes_move_as_holes_and_a_page_that_is_there_is_not_overwritten() {
    let uffd = Userfaultfd::open().unwrap();
    let (guest, staging, memory) = two_pages(&uffd);
    // SAFETY: memory of this test.
    unsafe {
        let hole = uffd.move_pages(guest.start, staging.start, PAGE_BYTES);
        assert_eq!(hole.stopped, Some(Errno::EXIST));
        let zeros = uffd.zero_pages(guest);
        assert_eq!(zeros, Progress { bytes: 0, stopped: Some(Errno::EXIST) });
        uffd.move_pages(staging.start, guest.start, PAGE_BYTES);
        let again = uffd.move_pages(staging.start, guest.start, PAGE_BYTES);
        assert_eq!(again.stopped, Some(Errno::EXIST));
    }
    assert_eq!(Pagemap::open().unwrap().populated(memory.range()), Ok(1));
}

#[test]
fn a_copy_and_zeros_fill_what_is_missing() {
    let uffd = Userfaultfd::open().unwrap();
    let (guest, staging, _memory) = two_pages(&uffd);
    // SAFETY: memory of this test.
    unsafe {
        assert_eq!(uffd.copy_pages(staging.start, guest.start, PAGE_BYTES).stopped, None);
        assert_eq!(at(staging).read(), 7);
        advise_away(staging);
        assert_eq!(uffd.zero_pages(staging).stopped, None);
        assert_eq!(at(staging).read(), 0);
        uffd.unregister(guest).unwrap();
        assert_eq!(at(guest).read(), 7);
    }
}

unsafe fn advise_away(range: Range) {
    // SAFETY: the test gives the page up.
    unsafe { crate::memory_map::advise(range, rustix::mm::Advice::LinuxDontNeed) }.unwrap();
}

/// A memory-backed file of two pages, mapped copy-on-write; the first page was written, the
/// second read.
fn two_pages_of_a_file() -> (Range, Reserved) {
    let memory = Reserved::new(2 * PAGE_BYTES).unwrap();
    let file = rustix::fs::memfd_create("overbook-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, &[5; 8192]).unwrap();
    let over = Over { range: memory.range(), reserve: true };
    // SAFETY: fresh memory of ours.
    unsafe {
        over.map_copy(file.as_fd(), 0).unwrap();
        at(over.range).write(6);
        at(over.range).add(4096).read_volatile();
    }
    (over.range, memory)
}

#[test]
fn pages_of_a_file_can_be_protected_and_who_has_written_before_is_known() {
    let (uffd, pagemap) = (Userfaultfd::open().unwrap(), Pagemap::open().unwrap());
    let (range, _memory) = two_pages_of_a_file();
    let second = Range { start: range.start + PAGE_BYTES, len: PAGE_BYTES };
    assert!(uffd.can_replace(), "the machine that tests is new enough");
    // SAFETY: memory of this test, which serves.
    unsafe {
        uffd.register_writes(range).unwrap();
        uffd.protect(range).unwrap();
    }
    assert_eq!(pagemap.of_file(range), Ok(vec![second]));
    assert_eq!(pagemap.of_file_around(range, second.start + 9), Ok(Some(second)));
    assert_eq!(pagemap.of_file_around(range, range.start), Ok(None), "it was written before");
    std::thread::scope(|scope| {
        // SAFETY: memory of this test.
        let writer = scope.spawn(move || unsafe { at(second).write_volatile(7) });
        assert!(uffd.wait(None));
        // SAFETY: reading does not wait.
        assert_eq!(unsafe { at(second).read_volatile() }, 5);
        assert!(!writer.is_finished());
        let mut faults = [PageFault::default(); MAX_FAULTS];
        assert_eq!(uffd.read_faults(&mut faults), Ok(1));
        assert_eq!(faults[0].address & !(PAGE_BYTES - 1), second.start);
        assert!(faults[0].is_protected);
        // SAFETY: it may be written.
        unsafe { uffd.unprotect(second).unwrap() };
    });
    // SAFETY: memory of this test; everything is in its place.
    unsafe {
        assert_eq!(at(second).read(), 7);
        uffd.unregister(range).unwrap();
        at(range).write(8);
        assert_eq!((at(range).read(), at(second).read()), (8, 7), "nothing traps any more");
    }
}

#[test]
fn untouched_memory_takes_a_place_and_is_registered_there_from_the_first_moment() {
    let uffd = Userfaultfd::open().unwrap();
    let untouched = Untouched::new(2 * PAGE_BYTES, true).unwrap();
    let (range, _memory) = two_pages_of_a_file();
    let first = Range { len: PAGE_BYTES, ..range };
    // SAFETY: memory of this test, which serves.
    unsafe { uffd.register(untouched.range()).unwrap() };
    std::thread::scope(|scope| {
        // SAFETY: the loop below reads.
        let mover = scope.spawn(|| unsafe { untouched.map_over(first) });
        while !mover.is_finished() {
            assert_eq!(uffd.read_faults(&mut [PageFault::default(); MAX_FAULTS]).unwrap_or(0), 0);
        }
        assert_eq!(mover.join().unwrap(), Ok(()));
        // SAFETY: the page is there when the read ends.
        let reader = scope.spawn(move || unsafe { at(first).read_volatile() });
        assert!(uffd.wait(None));
        // SAFETY: registered; the second page has the content for the first.
        let copied = unsafe { uffd.copy_pages(first.start, first.start + PAGE_BYTES, PAGE_BYTES) };
        assert_eq!(copied.stopped, None);
        uffd.wake(first).unwrap();
        assert_eq!(reader.join().unwrap(), 5);
    });
    assert_eq!(Pagemap::open().unwrap().populated(untouched.range()), Ok(0), "as it was");
    let over = Over { range: first, reserve: true };
    assert_eq!(over.map_fresh_into_hole(), Err(Errno::EXIST));
}
