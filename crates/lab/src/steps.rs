//! Orders for guests that run `steps`: the next steps, and the time that they took.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use model::Bytes;

use crate::interrupt;
use crate::lab::{LabError, Machine};
use crate::machine::MachineSpec;

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The size of the disk for orders.
const DISK: Bytes = Bytes::mib(1);

/// A guest that holds up to `mb` MB and obeys orders.
pub fn guest(name: &str, group: &str, memory: Bytes, mb: u32) -> MachineSpec {
    let work = format!("steps --mb {mb} --orders /dev/data");
    MachineSpec { data_disk: Some(DISK), ..MachineSpec::new(name, group, memory, memory, &work) }
}

/// Has a guest carry out these steps. Returns the time of the last one other than `free`, in
/// seconds.
pub fn order(machine: &Machine, steps: &str, limit: Duration) -> Result<f64, LabError> {
    let number = machine.reported("phase") + 1.0;
    let disk = std::fs::File::options().write(true).open(&machine.files().data)?;
    // All orders have the same length, so that each overwrites the one before.
    disk.write_all_at(format!("{:<60}\n", format!("{number} {steps}\n")).as_bytes(), 0)?;
    let until = Instant::now() + limit;
    while machine.reported("phase") < number {
        machine.ensure_alive()?;
        if Instant::now() > until {
            let what = format!("{} to carry out {steps:?}", machine.spec().name);
            return Err(LabError::Timeout { what, limit });
        }
        interrupt::sleep(LOOK_EVERY)?;
    }
    Ok(machine.reported("step_us") / 1e6)
}
