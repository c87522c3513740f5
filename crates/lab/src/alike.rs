//! Pages of running guests, by their content and by the frame behind them: pages that could be
//! shared, and pages that are.

use std::collections::{HashMap, HashSet};
use std::io;

use pages::offline::{self, Page, Sampled, Sampling, TableRef};
use sys::frames;
use sys::memory_map::PAGE_LEN;
use sys::remote_memory::RemoteMemory;

/// A page that is not all zeros.
pub struct GuestPage {
    /// Its address in the QEMU process.
    pub address: u64,
    /// The frame behind it.
    pub frame: u64,
    /// Its content.
    pub content: Box<Page>,
}

/// All pages of these QEMU processes' guests that are not all zeros.
///
/// # Errors
/// When a process is gone, or the kernel does not show frames.
pub fn pages(pids: &[u32]) -> io::Result<Vec<GuestPage>> {
    let mut all = Vec::new();
    for pid in pids {
        let memory = RemoteMemory::of(*pid).map_err(io::Error::other)?;
        for (address, frame) in frames::pages_of_guest(*pid)? {
            let mut content = Box::new([0; PAGE_LEN]);
            let is_read = memory.read_original(address, &mut content[..]) == PAGE_LEN;
            if is_read && !offline::is_zero(&content) {
                all.push(GuestPage { address, frame, content });
            }
        }
    }
    Ok(all)
}

/// The pages that a table names.
#[derive(Debug)]
pub struct Named {
    sampling: Sampling,
    classes: HashSet<Sampled>,
    hashes: HashSet<u128>,
}

impl Named {
    /// The pages that `table` names.
    pub fn by(table: &TableRef<'_>) -> Self {
        let classes = table.records().map(|record| record.sampled).collect();
        let hashes = table.records().map(|record| record.hash).collect();
        Self { sampling: table.sampling(), classes, hashes }
    }

    /// Among the pages that the table names: the number with the same content as another one, and
    /// the number with the same frame as another one.
    pub fn alike(&self, pages: &[GuestPage]) -> (u64, u64) {
        let in_class =
            pages.iter().filter(|page| self.classes.contains(&self.sampling.sample(&page.content)));
        let hashed = in_class.map(|page| (offline::hash(&page.content), page.frame));
        let named: Vec<(u128, u64)> =
            hashed.filter(|(hash, _)| self.hashes.contains(hash)).collect();
        let (mut contents, mut frames) = (HashMap::new(), HashMap::new());
        for (hash, frame) in &named {
            *contents.entry(*hash).or_insert(0_u32) += 1;
            *frames.entry(*frame).or_insert(0_u32) += 1;
        }
        let alike = named.iter().filter(|(hash, _)| contents[hash] > 1).count();
        let shared = named.iter().filter(|(_, frame)| frames[frame] > 1).count();
        (alike as u64, shared as u64)
    }
}
