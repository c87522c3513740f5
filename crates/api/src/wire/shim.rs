//! The shim in a VM's QEMU, as its worker knows it.

use model::ShimVersion;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The shim in a VM's QEMU. QEMU keeps it until the VM is restarted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShimStatus {
    /// The version of the protocol that it and its worker speak.
    pub protocol: u16,
    /// The release of Overbook that it belongs to; absent: it does not tell.
    pub release: Option<String>,
    /// The difference from the shim of the Overbook that runs; absent: there is none. The shim
    /// works all the same.
    pub differs: Option<String>,
}

impl ShimStatus {
    /// The shim's versions as an API object.
    pub fn of(shim: &ShimVersion) -> Self {
        let ShimVersion { protocol, release, differs } = shim.clone();
        Self { protocol, release, differs }
    }

    /// Its versions in one line.
    #[must_use]
    pub fn words(&self) -> String {
        let release = self.release.as_deref().map(|it| format!("release {it}, "));
        let advice = self.differs.as_deref().map(|why| format!("; {why}: {ADVICE}"));
        let (release, advice) = (release.unwrap_or_default(), advice.unwrap_or_default());
        format!("{release}version {} of the protocol{advice}", self.protocol)
    }
}

/// The advice for a VM whose shim is of another release.
pub const ADVICE: &str = "restart the VM when convenient";
