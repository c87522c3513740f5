//! Finds the address of a process's shim, and tells whether it is of this release.
//!
//! **Problem.** An abstract address belongs to the process that binds it first. `/proc/net/unix`
//! is a text into which any process can write names of any bytes.
//!
//! **Idea.** The shim's address is random, and the name of its thread contains it
//! (`protocol::listener_name`). Only a process itself can name its threads. So no other process
//! can hide its shim or point to another address.

use std::io;

use model::ShimVersion;
use protocol::VERSION;
use sys::process::Identity;
use sys::threads;

/// The most threads that are read: the shim's starts with QEMU's first RAM, before its vCPUs.
const MOST_THREADS: usize = 1024;

/// The address on which the shim in this process listens; `None`: the process has no shim, or its
/// QEMU has not started yet.
///
/// # Errors
/// When the process has ended, or may not be inspected.
pub fn shim_of(process: Identity) -> io::Result<Option<String>> {
    let names = threads::names(process.pid, MOST_THREADS)?;
    let found = names.iter().find_map(|name| protocol::address_of_listener(process.pid, name));
    process.still(found)
}

/// The versions of a shim, and its difference from this release's.
pub(super) fn version_of(protocol: u16, release: Option<String>) -> ShimVersion {
    let own = env!("CARGO_PKG_VERSION");
    let differs = match &release {
        Some(release) if release != own => {
            Some(format!("its shim is of release {release}, and this Overbook is {own}"))
        }
        _ if protocol < VERSION => Some(format!(
            "its shim speaks version {protocol} of the protocol, and this Overbook {VERSION}"
        )),
        _ => None,
    };
    ShimVersion { protocol, release, differs }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_shim::FakeShim;

    #[test]
    fn a_shim_is_found_by_its_thread_and_not_by_addresses_that_others_have_bound() {
        let own = Identity::own().unwrap();
        let fake = FakeShim::new(512);
        assert_eq!(shim_of(own).unwrap(), Some(fake.address()));
        // The first process has no shim, even if another process binds addresses in its name.
        let first = Identity::of(1).unwrap();
        let _squatters: Vec<_> = (0..1_000)
            .map(|nonce| sys::seqpacket::Listener::bind(&protocol::address(1, nonce)).unwrap())
            .collect();
        assert_eq!(shim_of(first).unwrap(), None);
    }

    #[test]
    fn a_shim_of_another_release_is_told_apart_and_one_that_tells_nothing_by_its_protocol() {
        let own = env!("CARGO_PKG_VERSION");
        let differs = |protocol, release: Option<&str>| {
            version_of(protocol, release.map(str::to_owned)).differs.unwrap_or_default()
        };
        assert_eq!(differs(VERSION, Some(own)), "");
        assert_eq!(differs(VERSION, None), "", "it has not told it yet");
        assert!(differs(VERSION, Some("0.0.1")).starts_with("its shim is of release 0.0.1, and"));
        assert!(differs(9, None).starts_with("its shim speaks version 9 of the protocol, and"));
    }

    #[test]
    fn a_process_that_has_ended_is_an_error() {
        let own = Identity::own().unwrap();
        assert!(shim_of(Identity { pid: u32::MAX, ..own }).is_err());
        assert!(shim_of(Identity { start_ticks: own.start_ticks + 1, ..own }).is_err());
    }
}
