//! `overbook disks GROUP`: runs the process that serves a group's disks.

use clap::Args;

use super::{context::Context, error::CliError, output::Output};
use crate::config_files;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The group whose disks are served
    #[arg(add = super::names::groups())]
    group: String,
    /// A socket that the process which keeps them has left open: for its own use
    #[arg(long, value_name = "NAME=NUMBER", hide = true)]
    inherited: Vec<String>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let spec = config_files::load(&context.config);
    let spec = spec.map_err(|faults| CliError::Said(faults.to_string()))?;
    let served = disks::run(&context.config, &spec, &arguments.group, &arguments.inherited);
    served.map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}
