//! A table as bytes; [`super`] describes the format.
//!
//! Input is not trusted. Nothing is allocated, no length is used before it is compared with the
//! actual one, and everything is checked before the first record is handed out.

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use super::{PAGE_LEN, Record, Sampled, Sampling, SamplingError, Table, hash};

/// Bytes of the header.
pub const HEADER_LEN: usize = 128;
/// Bytes of a record.
pub const RECORD_LEN: usize = 56;
/// The most bytes of the source's name.
pub const MOST_NAME_LEN: usize = 64;

const MAGIC: [u8; 8] = *b"OVERBSPT";
const VERSION: u32 = 1;
const RECORD_LEN_FIELD: u32 = 56;
/// The offset of the header's own checksum.
const HEADER_SUM: usize = 120;
const CODE: u32 = 1;

/// The reason why bytes are no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The magic number is wrong.
    #[error("this is no table of shared pages: it does not begin with `OVERBSPT`")]
    NoTable,
    /// The version is not supported.
    #[error("the table is of version {0}; valid: 1")]
    Version(u32),
    /// The length differs from that in the header.
    #[error("the table has {has} bytes and should have {should}: it was cut off or added to")]
    Length {
        /// The actual length.
        has: u64,
        /// The length by the header.
        should: u128,
    },
    /// The header is corrupt.
    #[error("the header's checksum is {is:#018x} and should be {should:#018x}")]
    Header {
        /// The checksum of its bytes.
        is: u64,
        /// The checksum in the header.
        should: u64,
    },
    /// The records are corrupt.
    #[error("the records' checksum is {is:#018x} and should be {should:#018x}")]
    Records {
        /// The checksum of their bytes.
        is: u64,
        /// The checksum in the header.
        should: u64,
    },
    /// The length of a record is wrong.
    #[error("a record has {0} bytes; valid: 56")]
    RecordLen(u32),
    /// Pages cannot be sampled at these offsets.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The name is not valid.
    #[error("the name {0:?} is not valid: at most 64 bytes of UTF-8 without control characters")]
    Name(String),
    /// Two records are in the wrong order, or equal.
    #[error("record {0} is not above the one before it")]
    Order(usize),
    /// A page occurs 0 times.
    #[error("record {0} occurs 0 times; valid: 1 and more")]
    Count(usize),
    /// Flags are unknown.
    #[error("record {at} has the flags {flags:#x}; valid: 0 and 1")]
    Flags {
        /// The index of the record.
        at: usize,
        /// All of its flags.
        flags: u32,
    },
    /// The page of zeros has a record.
    #[error("record {0} is the page of zeros, which no table has")]
    Zeros(usize),
    /// The counts do not add up to the number in the header.
    #[error("the records have {is} pages and the header says {should}")]
    Pages {
        /// The sum of the counts.
        is: u64,
        /// The number in the header.
        should: u64,
    },
}

impl Table {
    /// The header. `name` is the name that readers show.
    pub fn header(&self, name: &str) -> Result<[u8; HEADER_LEN], FormatError> {
        if !is_name(name) {
            return Err(FormatError::Name(name.to_owned()));
        }
        let mut records_sum = Xxh3Default::new();
        self.records.iter().for_each(|record| records_sum.update(&record.encode()));
        let pages: u64 = self.records.iter().map(|record| u64::from(record.count)).sum();
        let mut header = [0; HEADER_LEN];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            header[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&RECORD_LEN_FIELD.to_le_bytes());
        put(&(self.records.len() as u64).to_le_bytes());
        put(&pages.to_le_bytes());
        self.sampling.offsets().iter().for_each(|offset| put(&offset.to_le_bytes()));
        put(&self.zero_pages.to_le_bytes());
        put(name.as_bytes());
        put(&[0; MOST_NAME_LEN][name.len()..]);
        put(&records_sum.digest().to_le_bytes());
        let sum = xxh3_64(&header[..HEADER_SUM]);
        header[HEADER_SUM..].copy_from_slice(&sum.to_le_bytes());
        Ok(header)
    }

    /// The whole file.
    pub fn to_bytes(&self, name: &str) -> Result<Vec<u8>, FormatError> {
        let mut bytes = self.header(name)?.to_vec();
        bytes.extend(self.records.iter().flat_map(|record| record.encode()));
        Ok(bytes)
    }
}

impl Record {
    /// The record as in a file.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        for (field, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.sampled.0) {
            *field = word.to_le_bytes();
        }
        bytes[32..48].copy_from_slice(&self.hash.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.count.to_le_bytes());
        bytes[52..].copy_from_slice(&u32::from(self.is_code).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; RECORD_LEN]) -> (Self, u32) {
        let word = |index: usize| u64::from_le_bytes(field(bytes, index * 8));
        let sampled = Sampled([word(0), word(1), word(2), word(3)]);
        let flags = u32::from_le_bytes(field(bytes, 52));
        let record = Self {
            sampled,
            hash: u128::from_le_bytes(field(bytes, 32)),
            count: u32::from_le_bytes(field(bytes, 48)),
            is_code: flags & CODE != 0,
        };
        (record, flags)
    }
}

/// A checked table in memory.
#[derive(Clone, Copy, Debug)]
pub struct TableRef<'a> {
    name: &'a str,
    sampling: Sampling,
    pages: u64,
    zero_pages: u64,
    records: &'a [[u8; RECORD_LEN]],
}

impl<'a> TableRef<'a> {
    /// Checks all of the bytes, about as fast as they are read.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FormatError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(FormatError::NoTable);
        }
        let has = bytes.len() as u64;
        let Some((header, body)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(FormatError::Length { has, should: HEADER_LEN as u128 });
        };
        let version = u32::from_le_bytes(field(header, 8));
        if version != VERSION {
            return Err(FormatError::Version(version));
        }
        let (is, should) = (xxh3_64(&header[..HEADER_SUM]), number(header, HEADER_SUM));
        if is != should {
            return Err(FormatError::Header { is, should });
        }
        let record_len = u32::from_le_bytes(field(header, 12));
        if record_len != RECORD_LEN_FIELD {
            return Err(FormatError::RecordLen(record_len));
        }
        let should = HEADER_LEN as u128 + RECORD_LEN as u128 * u128::from(number(header, 16));
        if u128::from(has) != should {
            return Err(FormatError::Length { has, should });
        }
        let offset = |index: usize| u16::from_le_bytes(field(header, 32 + 2 * index));
        let sampling = Sampling::new([offset(0), offset(1), offset(2), offset(3)])?;
        let name = name_in(&header[48..48 + MOST_NAME_LEN])?;
        let (is, should) = (xxh3_64(body), number(header, 112));
        if is != should {
            return Err(FormatError::Records { is, should });
        }
        let (pages, zero_pages) = (number(header, 24), number(header, 40));
        let table =
            Self { name, sampling, pages, zero_pages, records: body.as_chunks::<RECORD_LEN>().0 };
        table.check_records()?;
        Ok(table)
    }

    fn check_records(&self) -> Result<(), FormatError> {
        let zeros = hash(&[0; PAGE_LEN]);
        let (mut before, mut pages) = (None, 0_u64);
        for (at, bytes) in self.records.iter().enumerate() {
            let (record, flags) = Record::decode(bytes);
            let key = Some((record.sampled, record.hash));
            if key <= before {
                return Err(FormatError::Order(at));
            }
            if record.count == 0 {
                return Err(FormatError::Count(at));
            }
            if flags & !CODE != 0 {
                return Err(FormatError::Flags { at, flags });
            }
            if record.sampled == Sampled::default() && record.hash == zeros {
                return Err(FormatError::Zeros(at));
            }
            before = key;
            pages = pages.saturating_add(u64::from(record.count));
        }
        if pages != self.pages {
            return Err(FormatError::Pages { is: pages, should: self.pages });
        }
        Ok(())
    }

    /// The source's name.
    #[must_use]
    pub const fn name(&self) -> &'a str {
        self.name
    }

    /// The sampling of its pages.
    #[must_use]
    pub const fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// The number of distinct pages.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no records.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Pages of the source, without those of zeros.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages of zeros in the source.
    #[must_use]
    pub const fn zero_pages(&self) -> u64 {
        self.zero_pages
    }

    /// The distinct pages, in order.
    pub fn records(&self) -> impl ExactSizeIterator<Item = Record> + Clone + use<'a> {
        self.records.iter().map(|bytes| Record::decode(bytes).0)
    }
}

fn is_name(name: &str) -> bool {
    name.len() <= MOST_NAME_LEN && !name.chars().any(char::is_control)
}

fn name_in(bytes: &[u8]) -> Result<&str, FormatError> {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    match str::from_utf8(&bytes[..end]) {
        Ok(name) if is_name(name) => Ok(name),
        _ => Err(FormatError::Name(String::from_utf8_lossy(&bytes[..end]).into_owned())),
    }
}

fn number(header: &[u8; HEADER_LEN], at: usize) -> u64 {
    u64::from_le_bytes(field(header, at))
}

/// `N` bytes from `at` on. They exist: all offsets are constants.
fn field<const N: usize, const ALL: usize>(bytes: &[u8; ALL], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
