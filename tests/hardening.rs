//! A QEMU that denies itself all that its sandbox can deny is managed like any other, and memory of
//! ours that holds guests' pages is in no core dump.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use lab::zram::Zram;
use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, skip};
use sys::memory_of::Counters;

/// All that QEMU's `-sandbox` can deny.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// Memory of the guests that each mechanism must have moved, to have been at work.
const ENOUGH: Bytes = Bytes::mib(12);
const VMS: [&str; 2] = ["dumped", "undumped"];
/// How long it may take until no mapping is just being made.
const A_WHILE: Duration = Duration::from_secs(20);

/// One mapping of a process, of `smaps`.
struct Mapping {
    start: u64,
    end: u64,
    /// Of a file, and if so which.
    name: String,
    resident: Bytes,
    flags: Vec<String>,
}

impl Mapping {
    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|found| found == flag)
    }

    /// Guest RAM and what stands in for it, a pool's pages among it, and staging: all that QEMU or
    /// the shim keeps from children.
    fn is_kept_from_children(&self) -> bool {
        self.has("dc") && self.end - self.start >= 4096
    }
}

fn mappings(pid: u32) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
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
                found.push(Mapping {
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

/// How a page begins: no other begins so by chance, if many different bytes are among these.
type Beginning = [u8; 64];

fn is_telling(beginning: &Beginning) -> bool {
    beginning.iter().collect::<HashSet<_>>().len() >= 32
}

fn read(memory: &File, at: u64, bytes: &mut [u8]) -> usize {
    memory.read_at(bytes, at).unwrap_or(0)
}

/// How the pages of a guest begin, of those that are there: a page that is revoked cannot be read
/// from outside. Merging and tracking cut guest RAM into mappings of any size.
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

/// Where pages of these begin in memory of a process: in what a core dump would hold, and in the
/// rest of what is its own.
fn found_in(pid: u32, beginnings: &HashSet<Beginning>) -> [Vec<String>; 2] {
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut found = [Vec::new(), Vec::new()];
    // A guest may have the same content from the same file.
    let is_own = |mapping: &&Mapping| mapping.has("wr") && !mapping.name.starts_with('/');
    for mapping in mappings(pid).iter().filter(is_own) {
        let mut bytes = vec![0; usize::try_from(mapping.end - mapping.start).unwrap()];
        let len = read(&memory, mapping.start, &mut bytes);
        // Allocators begin what is as large as this at multiples of 16.
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

/// Mappings of a QEMU that are marked wrongly for a core dump. Staging is never part of one; guest
/// RAM, a pool's pages among it, is if this QEMU wants it. A mapping that is just being made is
/// marked a moment later.
fn wrongly_dumped(pid: u32, wants_ram: bool) -> Vec<String> {
    let of_pool = |mapping: &Mapping| mapping.name.starts_with("/memfd:overbook-pool");
    let is_ram = |mapping: &Mapping| of_pool(mapping) || mapping.has("dc") && mapping.has("mg");
    let mappings = mappings(pid);
    assert!(mappings.iter().any(|mapping| mapping.has("rr")), "is it tracked?");
    assert!(mappings.iter().any(of_pool), "does it share?");
    let is_wrong = |mapping: &&Mapping| {
        let is_dumped = !mapping.has("dd");
        is_dumped && mapping.has("rr") || is_ram(mapping) && is_dumped != wants_ram
    };
    let told = |mapping: &Mapping| {
        let Mapping { start, end, name, resident, flags } = mapping;
        format!("{start:x}-{end:x} {name:?} {resident} {flags:?}")
    };
    mappings.iter().filter(is_wrong).map(told).collect()
}

fn until_rightly_dumped(stage: &Stage) {
    for (vm, wants_ram) in VMS.into_iter().zip([true, false]) {
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
    let zram = match Zram::new(Bytes::mib(512)) {
        Ok(zram) => zram,
        Err(error) => return skip(&error.to_string()),
    };
    // They come by each page once in half a minute, and free half of them again and again.
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

    // Freed memory goes first, while nothing else may: paging would take it along.
    stage.configure(&[("free_pages = \"off\"", "free_pages = \"lazy\"")]);
    until_all(&stage, "what both free stays theirs", "free_pages", "handed_over_bytes_total");
    stage.configure(&[("[host]", "[host]\nreserve = \"900GiB\"")]);
    // Merging works on the same memory, and what it has replaced by then counts as dropped.
    stage.until("the host has what both have freed", |stage| {
        let of = |vm, field| bytes(stage, vm, "free_pages", field);
        let total = |vm| of(vm, "taken_bytes_total").plus(of(vm, "dropped_bytes_total"));
        VMS.iter().all(|vm| total(vm) > ENOUGH)
    });

    // Less than what they have of their own, for shared memory is not paged out.
    stage.configure(&[
        ("cold = \"off\"", "cold = \"when-needed\""),
        ("base = \"262144KiB\"", "base = \"65536KiB\""),
        ("min = \"131072KiB\"", "min = \"49152KiB\""),
    ]);
    stage.until("both are paged out in part", |stage| {
        VMS.iter().all(|vm| Counters::of(pid(stage, vm)).unwrap().swapped > ENOUGH)
    });
    until_rightly_dumped(&stage);

    // A worker dies, and all is undone, in the same sandbox.
    stage.kill_worker("shop");
    // On a busy machine a shim may rest just then, and its VM share for a while longer.
    stage.until("all is undone", |stage| stage.overbook(&["release"]).status.success());
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}
