//! Ctrl-C in the middle of a demonstration leaves the machine as it was.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use lab::accel::UP_MARK;
use overbook_tests::{program, take_turn, text};
use sys::process::{Identity, Signal};

/// Maximum time until all guests are up.
const LIMIT: Duration = Duration::from_secs(180);

/// Settings of the kernel that a lab could change: each file's name and content.
fn settings() -> Vec<(String, String)> {
    let globs = [
        "/proc/mounts",
        "/proc/swaps",
        "/sys/kernel/mm/ksm/run",
        "/sys/kernel/mm/ksm/pages_to_scan",
        "/sys/kernel/mm/ksm/sleep_millisecs",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/mm/lru_gen/enabled",
    ];
    let mut found: Vec<_> = globs.map(str::to_owned).into();
    let sysctls = std::fs::read_dir("/proc/sys/vm").unwrap().flatten();
    found.extend(sysctls.map(|file| file.path().display().to_string()));
    found.sort();
    let read = |path: String| Some((path.clone(), std::fs::read_to_string(path).ok()?));
    let mut settings: Vec<_> = found.into_iter().filter_map(read).collect();
    settings.push(("cgroups".to_owned(), cgroups().join("\n")));
    settings
}

fn cgroups() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.path().display().to_string()).collect();
    names.sort();
    names
}

/// Processes with `dir` on their command line.
fn processes(dir: &Path) -> Vec<String> {
    let dir = dir.to_str().unwrap();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(dir))
        .collect()
}

/// Number of guests of the demonstration that are up, by their consoles.
fn guests_up(dir: &Path) -> usize {
    let files = std::fs::read_dir(dir.join("log")).into_iter().flatten().flatten();
    let said = files.filter_map(|file| std::fs::read(file.path()).ok());
    said.filter(|said| String::from_utf8_lossy(said).contains(UP_MARK)).count()
}

/// Interrupts a demonstration as soon as `is_time` for it.
fn interrupted_when(is_time: impl Fn(&Path) -> bool) {
    let Some(_turn) = take_turn() else { return };
    let parent = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let dir = parent.path().join("lab");
    let before = settings();
    let mut lab = program();
    lab.args(["lab", "run", "quickstart", "--dir"]).arg(&dir);
    let child = lab.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while !is_time(&dir) {
        assert!(began.elapsed() < LIMIT, "{:?}", processes(&dir));
        std::thread::sleep(Duration::from_millis(50));
    }
    Identity::of(child.id()).unwrap().signal(Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output));
    assert_eq!(processes(&dir), Vec::<String>::new());
    let kept = ["log", "overbook-lab.lock"];
    let left = std::fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| !kept.contains(&name.to_str().unwrap())).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(settings(), before);
}

#[test]
fn ctrl_c_while_the_guests_boot_leaves_nothing_behind() {
    let boots = |line: &String| line.contains("qemu");
    interrupted_when(|dir| processes(dir).iter().any(boots) && guests_up(dir) < 6);
}

#[test]
fn ctrl_c_in_the_middle_of_the_work_leaves_nothing_behind() {
    interrupted_when(|dir| guests_up(dir) == 6);
}
