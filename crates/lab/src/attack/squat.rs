//! Abstract socket addresses that another user binds before QEMUs do: as many as a user may have
//! sockets. They are the addresses that a shim would derive from its pid, and one that is no
//! text.
//!
//! `COUNT`: binds the addresses of the `COUNT` pids that come next.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::saw;
use crate::lab::LabError;

pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let count: u32 = args.first().and_then(|count| count.parse().ok()).unwrap_or(1);
    let bind = |name: &[u8]| UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?);
    let mut bound: Vec<UnixListener> = vec![bind(b"overbook-shim.\xff\xfe\n@overbook-shim")?];
    let names = names(std::process::id(), count);
    bound.extend(names.filter_map(|name| bind(name.as_bytes()).ok()));
    saw(&format!("it has bound {} addresses", bound.len()));
    // The addresses stay bound until the process is ended.
    loop {
        std::thread::park();
    }
}

/// Two names for each of the `count` pids after `own`.
fn names(own: u32, count: u32) -> impl Iterator<Item = String> {
    (1..=count).flat_map(move |ahead| {
        let pid = own.wrapping_add(ahead);
        [format!("overbook-shim.{pid}"), protocol::address(pid, ahead)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_the_pids_has_two_names() {
        let of_two: Vec<String> = names(7, 2).collect();
        let expected = [
            "overbook-shim.8",
            "overbook-shim.8.00000001",
            "overbook-shim.9",
            "overbook-shim.9.00000002",
        ];
        assert_eq!(of_two, expected);
        assert_eq!(names(7, 0).count(), 0);
    }
}
