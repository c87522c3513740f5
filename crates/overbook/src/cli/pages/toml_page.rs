//! overbook.toml(5): the guide's page on the configuration, as a man page.
//!
//! So there is one text. A test holds its keys against those that the program reads.

use std::io;

use roff::{Roff, bold, italic, roman};

use super::markdown;

const GUIDE: &str = include_str!("../../../../../docs/src/configure.md");

pub(super) fn page() -> io::Result<Vec<u8>> {
    let source = format!("overbook {}", version::VERSION);
    let mut roff = Roff::new();
    roff.control("TH", ["OVERBOOK.TOML", "5", "", source.as_str(), "Overbook"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("overbook.toml - configuration of Overbook")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([italic("/etc/overbook/overbook.toml")]).control("br", []);
    roff.text([italic("/etc/overbook/overbook.d/*.toml")]);
    roff.control("SH", ["DESCRIPTION"]);
    markdown::append(&mut roff, GUIDE);
    roff.control("SH", ["FILES"]);
    roff.control("TP", []).text([italic("/usr/share/doc/overbook/overbook.toml")]);
    roff.text([roman("The configuration as it was installed, with a comment for each key.")]);
    roff.control("TP", []).text([italic("/usr/share/doc/overbook/guide/configure.md")]);
    roff.text([roman("This page in the guide, with links to the other pages.")]);
    roff.control("SH", ["SEE ALSO"]);
    let pages = ["overbook", "overbook-check", "overbook-reload"];
    let pages = pages.into_iter().flat_map(|page| [bold(page), roman("(8), ")]);
    roff.text(pages.chain([bold("systemctl"), roman("(1)")]).collect::<Vec<_>>());
    let mut page = Vec::new();
    roff.to_writer(&mut page)?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use model::config;

    use super::*;

    /// The tables of the configuration, as the guide names them.
    const TABLES: [&str; 8] =
        ["host", "mode", "api", "overload", "pool", "group.NAME", "vm.\"NAME\"", "disk.NAME"];

    /// The keys that the program reads in a table, by its own words about one that it does not.
    fn read_keys(table: &str) -> BTreeSet<String> {
        let text = format!("[{}]\nno_such_key = 1\n", table.replace("NAME", "a"));
        let faults = config::parse(&[("a.toml".to_owned(), text)]).unwrap_err().to_string();
        let (_, keys) = faults.split_once("valid: ").unwrap_or_else(|| panic!("{faults}"));
        let keys = keys.lines().next().unwrap_or_default();
        let keys = keys.split(';').next().unwrap_or_default();
        keys.split(", ").map(|key| key.trim().to_owned()).collect()
    }

    /// The keys that the guide has, by table.
    fn told_keys() -> BTreeMap<String, BTreeSet<String>> {
        let mut tables = BTreeMap::<String, BTreeSet<String>>::new();
        let mut table = String::new();
        for line in GUIDE.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                title.trim_matches(['`', '[', ']']).clone_into(&mut table);
            }
            let key = line.strip_prefix("| `").and_then(|rest| rest.split_once("` | "));
            if let Some((key, rest)) = key {
                let cells: Vec<_> = rest.split(" | ").map(str::trim).collect();
                let is_whole = cells.len() == 2 && cells.iter().all(|cell| !cell.is_empty());
                assert!(is_whole, "{key} has no default or no meaning: {line}");
                tables.entry(table.clone()).or_default().insert(key.to_owned());
            }
        }
        tables
    }

    #[test]
    fn the_page_has_every_key_that_the_program_reads_and_no_other() {
        let told = told_keys();
        for table in TABLES {
            assert_eq!(told.get(table), Some(&read_keys(table)), "[{table}]");
        }
        assert_eq!(told.len(), TABLES.len(), "{:?}", told.keys());
        let page = String::from_utf8(page().unwrap()).unwrap();
        for key in told.values().flatten() {
            let term = format!(".TP\n\\fB{key}\\fR\n");
            assert!(page.contains(&term), "{key} is not on the page");
        }
    }
}
