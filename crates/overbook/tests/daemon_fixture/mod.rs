//! The real daemon as a process with its own directory.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use api::client::ApiClient;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

/// Maximum time of any wait.
const LIMIT: Duration = Duration::from_secs(60);

/// A running daemon; it ends when dropped.
pub(crate) struct TestDaemon {
    child: Child,
    dir: TempDir,
    socket: PathBuf,
}

#[allow(dead_code, reason = "not every test file uses every part")]
impl TestDaemon {
    /// Starts a daemon that looks for QMP sockets in `dir`, with `more` in its configuration, and
    /// waits until it answers.
    pub(crate) fn start(dir: TempDir, more: &str) -> Self {
        let socket = socket(dir.path());
        Self::listening(dir, &socket, more)
    }

    /// Starts a daemon with its API socket at `socket`.
    pub(crate) fn with_socket(dir: TempDir, socket: &Path) -> Self {
        Self::listening(dir, socket, "")
    }

    fn listening(dir: TempDir, socket: &Path, more: &str) -> Self {
        configure(dir.path(), socket, more);
        let mut daemon = Self { child: run(dir.path()), dir, socket: socket.to_owned() };
        daemon.until_it_answers();
        daemon
    }

    fn until_it_answers(&mut self) {
        self.until("the daemon answers", |daemon| {
            daemon.try_get::<serde_json::Value>("/v1/host").is_some()
        });
    }

    /// Writes another configuration and makes the daemon reload it.
    pub(crate) fn reconfigure(&self, more: &str) {
        configure(self.dir.path(), &self.socket, more);
        self.signal("HUP");
    }

    /// The API's answer.
    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> T {
        self.client().get(path).unwrap()
    }

    /// The API's answer, if there is one.
    pub(crate) fn try_get<T: DeserializeOwned>(&self, path: &str) -> Option<T> {
        self.client().get(path).ok()
    }

    /// A client of the daemon.
    pub(crate) fn client(&self) -> ApiClient {
        ApiClient::new(&self.socket).unwrap()
    }

    /// The daemon's log so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// The daemon's peak resident memory, in MiB.
    pub(crate) fn most_memory_mib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// Waits until `holds` returns true.
    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !holds(self) {
            let ended: Option<ExitStatus> = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon has ended ({ended:?}): {}", self.log());
            assert!(Instant::now() < end, "not in time: {what}; the log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The directory with its files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Asks the daemon to end, and waits for its end.
    pub(crate) fn end(&mut self) {
        self.signal("TERM");
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
    }

    /// Ends it in good order, and starts it again in its directory.
    pub(crate) fn restarted(mut self) -> Self {
        self.end();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        let mut next = Self { child: run(dir.path()), dir, socket: self.socket.clone() };
        next.until_it_answers();
        next
    }

    /// Kills it; returns its directory.
    pub(crate) fn killed(mut self) -> TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }

    /// Its pid.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a daemon with the configuration in this directory.
fn run(dir: &Path) -> Child {
    let log = fs::File::create(dir.join("log")).unwrap();
    Command::new(env!("CARGO_BIN_EXE_overbook"))
        .args(["daemon", "--config"])
        .arg(dir.join("overbook.toml"))
        // A service whose standard error is the journal may have started this process.
        .env("JOURNAL_STREAM", "8:1")
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// The daemon's socket.
pub(crate) fn socket(dir: &Path) -> PathBuf {
    dir.join("overbook.sock")
}

fn configure(dir: &Path, socket: &Path, more: &str) {
    let host = format!(
        "[host]\nqmp = [\"{0}/*.qmp\"]\nstate = \"{0}/state\"\n[api]\nsocket = \"{1}\"\n",
        dir.display(),
        socket.display()
    );
    fs::write(dir.join("overbook.toml"), host + more).unwrap();
}
