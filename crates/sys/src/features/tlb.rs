//! Tells whether this machine counts data-TLB misses: virtual machines often have no such
//! counter.
//!
//! Source: perf_event_open(2). `PerfEventAttr` is the first published size of the kernel's
//! structure (`PERF_ATTR_SIZE_VER0`); a test compares it with the kernel's header.

use std::os::fd::{FromRawFd, OwnedFd};

const TYPE_HW_CACHE: u32 = 3;
const CACHE_DTLB: u64 = 3;
const CACHE_OP_READ: u64 = 0;
const CACHE_RESULT_MISS: u64 = 1;
const FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const THIS_THREAD: libc::pid_t = 0;
const ANY_CPU: libc::c_int = -1;
const NO_GROUP: libc::c_int = -1;

#[derive(Default)]
#[repr(C)]
struct PerfEventAttr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    bp_addr: u64,
}

pub(super) fn misses() -> Result<String, String> {
    match open() {
        Ok(_) => Ok("perf counts dTLB-load-misses".to_owned()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            Err("this CPU, or the hypervisor below, has no such counter".to_owned())
        }
        Err(error) => Err(format!("perf_event_open: {error}")),
    }
}

fn open() -> std::io::Result<OwnedFd> {
    let attr = PerfEventAttr {
        kind: TYPE_HW_CACHE,
        size: u32::try_from(size_of::<PerfEventAttr>()).unwrap_or_default(),
        config: CACHE_DTLB | CACHE_OP_READ << 8 | CACHE_RESULT_MISS << 16,
        ..PerfEventAttr::default()
    };
    let attr = &raw const attr;
    // SAFETY: the kernel reads `size` bytes of `attr`, which has them, and writes nothing there.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            attr,
            THIS_THREAD,
            ANY_CPU,
            NO_GROUP,
            FLAG_FD_CLOEXEC,
        )
    };
    let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0);
    let fd = fd.ok_or_else(std::io::Error::last_os_error)?;
    // SAFETY: a fresh descriptor with no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use requires::{Requirement, ensure, requires};

    use super::*;

    #[test]
    fn the_structure_is_the_kernels() {
        let dir = tempfile::tempdir().unwrap();
        let (source, program) = (dir.path().join("attr.c"), dir.path().join("attr"));
        let text = "#include <linux/perf_event.h>\n#include <stddef.h>\n#include <stdio.h>\n\
            #define O(f) (int) offsetof(struct perf_event_attr, f)\n\
            int main(void) { printf(\"%d %d %d %d %d %d %d %d\", PERF_ATTR_SIZE_VER0, O(config), \
            O(read_format), O(wakeup_events), O(bp_addr), PERF_TYPE_HW_CACHE, \
            PERF_COUNT_HW_CACHE_DTLB, PERF_COUNT_HW_CACHE_RESULT_MISS); }\n";
        std::fs::write(&source, text).unwrap();
        let built = Command::new("cc").arg(&source).arg("-o").arg(&program).status();
        let built = built.map_err(|error| error.to_string());
        let built = built.and_then(|status| ensure(status.success(), status));
        let Some(()) = requires(Requirement::Compiler, built) else { return };
        let output = Command::new(&program).output().unwrap().stdout;
        let ours = [
            size_of::<PerfEventAttr>(),
            offset_of!(PerfEventAttr, config),
            offset_of!(PerfEventAttr, read_format),
            offset_of!(PerfEventAttr, wakeup_events),
            offset_of!(PerfEventAttr, bp_addr),
            TYPE_HW_CACHE as usize,
            usize::try_from(CACHE_DTLB).unwrap(),
            usize::try_from(CACHE_RESULT_MISS).unwrap(),
        ];
        let ours = ours.map(|number| number.to_string()).join(" ");
        assert_eq!(String::from_utf8(output).unwrap(), ours);
    }
}
