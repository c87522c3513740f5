//! The Debian package on a clean host with systemd: its installation, the first memory that moves,
//! its upgrade, its removal.
//!
//! `make package-test` builds the package and runs this.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod host;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use host::CleanHost;
use lab::cache::Cache;
use lab::debian;
use lab::image::Image;
use lab::machine::KERNEL_BASICS;
use lab::qmp::Qmp;
use overbook_tests::{Requirement, requires, text};

/// Names the package's file.
const PACKAGE: &str = "OVERBOOK_DEB";
const RAM_MIB: u64 = 256;
/// The grace time, and the guests' time to free a minute's memory, on a busy machine.
const LIMIT: Duration = Duration::from_secs(240);
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const COMPLETIONS: &str = "/usr/share/bash-completion/completions/overbook";
const POLL: Duration = Duration::from_millis(250);
/// An operator's configuration: the VMs have half of their RAM guaranteed.
const GROUP: &str = "[host]\nqmp = [\"/run/vms/*.sock\"]\n[mode]\nballoon = \"enforce\"\n\
    [group.web]\nvms = [\"web-*\"]\nbase = \"128MiB\"\nmin = \"96MiB\"\n";
/// The most that a balloon may move back while the package is upgraded: one step.
const STEP_MIB: u64 = 16;

/// The clean tree and the package's file. `None`, with a message: not available.
fn provisions() -> Option<(PathBuf, PathBuf)> {
    let package = std::env::var_os(PACKAGE).ok_or(format!("{PACKAGE} is not set"));
    let package = requires(Requirement::Target("package-test"), package)?;
    let tree = requires(Requirement::Packages, debian::host(&Cache::open().unwrap()))?;
    Some((tree, package.into()))
}

fn give(host: &CleanHost, file: &Path, name: &str) {
    fs::copy(file, host.shared().join(name)).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
}

/// Starts a guest as an operator's host has it, before Overbook is there. The test has a monitor of
/// its own.
fn start_vm(host: &CleanHost, name: &str, monitor: &str) {
    let kernel_line = format!("{KERNEL_BASICS} tsc=reliable tsc_early_khz={}", sys::tsc::khz());
    host.must(&format!(
        "systemd-run --quiet --unit={name} qemu-system-x86_64 -name {name} -m {RAM_MIB} -accel tcg \
         -cpu max -machine q35,hpet=off,vmport=off -nodefaults -no-user-config -display none \
         -kernel /mnt/kernel -initrd /mnt/initramfs -append '{kernel_line}' \
         -chardev file,id=console,path=/mnt/{name}.console -serial chardev:console -serial null \
         -device virtio-balloon-pci,free-page-reporting=on \
         -qmp unix:/mnt/{name}.test,server=on,wait=off {monitor}"
    ));
}

/// The memory that the guest's balloon leaves it, by QEMU's own word.
fn balloon_mib(host: &CleanHost, name: &str) -> u64 {
    let monitor = host.shared().join(format!("{name}.test"));
    Qmp::connect(&monitor, LIMIT).unwrap().balloon().unwrap() >> 20
}

/// The processes of a program.
fn processes(host: &CleanHost, program: &str) -> Vec<String> {
    let found = host.must(&format!(
        "for process in /proc/[0-9]*; do case $(readlink $process/exe) in \
         {program}*) echo $process;; esac; done"
    ));
    found.lines().map(str::to_owned).collect()
}

/// Words that bash's completion offers for the last of these.
fn offered(host: &CleanHost, words: &[&str]) -> Vec<String> {
    let line: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let (last, word) = (words.len() - 1, words[words.len() - 1]);
    let script = format!(
        "source {COMPLETIONS}; COMP_WORDS=({}); COMP_CWORD={last}; COMP_TYPE=9; \
         _clap_complete_overbook overbook '{word}' x; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        line.join(" "),
    );
    fs::write(host.shared().join("complete"), script).unwrap();
    let offered = host.must("bash /mnt/complete");
    offered.lines().filter(|word| !word.is_empty()).map(|word| word.trim().to_owned()).collect()
}

fn wait(what: &str, host: &CleanHost, mut is_there: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < LIMIT, "{what}: {}", host.log());
        std::thread::sleep(POLL);
    }
}

/// An operator at a shell. Every command counts.
struct Operator<'a> {
    host: &'a CleanHost,
    commands: usize,
}

impl Operator<'_> {
    fn types(&mut self, line: &str) -> String {
        self.commands += 1;
        self.host.must(line)
    }
}

#[test]
#[ignore = "needs the package: `make package-test`"]
fn one_command_shows_all_vms_three_move_memory_and_a_removal_undoes_everything() {
    let Some((tree, package)) = provisions() else { return };
    let image = Image::provide(&Cache::open().unwrap()).unwrap();
    let host = CleanHost::boot(&tree);
    give(&host, &package, "overbook.deb");
    give(&host, &image.kernel, "kernel");
    give(&host, &image.initramfs, "initramfs");
    assert!(!host.run("getent group kvm").status.success(), "the host is no clean one");
    host.must("mkdir -m 755 /run/vms");
    // One has a monitor that no program uses, and one has none.
    start_vm(&host, "web-1", "-qmp unix:/run/vms/web-1.sock,server=on,wait=off");
    start_vm(&host, "web-2", "");
    wait("the guests boot", &host, || {
        ["web-1", "web-2"].iter().all(|name| {
            let console = host.shared().join(format!("{name}.console"));
            fs::read_to_string(console).is_ok_and(|text| text.contains("overbook: up"))
        })
    });
    let vms = processes(&host, QEMU);
    assert_eq!(vms.len(), 2, "{vms:?}");

    let said = host.must("apt-get install --yes --no-install-recommends /mnt/overbook.deb");
    let mut operator = Operator { host: &host, commands: 0 };
    let page = operator.types("overbook status");
    assert!(page.contains("web-1") && page.contains("web-2"), "{said}\n{page}\n{}", host.log());
    assert_eq!(operator.commands, 1);
    assert_eq!(offered(&host, &["overbook", "vm", "web-"]), ["web-1", "web-2"]);
    assert_eq!(host.must("stat --format '%U %G %a' /run/overbook/qmp").trim(), "root kvm 1770");

    operator.types(&format!("printf '{GROUP}' > /etc/overbook/overbook.d/web.toml"));
    operator.types("overbook reload --yes");
    assert_eq!(balloon_mib(&host, "web-1"), RAM_MIB, "nothing is taken in the first minute");
    wait("the first memory moves", &host, || balloon_mib(&host, "web-1") < RAM_MIB);
    assert!(operator.commands <= 4, "{} commands", operator.commands);
    assert_eq!(processes(&host, QEMU), vms, "a VM was restarted");

    let before = balloon_mib(&host, "web-1");
    let daemon = host.must("systemctl show --value --property=MainPID overbook");
    let said = host.must("apt-get install --yes --reinstall /mnt/overbook.deb");
    wait("the new daemon runs", &host, || {
        let now = host.must("systemctl show --value --property=MainPID overbook");
        now != daemon && host.run("overbook status").status.success()
    });
    let after = balloon_mib(&host, "web-1");
    assert!(after <= before + STEP_MIB, "an upgrade gave back {before} -> {after} MiB: {said}");

    host.must("install -m 600 /dev/null /etc/overbook/token");
    let said = host.must("apt-get purge --yes overbook");
    assert_eq!(balloon_mib(&host, "web-1"), RAM_MIB, "{said}");
    assert_eq!(processes(&host, QEMU), vms, "a VM ended: {said}");
    // All that is left is named, and is the operator's.
    assert!(said.contains("/etc/overbook/overbook.d/web.toml"), "{said}");
    host.must("rm -r /etc/overbook");
    let left = host.must("find / /run /sys/fs/cgroup -xdev -iname '*overbook*'");
    assert_eq!(left, "", "{said}");
    let units = host.must("systemctl list-units --all --no-legend 'overbook*'");
    assert_eq!(units, "", "{said}");
}

#[test]
#[ignore = "needs the package: `make package-test`"]
fn without_systemd_the_directories_are_made_and_a_removal_spares_guests_disks() {
    let Some((tree, package)) = provisions() else { return };
    let host = CleanHost::without_systemd(&tree);
    give(&host, &package, "overbook.deb");
    let said = host.must("apt-get install --yes --no-install-recommends /mnt/overbook.deb");
    assert!(said.contains("systemd does not run here"), "{said}");
    assert_eq!(host.must("stat --format '%U %G %a' /run/overbook/qmp").trim(), "root kvm 1770");
    host.must("setsid overbook daemon > /tmp/daemon 2>&1 &");
    wait("the daemon runs", &host, || host.run("overbook status").status.success());

    // A guest's disk is in use: a process is connected to its socket.
    let client = "use IO::Socket::UNIX; my $at = \"/run/overbook/disks/a.sock\"; \
                  my $server = IO::Socket::UNIX->new(Local => $at, Listen => 1) or die; \
                  my $client = IO::Socket::UNIX->new(Peer => $at) or die; \
                  my $taken = $server->accept or die; print \"up\\n\"; $| = 1; print \"\"; sleep";
    host.must("mkdir /run/overbook/disks");
    host.must(&format!("perl -e '{client}' > /tmp/disk 2>&1 & echo $! > /tmp/pid"));
    wait("the disk is in use", &host, || host.run("test -s /tmp/disk").status.success());
    let refused = host.run("apt-get purge --yes overbook");
    assert!(!refused.status.success(), "{}", text(&refused));
    assert!(text(&refused).contains("/run/overbook/disks/a.sock"), "{}", text(&refused));
    assert!(host.run("overbook status").status.success(), "the daemon was stopped all the same");

    host.must("kill $(cat /tmp/pid)");
    host.must("mkdir -p /var/lib/overbook/disks && touch /var/lib/overbook/disks/web-1-swap");
    let said = host.must("apt-get purge --yes overbook");
    assert!(said.contains("/var/lib/overbook/disks/web-1-swap"), "{said}");
    assert_eq!(
        host.must("find /var/lib/overbook -type f").trim(),
        "/var/lib/overbook/disks/web-1-swap"
    );
    assert_eq!(processes(&host, "/usr/bin/overbook"), [""; 0], "{said}");
    assert!(!host.run("test -e /run/overbook").status.success(), "{said}");
}

#[test]
#[ignore = "needs the package: `make package-test`"]
fn the_installed_completions_know_commands_groups_and_vms() {
    let Some((tree, package)) = provisions() else { return };
    let host = CleanHost::without_systemd(&tree);
    give(&host, &package, "overbook.deb");
    host.must("apt-get install --yes --no-install-recommends /mnt/overbook.deb");
    host.must("printf '[group.web]\\nvms = [\"web-*\"]\\n' > /etc/overbook/overbook.d/web.toml");
    let commands = offered(&host, &["overbook", ""]);
    assert!(commands.iter().any(|word| word == "explain"), "{commands:?}");
    let hidden = ["worker", "api", "store"];
    assert!(!commands.iter().any(|word| hidden.contains(&word.as_str())), "{commands:?}");
    assert_eq!(offered(&host, &["overbook", "wor"]), [""; 0]);
    for command in ["group", "pause", "resume", "release"] {
        assert_eq!(offered(&host, &["overbook", command, "w"]), ["web"], "{command}");
    }
    // An interactive shell completes the word that is typed. Ctrl-A leads to the line's start, so
    // the shell prints the whole line.
    let keys = format!("source {COMPLETIONS}\\noverbook group w\\t\\001echo \\nexit\\n");
    let shell = "script --quiet --command 'bash --norc --noprofile -i' /dev/null";
    let screen = host.must(&format!("printf '{keys}' | TERM=dumb {shell}"));
    assert!(screen.contains("overbook group web"), "{screen}");
}
