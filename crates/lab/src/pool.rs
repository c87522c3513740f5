//! A pool of hosts on one machine: a directory for each, with a daemon, and etcd and a controller.
//!
//! The guest begins on the first host. Each host accepts VMs by a [`Takeover`] that is like the
//! guest, and the disks are shared. All of them are the real programs; each can be killed and
//! started again. A host has the machine's memory, or [`OwnMemory`].

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
use crate::own_memory::OwnMemory;
use crate::qmp::QmpLine;
use crate::takeover::Takeover;

/// The hosts' names; the guest begins on the first one.
pub const HOSTS: [&str; 3] = ["a", "b", "c"];
/// The lab of a host's further VMs, in the host's directory.
pub const LOCAL: &str = "local";
const END: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub struct PoolSettings<'a> {
    pub guest: &'a str,
    /// Memory that it was given.
    pub given: Bytes,
    /// Memory that it was promised.
    pub promised: Bytes,
    /// Patterns of further VMs of its group.
    pub others: &'a [&'a str],
    /// The budget of the group on each host.
    pub budget: Bytes,
    /// The balloon mode of each host's daemon: `observe` or `enforce`.
    pub balloon: &'a [&'a str],
    /// Keys of `[host]` in addition to those that every host has.
    pub host: &'a str,
    /// Keys of `[overload]`.
    pub overload: &'a str,
    /// Keys of `[pool]` in addition to those that every host has.
    pub pool: &'a str,
    /// Number of etcd's members.
    pub members: usize,
}

/// The hosts, their store, and the processes that decide.
pub struct HostPool {
    /// The directories of the hosts' files.
    pub dirs: Vec<PathBuf>,
    pub members: Members,
    guest: String,
    store: Arc<dyn Store>,
    runtime: Runtime,
    /// The processes that they have started end with them.
    _takeovers: Vec<Takeover>,
    /// A daemon for each host, and a controller.
    processes: Vec<Option<Child>>,
    /// The memory of each host that does not have the machine's.
    memories: Vec<OwnMemory>,
}

impl HostPool {
    /// The host of this lab's guest, and others with their files in `far`, which are emptied.
    /// No daemon runs yet.
    pub fn new(lab: &Lab, far: &[PathBuf], settings: &PoolSettings<'_>) -> Result<Self, LabError> {
        let (near, guest) = (lab.dir(), lab.machine(settings.guest)?);
        guest.hang_up();
        for dir in far {
            match fs::remove_dir_all(dir) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => fs::create_dir_all(dir)?,
            }
        }
        let dirs: Vec<PathBuf> = [near.to_owned()].into_iter().chain(far.iter().cloned()).collect();
        let takeover = |to: &PathBuf| Takeover::new(guest.process(), near, to);
        let takeovers = dirs.iter().map(takeover).collect::<Result<Vec<_>, _>>()?;
        let members = Members::start(settings.members, &dirs[1])?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let store = runtime.block_on(Etcd::connect(&members.endpoints(), None, "default"));
        let store: Arc<dyn Store> = Arc::new(store.map_err(std::io::Error::other)?);
        for (i, dir) in dirs.iter().enumerate() {
            configure(i, dir, &members.endpoints(), takeovers[i].script(), settings)?;
        }
        let guest = settings.guest.to_owned();
        let processes = (0..=dirs.len()).map(|_| None).collect();
        let (_takeovers, memories) = (takeovers, Vec::new());
        Ok(Self { dirs, members, guest, store, runtime, _takeovers, processes, memories })
    }

    /// Gives each host this much memory of its own, for daemons that start from now on; all
    /// guests have RAM of size `ram`.
    pub fn have(&mut self, memory: &[Bytes], ram: Bytes) -> Result<(), LabError> {
        let hosts = self.dirs.iter().zip(memory);
        let own = hosts.map(|(dir, size)| OwnMemory::start(dir, *size, ram));
        self.memories = own.collect::<Result<_, _>>()?;
        Ok(())
    }

    /// The memory of a host that has its own.
    pub fn memory(&self, host: usize) -> Option<&OwnMemory> {
        self.memories.get(host)
    }

    /// The controller's index for [`Self::start`] and [`Self::kill`]; daemons have their host's.
    pub fn controller(&self) -> usize {
        self.dirs.len()
    }

    /// Starts one of the daemons, or the controller.
    pub fn start(&mut self, which: usize) -> Result<(), LabError> {
        let (dir, command, log) = match self.dirs.get(which) {
            Some(dir) => (dir, "daemon", dir.join("log/daemon")),
            None => (&self.dirs[0], "controller", self.dirs[0].join("log/controller")),
        };
        let log = fs::File::options().create(true).append(true).open(log)?;
        let program = inside::built("overbook")?;
        let spawn = match self.memories.get(which) {
            Some(memory) => memory.spawn(&program),
            None => Spawn::new(program),
        };
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
    let PoolSettings { guest, given, promised, others, budget, balloon, overload, pool, .. } =
        settings;
    let (shown, incoming, name) = (dir.display(), incoming.display(), HOSTS[host]);
    let (balloon, given, promised, budget) = (balloon[host], given.0, promised.0, budget.0);
    let (keys, vms) = (settings.host, [&[*guest], *others].concat());
    let text = format!(
        "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{shown}/run/state\"\n\
         qmp = [\"{shown}/qmp/*.sock\", \"{shown}/{LOCAL}/qmp/*.sock\"]\n{keys}\n\
         [mode]\nballoon = \"{balloon}\"\n\
         [api]\nsocket = \"{shown}/run/overbook.sock\"\n\
         [overload]\n{overload}\n\
         [group.pool]\nvms = {vms:?}\nbudget = \"{budget}B\"\n\
         base = \"{given}B\"\nmax = \"{promised}B\"\n\
         [pool]\nhost = \"{name}\"\netcd = {endpoints:?}\ninsecure = true\nmovable = [\"{guest}\"]\n\
         address = \"127.0.0.1\"\nincoming = \"{incoming}\"\n{pool}\n"
    );
    Ok(fs::write(dir.join("etc/overbook.toml"), text)?)
}
