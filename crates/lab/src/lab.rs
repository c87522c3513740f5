//! A running lab: guests and helpers of one process, which end with it.
//!
//! **Idea.** [`Lab::start`] returns when every guest is up and has its base memory, as a tenant
//! would get it. From then on a scenario reads metrics, queries QEMU and starts daemons.
//! [`Lab::stop`], or dropping the lab on any error path, ends everything and removes its files.
//!
//! **Invariants.** The kernel kills every child when this process dies, even by SIGKILL
//! ([`sys::process`]). A guest that dies while the lab comes up fails the lab, with its console's
//! last lines in the error.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use model::Bytes;
use serde_json::Value;
use sys::memory_of::{Overhead, OverheadError};
use sys::process::{Child, Identity, Signal, Spawn};

use crate::accel::{self, Accel, UP_MARK};
use crate::cache::{Cache, CacheError};
use crate::command::{CommandError, last_lines};
use crate::image::{Image, ImageError};
use crate::inside;
use crate::interrupt::{self, Interrupted};
use crate::machine::{self, Files, MachineSpec, SpecError};
use crate::metrics::{Follower, Newest, Sample};
use crate::qemu::{Qemu, QemuError};
use crate::qmp::{QmpError, QmpLine};
use crate::state::{ChildRecord, LabRecord, StateDir, StateError};

/// Timeout for all guests together to come up.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long a child may take to end before it is killed.
const END_GRACE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// Errors of the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// Ctrl-C.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A guest's QEMU ended.
    #[error("machine {name} died; its last words:\n{console}")]
    Died {
        /// The machine.
        name: String,
        /// The end of its console and of QEMU's own output.
        console: String,
    },
    /// A guest takes too long.
    #[error(
        "machine {name} is not up after {} s ({missing}); its last words:\n{console}",
        limit.as_secs()
    )]
    NotUp {
        /// The machine.
        name: String,
        /// The timeout.
        limit: Duration,
        /// The condition that is missing.
        missing: String,
        /// The end of its console and of QEMU's own output.
        console: String,
    },
    /// A scenario asked for a machine that is not there.
    #[error("the lab has no machine {0:?}")]
    NoMachine(String),
    /// A scenario did not see what it waited for.
    #[error("not within {} s: {what}", limit.as_secs())]
    Timeout {
        /// The missing condition.
        what: String,
        /// The timeout.
        limit: Duration,
    },
    /// The daemon under test ended.
    #[error("the daemon ended; it said:\n{0}")]
    Daemon(String),
    /// One of Overbook's own programs or libraries is not where it should be.
    #[error(
        "{0} is missing; build it with `make build` (for the paper's hot set: `make experiments`)"
    )]
    NotBuilt(PathBuf),
    /// The loader takes blanks and colons as separators of names.
    #[error("cannot preload {0}: its path holds a blank or colon; install it elsewhere")]
    Preload(PathBuf),
    /// The thread that tracks a guest failed.
    #[error("the thread that tracks a guest has failed")]
    Tracker,
    /// A guest could not be tracked.
    #[error("machine {name} is not tracked: {why}")]
    NotTracked {
        /// The machine.
        name: String,
        /// The reason.
        why: String,
    },
    /// A shim did not obey a request.
    #[error("the shim: {0}")]
    Shim(String),
    /// There is no report of `verify` to rely on.
    #[error("{0} has not verified its memory: nothing is proven")]
    NothingVerified(String),
    /// The trace of a guest's pages cannot be read.
    #[error(transparent)]
    Trace(#[from] crate::truth::TraceError),
    /// An error of the daemon's API.
    #[error(transparent)]
    Client(#[from] api::client::ClientError),
    /// An error of the shim's stress.
    #[error(transparent)]
    Stress(#[from] crate::stress::StressError),
    /// There is no such paper.
    #[error("no paper {name:?}; there is: {known}")]
    NoPaper {
        /// The name that was asked for.
        name: String,
        /// All names.
        known: String,
    },
    /// A fault of records or of the sources that they name.
    #[error(transparent)]
    Evidence(#[from] crate::evidence::EvidenceError),
    /// The page with plots could not be written.
    #[error(transparent)]
    Report(#[from] crate::report::ReportError),
    /// An error of a virtual host.
    #[error(transparent)]
    Host(#[from] crate::virtual_host::HostError),
    /// The keeper process reported a failure.
    #[error("{0}")]
    Keeper(String),
    /// The description is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An error of the state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// No QEMU could be provided.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// No Debian for guests could be provided.
    #[error(transparent)]
    Debian(#[from] crate::debian::DebianError),
    /// No boot image could be provided.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A helper program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Two hosts on one machine could not be made.
    #[error("network namespaces and a shaped link need root, `ip` and `tc` (iproute2): {0}")]
    Hosts(#[source] CommandError),
    /// A QMP command failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel does not say something of a process or of the machine.
    #[error(transparent)]
    Proc(#[from] sys::procfs::ProcError),
    /// A QEMU's memory cannot be told from its guest's.
    #[error(transparent)]
    Overhead(#[from] OverheadError),
    /// A message between the lab's processes is invalid.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The system's error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Everything that is needed to run guests: fetched once, used for many.
#[derive(Debug, Clone)]
pub struct Provisions {
    /// The emulator.
    pub qemu: Qemu,
    /// Kernel and initramfs.
    pub image: Image,
    /// The accelerator that the guests run on.
    pub accel: Accel,
}

impl Provisions {
    /// From the cache, else from the distribution.
    pub fn provide(choice: accel::Choice) -> Result<Self, LabError> {
        let cache = Cache::open()?;
        let qemu = Qemu::provide(&cache)?;
        let image = Image::provide(&cache)?;
        let accel = accel::choose(choice, &cache, &qemu, &image)?;
        Ok(Self { qemu, image, accel })
    }
}

/// A guest that was started.
#[derive(Debug)]
pub struct Machine {
    spec: MachineSpec,
    files: Files,
    line: QmpLine,
    child: Child,
    newest: Newest,
    started: Instant,
    boot_time: Option<Duration>,
}

impl Machine {
    /// Its description.
    pub fn spec(&self) -> &MachineSpec {
        &self.spec
    }

    /// Its files.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Its QEMU process.
    pub fn process(&self) -> Identity {
        self.child.identity()
    }

    /// Whether its QEMU still runs (it ends when the guest's kernel panics).
    pub fn alive(&self) -> bool {
        self.child.identity().is_alive()
    }

    /// Fails if it does not run.
    pub fn ensure_alive(&self) -> Result<(), LabError> {
        if self.alive() { Ok(()) } else { Err(self.death()) }
    }

    /// The memory of its QEMU, the guest's apart.
    pub fn overhead(&self) -> Result<Overhead, LabError> {
        Ok(Overhead::measure(self.process().pid, &[self.spec.memory_max])?)
    }

    /// Time from the start of QEMU until the workload started, at base memory.
    pub fn boot_time(&self) -> Duration {
        self.boot_time.unwrap_or_default()
    }

    /// Closes the lab's QMP connection, so that `lab status` may connect; the next command opens
    /// another.
    pub fn hang_up(&self) {
        self.line.hang_up();
    }

    /// The newest report of its workload.
    pub fn last_metric(&self) -> Option<Sample> {
        self.newest.get()
    }

    /// A number of that report, for a figure; NaN if there is none.
    pub fn told(&self, name: &str) -> f64 {
        self.last_metric().and_then(|sample| sample.value[name].as_f64()).unwrap_or(f64::NAN)
    }

    /// A number of that report that grows from 0, for a condition to wait for.
    pub fn reported(&self, name: &str) -> f64 {
        let told = self.told(name);
        if told.is_nan() { 0.0 } else { told }
    }

    /// One QMP command on the lab's own socket.
    pub fn qmp(&self, command: &'static str, arguments: Value) -> Result<Value, LabError> {
        Ok(self.line.with(|qmp| qmp.execute(command, arguments))?)
    }

    /// The guest's present memory, by its balloon.
    pub fn balloon(&self) -> Result<Bytes, LabError> {
        Ok(Bytes(self.line.with(|qmp| qmp.balloon())?))
    }

    /// Sets the balloon's target: the guest's memory.
    pub fn set_balloon(&self, target: Bytes) -> Result<(), LabError> {
        Ok(self.line.with(|qmp| qmp.set_balloon(target.0))?)
    }

    /// The error for its death.
    pub fn death(&self) -> LabError {
        LabError::Died { name: self.spec.name.clone(), console: self.last_words() }
    }

    fn last_words(&self) -> String {
        let words = |path: &Path| {
            let text = std::fs::read(path).unwrap_or_default();
            last_lines(&String::from_utf8_lossy(&text), 8)
        };
        format!("{}\n{}", words(&self.files.console), words(&self.files.qemu_log))
    }

    /// The condition that is missing until the guest is up; `None` when it is.
    fn missing(&self) -> Result<Option<String>, LabError> {
        if !self.alive() {
            return Err(self.death());
        }
        let console = std::fs::read(&self.files.console).unwrap_or_default();
        if !String::from_utf8_lossy(&console).contains(UP_MARK) {
            return Ok(Some("its init has not spoken".into()));
        }
        let balloon = self.balloon()?;
        let reached = balloon <= self.spec.memory_base;
        Ok((!reached).then(|| format!("it holds {balloon}, not {}", self.spec.memory_base)))
    }
}

/// Guests and helpers, which end when this is dropped.
#[derive(Debug)]
pub struct Lab {
    state: StateDir,
    record: LabRecord,
    machines: Vec<Machine>,
    helpers: Vec<(String, Child)>,
    follower: Option<Follower>,
    stopped: bool,
}

impl Lab {
    /// Starts these guests with their state in `dir`, and returns when all are up at base memory.
    pub fn start(dir: &Path, with: &Provisions, specs: &[MachineSpec]) -> Result<Self, LabError> {
        let mut lab = Self::begin(dir, with, specs)?;
        lab.start_all(specs, with)?;
        Ok(lab)
    }

    /// Starts more guests and returns when these are up, too.
    pub fn add(&mut self, with: &Provisions, specs: &[MachineSpec]) -> Result<(), LabError> {
        let known = self.machines.iter().map(|machine| machine.spec.clone());
        let all: Vec<MachineSpec> = known.chain(specs.iter().cloned()).collect();
        machine::check_all(&all, self.state.path())?;
        self.start_all(specs, with)
    }

    fn start_all(&mut self, specs: &[MachineSpec], with: &Provisions) -> Result<(), LabError> {
        for spec in specs {
            self.start_machine(spec, with)?;
        }
        self.follow()?;
        self.wait_until_up()
    }

    /// Starts these guests one after the other. `met` is called with each, before the lab waits
    /// for it to come up.
    pub fn start_in_turn(
        dir: &Path,
        with: &Provisions,
        specs: &[MachineSpec],
        mut met: impl FnMut(&Self) -> Result<(), LabError>,
    ) -> Result<Self, LabError> {
        let mut lab = Self::begin(dir, with, specs)?;
        for spec in specs {
            lab.start_machine(spec, with)?;
            met(&lab)?;
            lab.wait_until_up()?;
        }
        lab.follow()?;
        Ok(lab)
    }

    /// A lab without guests.
    fn begin(dir: &Path, with: &Provisions, specs: &[MachineSpec]) -> Result<Self, LabError> {
        let state = StateDir::hold(dir)?;
        machine::check_all(specs, state.path())?;
        let own = Identity::own().ok_or_else(|| std::io::Error::other("/proc is not mounted"))?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let record = LabRecord {
            holder: own.into(),
            since: since.as_secs(),
            accel: Some(with.accel),
            children: Vec::new(),
        };
        state.begin(&record)?;
        // From here on every exit path goes through `stop`.
        Ok(Self {
            state,
            record,
            machines: Vec::new(),
            helpers: Vec::new(),
            follower: None,
            stopped: false,
        })
    }

    fn follow(&mut self) -> Result<(), LabError> {
        let files = self.machines.iter().map(|m| (m.files.metrics.clone(), m.newest.clone()));
        self.follower = Some(Follower::start(files.collect())?);
        Ok(())
    }

    /// The machine of this name.
    pub fn machine(&self, name: &str) -> Result<&Machine, LabError> {
        let found = self.machines.iter().find(|machine| machine.spec.name == name);
        found.ok_or_else(|| LabError::NoMachine(name.to_owned()))
    }

    /// All machines, in the order of their start.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Fails if one of them does not run.
    pub fn ensure_alive(&self) -> Result<(), LabError> {
        self.machines.iter().try_for_each(Machine::ensure_alive)
    }

    /// The QEMU processes of all machines, in their order.
    pub fn pids(&self) -> Vec<u32> {
        self.machines.iter().map(|machine| machine.process().pid).collect()
    }

    /// The state directory: QMP sockets for the daemon in `qmp/`, its configuration in `etc/`, its
    /// sockets in `run/`.
    pub fn dir(&self) -> &Path {
        self.state.path()
    }

    /// Starts a helper (a daemon under test) that ends with the lab; its output goes to
    /// `log/<name>`.
    pub fn spawn(&mut self, name: &str, spawn: Spawn) -> Result<Identity, LabError> {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.state.path().join("log").join(name))?;
        let child = spawn.output_to(log)?.die_with_parent().spawn()?;
        let identity = child.identity();
        self.helpers.push((name.to_owned(), child));
        self.remember(name, None, identity)?;
        Ok(identity)
    }

    /// Ends all helpers of this name: SIGTERM, or SIGKILL at once with `kill`.
    pub fn end_helper(&mut self, name: &str, kill: bool) -> Result<(), LabError> {
        for (_, child) in self.helpers.iter_mut().filter(|(helper, _)| helper == name) {
            if kill {
                child.signal(Signal::KILL)?;
            }
            child.end(END_GRACE)?;
        }
        self.helpers.retain(|(helper, _)| helper != name);
        self.record.children.retain(|child| child.group.is_some() || child.name != name);
        Ok(self.state.write_record(&self.record)?)
    }

    /// Waits until `condition` holds; an interruption, a dead guest and the limit are errors.
    pub fn wait_for(
        &self,
        what: &str,
        limit: Duration,
        mut condition: impl FnMut(&Self) -> Result<bool, LabError>,
    ) -> Result<(), LabError> {
        let deadline = Instant::now() + limit;
        while !condition(self)? {
            self.ensure_alive()?;
            if Instant::now() > deadline {
                return Err(LabError::Timeout { what: what.to_owned(), limit });
            }
            interrupt::sleep(POLL)?;
        }
        Ok(())
    }

    /// Ends everything and removes its files, except the logs. A second call does nothing.
    pub fn stop(&mut self) -> Result<(), LabError> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        // Helpers end first, so that no daemon sees its guests vanish. All guests are signalled
        // at once, because they take a while to end.
        for (_, child) in self.helpers.iter_mut().rev() {
            child.end(END_GRACE)?;
        }
        for machine in &self.machines {
            machine.child.signal(Signal::TERM)?;
        }
        for machine in &mut self.machines {
            machine.child.end(END_GRACE)?;
        }
        self.follower = None;
        self.state.sweep()?;
        Ok(())
    }

    fn start_machine(&mut self, spec: &MachineSpec, with: &Provisions) -> Result<(), LabError> {
        let files = Files::new(self.state.path(), &spec.name);
        make_disk(&files.swap, spec.swap.map(|swap| swap.size))?;
        make_disk(&files.data, spec.data_disk)?;
        // Only an emulator sees every access.
        let accel = if spec.traced { Accel::Tcg } else { with.accel };
        let command = machine::command(spec, &files, &with.qemu, &with.image, accel);
        let command = inside::equip(command, spec, &files)?;
        let log = std::fs::File::create(&files.qemu_log)?;
        let started = Instant::now();
        let child = command.output_to(log)?.spawn()?;
        if let Some(cgroup) = &spec.cgroup {
            // The process has hardly any memory yet.
            let procs = cgroup.join("cgroup.procs");
            std::fs::write(procs, child.identity().pid.to_string())?;
        }
        self.remember(&spec.name, Some(&spec.group), child.identity())?;
        self.machines.push(Machine {
            spec: spec.clone(),
            line: QmpLine::new(&files.lab_socket),
            files,
            child,
            newest: Newest::default(),
            started,
            boot_time: None,
        });
        self.set_first_balloon_target(self.machines.len() - 1)
    }

    /// Sets the balloon's target as soon as QEMU listens; the guest's driver finds it when it
    /// starts.
    fn set_first_balloon_target(&self, index: usize) -> Result<(), LabError> {
        let machine = &self.machines[index];
        let limit = Duration::from_secs(60);
        self.wait_for("QEMU to listen", limit, |_| Ok(machine.line.with(|_| Ok(())).is_ok()))?;
        let (base, max) = (machine.spec.memory_base, machine.spec.memory_max);
        if base < max { machine.set_balloon(base) } else { Ok(()) }
    }

    fn wait_until_up(&mut self) -> Result<(), LabError> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let mut last_missing = None;
            for machine in &mut self.machines {
                match machine.missing()? {
                    _ if machine.boot_time.is_some() => {}
                    None => machine.boot_time = Some(machine.started.elapsed()),
                    Some(missing) => last_missing = Some((machine.spec.name.clone(), missing)),
                }
            }
            let Some((name, missing)) = last_missing else { return Ok(()) };
            if Instant::now() > deadline {
                let console = self.machine(&name)?.last_words();
                return Err(LabError::NotUp { name, limit: START_LIMIT, missing, console });
            }
            interrupt::sleep(POLL)?;
        }
    }

    fn remember(&mut self, name: &str, group: Option<&str>, id: Identity) -> Result<(), LabError> {
        let (name, group) = (name.to_owned(), group.map(str::to_owned));
        self.record.children.push(ChildRecord { name, group, process: id.into() });
        Ok(self.state.write_record(&self.record)?)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("lab: while ending: {error}");
        }
    }
}

/// Makes a sparse file, if `size` asks for a disk.
fn make_disk(path: &PathBuf, size: Option<Bytes>) -> Result<(), LabError> {
    if let Some(size) = size {
        std::fs::File::create(path)?.set_len(size.0)?;
    }
    Ok(())
}
