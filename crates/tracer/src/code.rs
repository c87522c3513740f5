//! Pages from which the guest's code is read.
//!
//! **Problem.** QEMU reads guest code when it translates a block, and then runs the translation
//! from a buffer of its own. The read is an access to guest RAM that traps like any other, but no
//! plugin callback reports it. Running the translation again does not touch guest RAM at all.
//! (Under KVM every fetch goes through the guest's page tables, as data does.)
//!
//! **Idea.** When a block is translated, QEMU gives the host address of each instruction. A
//! page's number is its offset in the mapping that is guest RAM ([`HostRam`]).
//!
//! **Leaves out.** The second page of an instruction that spans two pages, unless another
//! instruction follows there.

use std::ops::Range;

use crate::layout::PAGE_BYTES;

/// The mapping that is guest RAM: the first mapping of RAM's size that contains an instruction.
#[derive(Debug)]
pub(crate) struct HostRam {
    bytes: u64,
    found: Option<u64>,
    others: Vec<Range<u64>>,
}

impl HostRam {
    /// For a guest with this much RAM.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, found: None, others: Vec::new() }
    }

    /// The number of the page at this host address; `None`: not RAM (firmware). `maps` reads
    /// `/proc/self/maps`, and is called once per mapping that contains instructions.
    pub(crate) fn page_of(&mut self, host: u64, maps: impl FnOnce() -> String) -> Option<usize> {
        if self.found.is_none() && !self.others.iter().any(|other| other.contains(&host)) {
            let mapping = mapping_of(host, &maps())?;
            if mapping.end - mapping.start == self.bytes {
                self.found = Some(mapping.start);
            } else {
                self.others.push(mapping);
            }
        }
        let offset = host.checked_sub(self.found?)?;
        let inside = offset < self.bytes;
        inside.then(|| usize::try_from(offset / PAGE_BYTES).ok())?
    }

    /// Whether the mapping has been found.
    pub(crate) fn is_known(&self) -> bool {
        self.found.is_some()
    }
}

fn mapping_of(host: u64, maps: &str) -> Option<Range<u64>> {
    let mut mappings = maps.lines().filter_map(|line| {
        let (start, rest) = line.split_once('-')?;
        let end = rest.split(' ').next()?;
        let number = |hexadecimal| u64::from_str_radix(hexadecimal, 16).ok();
        Some(number(start)?..number(end)?)
    });
    mappings.find(|mapping| mapping.contains(&host))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        55d0c0000000-55d0c0001000 r--p 00000000 08:01 123 /usr/bin/qemu\n\
        7f0000000000-7f0000040000 rw-p 00000000 00:00 0 \n\
        7f1000000000-7f1010000000 rw-p 00000000 00:00 0 \n";

    #[test]
    fn firmware_is_no_ram_and_ram_is_counted_from_its_start() {
        let mut ram = HostRam::new(256 << 20);
        assert_eq!(ram.page_of(0x7f00_0003_0000, || MAPS.into()), None);
        assert!(!ram.is_known());
        assert_eq!(ram.page_of(0x7f10_0000_5123, || MAPS.into()), Some(5));
        assert!(ram.is_known());
        assert_eq!(ram.page_of(0x7f00_0003_0000, || unreachable!()), None);
        assert_eq!(ram.page_of(0x7f10_1000_0000, || unreachable!()), None);
    }

    #[test]
    fn each_other_mapping_is_looked_up_once() {
        let mut ram = HostRam::new(256 << 20);
        assert_eq!(ram.page_of(0x7f00_0000_0000, || MAPS.into()), None);
        assert_eq!(ram.page_of(0x7f00_0003_ffff, || unreachable!()), None);
    }
}
