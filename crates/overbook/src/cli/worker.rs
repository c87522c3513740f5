//! `overbook worker GROUP`: runs the worker.

use clap::Args;

use super::{error::CliError, output::Output};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The group that it works for
    group: String,
}

pub(super) fn run(arguments: &Arguments) -> Result<Output, CliError> {
    ::worker::run(&arguments.group).map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}
