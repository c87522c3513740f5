//! A virtual host: a stock Debian kernel with KVM, in which the lab and Overbook run as on metal.
//!
//! **Problem.** Overbook's effect on guests depends on the kernel below them: on KVM's page
//! tables, on reclaim, on the abilities of its cgroups, DAMON and zram. A machine runs one kernel
//! at a time, and often has no KVM that boots anything.
//!
//! **Idea.** QEMU's emulator has AMD's virtualisation with nested page tables. A kernel booted in
//! it has all of KVM, and everything else that a kernel has, at some thirtieth of the speed. The
//! host is an initramfs with one script ([`root`]). The script's output comes through a port of
//! its own as it is written. The kernel's console is kept separate, for the case that the host
//! dies.
//!
//! **Invariants.** The host is private: it has no network, and no write access to the caller's
//! files. It dies with the caller, and leaves nothing behind: its files have no names.
//!
//! **Leaves out.** Time: a processor there is slow, and its translation buffer is emptied at each
//! exit from a guest, so no figure in seconds is meaningful for metal. Several guests at once:
//! the emulator then fails at times, and a guest resets or waits for minutes.

mod kernel;
mod output;
mod root;

use std::fs::File;
use std::io::{PipeReader, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use sys::process::{Child, Signal, Spawn};

use crate::accel::Choice;
use crate::cache::{Cache, CacheError};
use crate::command::{self, CommandError, last_lines};
use crate::image::{GUEST_KERNEL, ImageError};
use crate::interrupt::{self, Interrupted};
use crate::lab::{LabError, Provisions};
use crate::machine::KERNEL_BASICS;
use crate::packages::PackageError;
use kernel::Kernel;
use output::Splitter;
use root::FileContent;

pub use kernel::NEWEST;

/// Enough memory for the lab's guests and for itself.
pub const USUAL_MEMORY: Bytes = Bytes::mib(3072);
/// Less memory does not hold the root file system.
pub const LEAST_MEMORY: Bytes = Bytes::mib(1024);
/// More processors than QEMU's emulator runs well.
pub const MOST_CPUS: u32 = 64;
/// Size of the disk for swap files, which is sparse.
const DISK: Bytes = Bytes::mib(8192);
/// Lines of the console that are shown when the host dies.
const CONSOLE_LINES: usize = 60;
/// Timeout for QEMU to end after its output has ended.
const END_GRACE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// Why a script did not finish in a virtual host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The kernel's name is invalid.
    #[error("kernel {series:?}: must be a series such as 6.1 or 6.12, or {NEWEST:?}")]
    Series {
        /// The series that was asked for.
        series: String,
    },
    /// The mirror does not have this kernel.
    #[error("kernel {series}: this machine's mirror has none of that series; it has {known}")]
    NoSuchKernel {
        /// The series that was asked for.
        series: String,
        /// The available series.
        known: String,
    },
    /// The memory is too small to boot.
    #[error("memory {0} of a virtual host: must be at least {LEAST_MEMORY}")]
    Memory(Bytes),
    /// The number of CPUs is 0 or too large.
    #[error("{0} CPUs of a virtual host: must be 1 to {MOST_CPUS}")]
    Cpus(u32),
    /// A package lacks a part that is needed.
    #[error("{name} has no {what}")]
    Incomplete {
        /// The package, or the directory into which it was unpacked.
        name: String,
        /// The part that is missing.
        what: String,
    },
    /// One of Overbook's programs is not built.
    #[error("{0}")]
    NotBuilt(String),
    /// One of the system's programs is missing.
    #[error("this machine has no {0}, which a virtual host needs")]
    NoProgram(String),
    /// A library of a program is not installed here.
    #[error("{program} needs {library}, which is not installed here")]
    NoLibrary {
        /// The program.
        program: PathBuf,
        /// The library's name.
        library: String,
    },
    /// Its kernel panicked, or its QEMU failed.
    #[error("the virtual host died ({status}); its last words:\n{console}")]
    Died {
        /// The status with which its QEMU ended.
        status: String,
        /// The end of its console and of QEMU's own output.
        console: String,
    },
    /// The script takes too long.
    #[error("the script has not ended after {} s; the virtual host's last words:\n{console}",
        limit.as_secs())]
    TimedOut {
        /// The timeout.
        limit: Duration,
        /// The end of its console.
        console: String,
    },
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A system call failed.
    #[error("a virtual host: {0}")]
    System(#[from] std::io::Error),
    /// Its kernel could not be downloaded.
    #[error("getting the virtual host's kernel failed: {0}")]
    Package(#[from] PackageError),
    /// A module of its kernel could not be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A helper program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Ctrl-C.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// The description of a host.
#[derive(Debug, Clone)]
pub struct VirtualHost {
    /// The series of its kernel, for example `6.12`, or [`NEWEST`].
    pub kernel: String,
    /// Its memory.
    pub memory: Bytes,
    /// Its CPUs.
    pub cpus: u32,
    /// Files for the script's working directory; programs bring their libraries.
    pub files: Vec<PathBuf>,
    /// The file for its kernel's console; `None`: the console is not kept.
    pub console: Option<PathBuf>,
}

/// The result of a script.
#[derive(Debug, Clone)]
pub struct ScriptResult {
    /// Its exit code.
    pub code: u8,
    /// The console of the host's kernel.
    pub console: String,
}

impl VirtualHost {
    /// The default host with this kernel.
    pub fn new(kernel: &str) -> Self {
        Self {
            kernel: kernel.to_owned(),
            memory: USUAL_MEMORY,
            cpus: 2,
            files: Vec::new(),
            console: None,
        }
    }

    /// Boots it, runs `script` in it by `sh`, and writes the script's output to `output` as it
    /// comes.
    pub fn run(
        &self,
        script: &[u8],
        limit: Duration,
        output: &mut impl Write,
    ) -> Result<ScriptResult, LabError> {
        self.check()?;
        let cache = Cache::open()?;
        let provisions = Provisions::provide(Choice::Tcg)?;
        let busybox = cache.root().join(GUEST_KERNEL).join("bin/busybox");
        let kernel = Kernel::provide(&cache, &self.kernel, &busybox)?;
        let mark = format!("<overbook virtual host {:016x} ended: ", random_number());
        let content = FileContent {
            cache: &cache,
            provisions: &provisions,
            kernel: &kernel,
            files: &self.files,
            script,
            mark: &mark,
        };
        let initramfs = in_memory(&content.to_archive()?)?;
        let mut running = RunningHost::start(self, &cache, &provisions, &kernel.file, initramfs)?;
        let outcome = running.follow(Splitter::new(&mark), limit, output);
        running.end()?;
        Ok(outcome?)
    }

    fn check(&self) -> Result<(), HostError> {
        if self.memory < LEAST_MEMORY {
            return Err(HostError::Memory(self.memory));
        }
        if self.cpus == 0 || self.cpus > MOST_CPUS {
            return Err(HostError::Cpus(self.cpus));
        }
        Ok(())
    }
}

/// A running host: its QEMU.
struct RunningHost {
    child: Child,
    started: Instant,
    output: PipeReader,
    console: File,
    log: File,
}

impl RunningHost {
    fn start(
        host: &VirtualHost,
        cache: &Cache,
        provisions: &Provisions,
        kernel: &Path,
        initramfs: File,
    ) -> Result<Self, HostError> {
        let (output, stdout) = std::io::pipe()?;
        let (console, log) = (make_console(host)?, tempfile::tempfile()?);
        let disk = make_disk(cache)?;
        let khz = sys::tsc::khz();
        let line = format!("{KERNEL_BASICS} tsc=reliable tsc_early_khz={khz} psi=1");
        let mut qemu = provisions
            .qemu
            .command()
            .args(["-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-machine", "q35,hpet=off,vmport=off", "-cpu", "max"])
            .args(["-accel", "tcg,thread=multi", "-nic", "none"])
            .args(["-m", &format!("{}k", host.memory.0 / 1024), "-smp", &host.cpus.to_string()])
            .args(["-append", &line])
            .arg("-kernel")
            .arg(kernel);
        let passed = |qemu: &mut Spawn, file: &File| -> Result<String, HostError> {
            Ok(format!("/proc/self/fd/{}", qemu.pass(file)?))
        };
        let initrd = passed(&mut qemu, &initramfs)?;
        let console_path = passed(&mut qemu, &console)?;
        let disk_path = passed(&mut qemu, &disk)?;
        let drive = "if=none,id=disk,format=raw,cache.no-flush=on,file.locking=off";
        let child = qemu
            .args(["-initrd", &initrd])
            .args(["-chardev", &format!("file,id=console,path={console_path}")])
            .args(["-serial", "chardev:console"])
            // Not `stdio`: QEMU closes that port when standard input ends.
            .args(["-chardev", "file,id=output,path=/proc/self/fd/1"])
            .args(["-device", "virtio-serial-pci"])
            .args(["-device", "virtserialport,nr=1,chardev=output"])
            .args(["-drive", &format!("{drive},file.filename={disk_path}")])
            .args(["-device", "virtio-blk-pci,drive=disk"])
            .stdout(OwnedFd::from(stdout))
            .stderr(log.try_clone()?)
            .die_with_parent()
            .spawn()?;
        Ok(Self { child, started: Instant::now(), output, console, log })
    }

    /// Forwards the script's output until the script ends.
    fn follow(
        &mut self,
        mut splitter: Splitter,
        limit: Duration,
        output: &mut impl Write,
    ) -> Result<ScriptResult, HostError> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            if interrupt::interrupted() {
                return Err(Interrupted.into());
            }
            if self.started.elapsed() > limit {
                output.write_all(&splitter.rest())?;
                output.flush()?;
                return Err(HostError::TimedOut { limit, console: self.last_words()? });
            }
            if !is_readable(&self.output)? {
                continue;
            }
            let count = self.output.read(&mut buffer)?;
            if count == 0 {
                output.write_all(&splitter.rest())?;
                output.flush()?;
                let status = self.child.end(END_GRACE)?.to_string();
                return Err(HostError::Died { status, console: self.last_words()? });
            }
            let part = splitter.push(&buffer[..count]);
            output.write_all(&part.output)?;
            output.flush()?;
            if let Some(code) = part.code {
                let console = text_of(&mut self.console)?;
                return Ok(ScriptResult { code, console });
            }
        }
    }

    fn last_words(&mut self) -> std::io::Result<String> {
        let console = last_lines(&text_of(&mut self.console)?, CONSOLE_LINES);
        Ok(format!("{console}\n{}", last_lines(&text_of(&mut self.log)?, CONSOLE_LINES)))
    }

    /// Kills the host, which has nothing to lose.
    fn end(mut self) -> std::io::Result<()> {
        self.child.signal(Signal::KILL)?;
        self.child.end(END_GRACE).map(drop)
    }
}

/// Whether `pipe` is readable or has ended; waits up to [`POLL`] for that.
fn is_readable(pipe: &PipeReader) -> std::io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN)];
    let moment = Timespec { tv_sec: 0, tv_nsec: i64::from(POLL.subsec_nanos()) };
    match poll(&mut fds, Some(&moment)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The content of a file, to which QEMU may write through a descriptor of its own.
fn text_of(file: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).replace('\r', ""))
}

/// A file in memory, without a name and without a copy on disk.
fn in_memory(content: &[u8]) -> std::io::Result<File> {
    let mut file = File::from(memfd_create("overbook-initramfs", MemfdFlags::CLOEXEC)?);
    file.write_all(content)?;
    Ok(file)
}

fn make_console(host: &VirtualHost) -> Result<File, HostError> {
    let Some(path) = &host.console else { return Ok(tempfile::tempfile()?) };
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    file.map_err(|source| HostError::Io { path: path.clone(), source })
}

/// An empty file system in a sparse file that loses its name.
fn make_disk(cache: &Cache) -> Result<File, HostError> {
    let scratch = cache.scratch()?;
    let path = scratch.path().join("disk");
    let failed = |source| HostError::Io { path: path.clone(), source };
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.map_err(failed)?;
    file.set_len(DISK.0).map_err(failed)?;
    let mke2fs = Spawn::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin")
        .args(["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0"])
        .arg(&path);
    command::run("mke2fs", mke2fs)?;
    Ok(file)
}

fn random_number() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}
