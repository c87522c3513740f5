//! `overbook worker GROUP`: hand over to the worker.

use clap::Args;

use super::{error::CliError, output::Output};
use crate::worker;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The group that it works for: a name to find it by among the processes
    #[arg(value_name = "GROUP")]
    _group: String,
}

pub(super) fn run() -> Result<Output, CliError> {
    worker::run().map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}
