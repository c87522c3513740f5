//! `overbook daemon` and `overbook check`: hand over to the daemon and to the configuration.

use model::config::Faults;

use super::{context::Context, error::CliError, output::Output};
use crate::{config_files, daemon};

pub(super) fn run(context: &Context) -> Result<Output, CliError> {
    daemon::run(&context.config).map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}

pub(super) fn check(context: &Context, json: bool) -> Result<Output, CliError> {
    if json {
        let faults = config_files::load(&context.config).err();
        let faults = faults.as_ref().map_or(&[][..], Faults::as_slice);
        let code = u8::from(!faults.is_empty());
        return Ok(Output::json(&serde_json::json!({ "faults": faults }))?.with_code(code));
    }
    let mut report = Vec::new();
    let code = config_files::check(&context.config, &mut report).map_err(CliError::Print)?;
    Ok(Output::text(&String::from_utf8_lossy(&report)).with_code(code))
}
