//! Placement of processes and threads on the host's CPUs.

use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use sys::process::{Identity, children_of};

use crate::lab::LabError;

/// Runs `start` on this CPU; the threads that it starts stay there.
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

/// Moves this thread to these CPUs; if there are none, it stays where it runs.
pub fn this_thread(cpus: &[usize]) -> std::io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// Gives a process and its children the weight on their CPU that a service has with
/// `CPUWeight=1000`.
pub fn weigh_as_a_service(process: Identity) -> std::io::Result<()> {
    /// The nice level with ten times the default weight.
    const NICE: i32 = -10;
    for of in std::iter::once(process).chain(children_of(process.pid)?) {
        let pid = i32::try_from(of.pid).ok().and_then(Pid::from_raw);
        setpriority_process(pid, NICE)?;
    }
    Ok(())
}

/// Another thread that is pinned to one CPU until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    thread: Pid,
    before: CpuSet,
}

impl Pinned {
    /// Pins it.
    ///
    /// # Errors
    /// When there is no such CPU or thread, or the kernel does not allow it to move.
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
        // The thread may have ended.
        let _ = sched_setaffinity(Some(self.thread), &self.before);
    }
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}
