//! Shared code of the end-to-end tests: a stage with a few real guests and the real daemon.
//!
//! **Idea.** A test asks for guests and a mode and gets a [`Stage`]: a lab in its own directory
//! below `/tmp` (a socket's path must be short), the daemon as a process, and the command line as
//! a user has it. Data about a guest comes from QEMU, through the lab's own connection, never
//! from Overbook.
//!
//! **Invariants.** Only one test of a process runs guests at a time ([`TURN`]); `tests/lanes.sh`
//! runs two such processes. Everything ends with the stage, also when the test panics. If the
//! machine lacks something, [`requires()`] tells it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lab::accel::Choice;
use lab::cache::Cache;
use lab::daemon::Daemon;
use lab::packages::Unpacked;
use lab::{Lab, Machine, MachineSpec, Provisions, command};
use model::{Bytes, Mode};
pub use requires::{Requirement, ensure, requires};
use serde_json::{Value, json};
use sys::memory_map::PAGE_BYTES;
use sys::pool_maps;
use sys::process::{Identity, Signal};

/// Base memory of a guest.
pub const BASE: Bytes = Bytes::mib(128);
/// Maximum memory of a guest.
pub const MAX: Bytes = Bytes::mib(256);
/// Maximum time of any wait, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(100);
/// The balloon of the lab's guests in QEMU's object tree.
const BALLOON: &str = "/machine/peripheral/balloon0";

/// Held while guests run: two cores are not enough for two tests.
static TURN: Mutex<()> = Mutex::new(());

/// A guest whose working set exceeds its base, with a fast swap disk.
#[must_use]
pub fn hungry() -> MachineSpec {
    let workload = "random-array --mb 110 --record-kb 64";
    MachineSpec::new("hungry", "shop", BASE, MAX, workload).with_swap(Bytes::mib(256), None)
}

/// A guest that needs almost no memory.
#[must_use]
pub fn idle(name: &str) -> MachineSpec {
    MachineSpec::new(name, "shop", BASE, MAX, "idle").with_swap(Bytes::mib(256), None)
}

/// Takes the turn. `None`: a program of Overbook is not built.
#[must_use]
#[track_caller]
pub fn take_turn() -> Option<MutexGuard<'static, ()>> {
    built("overbook")?;
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A program of this project. `None`, with a message: it is not built.
#[must_use]
#[track_caller]
pub fn built(name: &'static str) -> Option<PathBuf> {
    let program = command::own_program(name).unwrap();
    let found = requires::ensure(program.is_file(), format!("no {}", program.display()));
    requires(Requirement::Built(name), found).map(|()| program)
}

/// Programs and images for guests. `None`, with a message: not available.
#[must_use]
#[track_caller]
pub fn provisions() -> Option<Provisions> {
    requires(Requirement::Packages, Provisions::provide(Choice::Auto))
}

/// Programs of packages, unpacked. `None`, with a message: not available.
#[must_use]
#[track_caller]
pub fn unpacked(entry: &str, packages: &[&str]) -> Option<Unpacked> {
    let programs = Unpacked::provide(&Cache::open().unwrap(), entry, packages);
    requires(Requirement::Packages, programs)
}

/// Checks that process `pid` shares no page of a pool.
///
/// A guest's first write may come between the mapping of a page and its protection. Its copy stays
/// in a mapping of the pool then; there are at most as many as a shim merges in one turn.
///
/// # Panics
///
/// If it shares a page, or if more is left.
pub fn assert_unshared(pid: u32) {
    const TURN: u64 = 64 * PAGE_BYTES;
    let left = pool_maps::mappings(pid).unwrap();
    for mapping in &left {
        let shared = pool_maps::sharers(pid, mapping.file, &[mapping.range]).unwrap();
        assert_eq!(shared, [], "process {pid}, {mapping:?}");
    }
    let bytes: u64 = left.iter().map(|mapping| mapping.range.len).sum();
    assert!(bytes <= TURN, "process {pid}: {left:?}");
}

/// Runs `overbook` with these arguments to its end.
#[must_use]
pub fn overbook(arguments: &[&str]) -> Output {
    program().args(arguments).output().unwrap()
}

/// `overbook` without arguments.
#[must_use]
pub fn program() -> Command {
    let mut command = Command::new(command::own_program("overbook").unwrap());
    command.stdin(Stdio::null());
    command
}

/// Standard output followed by standard error.
#[must_use]
pub fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Guests, their daemon, and the user.
#[derive(Debug)]
pub struct Stage {
    /// The guests.
    pub lab: Lab,
    /// The daemon.
    pub daemon: Daemon,
    /// Programs and images for further guests.
    pub provisions: Provisions,
    _dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Stage {
    /// Boots the guests and starts the daemon. `None`, with a message: not possible here.
    #[must_use]
    #[track_caller]
    pub fn start(mode: Mode, guests: &[MachineSpec]) -> Option<Self> {
        Self::start_in(Path::new("/tmp"), mode, guests)
    }

    /// Like [`start`](Self::start), with all files below `place`, whose path is short.
    #[must_use]
    #[track_caller]
    pub fn start_in(place: &Path, mode: Mode, guests: &[MachineSpec]) -> Option<Self> {
        let turn = take_turn()?;
        let provisions = provisions()?;
        let dir = tempfile::Builder::new().prefix("ob-").tempdir_in(place).unwrap();
        let mut lab = Lab::start(&dir.path().join("lab"), &provisions, guests).unwrap();
        let daemon = Daemon::start(&mut lab, mode).unwrap();
        Some(Self { lab, daemon, provisions, _dir: dir, _turn: turn })
    }

    /// The guest with this name.
    #[must_use]
    pub fn guest(&self, name: &str) -> &Machine {
        self.lab.machine(name).unwrap()
    }

    /// The guest's memory, as QEMU reports it.
    #[must_use]
    pub fn balloon(&self, name: &str) -> Bytes {
        self.guest(name).balloon().unwrap()
    }

    /// Interval at which QEMU asks the guest for statistics, in seconds; 0: never.
    #[must_use]
    pub fn polling_s(&self, name: &str) -> u64 {
        let what = json!({"path": BALLOON, "property": "guest-stats-polling-interval"});
        self.guest(name).qmp("qom-get", what).unwrap().as_u64().unwrap()
    }

    /// Sets the interval at which QEMU asks the guest for statistics.
    pub fn set_polling_s(&self, name: &str, seconds: u64) {
        let property = "guest-stats-polling-interval";
        let what = json!({"path": BALLOON, "property": property, "value": seconds});
        self.guest(name).qmp("qom-set", what).unwrap();
    }

    /// The daemon's configuration.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.lab.dir().join("etc/overbook.toml")
    }

    /// The daemon's state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.lab.dir().join("run/state")
    }

    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.lab.dir().join("run/overbook.sock")
    }

    /// The undo records.
    #[must_use]
    pub fn undo(&self) -> Vec<Value> {
        let Ok(bytes) = std::fs::read(self.state().join("undo.json")) else { return Vec::new() };
        let content: Value = serde_json::from_slice(&bytes).unwrap();
        content["vms"].as_array().unwrap().clone()
    }

    /// Replaces texts in the daemon's configuration, and makes the daemon reload it.
    pub fn configure(&self, changes: &[(&str, &str)]) {
        let mut text = std::fs::read_to_string(self.config()).unwrap();
        for (from, to) in changes {
            assert!(text.contains(from), "{from} is not in it:\n{text}");
            text = text.replace(from, to);
        }
        std::fs::write(self.config(), text).unwrap();
        self.hang_up();
    }

    /// Makes the daemon reload its configuration.
    pub fn hang_up(&self) {
        self.daemon.process().signal(Signal::HUP).unwrap();
    }

    /// Runs `overbook` with the daemon's configuration.
    #[must_use]
    pub fn overbook(&self, arguments: &[&str]) -> Output {
        self.overbook_with(&self.config(), arguments)
    }

    /// Runs `overbook` with this configuration.
    #[must_use]
    pub fn overbook_with(&self, config: &Path, arguments: &[&str]) -> Output {
        program().arg("--config").arg(config).args(arguments).output().unwrap()
    }

    /// The output of a command, which must succeed.
    #[must_use]
    pub fn says(&self, arguments: &[&str]) -> String {
        let output = self.overbook(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The output with `--json`.
    #[must_use]
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.says(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// The host in `status`.
    #[must_use]
    pub fn host(&self) -> Value {
        self.json(&["status"])["host"].take()
    }

    /// A VM in `status`; null if it is not found.
    #[must_use]
    pub fn vm(&self, name: &str) -> Value {
        let page = self.json(&["status"]);
        let vms = page["vms"].as_array().unwrap();
        vms.iter().find(|vm| vm["name"] == name).cloned().unwrap_or_default()
    }

    /// A group's worker, if it runs.
    #[must_use]
    pub fn worker(&self, group: &str) -> Option<Identity> {
        let page = self.json(&["group", group]);
        Identity::of(u32::try_from(page["worker"]["pid"].as_u64()?).unwrap())
    }

    /// Kills a group's worker, and waits for the next one.
    pub fn kill_worker(&self, group: &str) {
        let killed = self.worker(group).unwrap();
        killed.signal(Signal::KILL).unwrap();
        self.until("there is a new worker", |stage| {
            stage.worker(group).is_some_and(|next| next != killed)
        });
    }

    /// Waits until `is_so` returns true.
    pub fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is_so(self) {
            assert!(Instant::now() < deadline, "not in time: {what}\n{}", self.scene());
            std::thread::sleep(POLL);
        }
    }

    /// Checks for `time` that `holds` returns true.
    pub fn throughout(&self, time: Duration, what: &str, holds: impl Fn(&Self) -> bool) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            assert!(holds(self), "it is not so that {what}\n{}", self.scene());
            std::thread::sleep(POLL);
        }
    }

    /// The state for a failure message.
    fn scene(&self) -> String {
        let log = std::fs::read_to_string(self.lab.dir().join("log/daemon")).unwrap_or_default();
        format!("{}\nits log:\n{log}", text(&self.overbook(&["status"])))
    }
}
