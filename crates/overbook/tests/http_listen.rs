//! Sockets that are opened, sockets that are refused, and the words of the refusals.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
};

use model::spec::ApiSpec;
use overbook::http::Doors;

fn bind(api: &ApiSpec) -> Result<Doors, String> {
    Doors::open(api).map_err(|error| error.to_string())
}

fn unix(socket: &Path) -> ApiSpec {
    ApiSpec { socket: socket.into(), tcp: None, token_file: None, read_token_file: None }
}

fn error(api: &ApiSpec) -> String {
    bind(api).err().expect("it is refused")
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists(), "a killed daemon leaves its file");
    drop(bind(&unix(&socket)).unwrap());
    assert!(!socket.exists());
}

#[test]
fn a_socket_that_somebody_answers_is_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let other = UnixListener::bind(&socket).unwrap();
    assert!(error(&unix(&socket)).ends_with("another daemon answers there already"));
    drop(other);
    assert!(socket.exists());
}

#[test]
fn a_file_in_the_sockets_place_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    fs::write(&file, "precious").unwrap();
    assert!(error(&unix(&file)).ends_with("exists and is no socket: it is left alone"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_path_that_does_not_fit_is_refused_with_the_limit() {
    let path = PathBuf::from(format!("/tmp/{}", "x".repeat(103)));
    let why = error(&unix(&path));
    assert!(why.ends_with("has 108 bytes; a unix socket's path may have 107"), "{why}");
}

#[test]
fn a_missing_directory_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/overbook/s");
    let _listening = bind(&unix(&socket)).unwrap();
    assert!(socket.exists());
}

#[test]
fn tcp_without_a_token_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tcp = Some("127.0.0.1:0".parse().unwrap());
    let api = ApiSpec { tcp, ..unix(&dir.path().join("s")) };
    assert!(error(&api).contains("needs api.token_file"));
    assert!(!api.socket.exists(), "nothing is opened when something is refused");
}

#[test]
fn tcp_with_a_token_that_others_may_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o644)).unwrap();
    let tcp = Some("127.0.0.1:0".parse().unwrap());
    let api = ApiSpec { tcp, token_file: Some(token), ..unix(&dir.path().join("s")) };
    assert!(error(&api).contains("mode 0644: others may read it"));
}
