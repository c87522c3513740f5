//! Attackers: processes that try to break the isolation between tenants, with the uid that a real
//! attacker would have.
//!
//! **Problem.** A test within one process and one uid proves little about a neighbour with
//! another uid.
//!
//! **Idea.** Each attack is one module with one function. The function attacks until its process
//! is ended, and prints one line for each observation. [`Attacker::start`] runs it as a process
//! of its own. A test of an attack runs one; the scenario `walls` runs all at once.
//!
//! **Invariants.** An attacker dies with the process that started it. It stays on this machine.

mod fat_repository;
mod mute;
mod orphan;
mod qemu;
mod qmp_flood;
mod ram_liar;
mod silent_clients;
mod slow_http;
mod squat;
mod stuck_nbd;

use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::process::{Child, Signal, Spawn};

use crate::command::own_program;
use crate::lab::LabError;

/// The hidden subcommand of `overbook-lab`.
pub const SUBCOMMAND: &str = "attack";
/// A user with no rights on anything: Debian's `nobody`.
pub const NOBODY: u32 = 65534;

/// An attack, by its name on the command line.
type Attack = (&'static str, fn(&[String]) -> Result<(), LabError>);

/// All of them, sorted by name.
const ATTACKS: &[Attack] = &[
    ("fat_repository", fat_repository::attack),
    ("mute", mute::run),
    (orphan::NAME, orphan::run),
    ("qemu", qemu::run),
    ("qmp_flood", qmp_flood::run),
    (ram_liar::NAME, ram_liar::run),
    ("silent_clients", silent_clients::attack),
    ("slow_http", slow_http::run),
    ("squat", squat::run),
    ("stuck_nbd", stuck_nbd::attack),
];

/// Prints one observation of an attacker as a line.
fn saw(what: &str) {
    println!("saw: {what}");
}

/// Runs the attack `name` until this process is ended.
///
/// # Errors
/// No attack has that name, or it cannot begin.
pub fn run(name: &str, args: &[String]) -> Result<(), LabError> {
    let found = ATTACKS.iter().find(|(known, _)| *known == name);
    let (_, attack) = found.ok_or_else(|| {
        let known: Vec<&str> = ATTACKS.iter().map(|(name, _)| *name).collect();
        io::Error::other(format!("no attack is named {name}; there is: {}", known.join(", ")))
    })?;
    attack(args)
}

/// The error that names the arguments of an attack.
fn usage(words: &str) -> LabError {
    io::Error::other(format!("usage: overbook-lab attack {words}")).into()
}

/// An attack under way; dropping it ends the attack.
#[derive(Debug)]
pub struct Attacker {
    child: Child,
    lines: Receiver<String>,
    _program: tempfile::TempDir,
}

impl Attacker {
    /// Starts the attack `name` with `args` as the user `uid`; `None`: as this process's user.
    ///
    /// # Errors
    /// The program cannot be copied to a place where that user may run it, or cannot be started.
    pub fn start(name: &str, args: &[&str], uid: Option<u32>) -> io::Result<Self> {
        Self::start_as("overbook-lab", name, args, uid)
    }

    /// Same as [`Self::start`], with the program under the name `program`.
    pub fn start_as(
        program: &str,
        name: &str,
        args: &[&str],
        uid: Option<u32>,
    ) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755))?;
        let program = dir.path().join(program);
        std::fs::copy(own_program("overbook-lab")?, &program)?;
        let (output, input) = io::pipe()?;
        let mut spawn = Spawn::new(&program).args([SUBCOMMAND, name]).args(args);
        if let Some(uid) = uid {
            spawn = spawn.user(uid);
        }
        let child = spawn.stdout(OwnedFd::from(input)).die_with_parent().spawn()?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines, _program: dir })
    }

    /// The attacker's process.
    pub fn pid(&self) -> u32 {
        self.child.identity().pid
    }

    /// The next observation. `None`: there was none within `limit`, or the attacker has ended.
    pub fn saw(&self, limit: Duration) -> Option<String> {
        self.lines.recv_timeout(limit).ok()
    }

    /// All observations that were printed and not yet returned.
    pub fn all_seen(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }
}

/// Whether the peer has closed the connection. Data that the peer has sent stays unread.
fn has_gone(stream: &impl AsFd) -> bool {
    let mut looked = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut looked, Some(&now)).is_ok() && looked[0].revents().intersects(gone)
}

impl Drop for Attacker {
    fn drop(&mut self) {
        // An error means that the process has ended by itself, which is as good.
        let _ = self.child.signal(Signal::KILL);
        let _ = self.child.wait_for(Duration::from_secs(10));
    }
}
