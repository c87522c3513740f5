//! `overbook daemon` and `overbook check`: hand over to the daemon and to the configuration.

use super::{context::Context, error::CliError, output::Output};
use crate::{config_files, daemon};

pub(super) fn run(context: &Context) -> Result<Output, CliError> {
    daemon::run(&context.config).map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}

pub(super) fn check(context: &Context) -> Result<Output, CliError> {
    let mut report = Vec::new();
    let code = config_files::check(&context.config, &mut report).map_err(CliError::Print)?;
    Ok(Output::text(&String::from_utf8_lossy(&report)).with_code(code))
}
