//! The words that the lab offers a shell at Tab. No guest is needed.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::Command;

/// Words that the program offers for the last of these.
fn offered(words: &[&str]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook-lab"));
    command.env("OVERBOOK_COMPLETE", "bash").env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", words.len().to_string());
    let output = command.args(["--", "overbook-lab"]).args(words).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn scenarios_are_offered_by_their_names() {
    assert_eq!(offered(&["run", "quick"]), ["quickstart"]);
    let all = offered(&["run", ""]);
    for scenario in lab::scenario::SCENARIOS {
        assert!(all.iter().any(|word| word == scenario.name), "{} in {all:?}", scenario.name);
    }
}
