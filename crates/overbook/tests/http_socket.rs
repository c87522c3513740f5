//! The unix socket's file while the daemon runs, when another process deletes or replaces it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon_fixture;

use std::{
    fs, io,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
};

use daemon_fixture::TestDaemon;

fn start() -> (TestDaemon, PathBuf) {
    let daemon = TestDaemon::start(tempfile::tempdir().unwrap(), "");
    let socket = daemon_fixture::socket(daemon.dir());
    (daemon, socket)
}

fn answers(daemon: &TestDaemon) -> bool {
    daemon.client().get_text("/healthz").is_ok()
}

/// Listens at the daemon's path, as another daemon would.
fn listen_instead(socket: &Path) -> UnixListener {
    loop {
        // The daemon may be faster.
        let _ = fs::remove_file(socket);
        match UnixListener::bind(socket) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            listening => return listening.unwrap(),
        }
    }
}

#[test]
fn a_socket_that_was_deleted_is_made_again_with_its_mode_and_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("run/overbook.sock");
    let mut daemon = TestDaemon::with_socket(dir, &at);
    assert!(answers(&daemon));
    fs::remove_file(&at).unwrap();
    daemon.until("the socket is back", answers);
    assert_eq!(fs::metadata(&at).unwrap().permissions().mode() & 0o777, 0o660);
    fs::remove_dir_all(at.parent().unwrap()).unwrap();
    daemon.until("its directory is back", answers);
    daemon.end();
    assert!(!at.exists(), "it goes with the daemon");
}

#[test]
fn what_another_daemon_answers_at_is_left_to_it_for_as_long_as_it_lives() {
    let (mut daemon, socket) = start();
    let other = listen_instead(&socket);
    let inode = || fs::metadata(&socket).unwrap().ino();
    let before = inode();
    other.set_nonblocking(true).unwrap();
    for _ in 0..2 {
        daemon.until("the daemon looks whether it is used", |_| other.accept().is_ok());
    }
    assert_eq!(inode(), before);
    drop(other);
    daemon.until("the dead one's file is replaced", answers);
}

#[test]
fn a_file_in_the_sockets_place_is_left_alone_until_it_goes() {
    let (mut daemon, socket) = start();
    let aside = socket.with_extension("aside");
    fs::write(&aside, "precious").unwrap();
    // The path is never free for the daemon.
    fs::rename(&aside, &socket).unwrap();
    assert!(!answers(&daemon));
    assert_eq!(fs::read_to_string(&socket).unwrap(), "precious");
    fs::remove_file(&socket).unwrap();
    daemon.until("the socket is back", answers);
}
