//! `overbook mrc` as the operator runs it, on traces whose curves are known.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

/// Ten objects in turn, a thousand times: nothing hits below 10 objects, everything from there on.
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
