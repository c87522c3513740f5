//! Completions: a shell asks the program itself at each Tab.
//!
//! The installed scripts (`overbook completions SHELL`) call the program with [`VARIABLE`] set. It
//! completes the line from the command table, and [`super::names`] adds what the host has. The
//! lines of `overbook lab` are for that program to complete.

use std::{env, ffi::OsString, io, os::unix::process::CommandExt, process::Command};

use clap::CommandFactory;
use clap_complete::{CompleteEnv, env::Shells};

use super::{Cli, lab};

/// Names the shell that asks. Scripts of other programs leave it alone.
pub const VARIABLE: &str = "OVERBOOK_COMPLETE";
/// Where a shell says which word is to be completed.
const INDEX: &str = "_CLAP_COMPLETE_INDEX";

/// Answers the shell and ends the process, if a shell has asked.
pub(super) fn answer() {
    let Some(shell) = env::var_os(VARIABLE) else { return };
    let line: Vec<OsString> = env::args_os().skip_while(|word| word != "--").skip(1).collect();
    let index = env::var(INDEX).ok().and_then(|index| index.parse::<usize>().ok());
    if let (Some(true), Some(index @ 2..)) = (line.get(1).map(|word| word == "lab"), index) {
        let Ok(path) = lab::find(lab::PROGRAM) else { std::process::exit(1) };
        let mut command = Command::new(path);
        command.env(VARIABLE, shell).env(INDEX, (index - 1).to_string());
        command.arg("--").arg(lab::PROGRAM).args(&line[2..]);
        // Returns only when it fails: then there is nothing to offer.
        let _ = command.exec();
        std::process::exit(1);
    }
    complete("overbook", Cli::command);
}

/// Answers the shell from the command table of this program and ends the process, if a shell has
/// asked. Commands that Overbook starts by itself are not offered.
pub fn complete(program: &'static str, table: fn() -> clap::Command) {
    let shown = || {
        let table = table();
        // A table keeps the commands that it has: this one begins without any.
        let empty = clap::Command::new(program).version(version::VERSION);
        let shown = table.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
        empty.subcommands(shown).args(table.get_arguments().cloned())
    };
    CompleteEnv::with_factory(shown).var(VARIABLE).complete();
}

/// The script that a shell reads to complete the program's lines.
///
/// # Errors
/// There is no script for this shell.
pub fn script(shell: &str, program: &str) -> io::Result<Vec<u8>> {
    let shells = Shells::builtins();
    let shell = shells.completer(shell).ok_or(io::ErrorKind::Unsupported)?;
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, program, program, program, &mut script)?;
    Ok(script)
}
