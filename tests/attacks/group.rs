//! A group's merging, driven by a test: the worker's engine, and stand-ins for QEMUs.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use lab::command::own_program;
use model::Dedup as Reading;
use sys::process::Identity;
use worker::{Dedup, Mode, STEP, Settings, State, Tracked};

/// Long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Time that the engine works between two actions of the test.
const SLICE: Duration = Duration::from_millis(2);

/// The engine and its VMs.
pub(crate) struct AttackedGroup {
    pub(crate) dedup: Dedup,
    vms: Vec<Tracked>,
    step: Instant,
}

impl AttackedGroup {
    /// An empty group. It has its own pool, so that tests running at the same time do not share
    /// one.
    pub(crate) fn new() -> Self {
        let name = format!("attacks-{}-{:x}", std::process::id(), fastrand::u64(..));
        Self { dedup: Dedup::new(&name), vms: Vec::new(), step: Instant::now() }
    }

    /// Adds this process as a VM of the group.
    pub(crate) fn add(&mut self, pid: u32) {
        let process = Identity::of(pid).unwrap();
        self.vms.push(Tracked::new(process, Settings::new(Mode::Probes { budget: 0.01 })));
    }

    /// Removes the newest VM from the group.
    pub(crate) fn remove_newest(&mut self) {
        self.vms.pop();
    }

    /// One turn, as in the worker's process. It never blocks.
    pub(crate) fn turn(&mut self) {
        if Instant::now() >= self.step {
            self.step = Instant::now() + STEP;
            self.vms.iter_mut().for_each(Tracked::step);
        }
        let mut all: Vec<&mut Tracked> = self.vms.iter_mut().collect();
        let idle = self.dedup.work(&mut all, Instant::now() + SLICE);
        std::thread::sleep(idle.min(SLICE));
    }

    /// Works until `is_so` returns true, and calls `act` after each turn.
    pub(crate) fn until(
        &mut self,
        what: &str,
        mut act: impl FnMut(),
        is_so: impl Fn(&Self) -> bool,
    ) {
        let end = Instant::now() + LIMIT;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.states());
            self.turn();
            act();
        }
    }

    /// Works for `time`.
    pub(crate) fn work(&mut self, time: Duration, act: impl FnMut()) {
        let end = Instant::now() + time;
        self.until("time passes", act, |_| Instant::now() >= end);
    }

    /// The reading of a VM; the default if there is none, as if the VM shared nothing.
    pub(crate) fn reading(&self, pid: u32) -> Reading {
        self.dedup.reading(pid).map(|reading| reading.value).unwrap_or_default()
    }

    /// The states of the connections.
    pub(crate) fn states(&self) -> Vec<&State> {
        self.vms.iter().map(Tracked::state).collect()
    }
}

/// A process that uses its RAM as QEMU does, with the shim loaded.
pub(crate) struct GroupStandIn {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl GroupStandIn {
    /// A process with blocks of these sizes in MiB. Blocks filled with the same seed are
    /// identical, page by page.
    pub(crate) fn with_ram(mib: &[u32]) -> Self {
        let mut new = Self::start();
        for (block, mib) in mib.iter().enumerate() {
            new.expect(&format!("plug {mib}"));
            new.expect(&format!("fill {block} 1"));
        }
        new
    }

    /// A process without RAM.
    pub(crate) fn start() -> Self {
        let program = |name| own_program(name).unwrap();
        let mut child = Command::new(program("overbook-shim-stand-in"))
            .env("LD_PRELOAD", program("liboverbook_shim.so"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, commands, answers }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command whose result is read later.
    pub(crate) fn begin(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// Checks that the oldest pending command succeeds.
    pub(crate) fn finish(&mut self) {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert!(line.starts_with("ok "), "{line}");
    }

    /// Runs a command, which must succeed.
    pub(crate) fn expect(&mut self, command: &str) {
        self.begin(command);
        self.finish();
    }
}

impl Drop for GroupStandIn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
