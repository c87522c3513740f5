//! The kernel's view of this process's mappings: where one begins and ends, and its NUMA policy.
//!
//! `PROCMAP_QUERY` (Linux 6.11) answers for one address in a microsecond; reading all of
//! `/proc/self/maps` takes 0.4 µs for each mapping. Only opening the file allocates.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::MsyncFlags;

use crate::faults::{self, Call, NOWHERE};
use crate::memory_map::{PAGE_BYTES, Range, length, pointer};

const QUERY: Opcode = opcode::read_write::<QueryArg>(b'f', 17);
const COVERING_OR_NEXT: u64 = 0x10;

/// `struct procmap_query`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct QueryArg {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    protection: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_sizes: [u32; 2],
    names: [u64; 2],
}

/// The mappings of this process, queried one by one.
#[derive(Debug)]
pub struct Mappings(File);

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub range: Range,
    /// Whether it maps no file.
    pub is_anonymous: bool,
}

impl Mappings {
    /// Opens the mappings.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn open() -> std::io::Result<Self> {
        let open = || {
            File::open("/proc/self/maps")
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        };
        Ok(Self(faults::call(Call::OpenProc, NOWHERE, open)?))
    }

    /// The mapping at `address`, or else the next one. Does not allocate.
    ///
    /// # Errors
    /// The kernel's: `ENOENT` if there is none, `ENOTTY` before Linux 6.11.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn at(&self, address: u64) -> Result<Mapping, Errno> {
        let mut arg = QueryArg {
            size: size_of::<QueryArg>() as u64,
            flags: COVERING_OR_NEXT,
            address,
            ..QueryArg::default()
        };
        // SAFETY: the structure is the one of this request, and asks for no names.
        let ask = || unsafe { ioctl(&self.0, Updater::<QUERY, _>::new(&mut arg)) };
        faults::call(Call::MappingAt, Range { start: address, len: PAGE_BYTES }, ask)?;
        let range = Range { start: arg.start, len: arg.end.saturating_sub(arg.start) };
        Ok(Mapping { range, is_anonymous: arg.inode == 0 })
    }
}

impl AsFd for Mappings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether memory of this process has a NUMA policy of its own (`mbind`). Does not allocate.
#[must_use]
#[cfg_attr(feature = "faults", track_caller)]
pub fn has_policy(address: u64) -> bool {
    const OF_ADDRESS: libc::c_ulong = 2;
    let mut mode: libc::c_int = 0;
    let none = std::ptr::null_mut::<libc::c_ulong>();
    let mut ask = || {
        // SAFETY: the kernel writes the mode, but no nodes, because there is no room for them.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                none,
                0_usize,
                address,
                OF_ADDRESS,
            )
        };
        // The kernel's exact error does not matter.
        if failed == 0 { Ok(()) } else { Err(Errno::FAULT) }
    };
    let page = Range { start: address, len: PAGE_BYTES };
    faults::call(Call::Policy, page, &mut ask).is_ok() && mode != libc::MPOL_DEFAULT
}

/// Whether all of a range of this process is mapped, by any code. Does not allocate.
#[must_use]
#[cfg_attr(feature = "faults", track_caller)]
pub fn is_mapped(range: Range) -> bool {
    // SAFETY: it starts writeback of shared file mappings, which the kernel does at some time
    // anyway.
    let tell = || unsafe { rustix::mm::msync(pointer(range), length(range), MsyncFlags::ASYNC) };
    faults::call(Call::IsMapped, range, tell).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::{Over, PAGE_LEN, Reserved, unmap};

    #[test]
    fn memory_that_is_bound_to_a_node_has_a_policy() {
        let memory = Reserved::new(PAGE_BYTES).unwrap();
        assert!(!has_policy(memory.range().start));
        let (start, nodes) = (memory.range().start, 1_u64);
        // SAFETY: memory of ours.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                start,
                PAGE_LEN,
                libc::MPOL_BIND,
                &raw const nodes,
                64,
                0,
            )
        };
        assert_eq!((failed == 0), has_policy(start), "unless there are no nodes to be bound to");
    }

    #[test]
    fn mappings_are_found_by_address() {
        let memory = Reserved::new(2 * PAGE_BYTES).unwrap();
        let second = Range { start: memory.range().start + PAGE_BYTES, len: PAGE_BYTES };
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: fresh memory of ours.
        unsafe { Over { range: second, reserve: true }.map_copy(file.as_fd(), 0) }.unwrap();
        let mappings = Mappings::open().unwrap();
        let anonymous = mappings.at(second.start - 1).unwrap();
        assert!(
            anonymous.is_anonymous && anonymous.range.start + anonymous.range.len == second.start
        );
        let of_file = Mapping { range: second, is_anonymous: false };
        assert_eq!(mappings.at(second.start + 7), Ok(of_file));
        let whole = memory.range();
        assert!(is_mapped(whole));
        // SAFETY: memory of ours.
        unsafe { unmap(second) }.unwrap();
        assert!(!is_mapped(whole));
        // SAFETY: it is a hole, and ours.
        unsafe { Over { range: second, reserve: true }.map_fresh() }.unwrap();
        assert_eq!(mappings.at(u64::MAX), Err(Errno::NOENT));
        assert!(mappings.at(0).unwrap().range.start > 0);
    }

    #[test]
    fn the_kernel_and_we_mean_the_same_structure() {
        assert_eq!(size_of::<QueryArg>(), 104, "procmap_query, which linux-raw-sys has not");
    }
}
