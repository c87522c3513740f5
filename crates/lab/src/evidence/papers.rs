//! The tables and figures of the five papers: theirs, ours, and why they differ.
//!
//! All that measure something are listed, 75 in all; drawings of a design and tables of a
//! configuration are not.

use std::fmt::Write as _;

use super::EvidenceError;
use super::page::{KnownScenario, value};
use super::record::Freshness;
use super::tree::SourceTree;

/// Where the page lies in the source tree.
pub const PAGE: &str = "docs/src/papers.md";

const ROWS: &str = include_str!("papers.txt");

const HEAD: &str = "\
# The papers, table by table

Five papers are behind Overbook. This page lists all of their tables and figures that measure
something: their result, ours, and why the two differ. `make claims` writes it from
`crates/lab/src/evidence/papers.txt` and the records in `results`, as it writes CLAIMS.md, which
explains **stale** and **undated**. `overbook lab evidence --paper NAME` measures those of one paper
that have no fresh record.
";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paper {
    /// Its name on the command line.
    pub name: &'static str,
    pub title: &'static str,
    pub items: Vec<PaperItem>,
}

/// A table or figure of a paper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PaperItem {
    pub number: &'static str,
    /// Their result.
    pub theirs: &'static str,
    pub ours: Ours,
    /// The reason why the two differ.
    pub why: &'static str,
}

/// The counterpart of a table or figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ours {
    /// A scenario, and the figures of it that compare.
    Scenario(&'static str, Vec<&'static str>),
    /// The reason why there is none.
    None(&'static str),
}

pub fn all() -> Result<Vec<Paper>, String> {
    let mut papers: Vec<Paper> = Vec::new();
    for line in ROWS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let wrong = || format!("papers.txt: {line}");
        let cells: Vec<&'static str> = line.split('|').map(str::trim).collect();
        if let Some(head) = cells[0].strip_prefix("= ") {
            let title = *cells.get(1).ok_or_else(wrong)?;
            papers.push(Paper { name: head.trim(), title, items: Vec::new() });
            continue;
        }
        let [number, theirs, ours, why] = cells[..] else { return Err(wrong()) };
        let ours = match (ours.strip_prefix("- "), ours.split_once(':')) {
            (Some(reason), _) => Ours::None(reason),
            (None, Some((scenario, figures))) => {
                Ours::Scenario(scenario, figures.split_whitespace().collect())
            }
            (None, None) => Ours::Scenario(ours, Vec::new()),
        };
        let paper = papers.last_mut().ok_or_else(wrong)?;
        paper.items.push(PaperItem { number, theirs, ours, why });
    }
    Ok(papers)
}

impl Paper {
    /// Whether a scenario measures a table or figure of it.
    pub fn has(&self, scenario: &str) -> bool {
        let is_of =
            |item: &PaperItem| matches!(item.ours, Ours::Scenario(name, _) if name == scenario);
        self.items.iter().any(is_of)
    }
}

pub fn text(tree: &SourceTree, known: &[KnownScenario]) -> Result<String, EvidenceError> {
    let faulty = |fault| EvidenceError::Faulty { path: tree.path(PAGE), fault };
    let papers = all().map_err(faulty)?;
    let items = || papers.iter().flat_map(|paper| &paper.items);
    let (mut scenarios, mut results, mut fresh) = (0, 0, 0);
    for item in items() {
        let Ours::Scenario(name, figures) = &item.ours else { continue };
        scenarios += 1;
        let Some(known) = known.iter().find(|known| known.scenario.name == *name) else { continue };
        let has =
            |name: &&&str| known.record.as_ref().is_some_and(|it| it.figures.contains_key(**name));
        if figures.iter().any(|name| has(&name)) {
            results += 1;
            fresh += usize::from(known.freshness == Freshness::Fresh);
        }
    }
    let count = items().count();
    let mut page = format!(
        "{HEAD}\nOf {count} tables and figures {scenarios} have a scenario, {results} a result, and \
         {fresh} a result of the code as it is.\n"
    );
    for paper in &papers {
        let _ = write!(page, "\n## {}\n\n| | theirs | ours | why they differ |\n", paper.title);
        page += "|---|---|---|---|\n";
        for PaperItem { number, theirs, ours, why } in &paper.items {
            let ours = ours_in_words(ours, known);
            let _ = writeln!(page, "| {number} | {theirs} | {ours} | {why} |");
        }
    }
    Ok(page)
}

fn ours_in_words(ours: &Ours, known: &[KnownScenario]) -> String {
    let (name, figures) = match ours {
        Ours::None(reason) => return (*reason).to_owned(),
        Ours::Scenario(name, figures) => (name, figures),
    };
    let found = known.iter().find(|known| known.scenario.name == *name);
    let Some((record, freshness)) = found.and_then(|it| Some((it.record.as_ref()?, &it.freshness)))
    else {
        return format!("`{name}`: not measured");
    };
    let results = figures.iter().filter_map(|figure| {
        let measured = record.figures.get(*figure)?;
        Some(format!("`{figure}` {}", value(measured)))
    });
    let results: Vec<String> = results.collect();
    if results.is_empty() {
        return format!("`{name}`: not measured");
    }
    let mark = match freshness {
        Freshness::CarriedOver => "; undated, **stale**",
        Freshness::Stale(_) => "; **stale**",
        Freshness::Fresh | Freshness::None => "",
    };
    format!("`{name}`: {}{mark}", results.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario;

    #[test]
    fn all_seventy_five_are_listed_once() {
        let papers = all().unwrap();
        let counts: Vec<_> = papers.iter().map(|paper| (paper.name, paper.items.len())).collect();
        let expected = [("kim", 19), ("imr", 11), ("meb", 20), ("overdriver", 12), ("smd", 13)];
        assert_eq!(counts, expected);
        for paper in &papers {
            let mut numbers: Vec<_> = paper.items.iter().map(|item| item.number).collect();
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), paper.items.len(), "{}", paper.name);
        }
    }

    #[test]
    fn every_item_has_a_scenario_with_these_claims_or_a_reason() {
        for item in all().unwrap().iter().flat_map(|paper| &paper.items) {
            match &item.ours {
                Ours::None(reason) => assert!(
                    reason.starts_with("not built: ") || reason.starts_with("cannot be had"),
                    "{item:?}"
                ),
                Ours::Scenario(name, figures) => {
                    let scenario = scenario::find(name).unwrap_or_else(|| panic!("{item:?}"));
                    let claimed =
                        |figure: &&&str| scenario.claims.iter().any(|it| it.figure == **figure);
                    assert!(figures.iter().all(|figure| claimed(&figure)), "{item:?}");
                    assert!(!item.why.is_empty(), "{item:?}");
                }
            }
        }
    }
}
