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
#[cfg(feature = "etcd")]
mod etcd;
mod launch;
mod manager;
pub mod member;
mod move_news;
pub(crate) mod placement;
mod report;
pub mod trial;
pub(crate) mod view;

use std::path::PathBuf;
use std::sync::Arc;

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
/// An address or a certificate is invalid, or this program was built without etcd.
pub async fn store(spec: &PoolSpec) -> Result<Arc<dyn Store>, PoolError> {
    #[cfg(feature = "etcd")]
    return etcd::store(spec).await;
    #[cfg(not(feature = "etcd"))]
    {
        let why = format!("this program was built without etcd, and pool {} needs it", spec.name);
        Err(StoreError::Refused(why).into())
    }
}
