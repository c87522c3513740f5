//! The processes of the host with memory that KSM may merge. Any program can have marked some
//! (`MADV_MERGEABLE`, `PR_SET_MEMORY_MERGE`, systemd's `MemoryKSM=`), not only QEMU.
//!
//! Since Linux 6.16 a line of `/proc/PID/ksm_stat` reports it, at the cost of a walk over the
//! process's mappings. Older kernels report it only in `smaps` (`VmFlags: mg`), which also counts
//! every page. That is read mapping by mapping, up to the first marked one. Frequent callers
//! should consider the cost.
//!
//! A process for which the kernel does not report it is listed as unknown, not as one without
//! mergeable memory. A process whose first thread has ended shows its memory through its other
//! threads only. Left out: memory in a pid namespace that is not visible ([`sees_all`]), and
//! memory that becomes mergeable a moment later.
//!
//! Source: `fs/proc/base.c`, `proc_pid_ksm_stat`; `fs/proc/task_mmu.c`, `show_smap_vma_flags`.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::procfs::{ProcError, program_of};

/// A process whose memory KSM may merge, or for which that is unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// The program that it runs; its own name if its file cannot be seen.
    pub program: String,
    /// `None`: it has mergeable memory; otherwise the reason why that is not known.
    pub unknown: Option<String>,
}

/// All such processes, by process id.
///
/// # Errors
/// When not every process is visible.
pub fn processes() -> io::Result<Vec<Process>> {
    if !sees_all() {
        return Err(io::Error::other("not every process of the host can be seen from here"));
    }
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let unknown = match of_process(pid) {
            Ok(false) | Err(ProcError::Gone { .. }) => continue,
            Ok(true) => None,
            Err(error) => Some(error.to_string()),
        };
        let program = program_of(pid).unwrap_or_default();
        found.push(Process { pid, program, unknown });
    }
    found.sort_by_key(|process| process.pid);
    Ok(found)
}

/// The name of the first pid namespace (`PROC_PID_INIT_INO`).
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// Whether `/proc` shows every process of the host: this is the first pid namespace, and no
/// process is hidden (`hidepid`); the first process would be.
fn sees_all() -> bool {
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    namespace.as_os_str() == FIRST_NAMESPACE && Path::new("/proc/1/status").exists()
}

/// Whether a process has mergeable memory.
fn of_process(pid: u32) -> Result<bool, ProcError> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    if let Some(is_mergeable) = if_any(of_task(&process))? {
        return Ok(is_mergeable);
    }
    // It is a kernel thread; or its first thread has ended, and the others have its memory.
    let tasks = process.join("task");
    let failed = |error| ProcError::from_io(&tasks, error);
    for task in fs::read_dir(&tasks).map_err(failed)? {
        if let Some(is_mergeable) = if_any(of_task(&task.map_err(failed)?.path()))? {
            return Ok(is_mergeable);
        }
    }
    Ok(false)
}

/// Treats an ended thread as one without memory. Some kernels report a thread without memory as
/// ended.
fn if_any(known: Result<Option<bool>, ProcError>) -> Result<Option<bool>, ProcError> {
    match known {
        Err(ProcError::Gone { .. }) => Ok(None),
        known => known,
    }
}

/// Whether a process has mergeable memory, read through one thread; `None`: that has no memory.
fn of_task(task: &Path) -> Result<Option<bool>, ProcError> {
    match by_stat(task)? {
        KsmStat::Known(is_mergeable) => Ok(is_mergeable),
        KsmStat::Unsaid => by_smaps(task),
    }
}

/// The content of `ksm_stat`.
enum KsmStat {
    /// `None`: there is no memory.
    Known(Option<bool>),
    /// This kernel does not report it there.
    Unsaid,
}

fn by_stat(task: &Path) -> Result<KsmStat, ProcError> {
    let path = task.join("ksm_stat");
    let text = match crate::procfs::read(&path) {
        Ok(text) => text,
        // A kernel before 6.1, or without KSM; `smaps` shows whether the process exists.
        Err(ProcError::Gone { .. }) => return Ok(KsmStat::Unsaid),
        Err(error) => return Err(error),
    };
    parse_stat(&path, &text)
}

fn parse_stat(path: &Path, text: &str) -> Result<KsmStat, ProcError> {
    if text.is_empty() {
        return Ok(KsmStat::Known(None));
    }
    const FIELD: &str = "ksm_mergeable:";
    match text.lines().find_map(|line| line.strip_prefix(FIELD)).map(str::trim) {
        None => Ok(KsmStat::Unsaid),
        Some("yes") => Ok(KsmStat::Known(Some(true))),
        Some("no") => Ok(KsmStat::Known(Some(false))),
        Some(other) => Err(ProcError::malformed(path, FIELD, other, "yes or no")),
    }
}

fn by_smaps(task: &Path) -> Result<Option<bool>, ProcError> {
    let path = task.join("smaps");
    let failed = |error| ProcError::from_io(&path, error);
    marks(BufReader::new(File::open(&path).map_err(failed)?)).map_err(failed)
}

/// Whether a mapping in `smaps` is marked; `None`: there are no mappings. Stops at the first
/// marked one.
fn marks(smaps: impl Read) -> io::Result<Option<bool>> {
    let mut smaps = BufReader::new(smaps);
    let mut line = Vec::new();
    let mut has_mappings = false;
    loop {
        line.clear();
        // Names of files may be invalid UTF-8.
        if smaps.read_until(b'\n', &mut line)? == 0 {
            return Ok(has_mappings.then_some(false));
        }
        has_mappings = true;
        let flags = line.strip_prefix(b"VmFlags:").unwrap_or_default();
        if flags.split(u8::is_ascii_whitespace).any(|flag| flag == b"mg") {
            return Ok(Some(true));
        }
    }
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use super::*;

    /// The answers of both files about this process.
    fn both() -> Vec<Option<bool>> {
        let task = PathBuf::from("/proc/self");
        let mut both = vec![by_smaps(&task).unwrap()];
        if let KsmStat::Known(known) = by_stat(&task).unwrap() {
            both.push(known);
        }
        both
    }

    #[test]
    fn memory_that_is_marked_is_seen_in_either_way() {
        let ksm = std::fs::metadata("/sys/kernel/mm/ksm");
        let Some(_) = requires(Requirement::Ksm, ksm) else { return };
        assert!(both().iter().all(|known| *known == Some(false)), "{:?}", both());
        let (size, flags) = (1 << 16, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let area = unsafe { mmap_anonymous(std::ptr::null_mut(), size, flags, MapFlags::PRIVATE) };
        let area = area.unwrap();
        // SAFETY: the mapping is ours, and marking it changes no content.
        unsafe { madvise(area, size, Advice::LinuxMergeable) }.unwrap();
        assert!(both().iter().all(|known| *known == Some(true)), "{:?}", both());
        let own = std::process::id();
        if sees_all() {
            let found = processes().unwrap().into_iter().find(|process| process.pid == own);
            assert_eq!(found.unwrap().unknown, None);
        }
        // SAFETY: no reference into it is left.
        unsafe { munmap(area, size) }.unwrap();
        assert!(!of_process(own).unwrap());
    }

    #[test]
    fn a_thread_of_the_kernel_has_none_and_a_process_that_has_ended_is_gone() {
        if sees_all() {
            assert!(!of_process(2).unwrap(), "kthreadd");
        }
        assert!(matches!(of_process(u32::MAX), Err(ProcError::Gone { .. })));
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_is_known_by_its_others() {
        let task = tempfile::tempdir().unwrap();
        std::fs::write(task.path().join("ksm_stat"), "").unwrap();
        assert_eq!(of_task(task.path()).unwrap(), None);
        std::fs::write(task.path().join("ksm_stat"), "ksm_rmap_items 0\n").unwrap();
        std::fs::write(task.path().join("smaps"), "").unwrap();
        assert_eq!(of_task(task.path()).unwrap(), None, "an older kernel");
    }

    #[test]
    fn what_older_kernels_say_is_read_as_far_as_the_first_mark() {
        let mapping = |flags: &str| format!("7f00-7f01 rw-p 0 00:00 0 mg\nVmFlags: {flags} \n");
        let said = |text: &str| marks(text.as_bytes()).unwrap();
        assert_eq!(said(""), None);
        assert_eq!(said(&mapping("rd wr mr")), Some(false), "`mg` is a name there");
        assert_eq!(said(&[mapping("rd"), mapping("rd wr mg sd")].concat()), Some(true));
        struct Fails;
        impl Read for Fails {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::PermissionDenied.into())
            }
        }
        assert_eq!(marks(mapping("mg").as_bytes().chain(Fails)).unwrap(), Some(true));
        assert!(marks(mapping("rd").as_bytes().chain(Fails)).is_err(), "not known is not none");
    }

    #[test]
    fn a_word_that_is_neither_yes_nor_no_is_no_answer() {
        let path = Path::new("ksm_stat");
        assert!(parse_stat(path, "ksm_merge_any: yes\nksm_mergeable: maybe\n").is_err());
        assert!(matches!(parse_stat(path, "ksm_merge_any: yes\n"), Ok(KsmStat::Unsaid)));
    }
}
