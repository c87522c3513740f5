//! A systemd of a test's own, for units as they are installed.
//!
//! **Idea.** A manager for a user's units, run by root, gives a unit all that it asks for: mounts,
//! capabilities, filters of system calls. It has a mount namespace and a cgroup of its own, so
//! nothing of the machine's systemd, if it has one, is touched. In that namespace `/usr/bin` has
//! the `overbook` that was built. It shares the machine's process numbers, which a systemd that is
//! PID 1 could not: so QEMUs that run outside are there for its units.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use lab::command::own_program;
use lab::packages::Unpacked;
use overbook_tests::{text, unpacked};
use sys::process::{Child, Spawn};

/// How long anything may take that systemd is asked for: guests' memory comes back meanwhile.
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

/// Where the units are.
pub(crate) fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging")
}

/// systemd's programs: the machine's, or unpacked.
pub(crate) struct Programs(Option<Unpacked>);

/// `None` (and a word about it) where they cannot be had.
pub(crate) fn programs() -> Option<Programs> {
    if Path::new("/usr/bin/systemd-analyze").exists() {
        return Some(Programs(None));
    }
    unpacked("systemd", &["systemd"]).map(|unpacked| Programs(Some(unpacked)))
}

impl Programs {
    /// One of them.
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

    /// Where those that were unpacked have their libraries: some a level deeper than others.
    fn libraries(&self) -> Option<(&'static str, String)> {
        let all = self.0.as_ref()?.libraries();
        let deeper = all.split(':').map(|dir| format!("{dir}/systemd")).collect::<Vec<_>>();
        Some(("LD_LIBRARY_PATH", format!("{all}:{}", deeper.join(":"))))
    }
}

/// One that runs; all that it has started ends with it.
pub(crate) struct Systemd<'a> {
    programs: &'a Programs,
    /// Its directory: its units see the files in it, too.
    dir: PathBuf,
    config: PathBuf,
    cgroup: PathBuf,
    _manager: Child,
}

impl<'a> Systemd<'a> {
    /// Starts it, with its files below `dir`; its units are told of `config`.
    pub(crate) fn start(programs: &'a Programs, dir: &Path, config: &Path) -> Self {
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

    /// Installs a unit as it is packaged, told of the configuration and of where its state is.
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

    /// Adds a packaged file to a unit, as its head says.
    pub(crate) fn add(&self, file: &str, unit: &str) {
        let to = self.units().join(format!("{unit}.d"));
        fs::create_dir_all(&to).unwrap();
        fs::copy(packaging().join(file), to.join(file)).unwrap();
        self.must(&["daemon-reload"]);
    }

    /// Tells a unit something more.
    pub(crate) fn tell(&self, unit: &str, what: &str) {
        let to = self.units().join(format!("{unit}.d"));
        fs::create_dir_all(&to).unwrap();
        fs::write(to.join("told.conf"), what).unwrap();
        self.must(&["daemon-reload"]);
    }

    /// Has systemd do something, which must succeed; what it says.
    pub(crate) fn must(&self, arguments: &[&str]) -> String {
        let output = self.systemctl(arguments);
        if !output.status.success() {
            let unit = arguments.last().unwrap();
            let status = self.systemctl(&["status", "--no-pager", "--full", unit]);
            panic!("{arguments:?}: {}{}\n{}", text(&output), text(&status), self.log());
        }
        String::from_utf8(output.stdout).unwrap()
    }

    /// The process of a unit that runs.
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

    /// A shell's words for asking it.
    pub(crate) fn systemctl_in_words(&self) -> String {
        let systemctl = self.programs.command("systemctl");
        let known = systemctl.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let known = known.map(|(name, value)| format!("{}={}", name.display(), value.display()));
        let places = places(&self.dir.join("systemd")).into_iter();
        let places = places.map(|(name, place)| format!("{name}={}", place.display()));
        let all: Vec<_> = known.chain(places).collect();
        // Not by the path of who asks, in which these words may be what `systemctl` stands for.
        let path = "PATH=/usr/bin:/bin";
        format!("env {path} {} {} --user", all.join(" "), systemctl.get_program().display())
    }

    /// The log of it and of its units.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log/systemd")).unwrap_or_default()
    }
}

impl Drop for Systemd<'_> {
    fn drop(&mut self) {
        // Whatever is left in it; that there is nothing more is seen by its being removed.
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !remove(&self.cgroup) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Where such a manager looks for its units, and is to be spoken to.
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
