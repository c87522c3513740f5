//! `overbook lab …`: runs `overbook-lab`, which is a program (and a package) of its own.

use std::{
    env,
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;

use super::{error::CliError, output::Output};

/// The program itself.
pub(super) const PROGRAM: &str = "overbook-lab";
const LIBRARY: &str = "/usr/lib/overbook";

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(super) struct Arguments {
    /// Given to `overbook-lab` as they are; try `overbook lab --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(super) arguments: Vec<OsString>,
}

pub(super) fn run(arguments: &Arguments) -> Result<Output, CliError> {
    become_program(PROGRAM, &arguments.arguments)
}

/// Runs another program of Overbook in place of this one.
pub(super) fn become_program(
    name: &'static str,
    arguments: &[OsString],
) -> Result<Output, CliError> {
    let path = find(name)?;
    // `exec` returns only when it fails.
    let error = Command::new(&path).args(arguments).exec();
    Err(CliError::File { path, error })
}

pub(super) fn find(name: &'static str) -> Result<PathBuf, CliError> {
    let this = env::current_exe().unwrap_or_default();
    let beside = this.parent().unwrap_or(Path::new("."));
    let path = env::var_os("PATH").unwrap_or_default();
    let places = [beside.to_path_buf(), PathBuf::from(LIBRARY)];
    let found = places.into_iter().chain(env::split_paths(&path)).map(|dir| dir.join(name));
    let missing = || CliError::NoProgram { name, beside: this.clone(), library: LIBRARY };
    found.into_iter().find(|file| file.is_file()).ok_or_else(missing)
}
