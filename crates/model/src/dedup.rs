//! What keeping identical pages once has come to, for one VM.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// One VM's part in its group's shared pages, since its worker met it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dedup {
    /// What of its memory is shared now.
    pub shared: Bytes,
    /// Memory that it needs less therefore: of each shared page all but its part, a page among as many as
    /// share it.
    pub saved: Bytes,
    /// What was merged.
    pub merged: Bytes,
    /// Of what was merged, what the guest has written since, and has for itself again.
    pub broken: Bytes,
    /// Pages of zeros that were dropped: they take no memory until the guest writes to them.
    pub dropped: Bytes,
    /// How often all of its memory was looked at.
    pub passes: u64,
}
