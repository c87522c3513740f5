//! `overbook api UNIX [TCP]`: runs the process that answers the API.

use clap::Args;

use super::{error::CliError, output::Output};
use crate::api_process::{self, Sockets};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The number of the unix socket, which is open
    unix: i32,
    /// The number of the TCP socket
    tcp: Option<i32>,
}

pub(super) fn run(arguments: &Arguments) -> Result<Output, CliError> {
    let sockets = Sockets { unix: arguments.unix, tcp: arguments.tcp };
    api_process::run(sockets).map_err(|error| CliError::Said(error.to_string()))?;
    Ok(Output::nothing())
}
