//! `overbook static` as the operator runs it, on this machine's own programs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

fn run(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
    command.arg("static").args(arguments).current_dir(directory);
    command.stdin(Stdio::null()).output().unwrap()
}

fn says(directory: &Path, arguments: &[&str]) -> String {
    let output = run(directory, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stderr, b"", "a progress bar is for terminals only");
    String::from_utf8(output.stdout).unwrap()
}

fn fails(directory: &Path, arguments: &[&str], code: i32) -> String {
    let output = run(directory, arguments);
    assert_eq!(output.status.code(), Some(code));
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

#[test]
fn tables_are_built_shown_compared_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let text = says(directory, &["build", "-o", "one.spt", "/bin/sh", "/usr/bin/env"]);
    assert!(text.contains("GB/s per core") && text.contains("read      2 files"), "{text}");
    says(directory, &["build", "-o", "two.spt", "/bin/sh", "/usr/bin/sort"]);
    let first = fs::read(directory.join("one.spt")).unwrap();
    says(directory, &["build", "-o", "one.spt", "/bin/sh", "/usr/bin/env"]);
    assert!(fs::read(directory.join("one.spt")).unwrap() == first, "the same bytes");

    let text = says(directory, &["show", "one.spt", "two.spt", "--mix", "one=2,two=1"]);
    assert!(text.contains("100.0 %") && text.contains("2 of one, 1 of two: "), "{text}");
    let shown = ["show", "one.spt", "two.spt", "--mix", "one=2,two=1", "--json"];
    let json: Value = serde_json::from_str(&says(directory, &shown)).unwrap();
    let [one, two, both] = [&json["shared"][0][0], &json["shared"][1][1], &json["shared"][0][1]]
        .map(|number| number.as_u64().unwrap());
    assert!(0 < both && both < one && both < two, "{json}");
    let pages = [0, 1].map(|at| json["tables"][at]["pages"].as_u64().unwrap());
    let bytes = json["mix"]["bytes"].as_u64().unwrap();
    assert_eq!(bytes, 4096 * (2 * pages[0] + pages[1]));
    let union = one + two - both;
    assert_eq!(json["mix"]["bytes_saved"].as_u64().unwrap(), bytes - 4096 * union);

    let picture = ["show", "one.spt", "two.spt", "--picture", "both.svg"];
    assert_eq!(says(directory, &picture), says(directory, &picture[..3]));
    let picture = fs::read_to_string(directory.join("both.svg")).unwrap();
    let share = both as f64 / one as f64 * 100.0;
    for words in [&format!("{share:.2} % of one is in two"), "100.00 % of two is in two"] {
        assert!(picture.contains(words), "{words} is missing in\n{picture}");
    }
    let text = fails(directory, &["show", "one.spt", "--picture", "none/both.svg"], 1);
    assert!(text.contains("none/both.svg: No such file"), "{text}");

    let json = says(directory, &["diff", "one.spt", "two.spt", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["both"], both);
    assert_eq!(json["only_first"], one - both);
    let text = says(directory, &["diff", "one.spt", "two.spt"]);
    assert!(text.contains("only one") && text.contains("only two"), "{text}");
    let text = says(directory, &["verify", "one.spt", "two.spt"]);
    assert_eq!(text.matches(": good, ").count(), 2, "{text}");

    // A damaged table and a cut-off one are refused.
    let mut damaged = first.clone();
    damaged[200] ^= 1;
    fs::write(directory.join("damaged.spt"), &damaged).unwrap();
    fs::write(directory.join("short.spt"), &first[..first.len() - 1]).unwrap();
    fs::write(directory.join("text.spt"), "text").unwrap();
    let all = ["verify", "damaged.spt", "one.spt", "short.spt", "text.spt"];
    let text = fails(directory, &all, 1);
    assert!(text.contains("damaged.spt: the records' checksum"), "{text}");
    assert!(text.contains("one.spt: good, "), "{text}");
    assert!(text.contains("short.spt: the table has "), "{text}");
    assert!(text.contains("text.spt: this is no table"), "{text}");
    fails(directory, &["show", "damaged.spt"], 1);
}

#[test]
fn wrong_words_are_answered_with_right_ones() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let build = ["build", "-o", "one.spt", "/bin/sh"];
    says(directory, &build);
    let text = fails(directory, &[&build[..], &["--sample", "0,1,2,3"]].concat(), 2);
    assert!(text.contains("multiples of 8 below 4096"), "{text}");
    let text = fails(directory, &["show", "one.spt", "--mix", "other=3"], 1);
    assert!(text.contains("no table is \"other\"; valid: one"), "{text}");
    let text = fails(directory, &["show", "one.spt", "--mix", "one"], 2);
    assert!(text.contains("such as debian12=3"), "{text}");
    says(directory, &["build", "-o", "two.spt", "/bin/sh", "--sample", "8,16,24,32"]);
    let text = fails(directory, &["diff", "one.spt", "two.spt"], 1);
    assert!(text.contains("[8, 16, 24, 32]"), "{text}");
}

#[test]
fn check_says_what_is_wrong_with_the_tables_that_groups_name() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    says(here, &["build", "-o", "good.spt", "/bin/sh"]);
    says(here, &["build", "-o", "else.spt", "/bin/sh", "--sample", "8,16,24,32"]);
    let good = fs::read(here.join("good.spt")).unwrap();
    let write = |name: &str, at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 2;
        fs::write(here.join(name), bytes).unwrap();
    };
    write("damaged.spt", 200);
    write("newer.spt", 8);
    let named = |names: &[&str]| {
        let paths: Vec<_> = names.iter().map(|name| here.join(name)).collect();
        format!("vms = [\"x\"]\nstatic = {paths:?}\n")
    };
    let check = |text: &str, arguments: &[&str]| {
        fs::write(here.join("overbook.toml"), text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
        let asked = ["check", "--config", "overbook.toml"];
        command.args(asked).args(arguments).current_dir(here).stdin(Stdio::null());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let said = |names: &[&str]| check(&format!("[group.web]\n{}", named(names)), &[]);
    let text = said(&["good.spt"]);
    assert!(
        text.contains("/good.spt of web: fine, ") && text.contains(" distinct pages"),
        "{text}"
    );
    for (name, what) in [
        ("damaged.spt", "the records' checksum"),
        ("newer.spt", "the table is of version 3; valid: 1"),
        ("none.spt", "No such file or directory"),
        ("else.spt", "it is sampled at [8, 16, 24, 32], and the group's tables before it at [0, "),
    ] {
        let text = said(&["good.spt", name]);
        let line = text.lines().find(|line| line.contains(name)).unwrap();
        assert!(line.contains(&format!("{name} of web: {what}")), "{line}");
        assert!(line.ends_with("; web uses none of its tables"), "{line}");
    }

    let both = format!("[group.web]\n{}[group.x]\n{}", named(&["good.spt"]), named(&["none.spt"]));
    let both = both.replacen("\"x\"", "\"w\"", 1);
    let json: Value = serde_json::from_str(&check(&both, &["--json"])).unwrap();
    let tables = json["tables"].as_array().unwrap();
    assert_eq!(tables.len(), 2, "{json}");
    assert!(tables[0]["problem"].is_null() && tables[0]["distinct_pages"].as_u64() > Some(10));
    assert!(tables[1]["group"] == "x" && tables[1]["problem"].is_string(), "{json}");
}

#[test]
fn a_table_without_pages_is_neither_made_nor_used() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::create_dir(directory.join("empty")).unwrap();
    let error = fails(directory, &["build", "-o", "t.spt", "empty"], 1);
    assert!(error.contains("empty: no page came of it: it has no file with content"), "{error}");
    assert!(!directory.join("t.spt").exists());
    // An empty table, as earlier builds could make it.
    let table = pages::offline::Builder::new(pages::offline::Sampling::default()).finish();
    tables::offline::write(&table, &directory.join("t.spt")).unwrap();
    says(directory, &["build", "-o", "sh.spt", "/bin/sh"]);
    for arguments in [
        &["verify", "t.spt"][..],
        &["show", "t.spt"],
        &["diff", "t.spt", "sh.spt"],
        &["diff", "sh.spt", "t.spt"],
    ] {
        let error = fails(directory, arguments, 1);
        assert!(error.contains("t.spt: it has no page: build it anew"), "{arguments:?}: {error}");
    }
}
