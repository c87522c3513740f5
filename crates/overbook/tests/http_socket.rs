//! The unix socket's file while the daemon runs: what becomes of it when others delete or replace
//! it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    fs, io,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::Path,
    time::{Duration, Instant},
};

use overbook::client::Client;
use server::Server;

fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn answers(server: &Server) -> bool {
    Client::new(&server.socket).unwrap().get_text("/healthz").is_ok()
}

/// Listens in the server's place, as another daemon does.
fn listen_instead(socket: &Path) -> UnixListener {
    loop {
        // The server may be faster.
        let _ = fs::remove_file(socket);
        match UnixListener::bind(socket) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            listening => return listening.unwrap(),
        }
    }
}

#[test]
fn a_socket_that_was_deleted_is_made_again_with_its_mode_and_its_directory() {
    let server = Server::start();
    assert!(answers(&server));
    fs::remove_file(&server.socket).unwrap();
    until("the socket is back", || answers(&server));
    assert_eq!(fs::metadata(&server.socket).unwrap().permissions().mode() & 0o777, 0o660);
    fs::remove_dir_all(server.socket.parent().unwrap()).unwrap();
    until("its directory is back", || answers(&server));
    let socket = server.socket.clone();
    server.stop();
    assert!(!socket.exists(), "it goes with the server");
}

#[test]
fn what_another_daemon_answers_at_is_left_to_it_for_as_long_as_it_lives() {
    let server = Server::start();
    let other = listen_instead(&server.socket);
    let inode = || fs::metadata(&server.socket).unwrap().ino();
    let before = inode();
    other.set_nonblocking(true).unwrap();
    for _ in 0..2 {
        until("the server looks who is there", || other.accept().is_ok());
    }
    assert_eq!(inode(), before);
    drop(other);
    until("the dead one's file is replaced", || answers(&server));
}

#[test]
fn a_file_in_the_sockets_place_is_left_alone_until_it_goes() {
    let server = Server::start();
    let aside = server.socket.with_extension("aside");
    fs::write(&aside, "precious").unwrap();
    // At no moment is the place free for the server.
    fs::rename(&aside, &server.socket).unwrap();
    assert!(!answers(&server));
    assert_eq!(fs::read_to_string(&server.socket).unwrap(), "precious");
    fs::remove_file(&server.socket).unwrap();
    until("the socket is back", || answers(&server));
}
