//! One word, one meaning: names of types are counted, and the glossary's words are looked up.
//!
//! A type name may stand for two things in the whole workspace. [`ALIKE`] lists names that stand
//! for the same thing wherever they occur.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The most meanings of a name.
const MOST: usize = 2;

/// Names with one meaning, however often they are defined: (name, meaning).
const ALIKE: [(&str, &str); 2] = [
    ("Arguments", "the arguments of a command of `overbook`"),
    ("Options", "the options of a scenario's command line"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The text of each Rust file.
fn sources() -> Vec<String> {
    let (mut found, mut open) =
        (Vec::new(), ["crates", "guest", "tests"].map(|it| root().join(it)).to_vec());
    while let Some(path) = open.pop() {
        let is_output = path.file_name().is_some_and(|name| name == "target");
        if path.is_dir() && !is_output {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(std::fs::read_to_string(&path).unwrap());
        }
    }
    assert!(found.len() > 500, "{} files", found.len());
    found
}

/// The words of a line without its visibility.
fn words(line: &str) -> Vec<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(')').map_or(rest, |(_, it)| it),
        Some(rest) => rest,
        None => line,
    };
    line.split(|it: char| !it.is_alphanumeric() && it != '_').filter(|it| !it.is_empty()).collect()
}

/// The name of the type that a line defines.
fn type_name(line: &str) -> Option<&str> {
    match words(line)[..] {
        ["struct" | "enum" | "trait" | "union", name, ..] => Some(name),
        ["unsafe", "trait", name, ..] => Some(name),
        _ => None,
    }
}

#[test]
fn no_type_name_has_more_than_two_meanings() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for text in sources() {
        for name in text.lines().filter_map(type_name) {
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }
    counts.retain(|name, count| *count > MOST && ALIKE.iter().all(|(alike, _)| alike != name));
    assert!(counts.is_empty(), "names with more than {MOST} definitions: {counts:?}");
}

/// All names that are defined: of types, functions, constants, modules, fields, variants, crates.
fn defined() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for text in sources() {
        for line in text.lines() {
            match words(line)[..] {
                ["const" | "async" | "unsafe", "fn", name, ..]
                | [
                    "struct" | "enum" | "trait" | "fn" | "const" | "mod" | "type" | "static",
                    name,
                    ..,
                ] => {
                    names.insert(name.to_owned());
                }
                // A field, or a variant.
                [name, ..] if line.starts_with("    ") => {
                    names.insert(name.to_owned());
                }
                _ => {}
            }
        }
    }
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    names.extend(crates.map(|it| it.unwrap().file_name().into_string().unwrap()));
    names
}

#[test]
fn each_word_of_the_glossary_is_in_the_source() {
    let text = std::fs::read_to_string(root().join("docs/src/glossary.md")).unwrap();
    let names = defined();
    let rows: Vec<(&str, &str)> = text
        .lines()
        .filter(|line| line.starts_with("| ") && line.ends_with("` |"))
        .filter_map(|line| Some((line.split('|').nth(1)?.trim(), line.rsplit('`').nth(1)?)))
        .collect();
    assert!(rows.len() > 50, "{} rows", rows.len());
    for (word, path) in rows {
        for name in path.split("::") {
            assert!(names.contains(name), "{word}: `{path}`: no {name} in the source");
        }
    }
}

#[test]
fn the_checks_can_fail() {
    assert_eq!(type_name("    pub(in crate::a) struct Page<'a> {"), Some("Page"));
    assert_eq!(type_name("pub unsafe trait Page {"), Some("Page"));
    assert_eq!(type_name("    structure Page"), None);
    assert!(!defined().contains("no_such_name_anywhere_at_all"));
}
