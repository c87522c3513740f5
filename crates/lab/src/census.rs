//! The use of each page of a guest, as the guest itself reports it (`guest/src/census.rs`).
//!
//! The guest repeatedly writes a letter for each of its page frames to its data disk. The host
//! waits for a new count and pauses the guest, so that its memory stays as it was counted. Guest
//! RAM is one range of QEMU's memory, in the order of guest frames. The frame of a page follows
//! from its address and the start of the range.

use std::time::Duration;

use model::Bytes;
use serde_json::json;

use crate::lab::{Lab, LabError, Machine};
use crate::machine::MachineSpec;

/// Interval between a guest's counts, in seconds.
const EVERY_S: u32 = 5;
/// Timeout for one count on a busy host.
const LIMIT: Duration = Duration::from_secs(120);
/// Size of the data disk: letters for 4 GiB.
const DISK: Bytes = Bytes::mib(1);
const PAGE_LEN: u64 = 4096;

/// The use of a guest's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOwner {
    /// Code of one of the system's programs.
    Code,
    /// Other pages of files that a program has mapped, with the file's content.
    Constant,
    /// A program's other memory: heap, variables, threads' stacks.
    Data,
    /// The stack of a program's first thread.
    Stack,
    /// Pages of files that no program has mapped.
    File,
    /// Memory of the guest's kernel, and of the programs that the lab adds.
    System,
    /// Free memory.
    Free,
}

impl PageOwner {
    /// Whether it is memory of the system's programs.
    pub fn is_of_programs(self) -> bool {
        matches!(self, Self::Code | Self::Constant | Self::Data | Self::Stack)
    }

    fn of_letter(letter: u8) -> Self {
        match letter {
            b'c' => Self::Code,
            b'r' => Self::Constant,
            b'd' => Self::Data,
            b's' => Self::Stack,
            b'f' => Self::File,
            b'.' => Self::Free,
            _ => Self::System,
        }
    }
}

/// The use of a paused guest's pages.
#[derive(Debug)]
pub struct Census {
    /// Start address of its RAM in the QEMU process.
    start: u64,
    kinds: Vec<PageOwner>,
}

/// The same guest, which counts its pages.
pub fn counting(mut spec: MachineSpec) -> MachineSpec {
    spec.workload.extend(["--census-s".to_owned(), EVERY_S.to_string()]);
    MachineSpec { data_disk: Some(DISK), ..spec }
}

impl Census {
    /// Waits for the next count, and pauses the guest.
    ///
    /// # Errors
    /// When the guest does not count, or QEMU does not say where its memory is.
    pub fn take(lab: &Lab, machine: &Machine) -> Result<Self, LabError> {
        let before = machine.reported("census");
        lab.wait_for("the guest to count its pages", LIMIT, |_| {
            Ok(machine.reported("census") > before)
        })?;
        machine.qmp("stop", json!({}))?;
        let letters = std::fs::read(&machine.files().data)?;
        let pages = usize::try_from(machine.spec().memory_max.0 / PAGE_LEN).unwrap_or(usize::MAX);
        let kinds = letters.into_iter().take(pages).map(PageOwner::of_letter).collect();
        let command = json!({ "command-line": "gpa2hva 0" });
        let said = machine.qmp("human-monitor-command", command)?;
        let start = said.as_str().and_then(address);
        let start = start.ok_or_else(|| std::io::Error::other(format!("QEMU says {said}")))?;
        Ok(Self { start, kinds })
    }

    /// The use of the page at this address of the QEMU process; `None`: it is not the guest's.
    pub fn kind_of(&self, address: u64) -> Option<PageOwner> {
        let frame = address.checked_sub(self.start)? / PAGE_LEN;
        self.kinds.get(usize::try_from(frame).ok()?).copied()
    }
}

/// The address in `Host virtual address for 0x0 (pc.ram) is 0x7f0000000000`.
fn address(said: &str) -> Option<u64> {
    let hex = said.trim().rsplit_once(" is 0x")?.1;
    u64::from_str_radix(hex, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_told_by_its_place_in_the_guests_ram() {
        let said = "Host virtual address for 0x0 (pc.ram) is 0x7f12c000\r\n";
        let start = address(said).unwrap();
        assert_eq!(start, 0x7f12_c000);
        assert_eq!(address("No memory is mapped at address 0x0"), None);
        let census = Census { start, kinds: b"kc.".map(PageOwner::of_letter).to_vec() };
        let kinds =
            [-1, 0, 1, 2, 3].map(|page| census.kind_of(start.wrapping_add_signed(page * 4096)));
        let expected =
            [None, Some(PageOwner::System), Some(PageOwner::Code), Some(PageOwner::Free), None];
        assert_eq!(kinds, expected);
    }
}
