//! The package sources of this machine: a reader of apt's own source lists.
//!
//! **Problem.** The lab needs a newer QEMU than the distribution's stable release may have. The
//! distribution's backports have it, on the mirror that the machine already uses. Only the
//! machine's configuration names that mirror and its key.
//!
//! **Idea.** Read both formats (deb822 `*.sources` and one-line `*.list`), keep the sources of
//! this release (`<codename>`, `<codename>-security`, ...), and add `<codename>-backports` to
//! `<codename>`, with the same mirror and key.
//!
//! **Leaves out.** Keys embedded in a stanza, `Types: deb-src`, sources for other architectures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// One source of packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The mirror.
    pub uri: String,
    /// For example `bookworm-updates`.
    pub suite: String,
    /// For example `main`.
    pub components: Vec<String>,
    /// The key ring that must have signed it, if the machine names one.
    pub signed_by: Option<String>,
}

impl Source {
    /// The source as a line of `sources.list`.
    pub fn to_line(&self) -> String {
        let key = self.signed_by.as_ref().map(|key| format!("[signed-by={key}] "));
        let (key, uri) = (key.unwrap_or_default(), &self.uri);
        format!("deb {key}{uri} {} {}", self.suite, self.components.join(" "))
    }
}

/// The machine's sources for `codename`, with its backports; empty when it has none.
pub fn with_backports(etc_apt: &Path, codename: &str) -> Vec<Source> {
    let of_release = |suite: &str| {
        suite.strip_prefix(codename).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let mut sources: Vec<Source> = Vec::new();
    for source in read_all(etc_apt) {
        if of_release(&source.suite) && !sources.contains(&source) {
            sources.push(source);
        }
    }
    let backports = format!("{codename}-backports");
    if !sources.iter().any(|source| source.suite == backports) {
        let main = sources.iter().find(|source| source.suite == codename).cloned();
        sources.extend(main.map(|main| Source { suite: backports, ..main }));
    }
    sources
}

fn read_all(etc_apt: &Path) -> Vec<Source> {
    let mut files = vec![etc_apt.join("sources.list")];
    if let Ok(parts) = std::fs::read_dir(etc_apt.join("sources.list.d")) {
        let mut parts: Vec<PathBuf> = parts.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut sources = Vec::new();
    for file in files {
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(parse_line)),
            Some("sources") => sources.extend(text.split("\n\n").flat_map(parse_stanza)),
            _ => {}
        }
    }
    sources
}

/// Parses `deb [signed-by=/key] http://mirror suite component...`.
fn parse_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim().strip_prefix("deb")?;
    let line = line.strip_prefix(char::is_whitespace)?.trim_start();
    let (options, rest) = match line.strip_prefix('[') {
        Some(line) => line.split_once(']')?,
        None => ("", line),
    };
    let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    let mut words = rest.split_whitespace().map(str::to_owned);
    let (uri, suite) = (words.next()?, words.next()?);
    let components = words.collect();
    Some(Source { uri, suite, components, signed_by: signed_by.map(str::to_owned) })
}

/// A deb822 stanza: one source for each of its URIs and suites.
fn parse_stanza(stanza: &str) -> Vec<Source> {
    let mut fields: BTreeMap<String, String> = BTreeMap::new();
    let mut last = String::new();
    for line in stanza.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with(char::is_whitespace) {
            let value = fields.entry(last.clone()).or_default();
            value.push(' ');
            value.push_str(line.trim());
        } else if let Some((name, value)) = line.split_once(':') {
            last = name.trim().to_ascii_lowercase();
            fields.insert(last.clone(), value.trim().to_owned());
        }
    }
    let words = |name: &str| -> Vec<String> {
        fields
            .get(name)
            .map(|v| v.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default()
    };
    let disabled = fields.get("enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if disabled || !words("types").iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    let signed_by = fields.get("signed-by").filter(|key| key.starts_with('/'));
    let (uris, suites, components) = (words("uris"), words("suites"), words("components"));
    let source = |uri: &String, suite: &String| Source {
        uri: uri.clone(),
        suite: suite.clone(),
        components: components.clone(),
        signed_by: signed_by.cloned(),
    };
    uris.iter()
        .flat_map(|uri| suites.iter().map(move |suite| (uri, suite)))
        .map(|(uri, suite)| source(uri, suite))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etc_apt(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sources.list.d")).unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    #[test]
    fn backports_come_from_the_mirror_and_key_of_a_deb822_stanza() {
        let stanza = "Types: deb\n# a comment\nURIs: http://mirror.test/debian\n\
            Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/key.gpg\n";
        let dir = etc_apt(&[("sources.list.d/debian.sources", stanza)]);
        let lines: Vec<String> =
            with_backports(dir.path(), "bookworm").iter().map(Source::to_line).collect();
        let line = |suite| {
            format!("deb [signed-by=/usr/share/key.gpg] http://mirror.test/debian {suite} main")
        };
        assert_eq!(lines, ["bookworm", "bookworm-updates", "bookworm-backports"].map(line));
    }

    #[test]
    fn one_line_sources_are_read_and_other_releases_left_out() {
        let list = "# old\ndeb-src http://mirror.test/d trixie main\n\
            deb [arch=amd64 signed-by=/k.gpg] http://mirror.test/d trixie main contrib\n\
            deb http://mirror.test/d trixie-backports main\n\
            deb http://other.test/x nodistro main\n";
        let dir = etc_apt(&[("sources.list", list)]);
        let sources = with_backports(dir.path(), "trixie");
        let suites: Vec<&str> = sources.iter().map(|source| source.suite.as_str()).collect();
        assert_eq!(suites, ["trixie", "trixie-backports"]);
        assert_eq!(sources[0].signed_by.as_deref(), Some("/k.gpg"));
    }

    #[test]
    fn a_disabled_stanza_is_no_source() {
        let stanza =
            "Types: deb\nEnabled: no\nURIs: http://mirror.test\nSuites: sid\nComponents: main\n";
        let dir = etc_apt(&[("sources.list.d/off.sources", stanza)]);
        assert_eq!(with_backports(dir.path(), "sid"), []);
    }
}
