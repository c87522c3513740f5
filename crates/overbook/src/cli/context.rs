//! Finds the daemon's socket.

use std::path::{Path, PathBuf};

use api::client::ApiClient;

use super::{DEFAULT_SOCKET, error::CliError};
use crate::config_files;

/// The global options.
pub(super) struct Context {
    /// The configuration.
    pub(super) config: PathBuf,
    /// The socket, if the user named one.
    pub(super) socket: Option<PathBuf>,
}

impl Context {
    /// The daemon's socket: the user's, else the configuration's, else the default.
    ///
    /// A user who may ask the daemon may lack the right to read its configuration. So only a
    /// configuration that was named explicitly has to be readable.
    pub(super) fn socket(&self) -> Result<PathBuf, CliError> {
        if let Some(socket) = &self.socket {
            return Ok(socket.clone());
        }
        match config_files::load(&self.config) {
            Ok(spec) => Ok(spec.api.socket),
            // With faults in the file, its daemon may still run with the last good configuration.
            Err(faults) => match config_files::salvage(&self.config).socket {
                Some(socket) => Ok(socket),
                None if self.config == Path::new(config_files::DEFAULT_PATH) => {
                    Ok(PathBuf::from(DEFAULT_SOCKET))
                }
                None => Err(CliError::Said(format!("{faults}\n(or name the --socket)"))),
            },
        }
    }

    /// A client of the daemon.
    pub(super) fn client(&self) -> Result<ApiClient, CliError> {
        Ok(ApiClient::new(&self.socket()?)?)
    }
}
