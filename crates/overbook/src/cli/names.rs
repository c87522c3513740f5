//! The names of VMs and groups, for the shell's completions.
//!
//! The user waits after Tab, so a daemon gets a fraction of a second. Every failure (no daemon, no
//! right to ask it) means no names and no message. Names come from guests: one that a shell would
//! read as more than a word is left out.

use std::{path::Path, sync::mpsc, thread, time::Duration};

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use serde::Deserialize;

use super::context::Context;
use crate::config_files::{self, DEFAULT_PATH};

/// Maximum time that the daemon may take.
const LIMIT: Duration = Duration::from_millis(300);

#[derive(Deserialize)]
struct NamedObject {
    name: String,
}

/// The VMs that the daemon knows.
pub(super) fn vms() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(asked("/v1/vms")))
}

/// The groups of the configuration.
pub(super) fn groups() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(known_groups()))
}

/// The VMs, and then the groups.
pub(super) fn vms_and_groups() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates([asked("/v1/vms"), known_groups()].concat()))
}

fn known_groups() -> Vec<String> {
    match config_files::load(Path::new(DEFAULT_PATH)) {
        Ok(spec) => spec.groups.keys().map(ToString::to_string).collect(),
        Err(_) => asked("/v1/groups"),
    }
}

fn candidates(names: Vec<String>) -> Vec<CompletionCandidate> {
    let words = names.into_iter().filter(|name| is_word(name));
    words.map(CompletionCandidate::new).collect()
}

fn is_word(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+@%".contains(&byte);
    !name.is_empty() && !name.starts_with('-') && name.bytes().all(is_plain)
}

fn asked(path: &'static str) -> Vec<String> {
    let (sender, answer) = mpsc::channel();
    // It may be left behind: the process ends once the names are written.
    thread::spawn(move || {
        let context = Context { config: DEFAULT_PATH.into(), socket: None };
        let named = context.client().ok().and_then(|client| client.get(path).ok());
        let named: Vec<NamedObject> = named.unwrap_or_default();
        let _ = sender.send(named.into_iter().map(|named| named.name).collect());
    });
    answer.recv_timeout(LIMIT).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_a_shell_would_not_take_for_a_word_is_left_out() {
        let names = ["web-1", "a b", "$(reboot)", "", "--yes", "é", "db_2.x"];
        let told = candidates(names.map(str::to_owned).into());
        let told: Vec<_> = told.iter().map(|name| name.get_value().to_str().unwrap()).collect();
        assert_eq!(told, ["web-1", "db_2.x"]);
    }
}
