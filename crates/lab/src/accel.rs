//! The accelerator of the guests, found out by booting a probe guest.
//!
//! **Problem.** On some machines (nested, filtered) `/dev/kvm` opens and creates a VM, and the
//! guest then hangs without any output. No query tells such a machine from a healthy one.
//!
//! **Idea.** Boot a probe guest with KVM. If its init prints nothing within [`PROBE_LIMIT`],
//! which is many times what KVM needs, the lab emulates instead (TCG). The answer holds until the
//! machine or QEMU changes, so the cache keeps it with the boot id. A machine that is itself
//! emulated ([`crate::virtual_host`]) gets more time.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::image::Image;
use crate::interrupt;
use crate::lab::LabError;
use crate::machine::{self, KERNEL_BASICS};
use crate::qemu::Qemu;

/// Timeout for the first output of the probe guest's init.
const PROBE_LIMIT: Duration = Duration::from_secs(5);
/// The same on a machine that is itself emulated, where KVM needs 15 seconds on busy CPUs.
const EMULATED_PROBE_LIMIT: Duration = Duration::from_secs(120);
/// How QEMU's emulator names its processors.
const EMULATED: &str = "QEMU TCG CPU";
/// The line that a guest's init prints when it is up.
pub const UP_MARK: &str = "overbook: up";

/// The user's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// KVM where a probe guest boots with it, else TCG.
    Auto,
    /// The processor's virtualisation.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

/// The accelerator that the guests run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The processor's virtualisation.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl Accel {
    /// The value of QEMU's `-accel`. The translation buffer is small, because it is memory of the
    /// QEMU process.
    pub fn options(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi,tb-size=32",
        }
    }
}

impl std::fmt::Display for Accel {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// The result of a probe, and the conditions that it depends on.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    boot_id: String,
    qemu: String,
    accel: Accel,
}

/// The accelerator that the guests will run on.
pub fn choose(
    choice: Choice,
    cache: &Cache,
    qemu: &Qemu,
    image: &Image,
) -> Result<Accel, LabError> {
    match choice {
        Choice::Kvm => return Ok(Accel::Kvm),
        Choice::Tcg => return Ok(Accel::Tcg),
        Choice::Auto => {}
    }
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    if kvm.is_err() || boot_id.is_empty() {
        return Ok(Accel::Tcg);
    }
    let qemu_id = format!("{} {}", qemu.version, qemu.program.display());
    let known = cache.find("accel.json").and_then(|path| std::fs::read(path).ok());
    if let Some(known) = known.and_then(|text| serde_json::from_slice::<Known>(&text).ok())
        && known.boot_id == boot_id
        && known.qemu == qemu_id
    {
        return Ok(known.accel);
    }
    let accel = if kvm_boots(cache, qemu, image)? { Accel::Kvm } else { Accel::Tcg };
    let known = serde_json::to_vec(&Known { boot_id, qemu: qemu_id, accel })?;
    cache.file("accel.json", &known, true)?;
    Ok(accel)
}

fn kvm_boots(cache: &Cache, qemu: &Qemu, image: &Image) -> Result<bool, LabError> {
    let scratch = cache.scratch()?;
    let console = scratch.path().join("console");
    let path = console.display().to_string().replace(',', ",,");
    let mut child = machine::bare(qemu, image, Accel::Kvm)
        .args(["-m", "128M", "-append", KERNEL_BASICS])
        .args(["-chardev", &format!("file,id=console,path={path}"), "-serial", "chardev:console"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .die_with_parent()
        .spawn()?;
    let limit = if is_emulated() { EMULATED_PROBE_LIMIT } else { PROBE_LIMIT };
    let deadline = Instant::now() + limit;
    let outcome = loop {
        let said = std::fs::read(&console).unwrap_or_default();
        if String::from_utf8_lossy(&said).contains(UP_MARK) {
            break Ok(true);
        }
        if Instant::now() > deadline || !child.identity().is_alive() {
            break Ok(false);
        }
        if let Err(interrupted) = interrupt::sleep(Duration::from_millis(20)) {
            break Err(interrupted.into());
        }
    };
    child.end(Duration::from_secs(1))?;
    outcome
}

fn is_emulated() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(EMULATED))
}
