//! `overbook libvirt …`: runs `overbook-libvirt`, the only program that links libvirt.

use std::ffi::OsString;

use clap::Args;

use super::{error::CliError, lab::become_program, output::Output};

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(super) struct Arguments {
    /// Given to `overbook-libvirt` as they are; try `overbook libvirt --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

pub(super) fn run(arguments: &Arguments) -> Result<Output, CliError> {
    become_program("overbook-libvirt", &arguments.arguments)
}
