//! A pool of two hosts on one machine: two directories, each with a daemon, and etcd and a
//! controller.
//!
//! The guest begins on the first host. Each host accepts VMs by a [`Takeover`] that is like the
//! guest, and the disks are shared. All of them are the real programs; each can be killed and
//! started again.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cluster::records::Records;
use cluster::store::etcd::Etcd;
use cluster::store::{Change, Snapshot, Store, StoreError, WriterLease};
use model::Bytes;
use serde_json::json;
use sys::process::{Child, Signal, Spawn, children_of};
use tokio::runtime::Runtime;

use crate::etcd::Members;
use crate::inside;
use crate::lab::{Lab, LabError};
use crate::machine::Files;
use crate::qmp::QmpLine;
use crate::takeover::Takeover;

/// The names of the two hosts; the guest begins on the first one.
pub const HOSTS: [&str; 2] = ["a", "b"];
/// The controller's index for [`HostPool::start`]; daemons have their host's index in [`HOSTS`].
pub const CONTROLLER: usize = 2;
const END: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub struct PoolSettings<'a> {
    pub guest: &'a str,
    /// Memory that it was given.
    pub given: Bytes,
    /// Memory that it was promised, which is the budget of either host's group.
    pub promised: Bytes,
    /// The balloon mode of either host's daemon: `observe` or `enforce`.
    pub balloon: [&'a str; 2],
    /// Keys of `[overload]`.
    pub overload: &'a str,
    /// Keys of `[pool]` in addition to those that every host has.
    pub pool: &'a str,
    /// Number of etcd's members.
    pub members: usize,
}

/// Two hosts, their store, and the processes that decide.
pub struct HostPool {
    /// The directories of the hosts' files.
    pub dirs: [PathBuf; 2],
    pub members: Members,
    guest: String,
    store: Arc<dyn Store>,
    runtime: Runtime,
    /// The processes that they have started end with them.
    _takeovers: [Takeover; 2],
    /// Two daemons and a controller.
    processes: [Option<Child>; 3],
}

impl HostPool {
    /// The host of this lab's guest, and another one with its files in `far`, which is emptied.
    /// Neither daemon runs yet.
    pub fn new(lab: &Lab, far: &Path, settings: &PoolSettings<'_>) -> Result<Self, LabError> {
        let (near, guest) = (lab.dir(), lab.machine(settings.guest)?);
        guest.hang_up();
        match fs::remove_dir_all(far) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => fs::create_dir_all(far)?,
        }
        let takeover = |to| Takeover::new(guest.process(), near, to);
        let takeovers = [takeover(near)?, takeover(far)?];
        let members = Members::start(settings.members, far)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let store = runtime.block_on(Etcd::connect(&members.endpoints(), None, "default"));
        let store: Arc<dyn Store> = Arc::new(store.map_err(std::io::Error::other)?);
        let dirs = [near.to_owned(), far.to_owned()];
        for i in 0..HOSTS.len() {
            configure(i, &dirs[i], &members.endpoints(), takeovers[i].script(), settings)?;
        }
        let (guest, processes) = (settings.guest.to_owned(), [None, None, None]);
        Ok(Self { dirs, members, guest, store, runtime, _takeovers: takeovers, processes })
    }

    /// Starts one of the two daemons, or the controller.
    pub fn start(&mut self, which: usize) -> Result<(), LabError> {
        let (dir, command, log) = match self.dirs.get(which) {
            Some(dir) => (dir, "daemon", dir.join("log/daemon")),
            None => (&self.dirs[0], "controller", self.dirs[0].join("log/controller")),
        };
        let log = fs::File::options().create(true).append(true).open(log)?;
        let spawn = Spawn::new(inside::built("overbook")?);
        let spawn = spawn.arg("--config").arg(dir.join("etc/overbook.toml")).arg(command);
        self.processes[which] = Some(spawn.output_to(log)?.die_with_parent().spawn()?);
        Ok(())
    }

    /// Kills one of them.
    pub fn kill(&mut self, which: usize) -> Result<(), LabError> {
        if let Some(mut child) = self.processes[which].take() {
            child.signal(Signal::KILL)?;
            child.wait_for(END)?;
        }
        Ok(())
    }

    /// Kills the worker processes of a host's daemon; the daemon starts them again.
    pub fn kill_worker(&self, host: usize) -> Result<(), LabError> {
        let Some(daemon) = &self.processes[host] else { return Ok(()) };
        for worker in children_of(daemon.identity().pid)? {
            // The worker may be ending by itself.
            let _ = worker.signal(Signal::KILL);
        }
        Ok(())
    }

    /// Whether the guest runs in a QEMU of this host.
    pub fn runs(&self, host: usize) -> bool {
        let line = QmpLine::new(&Files::new(&self.dirs[host], &self.guest).lab_socket);
        let status = line.with(|qmp| qmp.execute("query-status", json!({})));
        status.is_ok_and(|status| status["running"] == true)
    }

    /// The whole content of the store.
    pub fn snapshot(&self) -> Result<Snapshot, StoreError> {
        self.runtime.block_on(self.store.read(""))
    }

    /// The same as records; `None`: the store does not answer.
    pub fn records(&self) -> Option<Records> {
        self.snapshot().ok().map(|snapshot| Records::of(&snapshot))
    }

    /// Acquires the controller's right to write to the store ([`WriterLease`]), if it is free.
    pub fn sit(&self) -> Result<Option<WriterLease>, StoreError> {
        self.runtime.block_on(self.store.sit(cluster::records::CONTROLLER_SEAT, "lab"))
    }

    /// Writes a decision.
    pub fn write(&self, seat: &WriterLease, change: Change) -> Result<(), StoreError> {
        self.runtime.block_on(async {
            self.store.stay(seat).await?;
            self.store.write(seat, Vec::new(), vec![change]).await
        })
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        for which in 0..self.processes.len() {
            // An error is harmless: the process dies with this one at the latest.
            let _ = self.kill(which);
        }
    }
}

fn configure(
    host: usize,
    dir: &Path,
    endpoints: &[String],
    incoming: &Path,
    settings: &PoolSettings<'_>,
) -> Result<(), LabError> {
    fs::create_dir_all(dir.join("run/state"))?;
    fs::create_dir_all(dir.join("etc"))?;
    let PoolSettings { guest, given, promised, balloon, overload, pool, .. } = settings;
    let (shown, incoming, name) = (dir.display(), incoming.display(), HOSTS[host]);
    let (balloon, given, promised) = (balloon[host], given.0, promised.0);
    let text = format!(
        "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [\"{shown}/qmp/*.sock\"]\nstate = \"{shown}/run/state\"\n\
         [mode]\nballoon = \"{balloon}\"\n\
         [api]\nsocket = \"{shown}/run/overbook.sock\"\n\
         [overload]\n{overload}\n\
         [group.pool]\nvms = [\"{guest}\"]\nbudget = \"{promised}B\"\n\
         base = \"{given}B\"\nmax = \"{promised}B\"\n\
         [pool]\nhost = \"{name}\"\netcd = {endpoints:?}\ninsecure = true\nmovable = [\"{guest}\"]\n\
         address = \"127.0.0.1\"\nincoming = \"{incoming}\"\n{pool}\n"
    );
    Ok(fs::write(dir.join("etc/overbook.toml"), text)?)
}
