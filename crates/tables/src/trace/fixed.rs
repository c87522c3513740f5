//! Records of a fixed length: bare ids, and libCacheSim's oracleGeneral.
//!
//! ```text
//!   binary           id u64
//!   oracle-general   time u32 │ id u64 │ size u32 │ next i64   packed: 24 bytes, little-endian
//! ```
//!
//! `next` is the position of the object's next request; −1 or the largest number means that there
//! is none. Other negative numbers do not occur, so they reveal a file of another format. Bare
//! ids may have any value, but the beginning of the file must not be text.

use super::{TraceError, source::TraceInput, text::is_text};

/// A reader of fixed records.
pub(super) struct Fixed {
    name: &'static str,
    bytes: usize,
    /// Offset of the id in a record.
    id_at: usize,
    /// Returns the fault of an impossible record.
    fault: fn(&[u8]) -> Option<String>,
    records: u64,
    used: usize,
}

impl Fixed {
    pub(super) fn ids() -> Self {
        Self { name: "binary", bytes: 8, id_at: 0, fault: |_| None, records: 0, used: 0 }
    }

    pub(super) fn oracle_general() -> Self {
        let (name, bytes, id_at) = ("oracle-general", 24, 4);
        Self { name, bytes, id_at, fault: bad_next, records: 0, used: 0 }
    }

    pub(super) fn next_batch(
        &mut self,
        source: &mut TraceInput,
        ids: &mut Vec<u64>,
    ) -> Result<(), TraceError> {
        let path = source.path();
        let buffer = source.advance(self.used)?;
        if self.records == 0 && is_text(buffer) && buffer.contains(&b'\n') {
            let found = "it is text".to_owned();
            let valid = "--format csv reads text";
            return Err(TraceError::Record { path, record: 1, at: 0, found, valid });
        }
        let records = buffer.chunks_exact(self.bytes);
        let rest = records.remainder().len();
        for record in records.clone() {
            if let Some(found) = (self.fault)(record) {
                let record = self.records + ids.len() as u64;
                let valid = "a next access is a later position, or -1 for none";
                let at = record * self.bytes as u64;
                return Err(TraceError::Record { path, record: record + 1, at, found, valid });
            }
            ids.push(id(&record[self.id_at..]));
        }
        self.used = buffer.len() - rest;
        self.records += ids.len() as u64;
        let (name, bytes) = (self.name, self.bytes);
        match (ids.is_empty(), rest, self.records) {
            (true, 0, 0) => Err(TraceError::Empty { path, format: name, unit: "record" }),
            (true, 1.., records) => {
                let (record, at) = (records + 1, records * bytes as u64);
                Err(TraceError::CutOff { path, format: name, bytes, record, at, rest })
            }
            _ => Ok(()),
        }
    }
}

fn id(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn bad_next(record: &[u8]) -> Option<String> {
    let next = id(&record[16..]).cast_signed();
    (next < -1).then(|| format!("its next access is {next}"))
}
