//! The time that a thread of another process has waited for a CPU, from the kernel's own count.
//!
//! On a busy machine, a client that waits for a thread also waits for a CPU. The kernel counts
//! this exactly and for free for each thread (`schedstat`, second number). A thread is found by
//! name once and then read by number, in some microseconds. A kernel that does not count
//! (`CONFIG_SCHED_INFO`) has no such file, and then the time is unknown.

use std::path::PathBuf;

/// A thread of a process.
#[derive(Debug)]
pub struct Thread {
    schedstat: PathBuf,
}

impl Thread {
    /// The thread of process `pid` with this name; `None`: there is none, or it is not visible.
    #[must_use]
    pub fn named(pid: u32, name: &str) -> Option<Self> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let mut paths = tasks.filter_map(|task| Some(task.ok()?.path()));
        let is_named = |path: &PathBuf| {
            let comm = std::fs::read_to_string(path.join("comm"));
            comm.is_ok_and(|comm| comm.trim_end() == name)
        };
        let path = paths.find(is_named)?;
        Some(Self { schedstat: path.join("schedstat") })
    }

    /// The time that it has waited for a CPU since it began, in nanoseconds; `None`: it has
    /// ended, or the kernel does not count.
    #[must_use]
    pub fn waited_ns(&self) -> Option<u64> {
        let text = std::fs::read_to_string(&self.schedstat).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    }
}

/// The names of a process's threads, the oldest first, at most `most` of them: a hostile process
/// may have any number.
///
/// # Errors
/// When the process is gone, or its threads are not visible.
pub fn names(pid: u32, most: usize) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))?.take(most) {
        // A thread that has just ended no longer has a name.
        let name = std::fs::read(task?.path().join("comm")).unwrap_or_default();
        names.push(String::from_utf8_lossy(&name).trim_end().to_owned());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_found_by_its_name_and_what_it_waited_only_grows() {
        let named = std::thread::Builder::new().name("ob-threads-test".to_owned());
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (begins, begun) = std::sync::mpsc::channel();
        let thread = named.spawn(move || {
            begins.send(()).unwrap();
            wait.recv()
        });
        let thread = thread.unwrap();
        // It gives itself its name.
        begun.recv().unwrap();
        let pid = std::process::id();
        // The kernel may skip a thread when an earlier one in the list ends.
        let found = std::iter::repeat_with(|| Thread::named(pid, "ob-threads-test"));
        let found = found.flatten().next().unwrap();
        let before = found.waited_ns().unwrap();
        assert!(found.waited_ns().unwrap() >= before);
        drop(done);
        thread.join().unwrap().unwrap_err();
        assert!(names(pid, usize::MAX).unwrap().len() >= 2 && names(pid, 1).unwrap().len() == 1);
        assert!(names(u32::MAX, 1).is_err());
        assert!(Thread::named(pid, "no such thread").is_none());
        assert!(Thread::named(u32::MAX, "ob-threads-test").is_none());
    }
}
