//! How long a thread of another process has waited for a CPU, by the kernel's own count.
//!
//! Who waits for a thread waits for a CPU with it, where the machine is busy. The kernel counts
//! that for each thread (`schedstat`, second number), exactly and at no cost. Found by name once, a
//! thread is read by number: some microseconds. A kernel that does not count (`CONFIG_SCHED_INFO`)
//! has no such file, and then nothing is known.

use std::path::PathBuf;

/// A thread of some process.
#[derive(Debug)]
pub struct Thread {
    schedstat: PathBuf,
}

impl Thread {
    /// The thread of process `pid` whose name is this; `None`: there is none, or it cannot be seen.
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

    /// For how long it has waited for a CPU since it began, in nanoseconds; `None`: it has ended,
    /// or the kernel does not count.
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
/// When it is gone, or its threads may not be seen.
pub fn names(pid: u32, most: usize) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))?.take(most) {
        // One that has just ended has no name any more.
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
        // The kernel may leave out a thread when one before it in the list ends.
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
