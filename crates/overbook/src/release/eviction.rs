//! Ends a daemon that holds the state and does not answer: its socket is dead, it was stopped, or
//! it hangs.
//!
//! The daemon is told to end (SIGTERM, and SIGCONT in case it was stopped), and is killed if it
//! does not end in time: any process of Overbook may be killed at any instant. The kernel ends
//! its workers with it. Eviction waits for them, because only the release can unshare their pages
//! then. The pause is set first. So a daemon that is restarted, by systemd for example, changes
//! nothing, as after a release by the daemon itself.

use std::{io, path::Path, time::Duration};

use sys::process::{Identity, Signal, children_of};

use crate::{
    lock::{Holder, LockHolder},
    pause_file::PauseFile,
};

/// How long the daemon may take to end in good order; its own limit is some 8 s.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the kernel may take to end a killed process.
const END: Duration = Duration::from_secs(10);

/// Why the daemon still runs, or may still run.
#[derive(Debug, thiserror::Error)]
pub enum EvictionError {
    /// No process visible in `/proc` holds the lock.
    #[error(
        "a daemon uses {0}, does not answer, and cannot be seen from here: end it, then release again"
    )]
    Unseen(String),
    /// The process may not be signalled.
    #[error("the daemon (pid {pid}) does not answer and cannot be told to end: {error}")]
    Refused {
        /// The process.
        pid: u32,
        /// The kernel's error.
        error: io::Error,
    },
    /// The process hangs in the kernel, or its cgroup is frozen.
    #[error(
        "{what} (pid {pid}) does not answer and does not end, though it was killed: it hangs in the \
         kernel, on a disk for example, or its cgroup is frozen; end that, then release again; one \
         that is started later is paused until `overbook resume`"
    )]
    Immortal {
        /// The daemon, or a worker of it.
        what: &'static str,
        /// The process.
        pid: u32,
    },
}

/// Ends the daemon that holds the lock of this state directory; returns a report for the
/// operator. A daemon that has ended meanwhile is no error.
///
/// # Errors
/// The daemon cannot be ended.
pub fn evict(state: &Path, holder: LockHolder) -> Result<String, EvictionError> {
    evict_within(PATIENCE, state, holder)
}

fn evict_within(
    patience: Duration,
    state: &Path,
    holder: LockHolder,
) -> Result<String, EvictionError> {
    let pid = holder.pid.ok_or_else(|| EvictionError::Unseen(state.display().to_string()))?;
    let refused = |error| EvictionError::Refused { pid, error };
    let ended = Ok(format!("the daemon (pid {pid}) did not answer, and has ended"));
    let Some(daemon) = Identity::of(pid) else { return ended };
    let workers = children_of(pid).map_err(refused)?;
    // The lock is checked after the PID was opened, so the PID still belongs to the holder.
    if holder.by != Some(Holder::Daemon) || !holds(state, pid) {
        return ended;
    }
    let pause = PauseFile::in_state(state);
    let paused = match pause.set(true) {
        Ok(()) => "one that is started now is paused until `overbook resume`".to_owned(),
        Err(error) => format!("the pause was not kept: {error}"),
    };
    daemon.signal(Signal::TERM).and_then(|_| daemon.signal(Signal::CONT)).map_err(refused)?;
    let how = if daemon.wait_for(patience).map_err(refused)? {
        "was told to end"
    } else {
        kill("the daemon", daemon)?;
        "was killed, for it did not end when it was told to"
    };
    for worker in workers {
        if !worker.wait_for(END).map_err(refused)? {
            kill("a worker of the daemon", worker)?;
        }
    }
    Ok(format!("the daemon (pid {pid}) did not answer and {how}; {paused}"))
}

fn holds(state: &Path, pid: u32) -> bool {
    let lock = crate::lock::held_in(state);
    lock.is_some_and(|held| held.pid == Some(pid))
}

fn kill(what: &'static str, process: Identity) -> Result<(), EvictionError> {
    let pid = process.pid;
    let refused = |error| EvictionError::Refused { pid, error };
    process.signal(Signal::KILL).map_err(refused)?;
    match process.wait_for(END).map_err(refused)? {
        true => Ok(()),
        false => Err(EvictionError::Immortal { what, pid }),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;
    use crate::lock::{LockError, StateLock};

    /// Holds the lock of `state`, and runs `at_term` on SIGTERM.
    fn holder(state: &Path, at_term: &str) -> (Child, LockHolder) {
        let trap = format!("trap '{at_term}' TERM");
        // The `sleep` processes do not inherit the lock's descriptor.
        let wait = "while :; do sleep 0.1 9<&-; done";
        let script =
            format!("echo $$ daemon > lock; exec 9<>lock; flock 9; {trap}; echo ready; {wait}");
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .current_dir(state)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let error = StateLock::acquire(state, Holder::Release).unwrap_err();
        let LockError::Held { holder, .. } = error else { panic!("{error}") };
        assert_eq!(holder, LockHolder { by: Some(Holder::Daemon), pid: Some(child.id()) });
        (child, holder)
    }

    fn state() -> tempfile::TempDir {
        let state = tempfile::tempdir().unwrap();
        drop(StateLock::acquire(state.path(), Holder::Daemon).unwrap());
        state
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn one_that_was_stopped_is_woken_to_end_and_the_next_one_will_be_paused() {
        let state = state();
        let (mut child, held) = holder(state.path(), "exit 0");
        let daemon = Identity::of(child.id()).unwrap();
        daemon.signal(Signal::STOP).unwrap();
        let said = evict_within(LONG, state.path(), held).unwrap();
        assert!(said.contains("was told to end; one that is started now is paused"), "{said}");
        assert!(child.wait().unwrap().success(), "it ended by itself");
        assert!(PauseFile::in_state(state.path()).is_set());
    }

    #[test]
    fn one_that_does_not_end_is_killed() {
        let state = state();
        let (mut child, held) = holder(state.path(), "");
        let said = evict_within(Duration::from_millis(300), state.path(), held).unwrap();
        assert!(said.contains("was killed"), "{said}");
        child.wait().unwrap();
        StateLock::acquire(state.path(), Holder::Release).unwrap();
    }

    #[test]
    fn who_has_the_number_and_not_the_lock_is_left_alone() {
        let state = state();
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let held = LockHolder { by: Some(Holder::Daemon), pid: Some(other.id()) };
        let said = evict_within(LONG, state.path(), held).unwrap();
        assert!(said.ends_with("has ended"), "{said}");
        assert!(Identity::of(other.id()).unwrap().is_alive());
        assert!(!PauseFile::in_state(state.path()).is_set());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
