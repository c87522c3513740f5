//! What runs on which of the host's CPUs.

use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use sys::process::{Identity, children_of};

use crate::lab::LabError;

/// Starts something whose threads run on this CPU.
///
/// # Errors
/// When there is no such CPU, and its own.
pub fn on_cpu<T: Send>(
    cpu: usize,
    start: impl FnOnce() -> Result<T, LabError> + Send,
) -> Result<T, LabError> {
    let on_cpu = || {
        sched_setaffinity(None, &only(cpu)).map_err(std::io::Error::from)?;
        start()
    };
    std::thread::scope(|scope| scope.spawn(on_cpu).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Has this thread run on these CPUs; none: where it runs now.
///
/// # Errors
/// When there are no such CPUs.
pub fn this_thread(cpus: &[usize]) -> std::io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// Gives a process, and those that it has started, the weight on their CPU that a service has with
/// `CPUWeight=1000`.
///
/// # Errors
/// When it has ended.
pub fn weigh_as_a_service(process: Identity) -> std::io::Result<()> {
    /// Ten times the weight of a program that says nothing.
    const NICE: i32 = -10;
    for of in std::iter::once(process).chain(children_of(process.pid)?) {
        let pid = i32::try_from(of.pid).ok().and_then(Pid::from_raw);
        setpriority_process(pid, NICE)?;
    }
    Ok(())
}

/// Another thread that runs on one CPU, until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    thread: Pid,
    before: CpuSet,
}

impl Pinned {
    /// Holds it there.
    ///
    /// # Errors
    /// When there is no such CPU or thread, or it is the kernel's and stays where it is.
    pub fn to(cpu: usize, thread: u32) -> Result<Self, LabError> {
        let thread = i32::try_from(thread).ok().and_then(Pid::from_raw);
        let thread = thread.ok_or_else(|| std::io::Error::from(rustix::io::Errno::SRCH))?;
        let before = sched_getaffinity(Some(thread)).map_err(std::io::Error::from)?;
        sched_setaffinity(Some(thread), &only(cpu)).map_err(std::io::Error::from)?;
        Ok(Self { thread, before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A thread that has ended runs nowhere.
        let _ = sched_setaffinity(Some(self.thread), &self.before);
    }
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}
