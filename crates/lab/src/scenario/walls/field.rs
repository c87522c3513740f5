//! Attackers, and their targets other than the guests' own daemon and disk.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sys::process::{Child, Spawn};

use crate::attack::{Attacker, NOBODY};
use crate::inside::built;
use crate::lab::{Lab, LabError};
use crate::nbd_servers::certificates;
use crate::{interrupt, pinning};

/// The attackers' CPU; the guests have the other one.
pub(super) const CPU: usize = 1;
/// Addresses of this host from which clients of the repository connect.
const FROM: [&str; 4] = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"];
/// The name of QEMU's program; Overbook considers no other.
const QEMU: &str = "qemu-system-x86_64";
/// Addresses that a user binds before shims do.
const SQUATTED: &str = "1000";
/// A disk that no guest uses.
const SPARE: &str = "spare";
const END: Duration = Duration::from_secs(10);
const BEGIN: Duration = Duration::from_secs(20);

/// Servers and directories that exist for the whole scenario.
pub(super) struct Field {
    dir: PathBuf,
    /// The repository, which lends memory by TLS.
    pub(super) repository: Child,
    repository_at: SocketAddr,
    api_at: SocketAddr,
    /// Serves the attackers' disks: one whose repository lies, and one whose client is stuck.
    pub(super) misled: Option<Child>,
}

impl Field {
    /// Starts the servers in `dir`. The daemon of `lab` will, when it starts, listen on TCP and
    /// look for QEMUs in the attackers' directory.
    pub(super) fn start(dir: &Path, lab: &Lab) -> Result<Self, LabError> {
        fs::create_dir_all(dir.join("qmp"))?;
        chown(dir.join("qmp"), Some(NOBODY), Some(NOBODY))?;
        File::create(dir.join(SPARE))?;
        chown(dir.join(SPARE), Some(NOBODY), Some(NOBODY))?;
        let (repository_at, api_at) = (free_port()?, free_port()?);
        certificates(dir, Ipv4Addr::LOCALHOST)?;
        let repository = Spawn::new(built("overbook")?)
            .args(["repository", "--memory", "64MiB", "--listen", &repository_at.to_string()])
            .arg("--tls")
            .arg(dir)
            .output_to(File::create(dir.join("repository.log"))?)?
            .die_with_parent()
            .spawn()?;
        let token = dir.join("token");
        fs::write(&token, "0123456789abcdef0123456789abcdef")?;
        fs::set_permissions(&token, Permissions::from_mode(0o600))?;
        let drop_ins = lab.dir().join("etc").join("overbook.d");
        fs::create_dir_all(&drop_ins)?;
        let (own, theirs) = (lab.dir().join("qmp/*.sock"), dir.join("qmp/*.sock"));
        let text = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [{own:?}, {theirs:?}]\n\
             [api]\ntcp = \"{api_at}\"\ntoken_file = {token:?}\n"
        );
        fs::write(drop_ins.join("walls.toml"), text)?;
        let dir = dir.to_owned();
        Ok(Self { dir, repository, repository_at, api_at, misled: None })
    }

    /// Starts all attackers, each under its name.
    pub(super) fn attack(
        &mut self,
        round: u32,
    ) -> Result<BTreeMap<&'static str, Attacker>, LabError> {
        let (repository, api) = (self.repository_at.to_string(), self.api_at.to_string());
        let silent: Vec<&str> = std::iter::once(repository.as_str()).chain(FROM).collect();
        let spare = self.dir.join(format!("disks/{SPARE}.sock")).display().to_string();
        let fat = self.dir.join(format!("fat-{round}.sock"));
        let lies = fat.display().to_string();
        let [flood, qemu, orphan, liar] = ["flood", "witness", "orphan", "ram_liar"]
            .map(|name| self.dir.join(format!("qmp/{name}-{round}.sock")).display().to_string());
        let nobody = Some(NOBODY);
        let attackers = pinning::on_cpu(CPU, || {
            let qemu_like = |name, args: &[&str]| Attacker::start_as(QEMU, name, args, nobody);
            Ok(BTreeMap::from([
                ("fat_repository", Attacker::start("fat_repository", &[&lies], None)?),
                ("orphan", Attacker::start("orphan", &[&orphan], nobody)?),
                ("qemu", qemu_like("qemu", &[&qemu, "witness"])?),
                ("qmp_flood", qemu_like("qmp_flood", &[&flood])?),
                ("ram_liar", qemu_like("ram_liar", &[&liar])?),
                ("silent_clients", Attacker::start("silent_clients", &silent, nobody)?),
                ("slow_http", Attacker::start("slow_http", &[&api], nobody)?),
                ("squat", Attacker::start("squat", &[SQUATTED], nobody)?),
                // It waits for the socket of its own disk.
                ("stuck_nbd", Attacker::start("stuck_nbd", &[&spare, SPARE], nobody)?),
            ]))
        })?;
        pinning::on_cpu(CPU, || self.mislead(&fat))?;
        Ok(attackers)
    }

    /// Starts the process of the attackers' disks once `socket` exists. One of the disks uses the
    /// repository at `socket`.
    fn mislead(&mut self, socket: &Path) -> Result<(), LabError> {
        let end = Instant::now() + BEGIN;
        while !socket.exists() && Instant::now() < end {
            interrupt::sleep(Duration::from_millis(50))?;
        }
        self.relieve()?;
        let at = self.dir.display();
        let config = self.dir.join("misled.toml");
        let text = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/misled.api\"\n\
             [group.misled]\nvms = [\"misled\"]\n[disk.fat]\nvm = \"misled\"\n\
             file = \"{at}/file\"\nsize = \"64MiB\"\nrepositories = [{socket:?}]\n\
             [disk.{SPARE}]\nvm = \"misled\"\nfile = \"{at}/{SPARE}\"\nsize = \"64MiB\"\n"
        );
        fs::write(&config, text)?;
        let log = File::options().create(true).append(true).open(self.dir.join("misled.log"))?;
        let spawn = Spawn::new(built("overbook")?).arg("--config").arg(config);
        let spawn = spawn.args(["disks", "misled"]).output_to(log)?.die_with_parent();
        self.misled = Some(spawn.spawn()?);
        Ok(())
    }

    /// Ends the process that [`Self::attack`] has started.
    pub(super) fn relieve(&mut self) -> Result<(), LabError> {
        if let Some(mut misled) = self.misled.take() {
            misled.end(END)?;
        }
        Ok(())
    }

    /// Ends all that was started.
    pub(super) fn end(mut self) -> Result<(), LabError> {
        self.relieve()?;
        self.repository.end(END)?;
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

/// A port of the loopback interface that nothing listens on now.
fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}
