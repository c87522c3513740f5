//! `overbook pki`: certificates for a small pool.

use std::path::PathBuf;
use std::time::Duration;

use super::{error::CliError, output::Output};
use crate::pki;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Question {
    /// Make an authority
    Init {
        /// Where it and all that it signs are to lie
        directory: PathBuf,
    },
    /// Make the certificates of a host, of etcd on a host, or of a controller
    Host {
        /// Where the authority lies
        directory: PathBuf,
        /// Its name in the pool
        name: String,
        /// Where it is reached as a server, such as 10.0.0.1
        addresses: Vec<String>,
        /// For how long they are valid
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
    },
}

pub(super) fn run(question: &Question) -> Result<Output, CliError> {
    let said = |error: pki::PkiError| CliError::Said(error.to_string());
    match question {
        Question::Init { directory } => {
            pki::init(directory).map_err(said)?;
            let shown = directory.display();
            Ok(Output::text(&format!("{shown}: keep ca-key.pem away from the hosts\n")))
        }
        Question::Host { directory, name, addresses, days } => {
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            if name.is_empty() || !name.chars().all(fits) {
                let why = "valid: letters, digits, `-` and `_`";
                return Err(CliError::Said(format!("the name is {name:?}; {why}")));
            }
            let valid = Duration::from_secs(u64::from(*days) * 24 * 3600);
            let own = pki::issue(directory, name, addresses, valid).map_err(said)?;
            Ok(Output::text(&format!("{}: copy it to {name}\n", own.display())))
        }
    }
}
