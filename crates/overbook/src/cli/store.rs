//! `overbook store`: runs the process that talks to a pool's store.

use super::{error::CliError, output::Output};
use crate::pool;

pub(super) fn run() -> Result<Output, CliError> {
    pool::apart::run().map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}
