//! Certificates for a small pool: its own authority, issuing certificates, and reading them.
//!
//! Each certificate has one purpose ([`Purpose`]), which is stated in a URI,
//! `urn:overbook:PURPOSE:NAME`. The peer verifies it. A repository and its clients check that
//! URI. etcd checks the common name, which it takes for the user's name. QEMU checks the whole
//! distinguished name, or the server's DNS name. So all common names except a host's and a
//! controller's contain a dot, which no host name in such a pool does.
//!
//! The files have the names that QEMU uses.

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

pub use drivers::migration::AUTHORITY_CERTIFICATE;
use files::{Is, write};
pub use revocation::revoke;

/// Name of the authority.
const AUTHORITY: &str = "Overbook pool";
const AUTHORITY_KEY: &str = "ca-key.pem";
/// Validity of an authority: all certificates that it has signed must be replaced by then.
pub const AUTHORITY_VALID: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Start of the validity before the present time, because the hosts' clocks differ.
const BEFORE: Duration = Duration::from_secs(24 * 3600);
/// Prefix of the URI that states a certificate's purpose.
const URN: &str = "urn:overbook:";

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// A name or a key is invalid.
    #[error("{0}")]
    Certificate(#[from] rcgen::Error),
    /// A file holds no certificate.
    #[error("{} holds no certificate: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error.
        why: String,
    },
    /// The authority expires sooner than the certificate would.
    #[error("{asked_days} days are too many: the authority ends on {ends}, in {left_days} days")]
    Outlives {
        /// Requested validity of the certificate.
        asked_days: u64,
        /// Remaining validity of the authority.
        left_days: i64,
        /// Its last day.
        ends: String,
    },
}

/// The single purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A host's daemon, as a client of etcd.
    Host,
    /// A controller, or an administrator, as a client of etcd.
    Controller,
    /// A member of etcd.
    Etcd,
    /// A host's QEMUs, during the migration of a guest.
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

    /// The directory of its files, within its owner's.
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
            // All members have the same name: a member of etcd checks that another one has it.
            Self::Etcd => "etcd.pool".to_owned(),
            other => format!("{}.{name}", other.word()),
        }
    }

    /// The sides of a connection that need a certificate for this purpose.
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

    /// The names by which a client identifies the server.
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

/// A request to an authority for certificates.
#[derive(Clone, Copy, Debug)]
pub struct CertificateRequest<'a> {
    /// The name of their owner.
    pub name: &'a str,
    /// Addresses of its servers; empty: it has no servers.
    pub addresses: &'a [String],
    /// Validity of the certificates.
    pub valid: Duration,
    /// Whether they replace earlier ones.
    pub renews: bool,
}

/// Creates an authority in `directory`; an existing one is not overwritten.
///
/// # Errors
/// A file cannot be created, or exists already.
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

/// Creates all certificates of a host, in a directory of its name within the authority's
/// `directory`: the host's own, and in it one directory for each other purpose. Returns the
/// host's directory.
///
/// # Errors
/// There is no authority, or a file cannot be created, or exists already.
pub fn host(directory: &Path, order: CertificateRequest<'_>) -> Result<PathBuf, PkiError> {
    let servers = !order.addresses.is_empty();
    let all = [Purpose::Host, Purpose::Migration, Purpose::Disks];
    let reached = [Purpose::Etcd, Purpose::Repository];
    issue(directory, order, all.into_iter().chain(reached.into_iter().filter(|_| servers)))
}

/// Creates the certificate of a controller, or of an administrator of etcd.
///
/// # Errors
/// As of [`host`].
pub fn controller(directory: &Path, order: CertificateRequest<'_>) -> Result<PathBuf, PkiError> {
    issue(directory, order, [Purpose::Controller])
}

fn issue(
    directory: &Path,
    order: CertificateRequest<'_>,
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
    order: CertificateRequest<'_>,
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

/// An issuer only needs its name and its key.
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

/// The content of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Its subject: the common name, which etcd takes for the user's.
    pub name: Option<String>,
    /// Its purpose; `None`: it states none, as the certificates of other authorities.
    pub purpose: Option<Purpose>,
    /// Remaining validity in seconds; negative: it has expired.
    pub left_s: i64,
    /// Its last day, as `2036-11-23`.
    pub ends: String,
}

/// Reads the first certificate of a file.
///
/// # Errors
/// The file cannot be read, or holds no certificate.
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
