//! Confines a process to the rights that it needs.
//!
//! Problem: code that parses input from the network may have a bug that lets an attacker run
//! code. With the rights of the whole program, that would compromise the host. Idea: such code
//! runs in a process of its own. The process opens what it needs and can then use only its open
//! files: it has no capabilities, can never gain any, and may make only the system calls of
//! [`ALLOWED`], some of them with certain arguments. None of these calls opens a file, connects,
//! starts or signals a process, or makes memory executable.
//!
//! A call that is not allowed fails with `EPERM` and does no harm: a C library that tries a newer
//! call first falls back to an older one.
//!
//! **Why arguments count.** The user stays root, and that alone gives rights over root's other
//! processes. `fcntl` could make the kernel signal any of them (`F_SETOWN`, `F_SETSIG`),
//! `prlimit64` could kill them by a limit, `sendto` could connect (`MSG_FASTOPEN`), `shutdown`
//! could end a connection that other processes share with this one, and `clone` could make a
//! namespace with all capabilities.

use std::collections::BTreeMap;
use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use seccompiler::{
    BackendError, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use crate::log;

/// The calls that a confined process may make with any arguments.
const ALLOWED: &[libc::c_long] = &[
    // Use and close open files.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    // Wait for them.
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
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_getrandom,
    // Receive signals, and exit.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// The additional calls, with any arguments, of a process that talks to other hosts.
const OF_THE_NETWORK: &[libc::c_long] = &[
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    // A name lookup reads files of the system, on a thread of its own.
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
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_getegid,
    libc::SYS_getgid,
    libc::SYS_uname,
    libc::SYS_sched_getaffinity,
];

/// Flags of `clone` that make namespaces.
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Confines this thread to its open files.
///
/// # Errors
/// The kernel has no seccomp, or this process may not give up its rights. It has then given up
/// those that it could.
pub fn to_what_is_open() -> io::Result<()> {
    give_up(rules())
}

/// Confines this thread, and those that it starts, to its open files, to connections to other
/// hosts, and to reading files that are world-readable or readable by its user. It cannot open
/// Unix sockets.
///
/// # Errors
/// As [`to_what_is_open`].
pub fn to_the_network() -> io::Result<()> {
    // A C library uses the older call to start a thread only if the kernel does not know this
    // one.
    let one = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    install(one, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS.unsigned_abs()))?;
    give_up(rules().and_then(of_the_network))
}

/// Gives up all that can be given up, even if one part fails.
fn give_up(rules: Result<Rules, BackendError>) -> io::Result<()> {
    log::keep_to_stderr();
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    let capabilities = set_capabilities(None, sets);
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    install(rules.map_err(io::Error::other)?, refused, SeccompAction::Allow)?;
    Ok(capabilities?)
}

/// Installs a filter: `these` for the calls of `rules`, `others` for all others.
fn install(rules: Rules, others: SeccompAction, these: SeccompAction) -> io::Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH);
    let filter = arch.and_then(|arch| SeccompFilter::new(rules, others, these, arch));
    let program = filter.and_then(seccompiler::BpfProgram::try_from).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

/// The allowed calls; one with rules is allowed if one of its rules holds.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules() -> Result<Rules, BackendError> {
    let mut rules: Rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let is_data = || masked(2, libc::PROT_EXEC, 0);
    rules.insert(libc::SYS_mmap, vec![all([is_data()])?]);
    rules.insert(libc::SYS_mprotect, vec![all([is_data()])?]);
    rules.insert(libc::SYS_ioctl, vec![all([is(1, libc::FIONBIO)])?]);
    // `sendto` only to the connected peer.
    rules.insert(libc::SYS_sendto, vec![all([is_null(4)])?]);
    // `shutdown` only of the sending direction, and not of standard output and error, which other
    // processes share.
    let is_own = SeccompCondition::new(0, Length::Dword, Is::Gt, 2);
    rules.insert(
        libc::SYS_shutdown,
        vec![all([is_own, is(1, libc::SHUT_WR.unsigned_abs().into())])?],
    );
    let commands = [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL];
    let mut of_fcntl = Vec::new();
    for command in commands {
        of_fcntl.push(all([is(1, command.unsigned_abs().into())])?);
    }
    let sets = is(1, libc::F_SETFL.unsigned_abs().into());
    of_fcntl.push(all([sets, masked(2, libc::O_ASYNC, 0)])?);
    rules.insert(libc::SYS_fcntl, of_fcntl);
    Ok(rules)
}

fn of_the_network(mut rules: Rules) -> Result<Rules, BackendError> {
    rules.extend(OF_THE_NETWORK.iter().map(|call| (*call, Vec::new())));
    // NETLINK_ROUTE: tells which kinds of address this host has.
    let family = |family: libc::c_int| is(0, family.unsigned_abs().into());
    let of_routes = is(2, libc::NETLINK_ROUTE.unsigned_abs().into());
    let sockets = vec![
        all([family(libc::AF_INET)])?,
        all([family(libc::AF_INET6)])?,
        all([family(libc::AF_NETLINK), of_routes])?,
    ];
    rules.insert(libc::SYS_socket, sockets);
    // Only flags that neither write nor create a file.
    let written = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE;
    let is_read = masked(2, written & !libc::O_DIRECTORY, libc::O_RDONLY);
    rules.insert(libc::SYS_openat, vec![all([is_read])?]);
    // The C library loads its parts for name lookups on demand, so memory may be writable or
    // executable, but not both.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let both = libc::PROT_WRITE | libc::PROT_EXEC;
        let either = [0, libc::PROT_WRITE, libc::PROT_EXEC];
        let either = either.map(|prot| all([masked(2, both, prot)]));
        rules.insert(call, either.into_iter().collect::<Result<_, _>>()?);
    }
    // Only a thread, not a process.
    let is_thread = masked(0, libc::CLONE_THREAD | NAMESPACES, libc::CLONE_THREAD);
    rules.insert(libc::SYS_clone, vec![all([is_thread])?]);
    // The earlier filter refuses it.
    rules.insert(libc::SYS_clone3, Vec::new());
    rules.insert(libc::SYS_prctl, vec![all([is(0, libc::PR_SET_NAME.unsigned_abs().into())])?]);
    // Only reading its own limits.
    rules.insert(libc::SYS_prlimit64, vec![all([is(0, 0), is_null(2)])?]);
    Ok(rules)
}

fn all<const N: usize>(
    conditions: [Result<SeccompCondition, BackendError>; N],
) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?)
}

/// The argument with this number has this value.
fn is(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, Length::Dword, Is::Eq, value)
}

/// The pointer argument is null.
fn is_null(argument: u8) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, Length::Qword, Is::Eq, 0)
}

/// `bits` of the argument with this number equal `are`.
fn masked(argument: u8, bits: i32, are: i32) -> Result<SeccompCondition, BackendError> {
    let equal = Is::MaskedEq(u64::from(bits.cast_unsigned()));
    SeccompCondition::new(argument, Length::Dword, equal, u64::from(are.cast_unsigned()))
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

    /// A thread is confined alone: the other threads of this program continue.
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
            // More than the allocator has in store, so it must map new memory.
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
        // A connection waits in its backlog.
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
        assert_eq!(confined.join().unwrap(), [Err(ErrorKind::PermissionDenied); 6]);
        assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"x");
    }

    /// Calls that could make the kernel kill this process, directly or by a limit.
    fn by_way_of_the_kernel(own: i32) -> [libc::c_long; 5] {
        /// By `linux/fcntl.h`.
        const F_SETSIG: libc::c_long = 10;
        let limit = [1_u64, 1];
        let raw = |call, [a, b, c, d]: [libc::c_long; 4]| {
            // SAFETY: the kernel refuses it; if it did not, the test should end.
            unsafe { libc::syscall(call, a, b, c, d) }
        };
        let limit = std::ptr::from_ref(&limit) as libc::c_long;
        [
            raw(libc::SYS_fcntl, [0, libc::F_SETOWN.into(), own.into(), 0]),
            raw(libc::SYS_fcntl, [0, F_SETSIG, libc::SIGKILL.into(), 0]),
            raw(libc::SYS_fcntl, [0, libc::F_SETFL.into(), libc::O_ASYNC.into(), 0]),
            raw(libc::SYS_prlimit64, [own.into(), libc::RLIMIT_CPU.into(), limit, 0]),
            raw(libc::SYS_shutdown, [2, libc::SHUT_WR.into(), 0, 0]),
        ]
    }

    #[test]
    fn no_call_that_is_allowed_has_the_kernel_do_harm() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        for confine in [to_what_is_open as fn() -> io::Result<()>, to_the_network] {
            let confined = thread::spawn(move || {
                confine().unwrap();
                let outcomes = by_way_of_the_kernel(own);
                // SAFETY: it forks a process, or is refused.
                let forked = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
                let space = libc::CLONE_NEWUSER | libc::CLONE_THREAD;
                // SAFETY: it is refused.
                let spaced = unsafe { libc::syscall(libc::SYS_clone, space, 0, 0, 0, 0) };
                (outcomes, forked, spaced)
            });
            assert_eq!(confined.join().unwrap(), ([-1; 5], -1, -1));
        }
    }

    unsafe fn executable() -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = ProtFlags::READ | ProtFlags::EXEC;
        // SAFETY: nothing else is mapped there.
        unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, flags, MapFlags::PRIVATE) }?;
        Ok(())
    }
}
