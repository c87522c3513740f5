//! A process that gives up all that it does not need.
//!
//! Problem: code that reads what strangers send may hold a fault that lets them run code of their
//! own; with the rights of the whole program that would be the host's end. Idea: such code runs in
//! a process of its own, which opens what it needs, and then can only use what it has open: it has
//! no capabilities, never gets any again, and may make the system calls of [`ALLOWED`] alone. None
//! of these opens a file, connects to anything, starts or signals a process, or makes memory
//! executable.
//!
//! A call that is not allowed fails with `EPERM` and harms nobody: a C library that tries a newer
//! call first falls back to an older one.

use std::collections::BTreeMap;
use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// What a process that is confined may still ask of the kernel.
const ALLOWED: &[libc::c_long] = &[
    // What is open: to use it, and to close it.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_close,
    // As is `ioctl`, to have it not wait.
    libc::SYS_fcntl,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    // To wait for it.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_ctl,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    // Memory; `mmap` and `mprotect` are allowed where it is not executable.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_getrandom,
    // Signals that it gets, and its own end.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// From now on this thread can use what is open, and nothing else.
///
/// # Errors
/// The kernel has no seccomp, or whoever started this process does not let it: it has given up what
/// it could.
pub fn to_what_is_open() -> io::Result<()> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    seccompiler::apply_filter(&filter().map_err(io::Error::other)?).map_err(io::Error::other)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let (dword, masked) = (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq);
    let exec = libc::PROT_EXEC.unsigned_abs().into();
    let is_data = SeccompCondition::new(2, dword.clone(), masked(exec), 0)?;
    let is_no_wait = SeccompCondition::new(1, dword, SeccompCmpOp::Eq, libc::FIONBIO)?;
    for (call, condition) in [
        (libc::SYS_mmap, is_data.clone()),
        (libc::SYS_mprotect, is_data),
        (libc::SYS_ioctl, is_no_wait),
    ] {
        rules.insert(call, vec![SeccompRule::new(vec![condition])?]);
    }
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, refused, SeccompAction::Allow, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{ErrorKind, Read, Write};
    use std::net::UdpSocket;
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::thread;

    use super::*;

    /// A thread is confined by itself: the others of this program go on.
    #[test]
    fn what_is_open_can_be_used_and_nothing_else_be_opened_started_or_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let own = rustix::process::getpid();
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let confined = thread::spawn(move || {
            to_what_is_open().unwrap();
            ours.write_all(b"x").unwrap();
            let mut read = [0];
            ours.read_exact(&mut read).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            drop(accepted);
            // More than the allocator has at hand: memory can still be had.
            let memory = vec![7_u8; 64 << 20];
            let refused = [
                fs::read("/etc/passwd").map(drop),
                fs::write("/tmp/overbook-confined", "x"),
                UnixStream::connect(&socket).map(drop),
                UdpSocket::bind("127.0.0.1:0").map(drop),
                Command::new("/bin/true").status().map(drop),
                rustix::process::test_kill_process(own).map_err(io::Error::from),
                // SAFETY: a mapping of its own; the kernel refuses it.
                unsafe { executable() },
            ];
            (read[0], memory.len(), refused.map(|outcome| outcome.map_err(|e| e.kind())))
        });
        let mut read = [0];
        theirs.read_exact(&mut read).unwrap();
        theirs.write_all(b"y").unwrap();
        let path = dir.path().join("s");
        let _connected = UnixStream::connect(path).unwrap();
        let (got, memory, refused) = confined.join().unwrap();
        assert_eq!((read[0], got, memory), (b'x', b'y', 64 << 20));
        assert_eq!(refused, [Err(ErrorKind::PermissionDenied); 7]);
        assert!(fs::read("/etc/passwd").is_ok(), "the rest of the program is confined, too");
    }

    unsafe fn executable() -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = ProtFlags::READ | ProtFlags::EXEC;
        // SAFETY: nothing else is mapped there.
        unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, flags, MapFlags::PRIVATE) }?;
        Ok(())
    }
}
