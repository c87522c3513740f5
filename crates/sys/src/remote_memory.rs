//! Reads another process's memory.
//!
//! **Problem.** A search for identical pages must read the memory that QEMU has mapped, without
//! stopping it. **Idea.** `process_vm_readv` looks up many pages at a time and copies once, in
//! about half the time of `/proc/<pid>/mem`. It pins the pages that it reads, and the kernel
//! copies a page that its KSM has merged before it pins it. So if there are such pages,
//! `/proc/<pid>/mem` is read instead. A pid may be reused by another process, so a reading counts
//! only if the intended process still exists afterwards.
//!
//! **Limits.** Reading a hole fills it, so only pages listed by
//! [`Pagemap::private`](crate::memory_map::Pagemap::private) should be read; a page that is given
//! back in between may be filled with zeros. Reading a page that has just been revoked has the
//! effect of a guest's touch, and the reader waits until the page is served. The content may
//! change during the read, so the result is only a guess.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::process;
use crate::procfs::ProcError;

const WORD: usize = size_of::<u64>();
/// The most parts in one call (`IOV_MAX`).
const MOST_PARTS: usize = 1024;

/// The memory of one process.
#[derive(Debug)]
pub struct RemoteMemory {
    pid: libc::pid_t,
    process: OwnedFd,
    mem: File,
    /// The number of its pages that KSM has merged; `None` on a kernel without KSM.
    merging: Option<File>,
}

impl RemoteMemory {
    /// Opens the memory of a process; the caller needs the right to trace it.
    ///
    /// # Errors
    /// When the process is gone, or this is not permitted.
    pub fn of(pid: u32) -> Result<Self, ProcError> {
        let path = PathBuf::from(format!("/proc/{pid}/mem"));
        let failed = |error| ProcError::from_io(&path, error);
        let mem = File::open(&path).map_err(failed)?;
        let process = process::open_pidfd(pid).map_err(failed)?;
        let merging = File::open(format!("/proc/{pid}/ksm_merging_pages")).ok();
        let pid = libc::pid_t::try_from(pid).unwrap_or(libc::pid_t::MAX);
        Ok(Self { pid, process, mem, merging })
    }

    /// Fills `bytes` from this address on; returns the number of bytes read. If it is less,
    /// nothing is mapped from there on, or the process is gone.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> usize {
        if self.is_merged_by_the_kernel() {
            return self.read_original(address, bytes);
        }
        let read = in_parts(bytes, |at, rest| self.read_pinned(address + at, rest));
        if process::has_ended(&self.process) { 0 } else { read }
    }

    /// Reads the word at each of these addresses. The result ends before the first word that
    /// cannot be read.
    pub fn read_words(&self, addresses: &[u64]) -> Vec<u64> {
        let mut words = vec![0_u64; addresses.len()];
        let mut read = 0;
        if self.is_merged_by_the_kernel() {
            let mut bytes = [0; WORD];
            for (address, word) in addresses.iter().zip(&mut words) {
                if self.read_original(*address, &mut bytes) < WORD {
                    break;
                }
                *word = u64::from_ne_bytes(bytes);
                read += 1;
            }
        } else {
            for (addresses, words) in addresses.chunks(MOST_PARTS).zip(words.chunks_mut(MOST_PARTS))
            {
                let some = self.read_words_pinned(addresses, words);
                read += some;
                if some < addresses.len() {
                    break;
                }
            }
        }
        words.truncate(if process::has_ended(&self.process) { 0 } else { read });
        words
    }

    fn read_words_pinned(&self, addresses: &[u64], words: &mut [u64]) -> usize {
        let at =
            |address: &u64| libc::iovec { iov_base: *address as *mut libc::c_void, iov_len: WORD };
        let there: Vec<libc::iovec> = addresses.iter().map(at).collect();
        let here = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: size_of_val(words) };
        // SAFETY: only `words` is written; the kernel checks the addresses in the other process.
        let read = unsafe {
            libc::process_vm_readv(
                self.pid,
                &raw const here,
                1,
                there.as_ptr(),
                there.len() as libc::c_ulong,
                0,
            )
        };
        usize::try_from(read).unwrap_or(0) / WORD
    }

    /// Like [`Self::read`], but slower, and of the memory that the process had when this was
    /// opened, even if it has since executed another program.
    pub fn read_original(&self, address: u64, bytes: &mut [u8]) -> usize {
        in_parts(bytes, |at, rest| self.mem.read_at(rest, address + at).unwrap_or(0))
    }

    fn is_merged_by_the_kernel(&self) -> bool {
        let mut pages = [b'0'];
        // A read error means that the process is gone; it has no consequence here.
        let _ = self.merging.as_ref().map(|merging| merging.read_at(&mut pages, 0));
        pages != *b"0"
    }

    fn read_pinned(&self, address: u64, bytes: &mut [u8]) -> usize {
        let here = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes.len() };
        // SAFETY: only `bytes` is written; the kernel checks the addresses in the other process.
        let read =
            unsafe { libc::process_vm_readv(self.pid, &raw const here, 1, &raw const there, 1, 0) };
        usize::try_from(read).unwrap_or(0)
    }
}

/// Fills `bytes` by repeated calls that may each read less; returns the number of bytes.
fn in_parts(bytes: &mut [u8], read: impl Fn(u64, &mut [u8]) -> usize) -> usize {
    let mut done = 0;
    while done < bytes.len() {
        match read(done as u64, &mut bytes[done..]) {
            0 => break,
            part => done += part,
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::{PAGE_BYTES, Reserved};

    #[test]
    fn what_is_mapped_is_read_and_what_is_not_ends_it() {
        let written = vec![7_u8; 10_000];
        let memory = RemoteMemory::of(std::process::id()).unwrap();
        let mut bytes = vec![0; 10_000];
        assert_eq!(memory.read(written.as_ptr().addr() as u64, &mut bytes), 10_000);
        assert_eq!(bytes, written);
        let gone = Reserved::new(PAGE_BYTES).unwrap().range();
        assert_eq!(memory.read(gone.start, &mut bytes[..16]), 0);
    }

    #[test]
    fn words_are_read_until_one_is_not_there() {
        let written: Vec<u64> = (0..5_000).collect();
        let address = |at: usize| &raw const written[at] as u64;
        let memory = RemoteMemory::of(std::process::id()).unwrap();
        let mut addresses: Vec<u64> = (0..2_500).map(|at| address(2 * at)).collect();
        let words = memory.read_words(&addresses);
        assert!(words.iter().copied().eq((0..2_500).map(|at| 2 * at)), "{words:?}");
        addresses[1_500] = Reserved::new(PAGE_BYTES).unwrap().range().start;
        assert_eq!(memory.read_words(&addresses).len(), 1_500);
    }

    #[test]
    fn of_a_process_that_has_ended_nothing_is_read() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let text = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
        let start = text.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok());
        let memory = RemoteMemory::of(child.id()).unwrap();
        assert_eq!(memory.read(start.unwrap(), &mut [0]), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(memory.read(start.unwrap(), &mut [0]), 0);
    }

    #[test]
    fn a_process_that_is_not_there_has_none() {
        assert!(matches!(RemoteMemory::of(u32::MAX >> 2), Err(ProcError::Gone { .. })));
    }
}
