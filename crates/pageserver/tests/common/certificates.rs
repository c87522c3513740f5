//! Authorities, and certificates that they have signed, in files with QEMU's names.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Signs certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// Properties of a certificate to be made.
#[derive(Clone, Copy)]
pub(crate) struct CertificateSpec<'a> {
    /// The side that uses it.
    pub(crate) usage: Usage,
    /// Its purpose; empty: it names none.
    pub(crate) purpose: &'a str,
    /// Its subject: a host's name or address.
    pub(crate) name: &'a str,
    /// Days from now until it becomes valid, and until it expires.
    pub(crate) days: (i32, i32),
}

/// The side that uses a certificate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    Server,
    Client,
}

/// A valid server certificate.
pub(crate) const SERVER: CertificateSpec<'static> = CertificateSpec {
    usage: Usage::Server,
    purpose: "repository",
    name: "localhost",
    days: (-1, 30),
};
/// A valid client certificate.
pub(crate) const CLIENT: CertificateSpec<'static> =
    CertificateSpec { usage: Usage::Client, purpose: "disks", name: "client", days: (-1, 30) };

impl Authority {
    /// A new authority.
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A new certificate and its key, as PEM.
    pub(crate) fn sign(&self, wish: CertificateSpec<'_>) -> (String, String) {
        let mut params = CertificateParams::new(vec![wish.name.to_owned()]).unwrap();
        if !wish.purpose.is_empty() {
            let uri = format!("urn:overbook:{}:{}", wish.purpose, wish.name);
            params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
        }
        params.extended_key_usages = vec![match wish.usage {
            Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        (params.not_before, params.not_after) = (day(wish.days.0).into(), day(wish.days.1).into());
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// The authority's own certificate, as PEM.
    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// A directory with the files of one side. That side trusts this authority, and its own
    /// certificate is signed by `signer`.
    pub(crate) fn files(
        &self,
        below: &Path,
        signer: &Self,
        side: &str,
        wish: CertificateSpec<'_>,
    ) -> PathBuf {
        let dir = tempfile::tempdir_in(below).unwrap().keep();
        let (certificate, key) = signer.sign(wish);
        std::fs::write(dir.join("ca-cert.pem"), self.pem()).unwrap();
        std::fs::write(dir.join(format!("{side}-cert.pem")), certificate).unwrap();
        std::fs::write(dir.join(format!("{side}-key.pem")), key).unwrap();
        dir
    }
}

fn day(days: i32) -> SystemTime {
    let far = DAY * days.unsigned_abs();
    let now = SystemTime::now();
    if days < 0 { now - far } else { now + far }
}
