//! Makes a table from the memory of a running guest.
//!
//! Sometimes no image is available, or most of a guest's code is generated while it boots (its
//! kernel's). A trusted guest then best predicts the pages of others like it. The pages include
//! QEMU's own memory, which matches nothing in a guest.

use std::path::PathBuf;

use pages::offline::{Builder, PAGE_LEN, Sampling, Table};
use sys::{frames, remote_memory::RemoteMemory, slab::Slab};

use super::{OfflineError, Work};

/// All resident pages of this QEMU process. Only root may read them.
pub fn capture(pid: u32, sampling: Sampling) -> Result<(Table, Work), OfflineError> {
    let failed = |error: &dyn std::fmt::Display| OfflineError::Source {
        path: PathBuf::from(format!("/proc/{pid}")),
        what: error.to_string(),
    };
    let memory = RemoteMemory::of(pid).map_err(|error| failed(&error))?;
    let pages = frames::pages_of_guest(pid).map_err(|error| failed(&error))?;
    let mut builder = Builder::new(sampling);
    let mut work = Work::default();
    // The buffer is not on the stack, so that no core dump contains it.
    let mut slab = Slab::new(PAGE_LEN).map_err(|error| failed(&error))?;
    let page = &mut slab.bytes_mut().as_chunks_mut().0[0];
    for (address, _) in pages {
        // The guest keeps running: pages that it has freed meanwhile can no longer be read.
        if memory.read(address, page) == PAGE_LEN {
            builder.add(page, false)?;
            work.bytes += PAGE_LEN as u64;
        }
    }
    let table = builder.finish();
    if table.records().is_empty() {
        return Err(failed(&"it has no page with content in memory"));
    }
    Ok((table, work))
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn what_a_process_has_in_memory_is_in_its_table() {
        let mine = std::hint::black_box(vec![0x5a_u8; 3 * PAGE_LEN]);
        let pid = std::process::id();
        let pages = frames::pages_of_guest(pid);
        let Some(_) = requires(Requirement::Frames, pages) else { return };
        let (table, work) = capture(pid, Sampling::default()).unwrap();
        let whole: [u8; PAGE_LEN] = [0x5a; PAGE_LEN];
        let hash = pages::offline::hash(&whole);
        let found = table.records().iter().find(|record| record.hash == hash);
        assert!(found.is_some_and(|record| record.count >= 2), "of {} pages", work.bytes / 4096);
        drop(mine);
        assert!(capture(u32::MAX >> 2, Sampling::default()).is_err());
    }
}
