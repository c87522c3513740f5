//! A VM that was prepared as the guide says starts on a host without Overbook: no directory and no
//! library of it is there. Real QEMUs are started with the guide's own lines, in a mount namespace
//! whose `/run` is empty. Their guests do not run.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use lab::cache::Cache;
use lab::packages::Unpacked;
use lab::qemu::Qemu;
use overbook_tests::{Requirement, requires, take_turn};
use sys::process::{Child, Spawn};

const LIMIT: Duration = Duration::from_secs(120);
const INSTALL: &str = include_str!("../docs/src/install.md");
const MANAGED: &str = include_str!("../docs/src/managed.md");
/// The rest of a command line whose guest does not run.
const REST: &str = "-S -display none -nodefaults -machine pc -accel tcg,tb-size=8";
const QEMU: &str = "qemu-system-x86_64";

/// The part of a page below a heading, up to the next heading.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let begin = page.find(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    let text = &page[begin + heading.len() + 2..];
    &text[..text.find("\n#").unwrap_or(text.len())]
}

/// The first block for a shell.
fn shell(section: &str) -> &str {
    let (_, rest) = section.split_once("```sh\n").unwrap();
    rest.split_once("```").unwrap().0
}

struct BareHost {
    dir: tempfile::TempDir,
    running: Option<Child>,
}

impl Drop for BareHost {
    fn drop(&mut self) {
        if let Some(child) = &mut self.running {
            // One that has ended is fine.
            let _ = child.end(Duration::from_secs(5));
        }
    }
}

impl BareHost {
    /// A host with a QEMU that is called as in the guide. `None`, with a message: not possible.
    fn new() -> Option<Self> {
        requires(Requirement::Root, requires::root())?;
        let qemu = requires(Requirement::Packages, Qemu::provide(&Cache::open().unwrap()))?;
        let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
        let program = dir.path().join(QEMU);
        let (before, after) = qemu.unpacked().map_or_else(Default::default, |root| {
            let (libraries, share) = (Unpacked::at(root).libraries(), root.join("usr/share"));
            let share = share.display();
            (
                format!("env LD_LIBRARY_PATH={libraries}"),
                format!("-L {share}/qemu -L {share}/seabios"),
            )
        });
        let text = format!("#!/bin/sh\nexec {before} {} {after} \"$@\"\n", qemu.program.display());
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Some(Self { dir, running: None })
    }

    /// Runs these lines, the last of which is a QEMU, where `/run` is empty.
    fn start(&mut self, lines: &str) {
        let lines = lines.replace(QEMU, &format!("exec {QEMU}"));
        let script = format!(
            "mount -t tmpfs tmpfs /run\ntest ! -d /usr/lib/overbook || \
             mount -t tmpfs tmpfs /usr/lib/overbook\n{lines}\n"
        );
        let path = std::env::var("PATH").unwrap();
        let log = std::fs::File::create(self.log()).unwrap();
        let spawn = Spawn::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec", &script])
            .env("PATH", format!("{}:{path}", self.dir.path().display()))
            .stdin(Stdio::null());
        let spawn = spawn.output_to(log).unwrap().die_with_parent();
        self.running = Some(spawn.spawn().unwrap());
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// Waits until QEMU greets at this socket of its own namespace.
    fn until_it_greets(&mut self, socket: &str) {
        let pid = self.running.as_ref().unwrap().identity().pid;
        let socket = format!("/proc/{pid}/root{socket}");
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Ok(stream) = UnixStream::connect(Path::new(&socket)) {
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                let mut line = String::new();
                BufReader::new(stream).read_line(&mut line).unwrap();
                assert!(line.starts_with("{\"QMP\""), "{line}");
                return;
            }
            let ended = self.running.as_mut().unwrap().try_wait().unwrap();
            let log = std::fs::read_to_string(self.log()).unwrap();
            assert!(ended.is_none(), "QEMU has ended ({ended:?}): {log}");
            assert!(Instant::now() < deadline, "nothing answers at {socket}: {log}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
fn plain_qemu_starts_with_the_guides_lines() {
    let Some(_turn) = take_turn() else { return };
    let Some(mut host) = BareHost::new() else { return };
    // The tenant's group of users is not on this machine.
    let lines = shell(section(INSTALL, "### Plain QEMU")).replace("-g web-qemu", "-g root");
    host.start(&lines.replace('…', REST));
    host.until_it_greets("/run/overbook/qmp/web/web-1.sock");
}

#[test]
fn a_vm_of_proxmox_starts_where_only_proxmoxs_own_directory_is() {
    let Some(_turn) = take_turn() else { return };
    let Some(mut host) = BareHost::new() else { return };
    // The arguments that `overbook proxmox manage 101` adds.
    let args = "-chardev socket,id=overbook,path=/run/qemu-server/101.overbook,server=on,wait=off \
        -mon chardev=overbook,mode=control";
    host.start(&format!("mkdir /run/qemu-server\n{QEMU} {REST} {args}"));
    host.until_it_greets("/run/qemu-server/101.overbook");
}

/// libvirt makes sockets of its own, in its own directory.
#[test]
fn a_domain_is_asked_for_nothing_but_a_library_that_may_be_missing() {
    let Some(_turn) = take_turn() else { return };
    let Some(mut host) = BareHost::new() else { return };
    let prepared = section(INSTALL, "### libvirt");
    let xml = prepared.split("```").nth(1).unwrap();
    assert!(xml.starts_with("xml\n") && !xml.contains("/run/"), "{xml}");
    let by_hand = section(MANAGED, "### libvirt");
    let (_, rest) = by_hand.split_once("<qemu:env name='LD_PRELOAD' value='").unwrap();
    let (library, _) = rest.split_once('\'').unwrap();
    let qmp = "-qmp unix:/run/libvirts.sock,server=on,wait=off";
    host.start(&format!("export LD_PRELOAD={library}\n{QEMU} {REST} {qmp}"));
    host.until_it_greets("/run/libvirts.sock");
    let log = std::fs::read_to_string(host.log()).unwrap();
    assert!(log.contains(library) && log.contains("ignored"), "the loader warns: {log}");
}
