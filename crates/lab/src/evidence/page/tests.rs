//! The page of invented records, and the files of this tree.

use std::collections::BTreeMap;
use std::path::Path;

use super::*;
use crate::evidence::host::{Computer, HostLoad};
use crate::evidence::record::RunFacts;

fn claim(target: Option<Target>) -> Claim {
    Claim { paper: Some("1.2"), ..Claim::of("f", "s", target, "It is soon", &[]) }
}

fn record(load_before: f64, rounds: &[f64]) -> RunRecord {
    let computer = Computer {
        cores: 2,
        ram_mib: 1024,
        cpu: "c".into(),
        kernel: "6.18".into(),
        qemu: "10.0".into(),
        accelerator: "tcg".into(),
    };
    let run = RunFacts {
        commit: Some("0123456789abcdef".into()),
        changed: false,
        date: "2026-11-28T01:02:03Z".into(),
        seconds: 60,
        seed: 1,
        minutes: None,
        runs: 1,
        computer,
        load: HostLoad { before: load_before, mean: 1.0, most: 2.0, other_qemus: 0 },
        sources: BTreeMap::new(),
    };
    let mut figures = crate::figures::Figures::new("s", "m".into(), 1, 1);
    figures.tell_rounds("f", rounds.to_vec(), "s", "n");
    RunRecord::of("s", run, &figures).unwrap()
}

fn line(target: Option<Target>, record: Option<&RunRecord>, freshness: &Freshness) -> String {
    ClaimRow::new(&claim(target), record, freshness, "lab run s".into()).line()
}

#[test]
fn a_row_tells_claim_target_result_date_commit_and_command() {
    let record = record(0.1, &[2.0, 1.0, 3.0]);
    assert_eq!(
        line(Some(Target::AtMost(5.0)), Some(&record), &Freshness::Fresh),
        "| It is soon | ≤ 5 s (paper: 1.2) | 2 s (1 to 3, 3 rounds) | 2026-11-28, 01234567 | \
         `lab run s`: `f` |\n"
    );
}

#[test]
fn misses_stale_records_and_busy_machines_are_told() {
    let record = record(3.0, &[2.0]);
    let stale = Freshness::Stale(vec!["a.rs".into()]);
    let line = line(Some(Target::AtMost(1.0)), Some(&record), &stale);
    assert!(line.contains("| **not met**: 2 s (1 round) |"), "{line}");
    assert!(line.contains("on a busy machine (load 3 before), **stale** |"), "{line}");
}

#[test]
fn what_has_no_record_or_no_date_says_so() {
    let none = line(Some(Target::AtMost(1.0)), None, &Freshness::None);
    assert!(none.contains("| not measured |  | `lab run s`"), "{none}");
    let carried = RunRecord { run: None, ..record(0.0, &[2.0]) };
    let carried = line(None, Some(&carried), &Freshness::CarriedOver);
    assert!(carried.contains("| told (paper: 1.2) | 2 s (1 round) | undated, **stale** |"));
    let mut missing = record(0.0, &[2.0]);
    missing.figures.clear();
    missing.missing.insert("f".into(), "no number in 1 of 1 rounds".into());
    let missing = line(Some(Target::AtMost(1.0)), Some(&missing), &Freshness::Fresh);
    assert!(missing.contains("| not measured: no number in 1 of 1 rounds |"), "{missing}");
}

#[test]
fn an_interval_stands_for_the_rounds() {
    let record = record(0.0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(value(&record.figures["f"]), "3.50 s (1 to 6, 6 rounds)");
}

fn this_tree() -> SourceTree {
    SourceTree::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
}

#[test]
fn every_scenario_stands_under_one_topic() {
    let mut listed: Vec<&str> = TOPICS.iter().flat_map(|(_, names)| names.split(' ')).collect();
    let mut all: Vec<&str> = scenario::SCENARIOS.iter().map(|scenario| scenario.name).collect();
    listed.sort_unstable();
    all.sort_unstable();
    assert_eq!(listed, all);
}

#[test]
fn claims_and_the_page_on_the_papers_are_what_make_claims_writes() {
    let tree = this_tree();
    let known = KnownScenario::all(&tree).unwrap();
    let pages = [
        (CLAIMS, text(&tree, &known).unwrap()),
        (papers::PAGE, papers::text(&tree, &known).unwrap()),
    ];
    for (name, text) in pages {
        let there = std::fs::read_to_string(tree.path(name)).unwrap_or_default();
        let differs = there.lines().zip(text.lines()).find(|(there, text)| there != text);
        assert!(
            there == text,
            "{name} is old: run `make claims`; the first difference: {differs:?}"
        );
    }
}

#[test]
fn every_record_belongs_to_a_scenario_and_every_figure_to_a_claim() {
    let tree = this_tree();
    for entry in std::fs::read_dir(tree.path(crate::evidence::record::DIRECTORY)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let claims = if name == bench::NAME {
            bench::CLAIMS
        } else {
            scenario::find(&name).unwrap_or_else(|| panic!("{}", path.display())).claims
        };
        let record = RunRecord::read(&tree, &name).unwrap().unwrap();
        if record.run.is_some() {
            continue;
        }
        for (figure, measured) in &record.figures {
            let claim = claims.iter().find(|claim| claim.figure == figure);
            assert_eq!(
                claim.map(|claim| claim.unit),
                Some(measured.unit.as_str()),
                "{name} {figure}"
            );
        }
    }
}

#[test]
fn every_claim_is_one_sentence_under_a_name_of_its_own() {
    let all = scenario::SCENARIOS.iter().map(|scenario| (scenario.name, scenario.claims));
    for (name, claims) in all.chain([(bench::NAME, bench::CLAIMS)]) {
        for (index, claim) in claims.iter().enumerate() {
            let Claim { figure, sentence, .. } = claim;
            assert!(!claims[..index].iter().any(|it| it.figure == *figure), "{name} {figure}");
            let is_one = !sentence.contains([';', '|']) && !sentence.contains(". ");
            assert!(is_one && !sentence.ends_with('.') && sentence.len() < 160, "{sentence}");
            let limit = claim.target.map(|target| in_words(target, claim.unit));
            assert!(limit.is_none_or(|limit| !limit.contains("NaN")), "{name} {figure}");
        }
    }
}

#[test]
fn every_test_that_holds_a_claim_exists() {
    let tree = this_tree();
    let is_path = |word: &&str| [".rs", ".ts", "/"].iter().any(|end| word.ends_with(end));
    let mut count = 0;
    for row in BY_TESTS.lines().filter(|line| line.starts_with('|')) {
        for path in row.split('`').filter(is_path) {
            assert!(tree.path(path).exists(), "{path}");
            count += 1;
        }
    }
    assert!(count > 70, "{count} tests");
}

#[test]
fn every_source_that_a_scenario_measures_exists() {
    let tree = this_tree();
    for scenario in scenario::SCENARIOS {
        for source in scenario.sources() {
            tree.hash(source).unwrap();
        }
    }
}

/// The string literals of a source outside of its claims.
fn literals(text: &str) -> Vec<String> {
    let (mut found, mut in_claims) = (Vec::new(), false);
    for line in text.lines() {
        in_claims |= line.ends_with("claims! {");
        if !in_claims {
            found.extend(line.split('"').skip(1).step_by(2).map(str::to_owned));
        }
        in_claims &= line != "    },";
    }
    found
}

/// Whether a literal is a name, or a format of it: each pair of braces stands for some letters.
fn gives(literal: &str, name: &str) -> bool {
    let mut parts = literal.split('{').map(|part| part.split_once('}').map_or(part, |(_, it)| it));
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    let mut is_open = false;
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        (rest, is_open) = (&rest[at + part.len()..], part.is_empty());
    }
    rest.is_empty() || is_open
}

#[test]
fn a_format_gives_the_names_that_it_makes() {
    for (literal, name) in
        [("a_b", "a_b"), ("a_{x}", "a_b"), ("{x}_mean", "qos_mean"), ("{a}{b}", "huge_kept")]
    {
        assert!(gives(literal, name), "{literal} {name}");
    }
    assert!(!gives("a_{x}", "b_a") && !gives("a_b", "a_bc") && !gives("{x}_mean", "qos_min"));
}

#[test]
fn every_claim_names_a_figure_that_its_scenario_makes() {
    let tree = this_tree();
    let dirs = ["crates/lab/src/kim", "crates/lab/src/meb"];
    let files_in = |dir: &str| std::fs::read_dir(tree.path(dir)).unwrap();
    let mut common = vec![tree.path("crates/lab/src/soak.rs")];
    common.push(tree.path("crates/lab/src/scenario/meb_accuracy.rs"));
    common.push(tree.path("crates/lab/src/scenario/group_isolation/shared.rs"));
    for scenario in scenario::SCENARIOS {
        let helpers = dirs.iter().filter(|dir| scenario.sources().any(|source| source == **dir));
        let helpers = helpers.flat_map(|dir| files_in(dir)).map(|entry| entry.unwrap().path());
        let files = common.iter().cloned().chain(helpers).filter(|path| path.is_file());
        let own = scenario.sources().next().map(|path| tree.path(path));
        let texts = files.chain(own).map(|path| {
            std::fs::read_to_string(&path).unwrap_or_else(|_| panic!("{}", path.display()))
        });
        let literals: Vec<String> = texts.flat_map(|text| literals(&text)).collect();
        for claim in scenario.claims {
            let is_made = literals.iter().any(|literal| gives(literal, claim.figure));
            assert!(is_made, "{}: nothing makes {}", scenario.name, claim.figure);
        }
    }
}
