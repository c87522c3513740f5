//! A process that listens on a QMP socket and answers no client. It also maps files that are
//! named like pools of shared pages and are none.
//!
//! `SOCKET COUNT`: listens at `SOCKET`, and maps `COUNT` files.

use std::io;
use std::os::unix::net::UnixListener;

use sys::pool_file::NAME_PREFIX;
use sys::shared_memory::SharedMemory;

use super::saw;
use crate::lab::LabError;

pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let [socket, count] = args else { return Err(io::Error::other("SOCKET COUNT").into()) };
    let _listener = UnixListener::bind(socket)?;
    let count: u32 = count.parse().map_err(io::Error::other)?;
    let make = |number| SharedMemory::create(&format!("{NAME_PREFIX}-mute-{number}"), 1, 4096);
    let pools: Vec<_> = (0..count).filter_map(|number| make(number).ok()).collect();
    saw(&format!("it maps {} files that are called like pools", pools.len()));
    loop {
        std::thread::park();
    }
}
