//! `overbook pki`: certificates for a small pool.

use std::path::PathBuf;
use std::time::Duration;

use super::{error::CliError, output::Output};
use crate::pki::{self, CertificateRequest};

#[derive(Debug, clap::Subcommand)]
pub(super) enum PkiCommand {
    /// Make an authority
    Init {
        /// Directory for the authority and everything that it signs
        directory: PathBuf,
    },
    /// Make the certificates of a host
    Host {
        #[command(flatten)]
        whose: Whose,
        /// Addresses of its etcd and its repository, such as 10.0.0.1
        addresses: Vec<String>,
    },
    /// Make the certificate of a controller, or of an administrator of etcd
    Controller {
        #[command(flatten)]
        whose: Whose,
    },
    /// Revoke certificates
    Revoke {
        /// Directory of the authority
        directory: PathBuf,
        /// Files of the certificates
        #[arg(required = true)]
        certificates: Vec<PathBuf>,
    },
}

#[derive(Debug, clap::Args)]
pub(super) struct Whose {
    /// Directory of the authority
    directory: PathBuf,
    /// Its name in the pool
    name: String,
    /// Number of days for which the certificates are valid
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// Replace its existing certificates
    #[arg(long)]
    renew: bool,
}

impl Whose {
    fn order<'a>(&'a self, addresses: &'a [String]) -> Result<CertificateRequest<'a>, CliError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let name = self.name.as_str();
        if name.is_empty() || !name.chars().all(fits) {
            let why = "valid: letters, digits, `-` and `_`";
            return Err(CliError::Said(format!("the name is {name:?}; {why}")));
        }
        let valid = Duration::from_secs(u64::from(self.days) * 24 * 3600);
        Ok(CertificateRequest { name, addresses, valid, renews: self.renew })
    }
}

pub(super) fn run(question: &PkiCommand) -> Result<Output, CliError> {
    let said = |error: pki::PkiError| CliError::Said(error.to_string());
    let (own, name) = match question {
        PkiCommand::Init { directory } => {
            pki::init(directory).map_err(said)?;
            let shown = directory.display();
            return Ok(Output::text(&format!("{shown}: keep ca-key.pem away from the hosts\n")));
        }
        PkiCommand::Revoke { directory, certificates } => {
            pki::revoke(directory, certificates).map_err(said)?;
            let shown = directory.display();
            let text = format!("{shown}: copy `revoked` and `ca-crl.pem` to all hosts again\n");
            return Ok(Output::text(&text));
        }
        PkiCommand::Host { whose, addresses } => {
            (pki::host(&whose.directory, whose.order(addresses)?), &whose.name)
        }
        PkiCommand::Controller { whose } => {
            (pki::controller(&whose.directory, whose.order(&[])?), &whose.name)
        }
    };
    Ok(Output::text(&format!("{}: copy it to {name}\n", own.map_err(said)?.display())))
}
