//! Verifies that a certificate is signed by the authority, and is for the purpose in question.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

use super::fingerprint;
use super::live::Revoked;

/// Prefix of the URI in a certificate that names its purpose.
const URN: &str = "urn:overbook:";
/// Purpose of the clients of repositories.
pub(super) const DISKS: &str = "disks";
/// Purpose of repositories.
pub(super) const REPOSITORY: &str = "repository";

/// The name in a certificate, if it is for this purpose.
pub(super) fn name_for(purpose: &str, certificate: &[u8]) -> Option<String> {
    let (_, found) = parse_x509_certificate(certificate).ok()?;
    let names = found.subject_alternative_name().ok()??;
    names.value.general_names.iter().find_map(|name| {
        let GeneralName::URI(uri) = name else { return None };
        let (word, name) = uri.strip_prefix(URN)?.split_once(':')?;
        (word == purpose && !name.is_empty()).then(|| name.to_owned())
    })
}

/// The authority has signed the certificate for another purpose.
#[derive(Debug)]
pub(super) struct OtherPurpose(pub(super) &'static str);

impl fmt::Display for OtherPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its certificate is not for {}", self.0)
    }
}

impl std::error::Error for OtherPurpose {}

/// Requirements on a certificate in addition to the authority's signature.
#[derive(Debug)]
pub(super) struct CertificateRequirements {
    pub(super) purpose: &'static str,
    pub(super) revoked: Revoked,
}

impl CertificateRequirements {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        if self.revoked.contains(&fingerprint(certificate)) {
            return Err(Error::InvalidCertificate(CertificateError::Revoked));
        }
        if name_for(self.purpose, certificate).is_none() {
            let why = OtherError(Arc::new(OtherPurpose(self.purpose)));
            return Err(Error::InvalidCertificate(CertificateError::Other(why)));
        }
        Ok(())
    }
}

/// A server's verifier of clients.
#[derive(Debug)]
pub(super) struct Clients {
    pub(super) signed: Arc<dyn ClientCertVerifier>,
    pub(super) wanted: CertificateRequirements,
}

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.signed.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.signed.verify_client_cert(own, between, now)?;
        self.wanted.check(own).map(|()| verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signed.supported_verify_schemes()
    }
}

/// A client's verifier of servers.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) signed: Arc<WebPkiServerVerifier>,
    pub(super) wanted: CertificateRequirements,
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.signed.verify_server_cert(own, between, name, ocsp, now)?;
        self.wanted.check(own).map(|()| verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signed.supported_verify_schemes()
    }
}
