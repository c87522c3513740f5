//! Processes that are always cleaned up and never confused: they can be started so that they die
//! with this process, and are identified so that a reused pid is never signalled.
//!
//! **Problem.** A program that starts QEMUs and daemons must end every one of them, even when it
//! is itself killed with SIGKILL and can run no more code. And a pid that was written to a file
//! may belong to another process by the time it is read back.
//!
//! **Idea.** [`Spawn::die_with_parent`] asks the kernel (`PR_SET_PDEATHSIG`) to kill the child
//! when its parent ends. The kernel means the parent *thread*, not the process, so one thread
//! that lives as long as the process forks all such children. A process is identified by pid
//! **and** start time ([`Identity`]). Signals go through a pidfd that is opened first and checked
//! against the start time afterwards, so the pid cannot be recycled in between.
//!
//! **Invariants.** A zombie counts as dead ([`Identity::is_alive`]), although `kill(pid, 0)`
//! succeeds. Each child has its own process group, so a Ctrl-C on the terminal goes only to this
//! process, which then ends the children in order. Dropping a [`Child`] neither kills nor waits:
//! that is left to its owner.
//!
//! **Left out.** The death signal is not inherited by grandchildren: a long-lived owner calls
//! [`become_subreaper`] and, at its end, [`end_remaining_children`].

mod spawn;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use model::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, WaitOptions, getpid, getrlimit, pidfd_open,
    pidfd_send_signal, set_child_subreaper, setrlimit,
};

use crate::procfs::{self, ProcError};

pub use rustix::process::Signal;
pub use spawn::Spawn;

/// A started child. Dropping it neither kills nor waits.
#[derive(Debug)]
pub struct Child {
    inner: std::process::Child,
    pidfd: OwnedFd,
    identity: Identity,
}

impl Child {
    fn new(inner: std::process::Child) -> io::Result<Self> {
        let identity = Identity::of(inner.id())
            .ok_or_else(|| io::Error::other("/proc shows nothing of a child just started"))?;
        Ok(Self { pidfd: open_pidfd(inner.id())?, inner, identity })
    }

    /// Pid and start time.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// The exit status if the child has ended; reaps it.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.inner.try_wait()
    }

    /// Waits up to `limit` for the child to end; `None` if it has not.
    pub fn wait_for(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        wait_for_exit(&self.pidfd, limit)?;
        self.inner.try_wait()
    }

    /// Sends `signal`; it is no error if the child has already ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        send(&self.pidfd, signal)
    }

    /// Asks the child to end (SIGTERM), kills it after `grace` (SIGKILL), and reaps it.
    pub fn end(&mut self, grace: Duration) -> io::Result<ExitStatus> {
        if let Some(status) = self.inner.try_wait()? {
            return Ok(status);
        }
        self.signal(Signal::TERM)?;
        if let Some(status) = self.wait_for(grace)? {
            return Ok(status);
        }
        self.signal(Signal::KILL)?;
        self.inner.wait()
    }
}

/// The resources that a process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of all its threads, in user and system mode, at a resolution of 10 ms.
    pub cpu: Duration,
    /// Resident memory.
    pub resident: Bytes,
}

/// A unique process: its pid, and its start in clock ticks since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// The process id.
    pub pid: u32,
    /// Field `starttime` of `/proc/<pid>/stat`, in clock ticks since boot.
    pub start_ticks: u64,
}

impl Identity {
    /// This process.
    pub fn own() -> Option<Self> {
        Self::of(std::process::id())
    }

    /// The process that has this pid now, zombie or not.
    pub fn of(pid: u32) -> Option<Self> {
        let (_, _, start_ticks) = read_stat(pid)?;
        Some(Self { pid, start_ticks })
    }

    /// Whether this process, with this start time, still runs; a zombie does not.
    pub fn is_alive(&self) -> bool {
        read_stat(self.pid).is_some_and(|(state, _, start)| {
            start == self.start_ticks && !matches!(state, 'Z' | 'X')
        })
    }

    /// Sends `signal` to this process. `false`: it is gone, and no process got the signal.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        match self.hold()? {
            Some(pidfd) => send(&pidfd, signal).map(|()| true),
            None => Ok(false),
        }
    }

    /// Waits up to `limit` for the process to end; returns whether it has.
    pub fn wait_for(&self, limit: Duration) -> io::Result<bool> {
        match self.hold()? {
            Some(pidfd) => wait_for_exit(&pidfd, limit),
            None => Ok(true),
        }
    }

    /// Asks the process to end (SIGTERM), and kills it after `grace` (SIGKILL). `false`: it was
    /// already gone.
    pub fn end(&self, grace: Duration) -> io::Result<bool> {
        let Some(pidfd) = self.hold()? else {
            return Ok(false);
        };
        send(&pidfd, Signal::TERM)?;
        if !wait_for_exit(&pidfd, grace)? {
            send(&pidfd, Signal::KILL)?;
            wait_for_exit(&pidfd, Duration::from_secs(10))?;
        }
        Ok(true)
    }

    /// Its start, by the present setting of the wall clock; `None` if that is unknown.
    #[must_use]
    pub fn began(&self) -> Option<std::time::SystemTime> {
        let since_boot_ms = self.start_ticks.saturating_mul(1000) / clock_ticks_per_second();
        let ago_ms = crate::clock::boot_now().0.checked_sub(since_boot_ms)?;
        std::time::SystemTime::now().checked_sub(Duration::from_millis(ago_ms))
    }

    /// The resources that this process has used so far; `None`: it is gone.
    pub fn usage(&self) -> Option<Usage> {
        let stat = stat_of(self.pid).ok()?;
        let usage = parse_usage(&stat)?;
        parse_stat(&stat).filter(|(_, _, start)| *start == self.start_ticks).map(|_| usage)
    }

    /// Returns `read`, a reading of this process by its pid. The check that it lives follows the
    /// reading: a live process keeps its pid, so the reading was of no other process.
    ///
    /// # Errors
    /// `ESRCH`: it has ended, and the reading may be of another process.
    pub fn still<T>(&self, read: T) -> io::Result<T> {
        let gone = || io::Error::from(rustix::io::Errno::SRCH);
        self.is_alive().then_some(read).ok_or_else(gone)
    }

    /// A pidfd of this process: opened first and checked afterwards, so the pid cannot be reused
    /// in between. `None`: it is gone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn hold(&self) -> io::Result<Option<OwnedFd>> {
        match open_pidfd(self.pid) {
            Ok(pidfd) if self.is_alive() => Ok(Some(pidfd)),
            Ok(_) => Ok(None),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A copy of a descriptor that the parent program left open for this one.
///
/// # Errors
/// There is none of this number.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::Error::from(rustix::io::Errno::BADF));
    }
    // SAFETY: it is only copied, and the kernel reports an error if it does not exist.
    let there = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(rustix::io::fcntl_dupfd_cloexec(there, 3)?)
}

/// Marks this thread, and those that it starts, as needed to free memory (`PR_SET_IO_FLUSHER`).
/// When they allocate memory, the kernel does not wait for I/O, because that I/O may depend on
/// them.
///
/// # Errors
/// The process lacks `CAP_SYS_RESOURCE`.
pub fn become_io_flusher() -> io::Result<()> {
    /// By `linux/prctl.h`, since Linux 5.6.
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: only numbers are passed.
    let set = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Raises this process's limit of open files to the most that it may set. Children inherit it.
///
/// # Errors
/// The kernel's.
pub fn allow_many_files() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?)
}

/// Makes orphans among our descendants our children, instead of children of process 1.
pub fn become_subreaper() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Kills and reaps every remaining child of this process. With a subreaper, their descendants
/// become children too, and are included. Returns their number. For the end of `main` only: it
/// also takes children that other code holds.
pub fn end_remaining_children() -> io::Result<usize> {
    let mut reaped = 0;
    loop {
        for child in children_of(std::process::id())? {
            child.signal(Signal::KILL)?;
        }
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some(_)) => reaped += 1,
            Ok(None) => {}
            Err(rustix::io::Errno::CHILD) => return Ok(reaped),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The live processes whose parent is `parent`.
pub fn children_of(parent: u32) -> io::Result<Vec<Identity>> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if let Some((_, ppid, start_ticks)) = read_stat(pid)
            && ppid == parent
        {
            children.push(Identity { pid, start_ticks });
        }
    }
    Ok(children)
}

fn stat_of(pid: u32) -> Result<String, ProcError> {
    procfs::read(Path::new(&format!("/proc/{pid}/stat")))
}

/// State letter, parent and start time from `/proc/<pid>/stat`.
fn read_stat(pid: u32) -> Option<(char, u32, u64)> {
    parse_stat(&stat_of(pid).ok()?)
}

/// The command name may contain spaces and brackets, so fields count from the last `)`.
fn parse_stat(stat: &str) -> Option<(char, u32, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    let start_ticks = fields.nth(17)?.parse().ok()?;
    Some((state, parent, start_ticks))
}

fn parse_usage(stat: &str) -> Option<Usage> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let pages: u64 = fields.nth(8)?.parse().ok()?;
    let milliseconds = (user + system).saturating_mul(1000) / clock_ticks_per_second();
    let page = u64::try_from(page_size()).unwrap_or(4096);
    Some(Usage {
        cpu: Duration::from_millis(milliseconds),
        resident: Bytes(pages.saturating_mul(page)),
    })
}

/// The number of pages that all threads of a process have waited for since its start (major
/// faults), from swap or from a file.
///
/// # Errors
/// The process has ended.
pub fn waited_for_pages(pid: u32) -> io::Result<u64> {
    let stat = stat_of(pid).map_err(io::Error::other)?;
    parse_major_faults(&stat).ok_or_else(|| io::Error::other("its stat makes no sense"))
}

fn parse_major_faults(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(9)?.parse().ok()
}

/// Opens a pidfd of a process, which reports its end.
///
/// # Errors
/// When there is no process with this pid.
pub fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

fn send(pidfd: &OwnedFd, signal: Signal) -> io::Result<()> {
    match pidfd_send_signal(pidfd, signal).map_err(io::Error::from) {
        Err(error) if is_gone(&error) => Ok(()),
        other => other,
    }
}

pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

/// Whether the process of this pidfd has ended.
#[must_use]
pub fn has_ended(pidfd: &OwnedFd) -> bool {
    wait_for_exit(pidfd, Duration::ZERO).unwrap_or(false)
}

/// A pidfd becomes readable when its process ends.
fn wait_for_exit(pidfd: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            // A signal to this process: continue with the remaining time, if any.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> Spawn {
        Spawn::new("sleep").arg("60")
    }

    #[test]
    fn usage_counts_the_cpu_time_and_memory_of_this_process() {
        let own = Identity::own().unwrap();
        let before = own.usage().unwrap();
        // Small, so that tests of `memory_of`, which count at the same time, hardly notice it.
        let work = vec![1u8; 2 << 20];
        let end = Instant::now() + Duration::from_secs(60);
        let after = loop {
            std::hint::black_box(work.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            let now = own.usage().unwrap();
            if now.cpu > before.cpu || Instant::now() > end {
                break now;
            }
        };
        assert!(after.cpu > before.cpu, "{before:?} {after:?}");
        assert!(after.resident >= Bytes::mib(2), "{after:?}");
        assert_eq!(Identity { start_ticks: 1, ..own }.usage(), None);
    }

    #[test]
    fn a_child_that_dies_with_its_parent_runs_where_the_thread_that_started_it_may() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let all = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| all.is_set(*cpu)).unwrap();
        let child = std::thread::spawn(move || {
            let mut only = CpuSet::new();
            only.set(last);
            sched_setaffinity(None, &only).unwrap();
            sleeper().die_with_parent().spawn().unwrap()
        });
        let mut child = child.join().unwrap();
        let status = format!("/proc/{}/status", child.identity().pid);
        let status = std::fs::read_to_string(status).unwrap();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        assert_eq!(allowed.map(str::trim), Some(last.to_string().as_str()));
        child.end(Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn a_child_ends_on_request_and_is_dead_afterwards() {
        let mut child = sleeper().spawn().unwrap();
        assert!(child.identity().is_alive());
        assert!(!child.end(Duration::from_secs(5)).unwrap().success());
        assert!(!child.identity().is_alive());
    }

    #[test]
    fn a_child_that_ignores_sigterm_is_killed_after_the_grace() {
        let (mut said, stdout) = io::pipe().unwrap();
        let script = "trap '' TERM; echo; exec 1>&-; while :; do sleep 1; done";
        let mut child = Spawn::new("sh").args(["-c", script]).stdout(stdout).spawn().unwrap();
        io::Read::read_exact(&mut said, &mut [0]).unwrap();
        child.end(Duration::from_millis(200)).unwrap();
        assert!(!child.identity().is_alive());
    }

    #[test]
    fn a_zombie_counts_as_dead() {
        let mut child = Spawn::new("true").spawn().unwrap();
        assert!(child.identity().wait_for(Duration::from_secs(60)).unwrap());
        assert!(!child.identity().is_alive());
        child.try_wait().unwrap();
    }

    #[test]
    fn a_recycled_pid_gets_no_signal() {
        let mut child = sleeper().spawn().unwrap();
        let mut other = child.identity();
        other.start_ticks += 1;
        assert!(!other.signal(Signal::KILL).unwrap());
        assert!(child.identity().is_alive());
        child.end(Duration::from_secs(5)).unwrap();
    }

    #[test]
    fn what_was_read_of_a_recycled_pid_is_nothing() {
        let own = Identity::own().unwrap();
        assert_eq!(own.still(7).unwrap(), 7);
        assert!(own.hold().unwrap().is_some());
        let other = Identity { start_ticks: own.start_ticks + 1, ..own };
        assert!(is_gone(&other.still(7).unwrap_err()));
        assert!(other.hold().unwrap().is_none());
    }

    #[test]
    fn a_child_that_dies_with_its_parent_survives_the_thread_that_asked_for_it() {
        let asked = std::thread::spawn(|| sleeper().die_with_parent().spawn().unwrap());
        let mut child = asked.join().unwrap();
        assert!(child.wait_for(Duration::from_millis(100)).unwrap().is_none());
        child.end(Duration::from_secs(5)).unwrap();
    }

    #[test]
    fn a_child_runs_only_on_the_cpus_it_was_given() {
        let mut child = sleeper().on_cpus(&[0]).spawn().unwrap();
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", child.identity().pid)).unwrap();
        assert!(status.lines().any(|line| line == "Cpus_allowed_list:\t0"), "{status}");
        child.end(Duration::from_secs(5)).unwrap();
    }

    #[test]
    fn a_process_that_calls_itself_by_bytes_that_are_no_text_is_alive_and_counted() {
        let (mut said, stdout) = io::pipe().unwrap();
        let script = r"printf '\377)(' > /proc/$$/comm; echo; exec 1>&-; while :; do sleep 1; done";
        let mut child = Spawn::new("sh").args(["-c", script]).stdout(stdout).spawn().unwrap();
        io::Read::read_exact(&mut said, &mut [0]).unwrap();
        let identity = child.identity();
        assert_eq!(Identity::of(identity.pid), Some(identity));
        assert!(identity.is_alive() && identity.usage().is_some());
        let counters = crate::memory_of::Counters::of(identity.pid).unwrap();
        assert!(counters.anonymous > Bytes::ZERO);
        child.end(Duration::from_secs(5)).unwrap();
    }

    #[test]
    fn the_limit_of_open_files_is_raised_to_the_most_that_it_may_be() {
        allow_many_files().unwrap();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }

    #[test]
    fn a_command_name_with_brackets_does_not_confuse_the_start_time() {
        let stat = "7 (a) b (c) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!(parse_stat(stat), Some(('S', 3, 4242)));
    }
}
