//! The files of disks: who may read them, the file behind a path, and full file systems.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use overbook_tests::{Requirement, ensure, program, requires, take_turn, text};
use sys::process::{Spawn, children_of};

const LIMIT: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65534;

/// A temporary directory with a configuration of one disk in it.
struct DiskHost(tempfile::TempDir);

impl DiskHost {
    fn new(file: &str, size: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
        let at = dir.path().display();
        let config = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/overbook.sock\"\n\
             [group.web]\nvms = [\"web-*\"]\n\
             [disk.swap]\nvm = \"web-1\"\nfile = \"{at}/{file}\"\nsize = \"{size}\"\n"
        );
        fs::write(dir.path().join("overbook.toml"), config).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn overbook(&self, arguments: &[&str]) -> Output {
        let config = self.path("overbook.toml");
        program().arg("--config").arg(config).args(arguments).output().unwrap()
    }

    /// The output of `check` and its exit code.
    fn check(&self) -> (String, Option<i32>) {
        let output = self.overbook(&["check"]);
        (text(&output), output.status.code())
    }

    /// Serves the disk until `is_so` returns true; returns the output.
    fn serve_until(&self, is_so: impl Fn() -> bool) -> String {
        let log = self.path("log");
        let spawn = Spawn::new(program().get_program()).arg("--config");
        let spawn = spawn.arg(self.path("overbook.toml")).args(["disks", "web"]);
        let output = fs::File::create(&log).unwrap();
        let mut child = spawn.output_to(output).unwrap().die_with_parent().spawn().unwrap();
        let end = Instant::now() + LIMIT;
        while !is_so() {
            let said = fs::read_to_string(&log).unwrap();
            assert!(Instant::now() < end && child.try_wait().unwrap().is_none(), "{said}");
            std::thread::sleep(Duration::from_millis(20));
        }
        child.end(LIMIT).unwrap();
        fs::read_to_string(&log).unwrap()
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_swap_file_is_its_owners_alone() {
    let Some(_turn) = take_turn() else { return };
    let host = DiskHost::new("swap", "1MiB");
    let (file, socket) = (host.path("swap"), host.path("disks/swap.sock"));
    let said = host.serve_until(|| socket.exists());
    assert_eq!((mode(&file), mode(&socket)), (0o600, 0o600), "{said}");
    assert_eq!(mode(&host.path("disks")), 0o711);
    assert!(fs::metadata(&file).unwrap().blocks() * 512 >= 1 << 20, "it is not allocated");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    fs::remove_file(&socket).unwrap();
    let said = host.serve_until(|| socket.exists());
    assert!(said.contains("had mode 0644") && said.contains("it is 0600 now"), "{said}");
    assert_eq!(mode(&file), 0o600);
    // A message that does not apply here is absent.
    assert!(!said.contains("may have this process wait"), "{said}");
}

#[test]
fn a_directory_that_is_not_there_is_named_by_check_and_by_the_disks() {
    let Some(_turn) = take_turn() else { return };
    let host = DiskHost::new("nowhere/swap", "1MiB");
    let (said, code) = host.check();
    let nowhere = host.path("nowhere").display().to_string();
    assert_eq!((code, said.contains("ok:")), (Some(1), false), "{said}");
    assert!(said.contains(&nowhere) && said.contains("it cannot be served"), "{said}");
    let served = host.overbook(&["disks", "web"]);
    assert!(!served.status.success() && text(&served).contains(&nowhere), "{}", text(&served));
}

#[test]
fn no_other_user_leads_the_path_of_a_disk_elsewhere() {
    let Some(_turn) = take_turn() else { return };
    let host = DiskHost::new("vm/swap", "1MiB");
    let (said, code) = host.check();
    assert!(said.contains("/vm does not exist: make it") && code == Some(1), "{said}");
    fs::create_dir(host.path("vm")).unwrap();
    let (said, code) = host.check();
    assert!(code == Some(0) && !said.contains("disk swap"), "{said}");
    let Some(()) = requires(Requirement::Root, chown(host.path("vm"), Some(NOBODY), None)) else {
        return;
    };
    let secret = host.path("secret");
    fs::write(&secret, "root's own").unwrap();
    symlink(&secret, host.path("vm/swap")).unwrap();
    std::os::unix::fs::lchown(host.path("vm/swap"), Some(NOBODY), None).unwrap();
    let (said, code) = host.check();
    assert!(said.contains("/vm belongs to user 65534") && code == Some(1), "{said}");
    let output = host.overbook(&["disks", "web"]);
    assert!(!output.status.success() && text(&output).contains("user 65534"), "{output:?}");
    assert_eq!(fs::read_to_string(&secret).unwrap(), "root's own");
    // A file that is longer than the disk is not truncated.
    chown(host.path("vm"), Some(0), None).unwrap();
    fs::remove_file(host.path("vm/swap")).unwrap();
    fs::write(host.path("vm/swap"), vec![1; 2 << 20]).unwrap();
    let output = host.overbook(&["disks", "web"]);
    assert!(!output.status.success() && text(&output).contains("`size` is 1 MiB"), "{output:?}");
    assert_eq!(fs::metadata(host.path("vm/swap")).unwrap().len(), 2 << 20);
}

#[test]
fn a_disk_that_is_larger_than_the_room_for_it_is_refused_and_leaves_nothing() {
    let Some(_turn) = take_turn() else { return };
    let host = DiskHost::new("room/swap", "1GiB");
    fs::create_dir(host.path("room")).unwrap();
    let script = "mount -t tmpfs -o size=200M,mode=0755 tmpfs \"$1\" || exit 77
        before=$(df --output=used \"$1\")
        \"$2\" --config \"$3\" check && exit 1
        \"$2\" --config \"$3\" disks web && exit 2
        test -e \"$1/swap\" && exit 3
        test \"$before\" = \"$(df --output=used \"$1\")\" || exit 4
        : > \"$1/swap\"
        \"$2\" --config \"$3\" disks web && exit 5
        test \"$(stat -c %s \"$1/swap\")\" = 0 || exit 6
        truncate -s 1G \"$1/swap\"
        \"$2\" --config \"$3\" check || exit 7";
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", script, "sh"]).arg(host.path("room"));
    unshare.arg(program().get_program()).arg(host.path("overbook.toml"));
    let output = unshare.output().unwrap();
    let said = text(&output);
    let is_mounted = output.status.code() != Some(77) && !said.contains("unshare failed");
    let Some(()) = requires(Requirement::MountNamespace, ensure(is_mounted, &said)) else { return };
    assert!(output.status.success(), "{said}{:?}", output.status);
    let why = "`size` 1 GiB takes 1 GiB more of the file system of";
    assert_eq!(said.matches(why).count(), 4, "{said}");
    assert!(said.contains("200 MiB are free there, and 10 MiB of these stay free"), "{said}");
    // A guest may already have its swap there, so this is only a warning.
    assert!(said.contains("writes to it may fail"), "{said}");
}

/// The kernel gives `/proc` files of an undumpable process to root.
#[test]
fn what_serves_a_disk_is_in_no_core_dump() {
    let Some(_turn) = take_turn() else { return };
    let host = DiskHost::new("swap", "1MiB");
    let Some(()) = requires(Requirement::Root, chown(host.path(""), Some(NOBODY), None)) else {
        return;
    };
    fs::set_permissions(host.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = host.path("overbook");
    fs::copy(program().get_program(), &copy).unwrap();
    let spawn = Spawn::new(&copy).arg("--config").arg(host.path("overbook.toml"));
    let spawn = spawn.args(["disks", "web"]).user(NOBODY);
    let output = fs::File::create(host.path("log")).unwrap();
    let mut keeper = spawn.output_to(output).unwrap().die_with_parent().spawn().unwrap();
    let end = Instant::now() + LIMIT;
    loop {
        let serving = children_of(keeper.identity().pid).unwrap().pop();
        let owner = serving.and_then(|serving| {
            fs::metadata(format!("/proc/{}/environ", serving.pid)).ok().map(|found| found.uid())
        });
        if owner == Some(0) {
            break;
        }
        let said = fs::read_to_string(host.path("log")).unwrap();
        assert!(Instant::now() < end, "its files belong to {owner:?}\n{said}");
        std::thread::sleep(Duration::from_millis(20));
    }
    keeper.end(LIMIT).unwrap();
}

#[test]
fn a_repository_lends_no_more_than_its_host_can_do_without() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut lends = program();
    lends.args(["repository", "--memory", "900GiB", "--unix"]).arg(dir.path().join("socket"));
    let output = lends.output().unwrap();
    let said = text(&output);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("`--memory` 900 GiB"), "{said}");
}
