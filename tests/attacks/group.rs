//! A group's merging, driven by a test: the worker's engine, and processes that stand in for QEMUs.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use lab::command::own_program;
use model::Dedup as Reading;
use overbook::worker::{Dedup, Mode, STEP, Settings, State, Tracked};
use sys::process::Identity;

/// A busy machine is no failure.
const LIMIT: Duration = Duration::from_secs(120);
/// How long the engine works before somebody else has his turn.
const SLICE: Duration = Duration::from_millis(2);

/// The engine, and the VMs that it is told of.
pub(crate) struct Group {
    pub(crate) dedup: Dedup,
    vms: Vec<Tracked>,
    step: Instant,
}

impl Group {
    /// Nobody yet. Its pool is its own, whichever tests run beside it.
    pub(crate) fn new() -> Self {
        let name = format!("attacks-{}-{:x}", std::process::id(), fastrand::u64(..));
        Self { dedup: Dedup::new(&name), vms: Vec::new(), step: Instant::now() }
    }

    /// This process is a VM of the group's from now on.
    pub(crate) fn add(&mut self, pid: u32) {
        let process = Identity::of(pid).unwrap();
        self.vms.push(Tracked::new(process, Settings::new(Mode::Probes { budget: 0.01 })));
    }

    /// The newest VM is none of the group's any more.
    pub(crate) fn remove_newest(&mut self) {
        self.vms.pop();
    }

    /// One turn, as the worker's process does it. It never waits for anybody.
    pub(crate) fn turn(&mut self) {
        if Instant::now() >= self.step {
            self.step = Instant::now() + STEP;
            self.vms.iter_mut().for_each(Tracked::step);
        }
        let mut all: Vec<&mut Tracked> = self.vms.iter_mut().collect();
        let idle = self.dedup.work(&mut all, Instant::now() + SLICE);
        std::thread::sleep(idle.min(SLICE));
    }

    /// Works until it is so, and lets somebody act after each turn.
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

    /// Works for so long.
    pub(crate) fn work(&mut self, time: Duration, act: impl FnMut()) {
        let end = Instant::now() + time;
        self.until("time passes", act, |_| Instant::now() >= end);
    }

    /// What is known of a VM; nothing, as if it shared nothing.
    pub(crate) fn reading(&self, pid: u32) -> Reading {
        self.dedup.reading(pid).map(|reading| reading.value).unwrap_or_default()
    }

    /// Where the connections stand.
    pub(crate) fn states(&self) -> Vec<&State> {
        self.vms.iter().map(Tracked::state).collect()
    }
}

/// A process that uses its RAM as QEMU does, with the shim inside.
pub(crate) struct StandIn {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl StandIn {
    /// With blocks of so many MiB. Blocks that are filled with the same seed are the same, page by
    /// page.
    pub(crate) fn with_ram(mib: &[u32]) -> Self {
        let mut new = Self::start();
        for (block, mib) in mib.iter().enumerate() {
            new.expect(&format!("plug {mib}"));
            new.expect(&format!("fill {block} 1"));
        }
        new
    }

    /// Without RAM.
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

    /// Gives a command whose outcome is looked at later.
    pub(crate) fn begin(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// The oldest command that was begun succeeds.
    pub(crate) fn finish(&mut self) {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert!(line.starts_with("ok "), "{line}");
    }

    /// The command succeeds.
    pub(crate) fn expect(&mut self, command: &str) {
        self.begin(command);
        self.finish();
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
