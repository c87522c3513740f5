//! TLS with certificates on both sides.
//!
//! The files have the names that QEMU uses (`tls-creds-x509`): `ca-cert.pem`, and
//! `server-cert.pem` with `server-key.pem`, or `client-cert.pem` with `client-key.pem`. Both
//! sides must show a certificate that the authority has signed for this purpose (the URI
//! `urn:overbook:repository:NAME` of a server, `urn:overbook:disks:NAME` of a client) and that is
//! not on the list [`REVOKED`]. The files are read again when they change. Only TLS 1.3 is
//! allowed, so there is no downgrade.

mod live;
mod purpose;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, RootCertStore, ServerConfig,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use live::Live;
pub use live::Trusted;
use purpose::{
    CertificateRequirements, Clients, DISKS, OtherPurpose, REPOSITORY, Servers, name_for,
};

/// The file of revoked certificates, in the same directory. Each line begins with a certificate's
/// [`fingerprint`]. The file may be missing.
pub const REVOKED: &str = "revoked";

/// Fingerprint of a certificate: its SHA-256, in hexadecimal digits.
#[must_use]
pub fn fingerprint(certificate: &[u8]) -> String {
    let digest = digest(&SHA256, certificate);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or lacks its content.
    #[error("{}: {why}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        why: String,
    },
    /// The files do not fit each other.
    #[error("{}: {why}", .directory.display())]
    Unfit {
        /// The directory of the files.
        directory: PathBuf,
        /// The error.
        why: String,
    },
}

/// Why a handshake fails, as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Another authority has signed the server's certificate.
    #[error("its certificate is not signed by the authority in our ca-cert.pem")]
    Untrusted,
    /// The server's certificate is for another host.
    #[error("its certificate is not for this name, {0}")]
    OtherName(String),
    /// The server's certificate has expired.
    #[error("its certificate has expired")]
    Expired,
    /// The server's certificate is not valid yet.
    #[error("its certificate is not valid yet (is its clock, or ours, wrong?)")]
    NotYetValid,
    /// The server does not accept the client's certificate.
    #[error("it does not take our client-cert.pem: {0}")]
    Refused(&'static str),
    /// The peer's certificate is on our list of revoked ones.
    #[error("its certificate is revoked")]
    Revoked,
    /// The peer's certificate is for another purpose.
    #[error("its certificate is not for {0}")]
    OtherPurpose(&'static str),
    /// Another error.
    #[error("TLS fails: {0}")]
    Other(String),
}

impl HandshakeError {
    /// The handshake error behind an error of a TLS stream; `None`: there is none. A server may
    /// refuse the client's certificate after the client's side of the handshake.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        use CertificateError as C;
        let error = error.get_ref()?;
        if let Some(known) = error.downcast_ref::<Self>() {
            return Some(known.clone());
        }
        let error = error.downcast_ref::<Error>()?;
        Some(match error {
            Error::InvalidCertificate(C::Revoked) => Self::Revoked,
            Error::InvalidCertificate(C::Other(why)) if why.0.is::<OtherPurpose>() => why
                .0
                .downcast_ref()
                .map_or(Self::Untrusted, |OtherPurpose(wanted)| Self::OtherPurpose(wanted)),
            Error::InvalidCertificate(C::UnknownIssuer | C::BadSignature) => Self::Untrusted,
            Error::InvalidCertificate(C::Expired | C::ExpiredContext { .. }) => Self::Expired,
            Error::InvalidCertificate(C::NotValidYet | C::NotValidYetContext { .. }) => {
                Self::NotYetValid
            }
            Error::InvalidCertificate(C::NotValidForNameContext { presented, .. }) => {
                Self::OtherName(match &presented[..] {
                    [] => "nor for any other".to_owned(),
                    names => format!("only for {}", names.join(", ")),
                })
            }
            Error::InvalidCertificate(C::NotValidForName) => Self::OtherName(String::new()),
            Error::AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
                Self::Refused("another authority has signed it")
            }
            Error::AlertReceived(AlertDescription::CertificateExpired) => {
                Self::Refused("it has expired")
            }
            Error::AlertReceived(AlertDescription::CertificateRevoked) => {
                Self::Refused("it is revoked")
            }
            Error::AlertReceived(
                AlertDescription::BadCertificate
                | AlertDescription::CertificateUnknown
                | AlertDescription::CertificateRequired
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::AccessDenied,
            ) => Self::Refused("it is none that it trusts"),
            other => Self::Other(other.to_string()),
        })
    }

    fn into_io(self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, self)
    }
}

/// The server's side.
#[derive(Clone)]
pub struct Acceptor(Arc<Live<ServerConfig>>);

/// The client's side.
#[derive(Clone)]
pub struct Connector(Arc<Live<ClientConfig>>);

/// The files in a directory.
struct Files {
    roots: Arc<RootCertStore>,
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Files {
    fn read(directory: &Path, side: &str) -> Result<Self, TlsError> {
        let certificates = |name: &str| {
            let path = directory.join(name);
            let unread = |why: String| TlsError::File { path: path.clone(), why };
            let found = CertificateDer::pem_file_iter(&path).map_err(|e| unread(e.to_string()))?;
            let found: Result<Vec<_>, _> = found.collect();
            let found = found.map_err(|e| unread(e.to_string()))?;
            if found.is_empty() {
                return Err(unread("holds no certificate".to_owned()));
            }
            Ok(found)
        };
        let mut roots = RootCertStore::empty();
        for root in certificates("ca-cert.pem")? {
            roots.add(root).map_err(|e| unfit(directory, &e))?;
        }
        let path = directory.join(format!("{side}-key.pem"));
        let key = PrivateKeyDer::from_pem_file(&path)
            .map_err(|e| TlsError::File { path, why: e.to_string() })?;
        let certificates = certificates(&format!("{side}-cert.pem"))?;
        Ok(Self { roots: Arc::new(roots), certificates, key })
    }
}

fn unfit(directory: &Path, why: &dyn std::fmt::Display) -> TlsError {
    TlsError::Unfit { directory: directory.to_owned(), why: why.to_string() }
}

/// Describes an error of the files of this side.
fn misfit(directory: &Path, side: &str, error: &Error) -> TlsError {
    use CertificateError as C;
    let certificate = format!("{side}-cert.pem");
    let why = match error {
        Error::InconsistentKeys(_) => format!("{side}-key.pem is not the key of {certificate}"),
        Error::InvalidCertificate(C::UnknownIssuer | C::BadSignature) => {
            format!("{certificate} is not signed by the authority in ca-cert.pem")
        }
        Error::InvalidCertificate(C::Expired | C::ExpiredContext { .. }) => {
            format!("{certificate} has expired")
        }
        Error::InvalidCertificate(C::NotValidYet | C::NotValidYetContext { .. }) => {
            format!("{certificate} is not valid yet (is the clock wrong?)")
        }
        other => format!("{certificate}: {other}"),
    };
    unfit(directory, &why)
}

/// Tests the client's files in a directory: do they exist, do they belong together, and would a
/// server that trusts the same authority trust them?
///
/// # Errors
///
/// The error of the files.
pub fn try_client(directory: &Path) -> Result<(), TlsError> {
    client(directory)?;
    let files = Files::read(directory, "client")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(files.roots, provider)
        .build()
        .map_err(|e| unfit(directory, &e))?;
    let Some((own, between)) = files.certificates.split_first() else { return Ok(()) };
    let tried = verifier.verify_client_cert(own, between, UnixTime::now());
    tried.map(drop).map_err(|e| misfit(directory, "client", &e))
}

fn server(directory: &Path) -> Result<ServerConfig, TlsError> {
    let files = Files::read(directory, "server")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let signed = WebPkiClientVerifier::builder_with_provider(files.roots, provider.clone())
        .build()
        .map_err(|e| unfit(directory, &e))?;
    let wanted = CertificateRequirements { purpose: DISKS, revoked: live::revoked(directory)? };
    ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .and_then(|config| {
            config
                .with_client_cert_verifier(Arc::new(Clients { signed, wanted }))
                .with_single_cert(files.certificates, files.key)
        })
        .map_err(|e| misfit(directory, "server", &e))
}

fn client(directory: &Path) -> Result<ClientConfig, TlsError> {
    let files = Files::read(directory, "client")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let signed = WebPkiServerVerifier::builder_with_provider(files.roots, provider.clone())
        .build()
        .map_err(|e| unfit(directory, &e))?;
    let wanted =
        CertificateRequirements { purpose: REPOSITORY, revoked: live::revoked(directory)? };
    ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .and_then(|config| {
            config
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Servers { signed, wanted }))
                .with_client_auth_cert(files.certificates, files.key)
        })
        .map_err(|e| misfit(directory, "client", &e))
}

/// Wraps the stream of a finished handshake. The wrapped stream works for as long as the
/// certificate that the peer has shown is trusted.
fn trusted<C: Send + Sync + 'static, T>(
    live: &Live<C>,
    purpose: &'static str,
    shown: Option<&[CertificateDer<'_>]>,
) -> io::Result<impl FnOnce(T) -> Trusted<T> + use<C, T>> {
    let certificate = shown.and_then(<[_]>::first);
    let name = certificate.and_then(|shown| name_for(purpose, shown));
    let (Some(certificate), Some(name)) = (certificate, name) else {
        return Err(HandshakeError::OtherPurpose(purpose).into_io());
    };
    // The list may have grown since the handshake began.
    let cut = live.admit(fingerprint(certificate))?;
    Ok(|stream| Trusted::new(stream, cut, name))
}

impl Acceptor {
    /// Uses the files in a directory, as they are at each handshake.
    ///
    /// # Errors
    ///
    /// The files do not exist, or do not fit each other.
    pub fn new(directory: &Path) -> Result<Self, TlsError> {
        Live::new(directory, "server", server).map(Self)
    }

    /// Does the server's side of the handshake.
    ///
    /// # Errors
    ///
    /// Errors of the stream, and a client without a trusted certificate.
    pub async fn accept<S>(&self, stream: S) -> io::Result<Trusted<server::TlsStream<S>>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let stream = TlsAcceptor::from(self.0.config()).accept(stream).await?;
        let trusted = trusted(&self.0, DISKS, stream.get_ref().1.peer_certificates())?;
        Ok(trusted(stream))
    }
}

impl Connector {
    /// Uses the files in a directory, as they are at each handshake.
    ///
    /// # Errors
    ///
    /// The files do not exist, or do not fit each other.
    pub fn new(directory: &Path) -> Result<Self, TlsError> {
        Live::new(directory, "client", client).map(Self)
    }

    /// Does the client's side of the handshake with a server of this name or address.
    ///
    /// # Errors
    ///
    /// Errors of the stream, and a server without a trusted certificate for that name.
    pub async fn connect<S>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<Trusted<client::TlsStream<S>>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let stream = TlsConnector::from(self.0.config()).connect(name, stream).await?;
        let trusted = trusted(&self.0, REPOSITORY, stream.get_ref().1.peer_certificates())?;
        Ok(trusted(stream))
    }
}
