//! Restarts and upgrades under load, to another release and back: every guest keeps the memory that
//! it has, and every VM stays managed.
//!
//! **The other release** is another build of daemon, worker and shim: one that speaks the version
//! of the protocol before (`make older`), as a release before this one does. A feature of one
//! crate sets that version, so the build shares all other crates with this one. Two of the guests
//! have that release's shim, two this one's. `OVERBOOK_OLDER_BIN` puts the programs of a published
//! package in its place.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lab::zram::Zram;
use lab::{MachineSpec, command, fleet};
use model::{Bytes, Mode};
use overbook_tests::{BASE, MAX, Requirement, Stage, ensure, requires};
use policy::tuning;
use serde_json::Value;
use sys::memory_of::Counters;
use sys::pool_maps;

/// Guests that move memory by balloons, and guests of which the host pages out some.
const BALLOONS: [&str; 2] = ["hungry", "idle"];
const PAGED: [&str; 2] = ["one", "two"];
/// The guests whose QEMUs have the other release's shim.
const OLDER: [&str; 2] = ["idle", "one"];
/// The number of restarts and upgrades.
const CHANGES: usize = 20;
/// How long guests are watched after a change.
const WATCH: Duration = Duration::from_secs(4);
/// The longest time from the daemon's end until every VM is managed again: the end of the worker,
/// a start, and some ticks, on a busy machine.
const UNMANAGED: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
/// How long no balloon has moved before the first change: its own movement is not an upgrade's.
const REST: Duration = Duration::from_secs(15);
/// Memory of the guests in `cafe` that is in the host's swap, or shared, before the first change.
const ENOUGH: Bytes = Bytes::mib(16);

/// One step of the policy, for a guest of this size.
fn step() -> Bytes {
    MAX.percent(tuning::STEP_PERCENT)
}

/// A guest's memory before Overbook.
fn had(vm: &str) -> Bytes {
    // A verifying guest without swap is killed in less.
    if PAGED.contains(&vm) { MAX } else { BASE }
}

fn guests() -> Vec<MachineSpec> {
    let guest = |name: &str, group, workload| MachineSpec {
        shim: true,
        older_shim: OLDER.contains(&name),
        ..MachineSpec::new(name, group, had(name), MAX, workload)
    };
    // The same seed: the data is identical. Each page is read again after half a minute.
    let paged = |name| guest(name, "cafe", "verify --mb 80 --rate 3");
    let swaps = |guest: MachineSpec| guest.with_swap(Bytes::mib(256), None);
    vec![
        swaps(guest(BALLOONS[0], "shop", "random-array --mb 180 --record-kb 64")),
        swaps(guest(BALLOONS[1], "shop", "idle")),
        paged(PAGED[0]),
        paged(PAGED[1]),
    ]
}

fn pid(stage: &Stage, vm: &str) -> u32 {
    stage.guest(vm).process().pid
}

/// Memory of QEMU in the host's swap.
fn out(stage: &Stage, vm: &str) -> Bytes {
    Counters::of(pid(stage, vm)).unwrap().swapped
}

/// Memory that a guest shares, by the kernel's count.
fn shared(stage: &Stage, vm: &str) -> Bytes {
    let pid = pid(stage, vm);
    let files = pool_maps::mappings(pid).unwrap();
    let Some(mapping) = files.first() else { return Bytes::ZERO };
    let sharers = pool_maps::sharers(pid, mapping.file, &[pool_maps::EVERYWHERE]).unwrap();
    Bytes::kib(4 * sharers.len() as u64)
}

/// The places of a guest's memory.
#[derive(Clone, Copy, Debug)]
struct MemoryPlaces {
    balloon: Bytes,
    out: Bytes,
}

impl MemoryPlaces {
    fn of(stage: &Stage, vm: &str) -> Self {
        Self { balloon: stage.balloon(vm), out: out(stage, vm) }
    }

    fn balloons(stage: &Stage) -> [Bytes; 2] {
        BALLOONS.map(|vm| stage.balloon(vm))
    }

    /// The memory that has moved since.
    fn moved_from(self, before: Self) -> Bytes {
        let balloon = self.balloon.0.abs_diff(before.balloon.0);
        Bytes(balloon.max(self.out.0.abs_diff(before.out.0)))
    }
}

fn all() -> impl Iterator<Item = &'static str> {
    BALLOONS.into_iter().chain(PAGED)
}

/// Whether QEMU answers, and a worker works on the VM.
fn is_managed(vm: &Value) -> bool {
    let tracks = || vm["unsupported"]["tracking"].is_null();
    vm["link_up"] == true && tracks() && !vm["target_bytes"].is_null()
}

fn are_managed(stage: &Stage) -> bool {
    let page = stage.overbook(&["status", "--json"]);
    let Ok(page) = serde_json::from_slice::<Value>(&page.stdout) else { return false };
    let vms = page["vms"].as_array().cloned().unwrap_or_default();
    vms.len() == all().count() && vms.iter().all(is_managed)
}

/// The programs of the other release; `None`, with a message: they are not built.
fn older() -> Option<PathBuf> {
    let program = command::older_program("overbook").unwrap();
    let found = ensure(program.is_file(), format!("no {}", program.display()));
    requires(Requirement::Target("older"), found).map(|()| program)
}

/// Switches everything on. The guests of `cafe` may have less memory than they use.
fn switch_everything_on(stage: &Stage) {
    let text = std::fs::read_to_string(stage.config()).unwrap();
    let mut text = text
        .replace("dedup = \"off\"", "dedup = 50")
        .replace("free_pages = \"off\"", "free_pages = \"lazy\"");
    for vm in PAGED {
        let limits = |min: Bytes, base: Bytes| {
            format!("[vm.{vm:?}]\nmin = \"{}KiB\"\nbase = \"{}KiB\"", min.0 >> 10, base.0 >> 10)
        };
        let before = limits(MAX.share(1, 2), MAX);
        assert!(text.contains(&before), "{text}");
        text = text.replace(&before, &limits(Bytes::mib(32), Bytes::mib(32)));
    }
    let (before, cafe) = text.split_once("[group.\"cafe\"]\n").unwrap();
    let (cafe, shop) = cafe.split_once("[group.").unwrap();
    let cafe = cafe.replace("cold = \"off\"", "cold = \"when-needed\"");
    let text = format!("{before}[group.\"cafe\"]\nbudget = \"64MiB\"\n{cafe}[group.{shop}");
    std::fs::write(stage.config(), text).unwrap();
    stage.hang_up();
}

#[test]
#[ignore = "`make upgrade-test` builds the other release and runs it, for 7 minutes"]
fn twenty_restarts_and_upgrades_move_no_guests_memory_and_leave_no_vm_unmanaged() {
    let Some(older) = older() else { return };
    let newer = command::own_program("overbook").unwrap();
    let Some(zram) = requires(Requirement::Zram, Zram::new(Bytes::mib(512))) else { return };
    let Some(mut stage) = Stage::start(Mode::Enforce, &guests()) else { return };
    fleet::wait_until_working(&stage.lab).unwrap();
    switch_everything_on(&stage);
    stage.until("memory has moved by a balloon", |stage| stage.balloon("hungry") > BASE);
    stage.until("memory is paged out and shared", |stage| {
        PAGED.iter().all(|vm| shared(stage, vm) > ENOUGH)
            && PAGED.iter().map(|vm| out(stage, vm)).sum::<Bytes>() > ENOUGH
    });
    stage.until("the shims' versions are known", |stage| {
        all().all(|vm| !stage.vm(vm)["shim"].is_null())
    });
    let rest = Cell::new((MemoryPlaces::balloons(&stage), Instant::now()));
    stage.until("the balloons rest", |stage| {
        let (before, since) = rest.get();
        let now = MemoryPlaces::balloons(stage);
        rest.set((now, if now == before { since } else { Instant::now() }));
        rest.get().1.elapsed() > REST
    });
    let said = stage.says(&["status"]);
    assert!(said.contains("the shim is of another release in idle, one: restart"), "{said}");
    for vm in all() {
        let differs = !stage.vm(vm)["shim"]["differs"].is_null();
        assert_eq!(differs, OLDER.contains(&vm), "{vm}: {}", stage.vm(vm)["shim"]);
    }
    let undo = stage.undo();
    assert_eq!(undo.len(), all().count(), "{undo:?}");

    for change in 0..CHANGES {
        // To the other release, restarted, back, and restarted.
        let program = if change % 4 < 2 { &older } else { &newer };
        let before: Vec<_> = all().map(|vm| MemoryPlaces::of(&stage, vm)).collect();
        let shared_before: Bytes = PAGED.iter().map(|vm| shared(&stage, vm)).sum();
        let began = Instant::now();
        stage.daemon.change_to(&mut stage.lab, program).unwrap();
        while !are_managed(&stage) {
            assert!(began.elapsed() < UNMANAGED, "{}", stage.says(&["status"]));
            std::thread::sleep(POLL);
        }
        let unmanaged = began.elapsed();
        let end = Instant::now() + WATCH;
        let mut moved = vec![Bytes::ZERO; before.len()];
        while Instant::now() < end {
            for ((vm, before), moved) in all().zip(&before).zip(&mut moved) {
                *moved = MemoryPlaces::of(&stage, vm).moved_from(*before).max(*moved);
            }
            std::thread::sleep(POLL);
        }
        let shared_now: Bytes = PAGED.iter().map(|vm| shared(&stage, vm)).sum();
        eprintln!(
            "change {change} to {}: managed after {unmanaged:?}; moved {moved:?}; shared \
             {shared_before} and {shared_now}",
            program.display()
        );
        for ((vm, before), moved) in all().zip(&before).zip(moved) {
            assert!(moved <= step(), "change {change}: {moved} of {vm} have moved: {before:?}");
        }
        assert!(shared_now > shared_before.share(1, 2), "{shared_now} of {shared_before}");
        assert_eq!(stage.undo(), undo, "the settings from before are still on record");
    }
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);

    let said = stage.overbook(&["release"]);
    assert!(said.status.success(), "{}", overbook_tests::text(&said));
    stage.until("every guest has what it had", |stage| {
        all().all(|vm| stage.balloon(vm) == had(vm) && stage.polling_s(vm) == 0)
    });
    assert!(PAGED.iter().all(|vm| shared(&stage, vm) == Bytes::ZERO));
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
    drop(stage);
    drop(zram);
}
