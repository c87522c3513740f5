//! A QEMU with the strictest sandbox is managed like any other, and no core dump contains memory
//! of ours with guests' pages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use lab::zram::Zram;
use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Requirement, Stage, requires};
use sys::memory_of::Counters;

/// Everything that QEMU's `-sandbox` can deny.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// Least amount of guest memory that each mechanism must have processed.
const ENOUGH: Bytes = Bytes::mib(12);
const VMS: [&str; 2] = ["dumped", "undumped"];
/// Maximum time until no mapping is under construction.
const A_WHILE: Duration = Duration::from_secs(20);

/// One mapping of a process, from `smaps`.
struct MarkedMapping {
    start: u64,
    end: u64,
    /// The file, if it maps one.
    name: String,
    resident: Bytes,
    flags: Vec<String>,
}

impl MarkedMapping {
    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|found| found == flag)
    }

    /// Whether it is guest RAM, its replacement (pages of a pool among them) or staging: QEMU or
    /// the shim keeps all of these from children.
    fn is_kept_from_children(&self) -> bool {
        self.has("dc") && self.end - self.start >= 4096
    }
}

fn mappings(pid: u32) -> Vec<MarkedMapping> {
    let mut found: Vec<MarkedMapping> = Vec::new();
    for line in fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap().lines() {
        let mut words = line.split_whitespace();
        match (words.next().unwrap(), found.last_mut()) {
            ("Rss:", Some(last)) => {
                last.resident = Bytes::kib(words.next().unwrap().parse().unwrap());
            }
            ("VmFlags:", Some(last)) => last.flags = words.map(str::to_owned).collect(),
            (first, _) if !first.ends_with(':') => {
                let (start, end) = first.split_once('-').unwrap();
                let number = |text| u64::from_str_radix(text, 16).unwrap();
                found.push(MarkedMapping {
                    start: number(start),
                    end: number(end),
                    name: words.nth(4).unwrap_or_default().to_owned(),
                    resident: Bytes::ZERO,
                    flags: Vec::new(),
                });
            }
            _ => {}
        }
    }
    found
}

/// The first bytes of a page. They identify it if they include many different bytes.
type Beginning = [u8; 64];

fn is_telling(beginning: &Beginning) -> bool {
    beginning.iter().collect::<HashSet<_>>().len() >= 32
}

fn read(memory: &File, at: u64, bytes: &mut [u8]) -> usize {
    memory.read_at(bytes, at).unwrap_or(0)
}

/// The first bytes of a guest's resident pages; a revoked page cannot be read from outside.
/// Merging and tracking split guest RAM into mappings of any size.
fn beginnings(pid: u32) -> HashSet<Beginning> {
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut found = HashSet::new();
    for mapping in mappings(pid).iter().filter(|mapping| mapping.is_kept_from_children()) {
        for at in (mapping.start..mapping.end).step_by(4096) {
            let mut beginning = [0; 64];
            if read(&memory, at, &mut beginning) == 64 && is_telling(&beginning) {
                found.insert(beginning);
            }
        }
    }
    found
}

/// Places where these pages begin in a process's memory: those that a core dump would contain,
/// and others in private memory.
fn found_in(pid: u32, beginnings: &HashSet<Beginning>) -> [Vec<String>; 2] {
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut found = [Vec::new(), Vec::new()];
    // A guest may have the same content from the same file.
    let is_own = |mapping: &&MarkedMapping| mapping.has("wr") && !mapping.name.starts_with('/');
    for mapping in mappings(pid).iter().filter(is_own) {
        let mut bytes = vec![0; usize::try_from(mapping.end - mapping.start).unwrap()];
        let len = read(&memory, mapping.start, &mut bytes);
        // Allocators align buffers of this size to 16 bytes.
        let places = (0..len.saturating_sub(63)).step_by(16).filter_map(|at| {
            let window = bytes[at..].first_chunk::<64>()?;
            let place =
                || format!("{:x} of {:?}: {window:x?}", mapping.start + at as u64, mapping.name);
            beginnings.contains(window).then(place)
        });
        found[usize::from(mapping.has("dd"))].extend(places);
    }
    found
}

fn pid(stage: &Stage, vm: &str) -> u32 {
    stage.guest(vm).process().pid
}

fn bytes(stage: &Stage, vm: &str, of: &str, field: &str) -> Bytes {
    Bytes(stage.vm(vm)[of][field].as_u64().unwrap_or(0))
}

fn until_all(stage: &Stage, what: &str, of: &str, field: &str) {
    stage.until(what, |stage| VMS.iter().all(|vm| bytes(stage, vm, of, field) > ENOUGH));
}

/// Mappings of a QEMU with the wrong mark for core dumps. Staging is never dumped; guest RAM,
/// including pages of a pool, is dumped if this QEMU wants it. A new mapping is marked a moment
/// later.
fn wrongly_dumped(pid: u32, wants_ram: bool) -> Vec<String> {
    let of_pool = |mapping: &MarkedMapping| mapping.name.starts_with("/memfd:overbook-pool");
    let is_ram =
        |mapping: &MarkedMapping| of_pool(mapping) || mapping.has("dc") && mapping.has("mg");
    let mappings = mappings(pid);
    assert!(mappings.iter().any(of_pool), "does it share?");
    let is_wrong = |mapping: &&MarkedMapping| {
        let is_dumped = !mapping.has("dd");
        is_dumped && mapping.has("rr") || is_ram(mapping) && is_dumped != wants_ram
    };
    let told = |mapping: &MarkedMapping| {
        let MarkedMapping { start, end, name, resident, flags } = mapping;
        format!("{start:x}-{end:x} {name:?} {resident} {flags:?}")
    };
    mappings.iter().filter(is_wrong).map(told).collect()
}

fn until_rightly_dumped(stage: &Stage) {
    for (vm, wants_ram) in VMS.into_iter().zip([true, false]) {
        // On a busy machine the shim may have given everything back; tracking begins anew then.
        let is_tracked = |stage: &Stage| mappings(pid(stage, vm)).iter().any(|it| it.has("rr"));
        stage.until("it is tracked", is_tracked);
        let deadline = Instant::now() + A_WHILE;
        loop {
            let wrong = wrongly_dumped(pid(stage, vm), wants_ram);
            if wrong.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "{vm}: {wrong:#?}");
        }
    }
}

#[test]
fn a_qemu_that_denies_itself_everything_is_managed_and_no_core_dump_holds_guests_pages() {
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(512))) else { return };
    // The guests touch each page once in half a minute, and free half of them again and again.
    let workload = "verify --mb 120 --rate 4 --breathe 15";
    let guest = |name: &str, dump: &str| MachineSpec {
        shim: true,
        qemu_options: ["-sandbox", SANDBOX, "-machine", dump].map(str::to_owned).to_vec(),
        ..MachineSpec::new(name, "shop", MAX, MAX, workload)
    };
    let guests = [guest(VMS[0], "dump-guest-core=on"), guest(VMS[1], "dump-guest-core=off")];
    let Some(stage) = Stage::start(Mode::Enforce, &guests) else { return };
    for vm in VMS {
        let status = fs::read_to_string(format!("/proc/{}/status", pid(&stage, vm))).unwrap();
        assert!(status.contains("Seccomp:\t2"), "{vm} has no sandbox:\n{status}");
    }
    fleet::wait_until_filled(&stage.lab, 120).unwrap();
    until_all(&stage, "both are tracked", "tracking", "working_set_bytes");

    stage.configure(&[("dedup = \"off\"", "dedup = 200")]);
    until_all(&stage, "both share pages", "dedup", "saved_bytes");
    until_rightly_dumped(&stage);
    let beginnings = &beginnings(pid(&stage, VMS[0])) | &beginnings(pid(&stage, VMS[1]));
    assert!(beginnings.len() > 1000, "{}", beginnings.len());
    let worker = stage.worker("shop").unwrap();
    let [dumped, kept] = found_in(worker.pid, &beginnings);
    assert!(!kept.is_empty(), "the worker reads pages elsewhere: this looks at the wrong memory");
    assert!(dumped.is_empty(), "a core dump of the worker would hold pages of guests: {dumped:?}");

    // Freed memory is tested first and alone, because paging would also take it.
    stage.configure(&[("free_pages = \"off\"", "free_pages = \"lazy\"")]);
    until_all(&stage, "what both free stays theirs", "free_pages", "handed_over_bytes_total");
    stage.configure(&[("[host]", "[host]\nreserve = \"900GiB\"")]);
    // Merging works on the same memory; freed pages that it has replaced count as dropped.
    stage.until("the host has what both have freed", |stage| {
        let of = |vm, field| bytes(stage, vm, "free_pages", field);
        let total = |vm| of(vm, "taken_bytes_total").plus(of(vm, "dropped_bytes_total"));
        VMS.iter().all(|vm| total(vm) > ENOUGH)
    });

    // Less than the VMs' private memory, because shared memory is not paged out.
    stage.configure(&[
        ("cold = \"off\"", "cold = \"when-needed\""),
        ("base = \"262144KiB\"", "base = \"65536KiB\""),
        ("min = \"131072KiB\"", "min = \"49152KiB\""),
    ]);
    stage.until("both are paged out in part", |stage| {
        VMS.iter().all(|vm| Counters::of(pid(stage, vm)).unwrap().swapped > ENOUGH)
    });
    until_rightly_dumped(&stage);

    // A worker dies, and everything is undone, in the same sandbox.
    stage.kill_worker("shop");
    // On a busy machine a shim may be paused at that time, and its VM shares for a while longer.
    stage.until("all is undone", |stage| stage.overbook(&["release"]).status.success());
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}
