//! `overbook mrc` as the operator runs it, on traces with known curves.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

/// Ten objects in turn, a thousand times: with fewer than 10 objects in memory all references
/// miss, with 10 all hit.
fn loop_of_ten() -> Vec<u64> {
    (0..10_000).map(|i| i % 10).collect()
}

fn binary(ids: &[u64]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn mrc(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
    command.arg("mrc").args(arguments).current_dir(directory);
    command.stdin(Stdio::null()).output().unwrap()
}

/// Runs `overbook mrc` with `input` on standard input.
fn mrc_of(input: &[u8], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
    command.arg("mrc").arg("-").args(arguments).stdin(Stdio::piped());
    let mut mrc = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    mrc.stdin.take().unwrap().write_all(input).unwrap();
    mrc.wait_with_output().unwrap()
}

fn says(directory: &Path, arguments: &[&str]) -> String {
    let output = mrc(directory, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stderr, b"", "a progress bar is for terminals only");
    String::from_utf8(output.stdout).unwrap()
}

fn with_trace(name: &str, bytes: &[u8]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(name), bytes).unwrap();
    directory
}

#[test]
fn the_curve_is_told_and_drawn() {
    let directory = with_trace("loop.bin", &binary(&loop_of_ten()));
    let text = says(directory.path(), &["loop.bin"]);
    assert!(text.contains("references              10000\n"), "{text}");
    assert!(text.contains("objects                 10\n"), "{text}");
    assert!(text.contains("0.10 % of all: they miss at every size"), "{text}");
    assert!(text.lines().any(|line| line.split_whitespace().eq(["0.05", "10"])), "{text}");
    assert!(text.contains("1.00 │█"), "{text}");
}

#[test]
fn the_curve_is_written_as_json_csv_and_svg() {
    let lines: String = loop_of_ten().iter().map(|id| format!("{id}\n")).collect();
    let directory = with_trace("loop.csv", lines.as_bytes());
    let text = says(directory.path(), &["loop.csv", "--json", "--csv", "c.csv", "--plot", "p.svg"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["references"], &json["method"]), (&10_000.into(), &"exact".into()));
    assert_eq!(json["working_set_objects"], 10.0);
    assert_eq!(json["floor"], 0.001);
    let csv = fs::read_to_string(directory.path().join("c.csv")).unwrap();
    assert_eq!(csv, "objects,miss_ratio\n0,1.000000000\n9,1.000000000\n10,0.001000000\n");
    let svg = fs::read_to_string(directory.path().join("p.svg")).unwrap();
    assert!(svg.contains("miss ratio of loop.csv") && svg.contains("<polyline"));
}

#[test]
fn a_sample_tells_nearly_the_same() {
    let ids: Vec<u64> = (0..1_000_000_u64).map(|i| i * i % 40_009).collect();
    let directory = with_trace("a.bin", &binary(&ids));
    let size = |arguments: &[&str]| {
        let text = says(directory.path(), &[&["a.bin", "--json"], arguments].concat());
        let json: Value = serde_json::from_str(&text).unwrap();
        json["working_set_objects"].as_f64().unwrap()
    };
    let exact = size(&[]);
    for sample in [["--shards", "0.1"], ["--shards-size", "2000"]] {
        let error = size(&sample) / exact - 1.0;
        assert!(error.abs() < 0.1, "{sample:?}: {error}");
    }
}

#[test]
fn a_trace_that_cannot_be_read_is_one_clear_error() {
    let directory = with_trace("cut.bin", &[0; 20]);
    let output = mrc(directory.path(), &["cut.bin", "--plot", "p.svg"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "overbook: cut.bin: it ends 4 bytes into record 3, at byte 16; binary records have 8 bytes: \
         the trace is cut off, or of another format\n"
    );
    assert!(!directory.path().join("p.svg").exists());
}

#[test]
fn a_sample_that_cannot_be_taken_is_refused() {
    let directory = with_trace("a.bin", &binary(&[1]));
    let output = mrc(directory.path(), &["a.bin", "--shards", "1.5"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(error, "overbook: sampling rate 1.5: it must be above 0 and at most 1\n");
    let output = mrc(directory.path(), &["a.bin", "--shards", "0.1", "--shards-size", "99"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_column_is_told() {
    let trace = b"version,time,op,size,lbn\n1,10,2a,512,700\n1,11,28,512,700\n";
    let directory = with_trace("a.csv", trace);
    let text = says(directory.path(), &["a.csv"]);
    assert!(text.contains("ids in column           lbn (5 of 5)\n"), "{text}");
    assert!(text.contains("objects                 1\n"), "{text}");
    let json: Value = serde_json::from_str(&says(directory.path(), &["a.csv", "--json"])).unwrap();
    assert_eq!(json["column"], "lbn");
    let other = says(directory.path(), &["a.csv", "--json", "--column", "time"]);
    let json: Value = serde_json::from_str(&other).unwrap();
    assert_eq!((&json["column"], &json["objects"]), (&"time".into(), &2.0.into()));
    let directory = with_trace("a.bin", &binary(&[1]));
    let text = says(directory.path(), &["a.bin"]);
    assert!(!text.contains("column"), "{text}");
}

#[test]
fn standard_input_is_a_trace() {
    let lines: String = loop_of_ten().iter().map(|id| format!("{id}\n")).collect();
    let zstd = zstd::encode_all(lines.as_bytes(), 1).unwrap();
    let binary = binary(&loop_of_ten());
    for (input, arguments) in [
        (lines.as_bytes(), &["--json"][..]),
        (&zstd, &["--json"]),
        (&binary, &["--json", "--format", "binary"]),
    ] {
        let output = mrc_of(input, arguments);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&json["references"], &json["objects"]), (&10_000.into(), &10.0.into()));
    }
    let error = String::from_utf8(mrc_of(&binary, &[]).stderr).unwrap();
    assert!(error.starts_with("overbook: -: it is no text, and its name does not tell"), "{error}");
}

#[test]
fn input_of_which_nothing_can_be_concluded_is_an_error() {
    let few: Vec<u8> = (1..=100).flat_map(|id| format!("{id}\n").into_bytes()).collect();
    for (input, arguments, what) in [
        (&b""[..], &[][..], "it holds no reference"),
        (b"id,size\n", &[], "it holds no reference"),
        (b"1,2\n", &[], "it has 2 columns and no header; say with --column"),
        (
            &few,
            &["--shards", "0.000000001"],
            "the sample has no object of the trace's 100 references",
        ),
    ] {
        for json in [&[][..], &["--json"]] {
            let output = mrc_of(input, &[arguments, json].concat());
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{error}");
            assert!(error.contains(what), "{error}");
        }
    }
    // A small sample gets a warning.
    let output = mrc_of(&few, &["--shards", "0.5", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let warning = json["warning"].as_str().unwrap();
    assert!(warning.contains("objects, which is little to go by"), "{warning}");
}
