//! Certificates for a small pool: an authority of its own, what it signs, and what one says.
//!
//! Each certificate has one purpose ([`Purpose`]), and says so in a URI,
//! `urn:overbook:PURPOSE:NAME`. The other end checks it: a repository and its clients by that URI,
//! etcd by the common name, which it takes for the user's, and QEMU by the whole distinguished
//! name, or the server's DNS name. So all but a host's and a controller's have a common name with a
//! dot, which no host of such a pool has.
//!
//! Names of files are those that QEMU uses.

mod files;
mod revocation;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;
use x509_parser::time::ASN1Time;

use files::{Is, write};
pub use revocation::revoke;

/// What the authority is called.
const AUTHORITY: &str = "Overbook pool";
/// The authority's own certificate, in each directory.
pub const AUTHORITY_CERTIFICATE: &str = "ca-cert.pem";
const AUTHORITY_KEY: &str = "ca-key.pem";
/// For how long an authority is valid: all that it signs must be replaced by then.
pub const AUTHORITY_VALID: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Clocks of hosts differ.
const BEFORE: Duration = Duration::from_secs(24 * 3600);
/// Where the certificate of a purpose says so.
const URN: &str = "urn:overbook:";

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A name or a key that makes no sense.
    #[error("{0}")]
    Certificate(#[from] rcgen::Error),
    /// A file that holds no certificate.
    #[error("{} holds no certificate: {why}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The authority ends sooner.
    #[error("{asked_days} days are too many: the authority ends on {ends}, in {left_days} days")]
    Outlives {
        /// How long the certificate was to be valid.
        asked_days: u64,
        /// How long the authority is.
        left_days: i64,
        /// Its last day.
        ends: String,
    },
}

/// The one thing that a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A host's daemon, as a client of etcd.
    Host,
    /// A controller, or an administrator, as a client of etcd.
    Controller,
    /// A member of etcd.
    Etcd,
    /// A host's QEMUs, while they send or receive a guest.
    Migration,
    /// A repository, as a server.
    Repository,
    /// A host's disks, as clients of repositories.
    Disks,
}

impl Purpose {
    const ALL: [Self; 6] =
        [Self::Host, Self::Controller, Self::Etcd, Self::Migration, Self::Repository, Self::Disks];

    fn word(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Controller => "controller",
            Self::Etcd => "etcd",
            Self::Migration => "migration",
            Self::Repository => "repository",
            Self::Disks => "disks",
        }
    }

    /// Its files' directory, below its owner's.
    #[must_use]
    pub fn directory(self) -> &'static str {
        match self {
            Self::Host | Self::Controller => "",
            other => other.word(),
        }
    }

    /// The common name of a certificate for this purpose that belongs to `name`.
    #[must_use]
    pub fn common_name(self, name: &str) -> String {
        match self {
            Self::Host | Self::Controller => name.to_owned(),
            // One for all of them: a member of etcd checks that another one has it.
            Self::Etcd => "etcd.pool".to_owned(),
            other => format!("{}.{name}", other.word()),
        }
    }

    /// Which sides of a connection it has.
    fn sides(self) -> &'static [(&'static str, &'static [ExtendedKeyUsagePurpose])] {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        match self {
            Self::Host | Self::Controller | Self::Disks => &[("client", &[ClientAuth])],
            // Members are clients of each other, with the same certificate.
            Self::Etcd => &[("server", &[ServerAuth, ClientAuth])],
            Self::Migration => &[("server", &[ServerAuth]), ("client", &[ClientAuth])],
            Self::Repository => &[("server", &[ServerAuth])],
        }
    }

    /// By which names a client knows the server.
    fn server_names(self, name: &str, addresses: &[String]) -> Vec<String> {
        match self {
            Self::Migration => vec![self.common_name(name)],
            _ => [&[name.to_owned()], addresses].concat(),
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Certificates that are wanted of an authority.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// The name of their owner.
    pub name: &'a str,
    /// Where its servers are reached; none: it has no servers.
    pub addresses: &'a [String],
    /// For how long they are valid.
    pub valid: Duration,
    /// They take the place of earlier ones.
    pub renews: bool,
}

/// Makes an authority in `directory`; one that is there is not overwritten.
///
/// # Errors
/// A file cannot be made, or is there already.
pub fn init(directory: &Path) -> Result<(), PkiError> {
    let at = |error| PkiError::File { path: directory.to_owned(), error };
    std::fs::create_dir_all(directory).map_err(at)?;
    let key = KeyPair::generate()?;
    let text = key.serialize_pem();
    let mut params = authority();
    dates(&mut params, AUTHORITY_VALID);
    let authority = CertifiedIssuer::self_signed(params, key)?;
    write(&directory.join(AUTHORITY_KEY), &text, Is::Key, false)?;
    write(&directory.join(AUTHORITY_CERTIFICATE), &authority.pem(), Is::Public, false)
}

/// Makes all certificates that a host has, in a directory of its name below `authority`'s: its
/// own, and below it one directory for each other purpose. Answers where.
///
/// # Errors
/// There is no authority, or a file cannot be made, or is there already.
pub fn host(directory: &Path, order: Order<'_>) -> Result<PathBuf, PkiError> {
    let servers = !order.addresses.is_empty();
    let all = [Purpose::Host, Purpose::Migration, Purpose::Disks];
    let reached = [Purpose::Etcd, Purpose::Repository];
    issue(directory, order, all.into_iter().chain(reached.into_iter().filter(|_| servers)))
}

/// Makes the certificate of a controller, or of an administrator of etcd.
///
/// # Errors
/// As of [`host`].
pub fn controller(directory: &Path, order: Order<'_>) -> Result<PathBuf, PkiError> {
    issue(directory, order, [Purpose::Controller])
}

fn issue(
    directory: &Path,
    order: Order<'_>,
    purposes: impl IntoIterator<Item = Purpose>,
) -> Result<PathBuf, PkiError> {
    let issuer = issuer(directory)?;
    let Certificate { left_s, ends, .. } = read(&directory.join(AUTHORITY_CERTIFICATE))?;
    if i64::try_from(order.valid.as_secs()).unwrap_or(i64::MAX) > left_s {
        let (asked_days, left_days) = (order.valid.as_secs() / DAY_S, left_s / 86_400);
        return Err(PkiError::Outlives { asked_days, left_days, ends });
    }
    let own = directory.join(order.name);
    let made = |path: &Path, made: io::Result<()>| match made {
        Err(error) if !(order.renews && error.kind() == io::ErrorKind::AlreadyExists) => {
            Err(PkiError::File { path: path.to_owned(), error })
        }
        _ => Ok(()),
    };
    made(&own, std::fs::create_dir(&own))?;
    let authority = files::read(&directory.join(AUTHORITY_CERTIFICATE))?;
    for purpose in purposes {
        let place = own.join(purpose.directory());
        made(&place, std::fs::create_dir_all(&place))?;
        for (side, usages) in purpose.sides() {
            let key = KeyPair::generate()?;
            let params = params(purpose, order, side, usages)?;
            let certificate = params.signed_by(&key, &issuer)?;
            let (certificate_file, key_file) =
                (place.join(format!("{side}-cert.pem")), place.join(format!("{side}-key.pem")));
            write(&key_file, &key.serialize_pem(), Is::Key, order.renews)?;
            write(&certificate_file, &certificate.pem(), Is::Public, order.renews)?;
        }
        write(&place.join(AUTHORITY_CERTIFICATE), &authority, Is::Public, order.renews)?;
    }
    revocation::spread(directory)?;
    Ok(own)
}

/// A day, in seconds.
const DAY_S: u64 = 24 * 3600;

fn params(
    purpose: Purpose,
    order: Order<'_>,
    side: &str,
    usages: &[ExtendedKeyUsagePurpose],
) -> Result<CertificateParams, PkiError> {
    let names = match side {
        "server" => purpose.server_names(order.name, order.addresses),
        _ => Vec::new(),
    };
    let mut params = CertificateParams::new(names)?;
    params.subject_alt_names.push(SanType::URI(urn(purpose, order.name).try_into()?));
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, purpose.common_name(order.name));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = usages.to_vec();
    dates(&mut params, order.valid);
    Ok(params)
}

fn urn(purpose: Purpose, name: &str) -> String {
    format!("{URN}{purpose}:{name}")
}

fn dates(params: &mut CertificateParams, valid: Duration) {
    let now = SystemTime::now();
    (params.not_before, params.not_after) = ((now - BEFORE).into(), (now + valid).into());
}

/// All that is needed of an issuer is its name and its key.
fn issuer(directory: &Path) -> Result<Issuer<'static, KeyPair>, PkiError> {
    let key = KeyPair::from_pem(&files::read(&directory.join(AUTHORITY_KEY))?)?;
    Ok(Issuer::new(authority(), key))
}

fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, AUTHORITY);
    params
}

/// What a certificate says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Whose it is: the common name, which etcd takes for the user's.
    pub name: Option<String>,
    /// Its purpose; `None`: another authority's certificates say nothing of that.
    pub purpose: Option<Purpose>,
    /// How long it is still valid, in seconds; less than none: it has ended.
    pub left_s: i64,
    /// The day on which it ends, as `2036-11-23`.
    pub ends: String,
}

/// Reads the first certificate of a file.
///
/// # Errors
/// There is none.
pub fn read(path: &Path) -> Result<Certificate, PkiError> {
    let text = files::read(path)?;
    let unreadable = |why: String| PkiError::Unreadable { path: path.to_owned(), why };
    let (_, pem) =
        parse_x509_pem(text.as_bytes()).map_err(|error| unreadable(error.to_string()))?;
    let found = pem.parse_x509().map_err(|error| unreadable(error.to_string()))?;
    let (name, ends) = (found.subject().iter_common_name().next(), found.validity().not_after);
    let names = found.subject_alternative_name().ok().flatten();
    let uris = names.iter().flat_map(|names| &names.value.general_names).filter_map(|name| {
        let GeneralName::URI(uri) = name else { return None };
        uri.strip_prefix(URN)?.split_once(':')
    });
    let purpose = uris
        .filter_map(|(word, _)| Purpose::ALL.into_iter().find(|purpose| purpose.word() == word))
        .next();
    Ok(Certificate {
        name: name.and_then(|name| name.as_str().ok()).map(str::to_owned),
        purpose,
        left_s: ends.timestamp() - ASN1Time::now().timestamp(),
        ends: ends.to_datetime().date().to_string(),
    })
}

#[cfg(test)]
mod tests;
