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
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
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

/// What a process that talks to other hosts may do as well: sockets are allowed apart, and files
/// where they are only read.
const OF_THE_NETWORK: &[libc::c_long] = &[
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    // Looking a name up reads files of the system, on a thread of its own.
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_pread64,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_getegid,
    libc::SYS_getgid,
    libc::SYS_uname,
    libc::SYS_prlimit64,
    libc::SYS_sched_getaffinity,
];

/// From now on this thread can use what is open, and nothing else.
///
/// # Errors
/// The kernel has no seccomp, or whoever started this process does not let it: it has given up what
/// it could.
pub fn to_what_is_open() -> io::Result<()> {
    give_up(rules().map_err(io::Error::other)?)
}

/// From now on this thread, and all that it starts, can use what is open, talk to other hosts, and
/// read the files that anybody may read or that are its user's; nothing else. It has no sockets of
/// this host's programs.
///
/// # Errors
/// As [`to_what_is_open`].
pub fn to_the_network() -> io::Result<()> {
    give_up(rules().and_then(of_the_network).map_err(io::Error::other)?)
}

fn give_up(rules: Rules) -> io::Result<()> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    seccompiler::apply_filter(&filter(rules).map_err(io::Error::other)?).map_err(io::Error::other)
}

/// The calls that are allowed; with rules, where one of these holds.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules() -> Result<Rules, BackendError> {
    let mut rules: Rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let is_data = masked(2, libc::PROT_EXEC, 0)?;
    rules.insert(libc::SYS_mmap, vec![SeccompRule::new(vec![is_data.clone()])?]);
    rules.insert(libc::SYS_mprotect, vec![SeccompRule::new(vec![is_data])?]);
    rules.insert(libc::SYS_ioctl, vec![is(1, libc::FIONBIO)?]);
    Ok(rules)
}

fn of_the_network(mut rules: Rules) -> Result<Rules, BackendError> {
    rules.extend(OF_THE_NETWORK.iter().map(|call| (*call, Vec::new())));
    // AF_NETLINK: which kinds of address this host has.
    let families = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let families = families.map(|family| is(0, family.unsigned_abs().into()));
    rules.insert(libc::SYS_socket, families.into_iter().collect::<Result<_, _>>()?);
    // No bit by which a file is written or made.
    let written = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE;
    let is_read = masked(2, written & !libc::O_DIRECTORY, libc::O_RDONLY)?;
    rules.insert(libc::SYS_openat, vec![SeccompRule::new(vec![is_read])?]);
    // Parts of the C library that look names up are loaded when they are needed: what is executable
    // is not written.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let both = libc::PROT_WRITE | libc::PROT_EXEC;
        let either = [0, libc::PROT_WRITE, libc::PROT_EXEC];
        let either = either.map(|prot| SeccompRule::new(vec![masked(2, both, prot)?]));
        rules.insert(call, either.into_iter().collect::<Result<_, _>>()?);
    }
    Ok(rules)
}

/// That the argument of this number is so.
fn is(argument: u8, value: u64) -> Result<SeccompRule, BackendError> {
    let (length, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
    SeccompRule::new(vec![SeccompCondition::new(argument, length, equal, value)?])
}

/// That these bits of the argument of this number are so.
fn masked(argument: u8, bits: i32, are: i32) -> Result<SeccompCondition, BackendError> {
    let equal = SeccompCmpOp::MaskedEq(bits.unsigned_abs().into());
    let are = are.unsigned_abs().into();
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, equal, are)
}

fn filter(rules: Rules) -> Result<BpfProgram, BackendError> {
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

    #[test]
    fn what_talks_to_other_hosts_talks_to_no_program_of_this_one_and_changes_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, file) = (dir.path().join("s"), dir.path().join("f"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        fs::write(&file, "x").unwrap();
        let server = std::net::TcpListener::bind("localhost:0").unwrap();
        let at = server.local_addr().unwrap();
        let own = rustix::process::getpid();
        let confined = thread::spawn(move || {
            to_the_network().unwrap();
            let looked_up = thread::spawn(move || {
                std::net::TcpStream::connect(("localhost", at.port())).map(drop)
            });
            looked_up.join().unwrap().unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"x");
            let refused = [
                fs::write(&file, "y"),
                fs::File::create(file.with_extension("new")).map(drop),
                fs::remove_file(&file),
                UnixStream::connect(&socket).map(drop),
                Command::new("/bin/true").status().map(drop),
                rustix::process::test_kill_process(own).map_err(io::Error::from),
            ];
            refused.map(|outcome| outcome.map_err(|error| error.kind()))
        });
        let _accepted = server.accept().unwrap();
        assert_eq!(confined.join().unwrap(), [Err(ErrorKind::PermissionDenied); 6]);
        assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"x");
    }

    unsafe fn executable() -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = ProtFlags::READ | ProtFlags::EXEC;
        // SAFETY: nothing else is mapped there.
        unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, flags, MapFlags::PRIVATE) }?;
        Ok(())
    }
}
