//! Plain English, held by a test: words and openings that a reader stumbles over are counted.
//!
//! README, the guide, messages (string literals of what ships), comments and the packages' files
//! have none of them. The
//! text is searched, not its meaning; words in backquotes and in code blocks do not count.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::{Path, PathBuf};

/// A VM, a page or a thread is no person; a quantity has a number; a term is no metaphor.
const WORDS: [&str; 15] = [
    "nobody",
    "nobody's",
    "somebody",
    "somebody's",
    "whoever",
    "whatever",
    "whichever",
    "beside",
    "so many",
    "so much",
    "as far as",
    "out of reach",
    "of late",
    "in vain",
    "but for",
];

/// No sentence begins with one of them: its subject is a thing with a name.
const OPENINGS: [&str; 6] = ["What", "Who", "Whoever", "Whatever", "Whichever", "Whose"];

/// Pages that have none.
const PAGES: [&str; 2] = ["README.md", "docs/src"];

/// Crates whose messages a user reads.
const SHIPPED: [&str; 15] = [
    "crates/api",
    "crates/cluster",
    "crates/disks",
    "crates/drivers",
    "crates/libvirt",
    "crates/model",
    "crates/overbook",
    "crates/pages",
    "crates/pageserver",
    "crates/policy",
    "crates/protocol",
    "crates/shim",
    "crates/sys",
    "crates/tables",
    "crates/worker",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files at or below `at` whose names end so, with their text.
fn files(at: &str, end: &str) -> Vec<(String, String)> {
    let (mut found, mut open) = (Vec::new(), vec![root().join(at)]);
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|it| it == end) {
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            found.push((name, std::fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(!found.is_empty(), "no *.{end} at {at}");
    found
}

/// The text without what stands in backquotes.
fn without_code(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join("x")
}

/// Forbidden words and openings in one paragraph.
fn faults(paragraph: &str) -> Vec<&'static str> {
    let text = without_code(paragraph);
    let words: Vec<&str> = text.split_whitespace().collect();
    let bare = |word: &str| word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase();
    let plain = format!(" {} ", words.iter().map(|it| bare(it)).collect::<Vec<_>>().join(" "));
    let mut found = Vec::new();
    for word in WORDS {
        found.extend(plain.matches(&format!(" {word} ")).map(|_| word));
    }
    let mut begins = true;
    for word in words {
        let start = word.trim_start_matches(['*', '_', '(', '"']);
        let opening = start.trim_end_matches(|c: char| !c.is_alphabetic());
        found.extend(OPENINGS.into_iter().filter(|it| begins && *it == opening));
        begins = word.trim_end_matches(['*', '_', ')', '"']).ends_with(['.', ':', '!', '?', ';']);
        begins |= word == "|";
    }
    found
}

/// Whether a line begins a paragraph of its own: an item, a heading or a row.
fn is_item(line: &str) -> bool {
    let numbered = || line.split_once(". ").is_some_and(|(it, _)| it.parse::<u32>().is_ok());
    ["* ", "- ", "#", "|"].iter().any(|mark| line.starts_with(mark)) || numbered()
}

/// Joins lines to paragraphs; code blocks are left out.
fn paragraphs<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<String> {
    let (mut all, mut open, mut in_code) = (Vec::new(), String::new(), false);
    for line in lines {
        let line = line.map(str::trim).filter(|line| !line.is_empty());
        if line.is_none_or(is_item) || line.is_some_and(|line| line.starts_with("```")) {
            all.extend(Some(std::mem::take(&mut open)).filter(|it| !it.is_empty()));
        }
        match line {
            Some(line) if line.starts_with("```") => in_code = !in_code,
            Some(line) if !in_code => {
                let words =
                    if is_item(line) { line.trim_start_matches(['*', '-', '#']) } else { line };
                open = format!("{open} {words}");
            }
            _ => {}
        }
    }
    all.push(open);
    all
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("//")?;
    Some(rest.trim_start_matches(['/', '!']))
}

/// String literals of code, without its tests; names in braces are no words.
fn literals(text: &str) -> Vec<String> {
    let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    // A literal may go on in the next line.
    let joined: Vec<&str> = shipped.split("\\\n").map(str::trim_start).collect();
    let joined = joined.concat();
    let lines = joined.lines().filter(|line| comment(line).is_none());
    let whole = lines.filter(|line| line.matches('"').count() % 2 == 0);
    whole.flat_map(|line| line.split('"').skip(1).step_by(2)).map(without_names).collect()
}

/// The text without what stands in braces.
fn without_names(text: &str) -> String {
    let parts = text.split('{').enumerate();
    let rest = parts.map(|(at, part)| match part.split_once('}') {
        Some((_, rest)) if at > 0 => rest,
        _ => part,
    });
    rest.collect::<Vec<_>>().join("x")
}

/// All faults of these paragraphs, each with its place.
fn told(name: &str, paragraphs: &[String]) -> Vec<String> {
    let all = paragraphs.iter().map(|it| (it, faults(it))).filter(|(_, found)| !found.is_empty());
    all.flat_map(|(text, found)| {
        let start: String = text.trim().chars().take(90).collect();
        found.into_iter().map(move |it| format!("{name}: {it:?} in {start:?}"))
    })
    .collect()
}

fn comments_of(dir: &str) -> Vec<String> {
    let of_file =
        |(name, text): (String, String)| told(&name, &paragraphs(text.lines().map(comment)));
    files(dir, "rs").into_iter().flat_map(of_file).collect()
}

#[test]
fn readme_and_guide_are_plain() {
    let of_file = |(name, text): (String, String)| told(&name, &paragraphs(text.lines().map(Some)));
    let found: Vec<_> = PAGES.iter().flat_map(|at| files(at, "md")).flat_map(of_file).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn messages_are_plain() {
    let mut found = Vec::new();
    for (name, text) in SHIPPED.iter().flat_map(|dir| files(&format!("{dir}/src"), "rs")) {
        if !name.ends_with("tests.rs") {
            found.extend(told(&name, &literals(&text)));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The directories that are counted: each crate, the guest's programs and the tests.
fn parts() -> Vec<String> {
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    let crates = crates.map(|it| format!("crates/{}", it.unwrap().file_name().display()));
    crates.chain(["guest", "tests"].map(str::to_owned)).collect()
}

#[test]
fn comments_are_plain() {
    let found: Vec<String> = parts().iter().flat_map(|part| comments_of(part)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// A comment of a unit, a script or a configuration, without the settings that are switched off.
fn packaged_comment(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?;
    rest.starts_with(' ').then_some(rest)
}

#[test]
fn packaged_files_are_plain() {
    let ends = ["toml", "service", "prerm", "postrm", "postinst", "conf"];
    let found: Vec<_> = ends
        .iter()
        .flat_map(|end| files("packaging", end))
        .flat_map(|(name, text)| told(&name, &paragraphs(text.lines().map(packaged_comment))))
        .collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_checks_can_fail() {
    assert_eq!(faults("What a guest has."), ["What"]);
    assert_eq!(faults("It has. Who waits, loses."), ["Who"]);
    assert_eq!(faults("It says what it has, and the `What` of code."), [""; 0]);
    assert_eq!(faults("Nobody takes so much."), ["nobody", "so much"]);
    assert_eq!(paragraphs("a\nb\n\n* c\n```\nd\n```\ne".lines().map(Some)), [" a b", "  c", " e"]);
    assert_eq!(literals("f(\"one {beside}\", \"two \\\n    more\")"), ["one x", "two more"]);
}
