//! Skips are told and listed, and fail under CI unless they are expected.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::{Command, Output};

use super::*;

const LISTED: &[Expected] = &[
    Expected { need: Requirement::Zram, why: "it has none", is_such_a_machine: || true },
    Expected { need: Requirement::Zswap, why: "it has none", is_such_a_machine: || false },
];

#[test]
fn a_skip_fails_under_ci_alone_and_only_where_it_is_not_expected() {
    assert_eq!(consequence(false, Requirement::Root, LISTED), Consequence::Skip);
    assert_eq!(consequence(false, Requirement::Zram, LISTED), Consequence::Skip);
    assert_eq!(consequence(true, Requirement::Root, LISTED), Consequence::Fail);
    assert_eq!(
        consequence(true, Requirement::Zram, LISTED),
        Consequence::SkipExpected("it has none")
    );
    assert_eq!(
        consequence(true, Requirement::Zswap, LISTED),
        Consequence::Fail,
        "another kind of machine"
    );
    let zstd = Expected { need: Requirement::Program("zstd"), ..LISTED[0] };
    assert_eq!(
        consequence(true, Requirement::Program("xz"), &[zstd]),
        Consequence::Fail,
        "another program"
    );
}

#[test]
fn ci_is_what_the_variable_says() {
    assert!(["1", "true", "yes"].into_iter().all(|value| is_ci(Some(value))));
    assert!(["", "0", "false"].into_iter().all(|value| !is_ci(Some(value))) && !is_ci(None));
}

/// The child of the tests below: an attempt that fails, in a process of its own.
#[test]
#[ignore = "the tests below run it"]
fn attempt() {
    let found = requires(Requirement::Program("none"), ensure(false, "only\nothers"));
    assert_eq!(found, None);
}

/// Runs [`attempt`] with this value of `CI`; returns its output and the list.
fn attempt_under(ci: &str) -> (Output, String) {
    let list = env::temp_dir().join(format!("overbook-skipped-{}-{ci}", std::process::id()));
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "tests::attempt", "--include-ignored"]);
    let output = command.env("CI", ci).env(SKIPPED, &list).output().unwrap();
    let listed = std::fs::read_to_string(&list).unwrap_or_default();
    drop(std::fs::remove_file(&list));
    (output, listed)
}

#[test]
fn a_skip_is_told_past_the_harness_and_listed() {
    let (output, listed) = attempt_under("0");
    assert!(output.status.success(), "{output:?}");
    let words = "tests::attempt: it needs the program none; found: only others\n";
    assert!(listed.starts_with("SKIPPED ") && listed.ends_with(words), "{listed}");
    assert_eq!(listed.lines().count(), 1);
    assert!(listed.contains("src/tests.rs:"), "{listed}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), listed);
}

#[test]
fn under_ci_it_fails_and_says_why() {
    let (output, listed) = attempt_under("1");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(!output.status.success(), "{said}");
    let words = "It needs the program none; this machine has not: only\nothers";
    assert!(said.contains("CI must run this test") && said.contains(words), "{said}");
    assert_eq!(listed, "");
}

#[test]
fn what_is_there_is_no_skip() {
    assert_eq!(requires(Requirement::Root, Ok::<_, String>(7)), Some(7));
    assert_eq!(ensure(true, "no"), Ok(()));
    assert_eq!(program("sh"), Ok(()));
    assert!(program("no-such-program-here").unwrap_err().contains("No such file"));
    let own = Command::new("id").arg("-u").output().unwrap().stdout;
    assert_eq!(root().is_ok(), String::from_utf8(own).unwrap().trim() == "0");
}

#[test]
fn each_expected_skip_has_its_reason() {
    for (number, expected) in EXPECTED.iter().enumerate() {
        assert!(expected.why.split(' ').count() > 2, "{expected:?}");
        let rest = &EXPECTED[number + 1..];
        assert!(rest.iter().all(|other| other.why != expected.why), "{expected:?} is there twice");
    }
}
