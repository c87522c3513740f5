//! Identifies the process behind a QMP socket, and its incarnation.
//!
//! The kernel names the process that listens on a unix socket ([`sys::peer`]). That is QEMU,
//! unless another process opened the socket for QEMU (libvirt does) or is a proxy. So its program
//! is checked before its memory is taken for the guest's. A socket that has outlived its process
//! belongs to no VM. PID and start time tell one incarnation from the next or, if the process is
//! not known, the socket file itself.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use model::VmView;
use sys::peer::{self, PeerError};
use sys::process::Identity;
use sys::procfs::{self, program_of};

use super::qmp::QmpClient;

/// Bits of the incarnation that hold the PID: Linux has at most 2^22.
const PID_BITS: u32 = 22;

/// The process behind a socket.
#[derive(Debug)]
pub(super) struct QemuPeer {
    /// Distinguishes this incarnation of the VM from all others.
    pub(super) incarnation: u64,
    /// PID of QEMU, or why it is not known.
    pub(super) qemu: Result<u32, String>,
    /// User ID of the process when it began to listen.
    pub(super) uid: Option<u32>,
    process: Option<peer::Peer>,
}

impl QemuPeer {
    /// The process, whether it is QEMU or not, if it is known.
    pub(super) fn process(&self) -> Option<Identity> {
        self.process.as_ref().map(|peer| peer.process)
    }

    /// Whether the process is alive; `true` if the process is not known.
    pub(super) fn is_alive(&self) -> bool {
        self.process.as_ref().is_none_or(peer::Peer::is_alive)
    }
}

/// Identifies the process behind `client`, which was connected through `socket`.
///
/// # Errors
/// The socket has outlived the process that it belongs to.
pub(super) fn of(client: &QmpClient, socket: &Path) -> Result<QemuPeer, PeerError> {
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
    Ok(QemuPeer { incarnation, qemu, uid, process: process.ok() })
}

/// Whether the PID of the socket's listener has been reused. Only a process that is known by its
/// PID alone can be wrong: it began after the socket was made, and does not hold it. The wall
/// clock may have been set since, so the times alone prove nothing.
fn is_later_than(peer: &peer::Peer, socket: &Path) -> bool {
    if peer.is_exact || peer::holds_listener(peer.process.pid, socket) {
        return false;
    }
    let made = std::fs::metadata(socket).and_then(|file| file.modified());
    let (Ok(made), Some(began)) = (made, peer.process.began()) else { return true };
    // Clock ticks last 10 ms.
    began > made + std::time::Duration::from_secs(1)
}

/// The process of this `incarnation`, if it is alive.
pub(super) fn alive(incarnation: u64) -> Option<Identity> {
    let process = process_in(incarnation)?;
    process.is_alive().then_some(process)
}

/// Whether this `incarnation` has ended for certain: its socket is gone, and so is its process,
/// if that was known.
pub(super) fn is_over(incarnation: u64, socket: &Path) -> bool {
    has_ended(incarnation)
        && (super::libvirt::is_place(socket) || matches!(socket.try_exists(), Ok(false)))
}

/// Whether the process of this `incarnation` is gone. The answer is meaningless for an
/// incarnation without a known process.
pub(super) fn has_ended(incarnation: u64) -> bool {
    alive(incarnation).is_none()
}

fn process_in(incarnation: u64) -> Option<Identity> {
    let pid = u32::try_from(incarnation & ((1 << PID_BITS) - 1)).ok()?;
    Some(Identity { pid, start_ticks: incarnation >> PID_BITS })
}

/// QEMU's process, if it is known: the view has its PID, and the incarnation its start time.
pub fn process_of(vm: &VmView) -> Option<Identity> {
    process_in(vm.incarnation).filter(|process| Some(process.pid) == vm.pid)
}

pub(super) fn of_process(process: Identity) -> u64 {
    process.start_ticks << PID_BITS | u64::from(process.pid)
}

/// The PID of the process if its program is QEMU: the memory of any other program is not the
/// guest's.
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

/// Names that distributions give to QEMU's system emulator.
#[must_use]
pub fn is_qemu(program: &str) -> bool {
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
