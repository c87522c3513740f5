//! Hosts as one pool: the parts of a member host and of the controller.
//!
//! ```text
//!             intents                    ┌──────────► etcd ◄──────────┐  reports, steps
//! controller ─────────► etcd     member (in the daemon of host a)    member (of host b)
//!                                    │ turns of a migration            │
//!                                    ▼ (drivers::hands)                ▼
//!                                   QEMU ────────────────────────────► QEMU
//! ```
//!
//! Nothing waits for the pool. A host whose store does not answer goes on as if it were alone,
//! reports it, and begins nothing new with other hosts.

pub(crate) mod apart;
pub mod controller;
mod launch;
mod manager;
pub mod member;
pub mod moves;
mod report;
pub mod trial;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cluster::store::etcd::{Certificate, Etcd, Identity, TlsOptions};
use cluster::store::{Store, StoreError};
use model::spec::PoolSpec;

/// Why a pool's store cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A file that TLS needs cannot be used.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
    /// The store's error.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The store of this pool. It connects at the first request.
///
/// # Errors
/// An address or a certificate is invalid.
pub async fn store(spec: &PoolSpec) -> Result<Arc<dyn Store>, PoolError> {
    let tls = spec.tls.as_deref().map(tls).transpose()?;
    Ok(Arc::new(Etcd::connect(&spec.etcd, tls, &spec.name).await?))
}

fn tls(directory: &Path) -> Result<TlsOptions, PoolError> {
    let read = |name: &str| {
        let path = directory.join(name);
        std::fs::read(&path).map_err(|error| PoolError::File { path, error })
    };
    let ca = Certificate::from_pem(read("ca-cert.pem")?);
    let own = Identity::from_pem(read("client-cert.pem")?, read("client-key.pem")?);
    Ok(TlsOptions::new().ca_certificate(ca).identity(own))
}
