//! Who is behind a QMP socket: which process, and which life of it.
//!
//! The kernel names the process that listens on a unix socket (`SO_PEERCRED`). That is QEMU, unless
//! somebody opened the socket on QEMU's behalf (libvirt does) or stands in between (a proxy): so
//! its program is looked at before its memory is taken for the guest's. A life is told from the
//! next by pid and start time, or, where the process is not known, by the socket file itself.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sys::process::Identity;
use sys::procfs::program_of;

use super::qmp::Client;

/// Bits of the incarnation that hold the pid: Linux has at most 2^22.
const PID_BITS: u32 = 22;

/// The process behind a socket.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    /// Tells this life of the VM from all others.
    pub(super) incarnation: u64,
    /// QEMU's process, or why it is not known.
    pub(super) qemu: Result<u32, String>,
}

/// Finds out who is behind `client`, which was connected through `socket`.
pub(super) fn of(client: &Client, socket: &Path) -> Peer {
    let process = client.peer_pid().and_then(Identity::of);
    let qemu = match process {
        None => Err("QEMU's process is not visible from here (another PID namespace?)".to_owned()),
        Some(process) => check_program(process.pid),
    };
    let incarnation = match (process, &qemu) {
        (Some(process), Ok(_)) => of_process(process),
        _ => std::fs::metadata(socket).map_or(0, |file| {
            let made_ns = file.ctime().wrapping_mul(1_000_000_000).wrapping_add(file.ctime_nsec());
            made_ns.cast_unsigned() ^ file.ino().rotate_left(40)
        }),
    };
    Peer { incarnation, qemu }
}

/// Whether the life that `incarnation` names has ended for good: nothing is left at its socket, and
/// its process, if it was known by one, is gone.
pub(super) fn is_over(incarnation: u64, socket: &Path) -> bool {
    has_ended(incarnation) && matches!(socket.try_exists(), Ok(false))
}

/// Whether no process is the one that `incarnation` names. It says nothing of a life that is not
/// known by its process.
pub(super) fn has_ended(incarnation: u64) -> bool {
    let pid = incarnation & ((1 << PID_BITS) - 1);
    let process = u32::try_from(pid).ok().and_then(Identity::of);
    // One that has ended and whose parent has not asked yet is over, too.
    process.is_none_or(|process| of_process(process) != incarnation || !process.is_alive())
}

fn of_process(process: Identity) -> u64 {
    process.start_ticks << PID_BITS | u64::from(process.pid)
}

fn check_program(pid: u32) -> Result<u32, String> {
    let program = program_of(pid).map_err(|error| error.to_string())?;
    if is_qemu(&program) {
        return Ok(pid);
    }
    let program: String = program.chars().filter(|c| !c.is_control()).take(40).collect();
    Err(format!(
        "the socket belongs to process {pid}, `{program}`, which is not QEMU: \
         its memory is not the guest's"
    ))
}

/// The names that distributions give QEMU's system emulator.
fn is_qemu(program: &str) -> bool {
    program.starts_with("qemu-system") || program == "qemu-kvm" || program == "kvm"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_known_by_its_usual_names() {
        for name in ["qemu-system-x86_64", "qemu-system-x86", "qemu-kvm", "kvm"] {
            assert!(is_qemu(name), "{name}");
        }
        for name in ["libvirtd", "socat", "qemu-storage-daemon", ""] {
            assert!(!is_qemu(name), "{name}");
        }
    }
}
