use std::{fs, path::PathBuf};

use tempfile::TempDir;

use super::*;

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

fn read(path: &Path, format: Option<Format>, column: Option<&str>) -> Result<Vec<u64>, TraceError> {
    let mut trace = Trace::open(path, format, column)?;
    let (mut all, mut batch) = (Vec::new(), Vec::new());
    loop {
        trace.next_batch(&mut batch)?;
        if batch.is_empty() {
            return Ok(all);
        }
        all.extend(&batch);
    }
}

fn ids(name: &str, bytes: &[u8]) -> Vec<u64> {
    read(&Files::new().file(name, bytes), None, None).unwrap()
}

/// The error, without the directory.
fn error(name: &str, bytes: &[u8]) -> String {
    let files = Files::new();
    let path = files.file(name, bytes);
    let text = read(&path, None, None).unwrap_err().to_string();
    text.replace(&format!("{}/", files.0.path().display()), "")
}

fn oracle(ids: &[u64]) -> Vec<u8> {
    let record = |id: &u64| {
        [&7_u32.to_le_bytes()[..], &id.to_le_bytes(), &1_u32.to_le_bytes(), &(-1_i64).to_le_bytes()]
            .concat()
    };
    ids.iter().flat_map(record).collect()
}

fn compressed(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

#[test]
fn a_bare_list_of_numbers_is_a_trace() {
    assert_eq!(ids("a.txt", b"1\n0xff\n\n 3 \r\n18446744073709551615\n"), [1, 255, 3, u64::MAX]);
}

#[test]
fn a_header_says_where_the_ids_are() {
    assert_eq!(ids("a.csv", b"time,obj_id,size\n0,5,1\n1,6,1\n"), [5, 6]);
    assert_eq!(ids("a.csv", b"what\n5\n6\n"), [5, 6]);
    assert_eq!(ids("a.tsv", b"4\t9\n5\t9\n"), [4, 5]);
    assert_eq!(ids("a.csv", b"\"name, first\",\"id\"\n\"x,y\",\"7\"\n"), [7]);
    assert_eq!(ids("a.txt", b"10  20\n30 40\n"), [10, 30]);
}

#[test]
fn the_user_says_where_the_ids_are() {
    let files = Files::new();
    let path = files.file("a.csv", b"id,block\n1,2\n3,4\n");
    assert_eq!(read(&path, None, Some("Block")).unwrap(), [2, 4]);
    assert_eq!(read(&path, None, Some("2")).unwrap(), [2, 4]);
    let error = read(&path, None, Some("lba")).unwrap_err().to_string();
    assert!(
        error.ends_with("line 1: it has no column `lba`; its 2 columns are: id, block"),
        "{error}"
    );
}

#[test]
fn binary_traces_are_read_whole() {
    let many: Vec<u64> = (0..100_000).map(|i| i * i).collect();
    let bytes: Vec<u8> = many.iter().flat_map(|id| id.to_le_bytes()).collect();
    assert_eq!(ids("a.bin", &bytes), many);
    assert_eq!(ids("a.u64.zst", &compressed(&bytes)), many);
    assert_eq!(ids("w.oracleGeneral", &oracle(&many)), many);
    assert_eq!(ids("w.oracleGeneral.bin.zst", &compressed(&oracle(&many))), many);
    let text: String = many.iter().map(|id| format!("{id}\n")).collect();
    assert_eq!(ids("a.csv.zst", &compressed(text.as_bytes())), many);
}

#[test]
fn a_trace_in_several_frames_is_read_to_its_end() {
    let frames = [compressed(&1_u64.to_le_bytes()), compressed(&2_u64.to_le_bytes())].concat();
    assert_eq!(ids("a.bin.zst", &frames), [1, 2]);
}

#[test]
fn a_name_that_tells_nothing_needs_a_format() {
    let files = Files::new();
    let path = files.file("trace", b"1\n");
    let text = read(&path, None, None).unwrap_err().to_string();
    assert!(text.contains("say it with --format csv, binary or oracle-general"), "{text}");
    assert_eq!(read(&path, Some(Format::Csv), None).unwrap(), [1]);
}

#[test]
fn an_empty_trace_is_an_error() {
    assert_eq!(
        error("a.csv", b""),
        "a.csv: it holds no reference; a csv trace has at least one line with an id"
    );
    assert_eq!(error("a.csv", b"id,size\n"), error("a.csv", b"\n\n"));
    assert_eq!(
        error("a.bin", b""),
        "a.bin: it holds no reference; a binary trace has at least one record"
    );
    assert!(error("a.bin.zst", &compressed(b"")).contains("no reference"));
    assert!(error("a.bin.zst", b"").contains("cut off"));
}

#[test]
fn a_trace_that_is_cut_off_is_an_error_with_its_place() {
    assert_eq!(
        error("a.bin", &[0; 19]),
        "a.bin: it ends 3 bytes into record 3, at byte 16; binary records have 8 bytes: \
         the trace is cut off, or of another format"
    );
    let cut = &oracle(&[1, 2, 3])[..60];
    assert!(error("a.oracleGeneral", cut).contains("ends 12 bytes into record 3, at byte 48;"));
    let whole = compressed(&oracle(&(0..10_000).collect::<Vec<_>>()));
    let text = error("a.oracleGeneral.zst", &whole[..whole.len() / 2]);
    assert!(text.contains("its zstd data cannot be read beyond byte"), "{text}");
    assert_eq!(
        error("a.csv", b"id,size\n1,5\n2"),
        "a.csv: line 3: it has 1 columns; the first line has 2: the trace is cut off or mixed"
    );
}

#[test]
fn a_last_line_without_end_is_read_and_mentioned() {
    let path = Files::new();
    let path = path.file("a.csv", b"1\n23");
    let (mut trace, mut ids) = (Trace::open(&path, None, None).unwrap(), Vec::new());
    let mut all: Vec<u64> = Vec::new();
    for _ in 0..3 {
        trace.next_batch(&mut ids).unwrap();
        all.extend(&ids);
    }
    assert_eq!(all, [1, 23]);
    assert!(trace.warning().unwrap().contains("cut off"));
}

#[test]
fn another_format_than_was_said_is_an_error() {
    assert_eq!(
        error("a.bin", b"time,id\n1,2\n3,4\n"),
        "a.bin: record 1, at byte 0: it is text; --format csv reads text: the trace is damaged or \
         of another format"
    );
    assert!(error("a.csv", &oracle(&[1, 2])).contains("line 1:"));
    let noise: Vec<u8> =
        (0..10_u64).flat_map(|i| (!(i << 40)).to_le_bytes()).chain([0; 16]).collect();
    assert!(error("a.oracleGeneral", &noise).contains("its next access is -"));
    assert!(error("a.bin.zst", &[7; 64]).contains("no zstd"));
}

#[test]
fn a_field_that_is_no_id_is_an_error_with_its_line() {
    let valid = "is no id; an id is a whole number below 2^64, decimal or 0x…";
    assert_eq!(error("a.csv", b"id\n1\nx\n"), format!("a.csv: line 3: `x` {valid}"));
    assert_eq!(error("a.csv", b"-1\n"), format!("a.csv: line 1: `-1` {valid}"));
    assert_eq!(
        error("a.csv", b"1\n18446744073709551616\n"),
        format!("a.csv: line 2: `18446744073709551616` {valid}")
    );
}

#[test]
fn an_endless_line_takes_no_memory() {
    let mut bytes = b"1\n".to_vec();
    bytes.resize(3_000_000, b'7');
    assert_eq!(
        error("a.csv", &bytes),
        "a.csv: line 2: it is longer than 256 KiB; a line holds one reference"
    );
}

#[test]
fn what_was_read_of_the_file_is_known() {
    let files = Files::new();
    let path = files.file("a.bin", &[1; 80]);
    let mut trace = Trace::open(&path, None, None).unwrap();
    trace.next_batch(&mut Vec::new()).unwrap();
    assert_eq!((trace.file_bytes(), trace.bytes_read()), (80, 80));
    let missing = Trace::open(&files.0.path().join("b.bin"), None, None).map(|_| ()).unwrap_err();
    assert!(missing.to_string().contains("No such file"));
}
