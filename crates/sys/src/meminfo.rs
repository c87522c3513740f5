//! The host's memory, from `/proc/meminfo`.
//!
//! `MemAvailable` is the kernel's own estimate of the memory available without swapping; the
//! host's reserve is compared with it. `MemFree` alone means little: a healthy host has almost
//! none.

use std::path::Path;

use model::Bytes;

use crate::procfs::{ProcError, read, required_kib_field};

const PATH: &str = "/proc/meminfo";

/// The fields of `/proc/meminfo` that Overbook needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemInfo {
    /// `MemTotal`.
    pub total: Bytes,
    /// `MemAvailable`.
    pub available: Bytes,
    /// `SwapTotal`.
    pub swap_total: Bytes,
    /// `SwapFree`.
    pub swap_free: Bytes,
}

impl MemInfo {
    /// Reads the file, in about 20 µs.
    ///
    /// # Errors
    /// When the file cannot be read or lacks a line.
    pub fn read() -> Result<Self, ProcError> {
        Self::parse(&read(Path::new(PATH))?)
    }

    fn parse(text: &str) -> Result<Self, ProcError> {
        let field = |name| required_kib_field(Path::new(PATH), text, name);
        Ok(Self {
            total: field("MemTotal:")?,
            available: field("MemAvailable:")?,
            swap_total: field("SwapTotal:")?,
            swap_free: field("SwapFree:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory() {
        let memory = MemInfo::read().unwrap();
        assert!(memory.available > Bytes::mib(1) && memory.available <= memory.total);
        assert!(memory.swap_free <= memory.swap_total);
    }

    #[test]
    fn a_missing_line_is_named() {
        let error = MemInfo::parse("MemTotal: 1 kB\nMemAvailable: 1 kB\n").unwrap_err();
        assert_eq!(error.to_string(), "/proc/meminfo: no line `SwapTotal:`");
    }

    #[test]
    fn garbage_is_named_with_its_value() {
        let error = MemInfo::parse("MemTotal: lots\n").unwrap_err();
        assert!(error.to_string().contains("\"lots\""), "{error}");
    }
}
