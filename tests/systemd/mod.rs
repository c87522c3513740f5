//! A systemd instance for one test, for units as they are installed.
//!
//! **Idea.** A user manager run by root gives a unit everything that it asks for: mounts,
//! capabilities, system call filters. It has its own mount namespace and cgroup, so the machine's
//! systemd, if there is one, is not touched. In that namespace `/usr/bin` has the built
//! `overbook`. The manager shares the machine's pid namespace, which a systemd as PID 1 could
//! not, so its units see QEMUs that run outside.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use lab::command::own_program;
use lab::packages::Unpacked;
use overbook_tests::{text, unpacked};
use sys::process::{Child, Spawn};

/// Timeout of requests to systemd, during which guests' memory comes back.
const LIMIT: &str = "170";
/// `$1`: its directory, `$2`: its cgroup, `$3`: the program.
const BOOT: &str = r#"
set -e
echo $$ > "$2/cgroup.procs"
exec unshare --mount --cgroup --propagation private sh -ec '
    # Where it is no mount point, units that get a /proc of their own get an empty /run.
    mountpoint -q /run || mount --rbind /run /run
    umount -R /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mkdir -p /run/systemd
    mount -t tmpfs tmpfs /run/systemd
    mkdir -p /run/systemd/system /run/systemd/inaccessible
    # A unit that asks the system to start another one asks this manager.
    ln -s "$XDG_RUNTIME_DIR/systemd/private" /run/systemd/private
    # What PID 1 makes: it is mounted over what a unit may not reach.
    cd /run/systemd/inaccessible
    touch reg && mkdir dir && mkfifo fifo && mknod chr c 0 0 && mknod blk b 0 0
    chmod 000 *
    mount -t overlay overlay -o "lowerdir=$1/bin:/usr/bin" /usr/bin
    exec "$2" --user --unit=basic.target' sh "$1" "$3"
"#;

/// The directory of the units.
pub(crate) fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging")
}

/// systemd's programs: the machine's, or unpacked ones.
pub(crate) struct UnitPrograms(Option<Unpacked>);

/// `None`, with a message: not available.
pub(crate) fn programs() -> Option<UnitPrograms> {
    if Path::new("/usr/bin/systemd-analyze").exists() {
        return Some(UnitPrograms(None));
    }
    unpacked("systemd", &["systemd"]).map(|unpacked| UnitPrograms(Some(unpacked)))
}

impl UnitPrograms {
    /// A command that runs one of them.
    pub(crate) fn command(&self, name: &str) -> Command {
        let program = self.0.as_ref().map_or_else(|| name.into(), |own| own.program(name));
        let mut command = Command::new(program);
        command.envs(self.libraries());
        command
    }

    fn manager(&self) -> PathBuf {
        let below = |root: &Path| root.join("lib/systemd/systemd");
        let own = self.0.as_ref().map(|unpacked| {
            let program = unpacked.program("systemd-analyze");
            below(program.parent().unwrap().parent().unwrap())
        });
        own.unwrap_or_else(|| below(Path::new("/usr")))
    }

    /// Library directories of the unpacked programs, with those one level deeper.
    fn libraries(&self) -> Option<(&'static str, String)> {
        let all = self.0.as_ref()?.libraries();
        let deeper = all.split(':').map(|dir| format!("{dir}/systemd")).collect::<Vec<_>>();
        Some(("LD_LIBRARY_PATH", format!("{all}:{}", deeper.join(":"))))
    }
}

/// A running instance; everything that it has started ends with it.
pub(crate) struct Systemd<'a> {
    programs: &'a UnitPrograms,
    /// The directory of the instance; its units see the files in it.
    dir: PathBuf,
    config: PathBuf,
    cgroup: PathBuf,
    _manager: Child,
}

impl<'a> Systemd<'a> {
    /// Starts an instance with its files below `dir`; its units get `config`.
    pub(crate) fn start(programs: &'a UnitPrograms, dir: &Path, config: &Path) -> Self {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let cgroups = mounts.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            (words[2] == "cgroup2").then(|| PathBuf::from(words[1]))
        });
        let cgroup = cgroups
            .expect("no cgroup2 is mounted")
            .join(dir.file_name().unwrap().to_str().unwrap());
        let cgroup = cgroup.with_extension(std::process::id().to_string());
        fs::create_dir(&cgroup).unwrap();
        let systemd = dir.join("systemd");
        for below in ["bin", "runtime", "home/.config/systemd/user"] {
            fs::create_dir_all(systemd.join(below)).unwrap();
        }
        fs::copy(own_program("overbook").unwrap(), systemd.join("bin/overbook")).unwrap();
        let log = fs::File::create(dir.join("log/systemd")).unwrap();
        let spawn = Spawn::new("sh").args(["-c", BOOT, "sh"]).arg(&systemd).arg(&cgroup);
        let spawn = spawn.arg(programs.manager());
        let told = places(&systemd).into_iter();
        let libraries = programs.libraries().map(|(name, dirs)| (name, PathBuf::from(dirs)));
        let spawn = told.chain(libraries).fold(spawn, |spawn, (name, what)| spawn.env(name, what));
        let manager = spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap();
        let started = Self {
            programs,
            dir: dir.to_owned(),
            config: config.to_owned(),
            cgroup,
            _manager: manager,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !started.systemctl(&["is-active", "basic.target"]).status.success() {
            assert!(Instant::now() < deadline, "systemd does not come up: {}", started.log());
            std::thread::sleep(Duration::from_millis(100));
        }
        started
    }

    /// Installs a packaged unit, with the paths of the configuration and the state.
    pub(crate) fn install(&self, unit: &str) {
        let dir = self.dir.display();
        let told = format!("/usr/bin/overbook --config {}", self.config.display());
        let text = fs::read_to_string(packaging().join(unit)).unwrap();
        let text = text.replace(" --config /etc/overbook/controller.toml", "");
        let text = text.replace("/usr/bin/overbook", &told);
        let text = text.replace("ReadWritePaths=/run/overbook", &format!("ReadWritePaths={dir}"));
        let log = format!("StandardOutput=append:{dir}/log/systemd\nExecStart=");
        fs::write(self.units().join(unit), text.replacen("ExecStart=", &log, 1)).unwrap();
        self.must(&["daemon-reload"]);
    }

    /// Adds a packaged file to a unit, as the head of the file says.
    pub(crate) fn add(&self, file: &str, unit: &str) {
        let to = self.units().join(format!("{unit}.d"));
        fs::create_dir_all(&to).unwrap();
        fs::copy(packaging().join(file), to.join(file)).unwrap();
        self.must(&["daemon-reload"]);
    }

    /// Adds settings to a unit.
    pub(crate) fn tell(&self, unit: &str, what: &str) {
        let to = self.units().join(format!("{unit}.d"));
        fs::create_dir_all(&to).unwrap();
        fs::write(to.join("told.conf"), what).unwrap();
        self.must(&["daemon-reload"]);
    }

    /// Runs `systemctl`, which must succeed; returns its output.
    pub(crate) fn must(&self, arguments: &[&str]) -> String {
        let output = self.systemctl(arguments);
        if !output.status.success() {
            let unit = arguments.last().unwrap();
            let status = self.systemctl(&["status", "--no-pager", "--full", unit]);
            panic!("{arguments:?}: {}{}\n{}", text(&output), text(&status), self.log());
        }
        String::from_utf8(output.stdout).unwrap()
    }

    /// The main process of a running unit.
    pub(crate) fn main_pid(&self, unit: &str) -> u32 {
        self.must(&["show", "--value", "--property=MainPID", unit]).trim().parse().unwrap()
    }

    fn units(&self) -> PathBuf {
        self.dir.join("systemd/home/.config/systemd/user")
    }

    fn systemctl(&self, arguments: &[&str]) -> Output {
        let systemctl = self.programs.command("systemctl");
        let mut command = Command::new("timeout");
        command.arg(LIMIT).arg(systemctl.get_program()).arg("--user").args(arguments);
        command.envs(systemctl.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.envs(places(&self.dir.join("systemd"))).output().unwrap()
    }

    /// The shell words that run `systemctl` for this instance.
    pub(crate) fn systemctl_in_words(&self) -> String {
        let systemctl = self.programs.command("systemctl");
        let known = systemctl.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let known = known.map(|(name, value)| format!("{}={}", name.display(), value.display()));
        let places = places(&self.dir.join("systemd")).into_iter();
        let places = places.map(|(name, place)| format!("{name}={}", place.display()));
        let all: Vec<_> = known.chain(places).collect();
        // A fixed path, because in the caller's path `systemctl` may stand for these words.
        let path = "PATH=/usr/bin:/bin";
        format!("env {path} {} {} --user", all.join(" "), systemctl.get_program().display())
    }

    /// The log of the instance and its units.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log/systemd")).unwrap_or_default()
    }
}

impl Drop for Systemd<'_> {
    fn drop(&mut self) {
        // Kills the remaining processes; the cgroup can be removed once it is empty.
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !remove(&self.cgroup) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Directories where such a manager looks for its units and its socket.
fn places(systemd: &Path) -> [(&'static str, PathBuf); 4] {
    [
        ("HOME", systemd.join("home")),
        ("XDG_RUNTIME_DIR", systemd.join("runtime")),
        ("XDG_CONFIG_HOME", systemd.join("home/.config")),
        ("XDG_STATE_HOME", systemd.join("home")),
    ]
}

/// Removes a cgroup and those below it, if they are empty.
fn remove(cgroup: &Path) -> bool {
    let Ok(entries) = fs::read_dir(cgroup) else { return true };
    let below = entries.flatten().filter(|entry| entry.path().is_dir());
    below.for_each(|entry| {
        remove(&entry.path());
    });
    fs::remove_dir(cgroup).is_ok()
}
