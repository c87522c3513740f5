//! Servers of the same memory by NBD: ours, and two established ones.
//!
//! `nbdkit` and `qemu-storage-daemon` come from the distribution, unpacked privately like the
//! lab's QEMU. Ours is this program's own `serve-memory`: a page server of one export, which
//! consists of the layer `memory` alone.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use overbook::pki::{self, CertificateRequest, Purpose};
use pageserver::layer::Layer;
use pageserver::layers::fault::{FaultLayer, InjectedFaults};
use pageserver::layers::memory::Memory;
use pageserver::nbd::request::Export;
use pageserver::server::{Catalogue, Limits, Opened, Server, Who, of_layer};
use pageserver::tls::Acceptor;
use sys::process::{Child, Spawn};

use crate::cache::Cache;
use crate::interrupt;
use crate::lab::LabError;
use crate::nbd_load::{Address, EXPORT, Load};
use crate::packages::Unpacked;

/// The name of the hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "serve-memory";
const MIB: u64 = 1 << 20;
/// Memory as a file system, for the one server that has no memory of its own.
const SHARED_MEMORY: &str = "/dev/shm";
const START_LIMIT: Duration = Duration::from_secs(10);
const END: Duration = Duration::from_secs(5);

/// The server's implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerKind {
    Ours,
    Nbdkit,
    Qemu,
}

/// The transport between a server and its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Unix,
    Tcp,
    Tls,
}

impl ServerKind {
    pub(crate) const ALL: [Self; 3] = [Self::Ours, Self::Nbdkit, Self::Qemu];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Nbdkit => "nbdkit",
            Self::Qemu => "qemu-storage-daemon",
        }
    }
}

impl Transport {
    pub(crate) const ALL: [Self; 3] = [Self::Unix, Self::Tcp, Self::Tls];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }

    /// The address at which a server in `dir` is to listen.
    fn address(self, kind: ServerKind, dir: &Path) -> io::Result<Address> {
        Ok(match self {
            Self::Unix => Address::Unix(dir.join(format!("{}.sock", kind.name()))),
            Self::Tcp => Address::Tcp(free_port()?),
            Self::Tls => Address::Tls(free_port()?, dir.to_owned()),
        })
    }
}

/// The programs of the other two servers.
pub(crate) struct Programs(Unpacked);

impl Programs {
    /// Takes them from the cache, else from the distribution.
    pub(crate) fn provide() -> Result<Self, LabError> {
        let unpacked = Unpacked::provide(&Cache::open()?, "nbd-servers", &["nbdkit", "qemu-utils"]);
        Ok(Self(unpacked.map_err(io::Error::other)?))
    }

    fn spawn(&self, program: &str) -> Spawn {
        Spawn::new(self.0.program(program)).env("LD_LIBRARY_PATH", self.0.libraries())
    }

    fn nbdkit(&self, address: &Address, size_mib: u64) -> Spawn {
        let plugin = "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so";
        let spawn = self.spawn("nbdkit").args(["--foreground", "--exit-with-parent"]);
        let spawn = match address {
            Address::Unix(path) => spawn.arg("--unix").arg(path),
            Address::Tcp(at) | Address::Tls(at, _) => {
                spawn.args(["--ipaddr", "127.0.0.1", "--port", &at.port().to_string()])
            }
        };
        let spawn = match address {
            Address::Tls(_, dir) => {
                let spawn = spawn.args(["--tls", "require", "--tls-verify-peer"]);
                spawn.arg("--tls-certificates").arg(dir)
            }
            _ => spawn,
        };
        spawn.arg(self.0.root().join(plugin)).arg(format!("size={}", size_mib * MIB))
    }

    fn qemu(&self, address: &Address, file: &Path) -> Spawn {
        let file = file.display();
        let spawn = self.spawn("qemu-storage-daemon").arg("--blockdev");
        let spawn = spawn.arg(format!("driver=file,node-name={EXPORT},filename={file}"));
        let at =
            |at: &SocketAddr| format!("addr.type=inet,addr.host=127.0.0.1,addr.port={}", at.port());
        let (spawn, listen) = match address {
            Address::Unix(path) => (spawn, format!("addr.type=unix,addr.path={}", path.display())),
            Address::Tcp(to) => (spawn, at(to)),
            Address::Tls(to, dir) => {
                let dir = dir.display();
                let tls =
                    format!("tls-creds-x509,id=tls,endpoint=server,verify-peer=yes,dir={dir}");
                (spawn.arg("--object").arg(tls), at(to) + ",tls-creds=tls")
            }
        };
        let export = format!("type=nbd,id=export,node-name={EXPORT},writable=on");
        spawn.arg("--nbd-server").arg(listen).arg("--export").arg(export)
    }
}

/// A running server; dropping it ends the server.
pub(crate) struct Running {
    pub(crate) kind: ServerKind,
    pub(crate) way: Transport,
    pub(crate) child: Child,
    pub(crate) load: Load,
    _file: Option<tempfile::NamedTempFile>,
}

/// The delays of our server's reads, as of a disk with one head.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slow {
    /// The delay of each read, in microseconds.
    pub(crate) read_us: u64,
    /// The additional delay of each byte, in nanoseconds.
    pub(crate) ns_per_byte: f64,
}

impl Running {
    /// Starts it on these CPUs (empty: on any) in `dir`, which also holds the certificates, and
    /// writes all its memory once.
    pub(crate) fn start(
        (kind, way): (ServerKind, Transport),
        programs: &Programs,
        cpus: &[usize],
        dir: &Path,
        size_mib: u64,
    ) -> Result<Self, LabError> {
        let address = way.address(kind, dir)?;
        let mut file = None;
        let spawn = match kind {
            ServerKind::Ours => return Self::ours(way, cpus, dir, size_mib, Slow::default()),
            ServerKind::Nbdkit => programs.nbdkit(&address, size_mib),
            ServerKind::Qemu => {
                let memory = tempfile::NamedTempFile::new_in(SHARED_MEMORY)?;
                memory.as_file().set_len(size_mib * MIB)?;
                let spawn = programs.qemu(&address, memory.path());
                file = Some(memory);
                spawn
            }
        };
        Self::run((kind, way), &address, spawn.on_cpus(cpus), dir, file)
    }

    /// Same as [`Self::start`], for our server, which may be slow on purpose.
    pub(crate) fn ours(
        way: Transport,
        cpus: &[usize],
        dir: &Path,
        size_mib: u64,
        slow: Slow,
    ) -> Result<Self, LabError> {
        let address = way.address(ServerKind::Ours, dir)?;
        let spawn = Spawn::new(std::env::current_exe()?).arg(SUBCOMMAND);
        let spawn = spawn.args(["--size-mb", &size_mib.to_string()]);
        let spawn = spawn.args(["--read-us", &slow.read_us.to_string()]);
        let spawn = spawn.args(["--ns-per-byte", &slow.ns_per_byte.to_string()]);
        let spawn = match &address {
            Address::Unix(path) => spawn.arg("--unix").arg(path),
            Address::Tcp(at) => spawn.args(["--tcp", &at.to_string()]),
            Address::Tls(at, dir) => spawn.args(["--tcp", &at.to_string()]).arg("--tls").arg(dir),
        };
        Self::run((ServerKind::Ours, way), &address, spawn.on_cpus(cpus), dir, None)
    }

    fn run(
        (kind, way): (ServerKind, Transport),
        address: &Address,
        spawn: Spawn,
        dir: &Path,
        file: Option<tempfile::NamedTempFile>,
    ) -> Result<Self, LabError> {
        let log = dir.join(format!("{}-{}.log", kind.name(), way.name()));
        let spawn = spawn.output_to(std::fs::File::create(&log)?)?;
        let mut child = spawn.die_with_parent().spawn()?;
        let begun = Instant::now();
        let mut load = loop {
            match Load::connect(address, EXPORT) {
                Ok(load) => break load,
                Err(error) if child.try_wait()?.is_some() || begun.elapsed() > START_LIMIT => {
                    let said = std::fs::read_to_string(&log).unwrap_or_default();
                    let text = format!("{} by {}: {error}\n{said}", kind.name(), way.name());
                    return Err(io::Error::other(text).into());
                }
                Err(_) => interrupt::sleep(Duration::from_millis(50))?,
            }
        };
        load.fill()?;
        Ok(Self { kind, way, child, load, _file: file })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // If the end fails now, the server ends with this process.
        let _ = self.child.end(END);
    }
}

/// A port that no process used a moment ago.
pub(crate) fn free_port() -> io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

/// Writes certificates of a new authority, under the file names that all three servers expect,
/// for this host and for `address`.
pub fn certificates(dir: &Path, address: Ipv4Addr) -> Result<(), LabError> {
    let authority = dir.join("pki");
    let addresses = ["localhost".to_owned(), address.to_string()];
    let order =
        CertificateRequest { name: "lab", addresses: &addresses, valid: VALID, renews: false };
    let made = pki::init(&authority).and_then(|()| pki::host(&authority, order));
    let own = made.map_err(io::Error::other)?;
    for (purpose, side) in [(Purpose::Repository, "server"), (Purpose::Disks, "client")] {
        for file in ["ca-cert.pem", &format!("{side}-cert.pem"), &format!("{side}-key.pem")] {
            std::fs::copy(own.join(purpose.directory()).join(file), dir.join(file))?;
        }
    }
    Ok(())
}

/// The lifetime of its certificates.
const VALID: Duration = Duration::from_secs(30 * 24 * 3600);

/// One export of memory.
struct One(Arc<dyn Layer>);

impl Catalogue for One {
    fn list(&self) -> Vec<String> {
        vec![EXPORT.to_owned()]
    }

    fn find(&self, name: &str, _: &Who) -> Option<Export> {
        (name == EXPORT).then(|| of_layer(&*self.0))
    }

    fn open(&self, name: &str, _: &Who) -> Option<Opened> {
        (name == EXPORT).then(|| Opened { name: name.to_owned(), layer: self.0.clone() })
    }
}

/// The arguments of our server of memory.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeMemory {
    #[arg(long)]
    size_mb: u64,
    #[arg(long)]
    unix: Option<PathBuf>,
    #[arg(long, required_unless_present = "unix")]
    tcp: Option<SocketAddr>,
    #[arg(long)]
    tls: Option<PathBuf>,
    /// Delay of each read, in microseconds
    #[arg(long, default_value_t = 0)]
    read_us: u64,
    /// Additional delay of each byte of a read, in nanoseconds
    #[arg(long, default_value_t = 0.0)]
    ns_per_byte: f64,
}

impl ServeMemory {
    /// Serves until a signal comes.
    pub(crate) fn run(&self) -> Result<(), LabError> {
        let tls = self.tls.as_deref().map(Acceptor::new).transpose().map_err(io::Error::other)?;
        let memory = Arc::new(Memory::new(self.size_mb * MIB));
        let (delay, ns_per_byte) = (Duration::from_micros(self.read_us), self.ns_per_byte);
        let layer: Arc<dyn Layer> = if delay.is_zero() {
            memory
        } else {
            Arc::new(FaultLayer::over(
                memory,
                InjectedFaults { delay, ns_per_byte, ..InjectedFaults::default() },
            ))
        };
        let catalogue = Arc::new(One(layer));
        let server = Server::new(catalogue, tls, Limits::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            if let Some(path) = &self.unix {
                tokio::spawn(server.clone().listen_unix(tokio::net::UnixListener::bind(path)?));
            }
            if let Some(at) = self.tcp {
                tokio::spawn(server.listen_tcp(tokio::net::TcpListener::bind(at).await?));
            }
            while !interrupt::interrupted() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok(())
        })
    }
}
