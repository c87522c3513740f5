//! A report about Proxmox's VMs from a process that may hang in their files ([`drivers::proxmox`]).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use drivers::lines::line;
use drivers::proxmox::{CLUSTER, RUN, read};
use model::proxmox::ProxmoxReport;
use sys::process::{Signal, Spawn};

use crate::helper::Helper;

/// Pause between two reports.
const EVERY: Duration = Duration::from_secs(5);
/// Maximum size of a report. A VM takes some hundred bytes, and its `args` some more.
pub(crate) const MOST_REPORT: usize = 64 << 20;
/// Time in which the first report comes.
const PATIENCE: Duration = Duration::from_secs(5);

/// The directories of a node.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NodePaths {
    /// The directory of PIDs
    #[arg(long, hide = true, default_value = RUN)]
    pub(crate) run: PathBuf,
    /// The mount point of the cluster file system
    #[arg(long, hide = true, default_value = CLUSTER)]
    pub(crate) cluster: PathBuf,
}

impl Default for NodePaths {
    fn default() -> Self {
        Self { run: RUN.into(), cluster: CLUSTER.into() }
    }
}

impl NodePaths {
    /// Whether this host is a node of Proxmox.
    pub(crate) fn is_node(&self) -> bool {
        self.run.is_dir()
    }

    /// The file of a VM.
    pub(crate) fn conf(&self, vmid: u32) -> PathBuf {
        self.cluster.join(format!("qemu-server/{vmid}.conf"))
    }

    /// Writes a report to standard output now and then, until nothing reads them any more.
    pub(crate) fn watch(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        loop {
            let written = out.write_all(&line(&read(&self.run, &self.cluster))?);
            match written.and_then(|()| out.flush()) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
            thread::sleep(EVERY);
        }
    }

    /// One report.
    ///
    /// # Errors
    /// None comes in time.
    pub(crate) fn report(&self) -> Result<ProxmoxReport, String> {
        let (up, stdout) = io::pipe().map_err(|error| error.to_string())?;
        let spawn = self.reader().stdout(stdout);
        let child = spawn.die_with_parent().spawn().map_err(|error| error.to_string())?;
        let (sender, receiver) = mpsc::channel();
        // The thread ends when the child does, or with this process.
        thread::spawn(move || {
            let mut line = Vec::new();
            let within = up.take(MOST_REPORT as u64);
            let read = BufReader::new(within).read_until(b'\n', &mut line);
            let _ = sender.send(read.map(|_| line));
        });
        let line = receiver.recv_timeout(PATIENCE);
        // The kernel ends it once it hangs no more.
        let _ = child.signal(Signal::KILL);
        let hangs = || format!("{} does not answer", self.cluster.display());
        let line = line.map_err(|_| hangs())?.map_err(|error| error.to_string())?;
        serde_json::from_slice(&line).map_err(|error| format!("no report: {error}"))
    }

    /// The command that writes reports.
    pub(crate) fn reader(&self) -> Spawn {
        // One that hangs holds nothing of its parent's open.
        let spawn = Helper::program().stderr(Stdio::null()).arg("proxmox").arg("watch");
        spawn.arg("--run").arg(&self.run).arg("--cluster").arg(&self.cluster)
    }
}
