//! The connection to a pool's etcd.

use std::path::Path;
use std::sync::Arc;

use cluster::store::Store;
use cluster::store::etcd::{Certificate, Etcd, Identity, TlsOptions};
use model::spec::PoolSpec;

use super::PoolError;

pub(super) async fn store(spec: &PoolSpec) -> Result<Arc<dyn Store>, PoolError> {
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
