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
    let own = std::process::id();
    let mut bound: Vec<UnixListener> = vec![bind(b"overbook-shim.\xff\xfe\n@overbook-shim")?];
    for ahead in 1..count {
        let pid = own.wrapping_add(ahead);
        bound.extend(bind(format!("overbook-shim.{pid}").as_bytes()));
        bound.extend(bind(protocol::address(pid, ahead).as_bytes()));
    }
    saw(&format!("it has bound {} addresses", bound.len()));
    // The addresses stay bound until the process is ended.
    loop {
        std::thread::park();
    }
}
