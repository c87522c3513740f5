//! ELF segments that the library brings into QEMU when it is loaded.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::{StandIn, shim};

/// Sizes and places in the headers of a 64-bit ELF file. A `PT_TLS` segment takes memory in each
/// thread.
const TYPE_AT: usize = 0;
const PT_LOAD: u32 = 1;
const PT_TLS: u32 = 7;
const TABLE_AT: usize = 0x20;
const ENTRY_BYTES_AT: usize = 0x36;
const ENTRIES_AT: usize = 0x38;

/// The types of all segments.
fn segments(path: &Path) -> Vec<u32> {
    let file = std::fs::read(path).unwrap();
    assert_eq!(file[..5], *b"\x7fELF\x02", "{} is no 64-bit ELF file", path.display());
    let half = |at: usize| usize::from(u16::from_le_bytes([file[at], file[at + 1]]));
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let table = usize::try_from(word(TABLE_AT)).unwrap();
    let entry = |number| word(table + number * half(ENTRY_BYTES_AT) + TYPE_AT);
    (0..half(ENTRIES_AT)).map(entry).collect()
}

/// The object files that a process has mapped.
fn objects(pid: u32) -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let code = maps.lines().filter(|line| line.contains(" r-xp ") || line.contains(" r--p "));
    code.filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..]))).collect()
}

#[test]
fn neither_the_library_nor_what_it_needs_has_thread_locals_in_a_segment() {
    assert!(segments(&shim()).contains(&PT_LOAD));
    assert!(!segments(&shim()).contains(&PT_TLS), "{} has a TLS segment", shim().display());
    let mut stand_in = StandIn::new();
    // The process runs.
    stand_in.expect("plug 64");
    let library = shim().canonicalize().unwrap();
    let loaded = objects(stand_in.pid());
    assert!(loaded.contains(&library), "{loaded:?}");
    let program = Path::new(env!("CARGO_BIN_EXE_overbook-shim-stand-in")).canonicalize().unwrap();
    // Every process has the C library, with or without the shim.
    let brought = |path: &&PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        **path != program && !name.starts_with("libc.so") && name.contains(".so")
    };
    for path in loaded.iter().filter(brought) {
        assert!(!segments(path).contains(&PT_TLS), "{} has a TLS segment", path.display());
    }
}
