//! A lab of its own for each test: a short directory, and the processes that belong to it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A state directory that is removed, and whose lab is ended, at the end of the test.
pub(crate) struct LabDir {
    _parent: tempfile::TempDir,
    dir: PathBuf,
}

impl LabDir {
    pub(crate) fn new() -> Self {
        // Paths of sockets must be short.
        let parent = tempfile::Builder::new().prefix("ob-").tempdir_in("/var/tmp").unwrap();
        let dir = parent.path().join("lab");
        Self { _parent: parent, dir }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    /// Runs `overbook-lab` on this directory to its end.
    pub(crate) fn lab(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Starts `overbook-lab` on this directory.
    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_overbook-lab"));
        command.args(args).arg("--dir").arg(&self.dir).stdin(Stdio::null());
        command
    }

    /// The live processes that have this directory on their command line: keeper and QEMUs.
    pub(crate) fn processes(&self) -> Vec<u32> {
        self.processes_with(|_| true)
    }

    /// This lab's QEMUs. A process of the lab is none before its `exec`: until then it has the
    /// command line of its parent.
    fn guests(&self) -> Vec<u32> {
        self.processes_with(|line| {
            let program = line.split('\0').next().unwrap_or_default();
            program.contains("qemu-system")
        })
    }

    fn processes_with(&self, wanted: impl Fn(&str) -> bool) -> Vec<u32> {
        let own = std::process::id();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A zombie has no command line.
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            if line.contains(self.dir.to_str().unwrap()) && pid != own && wanted(&line) {
                found.push(pid);
            }
        }
        found
    }

    /// The remains of a lab other than its logs and its lock: files, processes, mounts.
    pub(crate) fn remains(&self) -> Vec<String> {
        let kept = ["log", "keeper.log", "overbook-lab.lock"];
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut remains: Vec<String> = names.filter(|n| !kept.contains(&n.as_str())).collect();
        remains.extend(self.processes().iter().map(|pid| format!("process {pid}")));
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let ours = mounts.lines().filter(|line| line.contains(self.dir.to_str().unwrap()));
        remains.extend(ours.map(str::to_owned));
        remains
    }

    /// Waits for the first guest, so that the lab holds its directory.
    pub(crate) fn wait_for_a_guest(&self) {
        self.wait_until("a guest", || !self.guests().is_empty());
    }

    /// Waits until no process of this lab is left.
    pub(crate) fn wait_for_the_end(&self) {
        self.wait_until("the end", || self.processes().is_empty());
    }

    fn wait_until(&self, what: &str, come: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !come() {
            assert!(Instant::now() < deadline, "no {what}: {:?}", self.processes());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for LabDir {
    fn drop(&mut self) {
        self.lab(&["down"]);
    }
}

/// Sends a signal to one process.
pub(crate) fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
