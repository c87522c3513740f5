//! Sets up TLS in the two QEMUs of a migration.
//!
//! Each side shows its host's certificate for migrations, and verifies the peer's. The source
//! demands the certificate of the host to which the guest moves (`tls-hostname`), the target that
//! of the host from which it comes (`tls-authz`). QEMU reads the files itself, as the user that
//! it runs as. So they are copied for QEMU while it reads them, to a directory whose name no
//! other process can guess or list.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::qmp::{Command, QmpClient, QmpError};
use super::told_with;

/// Names of the target's objects in QEMU.
const WAITS: &str = "overbook-incoming";
const COMES_FROM: &str = "overbook-incoming-from";
/// File of the authority's certificate, as QEMU calls it.
pub const AUTHORITY_CERTIFICATE: &str = "ca-cert.pem";
/// File of the revoked certificates, which QEMU refuses, as QEMU calls it. It may be missing.
pub const REVOCATION_LIST: &str = "ca-crl.pem";

/// The peer of a migration, and the certificates for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secured {
    /// Directory of this host's certificates for migrations.
    pub files: PathBuf,
    /// Directory for the copies that QEMU reads; created if it is missing.
    pub shown: PathBuf,
    /// The name in the certificates of the other host's QEMUs.
    pub peer_name: String,
}

/// The side of a migration on which a QEMU is.
#[derive(Clone, Copy)]
enum End {
    Source,
    Target,
}

impl End {
    const fn word(self) -> &'static str {
        match self {
            Self::Source => "client",
            Self::Target => "server",
        }
    }
}

/// Parameters of a migration without TLS, which overwrite those of an earlier one.
pub(super) fn nothing() -> Value {
    json!({"tls-creds": "", "tls-hostname": "", "tls-authz": ""})
}

impl Secured {
    /// Prepares the source's QEMU; returns the parameters for its migration. Its object is called
    /// `id`.
    pub(super) async fn at_source(
        &self,
        client: &mut QmpClient,
        id: &str,
    ) -> Result<Value, QmpError> {
        self.credentials(client, id, End::Source).await?;
        Ok(json!({"tls-creds": id, "tls-hostname": self.peer_name, "tls-authz": ""}))
    }

    /// Prepares the target's QEMU; returns the parameters for its migration.
    pub(super) async fn at_target(&self, client: &mut QmpClient) -> Result<Value, QmpError> {
        // A daemon that died in the middle of this may have left these objects.
        for id in [WAITS, COMES_FROM] {
            forget(client, id).await?;
        }
        self.credentials(client, WAITS, End::Target).await?;
        // This is the identity that QEMU reads from the source's certificate.
        let identity = format!("CN={}", self.peer_name);
        let object = json!({"qom-type": "authz-simple", "id": COMES_FROM, "identity": identity});
        told_with(client, "object-add", object).await?;
        Ok(json!({"tls-creds": WAITS, "tls-hostname": "", "tls-authz": COMES_FROM}))
    }

    async fn credentials(
        &self,
        client: &mut QmpClient,
        id: &str,
        end: End,
    ) -> Result<(), QmpError> {
        let shown = CertificateCopies::new(self, end).map_err(|error| {
            let why = format!("certificates in {}: {error}", self.files.display());
            QmpError::Refused { command: "object-add", message: why }
        })?;
        let object = json!({
            "qom-type": "tls-creds-x509",
            "id": id,
            "endpoint": end.word(),
            "dir": shown.0,
            "verify-peer": true,
        });
        told_with(client, "object-add", object).await
    }
}

/// Removes an object, if it exists.
pub(super) async fn forget(client: &mut QmpClient, id: &str) -> Result<(), QmpError> {
    match client.execute(Command::with("object-del", json!({"id": id}))).await {
        Err(error) if error.is_fatal() => Err(error),
        _ => Ok(()),
    }
}

/// Copies of certificates that QEMU may read; dropping it deletes them.
struct CertificateCopies(PathBuf);

impl CertificateCopies {
    fn new(secured: &Secured, end: End) -> io::Result<Self> {
        let parent = &secured.shown;
        directory(parent)?;
        // The name has 122 random bits.
        let name = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let place = parent.join(name.trim());
        directory(&place)?;
        let shown = Self(place);
        let side = end.word();
        let needed = [
            AUTHORITY_CERTIFICATE.to_owned(),
            format!("{side}-cert.pem"),
            format!("{side}-key.pem"),
        ];
        for name in needed {
            shown.copy(&secured.files, &name)?;
        }
        match shown.copy(&secured.files, REVOCATION_LIST) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(shown),
        }
    }

    fn copy(&self, from: &Path, name: &str) -> io::Result<()> {
        let content = fs::read(from.join(name))
            .map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
        let to = self.0.join(name);
        fs::write(&to, content)?;
        fs::set_permissions(&to, Permissions::from_mode(0o444))
    }
}

/// Creates a directory that others may enter but not list.
fn directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o711).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        // This does not depend on the umask of this process.
        _ => fs::set_permissions(path, Permissions::from_mode(0o711)),
    }
}

impl Drop for CertificateCopies {
    fn drop(&mut self) {
        // A directory that stays cannot be found, because its name is random.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_read_not_found_and_is_gone_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let (files, shown) = (dir.path().join("files"), dir.path().join("shown"));
        fs::create_dir(&files).unwrap();
        for name in ["ca-cert.pem", "client-cert.pem"] {
            fs::write(files.join(name), name).unwrap();
        }
        let secured =
            Secured { files: files.clone(), shown: shown.clone(), peer_name: "migration.b".into() };
        let missing =
            CertificateCopies::new(&secured, End::Source).map(|_| ()).unwrap_err().to_string();
        assert!(missing.starts_with("client-key.pem: "), "{missing}");
        fs::write(files.join("client-key.pem"), "key").unwrap();
        let found = CertificateCopies::new(&secured, End::Source).unwrap();
        assert_eq!(fs::read_to_string(found.0.join("client-key.pem")).unwrap(), "key");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&shown), mode(&found.0)), (0o711, 0o711));
        assert_eq!(mode(&found.0.join("client-key.pem")), 0o444);
        drop(found);
        assert_eq!(fs::read_dir(&shown).unwrap().count(), 0);
    }
}
