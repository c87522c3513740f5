//! The waits of the shim's thread that handles faults.

use sys::threads::Thread;

const FAULT_THREAD: &str = "overbook-fault";

/// The shim's fault thread: while it waits for a CPU, so do the guest's threads that trapped.
#[derive(Debug)]
pub(super) struct FaultThread {
    pid: u32,
    thread: Option<Thread>,
    waited_ns: Option<u64>,
}

impl FaultThread {
    pub(super) fn of(pid: u32) -> Self {
        Self { pid, thread: None, waited_ns: None }
    }

    /// The time for which it has waited for a CPU since the last call; 0: unknown.
    pub(super) fn waited_ns(&mut self) -> u64 {
        if self.thread.is_none() {
            // The shim starts it when tracking starts.
            self.thread = Thread::named(self.pid, FAULT_THREAD);
        }
        let waited_ns = self.thread.as_ref().and_then(Thread::waited_ns);
        let before_ns = std::mem::replace(&mut self.waited_ns, waited_ns);
        waited_ns.zip(before_ns).map_or(0, |(now, before)| now.saturating_sub(before))
    }
}
