//! A clean Debian host for one test: its own processes, files and systemd as process 1.
//!
//! **Idea.** Namespaces are enough. The tree comes from the lab's cache; an overlay takes all
//! changes and ends with the test. The kernel is the machine's. No udev runs, and no network is
//! needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use overbook_tests::text;
use sys::process::{Child, Spawn, children_of};

const LIMIT: Duration = Duration::from_secs(60);
const PATH: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
/// `$1`: its directory, `$2`: its cgroup, `$3`: the clean tree, `$4`...: its first program.
const BOOT: &str = r#"
set -e
echo $$ > "$2/cgroup.procs"
exec unshare --pid --mount --cgroup --uts --ipc --fork --kill-child --propagation private sh -ec '
    dir=$1 tree=$3 root=$1/root
    shift 3
    mount -t overlay overlay -o "lowerdir=$tree,upperdir=$dir/upper,workdir=$dir/work" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sys "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    for place in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$place"; done
    for device in null zero full random urandom tty; do
        touch "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/lock"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    mount --bind "$dir/shared" "$root/mnt"
    cd "$root"
    mkdir -p old
    pivot_root . old
    umount -l /old
    hostname clean
    # systemd sets the name that is written there.
    echo clean > /etc/hostname
    exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"' sh "$@"
"#;

/// A host that runs; it ends with all its processes when dropped.
pub(crate) struct CleanHost {
    dir: tempfile::TempDir,
    cgroup: PathBuf,
    /// Its process 1, by its number outside.
    init: u32,
    _boot: Child,
}

impl CleanHost {
    /// A host with systemd.
    pub(crate) fn boot(tree: &Path) -> Self {
        let log = "--log-target=console";
        let host = Self::start(tree, &["/lib/systemd/systemd", "--system", log]);
        let deadline = Instant::now() + LIMIT;
        loop {
            let state = host.run("systemctl is-system-running");
            if matches!(String::from_utf8_lossy(&state.stdout).trim(), "running" | "degraded") {
                return host;
            }
            assert!(Instant::now() < deadline, "systemd: {}\n{}", text(&state), host.log());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// A host whose process 1 is a shell: systemd is installed, and does not run.
    pub(crate) fn without_systemd(tree: &Path) -> Self {
        Self::start(tree, &["sh", "-c", "while :; do sleep 1; done"])
    }

    fn start(tree: &Path, init: &[&str]) -> Self {
        let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/var/tmp").unwrap();
        for below in ["upper", "work", "root", "shared"] {
            fs::create_dir(dir.path().join(below)).unwrap();
        }
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let cgroups = mounts.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            (words[2] == "cgroup2").then(|| PathBuf::from(words[1]))
        });
        let cgroup = cgroups.expect("no cgroup2 is mounted").join(dir.path().file_name().unwrap());
        fs::create_dir(&cgroup).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let spawn = Spawn::new("sh").args(["-c", BOOT, "sh"]).arg(dir.path()).arg(&cgroup);
        let spawn = spawn.arg(tree).args(init).output_to(log).unwrap();
        let boot = spawn.die_with_parent().spawn().unwrap();
        let deadline = Instant::now() + LIMIT;
        let mut host = Self { dir, cgroup, init: 0, _boot: boot };
        // The name comes after everything else.
        while host.init == 0 || !host.run("test $(hostname) = clean").status.success() {
            assert!(Instant::now() < deadline, "it does not start: {}", host.log());
            std::thread::sleep(Duration::from_millis(100));
            let children = children_of(host._boot.identity().pid).unwrap_or_default();
            host.init = children.first().map_or(0, |child| child.pid);
        }
        host
    }

    /// The same; the line must succeed. Returns all that it prints.
    pub(crate) fn must(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {}\n{}", text(&output), self.log());
        text(&output)
    }

    pub(crate) fn run(&self, line: &str) -> Output {
        let pid = self.init.to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &pid, "--mount", "--pid", "--cgroup", "--uts", "--ipc"]);
        command.args(["env", "-i", PATH, "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8"]);
        command.args(["timeout", "170", "sh", "-c", line]).output().unwrap()
    }

    /// A directory that it sees as `/mnt`.
    pub(crate) fn shared(&self) -> PathBuf {
        self.dir.path().join("shared")
    }

    /// The output of its process 1, and the journal.
    pub(crate) fn log(&self) -> String {
        let console = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let pid = self.init.to_string();
        let mut journal = Command::new("nsenter");
        journal.args([
            "--target",
            &pid,
            "--mount",
            "--pid",
            "journalctl",
            "-n",
            "80",
            "--no-pager",
        ]);
        console + &journal.output().map(|output| text(&output)).unwrap_or_default()
    }
}

impl Drop for CleanHost {
    fn drop(&mut self) {
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        let deadline = Instant::now() + LIMIT;
        while !remove(&self.cgroup) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
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
