//! One guest: its description, and the QEMU command line that follows from it.
//!
//! **Idea.** A lab guest is like a user's guest: QEMU's ordinary private RAM (`-m`, no memory
//! backend), a virtio balloon with statistics and free-page reporting, a swap disk. Only three
//! things are the lab's own: a swap disk throttled to the operations per second of a real disk, a
//! second serial port on which the workload reports, and a second QMP socket so that the daemon
//! has the first one for itself.
//!
//! **Invariants.** The guest has `memory_base` before its workload starts: the balloon target is
//! set as soon as QEMU listens, and the guest's init waits for it. Every guest ends with QEMU
//! (`-no-reboot` and `panic=-1`): a dead guest is a dead process, and cannot be overlooked.

use std::path::{Path, PathBuf};

use model::Bytes;
use serde::{Deserialize, Serialize};
use sys::process::Spawn;

use crate::accel::Accel;
use crate::debian::Debian;
use crate::image::Image;
use crate::qemu::Qemu;

/// The least memory that a lab guest boots in.
pub const LEAST_MEMORY: Bytes = Bytes::mib(64);
/// The default size from which guests' kernels report free memory: 2 MiB, as a power of two of
/// pages.
pub const USUAL_ORDER: u32 = 9;
/// `sun_path` holds 108 bytes, the last of which is zero.
const SOCKET_PATH_LIMIT: usize = 107;

/// Errors in a machine's description.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The name cannot serve as file name, host name and QEMU id.
    #[error("machine name {0:?}: use 1 to 32 letters, digits and '-'")]
    Name(String),
    /// Two machines would share their files.
    #[error("machine {0} is described twice")]
    Twice(String),
    /// No guest boots with less, and none holds more than its maximum.
    #[error(
        "machine {name}: memory base {base} and max {max}: must be {LEAST_MEMORY} <= base <= max"
    )]
    Memory {
        /// The machine.
        name: String,
        /// The base memory asked for.
        base: Bytes,
        /// The maximum memory asked for.
        max: Bytes,
    },
    /// A machine needs at least one vCPU.
    #[error("machine {0}: 0 vCPUs: must be at least 1")]
    NoCpu(String),
    /// The workload's words travel on the kernel's command line, separated by commas.
    #[error("machine {name}: workload argument {argument:?} holds a blank, comma or quote")]
    Workload {
        /// The machine.
        name: String,
        /// The offending word.
        argument: String,
    },
    /// The kernel limits the length of a unix socket's path.
    #[error(
        "socket path {path} is {length} bytes long, the kernel allows {SOCKET_PATH_LIMIT}: choose \
         a shorter --dir"
    )]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
}

/// A guest's swap disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swap {
    /// Its size.
    pub size: Bytes,
    /// Operations per second that it serves, like a real disk; `None`: no throttling.
    pub iops: Option<u32>,
}

/// QEMU's mode of reading a disk without the host's page cache (`cache=none`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Direct {
    /// Whether it uses the kernel's asynchronous I/O (`aio=native`) instead of threads.
    pub native: bool,
    /// Operations per second.
    pub iops: u32,
}

/// The description of one guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// Its name, and that of its files, its sockets and its host.
    pub name: String,
    /// The group (tenant) that it belongs to.
    pub group: String,
    /// The RAM that QEMU gives it, which its balloon never exceeds.
    pub memory_max: Bytes,
    /// The memory that it is provisioned with: the size of its balloon when its workload starts.
    pub memory_base: Bytes,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The workload's command line; empty: none.
    pub workload: Vec<String>,
    /// Seed of the workload.
    pub seed: u64,
    /// Its swap disk.
    pub swap: Option<Swap>,
    /// NBD socket and export name of its swap disk; `None`: the disk is a file.
    pub swap_nbd: Option<(PathBuf, String)>,
    /// Its data disk (`/dev/data`), sparse.
    pub data_disk: Option<Bytes>,
    /// NBD socket and export name of its data disk; `None`: the disk is a file, if it has one.
    pub data_nbd: Option<(PathBuf, String)>,
    /// The read-only file system in which its workload runs ([`Debian`]); `None`: there is only
    /// the workload program.
    pub root_disk: Option<PathBuf>,
    /// Mode of reading the data disk; `None`: through the host's page cache, without throttling.
    pub data_direct: Option<Direct>,
    /// The host's CPUs that it runs on; empty: any.
    pub cpus: Vec<usize>,
    /// Whether the guest loads a driver for its balloon device; one without stays at its maximum.
    pub balloon_driver: bool,
    /// The least size of free memory that it reports, as a power of two of pages; `None`: its
    /// balloon device does not offer reporting.
    pub reporting_order: Option<u32>,
    /// Further options of its kernel.
    pub kernel_options: String,
    /// Further options of its QEMU, each followed by its value.
    pub qemu_options: Vec<String>,
    /// Whether Overbook's shim is preloaded into its QEMU: a managed VM.
    pub shim: bool,
    /// Whether that shim has the paper's hot set, which the released one does not have.
    pub hot_set: bool,
    /// Whether that shim is of the release before ([`OLDER`](crate::command::OLDER)).
    pub older_shim: bool,
    /// Whether the host backs its memory with small pages only.
    pub small_pages: bool,
    /// Whether KSM may merge its memory.
    pub ksm: bool,
    /// The cgroup that its QEMU runs in: a directory that exists; `None`: the lab's own.
    pub cgroup: Option<PathBuf>,
    /// Whether every page that it touches is recorded ([`Files::trace`]). Such a guest is emulated,
    /// and slow.
    pub traced: bool,
}

impl MachineSpec {
    /// A guest with one vCPU and no disks that runs `workload` (words separated by blanks).
    pub fn new(name: &str, group: &str, base: Bytes, max: Bytes, workload: &str) -> Self {
        Self {
            name: name.to_owned(),
            group: group.to_owned(),
            memory_max: max,
            memory_base: base,
            vcpus: 1,
            workload: workload.split_whitespace().map(str::to_owned).collect(),
            seed: 1,
            swap: None,
            swap_nbd: None,
            data_disk: None,
            data_nbd: None,
            root_disk: None,
            data_direct: None,
            cpus: Vec::new(),
            balloon_driver: true,
            reporting_order: Some(USUAL_ORDER),
            kernel_options: String::new(),
            qemu_options: Vec::new(),
            shim: false,
            hot_set: false,
            older_shim: false,
            small_pages: false,
            ksm: true,
            cgroup: None,
            traced: false,
        }
    }

    /// The same guest with a balloon that may give it up to `max`.
    pub fn up_to(self, max: Bytes) -> Self {
        Self { memory_max: max, ..self }
    }

    /// The same guest with a seed that is greater by `number`.
    pub fn seeded(self, number: u64) -> Self {
        Self { seed: self.seed + number, ..self }
    }

    /// The same guest with the shim, or without it.
    pub fn with_shim(self, shim: bool) -> Self {
        Self { shim, ..self }
    }

    /// The same guest in this memory cgroup.
    pub fn in_cgroup(self, dir: &Path) -> Self {
        Self { cgroup: Some(dir.to_owned()), ..self }
    }

    /// The same guest on these CPUs; none: on any.
    pub fn on_cpus(self, cpus: Vec<usize>) -> Self {
        Self { cpus, ..self }
    }

    /// The same guest with a swap disk of `size`, throttled to `iops` operations per second.
    pub fn with_swap(mut self, size: Bytes, iops: Option<u32>) -> Self {
        self.swap = Some(Swap { size, iops });
        self
    }

    /// The same guest with two vCPUs and a data disk that QEMU reads past the host's page cache, by
    /// native asynchronous I/O or by threads.
    pub fn with_direct_disk(self, size: Bytes, native: bool, iops: u32) -> Self {
        let (data_disk, data_direct) = (Some(size), Some(Direct { native, iops }));
        Self { vcpus: 2, data_disk, data_direct, ..self }
    }

    /// The same guest with further QEMU options (words separated by blanks).
    pub fn with_qemu(mut self, options: &str) -> Self {
        self.qemu_options.extend(options.split_whitespace().map(str::to_owned));
        self
    }

    /// The same guest with a Debian, which has the programs of its workload.
    pub fn with_debian(mut self, debian: &Debian) -> Self {
        self.root_disk = Some(debian.image.clone());
        self
    }

    fn check(&self) -> Result<(), SpecError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if self.name.is_empty() || self.name.len() > 32 || !self.name.chars().all(plain) {
            return Err(SpecError::Name(self.name.clone()));
        }
        let (base, max) = (self.memory_base, self.memory_max);
        if base < LEAST_MEMORY || base > max {
            return Err(SpecError::Memory { name: self.name.clone(), base, max });
        }
        if self.vcpus == 0 {
            return Err(SpecError::NoCpu(self.name.clone()));
        }
        let bad = |word: &&String| word.is_empty() || word.contains([' ', ',', '"', '\'', '\n']);
        match self.workload.iter().find(bad) {
            Some(argument) => {
                Err(SpecError::Workload { name: self.name.clone(), argument: argument.clone() })
            }
            None => Ok(()),
        }
    }
}

/// Checks all descriptions, before anything is started.
pub fn check_all(specs: &[MachineSpec], dir: &Path) -> Result<(), SpecError> {
    for (index, spec) in specs.iter().enumerate() {
        spec.check()?;
        if specs[..index].iter().any(|earlier| earlier.name == spec.name) {
            return Err(SpecError::Twice(spec.name.clone()));
        }
        let path = Files::new(dir, &spec.name).daemon_socket;
        let length = path.as_os_str().len();
        if length > SOCKET_PATH_LIMIT {
            return Err(SpecError::SocketPath { path, length });
        }
    }
    Ok(())
}

/// Paths of one guest's files.
#[derive(Debug, Clone)]
pub struct Files {
    /// QMP, for the daemon.
    pub daemon_socket: PathBuf,
    /// QMP, for the lab.
    pub lab_socket: PathBuf,
    /// Output of the guest's kernel and init.
    pub console: PathBuf,
    /// Reports of the workload: JSON lines.
    pub metrics: PathBuf,
    /// Output of QEMU itself.
    pub qemu_log: PathBuf,
    /// The swap disk.
    pub swap: PathBuf,
    /// The data disk.
    pub data: PathBuf,
    /// The pages that it touched ([`truth`](crate::truth)); removed when the lab ends.
    pub trace: PathBuf,
}

impl Files {
    /// The files of the machine `name` in the state directory `dir`.
    pub fn new(dir: &Path, name: &str) -> Self {
        let file = |sub: &str, end: &str| dir.join(sub).join(format!("{name}.{end}"));
        Self {
            daemon_socket: file("qmp", "sock"),
            lab_socket: file("lab", "sock"),
            console: file("log", "console"),
            metrics: file("log", "metrics"),
            qemu_log: file("log", "qemu"),
            swap: file("disks", "swap"),
            data: file("disks", "data"),
            trace: file("trace", "pages"),
        }
    }
}

/// The command that starts this guest's QEMU; its disks must exist.
pub fn command(
    spec: &MachineSpec,
    files: &Files,
    qemu: &Qemu,
    image: &Image,
    accel: Accel,
) -> Spawn {
    let file = |path: &Path| path.display().to_string().replace(',', ",,");
    let mut args: Vec<String> = Vec::new();
    let mut add = |option: &str, value: String| args.extend([option.to_owned(), value]);
    add("-name", spec.name.clone());
    add("-m", format!("{}k", spec.memory_max.0 / 1024));
    add("-smp", spec.vcpus.to_string());
    add("-append", kernel_command_line(spec, accel));
    let reporting = if spec.reporting_order.is_some() { "on" } else { "off" };
    add("-device", format!("virtio-balloon-pci,id=balloon0,free-page-reporting={reporting}"));
    for (id, path) in [("console", &files.console), ("metrics", &files.metrics)] {
        add("-chardev", format!("file,id={id},path={}", file(path)));
        add("-serial", format!("chardev:{id}"));
    }
    for socket in [&files.daemon_socket, &files.lab_socket] {
        add("-qmp", format!("unix:{},server=on,wait=off", file(socket)));
    }
    for (id, served) in [("swap", &spec.swap_nbd), ("data", &spec.data_nbd)] {
        let Some((socket, export)) = served else { continue };
        // QEMU holds requests while no server answers, up to `reconnect-delay`. After that it
        // stops the guest instead of returning an I/O error.
        let server = format!("server.type=unix,server.path={}", socket.display());
        let patience = "reconnect-delay=300,open-timeout=30";
        let node = format!("driver=nbd,node-name={id},{server},export={export},{patience}");
        add("-blockdev", format!("{node},discard=unmap"));
        let device = format!("virtio-blk-pci,drive={id},serial={id},rerror=stop,werror=stop");
        add("-device", device);
    }
    if let Some(swap) = spec.swap.filter(|_| spec.swap_nbd.is_none()) {
        let iops = swap.iops.map(|iops| format!(",throttling.iops-total={iops}"));
        let options = format!("{}{}", file(&files.swap), iops.unwrap_or_default());
        add("-drive", format!("if=none,id=swap,format=raw,file={options}"));
        add("-device", "virtio-blk-pci,drive=swap,serial=swap".to_owned());
    }
    if spec.data_disk.is_some() && spec.data_nbd.is_none() {
        let direct = spec.data_direct.map(|Direct { native, iops }| {
            let aio = if native { "native" } else { "threads" };
            format!(",cache=none,aio={aio},throttling.iops-total={iops}")
        });
        let options = format!("{}{}", file(&files.data), direct.unwrap_or_default());
        add("-drive", format!("if=none,id=data,format=raw,file={options}"));
        add("-device", "virtio-blk-pci,drive=data,serial=data".to_owned());
    }
    if !spec.ksm {
        add("-machine", "mem-merge=off".to_owned());
    }
    if let Some(root) = &spec.root_disk {
        add("-drive", format!("if=none,id=root,format=raw,readonly=on,file={}", file(root)));
        add("-device", "virtio-blk-pci,drive=root,serial=root".to_owned());
    }
    bare(qemu, image, accel)
        .args(args)
        .args(&spec.qemu_options)
        .on_cpus(&spec.cpus)
        .small_pages(spec.small_pages)
        .die_with_parent()
}

/// The part of the command that every guest of the lab shares, also the one that only probes the
/// accelerator.
pub fn bare(qemu: &Qemu, image: &Image, accel: Accel) -> Spawn {
    qemu.command()
        .args(["-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"])
        .args(["-machine", "q35,hpet=off,vmport=off", "-cpu", "max", "-accel", accel.options()])
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initramfs)
}

/// Options of every guest's kernel: use this console, end on a failure, and skip self-tests that
/// are slow under emulation.
pub const KERNEL_BASICS: &str = "console=ttyS0 loglevel=4 panic=-1 mitigations=off no_timer_check \
    random.trust_cpu=on cryptomgr.notests";

fn kernel_command_line(spec: &MachineSpec, accel: Accel) -> String {
    let mut line = format!("{KERNEL_BASICS} overbook.name={}", spec.name);
    if accel == Accel::Tcg {
        // On a busy host the guest's own calibration can be wrong by a factor of several.
        line += &format!(" tsc=reliable tsc_early_khz={}", sys::tsc::khz());
    }
    if spec.memory_base < spec.memory_max {
        let balloon = spec.memory_max.minus(spec.memory_base);
        line += &format!(" overbook.balloon_kb={}", balloon.0 / 1024);
    }
    if spec.root_disk.is_some() {
        line += " overbook.root";
    }
    if !spec.balloon_driver {
        line += " overbook.no_balloon";
    }
    if !spec.kernel_options.is_empty() {
        line += &format!(" {}", spec.kernel_options);
    }
    if let Some(order) = spec.reporting_order.filter(|order| *order != USUAL_ORDER) {
        line += &format!(" overbook.reporting_order={order}");
    }
    if !spec.workload.is_empty() {
        line += &format!(" overbook.run={},--seed,{}", spec.workload.join(","), spec.seed);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str) -> MachineSpec {
        MachineSpec::new(name, "g", Bytes::mib(128), Bytes::mib(384), "random-array --mb 200")
    }

    fn error_of(spec: MachineSpec) -> String {
        check_all(&[spec], Path::new("/tmp/x")).unwrap_err().to_string()
    }

    #[test]
    fn the_workload_travels_on_the_kernel_command_line() {
        let line = kernel_command_line(&spec("a"), Accel::Kvm);
        assert!(
            line.ends_with(
                "overbook.balloon_kb=262144 overbook.run=random-array,--mb,200,--seed,1"
            )
        );
    }

    #[test]
    fn a_name_that_is_no_file_name_is_refused() {
        assert_eq!(
            error_of(spec("../a")),
            "machine name \"../a\": use 1 to 32 letters, digits and '-'"
        );
    }

    #[test]
    fn two_machines_of_one_name_are_refused() {
        let error = check_all(&[spec("a"), spec("a")], Path::new("/tmp/x")).unwrap_err();
        assert_eq!(error.to_string(), "machine a is described twice");
    }

    #[test]
    fn a_base_above_the_maximum_is_refused() {
        let error = error_of(MachineSpec { memory_base: Bytes::mib(512), ..spec("a") });
        assert!(error.starts_with("machine a: memory base 512"), "{error}");
    }

    #[test]
    fn a_socket_path_that_the_kernel_would_cut_is_refused() {
        let dir = PathBuf::from(format!("/tmp/{}", "x".repeat(100)));
        let error = check_all(&[spec("a")], &dir).unwrap_err().to_string();
        assert!(error.contains("116 bytes long, the kernel allows 107"), "{error}");
    }
}
