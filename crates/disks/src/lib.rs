//! `overbook disks GROUP`: the NBD exports of a group's VMs.
//!
//! Problem: a worker ends with its daemon, so that the memory it holds goes back to the guests;
//! but a disk must not end while its guest runs. So exports have a process of their own. It needs
//! the configuration, but neither daemon nor worker. It belongs to one group, so the content of
//! two groups never meets in it. If it is killed and restarted, all writes that were answered are
//! in the files, and QEMU reconnects (`reconnect-delay`).
//!
//! The serving process may die: the [`keeper`] holds the sockets and restarts it. It reads the
//! configuration again then.
//!
//! Each disk has its own socket, which belongs to the owner of the disk's file: a user who may
//! open the file may connect to the socket. Other users are not served. Only one process is
//! served at a time, which is the VM's QEMU; `shared` admits more, for a VM that migrates within
//! its host. The daemon sends its orders to another socket in the same directory ([`Order`], one
//! line of JSON), and gets the status of the disks in return ([`Status`]).
//!
//! One [`Budget`] bounds the memory of all requests in flight from a group's clients.
//!
//! [`repository`] is the part of `overbook repository` that watches its own host.

mod cached;
mod files;
mod keeper;
pub mod repository;
pub mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use model::spec::DiskSpec;
use model::{Bytes, CacheReading, DiskReading, GroupName, RepositoriesReading, Spec, VmName};
use pageserver::budget::Budget;
use pageserver::layer::Layer;
use pageserver::layers::cache::Cache;
use pageserver::layers::count::{Count, OperationCounters};
use pageserver::layers::fault::{FaultLayer, InjectedFaults};
use pageserver::layers::file::File;
use pageserver::layers::remote::{Address, Remote};
use pageserver::layers::seal::{PAGE, Seal};
use pageserver::layers::write_through::WriteThrough;
use pageserver::nbd::request::Export;
use pageserver::order::Ordered;
use pageserver::places::Owner;
use pageserver::server::{Catalogue, Opened, Server, Who, of_layer};
use pageserver::tls::{Connector, TlsError};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde::{Deserialize, Serialize};
use sys::heap;
use sys::log;
use sys::process::{become_io_flusher, inherited};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};

use cached::Cached;

/// Name of the status socket. No disk has this name, because names of disks do not begin with
/// `.`.
const STATUS: &str = ".status";
/// How long a client of the status socket may take to send its order, and to read the status.
const STATUS_LIMIT: Duration = Duration::from_secs(1);
/// Longest status, in bytes.
const MOST_STATUS: u64 = 16 << 20;
/// How long an order is valid: the daemon sends one every second.
const ORDER_LASTS: Duration = Duration::from_secs(5);
/// Longest order, in bytes.
const MOST_ORDER: u64 = 1 << 20;

/// Why the disks cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// The group has no disks.
    #[error("group `{group}` has no disks; groups that have: {others}")]
    None {
        /// The group.
        group: String,
        /// Groups that have disks.
        others: String,
    },
    /// Another process serves them already.
    #[error("the disks of group `{0}` are served already, by another process")]
    Served(String),
    /// A disk's file cannot be used.
    #[error("disk `{disk}`: {error}")]
    Disk {
        /// The disk.
        disk: String,
        /// The fault.
        error: files::FileError,
    },
    /// A directory or socket cannot be used.
    #[error("{what} {}: {error}", .path.display())]
    File {
        /// The kind of file.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The certificates are not usable.
    #[error("disk `{disk}`: {error}")]
    Tls {
        /// The disk.
        disk: String,
        /// The error of the certificates.
        error: TlsError,
    },
    /// The kernel has no random numbers for a key, or the process cannot start threads.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The daemon's order to a group's disks. It is valid for some seconds, so the orders of a daemon
/// that has died expire.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Capacity of the group's cache; absent: as before.
    #[serde(default)]
    pub cache: Option<Bytes>,
    /// VMs that have all the memory that they were started with: their swap goes to their own
    /// disk alone. Absent: as before.
    #[serde(default)]
    pub at_max: Option<BTreeSet<VmName>>,
}

/// Status of a group's disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The disks by name.
    pub disks: BTreeMap<String, DiskReading>,
    /// The group's cache, if it is configured.
    #[serde(default)]
    pub cache: Option<CacheReading>,
}

/// A disk that is served.
struct ServedDisk {
    name: String,
    vm: VmName,
    layer: Arc<Count>,
    counters: Arc<OperationCounters>,
    near: Option<Near>,
}

/// The copy of a disk's pages in repositories.
struct Near {
    remote: Arc<Remote>,
    seal: Arc<Seal>,
    through: Arc<WriteThrough>,
}

/// Keeps the disks of `group` served until it is asked to end, if `sockets` is empty. Otherwise
/// serves them on the sockets and files that a keeper passes on as descriptors,
/// `NAME=SOCKET,USER[,FILE]` each. `config` is the file of `spec`, which the serving process reads
/// again.
///
/// # Errors
///
/// Why it cannot start. Once it serves, only a signal ends it.
pub fn run(config: &Path, spec: &Spec, group: &str, sockets: &[String]) -> Result<(), DisksError> {
    let group = GroupName::from(group);
    if sockets.is_empty() {
        return keeper::run(config, spec, &group);
    }
    need_no_memory();
    // Payloads come and go: memory that the allocator kept of them would be locked, and not
    // charged to the budget.
    heap::give_back_large();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(spec, &group, sockets))
}

/// Guests swap when memory is short. So the process that serves their swap must neither wait for
/// memory nor be swapped out itself. Without the necessary rights it continues with a warning.
/// Core dumps do not contain its pages.
fn need_no_memory() {
    if let Err(error) = become_io_flusher()
        && kernel_uses_nbd()
    {
        log::warn(&format!("the kernel may have this process wait for its own disks: {error}"));
    }
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        log::warn(&format!("a core dump of this process would have guests' pages: {error}"));
    }
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(all) {
        log::warn(&format!("this process may be swapped out itself: {error}"));
    }
}

/// Whether the kernel itself is a client of some NBD server: only then can it wait for one.
fn kernel_uses_nbd() -> bool {
    let is_used = |device: std::fs::DirEntry| {
        let is_nbd = device.file_name().as_encoded_bytes().starts_with(b"nbd");
        is_nbd && device.path().join("pid").exists()
    };
    std::fs::read_dir("/sys/block").is_ok_and(|devices| devices.flatten().any(is_used))
}

async fn serve(spec: &Spec, group: &GroupName, sockets: &[String]) -> Result<(), DisksError> {
    let mut disks = Vec::new();
    let mut status = None;
    let cached = spec.has_cache(group).then(Cached::new);
    let budget = Arc::new(Budget::default());
    for socket in sockets {
        let odd = || io::Error::other(format!("`{socket}` is no NAME=SOCKET,USER[,FILE]"));
        let (name, numbers) = socket.split_once('=').ok_or_else(odd)?;
        let numbers: Result<Vec<u32>, _> = numbers.split(',').map(str::parse).collect();
        let (numbers, inherit) = (numbers.map_err(|_| odd())?, |number: u32| {
            inherited(i32::try_from(number).map_err(|_| odd())?)
        });
        let (Some(listener), Some(user)) = (numbers.first(), numbers.get(1)) else {
            return Err(odd().into());
        };
        let listener = std::os::unix::net::UnixListener::from(inherit(*listener)?);
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        if name == STATUS {
            status = Some(listener);
        } else if let Some((_, disk)) = spec.disks_of(group).find(|(own, _)| *own == name) {
            let file = inherit(*numbers.get(2).ok_or_else(odd)?)?.into();
            let owner = Owner { user: *user, processes: disk.shared as usize };
            let disk = ServedDisk::build(name, disk, file, cached.as_ref())?;
            let one = One { name: disk.name.clone(), layer: disk.layer.clone() };
            let server = Server::of_one(Arc::new(one), owner, budget.clone());
            tokio::spawn(server.listen_unix(listener));
            disks.push(disk);
        }
    }
    if let Some(listener) = status {
        tokio::spawn(tell(listener, disks, cached));
    }
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

/// Sends an order to a group's disks, and reads their status; `None`: there is no answer.
pub async fn ask(socket: &Path, order: &Order) -> Option<Status> {
    let mut text = Vec::new();
    let mut line = serde_json::to_vec(order).ok()?;
    line.push(b'\n');
    let answer = async {
        let mut stream = UnixStream::connect(socket).await.ok()?;
        stream.write_all(&line).await.ok()?;
        // This is enough for any number of disks in a group.
        (&mut stream).take(MOST_STATUS).read_to_end(&mut text).await.ok()
    };
    tokio::time::timeout(STATUS_LIMIT, answer).await.ok()??;
    serde_json::from_slice(&text).ok()
}

/// Path of the status socket of a group's disks.
#[must_use]
pub fn status_socket(spec: &Spec, group: &GroupName) -> PathBuf {
    spec.disk_directory().join(format!("{group}.status"))
}

impl ServedDisk {
    fn build(
        name: &str,
        spec: &DiskSpec,
        file: std::fs::File,
        cached: Option<&Cached>,
    ) -> Result<Self, DisksError> {
        let file = File::new(&spec.file, file, spec.size.0);
        let cached = cached.filter(|_| spec.cache);
        let file = if cached.is_some() { file.cached_above() } else { file };
        let file: Arc<dyn Layer> = match spec.read_delay_us {
            0 => Arc::new(file),
            us => {
                let delay = Duration::from_micros(us.into());
                let faults = InjectedFaults { delay, ..InjectedFaults::default() };
                Arc::new(FaultLayer::over(Arc::new(file), faults))
            }
        };
        let (below, near): (Arc<dyn Layer>, _) = if spec.repositories.is_empty() {
            let over = |cached: &Cached| Arc::new(Cache::over(file.clone(), cached.space()));
            (cached.map(over).map_or_else(|| file.clone(), |cache| cache as Arc<dyn Layer>), None)
        } else {
            let addresses = spec.repositories.iter().map(|at| address(at, spec.tls.as_deref()));
            let addresses: Result<_, _> = addresses.collect();
            let addresses =
                addresses.map_err(|error| DisksError::Tls { disk: name.to_owned(), error })?;
            let remote = Arc::new(Remote::new(spec.size.0, addresses));
            let seal = Seal::over(remote.clone())
                .ok_or_else(|| io::Error::other("the kernel has no random numbers"))?;
            let seal = Arc::new(seal);
            let through = Arc::new(WriteThrough::new(seal.clone(), file));
            (through.clone(), Some(Near { remote, seal, through }))
        };
        // A client's latency includes its wait for requests to the same bytes.
        let layer = Arc::new(Count::over(Arc::new(Ordered::over(below))));
        let counters = layer.counters();
        Ok(Self { name: name.to_owned(), vm: spec.vm.clone(), layer, counters, near })
    }

    /// Sets whether its writes may go to repositories.
    fn admit(&self, admits: bool) {
        if let Some(near) = &self.near {
            near.remote.admit(admits);
        }
    }

    fn status(&self) -> DiskReading {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let OperationCounters { reads, writes, trimmed, errors } = &*self.counters;
        DiskReading {
            made_of: self.layer.describe(),
            reads: read(&reads.count),
            read: Bytes(read(&reads.bytes)),
            read_us_median: reads.latency_us(0.5),
            read_us_p99: reads.latency_us(0.99),
            writes: read(&writes.count),
            written: Bytes(read(&writes.bytes)),
            write_us_median: writes.latency_us(0.5),
            trimmed: Bytes(read(trimmed)),
            errors: read(errors),
            repositories: self.near.as_ref().map(|near| RepositoriesReading {
                admits: near.remote.admits(),
                connected: near.remote.connected() as u64,
                held: Bytes(near.remote.pages() * PAGE as u64),
                reads: read(&near.through.counters().near),
                misses: read(&near.through.counters().below),
                late: read(&near.through.counters().hedged),
                forged: near.seal.forged(),
            }),
        }
    }
}

/// Address of a repository.
fn address(repository: &str, tls: Option<&Path>) -> Result<Address, TlsError> {
    Ok(match repository.strip_prefix('/') {
        Some(_) => Address::Unix(repository.into()),
        None => Address::Tcp(repository.to_owned(), tls.map(Connector::new).transpose()?),
    })
}

/// A server's single export.
struct One {
    name: String,
    layer: Arc<Count>,
}

impl Catalogue for One {
    fn list(&self) -> Vec<String> {
        vec![self.name.clone()]
    }

    fn find(&self, name: &str, _: &Who) -> Option<Export> {
        (name == self.name).then(|| of_layer(&*self.layer))
    }

    fn open(&self, name: &str, _: &Who) -> Option<Opened> {
        let layer = self.layer.clone();
        (name == self.name).then(|| Opened { name: name.to_owned(), layer })
    }
}

/// Takes an order from every client of the status socket, and answers with the status.
async fn tell(listener: UnixListener, disks: Vec<ServedDisk>, cached: Option<Cached>) {
    let mut ordered_at = Instant::now();
    loop {
        let accepted = tokio::time::timeout(ORDER_LASTS, listener.accept()).await;
        if ordered_at.elapsed() >= ORDER_LASTS {
            // Without orders it is not known which VMs have all their memory.
            disks.iter().for_each(|disk| disk.admit(true));
        }
        let mut stream = match accepted {
            Ok(Ok((stream, _))) => stream,
            Ok(Err(_)) => {
                tokio::time::sleep(STATUS_LIMIT).await;
                continue;
            }
            Err(_) => continue,
        };
        let order = tokio::time::timeout(STATUS_LIMIT, hear(&mut stream)).await;
        let order = order.ok().flatten().unwrap_or_default();
        if let (Some(cached), Some(capacity)) = (&cached, order.cache) {
            cached.order(capacity);
        }
        if let Some(at_max) = order.at_max {
            ordered_at = Instant::now();
            disks.iter().for_each(|disk| disk.admit(!at_max.contains(&disk.vm)));
        }
        let disks = disks.iter().map(|disk| (disk.name.clone(), disk.status())).collect();
        let status = Status { disks, cache: cached.as_ref().map(Cached::reading) };
        if let Ok(text) = serde_json::to_vec(&status) {
            // It does not matter if the client does not read the answer.
            let _ = tokio::time::timeout(STATUS_LIMIT, stream.write_all(&text)).await;
        }
    }
}

/// Reads an order; `None`: it is missing or invalid.
async fn hear(stream: &mut UnixStream) -> Option<Order> {
    let mut line = Vec::new();
    BufReader::new(stream).take(MOST_ORDER).read_until(b'\n', &mut line).await.ok()?;
    serde_json::from_slice(&line).ok()
}
