//! The QEMU process of a domain.
//!
//! libvirt's calls do not tell it, but libvirt keeps its PID in a file that only root writes.

use std::path::Path;

use model::libvirt::DomainProcess;
use sys::process::Identity;

/// The directory in which libvirt keeps the PIDs of its QEMUs.
const PIDS: &str = "/run/libvirt/qemu";

/// The process of the domain with this name; `None`: it does not run, or libvirt tells no PID.
pub(crate) fn process_of(name: &str) -> Option<DomainProcess> {
    process_in(Path::new(PIDS), name)
}

fn process_in(directory: &Path, name: &str) -> Option<DomainProcess> {
    if name.contains('/') {
        return None;
    }
    let text = std::fs::read_to_string(directory.join(format!("{name}.pid"))).ok()?;
    let Identity { pid, start_ticks } =
        Identity::of(text.trim().parse().ok()?).filter(Identity::is_alive)?;
    Some(DomainProcess { pid, start_ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start_and_a_path_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let own = Identity::own().unwrap();
        std::fs::write(dir.path().join("web-1.pid"), own.pid.to_string()).unwrap();
        let found = process_in(dir.path(), "web-1").unwrap();
        assert_eq!((found.pid, found.start_ticks), (own.pid, own.start_ticks));
        // No process has this PID.
        std::fs::write(dir.path().join("web-2.pid"), "4194305").unwrap();
        for name in ["web-2", "web-3", "../web-1", "x/../web-1"] {
            assert_eq!(process_in(dir.path(), name), None, "{name}");
        }
    }
}
