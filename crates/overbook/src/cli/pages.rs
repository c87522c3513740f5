//! `overbook completions SHELL` and `overbook man [DIR]`, both from the same command table.

use std::{fs, io, path::PathBuf};

use clap::{Args, Command};

use super::{error::CliError, output::Output};

#[derive(Debug, Args)]
pub(super) struct Shell {
    /// Which shell
    shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(super) struct Directory {
    /// Write one page per command here; without it the main page goes to standard output
    directory: Option<PathBuf>,
}

pub(super) fn completions(shell: &Shell, table: &mut Command) -> Output {
    let mut script = Vec::new();
    clap_complete::generate(shell.shell, table, "overbook", &mut script);
    Output::raw(script)
}

pub(super) fn man(directory: &Directory, table: Command) -> Result<Output, CliError> {
    let Some(dir) = &directory.directory else {
        let page = render(table).map_err(CliError::Print)?;
        return Ok(Output::raw(page));
    };
    let table = table.disable_help_subcommand(true);
    let written = fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(table, dir));
    written.map_err(|error| CliError::File { path: dir.clone(), error })?;
    Ok(Output::text(&format!("man pages written to {}\n", dir.display())))
}

fn render(table: Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(table).render(&mut page)?;
    Ok(page)
}
