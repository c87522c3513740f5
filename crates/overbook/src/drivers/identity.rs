//! Who is behind a QMP socket: which process, and which life of it.
//!
//! The kernel names the process that listens on a unix socket ([`sys::peer`]). That is QEMU, unless
//! somebody opened the socket on QEMU's behalf (libvirt does) or stands in between (a proxy): so
//! its program is looked at before its memory is taken for the guest's. A socket that has outlived
//! its process belongs to no VM. A life is told from the next by pid and start time, or, where the
//! process is not known, by the socket file itself.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use model::VmView;
use sys::peer::{self, PeerError};
use sys::process::Identity;
use sys::procfs::{self, program_of};

use super::qmp::Client;

/// Bits of the incarnation that hold the pid: Linux has at most 2^22.
const PID_BITS: u32 = 22;

/// The process behind a socket.
#[derive(Debug)]
pub(super) struct Peer {
    /// Tells this life of the VM from all others.
    pub(super) incarnation: u64,
    /// QEMU's process, or why it is not known.
    pub(super) qemu: Result<u32, String>,
    /// The user that it ran as when it began to listen.
    pub(super) uid: Option<u32>,
    process: Option<peer::Peer>,
}

impl Peer {
    /// Its process, QEMU's or not, if it is known.
    pub(super) fn process(&self) -> Option<Identity> {
        self.process.as_ref().map(|peer| peer.process)
    }

    /// Whether its process lives; `true` where the process is not known.
    pub(super) fn is_alive(&self) -> bool {
        self.process.as_ref().is_none_or(peer::Peer::is_alive)
    }
}

/// Finds out who is behind `client`, which was connected through `socket`.
///
/// # Errors
/// When the socket has outlived the process that it belongs to.
pub(super) fn of(client: &Client, socket: &Path) -> Result<Peer, PeerError> {
    let process = match client.peer() {
        Ok(peer) => match is_later_than(&peer, socket) {
            true => return Err(PeerError::Ended { pid: peer.process.pid, uid: peer.uid }),
            false => Ok(peer),
        },
        Err(error @ PeerError::Ended { .. }) => return Err(error),
        Err(error) => Err(error),
    };
    let qemu = match &process {
        Err(error) => Err(error.to_string()),
        Ok(peer) => check_program(peer.process),
    };
    let incarnation = match (&process, &qemu) {
        (Ok(peer), Ok(_)) => of_process(peer.process),
        _ => std::fs::metadata(socket).map_or(0, |file| {
            let made_ns = file.ctime().wrapping_mul(1_000_000_000).wrapping_add(file.ctime_nsec());
            made_ns.cast_unsigned() ^ file.ino().rotate_left(40)
        }),
    };
    let uid = process.as_ref().map_or_else(PeerError::uid, |peer| Some(peer.uid));
    Ok(Peer { incarnation, qemu, uid, process: process.ok() })
}

/// Whether a process that is known by its number alone began after its socket was made, and does
/// not hold it: then it has got the number of the one that listened. The wall clock may have been
/// set since, so times alone prove nothing.
fn is_later_than(peer: &peer::Peer, socket: &Path) -> bool {
    if peer.is_exact || peer::holds_listener(peer.process.pid, socket) {
        return false;
    }
    let made = std::fs::metadata(socket).and_then(|file| file.modified());
    let (Ok(made), Some(began)) = (made, peer.process.began()) else { return true };
    // Clock ticks are of 10 ms.
    began > made + std::time::Duration::from_secs(1)
}

/// The process that `incarnation` names, if it lives.
pub(super) fn alive(incarnation: u64) -> Option<Identity> {
    let process = process_in(incarnation)?;
    process.is_alive().then_some(process)
}

/// Whether the life that `incarnation` names has ended for good: nothing is left at its socket, and
/// its process, if it was known by one, is gone.
pub(super) fn is_over(incarnation: u64, socket: &Path) -> bool {
    has_ended(incarnation) && matches!(socket.try_exists(), Ok(false))
}

/// Whether no process is the one that `incarnation` names. It says nothing of a life that is not
/// known by its process.
pub(super) fn has_ended(incarnation: u64) -> bool {
    alive(incarnation).is_none()
}

fn process_in(incarnation: u64) -> Option<Identity> {
    let pid = u32::try_from(incarnation & ((1 << PID_BITS) - 1)).ok()?;
    Some(Identity { pid, start_ticks: incarnation >> PID_BITS })
}

/// QEMU's process, where a VM's is known: its view has the pid, and the life says when it began.
pub(crate) fn process_of(vm: &VmView) -> Option<Identity> {
    process_in(vm.incarnation).filter(|process| Some(process.pid) == vm.pid)
}

pub(super) fn of_process(process: Identity) -> u64 {
    process.start_ticks << PID_BITS | u64::from(process.pid)
}

/// QEMU's process, if this is one: any other program's memory is no guest's.
pub(super) fn check_program(process: Identity) -> Result<u32, String> {
    let pid = process.pid;
    let program = program_of(pid).map_err(|error| error.to_string())?;
    if is_qemu(&program) {
        return match procfs::owner_of_program(pid) {
            Some(uid) if ![0, rustix::process::geteuid().as_raw()].contains(&uid) => Err(format!(
                "the program of process {pid}, `{program}`, belongs to user {uid}: \
                 anybody can call a program so"
            )),
            _ => Ok(pid),
        };
    }
    let program: String = program.chars().filter(|c| !c.is_control()).take(40).collect();
    Err(format!(
        "process {pid} is `{program}`, which is not QEMU: \
         its memory is not the guest's"
    ))
}

/// The names that distributions give QEMU's system emulator.
pub(super) fn is_qemu(program: &str) -> bool {
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
