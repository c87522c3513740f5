//! Hosts as one pool: what a host does in it, and what its controller does.
//!
//! ```text
//!             intents                    ┌──────────► etcd ◄──────────┐  reports, steps
//! controller ─────────► etcd     member (in the daemon of host a)    member (of host b)
//!                                    │ turns of a migration            │
//!                                    ▼ (drivers::hands)                ▼
//!                                   QEMU ────────────────────────────► QEMU
//! ```
//!
//! Nobody waits for the pool: a host whose store does not answer goes on as if it were alone, says
//! so, and begins nothing new with others.

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

/// Why there is no way to a pool's store.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A file that is needed for TLS.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// What the store says.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The store of this pool. It connects when something is first asked.
///
/// # Errors
/// An address or a certificate that makes no sense.
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
