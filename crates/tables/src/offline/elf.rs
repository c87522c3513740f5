//! Finds the code pages of an executable: the pages with a byte of an executable segment.

use std::ops::Range;

use object::{
    Endianness,
    elf::{ET_CORE, FileHeader32, FileHeader64, PF_X, PT_LOAD},
    read::elf::{FileHeader, ProgramHeader},
};
use pages::offline::PAGE_LEN;

/// The first bytes of an ELF file.
pub(super) const MAGIC: &[u8] = b"\x7fELF";

/// Why the code is not known.
#[derive(Debug, thiserror::Error)]
pub(super) enum ElfError {
    #[error("not an executable that can be read: {0}")]
    Headers(object::read::Error),
    #[error("a core file is not supported yet; valid: memory as a raw file, with --all-pages")]
    Core,
}

/// The location of the code in a file.
#[derive(Debug, Default)]
pub(super) struct Code {
    /// Ranges of pages, ascending and disjoint.
    pub(super) pages: Vec<Range<u64>>,
    /// The end of the last segment, in bytes.
    pub(super) end: u64,
}

/// Finds the code. `head` is the beginning of the file. It must contain the program headers;
/// every linker puts them there.
pub(super) fn code(head: &[u8]) -> Result<Code, ElfError> {
    const CLASS: usize = 4;
    const CLASS_32: u8 = 1;
    if head.get(CLASS) == Some(&CLASS_32) {
        code_of::<FileHeader32<Endianness>>(head)
    } else {
        code_of::<FileHeader64<Endianness>>(head)
    }
}

fn code_of<Elf: FileHeader<Endian = Endianness>>(head: &[u8]) -> Result<Code, ElfError> {
    let header = Elf::parse(head).map_err(ElfError::Headers)?;
    let endian = header.endian().map_err(ElfError::Headers)?;
    if header.e_type(endian) == ET_CORE {
        return Err(ElfError::Core);
    }
    let segments = header.program_headers(endian, head).map_err(ElfError::Headers)?;
    let segments: Vec<(u64, u64)> = segments
        .iter()
        .filter(|s| s.p_type(endian) == PT_LOAD && s.p_flags(endian).0 & PF_X.0 != 0)
        .map(|segment| (segment.p_offset(endian).into(), segment.p_filesz(endian).into()))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    let end = segments.iter().map(|(offset, bytes)| offset.saturating_add(*bytes)).max();
    let mut ranges: Vec<Range<u64>> =
        segments.iter().map(|(offset, bytes)| pages(*offset, *bytes)).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let meets = next.start <= range.end;
        if meets {
            range.end = range.end.max(next.end);
        }
        meets
    });
    Ok(Code { pages: ranges, end: end.unwrap_or(0) })
}

fn pages(offset: u64, bytes: u64) -> Range<u64> {
    const PAGE: u64 = PAGE_LEN as u64;
    offset / PAGE..offset.saturating_add(bytes).div_ceil(PAGE)
}
