//! For tests: runs one test again in a process of its own, to kill it or to give it a small disk.

use std::{
    path::PathBuf,
    process::{Child, Command},
};

const DISK: &str = "OVERBOOK_TEST_SMALL_DISK";

/// The directory of a file system of `size` (as `mount -o size=` takes it) for the calling test.
/// `None`: the test has just run there, in a process with a mount namespace of its own, and
/// passed. So no mount is left behind, however the test ends.
pub(crate) fn on_small_disk(test: &str, size: &str) -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os(DISK) {
        return Some(dir.into());
    }
    let dir = tempfile::tempdir().unwrap();
    let user = if rustix::process::geteuid().is_root() { "--mount" } else { "--map-root-user" };
    let status = Command::new("unshare")
        .args([user, "--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=$1 tmpfs \"$2\" && exec \"$3\" --exact \"$4\" --nocapture")
        .args(["sh", size])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .arg(test)
        .env(DISK, dir.path())
        .status()
        .expect("unshare(1) of util-linux is needed");
    assert!(status.success(), "the test failed on the small disk (or it could not be mounted)");
    None
}

/// Starts `test` in a process of its own with `key=value` in its environment.
#[allow(dead_code, reason = "not every crate kills a test")]
pub(crate) fn start(test: &str, key: &str, value: &std::path::Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(key, value)
        .spawn()
        .unwrap()
}
