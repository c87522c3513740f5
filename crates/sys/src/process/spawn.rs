//! Starts a child: its files, rights and CPUs, and the condition of its end.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal, setsid};
use rustix::thread::{
    CpuSet, disable_transparent_huge_pages, sched_getaffinity, sched_setaffinity,
};

use super::Child;

/// Builds one child process; the head of the parent module describes the guarantees.
#[derive(Debug)]
pub struct Spawn {
    command: Command,
    die_with_parent: bool,
    new_session: bool,
    small_pages: bool,
    cpus: Vec<usize>,
    passed: Vec<OwnedFd>,
}

impl Spawn {
    /// A child that runs `program`, without standard input; its output goes to ours unless
    /// redirected.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        command.stdin(Stdio::null());
        Self {
            command,
            die_with_parent: false,
            new_session: false,
            small_pages: false,
            cpus: Vec::new(),
            passed: Vec::new(),
        }
    }

    /// Adds one argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds several arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets one environment variable.
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Runs the child in `dir`.
    pub fn current_dir(mut self, dir: impl AsRef<std::path::Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Standard input comes from `input`.
    pub fn stdin(mut self, input: impl Into<Stdio>) -> Self {
        self.command.stdin(input);
        self
    }

    /// Standard output goes to `output`.
    pub fn stdout(mut self, output: impl Into<Stdio>) -> Self {
        self.command.stdout(output);
        self
    }

    /// Standard error goes to `output`.
    pub fn stderr(mut self, output: impl Into<Stdio>) -> Self {
        self.command.stderr(output);
        self
    }

    /// Standard output and standard error both go to `file`.
    pub fn output_to(mut self, file: File) -> io::Result<Self> {
        self.command.stdout(file.try_clone()?);
        self.command.stderr(file);
        Ok(self)
    }

    /// Runs the child as this user and group, without our rights.
    pub fn user(mut self, uid: u32) -> Self {
        self.command.uid(uid).gid(uid);
        self
    }

    /// Leaves `fd` open for this child, and for no other one that is started meanwhile. Returns
    /// its number in the child, for [`inherited`](super::inherited).
    ///
    /// # Errors
    /// This process may open no more descriptors.
    pub fn pass(&mut self, fd: impl AsFd) -> io::Result<RawFd> {
        let passed = rustix::io::fcntl_dupfd_cloexec(fd, 3)?;
        let number = passed.as_raw_fd();
        self.passed.push(passed);
        Ok(number)
    }

    /// Makes the kernel kill the child (SIGKILL) when this process ends, in any way.
    pub fn die_with_parent(mut self) -> Self {
        self.die_with_parent = true;
        self
    }

    /// Makes the child lead a session of its own: it has no terminal and outlives our session.
    pub fn new_session(mut self) -> Self {
        self.new_session = true;
        self
    }

    /// Keeps the child's memory in small pages, even where it asks for huge ones.
    pub fn small_pages(mut self, are_small: bool) -> Self {
        self.small_pages = are_small;
        self
    }

    /// Runs the child only on these CPUs; an empty list means those of the thread that starts it.
    pub fn on_cpus(mut self, cpus: &[usize]) -> Self {
        self.cpus = cpus.to_vec();
        self
    }

    /// Starts the child.
    ///
    /// # Errors
    /// When the program cannot be started, or a CPU does not exist.
    pub fn spawn(mut self) -> io::Result<Child> {
        let cpus = match cpu_set(&self.cpus)? {
            // Another thread forks it; like any child, it gets the CPUs of this thread.
            None if self.die_with_parent => Some(sched_getaffinity(None)?),
            cpus => cpus,
        };
        let (die, session, parent) = (self.die_with_parent, self.new_session, getpid());
        if !session {
            self.command.process_group(0);
        }
        let (passed, small_pages) = (self.passed, self.small_pages);
        let before_exec = move || {
            if small_pages {
                disable_transparent_huge_pages(true)?;
            }
            prepare_child(die.then_some(parent), session, cpus.as_ref(), &passed)
        };
        // SAFETY: the closure runs between fork and exec, where only async-signal-safe code may
        // run: it makes raw system calls on plain values, and neither allocates nor locks nor
        // unwinds.
        unsafe { self.command.pre_exec(before_exec) };
        let inner =
            if die { spawn_from_lasting_thread(self.command) } else { self.command.spawn() }?;
        Child::new(inner)
    }
}

/// The steps of the child before it executes the program.
fn prepare_child(
    parent: Option<Pid>,
    session: bool,
    cpus: Option<&CpuSet>,
    passed: &[OwnedFd],
) -> io::Result<()> {
    for fd in passed {
        fcntl_setfd(fd, FdFlags::empty())?;
    }
    if session {
        setsid()?;
    }
    // A service may be forbidden to choose its CPUs, so this is skipped if nothing would change.
    if let Some(cpus) = cpus
        && sched_getaffinity(None)? != *cpus
    {
        sched_setaffinity(None, cpus)?;
    }
    if let Some(parent) = parent {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the request; then no signal will ever come.
        if getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
        }
    }
    Ok(())
}

fn cpu_set(cpus: &[usize]) -> io::Result<Option<CpuSet>> {
    if cpus.is_empty() {
        return Ok(None);
    }
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            let limit = CpuSet::MAX_CPU - 1;
            return Err(io::Error::other(format!(
                "CPU {cpu} is above the highest possible, {limit}"
            )));
        }
        set.set(cpu);
    }
    Ok(Some(set))
}

/// A command to start, and the channel for its result.
type Job = (Command, mpsc::Sender<io::Result<std::process::Child>>);

/// Forks on the thread that lives as long as the process, because the death signal depends on the
/// end of the forking thread.
fn spawn_from_lasting_thread(command: Command) -> io::Result<std::process::Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, inbox) = mpsc::channel::<Job>();
        // If the thread cannot be started, its inbox is dropped, and the send below reports that.
        let _detached = std::thread::Builder::new().name("spawner".into()).spawn(move || {
            for (mut command, reply) in inbox {
                let _ = reply.send(command.spawn());
            }
        });
        jobs
    });
    let gone = || io::Error::other("the thread that starts processes could not be started");
    let (reply, result) = mpsc::channel();
    spawner.send((command, reply)).map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}
