//! Another process's memory, to read.
//!
//! **Problem.** Who looks for identical pages must read what QEMU has mapped, without stopping it.
//! **Idea.** `/proc/<pid>/mem`. **Limits.** Reading a hole fills it: only what
//! [`Pagemap::private`](crate::memory_map::Pagemap::private) lists is to be read, and a page that is
//! given back in between may be filled with zeros; a page that is out of the guest's reach is not read, for the
//! kernel lets nobody wait there for a userfaultfd ([`RemoteMemory::touch`] does). What is read may change while it is read: it is a guess at a content.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::procfs::ProcError;

/// The memory of one process.
#[derive(Debug)]
pub struct RemoteMemory {
    mem: File,
    pid: libc::pid_t,
}

impl RemoteMemory {
    /// Opens it: permitted to whoever may trace the process.
    ///
    /// # Errors
    /// When it is gone, or not permitted.
    pub fn of(pid: u32) -> Result<Self, ProcError> {
        let path = PathBuf::from(format!("/proc/{pid}/mem"));
        let mem = File::open(&path).map_err(|error| ProcError::from_io(&path, error))?;
        Ok(Self { mem, pid: libc::pid_t::try_from(pid).unwrap_or(libc::pid_t::MAX) })
    }

    /// Touches a page as the guest would: one that is out of its reach is within it afterwards. Waits for whoever
    /// brings it back; `false`: nothing is there, or the process is gone.
    #[must_use]
    pub fn touch(&self, address: u64) -> bool {
        let mut byte = 0_u8;
        let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: 1 };
        // SAFETY: one byte is written, to `byte`; what lies in the other process the kernel checks.
        unsafe { libc::process_vm_readv(self.pid, &raw const here, 1, &raw const there, 1, 0) == 1 }
    }

    /// Fills `bytes` from this address on; answers how many could be read. Fewer: from there on nothing
    /// is mapped, or the process is gone.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            match self.mem.read_at(&mut bytes[done..], address + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        done
    }
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
    fn a_process_that_is_not_there_has_none() {
        assert!(matches!(RemoteMemory::of(u32::MAX >> 2), Err(ProcError::Gone { .. })));
    }
}
