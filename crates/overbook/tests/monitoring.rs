//! The things that an operator watches Overbook with: metrics, alerts, boards, and their pages.
//!
//! `promtool` judges metrics, rules and the queries of boards; `make unit` puts it in its place.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use api::{client::ApiClient, published::MemberState};
use serde_json::{Value, json};
use server::TestServer;

const RULES: &str = "packaging/prometheus/overbook.rules.yml";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// Files in a directory, with their text.
fn texts(dir: &str, end: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join(dir)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|it| it == end) {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            found.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(!found.is_empty(), "no *.{end} in {dir}");
    found.sort();
    found
}

/// Every metric, of a host that uses everything.
fn page() -> String {
    let server = TestServer::start();
    let mut tick = http_fixture::published();
    tick.pool = Some(MemberState::default());
    let cold = model::Reading::new(model::Cold::default(), tick.at);
    tick.view.vms.get_mut(&"web-2".into()).unwrap().cold = Some(cold);
    server.publish(tick);
    let client = ApiClient::new(&server.socket).unwrap();
    // The server shows the tick soon after it was published.
    loop {
        let page = client.get_text("/metrics").unwrap();
        if page.contains("overbook_pool_seated ") {
            return page;
        }
    }
}

/// Kind and help of every metric that is exported.
fn exported() -> BTreeMap<String, (String, String)> {
    let (mut found, page) = (BTreeMap::new(), page());
    let mut help = String::new();
    for line in page.lines() {
        if let Some(line) = line.strip_prefix("# HELP ") {
            line.split_once(' ').unwrap().1.clone_into(&mut help);
        } else if let Some(line) = line.strip_prefix("# TYPE ") {
            let (name, kind) = line.split_once(' ').unwrap();
            let before = found.insert(name.to_owned(), (kind.to_owned(), help.clone()));
            assert!(before.is_none(), "{name} is exported twice");
        }
    }
    assert!(found.len() > 80, "{}", found.len());
    found
}

/// Names in a text that look like metrics.
fn named(text: &str) -> Vec<&str> {
    let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
    words.filter(|word| word.starts_with("overbook_") && *word != "overbook_shim").collect()
}

/// Runs promtool, which `make unit` puts where it puts its other tools.
fn promtool(args: &[&str], input: &str) -> Output {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty());
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache");
    let tool = cache.map_or_else(home, PathBuf::from).join("overbook/tools/bin/promtool");
    let tool = if tool.exists() { tool } else { "promtool".into() };
    let child = Command::new(&tool)
        .args(args)
        .current_dir(root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.expect("no promtool: `make promtool` gets it");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn judged(args: &[&str], input: &str) {
    let output = promtool(args, input);
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
    assert!(output.status.success(), "promtool {args:?}: {said}");
}

#[test]
fn promtool_has_no_complaint_about_the_metrics() {
    let output = promtool(&["check", "metrics"], &page());
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success() && said.is_empty(), "{said}");
}

#[test]
fn promtool_has_no_complaint_about_the_rules_and_they_fire_as_they_should() {
    judged(&["check", "rules", RULES], "");
    judged(&["test", "rules", "packaging/prometheus/overbook.rules.test.yml"], "");
}

/// Every query of a board, as it is sent.
fn queries(board: &Value) -> Vec<String> {
    let panels = board["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_boards_can_be_imported_and_their_queries_are_valid() {
    let mut rules = Vec::new();
    for (name, text) in texts("packaging/grafana", "json") {
        let board: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(format!("{}.json", board["uid"].as_str().unwrap()), name);
        let variables = board["templating"]["list"].as_array().unwrap();
        let known: Vec<&str> = variables.iter().map(|it| it["name"].as_str().unwrap()).collect();
        for query in queries(&board) {
            let used = query.split('$').skip(1).map(|rest| {
                let end = rest.find(|it: char| !it.is_ascii_alphanumeric()).unwrap_or(rest.len());
                &rest[..end]
            });
            for variable in used {
                assert!(known.contains(&variable), "{name}: ${variable}");
            }
            rules.push(
                json!({"record": "x", "labels": {"n": rules.len().to_string()}, "expr": query}),
            );
        }
    }
    assert!(rules.len() > 80, "{}", rules.len());
    // JSON is YAML: the queries are checked as rules.
    let mut file = tempfile::NamedTempFile::with_suffix(".yml").unwrap();
    let rules = json!({"groups": [{"name": "boards", "rules": rules}]});
    file.write_all(rules.to_string().as_bytes()).unwrap();
    judged(&["check", "rules", file.path().to_str().unwrap()], "");
}

#[test]
fn every_metric_that_is_named_is_exported() {
    let exported = exported();
    let mut sources = texts("packaging/grafana", "json");
    sources.extend(texts("packaging/prometheus", "yml"));
    sources.extend(texts("docs/src", "md"));
    sources.extend(texts("docs/src/runbooks", "md"));
    sources.push(("README.md".to_owned(), text("README.md")));
    for (file, text) in sources {
        for name in named(&text) {
            // `overbook_disk_…` stands for all of them.
            let is_prefix = name.ends_with('_') && exported.keys().any(|it| it.starts_with(name));
            assert!(is_prefix || exported.contains_key(name), "{file}: {name} is not exported");
        }
    }
}

#[test]
fn every_exported_metric_is_on_a_board() {
    let boards: String = texts("packaging/grafana", "json").into_iter().map(|it| it.1).collect();
    let on_boards = named(&boards);
    for name in exported().keys() {
        assert!(on_boards.contains(&name.as_str()), "{name} is on no board");
    }
}

#[test]
fn the_table_of_metrics_is_the_list_of_what_is_exported() {
    let row = |(name, (kind, help)): (String, (String, String))| {
        format!("| `{name}` | {kind} | {help} |\n")
    };
    let table: String = exported().into_iter().map(row).collect();
    let page = text("docs/src/watching.md");
    assert!(page.contains(&format!("|-|-|-|\n{table}\n")), "write into watching.md:\n{table}");
}

#[test]
fn every_alert_has_its_page_and_every_page_its_alert() {
    let (rules, summary) = (text(RULES), text("docs/src/SUMMARY.md"));
    let watching = text("docs/src/watching.md");
    let mut pages = BTreeMap::new();
    let mut alert = "";
    for line in rules.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("- alert: ") {
            alert = name;
        } else if let Some(url) = line.strip_prefix("runbook_url: ") {
            let page = url.strip_prefix("file:///usr/share/doc/overbook/guide/").unwrap();
            pages.insert(page.strip_prefix("runbooks/").unwrap().to_owned(), alert);
            assert!(summary.contains(&format!("[{alert}]({page})")), "{alert}");
            assert!(watching.contains(&format!("[{alert}]({page})")), "{alert}");
        }
    }
    assert_eq!(pages.len(), rules.matches("- alert: ").count());
    let there = texts("docs/src/runbooks", "md");
    assert_eq!(there.len(), pages.len());
    for (page, text) in there {
        let alert = pages.get(&page).expect(&page);
        assert!(text.starts_with(&format!("# {alert}\n")), "{page}");
        // The page shows the expression of the rule.
        let (_, shown) = text.split_once("```promql\n").unwrap();
        let shown = shown.split_once("\n```").unwrap().0;
        assert!(rules.contains(&format!("- alert: {alert}\n        expr: '{shown}'\n")), "{alert}");
    }
}

#[test]
fn the_package_installs_boards_rules_and_pages() {
    let manifest = text("crates/overbook/Cargo.toml");
    for (source, place) in [
        ("packaging/grafana/*.json", "usr/share/overbook/grafana/"),
        (RULES, "usr/share/overbook/prometheus/"),
        ("docs/src/*.md", "usr/share/doc/overbook/guide/"),
        ("docs/src/runbooks/*.md", "usr/share/doc/overbook/guide/runbooks/"),
    ] {
        let asset = format!("[\"../../{source}\", \"{place}\", \"644\"],");
        assert!(manifest.contains(&asset), "{asset}");
    }
}
