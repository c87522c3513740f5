//! The packages' scripts, as dpkg runs them at a removal, on invented files of the system.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use drivers::journal::{Journal, UndoRecord};
use model::Bytes;

const OVERBOOK: &str = include_str!("../../../packaging/overbook.prerm");
const OVERBOOK_LIBVIRT: &str = include_str!("../../../packaging/overbook-libvirt.prerm");

/// Runs a script with `own` in the place of the system's directory `of_system`. The script's calls
/// of `overbook` are only told.
fn remove(script: &str, of_system: &str, own: &Path) -> Output {
    let script = script.replace(of_system, own.to_str().unwrap());
    // The namespace of a process that has ended is no fault.
    let told = "overbook() { echo \"asked: $*\"; }\nlsns() { echo 21; echo 22; }\n";
    let script = format!("{told}{script}");
    Command::new("sh").args(["-c", &script, "sh", "remove"]).output().unwrap()
}

#[test]
fn overbook_libvirt_releases_the_domains_on_record_and_names_those_that_stay_there() {
    let dir = tempfile::tempdir().unwrap();
    let run = || {
        let output = remove(OVERBOOK_LIBVIRT, "/var/lib/overbook", dir.path());
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run(), (String::new(), String::new()), "there is no record");
    let record = |vm: &str, socket: &str| UndoRecord {
        balloon: Some(Bytes::mib(512)),
        ..UndoRecord::untouched(vm.into(), socket.into(), 7)
    };
    let mut journal = Journal::open(dir.path()).unwrap();
    journal.record(&[record("web-1", "/run/overbook/qmp/web-1.sock")]).unwrap();
    assert_eq!(run(), (String::new(), String::new()), "no domain is on record");
    let of_libvirt = |uuid: &str| format!("/run/overbook/libvirt.sock/{uuid}");
    let uuids = [("db 1", "8d0c"), ("db-2", "8d0d"), ("db\"3", "8d0e")];
    let domains = uuids.map(|(name, uuid)| record(name, &of_libvirt(uuid)));
    journal.record(&domains).unwrap();
    let (said, warned) = run();
    let asked: Vec<_> = said.lines().filter(|line| line.starts_with("asked: ")).collect();
    assert_eq!(asked, ["asked: release vm:db 1", "asked: release vm:db-2"], "{said}");
    assert!(warned.ends_with(" --live\ndb 1\ndb-2\ndb\\\"3\n"), "{warned}");
}

/// Makes an invented `/proc`.
fn invent_proc() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for of in ["self/ns", "net", "21/net"] {
        fs::create_dir_all(dir.path().join(of)).unwrap();
    }
    symlink("pid:[1]", dir.path().join("self/ns/pid")).unwrap();
    fs::write(dir.path().join("net/unix"), "").unwrap();
    dir
}

/// Moves a process into a container.
fn contain(proc: &Path, pid: u32) {
    let namespace = proc.join(format!("{pid}/ns/pid"));
    fs::remove_file(&namespace).unwrap();
    symlink("pid:[2]", namespace).unwrap();
}

/// Adds a process of the package's program, with one socket, to an invented `/proc`.
fn note_process(proc: &Path, pid: u32, line: &str, inode: u32) {
    let at = proc.join(pid.to_string());
    fs::create_dir_all(at.join("fd")).unwrap();
    symlink("/usr/bin/overbook", at.join("exe")).unwrap();
    fs::create_dir(at.join("ns")).unwrap();
    symlink("pid:[1]", at.join("ns/pid")).unwrap();
    fs::write(at.join("cmdline"), line.replace(' ', "\0") + "\0").unwrap();
    symlink(format!("socket:[{inode}]"), at.join("fd/3")).unwrap();
}

#[test]
fn the_disks_services_stop_then_all_is_released_and_then_what_still_runs_is_ended() {
    let run = |has_systemd: bool| {
        let dir = invent_proc();
        note_process(dir.path(), 13, "overbook daemon", 78);
        note_process(dir.path(), 14, "overbook daemon", 79);
        contain(dir.path(), 14);
        let systemd = if has_systemd { "/proc" } else { "/proc/none" };
        let script = OVERBOOK
            .replace("/run/systemd/system", systemd)
            .replace("deb-systemd-invoke", "systemd_invoke");
        // Nothing is stopped or ended in truth.
        let told = "systemd_invoke() { echo \"systemd: $*\"; }\n\
                    kill() { echo \"ended: $*\"; rm -r \"/proc/$1\"; }\n";
        let output = remove(&format!("{told}{script}"), "/proc", dir.path());
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        said.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>()
    };
    let with_systemd = [
        "systemd: stop overbook-disks@*.service",
        "asked: release",
        "overbook: ends process 13: overbook daemon",
        "ended: 13",
    ];
    assert_eq!(run(true), with_systemd);
    assert_eq!(run(false), with_systemd[1..]);
}

#[test]
fn overbook_stays_while_a_disk_that_it_serves_is_in_use() {
    let dir = invent_proc();
    note_process(dir.path(), 12, "overbook --config /srv/overbook.toml disks web", 77);
    note_process(dir.path(), 13, "overbook daemon", 78);
    note_process(dir.path(), 14, "overbook disks web", 79);
    contain(dir.path(), 14);
    let run = |namespace: &str, sockets: &[(&str, u32, &str)]| {
        let line = |(state, inode, path): &(&str, u32, &str)| {
            format!("0000000000000000: 00000003 00000000 00000000 0001 {state} {inode} {path}\n")
        };
        let lines: String = sockets.iter().map(line).collect();
        fs::write(dir.path().join(namespace), lines).unwrap();
        let before = OVERBOOK.split("#DEBHELPER#").next().unwrap();
        let output = remove(before, "/proc", dir.path());
        fs::write(dir.path().join(namespace), "").unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (waits, connected) = ("01", "03");
    let free = [
        (waits, 77, "/srv/disks/web-1.sock"),
        (connected, 78, "/srv/disks/daemon.sock"),
        (connected, 77, "/srv/web-1.sock"),
        (connected, 79, "/srv/disks/anothers.sock"),
    ];
    let (own, anothers) = ("net/unix", "21/net/unix");
    assert_eq!(run(own, &free), (Some(0), String::new()));
    let of_container = (connected, 79, "/run/overbook/disks/web-1.sock");
    assert_eq!(run(anothers, &[of_container]), (Some(0), String::new()));
    let of_disks = (connected, 77, "/srv/disks/web-1.sock");
    for (namespace, used) in [(own, of_disks), (own, of_container), (anothers, of_disks)] {
        let (code, said) = run(namespace, &[&free[..], &[used]].concat());
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(&format!(":\n{}\noverbook: shut", used.2)), "{said}");
    }
}
