//! Tests the rules of ARCHITECTURE.md: permitted dependencies and permitted actions.
//!
//! The test searches the text of the sources, not their meaning: a deliberately disguised
//! violation is for the reviewer to find. The tests at the end show that each check can fail.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// The crates in order; each may depend only on those before it.
const ORDER: [&str; 21] = [
    "overbook-model",
    "overbook-policy",
    "overbook-pages",
    "overbook-sys",
    "overbook-protocol",
    "overbook-pageserver",
    "overbook-cluster",
    "overbook-shim",
    "overbook-stand-in",
    "overbook-tracer",
    "overbook-libvirt",
    "overbook-tables",
    "overbook-worker",
    "overbook-drivers",
    "overbook-disks",
    "overbook-api",
    "overbook",
    "overbook-sim",
    "overbook-lab",
    "overbook-guest",
    "overbook-tests",
];

/// Crates without any access to the outside.
const PURE: [&str; 4] = ["crates/model", "crates/policy", "crates/pages", "crates/sim"];

/// Crates that may use `unsafe`: the system calls, the libraries that QEMU loads, the stand-in for
/// QEMU, and the one file that calls libvirt's C interface.
const BOUNDARY: [&str; 5] = [
    "crates/sys/",
    "crates/shim/",
    "crates/stand-in/",
    "crates/tracer/",
    "crates/libvirt/src/raw.rs",
];

/// Modules that a pure crate never names.
const OUTSIDE_WORLD: [&str; 11] = [
    "std::fs",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::env",
    "Instant::now",
    "SystemTime",
    "tokio",
    "async fn",
    ".await",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Rust source below `dir`, with its text.
fn sources(dir: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = vec![root().join(dir)];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(!found.is_empty(), "no sources below {dir}");
    found
}

/// Lines that are code: neither comments nor documentation.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.trim_start().starts_with("//"))
}

fn names_outside_world(text: &str) -> Option<&'static str> {
    OUTSIDE_WORLD.into_iter().find(|word| code(text).any(|line| line.contains(word)))
}

fn has_unsafe(text: &str) -> bool {
    code(text).any(|line| {
        line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
    })
}

#[test]
fn crates_need_only_those_above_them() {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .unwrap();
    let place: BTreeMap<&str, usize> = ORDER.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    assert_eq!(metadata.packages.len(), ORDER.len(), "a crate is missing from the order");
    for package in &metadata.packages {
        let own = place[package.name.as_str()];
        for dependency in &package.dependencies {
            if let Some(other) = place.get(dependency.name.as_str()) {
                assert!(*other < own, "{} must not need {}", package.name, dependency.name);
            }
        }
    }
    let needs = |package: &str, other: &str| {
        let package = metadata.packages.iter().find(|p| p.name.as_str() == package).unwrap();
        package.dependencies.iter().any(|d| d.name == other)
    };
    assert!(!needs("overbook-sim", "overbook-sys"), "the simulator has no kernel");
    assert!(!needs("overbook-policy", "overbook-sys"), "the policy has no kernel");
    assert!(!needs("overbook-policy", "tokio"), "the policy does not wait");
    for apart in ["axum", "hyper", "rusqlite", "overbook-cluster", "etcd-client"] {
        assert!(!needs("overbook-drivers", apart), "the drivers need no {apart}");
        assert!(!needs("overbook-disks", apart), "the disks need no {apart}");
        assert!(!needs("overbook-api", apart) || apart == "hyper", "the API needs no {apart}");
    }
    for apart in ["axum", "hyper", "rusqlite", "overbook-cluster", "tokio"] {
        assert!(!needs("overbook-worker", apart), "the worker needs no {apart}");
    }
}

#[test]
fn pure_crates_name_nothing_of_the_outside_world() {
    for (name, text) in PURE.iter().flat_map(|dir| sources(&format!("{dir}/src"))) {
        if let Some(word) = names_outside_world(&text) {
            panic!("{name} names {word}");
        }
    }
}

#[test]
fn unsafe_stands_only_at_the_kernel_boundary() {
    for (name, text) in sources("crates").into_iter().chain(sources("guest")) {
        let is_boundary = BOUNDARY.iter().any(|dir| name.starts_with(dir));
        assert!(is_boundary || !has_unsafe(&text), "{name} has unsafe code");
    }
}

#[test]
fn every_module_opens_with_its_idea() {
    let all = ["crates", "guest", "tests"].into_iter().flat_map(sources);
    for (name, text) in all {
        let is_tests = name.ends_with("/tests.rs") || name.contains("/benches/");
        assert!(is_tests || text.starts_with("//!"), "{name} has no head comment");
    }
}

/// The formatter keeps code within this width. Tables and diagrams are exempt.
#[test]
fn comments_end_within_100_columns() {
    for (name, text) in ["crates", "guest", "tests"].into_iter().flat_map(sources) {
        for line in text.lines().filter(|line| line.chars().count() > 100) {
            let words = line.trim_start().trim_start_matches(['/', '!']);
            let is_comment = words.len() < line.trim_start().len();
            let is_prose = !words.starts_with("  ") && !words.contains(" | ");
            assert!(!is_comment || !is_prose || words.contains("://"), "{name}: {line}");
        }
    }
}

#[test]
fn no_source_grows_beyond_a_room() {
    for (name, text) in ["crates", "guest", "tests"].into_iter().flat_map(sources) {
        let lines = text.lines().count();
        assert!(lines <= 600, "{name} has {lines} lines; split it by what its parts do");
    }
}

/// Pages that name files of the tree.
const GUIDES: [&str; 2] = ["ARCHITECTURE.md", "docs/src/tour.md"];

/// Files of the tree that a text names in backquotes.
fn named_files(text: &str) -> Vec<&str> {
    let tops = ["crates/", "tests/", "guest/", "docs/", "packaging/", "web/"];
    let named = text.split('`').skip(1).step_by(2);
    named.filter(|name| tops.iter().any(|top| name.starts_with(top))).collect()
}

#[test]
fn guides_name_files_that_are_there() {
    for page in GUIDES {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let named = named_files(&text);
        assert!(named.len() >= 10, "{page} names {} files", named.len());
        for file in named {
            assert!(root().join(file).exists(), "{page} names {file}, which is not there");
        }
    }
}

#[test]
fn the_overview_is_short_and_names_one_file_a_row() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    assert!(text.lines().count() <= 200, "ARCHITECTURE.md has {} lines", text.lines().count());
    let rows = text.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    for row in rows {
        assert_eq!(named_files(row).len(), 1, "{row}");
    }
}

#[test]
fn the_checks_can_fail() {
    assert_eq!(
        named_files("see `crates/a.rs`, `b/c.rs` and `tests/d.rs`"),
        ["crates/a.rs", "tests/d.rs"]
    );
    assert_eq!(names_outside_world("use std::fs;"), Some("std::fs"));
    assert_eq!(names_outside_world("// like std::fs"), None);
    assert!(has_unsafe("let x = unsafe { y };"));
    assert!(!has_unsafe("#![forbid(unsafe_code)]"));
}
