//! Which QEMUs have the shim: those whose abstract address stands in `/proc/net/unix`.
//!
//! Asking the shim would disturb it, and a QEMU without one has nobody to ask. The file is read only
//! while there is a QEMU that is not known to have the shim, and not in every tick.

use std::collections::BTreeSet;

/// Ticks between two looks.
const LOOK_EVERY: u8 = 3;

/// QEMUs with the shim, by pid.
#[derive(Debug, Default)]
pub(super) struct Shims {
    known: BTreeSet<u32>,
    ticks: u8,
}

impl Shims {
    /// Looks for the shims of these processes, if it is time to.
    pub(super) fn look(&mut self, pids: impl Iterator<Item = u32>) {
        let pids: BTreeSet<u32> = pids.collect();
        // A pid that is gone may come back as another process.
        self.known.retain(|pid| pids.contains(pid));
        let is_time = self.ticks == 0;
        self.ticks = (self.ticks + 1) % LOOK_EVERY;
        if is_time && pids.len() > self.known.len() {
            // Without the file no shim can be reached either.
            let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
            self.known.extend(in_table(&table).filter(|pid| pids.contains(pid)));
        }
    }

    /// Takes it that this process has one.
    #[cfg(test)]
    pub(super) fn assume(&mut self, pid: u32) {
        self.known.insert(pid);
    }

    /// Whether this process has it.
    pub(super) fn has(&self, pid: u32) -> bool {
        self.known.contains(&pid)
    }
}

/// The processes whose shims listen, by the kernel's table of unix sockets.
fn in_table(table: &str) -> impl Iterator<Item = u32> + '_ {
    let addresses = table.lines().filter_map(|line| line.split('@').nth(1));
    let pids = addresses.filter_map(|name| name.rsplit('.').next()?.parse().ok().zip(Some(name)));
    pids.filter(|(pid, name)| protocol::address(*pid) == *name).map(|(pid, _)| pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shims_are_found_by_their_addresses_and_nothing_else_is() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0005 01 39441 @overbook-shim.4711\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 39442 /run/overbook-shim.4712\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 39443\n\
            0000000000000000: 00000002 00000000 00010000 0005 01 39444 @overbook-shim.x\n\
            0000000000000000: 00000002 00000000 00010000 0005 01 39445 @overbook-shim.047\n";
        assert_eq!(in_table(table).collect::<Vec<_>>(), [4711]);
    }

    #[test]
    fn a_process_is_forgotten_with_its_end() {
        let mut shims = Shims { known: BTreeSet::from([1, 2]), ticks: 1 };
        shims.look([2].into_iter());
        assert!(!shims.has(1) && shims.has(2));
    }
}
