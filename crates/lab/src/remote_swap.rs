//! A guest's swap disk by NBD, as an operator sets it up: `overbook disks` on the guest's host,
//! `overbook repository` on another one. Both are the real programs, which can be killed and
//! started again.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::{Bytes, DiskReading};
use sys::process::{Child, Signal, Spawn, children_of};

use crate::inside::built;
use crate::lab::LabError;
use crate::machine::MachineSpec;

/// Whose disks they are.
pub const GROUP: &str = "swapping";
const DISK: &str = "swap";
/// A process that is told to end may take so long.
const END: Duration = Duration::from_secs(10);

/// What a swap disk is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its size.
    pub size: Bytes,
    /// How much longer each read of the file takes, one after the other.
    pub read_delay_us: u32,
    /// What a repository lends; 0: there is none.
    pub lent: Bytes,
}

/// The two processes, in a directory of their own.
pub struct RemoteSwap {
    dir: PathBuf,
    disk: Disk,
    disks: Option<Child>,
    repository: Option<Child>,
}

impl RemoteSwap {
    /// Starts what the disk needs, in `dir`.
    ///
    /// # Errors
    /// When a program is missing or a file cannot be written.
    pub fn start(dir: &Path, guest: &str, disk: Disk) -> Result<Self, LabError> {
        fs::create_dir_all(dir)?;
        let repositories = if disk.lent.is_zero() {
            String::new()
        } else {
            format!("repositories = [\"{}\"]\n", dir.join("repository").display())
        };
        let at = dir.display();
        let config = format!(
            "[host]\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/overbook.sock\"\n\
             [group.{GROUP}]\nvms = [\"{guest}\"]\n\
             [disk.{DISK}]\nvm = \"{guest}\"\nfile = \"{at}/file\"\nsize = \"{}B\"\n\
             read_delay_us = {}\n{repositories}",
            disk.size.0, disk.read_delay_us
        );
        fs::write(dir.join("overbook.toml"), config)?;
        let mut swap = Self { dir: dir.to_owned(), disk, disks: None, repository: None };
        if !disk.lent.is_zero() {
            swap.start_repository()?;
        }
        swap.start_disks()?;
        Ok(swap)
    }

    /// The guest, with this as its swap disk.
    #[must_use]
    pub fn given_to(&self, guest: MachineSpec) -> MachineSpec {
        let socket = self.dir.join("disks").join(format!("{DISK}.sock"));
        MachineSpec { swap_nbd: Some((socket, DISK.to_owned())), ..guest }
    }

    fn start_disks(&mut self) -> Result<(), LabError> {
        let config = self.dir.join("overbook.toml");
        let spawn = Spawn::new(built("overbook")?).arg("--config").arg(config);
        self.disks = Some(self.spawn(spawn.args(["disks", GROUP]), "disks.log")?);
        Ok(())
    }

    /// Starts, or starts again, the repository.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start_repository(&mut self) -> Result<(), LabError> {
        let socket = self.dir.join("repository");
        match fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let spawn = Spawn::new(built("overbook")?).arg("repository");
        let memory = format!("{}B", self.disk.lent.0);
        let spawn = spawn.arg("--memory").arg(memory).arg("--unix").arg(socket);
        self.repository = Some(self.spawn(spawn, "repository.log")?);
        Ok(())
    }

    fn spawn(&self, spawn: Spawn, log: &str) -> Result<Child, LabError> {
        let log = fs::File::options().create(true).append(true).open(self.dir.join(log))?;
        Ok(spawn.output_to(log)?.die_with_parent().spawn()?)
    }

    /// Kills what serves the disk; who keeps it starts it again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill_disks(&mut self) -> Result<(), LabError> {
        let Some(keeper) = &self.disks else { return Ok(()) };
        for serving in children_of(keeper.identity().pid)? {
            // It may be ending by itself.
            let _ = serving.signal(Signal::KILL);
        }
        Ok(())
    }

    /// Kills the repository.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill_repository(&mut self) -> Result<(), LabError> {
        kill(self.repository.take())
    }

    /// The network to the repository is dead: it does not answer, and no connection breaks.
    ///
    /// # Errors
    /// The kernel's.
    pub fn silence_repository(&mut self, is_silent: bool) -> Result<(), LabError> {
        if let Some(repository) = &mut self.repository {
            repository.signal(if is_silent { Signal::STOP } else { Signal::CONT })?;
        }
        Ok(())
    }

    /// How the disk does; `None`: nobody answers.
    #[must_use]
    pub fn status(&self) -> Option<DiskReading> {
        let socket = self.dir.join("disks").join(format!("{GROUP}.status"));
        let mut text = String::new();
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.write_all(b"{}\n").ok()?;
        stream.read_to_string(&mut text).ok()?;
        let mut status: overbook::disks::Status = serde_json::from_str(&text).ok()?;
        status.disks.remove(DISK)
    }

    /// Ends both; after the guest.
    ///
    /// # Errors
    /// The kernel's.
    pub fn end(mut self) -> Result<(), LabError> {
        for child in [self.disks.take(), self.repository.take()].iter_mut().flatten() {
            child.end(END)?;
        }
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

fn kill(child: Option<Child>) -> Result<(), LabError> {
    if let Some(mut child) = child {
        child.signal(Signal::KILL)?;
        child.end(END)?;
    }
    Ok(())
}
