//! Which pages of an executable are code: those with a byte of an executable segment.

use std::ops::Range;

use object::{
    Endianness,
    elf::{ET_CORE, FileHeader32, FileHeader64, PF_X, PT_LOAD},
    read::elf::{FileHeader, ProgramHeader},
};
use pages::offline::PAGE_LEN;

/// What an ELF file begins with.
pub(super) const MAGIC: &[u8] = b"\x7fELF";

/// Why its code is not known.
#[derive(Debug, thiserror::Error)]
pub(super) enum ElfError {
    #[error("not an executable that can be read: {0}")]
    Headers(object::read::Error),
    #[error("a core file is not supported yet; valid: memory as a raw file, with --all-pages")]
    Core,
}

/// Ranges of pages with code, ascending and apart. `head` is the beginning of the file; the program
/// headers are to be in it, where every linker puts them.
pub(super) fn code(head: &[u8]) -> Result<Vec<Range<u64>>, ElfError> {
    const CLASS: usize = 4;
    const CLASS_32: u8 = 1;
    if head.get(CLASS) == Some(&CLASS_32) {
        code_of::<FileHeader32<Endianness>>(head)
    } else {
        code_of::<FileHeader64<Endianness>>(head)
    }
}

fn code_of<Elf: FileHeader<Endian = Endianness>>(head: &[u8]) -> Result<Vec<Range<u64>>, ElfError> {
    let header = Elf::parse(head).map_err(ElfError::Headers)?;
    let endian = header.endian().map_err(ElfError::Headers)?;
    if header.e_type(endian) == ET_CORE {
        return Err(ElfError::Core);
    }
    let segments = header.program_headers(endian, head).map_err(ElfError::Headers)?;
    let mut ranges: Vec<Range<u64>> = segments
        .iter()
        .filter(|s| s.p_type(endian) == PT_LOAD && s.p_flags(endian).0 & PF_X.0 != 0)
        .filter_map(|segment| {
            pages(segment.p_offset(endian).into(), segment.p_filesz(endian).into())
        })
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let meets = next.start <= range.end;
        if meets {
            range.end = range.end.max(next.end);
        }
        meets
    });
    Ok(ranges)
}

fn pages(offset: u64, bytes: u64) -> Option<Range<u64>> {
    const PAGE: u64 = PAGE_LEN as u64;
    let end = offset.saturating_add(bytes);
    (bytes > 0).then(|| offset / PAGE..end.div_ceil(PAGE))
}
