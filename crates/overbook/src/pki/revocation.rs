//! Certificates that are revoked before they expire.
//!
//! The authority lists them in `revoked`, one a line, with the SHA-256 fingerprint, the serial
//! number and the name. Overbook's own TLS code reads that file. QEMU and etcd only know lists
//! that the authority has signed, so each change also writes a new `ca-crl.pem`.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pageserver::tls::{REVOKED, fingerprint};
use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
};
use x509_parser::pem::parse_x509_pem;

use drivers::migration::REVOCATION_LIST;

use super::files::{self, Is, write};
use super::{AUTHORITY_CERTIFICATE, AUTHORITY_VALID, PkiError, issuer};

/// Adds the certificates in these files to the authority's list, and copies the list to each
/// directory of certificates that it has signed.
///
/// # Errors
/// A file cannot be read or written, or holds no certificate. There is a `ca-crl.pem`, but no
/// `revoked`: a copy of it is in each directory of certificates.
pub fn revoke(directory: &Path, certificates: &[PathBuf]) -> Result<(), PkiError> {
    let list = directory.join(REVOKED);
    // Where only the signed list is left, a new one would lack the earlier revocations.
    let exists = list.exists() || directory.join(REVOCATION_LIST).exists();
    let mut text = if exists { files::read(&list)? } else { String::new() };
    for path in certificates {
        let unreadable = |why: String| PkiError::Unreadable { path: path.clone(), why };
        let content = files::read(path)?;
        let (_, pem) =
            parse_x509_pem(content.as_bytes()).map_err(|error| unreadable(error.to_string()))?;
        let found = pem.parse_x509().map_err(|error| unreadable(error.to_string()))?;
        let fingerprint = fingerprint(&pem.contents);
        if !text.contains(&fingerprint) {
            let serial = found.raw_serial().iter().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            });
            let _ = writeln!(text, "{fingerprint} {serial} {}", found.subject());
        }
    }
    write(&list, &text, Is::Public, true)?;
    let number = u64::try_from(text.lines().count()).unwrap_or(u64::MAX);
    let now = SystemTime::now();
    let revoked = text.lines().filter_map(|line| {
        let serial = line.split(' ').nth(1)?;
        Some(RevokedCertParams {
            serial_number: SerialNumber::from_slice(&bytes(serial)?),
            revocation_time: now.into(),
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        })
    });
    let params = CertificateRevocationListParams {
        this_update: (now - super::BEFORE).into(),
        // With an expired list every peer would be refused.
        next_update: (now + AUTHORITY_VALID).into(),
        crl_number: SerialNumber::from(number),
        issuing_distribution_point: None,
        revoked_certs: revoked.collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let signed = params.signed_by(&issuer(directory)?)?.pem()?;
    write(&directory.join(REVOCATION_LIST), &signed, Is::Public, true)?;
    spread(directory)
}

/// Copies those of the lists that exist to each directory of certificates.
pub(super) fn spread(directory: &Path) -> Result<(), PkiError> {
    for name in [REVOKED, REVOCATION_LIST] {
        let list = directory.join(name);
        if !list.exists() {
            continue;
        }
        let text = files::read(&list)?;
        let owners = below(directory);
        let all = owners.iter().flat_map(|own| below(own)).chain(owners.iter().cloned());
        for place in all.filter(|place| place.join(AUTHORITY_CERTIFICATE).exists()) {
            write(&place.join(name), &text, Is::Public, true)?;
        }
    }
    Ok(())
}

fn below(directory: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(directory).into_iter().flatten().flatten();
    found.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn bytes(hex: &str) -> Option<Vec<u8>> {
    let digits = hex.as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()).collect()
}
