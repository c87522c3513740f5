//! Traces as the tracer writes them, cut and damaged.

use super::*;

pub(crate) fn header(start_us: u64, pages: u64) -> Vec<u8> {
    let numbers = [VERSION.to_le_bytes(), 100_000_u32.to_le_bytes()].concat();
    [MAGIC.as_slice(), &numbers, &start_us.to_le_bytes(), &pages.to_le_bytes()].concat()
}

pub(crate) fn record(lasted_us: u64, pages: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut put = |mut value: u64| {
        while value >= 0x80 {
            bytes.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        bytes.push(value.to_le_bytes()[0]);
    };
    put(lasted_us);
    put(pages.len() as u64);
    let mut before = 0;
    for &page in pages {
        let difference = i64::from(page) - before;
        put(((difference << 1) ^ (difference >> 63)).cast_unsigned());
        before = i64::from(page);
    }
    [u32::try_from(bytes.len()).unwrap().to_le_bytes().as_slice(), &bytes].concat()
}

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

fn read(bytes: &[u8]) -> Result<Vec<Tick>, TraceError> {
    let file = file(bytes);
    let mut reader = TraceReader::open(file.path())?;
    let mut ticks = Vec::new();
    while let Some(tick) = reader.next_tick()? {
        ticks.push(tick);
    }
    Ok(ticks)
}

#[test]
fn ticks_come_back_with_their_times_and_pages_in_order() {
    let parts = [header(500, 70_000), record(100_000, &[5, 69_999, 0]), record(99_000, &[])];
    let expected = [
        Tick { end_us: 100_500, pages: vec![5, 69_999, 0] },
        Tick { end_us: 199_500, pages: vec![] },
    ];
    assert_eq!(read(&parts.concat()).unwrap(), expected);
}

#[test]
fn a_trace_cut_anywhere_is_readable_up_to_its_last_whole_record() {
    let head = header(0, 100);
    let (first, second) = (record(100_000, &[1, 2]), record(100_000, &[3]));
    let whole = [head.clone(), first.clone(), second].concat();
    for length in head.len()..=whole.len() {
        let ticks = read(&whole[..length]).unwrap().len();
        let after_first = length >= head.len() + first.len();
        assert_eq!(ticks, usize::from(after_first) + usize::from(length == whole.len()));
    }
}

#[test]
fn what_is_no_trace_is_refused() {
    let mut later = header(0, 10);
    later[8] = 2;
    for (bytes, named) in [
        (vec![], "no trace"),
        (header(0, 10)[..31].to_vec(), "no trace"),
        (vec![b'x'; 64], "no trace"),
        (header(0, 0), "no trace"),
        (later, "version 2"),
    ] {
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn damage_is_found_and_placed() {
    let good = record(100_000, &[1]);
    let record = |payload: &[u8]| {
        [u32::try_from(payload.len()).unwrap().to_le_bytes().as_slice(), payload].concat()
    };
    for (bad, what) in [
        (record(&[1, 1, 40]), "beyond the guest's RAM"),
        (record(&[1, 1, 1]), "beyond the guest's RAM"),
        (record(&[1, 9, 1]), "fewer bytes than pages"),
        (record(&[1, 1, 2, 2]), "more bytes than pages"),
        (record(&[1, 1, 0x80]), "within a number"),
        (record(&[0xff; 11]), "within a number"),
        (u32::MAX.to_le_bytes().to_vec(), "longer than all pages"),
    ] {
        let error = read(&[header(0, 10), good.clone(), bad].concat()).unwrap_err().to_string();
        assert!(error.contains("at byte 41") && error.contains(what), "{error}");
    }
}
