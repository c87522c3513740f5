//! Certificates for a small pool: an authority of its own, what it signs, and what one says.
//!
//! Names of files are those that QEMU uses. A host's name stands in its certificate as the common
//! name, which etcd takes for the user's.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use x509_parser::pem::parse_x509_pem;
use x509_parser::time::ASN1Time;

/// What the authority is called.
const AUTHORITY: &str = "Overbook pool";
const AUTHORITY_CERTIFICATE: &str = "ca-cert.pem";
const AUTHORITY_KEY: &str = "ca-key.pem";
/// Clocks of hosts differ.
const BEFORE: Duration = Duration::from_secs(24 * 3600);

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
}

/// Makes an authority in `directory`; one that is there is not overwritten.
///
/// # Errors
/// A file cannot be made, or is there already.
pub fn init(directory: &Path) -> Result<(), PkiError> {
    let at = |error| PkiError::File { path: directory.to_owned(), error };
    fs::create_dir_all(directory).map_err(at)?;
    let key = KeyPair::generate()?;
    let text = key.serialize_pem();
    let authority = CertifiedIssuer::self_signed(authority(), key)?;
    write(&directory.join(AUTHORITY_KEY), &text, true)?;
    write(&directory.join(AUTHORITY_CERTIFICATE), &authority.pem(), false)
}

/// Makes certificates for whoever is called `name`, in a directory of that name below
/// `authority`'s: for a server that is reached at `addresses`, and for a client.
///
/// # Errors
/// There is no authority, or a file cannot be made, or is there already.
pub fn issue(
    directory: &Path,
    name: &str,
    addresses: &[String],
    valid: Duration,
) -> Result<PathBuf, PkiError> {
    let read = |file: &str| {
        let path = directory.join(file);
        fs::read_to_string(&path).map_err(|error| PkiError::File { path, error })
    };
    // All that is needed of an issuer is its name and its key.
    let issuer = Issuer::new(authority(), KeyPair::from_pem(&read(AUTHORITY_KEY)?)?);
    let own = directory.join(name);
    fs::create_dir(&own).map_err(|error| PkiError::File { path: own.clone(), error })?;
    let sides = [
        ("server", ExtendedKeyUsagePurpose::ServerAuth),
        ("client", ExtendedKeyUsagePurpose::ClientAuth),
    ];
    for (side, purpose) in sides {
        let names = [&[name.to_owned()], addresses].concat();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages =
            vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![purpose];
        let now = SystemTime::now();
        (params.not_before, params.not_after) = ((now - BEFORE).into(), (now + valid).into());
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?;
        write(&own.join(format!("{side}-cert.pem")), &certificate.pem(), false)?;
        write(&own.join(format!("{side}-key.pem")), &key.serialize_pem(), true)?;
    }
    write(&own.join(AUTHORITY_CERTIFICATE), &read(AUTHORITY_CERTIFICATE)?, false)?;
    Ok(own)
}

/// What a certificate says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Whose it is: the common name, which etcd takes for the user's.
    pub name: Option<String>,
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
    let text = fs::read(path).map_err(|error| PkiError::File { path: path.to_owned(), error })?;
    let unreadable = |why: String| PkiError::Unreadable { path: path.to_owned(), why };
    let (_, pem) = parse_x509_pem(&text).map_err(|error| unreadable(error.to_string()))?;
    let found = pem.parse_x509().map_err(|error| unreadable(error.to_string()))?;
    let (name, ends) = (found.subject().iter_common_name().next(), found.validity().not_after);
    Ok(Certificate {
        name: name.and_then(|name| name.as_str().ok()).map(str::to_owned),
        left_s: ends.timestamp() - ASN1Time::now().timestamp(),
        ends: ends.to_datetime().date().to_string(),
    })
}

fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, AUTHORITY);
    params
}

/// A new file; nobody else reads a key.
fn write(path: &Path, text: &str, is_key: bool) -> Result<(), PkiError> {
    let mode = if is_key { 0o600 } else { 0o644 };
    let file = fs::File::options().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| PkiError::File { path: path.to_owned(), error })
}
