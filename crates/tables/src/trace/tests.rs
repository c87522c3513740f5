use std::{
    fs,
    io::{Read as _, Write as _},
    path::PathBuf,
    process::Stdio,
};

use requires::{Requirement, requires};
use tempfile::TempDir;

use super::*;

struct TraceFiles(TempDir);

impl TraceFiles {
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
    read(&TraceFiles::new().file(name, bytes), None, None).unwrap()
}

/// The error, without the directory.
fn error(name: &str, bytes: &[u8]) -> String {
    let files = TraceFiles::new();
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

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::read::GzEncoder::new(bytes, flate2::Compression::fast());
    let mut all = Vec::new();
    packed.read_to_end(&mut all).unwrap();
    all
}

/// Compresses with a program; `None` if it is not installed.
fn packed_by(program: &'static str, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut packer = std::process::Command::new(program);
    packer.arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut packer = requires(Requirement::Program(program), packer.spawn())?;
    packer.stdin.take().unwrap().write_all(bytes).unwrap();
    Some(packer.wait_with_output().unwrap().stdout)
}

#[test]
fn a_bare_list_of_numbers_is_a_trace() {
    assert_eq!(ids("a.txt", b"1\n0xff\n\n 3 \r\n18446744073709551615\n"), [1, 255, 3, u64::MAX]);
}

#[test]
fn a_header_says_where_the_ids_are() {
    assert_eq!(ids("a.csv", b"time,obj_id,size\n0,5,1\n1,6,1\n"), [5, 6]);
    assert_eq!(ids("a.csv", b"what\n5\n6\n"), [5, 6]);
    assert_eq!(ids("a.csv", b"\"name, first\",\"id\"\n\"x,y\",\"7\"\n"), [7]);
    assert_eq!(ids("a.txt", b"time  key\n30 40\n"), [40]);
    assert_eq!(ids("a.txt", b"# time key\n30 40\n"), [40], "a comment may be the header");
}

#[test]
fn the_user_says_where_the_ids_are() {
    let files = TraceFiles::new();
    let path = files.file("a.csv", b"id,Block\n1,2\n3,4\n");
    assert_eq!(read(&path, None, Some("Block")).unwrap(), [2, 4]);
    assert_eq!(read(&path, None, Some("2")).unwrap(), [2, 4]);
    let error = read(&path, None, Some("lba")).unwrap_err().to_string();
    assert!(
        error.ends_with("line 1: it has no column `lba`; its columns: 1 `id`, 2 `Block`"),
        "{error}"
    );
    let path = files.file("b.tsv", b"4\t9\n5\t9\n");
    assert_eq!(read(&path, None, Some("1")).unwrap(), [4, 5]);
    let error = read(&path, None, Some("id")).unwrap_err().to_string();
    let wanted =
        "line 1: it has no column `id`, and no header with names; the first line: 1 `4`, 2 `9`";
    assert!(error.ends_with(wanted), "{error}");
}

/// The ids and the column that they were read from.
fn ids_and_column(text: &str) -> (Vec<u64>, String, String) {
    let files = TraceFiles::new();
    let mut trace = Trace::open(&files.file("a.csv", text.as_bytes()), None, None).unwrap();
    let mut ids = Vec::new();
    trace.next_batch(&mut ids).unwrap();
    let (column, words) = trace.column().unwrap();
    (ids, column.to_owned(), words)
}

#[test]
fn the_column_that_was_read_is_named() {
    for (text, name, words) in [
        ("version,time,op,size,lbn\n1,10,2a,512,700\n", "lbn", "lbn (5 of 5)"),
        ("Time Sector\n1 700\n", "Sector", "Sector (2 of 2)"),
        (
            "timestamp,anonymized key,key size\n1,700,9\n",
            "anonymized key",
            "anonymized key (2 of 3)",
        ),
        ("700\n", "1", "1 of 1, which no header names"),
        ("what\n700\n", "what", "what (1 of 1)"),
    ] {
        assert_eq!(ids_and_column(text), (vec![700], name.to_owned(), words.to_owned()));
    }
}

#[test]
fn a_place_is_an_object_of_its_device() {
    // Alibaba, Tencent and MSR Cambridge, with a header.
    for (text, name) in [
        (
            "device_id,opcode,offset,length,timestamp\n1,R,8,1,1\n2,R,8,1,2\n1,W,8,1,3\n",
            "device_id,offset",
        ),
        (
            "Timestamp,Offset,Size,IOType,VolumeID\n1,8,1,0,1\n2,8,1,0,2\n3,8,1,1,1\n",
            "VolumeID,Offset",
        ),
        (
            "Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime\n1,a,1,Read,8,1,1\n\
             2,a,2,Read,8,1,1\n3,a,1,Write,8,1,1\n",
            "DiskNumber,Offset",
        ),
    ] {
        let (ids, column, _) = ids_and_column(text);
        assert_eq!(column, name);
        assert!(ids[0] == ids[2] && ids[0] != ids[1], "{ids:?}");
    }
    let files = TraceFiles::new();
    let path = files.file("a.csv", b"1,R,8\n2,R,8\n1,W,8\n");
    let ids = read(&path, None, Some("1,3")).unwrap();
    assert!(ids[0] == ids[2] && ids[0] != ids[1], "{ids:?}");
}

#[test]
fn a_column_is_never_guessed() {
    let say = "say with --column which has the ids";
    for (text, found) in [
        (
            "5,6\n7,8\n",
            format!("it has 2 columns and no header; {say}; the first line: 1 `5`, 2 `6`"),
        ),
        (
            "128166370000000001,srv,0,Write,409600\n",
            format!(
                "it has 5 columns and no header; {say}; the first line: 1 `128166370000000001`, \
                 2 `srv`, 3 `0`, 4 `Write`, 5 `409600`"
            ),
        ),
        (
            "time,device\n1,2\n",
            format!(
                "none of its 2 columns is known to have ids; {say}; its columns: 1 `time`, 2 `device`"
            ),
        ),
        (
            "id,offset\n1,2\n",
            format!(
                "several of its columns may have the ids; {say}; its columns: 1 `id`, 2 `offset`"
            ),
        ),
        (
            "dev,disk,lba\n1,2,3\n",
            format!(
                "several of its columns name a device; {say}; its columns: 1 `dev`, 2 `disk`, 3 `lba`"
            ),
        ),
        (
            "a b\nc d\n",
            format!("it has 2 columns and no header; {say}; the first line: 1 `a`, 2 `b`"),
        ),
    ] {
        assert_eq!(error("a.csv", text.as_bytes()), format!("a.csv: line 1: {found}"));
    }
    let many: String = (0..40).map(|column| format!("{column}x,")).collect();
    assert!(error("a.csv", many.as_bytes()).ends_with("20 `19x`, and 21 more"));
    let found = error("a.csv", b"# a comment\n\n1,2\n");
    assert!(found.starts_with("a.csv: line 3: it has 2 columns"), "{found}");
}

#[test]
fn ids_that_are_words_are_objects() {
    let words = ids("a.csv", b"key,op\nnz:u:eeW,get\nb,get\n\"nz:u:eeW\",set\n");
    assert!(words[0] == words[2] && words[0] != words[1], "{words:?}");
    // A digest is not a number, even if it has only digits.
    let words = ids("a.txt", b"18446744073709551616\n18446744073709551617\n");
    assert_ne!(words[0], words[1]);
    assert_eq!(ids("a.txt", b"apple\nbanana\napple\n").len(), 3, "no header");
    assert_eq!(ids("a.txt", b"key\nbanana\napple\n").len(), 2, "a header");
}

#[test]
fn words_among_numbers_are_mentioned() {
    let files = TraceFiles::new();
    let mut trace = Trace::open(&files.file("a.csv", b"id\n1\nx\n2\n"), None, None).unwrap();
    let mut ids = Vec::new();
    trace.next_batch(&mut ids).unwrap();
    assert_eq!(ids.len(), 3);
    let wanted = "1 ids are words and 2 are numbers; the first word is `x` in line 3";
    assert_eq!(trace.warning().as_deref(), Some(wanted));
}

#[test]
fn comments_are_passed_over() {
    let text = b"# LIRS's own\n\n1\n  \n # two\n2\n*\n3\n*\n";
    assert_eq!(ids("a.txt", text), [1, 2, 3]);
    let long = [b"#".repeat(1 << 17), b"\n".to_vec()].concat().repeat(5);
    assert_eq!(ids("a.txt", &[&long[..], b"time,id\n0,7\n"].concat()), [7]);
    assert_eq!(error("a.csv", b"# 1\n*\n"), error("a.csv", b""));
}

#[test]
fn text_may_begin_as_texts_do() {
    assert_eq!(ids("a.csv", b"\xef\xbb\xbfid,size\r\n7,1\r\n"), [7]);
    assert_eq!(ids("a.csv", b"\xef\xbb\xbf7\n"), [7]);
    assert_eq!(ids("a.csv", b"\n\n  7\n 8\n"), [7, 8]);
    let utf16: Vec<u8> = "\u{feff}id\n7\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    for bytes in [&utf16[..], &utf16[2..], &utf16[1..], b"\xfe\xff\0i\0d"] {
        for name in ["a.csv", "trace"] {
            let error =
                read(&TraceFiles::new().file(name, bytes), Some(Format::Csv), None).unwrap_err();
            assert!(error.to_string().contains("iconv -f UTF-16 -t UTF-8"), "{error}");
        }
    }
    assert!(error("trace", &utf16).contains("it is UTF-16"));
    assert!(error("a.csv", b"1\r2\r3\r").contains("has a carriage return; lines end in"));
    assert!(error("a.csv", b"{\"id\": 1}\n").contains("line 1: it is JSON; a csv; `jq -r"));
    assert!(error("a.csv", b"1\n\x1b[2J\n").contains("line 2: `\\u{1b}[2J` is no id"));
    assert!(error("a.csv", b"id,size\n,1\n").contains("line 2: its id is empty"));
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
    // A skippable frame comes first, as pzstd writes it.
    let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4][..], &frames].concat();
    assert_eq!(ids("a.bin.zst", &skipped), [1, 2]);
    let members = [gzip(b"id\n1\n"), gzip(b"2\n")].concat();
    assert_eq!(ids("a.csv.gz", &members), [1, 2]);
    if let Some(xz) = packed_by("xz", b"1\n2\n") {
        assert_eq!(ids("a.csv.xz", &[&xz[..], &xz].concat()), [1, 2, 1, 2]);
    }
    assert!(error("a.csv.gz", &[&members[..], b"more"].concat()).contains("its gzip data cannot"));
    assert!(error("a.bin.zst", &[&frames[..], b"more"].concat()).contains("its zstd data cannot"));
}

#[test]
fn how_it_is_compressed_its_first_bytes_tell() {
    let text = b"id\n1\n2\n";
    for name in ["a.csv", "a.csv.ZST", "a.CSV.gz", "a.csv.zst.1", "trace"] {
        for packed in [Some(compressed(text)), Some(gzip(text)), packed_by("xz", text)] {
            assert_eq!(packed.map_or(vec![1, 2], |packed| ids(name, &packed)), [1, 2], "{name}");
        }
    }
    assert_eq!(ids("a.bin.GZ", &gzip(&[7, 0, 0, 0, 0, 0, 0, 0])), [7]);
    let cut = gzip(text);
    let cut = error("a.csv.gz", &cut[..cut.len() - 9]);
    assert!(cut.contains("a.csv.gz: its gzip data cannot be read beyond byte"), "{cut}");
    if let Some(xz) = packed_by("xz", text) {
        let cut = error("a.csv", &xz[..xz.len() - 20]);
        assert!(cut.contains("a.csv: its xz data cannot be read beyond byte"), "{cut}");
    }
}

#[test]
fn what_is_not_read_is_named_with_the_way_out() {
    if let Some(bzip2) = packed_by("bzip2", b"1\n2\n") {
        let wanted = "it is compressed by bzip2, which is not read; `bzcat FILE | overbook mrc -` \
                      reads it";
        for name in ["a.csv", "a.csv.bz2", "a.bin", "trace"] {
            assert_eq!(error(name, &bzip2), format!("{name}: {wanted}"));
        }
    }
    let mut tar = vec![b'x'; 1024];
    tar[257..262].copy_from_slice(b"ustar");
    for (bytes, what) in [
        (&b"PK\x03\x04more"[..], "it is a zip archive"),
        (b"\x04\x22\x4d\x18", "it is compressed by lz4"),
        (b"PAR1", "it is a Parquet file"),
        (&tar, "it is a tar archive, which is not read; `tar -xOf FILE | overbook mrc -`"),
        (&gzip(&tar), "it is a tar archive"),
        (&compressed(&gzip(b"1\n")), "it is compressed twice, by gzip inside"),
    ] {
        for name in ["a.csv", "a.bin"] {
            assert!(error(name, bytes).contains(what), "{name}: {}", error(name, bytes));
        }
    }
    let misnamed = error("a.csv.gz", b"1\n2\n");
    assert!(misnamed.contains("its name ends in .gz, but its first bytes are of no"), "{misnamed}");
}

#[test]
fn a_name_that_tells_nothing_needs_a_format() {
    let files = TraceFiles::new();
    let path = files.file("trace", &1_u64.to_le_bytes());
    let text = read(&path, None, None).unwrap_err().to_string();
    assert!(text.contains("say it with --format csv, binary or oracle-general"), "{text}");
    assert_eq!(read(&path, Some(Format::Binary), None).unwrap(), [1]);
    assert_eq!(ids("trace", b"1\n"), [1], "but text is text");
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
    let path = TraceFiles::new();
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
    assert!(error("a.bin.zst", &[7; 64]).contains("not compressed"));
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
    let files = TraceFiles::new();
    let path = files.file("a.bin", &[1; 80]);
    let mut trace = Trace::open(&path, None, None).unwrap();
    trace.next_batch(&mut Vec::new()).unwrap();
    assert_eq!((trace.file_bytes(), trace.bytes_read()), (80, 80));
    let missing = Trace::open(&files.0.path().join("b.bin"), None, None).map(|_| ()).unwrap_err();
    assert!(missing.to_string().contains("No such file"));
}
