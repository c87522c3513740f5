//! Tries a pool for `overbook check`: the host's certificates, the command that starts QEMUs, and
//! each member of etcd.
//!
//! A fault of this host's own files is fatal: the host cannot join the pool, or refuses every VM.
//! A member that does not answer now may do so later. The trial changes nothing in the store.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cluster::records::Records;
use cluster::store::StoreError;
use futures_util::future::join_all;
use model::HostName;
use model::spec::PoolSpec;
use pageserver::tls::try_client;
use serde::Serialize;

use super::PoolError;
use crate::pki::{self, Purpose};

/// A certificate that expires within this time gets a warning: 30 days.
const SOON_S: i64 = 30 * DAY_S;
const DAY_S: i64 = 24 * 3600;

/// The result of trying a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Trial {
    /// The findings, one for each thing that was tried.
    pub findings: Vec<Finding>,
    /// The other hosts that are alive; `None`: no member answers.
    pub others: Option<BTreeSet<HostName>>,
}

/// The result of trying one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The thing that was tried.
    pub what: String,
    /// Its state.
    pub said: String,
    /// Whether the state is as it should be.
    pub is_fine: bool,
    /// Whether the host cannot join the pool, or refuses every VM, because of this.
    pub is_fatal: bool,
}

impl Finding {
    fn fine(what: String, said: String) -> Self {
        Self { what, said, is_fine: true, is_fatal: false }
    }

    fn doubtful(what: String, said: String) -> Self {
        Self { what, said, is_fine: false, is_fatal: false }
    }

    fn fatal(what: String, said: String) -> Self {
        Self { what, said, is_fine: false, is_fatal: true }
    }
}

/// Tries a pool, with its members in parallel. Takes at most some seconds.
pub fn try_pool(spec: &PoolSpec) -> Trial {
    let mut trial = Trial::default();
    if let Some(directory) = &spec.tls {
        trial.findings = certificates(directory, spec);
    }
    let is_known = !trial.findings.iter().any(|finding| finding.is_fatal);
    trial.findings.extend(spec.receive.as_ref().map(|receive| incoming(&receive.command)));
    // Without a valid certificate no member answers.
    if is_known {
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                runtime.block_on(members(spec, &mut trial));
                // A pending name lookup is not waited for.
                runtime.shutdown_background();
            }
            Err(error) => trial.findings.push(untried(&error)),
        }
    }
    trial
}

/// No member of etcd could be asked at all; the daemon could not ask one either.
fn untried(error: &io::Error) -> Finding {
    Finding::fatal("etcd".to_owned(), format!("cannot be tried: {error}"))
}

fn certificates(directory: &Path, spec: &PoolSpec) -> Vec<Finding> {
    if let Err(error) = try_client(directory) {
        return vec![Finding::fatal("certificates".to_owned(), error.to_string())];
    }
    let host = spec.host.as_str();
    let client = (directory.join("client-cert.pem"), Some((Purpose::Host, host)));
    let authority = (directory.join(pki::AUTHORITY_CERTIFICATE), None);
    let migration = directory.join(Purpose::Migration.directory());
    // The client certificate sends guests, the server certificate receives them.
    let movers = ["client", "server"].into_iter().filter(|side| match *side {
        "client" => !spec.movable.is_empty(),
        _ => spec.receive.is_some(),
    });
    let movers = movers
        .map(|side| (migration.join(format!("{side}-cert.pem")), Some((Purpose::Migration, host))));
    let all = [client, authority].into_iter().chain(movers);
    all.map(|(path, whose)| certificate(&path, whose)).collect()
}

/// Checks that a certificate can be read and is as the authority made it. `whose`: the expected
/// purpose and host.
fn certificate(path: &Path, whose: Option<(Purpose, &str)>) -> Finding {
    let what = format!("certificate {}", path.display());
    let found = match pki::read(path) {
        Ok(found) => found,
        Err(error) => return Finding::fatal(what, error.to_string()),
    };
    let pki::Certificate { name, purpose: says, left_s, ends } = found;
    if left_s < 0 {
        return Finding::fatal(what, format!("it has ended on {ends}"));
    }
    if let Some((purpose, host)) = whose {
        let wanted = purpose.common_name(host);
        if name.as_deref() != Some(wanted.as_str()) {
            let name = name.map_or_else(|| "no name".to_owned(), |n| n.escape_debug().to_string());
            let why = match purpose {
                Purpose::Migration => "no other host sends it a guest, or takes one from it",
                _ => "where etcd checks names it writes nothing of this host's",
            };
            let is_of = format!("it is of {name}, and is to be of {wanted}, for `host` is {host}");
            return Finding::fatal(what, format!("{is_of}: {why}"));
        }
        // A controller has a configuration of its own.
        let fits =
            |says| says == purpose || (purpose, says) == (Purpose::Host, Purpose::Controller);
        if let Some(other) = says.filter(|says| !fits(*says)) {
            return Finding::fatal(what, format!("its purpose is {other}, and not {purpose}"));
        }
    }
    if left_s < SOON_S {
        return Finding::doubtful(what, format!("it ends in {} days, on {ends}", left_s / DAY_S));
    }
    Finding::fine(what, format!("fine until {ends}"))
}

fn incoming(command: &Path) -> Finding {
    let what = format!("incoming {}", command.display());
    match std::fs::metadata(command) {
        Err(error) => Finding::fatal(what, error.to_string()),
        Ok(file) if !file.is_file() => Finding::fatal(what, "is no file".to_owned()),
        Ok(file) if file.permissions().mode() & 0o111 == 0 => {
            Finding::fatal(what, "is not executable".to_owned())
        }
        Ok(_) => Finding::fine(what, "fine".to_owned()),
    }
}

async fn members(spec: &PoolSpec, trial: &mut Trial) {
    let asked = join_all(spec.etcd.iter().map(|endpoint| async move {
        let alone = PoolSpec { etcd: vec![endpoint.clone()], ..spec.clone() };
        (format!("etcd {endpoint}"), records(&alone).await)
    }));
    for (what, answer) in asked.await {
        trial.findings.push(match answer {
            Ok(records) => {
                let seated = records.seated.into_iter().filter(|host| *host != spec.host);
                trial.others.get_or_insert_default().extend(seated);
                Finding::fine(what, "fine".to_owned())
            }
            Err(PoolError::Store(StoreError::Unreachable(why))) => {
                Finding::doubtful(what, format!("does not answer: {why}"))
            }
            Err(PoolError::Store(StoreError::Refused(why))) => {
                Finding::doubtful(what, format!("refuses: {why}"))
            }
            Err(error) => Finding::doubtful(what, error.to_string()),
        });
    }
}

async fn records(spec: &PoolSpec) -> Result<Records, PoolError> {
    Ok(Records::of(&super::store(spec).await?.read("").await?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_certificate_of_another_host_is_fatal() {
        let dir = tempfile::tempdir().unwrap();
        pki::init(dir.path()).unwrap();
        let year = Duration::from_secs(365 * 24 * 3600);
        let order =
            pki::CertificateRequest { name: "a", addresses: &[], valid: year, renews: false };
        let own = pki::host(dir.path(), order).unwrap();
        let path = own.join("client-cert.pem");
        let [mine, other] = ["a", "c"].map(|host| certificate(&path, Some((Purpose::Host, host))));
        assert!(mine.is_fine, "{mine:?}");
        assert!(other.is_fatal && !other.is_fine, "{other:?}");
        let words = "it is of a, and is to be of c, for `host` is c: ";
        assert!(other.said.starts_with(words), "{other:?}");
        // A certificate of the right host for another purpose.
        let disks = certificate(&own.join("disks/client-cert.pem"), Some((Purpose::Host, "a")));
        assert!(disks.said.starts_with("it is of disks.a, and is to be of a"), "{disks:?}");
    }

    #[test]
    fn what_could_not_be_tried_is_told() {
        let finding = untried(&io::Error::other("too many open files"));
        assert!(finding.is_fatal);
        assert_eq!(finding.said, "cannot be tried: too many open files");
    }
}
