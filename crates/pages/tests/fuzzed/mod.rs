//! Gives hostile files to the reader of tables.
//!
//! The fuzz target (`fuzz/`) calls this with bytes that a fuzzer finds, and `fuzz_smoke.rs` with
//! random ones. Idea: the first byte selects the parts of a file that are made valid, so that
//! code behind the checksums is reached, too: nothing, the checksums, or also the lengths and the
//! order.

use pages::offline::{HEADER_LEN, RECORD_LEN, Sampled, Statistics, TableRef, mix, overlap};
use xxhash_rust::xxh3::xxh3_64;

/// Panics if bytes are accepted that are no table.
pub(crate) fn tables(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    match how % 4 {
        0 => look_at(data),
        1 => look_at(&sealed(data.to_vec())),
        _ => look_at(&sealed(fitted(data, how % 4 == 3))),
    }
}

fn look_at(bytes: &[u8]) {
    let Ok(table) = TableRef::parse(bytes) else { return };
    let records: Vec<_> = table.records().collect();
    assert_eq!(records.len(), table.len());
    assert!(records.is_sorted_by(|a, b| (a.sampled, a.hash) < (b.sampled, b.hash)));
    let pages: u64 = records.iter().map(|record| u64::from(record.count)).sum();
    assert_eq!(pages, table.pages());
    assert!(records.iter().all(|record| record.count > 0));
    let body: Vec<u8> = records.iter().flat_map(|record| record.encode()).collect();
    assert_eq!(body, &bytes[HEADER_LEN..], "no bit is without a meaning");
    assert!(table.name().len() <= 64 && !table.name().contains(char::is_control));
    let found = Statistics::of(&table);
    assert_eq!((found.all.pages, found.all.distinct), (pages, records.len() as u64));
    assert!(found.classes <= found.all.distinct && found.code.distinct <= found.all.distinct);
    let twice = overlap(&table, &table).expect("it is sampled as itself");
    assert_eq!((twice.both, twice.only_first + twice.only_second), (found.all.distinct, 0));
    let alone = mix(&[(table, 1)]).expect("it is sampled as itself");
    assert_eq!((alone.pages, alone.pages - alone.saved), (pages, found.all.distinct));
}

/// A valid header and records, sorted if `in_order`.
fn fitted(data: &[u8], in_order: bool) -> Vec<u8> {
    let (name, body) = data.split_at(data.len().min(16));
    let mut records: Vec<[u8; RECORD_LEN]> = body.as_chunks::<RECORD_LEN>().0.to_vec();
    if in_order {
        let key = |record: &[u8; RECORD_LEN]| {
            let mut words = record.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            let mut next = || words.next().unwrap_or(0);
            let sampled = Sampled([next(), next(), next(), next()]);
            let low = next();
            (sampled, u128::from(next()) << 64 | u128::from(low))
        };
        records.sort_by_key(key);
        records.dedup_by_key(|record| key(record));
        records.iter_mut().for_each(|record| record[53..].fill(0));
    }
    let count = |record: &[u8; RECORD_LEN]| {
        u64::from(u32::from_le_bytes([record[48], record[49], record[50], record[51]]))
    };
    let pages: u64 = records.iter().map(count).sum();
    let mut bytes = b"OVERBSPT\x01\0\0\0\x38\0\0\0".to_vec();
    bytes.extend((records.len() as u64).to_le_bytes());
    bytes.extend(pages.to_le_bytes());
    [0_u16, 1024, 2048, 3072].iter().for_each(|offset| bytes.extend(offset.to_le_bytes()));
    bytes.extend([0; 8]);
    bytes.extend(name);
    bytes.resize(HEADER_LEN, 0);
    bytes.extend(records.as_flattened());
    bytes
}

/// The bytes with matching checksums.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some((header, body)) = bytes.split_first_chunk_mut::<HEADER_LEN>() {
        header[112..120].copy_from_slice(&xxh3_64(body).to_le_bytes());
        let sum = xxh3_64(&header[..120]);
        header[120..].copy_from_slice(&sum.to_le_bytes());
    }
    bytes
}
