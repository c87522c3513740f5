//! A VM that is known only by its process, because no QMP socket of it is configured.
//!
//! **Problem.** A running QEMU cannot be given another monitor from outside, and its own monitor
//! belongs to the program that started it. **Idea.** The kernel tells all that paging and curves
//! need: that the process is QEMU, its start time, how much memory it has mapped, and where. Its
//! command line tells the size of the guest's RAM, and the VM's name. As for all VMs, a name only
//! counts if an object that root has made confirms it ([`super::tenant`]).
//!
//! **Leaves out.** Everything that only QEMU tells: its balloon, its guest's statistics, its
//! disks, migrations, and memory that is plugged while the guest runs. For a domain of libvirt,
//! [`super::libvirt`] tells balloon, statistics and migrations.
//!
//! **Cost.** Three small files of `/proc` per period; each search for new VMs reads one link of
//! each process of the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use model::view::Mechanism;
use model::{Bytes, Migration, Reading, VmName};
use sys::clock::boot_now;
use sys::log;
use sys::process::Identity;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::identity::{self, check_program, is_qemu};
use super::libvirt::{self, DomainGuest, Unreported};
use super::memory::Meter;
use super::shared::{DriverState, name_of_stranger};
use super::slot::{self, Slot, VmOrder};
use super::tenant::Evidence;
use super::tenant::managers::Managed;
use super::vm::{OF_A_GROUP, OF_THE_BALLOON};

/// Maximum number of bytes of a command line that are read.
const MOST_BYTES: u64 = 64 << 10;
/// Maximum number of QEMUs per user, because any user may start some.
const MOST_VMS: usize = 1024;
/// Timeout of reading a process's description of itself, which the process may have placed where
/// a read blocks for ever.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after the end of a VM or a fault until its process is checked again.
const PAUSE: Duration = Duration::from_secs(5);
pub(super) const NO_SOCKET: &str = "no QMP socket of it is named in [host] `qmp`";

/// The key of such a VM among the slots.
pub(super) fn place_of(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// Whether this is such a key.
pub(super) fn is_place(path: &Path) -> bool {
    pid_in(path).is_some()
}

fn pid_in(path: &Path) -> Option<u32> {
    path.strip_prefix("/proc").ok()?.to_str()?.parse().ok()
}

/// Processes of the host with a program named like QEMU, except these. Only the link to each
/// program is read, because a user may have put anything behind it.
pub(super) fn find(known: &BTreeSet<u32>) -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    // The limit is per user, so no user can hide other users' VMs behind many processes.
    let mut has_room = |pid: &u32| {
        let user = std::fs::metadata(format!("/proc/{pid}")).map_or(0, |of| of.uid());
        let count = counts.entry(user).or_default();
        *count += 1;
        *count <= MOST_VMS
    };
    let all = pids.filter(|pid| !known.contains(pid) && is_called_qemu(*pid));
    all.filter(|pid| has_room(pid)).collect()
}

fn is_called_qemu(pid: u32) -> bool {
    let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
    let name = exe.ok().and_then(|exe| Some(exe.file_name()?.to_string_lossy().into_owned()));
    name.is_some_and(|name| is_qemu(name.trim_end_matches(" (deleted)")))
}

/// Keeps one VM's slot up to date until the task is aborted.
pub(super) async fn run(
    shared: Arc<DriverState>,
    slot: Arc<Slot>,
    mut orders: mpsc::Receiver<VmOrder>,
) {
    loop {
        let process = pid_in(&slot.path).and_then(Identity::of);
        let mut guest = process.map(|process| DomainGuest::new(&shared, &slot, process));
        let outcome = match (process, &mut guest) {
            (Some(process), Some(guest)) => {
                look_after(&shared, &slot, process, guest, &mut orders).await
            }
            _ => Err(GONE.to_owned()),
        };
        let why = outcome.err().unwrap_or_default();
        let is_end = why == GONE;
        slot.down(why, is_end);
        // A request from before does not apply to what is met next.
        slot.take_wish();
        let pause = sleep(PAUSE);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                Some(order) = orders.recv() => answer(order, guest.as_ref()).await,
            }
        }
    }
}

const GONE: &str = "QEMU has ended";

/// Restores the VM, but never moves it.
async fn answer(order: VmOrder, guest: Option<&DomainGuest<'_>>) {
    match (order, guest) {
        (VmOrder::Restore(order), Some(guest)) => guest.obey(order).await,
        // The process has not been met, so it has not been changed.
        (VmOrder::Restore(order), None) => drop(order.reply.send(None)),
        // The dropped reply tells the caller that the move was not made.
        (VmOrder::Move(_), _) => {}
    }
}

/// Watches a VM until its process ends, or the configuration changes.
async fn look_after(
    shared: &DriverState,
    slot: &Slot,
    process: Identity,
    guest: &mut DomainGuest<'_>,
    orders: &mut mpsc::Receiver<VmOrder>,
) -> Result<(), String> {
    let pid = process.pid;
    let mut rules = shared.rules();
    let (words, mut evidence) = meet(shared, process).await?;
    let named = || shared.domains.of(process).map(|reported| reported.domain.name.clone());
    let by_libvirt = |name| Managed { manager: libvirt::NAME, name };
    evidence.managed = evidence.managed.or_else(|| named().map(by_libvirt));
    let told = name_in(&words).unwrap_or_else(|| name_of_stranger(&slot.path));
    // The name that its manager tells takes precedence over the one on the command line.
    let told = evidence.managed.as_ref().map_or(told, |managed| managed.name.clone());
    let stranger = rules.admit(&told, &evidence).err();
    if let Some(why) = &stranger {
        log::warn(&format!("QEMU {pid}: {why}"));
    }
    let name = if stranger.is_none() { told.clone() } else { name_of_stranger(&slot.path) };
    claim(shared, slot, &name, pid);
    let said = ram_in(&words).ok_or("its command line does not tell how much RAM it has (`-m`)")?;
    {
        let mut state = slot.state();
        state.view = slot::unknown_vm(slot::NOT_ASKED.to_owned());
        state.view.incarnation = identity::of_process(process);
        state.view.pid = Some(pid);
        state.view.migration = Migration::Unknown;
        for mechanism in OF_THE_BALLOON {
            state.view.limits.insert(mechanism, NO_SOCKET.to_owned());
        }
        if let Some(why) = &stranger {
            for mechanism in OF_A_GROUP {
                state.view.limits.insert(mechanism, why.to_string());
            }
        }
    }
    let mut meter = Meter::new(pid, said.clone());
    let mut period = interval(shared.period);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for periods in 0_u64.. {
        tokio::select! {
            _ = period.tick() => {}
            () = slot.wished.notified() => {
                guest.grant_wish().await;
                continue;
            }
            Some(order) = orders.recv() => {
                answer(order, Some(guest)).await;
                continue;
            }
        }
        if !process.is_alive() {
            break;
        }
        if !Arc::ptr_eq(&rules, &shared.rules()) {
            rules = shared.rules();
            if rules.admit(&told, &evidence).err() != stranger {
                return Err("the configuration has changed, it is met anew".to_owned());
            }
        }
        let is_proxmoxs = || shared.proxmox.has(identity::of_process(process));
        if evidence.managed.is_none() && (named().is_some() || is_proxmoxs()) {
            return Err("its manager names it, it is met anew".to_owned());
        }
        if slot.state().name.is_none() {
            // Another VM's socket has claimed this name.
            claim(shared, slot, &name_of_stranger(&slot.path), pid);
        }
        count(slot, pid, &said, &mut meter).await;
        if periods.is_multiple_of(slot::CPU_EVERY) {
            slot.count_cpu(pid);
        }
        match guest.look().await {
            Ok(()) => slot.up(),
            Err(Unreported::TooOld(why)) => slot.down(why, false),
            Err(Unreported::Gone) => return Err("libvirt names it no more".to_owned()),
        }
    }
    Err(GONE.to_owned())
}

/// Reads its command line, and the evidence about its identity, on a blocking thread. If a read
/// blocks for ever, only one permit for such reads is lost.
async fn meet(shared: &DriverState, process: Identity) -> Result<(Vec<String>, Evidence), String> {
    let place = timeout(PATIENCE, Arc::clone(&shared.meetings).acquire_owned()).await;
    let place = place.map_err(|_| "others are being met".to_owned())?;
    let proxmox = Arc::clone(&shared.proxmox);
    let read = spawn_blocking(move || {
        let _place = place;
        check_program(process)?;
        let words = words_of(process.pid).ok_or(GONE)?;
        let met = process.still((words, Evidence::of_process(process, &proxmox)));
        met.map_err(|_| GONE.to_owned())
    });
    match timeout(PATIENCE, read).await {
        Ok(Ok(met)) => met,
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("what it says of itself cannot be read in time".to_owned()),
    }
}

/// Claims the VM's name. If another VM has it, the VM gets the name of a stranger, because a VM
/// without a name is not shown.
fn claim(shared: &DriverState, slot: &Slot, name: &VmName, pid: u32) {
    let stranger = name_of_stranger(&slot.path);
    if shared.claim(name, &slot.path, Some(pid)).is_err() && *name != stranger {
        let _ = shared.claim(&stranger, &slot.path, Some(pid));
    }
}

/// Reads its memory from the kernel.
async fn count(slot: &Slot, pid: u32, said: &[Bytes], meter: &mut Meter) {
    let counters = meter.counters();
    let mapped = counters.as_ref().map_or(Bytes::ZERO, |counters| counters.mapped);
    let used = meter.read(counters).await;
    let now = boot_now();
    {
        let view = &mut slot.state().view;
        view.ram = said.iter().copied().sum::<Bytes>().min(mapped);
        if let Ok(Some(used)) = used {
            (view.used, view.own) = (Some(Reading::new(used, now)), meter.own());
        }
    }
    slot.read_limits(pid);
    slot.limit(Mechanism::HostMemory, used.err().map(|error| error.to_string()));
}

/// The words of a process's command line.
fn words_of(pid: u32) -> Option<Vec<String>> {
    let mut bytes = Vec::new();
    File::open(format!("/proc/{pid}/cmdline"))
        .ok()?
        .take(MOST_BYTES)
        .read_to_end(&mut bytes)
        .ok()?;
    let words = bytes.split(|byte| *byte == 0);
    Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

/// The value of an option, which is written with one dash or two.
fn value_of<'a>(words: &'a [String], option: &str) -> Option<&'a str> {
    values_of(words, option).next()
}

fn values_of<'a>(words: &'a [String], option: &str) -> impl Iterator<Item = &'a str> {
    let is_it =
        move |word: &String| word.trim_start_matches('-') == option && word.starts_with('-');
    words.windows(2).filter(move |pair| is_it(&pair[0])).map(|pair| pair[1].as_str())
}

/// The value of a key in a list such as `a=1,b=2`. With `is_implied`, a first value without a key
/// belongs to this key.
fn field<'a>(text: &'a str, key: &str, is_implied: bool) -> Option<&'a str> {
    let mut parts = text.split(',');
    let first = text.split(',').next().filter(|first| is_implied && !first.contains('='));
    first.or_else(|| parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('=')))
}

/// Parses `-name web-1` or `-name guest=web-1,debug-threads=on`. Names that begin with a slash
/// are reserved for VMs that are named by their path.
fn name_in(words: &[String]) -> Option<VmName> {
    let name = field(value_of(words, "name")?, "guest", true)?;
    (!name.is_empty() && !name.starts_with('/')).then(|| VmName::from(model::words::plain(name)))
}

/// The blocks of its RAM: the memory backends if their sum is the size in `-m`, or else one block
/// of that size. `None`: `-m` is missing or not understood.
fn ram_in(words: &[String]) -> Option<Vec<Bytes>> {
    let size = size_of_ram(field(value_of(words, "m")?, "size", true)?)?;
    let backends: Vec<Bytes> = values_of(words, "object")
        .filter(|object| object.contains("memory-backend-"))
        .filter_map(size_in)
        .collect();
    Some(if backends.iter().copied().sum::<Bytes>() == size { backends } else { vec![size] })
}

/// The size of a backend: `memory-backend-ram,id=a,size=1G`, or as JSON, in bytes.
fn size_in(object: &str) -> Option<Bytes> {
    match serde_json::from_str::<serde_json::Value>(object) {
        Ok(json) => json.get("size")?.as_u64().map(Bytes),
        Err(_) => size(field(object, "size", false)?, 1),
    }
}

/// The size in `-m`, in MiB unless it has a unit.
fn size_of_ram(text: &str) -> Option<Bytes> {
    size(text, 1 << 20)
}

fn size(text: &str, unit: u64) -> Option<Bytes> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => unit,
        "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0).map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn names_and_sizes_are_read_off_command_lines_of_all_managers() {
        let of = |line| {
            let words = words(line);
            (name_in(&words).map(|name| name.to_string()), ram_in(&words))
        };
        let mib = |sizes: &[u64]| Some(sizes.iter().copied().map(Bytes::mib).collect::<Vec<_>>());
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(
            of("/usr/bin/qemu-system-x86_64 -name web-1 -m 512"),
            (named("web-1"), mib(&[512]))
        );
        assert_eq!(
            of("qemu -name guest=db-1,debug-threads=on -m size=4194304k,slots=16,maxmem=8G"),
            (named("db-1"), mib(&[4096]))
        );
        // As Proxmox starts it.
        assert_eq!(
            of("/usr/bin/kvm -id 101 -name vm101,debug-threads=on -m 2048"),
            (named("vm101"), mib(&[2048]))
        );
        assert_eq!(of("qemu-kvm --name a -m 1G"), (named("a"), mib(&[1024])));
        let numa = "qemu -m 1G -object memory-backend-ram,id=a,size=512M \
                    -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"b\",\"size\":536870912}";
        assert_eq!(of(numa), (None, mib(&[512, 512])));
        let nvdimm = "qemu -m 1G -object memory-backend-file,id=a,size=4G,mem-path=/x";
        assert_eq!(of(nvdimm), (None, mib(&[1024])));
    }

    #[test]
    fn a_size_that_is_not_understood_is_not_guessed() {
        for line in
            ["qemu -S", "qemu -m", "qemu -m 1X", "qemu -m 0", "qemu -m 1.5G", "qemu -m -1", ""]
        {
            assert_eq!(ram_in(&words(line)), None, "{line}");
        }
        for line in ["qemu -name", "qemu -name debug-threads=on", "qemu -name guest=,x=y"] {
            assert_eq!(name_in(&words(line)), None, "{line}");
        }
        assert_eq!(name_in(&words("qemu -name /proc/77")), None, "the name of a stranger");
    }

    /// This process is no QEMU, so it is never looked after.
    #[tokio::test]
    async fn an_order_to_restore_between_two_looks_is_not_answered_with_no_changes() {
        use super::super::records::Records;
        use crate::journal::{Journal, UndoRecord};
        let dir = tempfile::tempdir().unwrap();
        let records = Records::new(Journal::open(dir.path()).unwrap());
        let own = Identity::own().unwrap();
        let socket = dir.path().join(model::libvirt::SOCKET_NAME);
        let undo = UndoRecord {
            balloon: Some(Bytes::mib(512)),
            ..UndoRecord::untouched("a".into(), socket.join("uuid"), identity::of_process(own))
        };
        records.keep(undo.clone()).await.unwrap();
        let shared = Arc::new(DriverState::new(Duration::from_secs(1), records, socket));
        let (slot, orders) = Slot::new(place_of(own.pid));
        let slot = Arc::new(slot);
        let task = tokio::spawn(run(Arc::clone(&shared), Arc::clone(&slot), orders));
        let (reply, answer) = tokio::sync::oneshot::channel();
        assert!(slot.order(VmOrder::Restore(slot::Restore { undo: crate::Undo::Now, reply })));
        // No report comes.
        let Some(Err(why)) = answer.await.unwrap() else { panic!("not carried out") };
        assert_eq!(why.to_string(), "libvirt does not answer");
        assert_eq!(shared.records.all().await, [undo]);
        task.abort();
    }

    #[test]
    fn a_process_has_a_place_and_a_socket_is_none() {
        assert_eq!(pid_in(&place_of(4711)), Some(4711));
        for path in ["/proc/self", "/proc/1/x", "/run/overbook/qmp/1", "/proc"] {
            assert!(!is_place(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn programs_that_are_not_qemu_are_not_found() {
        assert!(!find(&BTreeSet::new()).contains(&std::process::id()));
    }
}
