//! Tests the rules of ARCHITECTURE.md: permitted dependencies and permitted actions.
//!
//! The test searches the text of the sources, not their meaning: a deliberately disguised
//! violation is for the reviewer to find. The tests at the end show that each check can fail.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Crates that need none of the workspace, and that none needs.
const APART: [&str; 3] = ["stand-in", "tracer", "guest"];

/// Crates that nothing links: QEMU loads two of them, and one is a process of its own.
const LINKED_BY_NONE: [&str; 3] = ["shim", "tracer", "libvirt"];

/// The crate that the tests of any other may need.
const FOR_TESTS: &str = "requires";

/// Packages that a crate must not need, not even through others.
const BARRED: [(&str, &[&str]); 7] = [
    ("policy", &["overbook-sys", "tokio"]),
    ("sim", &["overbook-sys", "tokio"]),
    ("overbook", &["overbook-libvirt", "virt", "virt-sys"]),
    ("worker", &["axum", "hyper", "rusqlite", "etcd-client", "overbook-cluster", "tokio"]),
    ("drivers", &["axum", "hyper", "rusqlite", "etcd-client", "overbook-cluster"]),
    ("disks", &["axum", "hyper", "rusqlite", "etcd-client", "overbook-cluster"]),
    ("api", &["axum", "rusqlite", "etcd-client", "overbook-cluster", "overbook-sys"]),
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

/// The layers of crates in ARCHITECTURE.md: the names between its arrows, lowest layer first.
fn layers(text: &str) -> Vec<Vec<&str>> {
    let edges = text.split_once("Edges between crates go one way:").unwrap().1;
    let edges = edges.split_once(". ").unwrap().0;
    edges.split('←').map(|layer| layer.split('`').skip(1).step_by(2).collect()).collect()
}

/// The name of a crate in ARCHITECTURE.md.
fn short(package: &str) -> &str {
    package.strip_prefix("overbook-").unwrap_or(package)
}

/// The dependencies of all packages, as cargo resolves them for this platform.
fn metadata() -> cargo_metadata::Metadata {
    let options = ["--locked", "--offline", "--filter-platform", "x86_64-unknown-linux-gnu"];
    cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .other_options(options.map(str::to_owned))
        .exec()
        .unwrap()
}

#[test]
fn crates_need_only_those_above_them() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let metadata = metadata();
    let place: BTreeMap<&str, usize> = layers(&text)
        .into_iter()
        .enumerate()
        .flat_map(|(layer, names)| names.into_iter().map(move |name| (name, layer)))
        .collect();
    let own: BTreeSet<&str> =
        metadata.workspace_packages().iter().map(|package| short(&package.name)).collect();
    let told: BTreeSet<&str> = place.keys().copied().chain(APART).collect();
    assert_eq!(told, own, "the crates that ARCHITECTURE.md names, and those that there are");
    for package in metadata.workspace_packages() {
        let name = short(&package.name);
        for dependency in &package.dependencies {
            let other = short(&dependency.name);
            let is_for_tests = dependency.kind == cargo_metadata::DependencyKind::Development
                && other == FOR_TESTS;
            if !own.contains(other) || is_for_tests {
                continue;
            }
            let is_below = place.get(other).zip(place.get(name)).is_some_and(|(a, b)| a < b);
            assert!(is_below, "{name} must not need {other}");
        }
    }
}

/// The crate among these dependencies that nothing may link.
fn links_the_loaded<'a>(dependencies: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    dependencies.into_iter().find(|name| LINKED_BY_NONE.contains(&short(name)))
}

#[test]
fn nothing_links_the_shim_the_tracer_or_libvirts_process() {
    let metadata = metadata();
    let packages = metadata.workspace_packages();
    for name in LINKED_BY_NONE {
        assert!(packages.iter().any(|package| short(&package.name) == name), "no crate {name}");
    }
    for package in packages {
        let dependencies = package.dependencies.iter().map(|dependency| dependency.name.as_str());
        let linked = links_the_loaded(dependencies);
        assert_eq!(linked, None, "{} must not need it, not even for tests", package.name);
    }
}

/// The packages that this one needs when it runs, also through others.
fn needs(metadata: &cargo_metadata::Metadata, name: &str) -> BTreeSet<String> {
    let nodes = &metadata.resolve.as_ref().unwrap().nodes;
    let packages = metadata.workspace_packages();
    let first = packages.iter().find(|package| short(&package.name) == name).unwrap();
    let (mut found, mut open) = (BTreeSet::new(), vec![&first.id]);
    while let Some(id) = open.pop() {
        if !found.insert(id) {
            continue;
        }
        let node = nodes.iter().find(|node| node.id == *id).unwrap();
        let is_normal = |kind: &cargo_metadata::DepKindInfo| {
            kind.kind == cargo_metadata::DependencyKind::Normal
        };
        let needed = node.deps.iter().filter(|dep| dep.dep_kinds.iter().any(is_normal));
        open.extend(needed.map(|dep| &dep.pkg));
    }
    found.into_iter().map(|id| metadata[id].name.to_string()).collect()
}

#[test]
fn no_crate_needs_what_is_not_its_own() {
    let metadata = metadata();
    for (name, barred) in BARRED {
        let needed = needs(&metadata, name);
        for other in barred {
            assert!(!needed.contains(*other), "{name} must not need {other}");
        }
    }
    // The search finds what is reached through others.
    assert!(needs(&metadata, "overbook").contains("etcd-client"));
    assert!(needs(&metadata, "disks").contains("rustls"));
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

/// Things that the whole kernel shares, as tests name them.
const KERNEL_WIDE: [&str; 4] = ["Zram::", "SwapFile::", "Ksm::", "MemoryGroup::"];

#[test]
fn tests_that_set_what_the_whole_kernel_shares_run_one_after_another() {
    let script = std::fs::read_to_string(root().join("tests/lanes.sh")).unwrap();
    let listed = ["ALONE=(", "KERNEL_WIDE=("].map(|name| {
        let rest = script.split_once(name).unwrap().1;
        rest.split_once(')').unwrap().0.split_whitespace()
    });
    let apart: Vec<&str> = listed.into_iter().flatten().collect();
    let is_there = |name: &&str| root().join(format!("tests/{name}.rs")).is_file();
    assert!(apart.len() > 5 && apart.iter().all(is_there), "{apart:?}");
    for (file, text) in sources("tests").into_iter().filter(|(file, _)| file != file!()) {
        let name = file.trim_start_matches("tests/").split(['/', '.']).next().unwrap();
        let shares = KERNEL_WIDE.iter().any(|word| text.contains(word));
        assert!(!shares || apart.contains(&name), "{file}: name it in KERNEL_WIDE of lanes.sh");
    }
}

#[test]
fn the_checks_can_fail() {
    let text = "Edges between crates go one way: `a` ← `b`,\n`c` ← `d`. `e` is apart.";
    assert_eq!(layers(text), [vec!["a"], vec!["b", "c"], vec!["d"]]);
    assert_eq!(
        named_files("see `crates/a.rs`, `b/c.rs` and `tests/d.rs`"),
        ["crates/a.rs", "tests/d.rs"]
    );
    assert_eq!(names_outside_world("use std::fs;"), Some("std::fs"));
    assert_eq!(names_outside_world("// like std::fs"), None);
    assert_eq!(links_the_loaded(["overbook-sys", "overbook-shim"]), Some("overbook-shim"));
    assert_eq!(links_the_loaded(["overbook-sys", "virt"]), None);
    assert!(has_unsafe("let x = unsafe { y };"));
    assert!(!has_unsafe("#![forbid(unsafe_code)]"));
}
