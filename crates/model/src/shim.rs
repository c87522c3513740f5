//! The shim in a VM's QEMU, which keeps it until the VM is restarted.

use serde::{Deserialize, Serialize};

/// The versions of a shim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimVersion {
    /// The version of the protocol that it and its worker speak.
    pub protocol: u16,
    /// The release of Overbook that it belongs to; absent: it does not tell.
    #[serde(deserialize_with = "crate::words::maybe_of_others")]
    pub release: Option<String>,
    /// The difference from the shim of the Overbook that runs; absent: there is none. The shim
    /// works all the same.
    pub differs: Option<String>,
}
