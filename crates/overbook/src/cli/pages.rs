//! `overbook completions SHELL` and `overbook man [DIR]`, both from the same command table.

mod command_page;
mod examples;
mod markdown;
mod toml_page;

use std::{fs, path::PathBuf};

use clap::{Args, Command};

use super::{completion, error::CliError, output::Output};

#[derive(Debug, Args)]
pub(super) struct Shell {
    /// Which shell
    #[arg(value_parser = ["bash", "elvish", "fish", "powershell", "zsh"])]
    shell: String,
}

#[derive(Debug, Args)]
pub(super) struct Directory {
    /// Write one page per command here; without it the main page goes to standard output
    directory: Option<PathBuf>,
}

pub(super) fn completions(shell: &Shell) -> Result<Output, CliError> {
    completion::script(&shell.shell, "overbook").map(Output::raw).map_err(CliError::Print)
}

pub(super) fn man(directory: &Directory, table: Command) -> Result<Output, CliError> {
    let mut table = table.disable_help_subcommand(true);
    table.build();
    let Some(dir) = &directory.directory else {
        return command_page::page(&table).map(Output::raw).map_err(CliError::Print);
    };
    let written = fs::create_dir_all(dir).and_then(|()| {
        fs::write(dir.join("overbook.toml.5"), toml_page::page()?)?;
        command_page::all(&table).into_iter().try_for_each(|command| {
            let file = format!("{}.8", command_page::title(command));
            fs::write(dir.join(file), command_page::page(command)?)
        })
    });
    written.map_err(|error| CliError::File { path: dir.clone(), error })?;
    Ok(Output::text(&format!("man pages written to {}\n", dir.display())))
}
