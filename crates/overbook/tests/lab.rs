//! `overbook lab …` and the program that it stands for, installed next to `overbook`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A copy of the program in its own directory.
fn installed(dir: &tempfile::TempDir) -> PathBuf {
    let program = dir.path().join("overbook");
    install(Path::new(env!("CARGO_BIN_EXE_overbook")), &program);
    program
}

/// Installs this shell script as the lab's program.
fn install_lab(dir: &tempfile::TempDir, script: &str) {
    let file = dir.path().join("script");
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    install(&file, &dir.path().join("overbook-lab"));
}

/// Copies a program in a process of its own. While this process has the file open for writing, a
/// process started by another test could inherit the descriptor, and the program could not be run
/// (`ETXTBSY`).
fn install(from: &Path, to: &Path) {
    let status = Command::new("install").args([from, to]).status().unwrap();
    assert!(status.success());
}

#[test]
fn it_is_run_from_beside_the_program_with_its_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let program = installed(&dir);
    let run = || {
        let mut command = Command::new(&program);
        command.args(["lab", "run", "--json", "x y"]).env("PATH", "").output().unwrap()
    };
    let missing = run();
    assert_eq!(missing.status.code(), Some(1));
    let why = String::from_utf8_lossy(&missing.stderr);
    assert!(why.contains("`overbook-lab` was found neither next to"), "{why}");
    install_lab(&dir, "printf '<%s>' \"$@\"; exit 7");
    let output = run();
    assert_eq!(output.stdout, b"<run><--json><x y>");
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn its_lines_are_for_it_to_complete() {
    let dir = tempfile::tempdir().unwrap();
    let program = installed(&dir);
    let variables = "\"$OVERBOOK_COMPLETE\" \"$_CLAP_COMPLETE_INDEX\"";
    install_lab(&dir, &format!("printf '<%s>' {variables} \"$@\""));
    let offered = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.env("OVERBOOK_COMPLETE", "bash").env("_CLAP_IFS", "\n");
        command.env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
        let output = command.arg("--").args(words).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let asked = offered(&["overbook", "lab", "run", ""]);
    assert_eq!(asked, "<bash><2><--><overbook-lab><run><>");
    assert_eq!(offered(&["overbook", "lab", "ru"]), "<bash><1><--><overbook-lab><ru>");
    // This word is still a command of the program.
    assert_eq!(offered(&["overbook", "lab"]), "lab");
}
