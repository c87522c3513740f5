//! The use of each page frame of the guest: code, data or stack of the system's programs, files
//! that no program maps, the kernel's, free. Only the guest itself knows it.
//!
//! At a fixed interval the data disk gets one letter for each frame ([`CensusKind`]), from the
//! first frame on; `census` counts the rounds. A frame's kind follows from the mappings of all
//! processes and from the kernel's flags of the frame (`pagemap`, `/proc/kpageflags`: root only).
//!
//! Programs are those below `/usr`. Pages that this program and the guest's init have mapped
//! count with the kernel's. A thread's stack is data, because only the first thread's stack is
//! marked as one. A frame that changes during a round may get its kind from before or after.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::error::WorkError;
use crate::run::RunState;

const OUTPUT: &str = "/dev/data";
const FLAGS: &str = "/proc/kpageflags";
/// Programs of the system.
const PROGRAMS: &str = "/usr/";
const PAGE_LEN: u64 = 4096;
const ENTRY_LEN: usize = 8;
/// Entries that are read at a time.
const PART: u64 = 1 << 14;

/// Bits of an entry of `pagemap`: a frame is present; it is a file's, or shared; its number.
const IS_PRESENT: u64 = 1 << 63;
const IS_FILE: u64 = 1 << 61;
const FRAME: u64 = (1 << 55) - 1;
/// Bits of an entry of `kpageflags` (`KPF_LRU`, `KPF_BUDDY`, `KPF_ANON`, `KPF_NOPAGE`,
/// `KPF_OFFLINE`: the balloon's).
const IS_LISTED: u64 = 1 << 5;
const IS_FREE: u64 = 1 << 10 | 1 << 20 | 1 << 23;
const IS_ANONYMOUS: u64 = 1 << 12;

/// The use of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum CensusKind {
    /// In an executable mapping.
    Code = b'c',
    /// The first stack of a process.
    Stack = b's',
    /// Another mapping without a file, or written to, or shared to be written to.
    Data = b'd',
    /// Another mapping of a file, as the file has it.
    Constant = b'r',
    /// Of a file, and in no program's mapping.
    File = b'f',
    /// Not in use.
    Free = b'.',
    /// The kernel's, and the lab's own programs'.
    System = b'k',
}

/// Counts again and again, until the stop.
pub(crate) fn watch(every: Duration, shared: &Arc<RunState>) -> Result<(), WorkError> {
    let output = File::options().write(true).open(OUTPUT);
    let output = output.map_err(WorkError::file("open", Path::new(OUTPUT)))?;
    shared.census.set(0);
    let shared = Arc::clone(shared);
    let count = move || {
        while shared.sleep_until(shared.now() + every) {
            let letters = count();
            let written = letters.and_then(|letters| {
                output.write_all_at(&letters, 0)?;
                output.sync_all()
            });
            match written {
                Ok(()) => shared.census.add(1),
                Err(error) => eprintln!("overbook-guest: cannot tell frames' kinds: {error}"),
            }
        }
    };
    let builder = thread::Builder::new().name("census".into());
    builder.spawn(count).map(drop).map_err(|source| WorkError::Start { what: "census", source })
}

/// A letter for each frame.
fn count() -> io::Result<Vec<u8>> {
    let flags = File::open(FLAGS)?;
    let mut kinds = Vec::new();
    loop {
        let entries = read_entries(&flags, kinds.len() as u64, PART)?;
        if entries.is_empty() {
            break;
        }
        kinds.extend(entries.into_iter().map(of_flags));
    }
    for entry in fs::read_dir("/proc")?.flatten() {
        let process = entry.path();
        // Kernel threads, and entries that are no process, have no `exe`.
        let Ok(program) = process.join("exe").read_link() else { continue };
        let is_ours = !program.starts_with(PROGRAMS);
        let mut found = |frame, kind| {
            set(&mut kinds, frame, if is_ours { CensusKind::System } else { kind });
        };
        // The process may end at any moment, and its frames may then belong to another one.
        let _ = add_process(&process, &mut found);
    }
    Ok(kinds.into_iter().map(|kind| kind as u8).collect())
}

/// Code stays code, even if another process maps it as data.
fn set(kinds: &mut [CensusKind], frame: u64, kind: CensusKind) {
    let known = usize::try_from(frame).ok().and_then(|frame| kinds.get_mut(frame));
    if let Some(known) = known.filter(|known| **known != CensusKind::Code) {
        *known = kind;
    }
}

fn of_flags(flags: u64) -> CensusKind {
    match flags {
        _ if flags & IS_FREE != 0 => CensusKind::Free,
        _ if flags & IS_LISTED != 0 && flags & IS_ANONYMOUS == 0 => CensusKind::File,
        _ => CensusKind::System,
    }
}

/// Finds all frames in a process's mappings, each with its kind.
fn add_process(process: &Path, found: &mut impl FnMut(u64, CensusKind)) -> io::Result<()> {
    let pagemap = File::open(process.join("pagemap"))?;
    for line in fs::read_to_string(process.join("maps"))?.lines() {
        let Some(mapping) = CensusMapping::parse(line) else { continue };
        let (mut page, end) = (mapping.start / PAGE_LEN, mapping.end / PAGE_LEN);
        while page < end {
            let entries = read_entries(&pagemap, page, PART.min(end - page))?;
            if entries.is_empty() {
                break;
            }
            page += entries.len() as u64;
            for entry in entries.into_iter().filter(|entry| entry & IS_PRESENT != 0) {
                found(entry & FRAME, mapping.kind(entry & IS_FILE != 0));
            }
        }
    }
    Ok(())
}

/// Reads `count` entries from `first` on; fewer at the end.
fn read_entries(file: &File, first: u64, count: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; usize::try_from(count).unwrap_or(0) * ENTRY_LEN];
    let read = file.read_at(&mut bytes, first * ENTRY_LEN as u64)?;
    Ok(bytes[..read].as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)).collect())
}

/// A line of `maps`.
#[derive(Debug, PartialEq, Eq)]
struct CensusMapping {
    start: u64,
    end: u64,
    is_code: bool,
    is_stack: bool,
    /// Writable, and visible to other processes.
    is_shared: bool,
}

impl CensusMapping {
    /// `55d0-55d4 r-xp 00002000 fe:00 77    /usr/bin/cat`; `None` for the kernel's own mappings.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let allowed = words.next()?;
        let name = words.nth(3).unwrap_or_default();
        (!name.starts_with("[v")).then_some(Self {
            start: hex(start)?,
            end: hex(end)?,
            is_code: allowed.contains('x'),
            is_stack: name == "[stack]",
            is_shared: allowed.contains('w') && allowed.contains('s'),
        })
    }

    fn kind(&self, is_file: bool) -> CensusKind {
        match self {
            _ if self.is_code => CensusKind::Code,
            _ if self.is_stack => CensusKind::Stack,
            _ if is_file && !self.is_shared => CensusKind::Constant,
            _ => CensusKind::Data,
        }
    }
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, ensure, requires};

    use super::*;

    fn kind(line: &str, is_file: bool) -> CensusKind {
        CensusMapping::parse(line).unwrap().kind(is_file)
    }

    #[test]
    fn a_mapping_tells_what_its_pages_are() {
        assert_eq!(
            kind("1000-2000 r-xp 00000000 fe:00 77    /usr/bin/cat", true),
            CensusKind::Code
        );
        assert_eq!(
            kind("1000-2000 rw-p 00000000 fe:00 77    /usr/bin/cat", true),
            CensusKind::Constant
        );
        assert_eq!(
            kind("1000-2000 rw-p 00000000 fe:00 77    /usr/bin/cat", false),
            CensusKind::Data
        );
        assert_eq!(
            kind("1000-2000 rw-s 00000000 00:01 7   /dev/zero (deleted)", true),
            CensusKind::Data
        );
        assert_eq!(kind("1000-2000 rw-p 00000000 00:00 0 ", false), CensusKind::Data);
        assert_eq!(kind("1000-2000 rw-p 00000000 00:00 0    [stack]", false), CensusKind::Stack);
        assert_eq!(CensusMapping::parse("1000-2000 r-xp 00000000 00:00 0    [vdso]"), None);
    }

    #[test]
    fn a_frame_without_a_mapping_is_a_files_or_free_or_the_kernels() {
        assert_eq!(of_flags(IS_LISTED), CensusKind::File);
        assert_eq!(of_flags(1 << 10), CensusKind::Free);
        assert_eq!(of_flags(0), CensusKind::System);
    }

    #[test]
    fn this_programs_own_pages_are_found() {
        let mut found = Vec::new();
        add_process(Path::new("/proc/self"), &mut |frame, kind| found.push((frame, kind))).unwrap();
        let are_shown = ensure(found.iter().any(|(frame, _)| *frame != 0), "zeros");
        let Some(()) = requires(Requirement::Frames, are_shown) else { return };
        for kind in [CensusKind::Code, CensusKind::Constant, CensusKind::Data, CensusKind::Stack] {
            assert!(found.iter().any(|(frame, found)| *frame != 0 && *found == kind), "{kind:?}");
        }
    }

    #[test]
    fn code_stays_code() {
        let mut kinds = vec![CensusKind::File; 2];
        set(&mut kinds, 1, CensusKind::Code);
        set(&mut kinds, 1, CensusKind::Constant);
        set(&mut kinds, 2, CensusKind::Code);
        assert_eq!(kinds, [CensusKind::File, CensusKind::Code]);
    }
}
