//! The trace file.
//!
//! ```text
//! header   8 bytes  "OBTRACE\n"
//!          u32      version of the format
//!          u32      length of a tick in microseconds
//!          u64      when the first tick began, in microseconds of CLOCK_MONOTONIC
//!          u64      pages of guest RAM
//! record   u32      bytes that follow in this record
//!          varint   how long this tick really took, in microseconds
//!          varint   how many pages were touched in it
//!          varints  their numbers in order of first touch, each the zigzag difference to the last
//! ```
//!
//! Fixed-size numbers are little-endian. Varints have seven bits per byte, low ones first; the
//! top bit says that more bytes follow. There is one record per tick, written as a whole. A file
//! that was cut anywhere, or still grows, is readable up to its last whole record. Adjacent pages
//! cost one byte each, random pages of a guest of 400 MB three.

/// The first bytes of a trace.
const MAGIC: &[u8; 8] = b"OBTRACE\n";
/// Changes with the format.
const VERSION: u32 = 1;

/// The header of a trace.
pub(crate) fn header(tick_us: u32, start_us: u64, pages: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(tick_us.to_le_bytes());
    bytes.extend(start_us.to_le_bytes());
    bytes.extend(pages.to_le_bytes());
    bytes
}

/// Writes one tick's record to `bytes`, replacing its content.
pub(crate) fn record(bytes: &mut Vec<u8>, lasted_us: u64, pages: &[u32]) {
    bytes.clear();
    bytes.extend([0; 4]);
    varint(bytes, lasted_us);
    varint(bytes, pages.len() as u64);
    let mut before = 0;
    for &page in pages {
        let page = i64::from(page);
        varint(bytes, zigzag(page - before));
        before = page;
    }
    // Only 2^32 pages (16 TiB) of up to 5 bytes each would not fit; a tick never touches that
    // many.
    let length = u32::try_from(bytes.len() - 4).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&length.to_le_bytes());
}

fn zigzag(difference: i64) -> u64 {
    ((difference << 1) ^ (difference >> 63)).cast_unsigned()
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_its_length_then_varints_of_differences() {
        let mut bytes = vec![9; 3];
        record(&mut bytes, 100_000, &[5, 6, 4, 300]);
        let payload = [0xa0, 0x8d, 0x06, 4, 10, 2, 3, 0xd0, 0x04];
        assert_eq!(bytes[..4], 9_u32.to_le_bytes());
        assert_eq!(bytes[4..], payload);
    }

    #[test]
    fn a_header_has_32_bytes() {
        let bytes = header(100_000, 7, 1024);
        assert_eq!((bytes.len(), &bytes[..8]), (32, MAGIC.as_slice()));
        assert_eq!(bytes[24..], 1024_u64.to_le_bytes());
    }
}
