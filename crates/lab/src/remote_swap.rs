//! A guest's swap disk by NBD, as an operator sets it up: `overbook disks` on the guest's host,
//! `overbook repository` on another one. Both are the real programs, which can be killed and
//! started again.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::{Bytes, CacheReading, DiskReading};
use sys::process::{Child, Identity, Signal, Spawn, children_of};

use crate::hosts::{Host, Hosts};
use crate::inside::built;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::nbd_servers::certificates;

/// The group that the disks belong to.
pub const GROUP: &str = "swapping";
const DISK: &str = "swap";
/// Timeout for the repository's first connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Timeout for the end of a process.
const END: Duration = Duration::from_secs(10);

/// The parts of a swap disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its size.
    pub size: Bytes,
    /// Additional time of each read of the file, in microseconds; such reads are serialised.
    pub read_delay_us: u32,
    /// Memory that a repository lends; 0: there is none.
    pub lent: Bytes,
    /// Whether it is a data disk whose pages may be cached in spare memory of its group.
    pub cache: bool,
}

/// The two processes, in a directory of their own.
pub struct RemoteSwap {
    dir: PathBuf,
    disk: Disk,
    /// Its table in the configuration.
    table: String,
    /// The hosts that they run on, if not on this one.
    hosts: Option<Hosts>,
    disks: Option<Child>,
    repository: Option<Child>,
}

impl RemoteSwap {
    /// Starts the processes that the disk needs, in `dir`.
    pub fn start(dir: &Path, guest: &str, disk: Disk) -> Result<Self, LabError> {
        Self::start_on(None, dir, guest, disk)
    }

    /// Same as [`Self::start`], with the repository on another host, behind TLS.
    pub fn start_apart(
        hosts: Hosts,
        dir: &Path,
        guest: &str,
        disk: Disk,
    ) -> Result<Self, LabError> {
        fs::create_dir_all(dir)?;
        certificates(dir, Host::Far.address())?;
        Self::start_on(Some(hosts), dir, guest, disk)
    }

    fn start_on(
        hosts: Option<Hosts>,
        dir: &Path,
        guest: &str,
        disk: Disk,
    ) -> Result<Self, LabError> {
        fs::create_dir_all(dir)?;
        let table = table(dir, guest, disk, hosts.is_some());
        let dir = dir.to_owned();
        let mut swap = Self { dir, disk, table, hosts, disks: None, repository: None };
        let dir = &swap.dir;
        let at = dir.display();
        let config = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/overbook.sock\"\n\
             [group.{GROUP}]\nvms = [\"{guest}\"]\n{}",
            swap.table
        );
        fs::write(dir.join("overbook.toml"), config)?;
        if !disk.lent.is_zero() {
            swap.start_repository()?;
        }
        swap.start_disks()?;
        Ok(swap)
    }

    /// The socket that serves the disk, and its export's name.
    pub fn export(&self) -> (PathBuf, &'static str) {
        (self.dir.join("disks").join(format!("{DISK}.sock")), DISK)
    }

    /// The file that holds its content.
    pub fn file(dir: &Path) -> PathBuf {
        dir.join("file")
    }

    /// The guest, with this as its swap disk.
    pub fn given_to(&self, guest: MachineSpec) -> MachineSpec {
        let (socket, name) = self.export();
        MachineSpec { swap_nbd: Some((socket, name.to_owned())), ..guest }
    }

    /// The guest, with this as its data disk.
    pub fn given_as_data(&self, guest: MachineSpec) -> MachineSpec {
        let (socket, name) = self.export();
        MachineSpec { data_nbd: Some((socket, name.to_owned())), ..guest }
    }

    /// Makes the disk, and the process that serves it, known to the daemon that is started for
    /// these guests.
    pub fn make_known(&self, lab: &Lab) -> Result<(), LabError> {
        let drop_ins = lab.dir().join("etc").join("overbook.d");
        fs::create_dir_all(&drop_ins)?;
        fs::write(drop_ins.join("disk.toml"), &self.table)?;
        Ok(symlink(self.dir.join("disks"), lab.dir().join("run").join("disks"))?)
    }

    fn start_disks(&mut self) -> Result<(), LabError> {
        let config = self.dir.join("overbook.toml");
        let spawn = self.program(Host::Near)?.arg("--config").arg(config);
        self.disks = Some(self.spawn(spawn.args(["disks", GROUP]), "disks.log")?);
        Ok(())
    }

    /// Starts, or starts again, the repository.
    pub fn start_repository(&mut self) -> Result<(), LabError> {
        let memory = format!("{}B", self.disk.lent.0);
        let spawn = self.program(Host::Far)?.arg("repository").arg("--memory").arg(memory);
        let spawn = if self.hosts.is_some() {
            spawn.arg("--listen").arg(far()).arg("--tls").arg(&self.dir)
        } else {
            let socket = self.dir.join("repository");
            match fs::remove_file(&socket) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
            spawn.arg("--unix").arg(socket)
        };
        self.repository = Some(self.spawn(spawn, "repository.log")?);
        Ok(())
    }

    fn program(&self, host: Host) -> Result<Spawn, LabError> {
        // A file of its own, which an upgrade can replace.
        let overbook = self.own_program();
        if !overbook.is_file() {
            fs::copy(built("overbook")?, &overbook)?;
        }
        let hosts = self.hosts.as_ref();
        Ok(hosts.map_or_else(|| Spawn::new(&overbook), |hosts| hosts.spawn(host, &overbook)))
    }

    fn spawn(&self, spawn: Spawn, log: &str) -> Result<Child, LabError> {
        let log = fs::File::options().create(true).append(true).open(self.dir.join(log))?;
        Ok(spawn.output_to(log)?.die_with_parent().spawn()?)
    }

    /// The process that holds the disk's socket; `None`: it was not started.
    pub fn keeper(&self) -> Option<Identity> {
        self.disks.as_ref().map(Child::identity)
    }

    fn own_program(&self) -> PathBuf {
        self.dir.join("overbook")
    }

    /// Kills the process that serves the disk, after an upgrade has removed its program's file;
    /// its keeper starts it again.
    pub fn kill_disks(&mut self) -> Result<(), LabError> {
        let Some(keeper) = &self.disks else { return Ok(()) };
        if self.own_program().is_file() {
            fs::remove_file(self.own_program())?;
        }
        for serving in children_of(keeper.identity().pid)? {
            // The process may be ending by itself.
            let _ = serving.signal(Signal::KILL);
        }
        Ok(())
    }

    /// Kills the repository.
    pub fn kill_repository(&mut self) -> Result<(), LabError> {
        kill(self.repository.take())
    }

    /// Simulates a dead network to the repository: it does not answer, and no connection breaks.
    pub fn silence_repository(&mut self, is_silent: bool) -> Result<(), LabError> {
        if let Some(repository) = &mut self.repository {
            repository.signal(if is_silent { Signal::STOP } else { Signal::CONT })?;
        }
        Ok(())
    }

    /// Data sent to the repository and received from it; zero if it is on this host.
    pub fn carried(&self) -> Result<Bytes, LabError> {
        self.hosts.as_ref().map_or(Ok(Bytes::ZERO), Hosts::carried)
    }

    /// The disk's status; `None`: no process answers.
    pub fn status(&self) -> Option<DiskReading> {
        self.ask()?.disks.remove(DISK)
    }

    /// Its counts so far.
    ///
    /// # Errors
    /// The process that serves it does not tell them.
    pub fn counts(&self) -> Result<DiskReading, LabError> {
        let why = "the process that serves the disk does not tell its counts";
        Ok(self.status().ok_or_else(|| std::io::Error::other(why))?)
    }

    /// Waits until its repository is connected.
    pub fn wait_until_connected(&self) -> Result<(), LabError> {
        let connected = || self.status()?.repositories.map(|found| found.connected > 0);
        let end = Instant::now() + CONNECT_LIMIT;
        while connected() != Some(true) {
            if Instant::now() > end {
                return Err(std::io::Error::other("the repository is not connected").into());
            }
            interrupt::sleep(Duration::from_millis(50))?;
        }
        Ok(())
    }

    /// The status of its group's cache; `None`: there is no cache, or no process answers.
    pub fn cache(&self) -> Option<CacheReading> {
        self.ask()?.cache
    }

    fn ask(&self) -> Option<disks::Status> {
        let socket = self.dir.join("disks").join(format!("{GROUP}.status"));
        let mut text = String::new();
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.write_all(b"{}\n").ok()?;
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Ends both processes, which must outlive the guest, and removes their files.
    pub fn end(mut self) -> Result<(), LabError> {
        self.end_programs()?;
        Ok(fs::remove_dir_all(&self.dir)?)
    }

    fn end_programs(&mut self) -> Result<(), LabError> {
        for child in [self.disks.take(), self.repository.take()].iter_mut().flatten() {
            child.end(END)?;
        }
        Ok(())
    }
}

impl Drop for RemoteSwap {
    fn drop(&mut self) {
        // A scenario that fails has an error of its own, which must not be hidden. The programs'
        // logs stay.
        let _ = self.end_programs();
        let _ = fs::remove_file(Self::file(&self.dir));
    }
}

/// The share of reads between two readings of a disk that a repository answered.
pub fn near_share(before: &DiskReading, after: &DiskReading) -> f64 {
    let of = |reading: &DiskReading| reading.repositories.unwrap_or_default();
    let (before, after) = (of(before), of(after));
    let near = after.reads.saturating_sub(before.reads);
    let other = (after.misses + after.late).saturating_sub(before.misses + before.late);
    near as f64 / (near + other).max(1) as f64
}

/// The disk in the configuration. The lab's hosts are on one machine: a guest that changes hosts
/// has two QEMUs there, hence `shared = 2`.
fn table(dir: &Path, guest: &str, disk: Disk, is_apart: bool) -> String {
    let (at, Disk { size, read_delay_us, cache, lent }) = (dir.display(), disk);
    let repositories = if lent.is_zero() {
        String::new()
    } else if is_apart {
        format!("repositories = [\"{}\"]\ntls = \"{at}\"\n", far())
    } else {
        format!("repositories = [\"{at}/repository\"]\n")
    };
    format!(
        "[disk.{DISK}]\nvm = \"{guest}\"\nfile = \"{at}/file\"\nsize = \"{}B\"\n\
         read_delay_us = {read_delay_us}\ncache = {cache}\nshared = 2\n{repositories}",
        size.0
    )
}

/// The address of a repository on another host.
fn far() -> String {
    format!("{}:10810", Host::Far.address())
}

fn kill(child: Option<Child>) -> Result<(), LabError> {
    if let Some(mut child) = child {
        child.signal(Signal::KILL)?;
        child.end(END)?;
    }
    Ok(())
}
