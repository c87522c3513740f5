//! Starts a QEMU that waits for an incoming guest, by the operator's command.
//!
//! This QEMU outlives the daemon. Its memory must not be charged to the daemon, and it needs
//! rights that the daemon's sandbox forbids. So on a host with systemd, systemd starts it as a
//! unit of its own. Elsewhere it is a child in its own session and, if possible, in a cgroup next
//! to the daemon's.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use model::{VmName, words};
use sys::process::Spawn;

/// Timeout of a command that starts a QEMU.
const LAUNCH: Duration = Duration::from_secs(60);
/// Timeout of systemd, on top of the command's time.
const ANSWER: Duration = Duration::from_secs(10);
/// systemd runs this host if this directory exists (`sd_booted(3)`).
const BOOTED: &str = "/run/systemd/system";
/// Bytes read of a command's output.
const MOST_SAID: usize = 4096;
/// Prefix of the names of units and cgroups for incoming VMs; the VM's name follows.
const PREFIX: &str = "overbook-incoming-";

/// Enters the cgroup of its first argument, if it is not empty, and executes the rest. The OOM
/// killer spares the daemon; a VM must not inherit that.
const WRAPPER: &str = "echo 0 2>/dev/null >/proc/self/oom_score_adj\n\
     [ -z \"$1\" ] || echo $$ 2>/dev/null >\"$1/cgroup.procs\"\n\
     shift\nexec \"$@\"";

/// A QEMU to start.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// The operator's command.
    pub(super) command: PathBuf,
    /// The VM. Its name is valid as an argument ([`policy::handover::barred`]).
    pub(super) vm: VmName,
    /// The intent's number.
    pub(super) generation: u64,
    /// The directory for the command's output; created if it does not exist.
    pub(super) logs: PathBuf,
}

impl Launch {
    /// Runs the command. It returns once the command has started QEMU. A daemon that was killed
    /// meanwhile calls it again.
    ///
    /// # Errors
    /// The reason in words: the last line of the command's output.
    pub(super) fn run(&self) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", self.command.display());
        let is_booted = Path::new(BOOTED).is_dir();
        if is_booted && self.is_started() {
            return Ok(());
        }
        let log = self.log().map_err(failed)?;
        let said = fs::File::create(&log).map_err(failed)?;
        let (spawn, limit) = if is_booted {
            // systemd opens the log by itself; this is for the output of `systemd-run`.
            (self.by_systemd(&log), LAUNCH + ANSWER)
        } else {
            (self.as_child(cgroup(&self.name()).as_deref()), LAUNCH)
        };
        let mut child = spawn
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said)
            .spawn()
            .map_err(failed)?;
        let Some(status) = child.wait_for(limit).map_err(failed)? else {
            let _ = child.end(Duration::from_secs(1));
            return Err(format!("{} was not done after {limit:?}", self.command.display()));
        };
        if status.success() {
            return Ok(());
        }
        Err(format!("{}: {status}: {}", self.command.display(), last_line(&log)))
    }

    /// Unit names allow fewer characters than names of VMs.
    fn name(&self) -> String {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        let vm = self.vm.as_str().chars().map(|c| if fits(c) { c } else { '_' });
        format!("{PREFIX}{}-{}", vm.collect::<String>(), self.generation)
    }

    /// Whether an earlier daemon has already had systemd start it.
    fn is_started(&self) -> bool {
        let ask = Spawn::new("systemctl").args(["is-active", "--quiet", &self.name()]);
        let asked = ask.stderr(Stdio::null()).spawn().and_then(|mut ask| ask.wait_for(ANSWER));
        asked.is_ok_and(|status| status.is_some_and(|status| status.success()))
    }

    fn log(&self) -> io::Result<PathBuf> {
        match DirBuilder::new().mode(0o700).create(&self.logs) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        Ok(self.logs.join(format!("{}.log", self.vm)))
    }

    /// A service, because a scope would keep the daemon's sandbox. Its type is forking: the
    /// command ends when QEMU has started.
    fn by_systemd(&self, log: &Path) -> Spawn {
        Spawn::new("systemd-run")
            .args(["--quiet", "--collect", "--slice=machine.slice", "--service-type=forking"])
            .arg(format!("--unit={}", self.name()))
            .arg(format!("--description=QEMU of {}, which comes from another host", self.vm))
            .arg(format!("--property=StandardError=append:{}", log.display()))
            .arg(format!("--property=TimeoutStartSec={}", LAUNCH.as_secs()))
            .arg("--")
            .arg(&self.command)
            .arg(self.vm.as_str())
    }

    fn as_child(&self, cgroup: Option<&Path>) -> Spawn {
        Spawn::new("/bin/sh")
            .args(["-c", WRAPPER, "sh"])
            .arg(cgroup.unwrap_or(Path::new("")))
            .arg(&self.command)
            .arg(self.vm.as_str())
            .new_session()
    }
}

/// A new cgroup with the same parent as our own. `None`: it cannot be made; nothing depends on it.
fn cgroup(name: &str) -> Option<PathBuf> {
    let own = sys::cgroup::of_process(std::process::id()).ok().flatten()?;
    // Our own cgroup may be the root of the tree.
    let parent = own.parent().filter(|parent| parent.join("cgroup.procs").exists());
    let parent = parent.unwrap_or(&own);
    // Removes the cgroups of VMs that are gone; the kernel refuses to remove the others.
    for old in fs::read_dir(parent).into_iter().flatten().flatten() {
        if old.file_name().to_string_lossy().starts_with(PREFIX) {
            let _ = fs::remove_dir(old.path());
        }
    }
    let new = parent.join(name);
    match fs::create_dir(&new) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => None,
        _ => Some(new),
    }
}

fn last_line(log: &Path) -> String {
    let said = fs::read(log).unwrap_or_default();
    let end = String::from_utf8_lossy(&said[said.len().saturating_sub(MOST_SAID)..]);
    words::plain(end.trim_end().lines().last().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn launch(dir: &Path, script: &str) -> Launch {
        let command = dir.join("incoming");
        fs::write(&command, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&command, fs::Permissions::from_mode(0o755)).unwrap();
        Launch { command, vm: "web+1".into(), generation: 7, logs: dir.join("incoming.d") }
    }

    #[test]
    fn a_command_that_fails_says_why_by_its_last_line() {
        let dir = tempfile::tempdir().unwrap();
        let refused = launch(dir.path(), "echo one >&2; echo no disk for \"$1\" >&2; exit 3");
        let why = refused.run().unwrap_err();
        assert!(why.ends_with("exit status: 3: no disk for web+1"), "{why}");
        let gone = Launch { command: dir.path().join("none"), ..refused };
        assert!(gone.run().unwrap_err().contains("not found"), "it says nothing");
    }

    #[test]
    fn systemd_is_told_to_start_a_service_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let told = format!("{:?}", launch(dir.path(), "").by_systemd(Path::new("/x.log")));
        for word in [
            "--service-type=forking",
            "--unit=overbook-incoming-web_1-7",
            "--slice=machine.slice",
            "--property=StandardError=append:/x.log",
            "\"web+1\"",
        ] {
            assert!(told.contains(word), "{word} is not in {told}");
        }
        assert!(!told.contains("--scope"), "{told}");
    }
}
