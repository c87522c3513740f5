//! Tells whether a VM's memory can be paged out: with the shim, and from outside.

use crate::kernel_version::KernelVersion;
use crate::outside;

/// Whether `UFFDIO_MOVE` works on pages in the swap cache.
///
/// It is not tried, because where it does not work the kernel crashes. So the version decides.
pub(super) fn moves_swapped() -> Result<String, String> {
    let version = KernelVersion::of_host();
    if version.moves_swapped() {
        Ok(format!("Linux {version}"))
    } else {
        Err(format!("Linux {version}: 6.14, 6.13.7 or 6.12.19 is needed"))
    }
}

/// Tries it on a page of our own, with the calls that page out a VM.
pub(super) fn from_outside() -> Result<String, String> {
    let ns = outside::refault_ns_of_host()?;
    Ok(format!("a touch of a page that is out takes {} µs", ns / 1_000))
}
