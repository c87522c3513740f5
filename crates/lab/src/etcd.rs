//! etcd as a pool has it: several members on this host, each a process that can be killed alone.
//!
//! The program comes from the distribution and is unpacked privately, like the lab's QEMU.
//! Members listen on loopback ports that were free a moment ago.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sys::process::{Child, Signal, Spawn};

use crate::cache::Cache;
use crate::lab::LabError;
use crate::nbd_servers::free_port;
use crate::packages::{Apt, PackageError};

/// Timeout for the end of a member.
const GRACE: Duration = Duration::from_secs(5);

/// Members of one store; dropping it ends them.
pub struct Members {
    program: PathBuf,
    dir: PathBuf,
    /// Directory of the certificates for the client side; `None`: without TLS.
    tls: Option<PathBuf>,
    members: Vec<EtcdMember>,
}

struct EtcdMember {
    clients: SocketAddr,
    peers: SocketAddr,
    /// `None`: it was killed.
    child: Option<Child>,
}

impl Members {
    /// Starts `n` members, with their files in `dir`.
    pub fn start(n: usize, dir: &Path) -> Result<Self, LabError> {
        Self::start_with(n, dir, None)
    }

    /// Same as [`start`](Self::start) with TLS: clients need certificates. `tls` holds the
    /// authority's certificate and the members' own.
    pub fn start_secured(n: usize, dir: &Path, tls: &Path) -> Result<Self, LabError> {
        Self::start_with(n, dir, Some(tls.to_owned()))
    }

    fn start_with(n: usize, dir: &Path, tls: Option<PathBuf>) -> Result<Self, LabError> {
        let cache = Cache::open()?;
        let fill = |into: &Path| -> Result<(), PackageError> {
            eprintln!("lab: unpacking etcd into {}", into.display());
            Apt::open(&cache)?.unpack(&["etcd-server"], into)
        };
        let root = cache.directory("etcd", fill).map_err(io::Error::other)?;
        let member = || Ok(EtcdMember { clients: free_port()?, peers: free_port()?, child: None });
        let members = (0..n).map(|_| member()).collect::<io::Result<_>>()?;
        let program = root.join("usr/bin/etcd");
        let mut all = Self { program, dir: dir.to_owned(), tls, members };
        for i in 0..n {
            all.revive(i)?;
        }
        Ok(all)
    }

    /// URLs at which clients ask the members.
    pub fn endpoints(&self) -> Vec<String> {
        let scheme = self.scheme();
        self.members.iter().map(|member| format!("{scheme}://{}", member.clients)).collect()
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Number of members, killed ones included.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Starts a killed member again, with its data on disk.
    pub fn revive(&mut self, i: usize) -> io::Result<()> {
        let name = |i: usize| format!("etcd-{i}");
        let all = self.members.iter().enumerate();
        let all: Vec<_> = all.map(|(i, m)| format!("{}=http://{}", name(i), m.peers)).collect();
        let member = &self.members[i];
        let (clients, peers) =
            (format!("{}://{}", self.scheme(), member.clients), format!("http://{}", member.peers));
        let log = File::create(self.dir.join(format!("{}.log", name(i))))?;
        let mut spawn = Spawn::new(&self.program);
        if let Some(tls) = &self.tls {
            let files = [
                ("--cert-file", "server-cert.pem"),
                ("--key-file", "server-key.pem"),
                ("--trusted-ca-file", "ca-cert.pem"),
            ];
            for (option, file) in files {
                spawn = spawn.arg(option).arg(tls.join(file));
            }
            spawn = spawn.arg("--client-cert-auth");
        }
        let spawn = spawn
            .args(["--name", &name(i), "--data-dir"])
            .arg(self.dir.join(name(i)))
            .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &all.join(","), "--logger", "zap"])
            .output_to(log)?
            .die_with_parent();
        self.members[i].child = Some(spawn.spawn()?);
        Ok(())
    }

    /// Kills a member.
    pub fn kill(&mut self, i: usize) -> io::Result<()> {
        let Some(mut child) = self.members[i].child.take() else { return Ok(()) };
        child.signal(Signal::KILL)?;
        child.wait_for(GRACE).map(|_| ())
    }

    /// Stops a member, or lets it continue. A stopped member answers no client, and its
    /// connections stay.
    pub fn hold(&self, i: usize, is_held: bool) -> io::Result<()> {
        let signal = if is_held { Signal::STOP } else { Signal::CONT };
        self.members[i].child.as_ref().map_or(Ok(()), |child| child.signal(signal))
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for i in 0..self.members.len() {
            // It ends with its parent in any case.
            let _ = self.kill(i);
        }
    }
}
