//! Resources that processes and some of their threads have used: CPU time, and waits for memory
//! on disk.
//!
//! Threads come and go meanwhile. A thread that has ended has no file any more, and is skipped.

use std::io;
use std::path::{Path, PathBuf};

/// The prefix of the shim's thread names.
const SHIMS: &str = "overbook-";

/// CPU time of the shims' own threads in these processes, in seconds.
pub fn shims_cpu_s(pids: &[u32]) -> f64 {
    cpu_s(pids, SHIMS)
}

/// CPU time of the threads of these processes whose names have this prefix, in seconds; "": of
/// all.
pub fn cpu_s(pids: &[u32], prefix: &str) -> f64 {
    let ns = pids.iter().flat_map(|pid| named(*pid, prefix)).filter_map(|thread| {
        let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    ns.sum::<f64>() / 1e9
}

/// Number of times that a process has waited for a page from disk.
pub fn major_faults(pid: u32) -> io::Result<f64> {
    major_faults_of(&PathBuf::from(format!("/proc/{pid}")))
}

/// Same as [`major_faults`], without the waits of the shim's own threads.
pub fn major_faults_of_guest(pid: u32) -> io::Result<f64> {
    // The threads are read first: a fault between the two readings then counts as the guest's,
    // and none counts twice.
    let shims: f64 = named(pid, SHIMS).filter_map(|thread| major_faults_of(&thread).ok()).sum();
    Ok(major_faults(pid)? - shims)
}

/// Major faults of a process or a thread, by its directory in `/proc`.
fn major_faults_of(directory: &Path) -> io::Result<f64> {
    let stat = std::fs::read_to_string(directory.join("stat"))?;
    parse_major_faults(&stat).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, stat))
}

/// The thread's name may hold any characters. After it, `state` is the third field, `majflt` the
/// twelfth.
fn parse_major_faults(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(9)?.parse().ok()
}

/// The directories of a process's threads whose names have this prefix.
fn named(pid: u32, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.map(|task| task.path()).filter(move |thread| {
        let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        name.starts_with(prefix)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_found_by_name_among_others_that_come_and_go() {
        let me = std::process::id();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (begins, begun) = std::sync::mpsc::channel();
        let builder = std::thread::Builder::new().name("overbook-test".to_owned());
        let thread = builder.spawn(move || {
            begins.send(()).unwrap();
            wait.recv()
        });
        let thread = thread.unwrap();
        // The thread sets its name itself.
        begun.recv().unwrap();
        let passing = std::thread::spawn(|| {
            (0..200).for_each(|_| std::thread::spawn(|| ()).join().unwrap());
        });
        // The kernel may omit a thread when one before it in the list ends.
        let mut found = 0;
        while !passing.is_finished() || found == 0 {
            found += named(me, "overbook-test").count();
            assert!(cpu_s(&[me], SHIMS) <= cpu_s(&[me], ""));
            assert!(major_faults_of_guest(me).is_ok());
        }
        passing.join().unwrap();
        drop(done);
        thread.join().unwrap().unwrap_err();
        assert_eq!(named(me, "overbook-test").count(), 0);
    }

    #[test]
    fn major_faults_are_the_twelfth_field_whatever_the_name_is() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1234 0 56 0 78 9 0 0 20 0 1 0 99";
        assert_eq!(parse_major_faults(stat), Some(56.0));
        assert_eq!(parse_major_faults("7 (a) S 1"), None);
        assert!(major_faults(u32::MAX).is_err());
        assert!(major_faults_of_guest(u32::MAX).is_err());
    }
}
