//! `overbook controller`: decide which VMs of a pool change hosts.

use model::spec::PoolSpec;
use sys::log;
use tokio::signal::unix::{SignalKind, signal};

use super::{context::Context, error::CliError, output::Output};
use crate::config_files;
use crate::pool::{self, controller::Controller};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The controller's name; the host's name in the pool if not given
    #[arg(long)]
    name: Option<String>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let spec = pool_of(context)?;
    let who = arguments.name.clone().unwrap_or_else(|| spec.host.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CliError::Said(error.to_string()))?;
    runtime.block_on(async {
        let store = pool::store(&spec).await.map_err(|error| CliError::Said(error.to_string()))?;
        let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
        let (Ok(mut terminate), Ok(mut interrupt)) = signals else {
            return Err(CliError::Said("no signals can be heard".to_owned()));
        };
        tokio::select! {
            () = Controller::new(store, who, &spec).run(log::info) => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(Output::nothing())
    })
}

/// The pool that the configuration names.
pub(super) fn pool_of(context: &Context) -> Result<PoolSpec, CliError> {
    let spec = config_files::load(&context.config);
    let spec = spec.map_err(|faults| CliError::Said(faults.to_string()))?;
    let why = || CliError::Said(format!("{}: this host is in no [pool]", context.config.display()));
    spec.pool.ok_or_else(why)
}
