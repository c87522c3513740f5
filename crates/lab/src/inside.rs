//! Libraries that the lab loads into a QEMU process: Overbook's shim (as a user would, by
//! `LD_PRELOAD`), and the tracer, a plugin of QEMU's emulator that records the pages that the
//! guest touches.
//!
//! Both libraries lie next to Overbook's programs, or where the package installs them.

use std::path::PathBuf;

use sys::process::Spawn;

use crate::command;
use crate::lab::LabError;
use crate::machine::{Files, MachineSpec};

pub(crate) const SHIM: &str = "liboverbook_shim.so";
/// The same with the paper's hot set, which only experiments have (`make experiments`).
pub(crate) const SHIM_WITH_HOT_SET: &str = "liboverbook_shim_hot_set.so";
pub(crate) const TRACER: &str = "liboverbook_tracer.so";
/// Where the package installs programs and libraries that no user runs by hand.
const INSTALLED: &str = "/usr/lib/overbook";
/// QEMU gives guests RAM in multiples of this.
const RAM_UNIT_BYTES: u64 = 8192;

/// The same QEMU with the libraries that `spec` asks for.
pub(crate) fn equip(mut qemu: Spawn, spec: &MachineSpec, files: &Files) -> Result<Spawn, LabError> {
    if spec.shim {
        let shim = match spec.older_shim {
            true => command::older_program(SHIM)?,
            false => built(if spec.hot_set { SHIM_WITH_HOT_SET } else { SHIM })?,
        };
        if shim.to_string_lossy().contains([' ', ':']) {
            return Err(LabError::Preload(shim));
        }
        qemu = qemu.env("LD_PRELOAD", shim);
    }
    if spec.traced {
        let escaped = |path: PathBuf| path.display().to_string().replace(',', ",,");
        let (tracer, out) = (escaped(built(TRACER)?), escaped(files.trace.clone()));
        // The command line gives KiB, which QEMU rounds up to its own unit.
        let ram_bytes = (spec.memory_max.0 / 1024 * 1024).next_multiple_of(RAM_UNIT_BYTES);
        qemu = qemu.args(["-plugin", &format!("{tracer},out={out},ram={ram_bytes}")]);
    }
    Ok(qemu)
}

/// Path of Overbook's own program or library of this name: among the others, or installed.
pub(crate) fn built(name: &str) -> Result<PathBuf, LabError> {
    let beside = command::own_program(name)?;
    let installed = PathBuf::from(INSTALLED).join(name);
    let found = [&beside, &installed].into_iter().find(|path| path.is_file()).cloned();
    found.ok_or(LabError::NotBuilt(beside))
}
