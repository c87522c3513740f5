//! Counts on invented `smaps`, on this process, and on pids that vanish.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::memory_map::{Advice, Over, PAGE_BYTES, PAGE_LEN, Range, Reserved};
use crate::pool_file::{PoolFile, PoolView};
use crate::shared_memory::SharedMemory;

const POOL: &str = "/memfd:overbook-pool-17 (deleted)";

/// Tests that count this process's memory run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mapping of `len_kib` at `start`, with its resident memory.
fn mapping(start: u64, len_kib: u64, perms: &str, file: &str, rss: u64, anon: u64) -> String {
    format!(
        "{start:x}-{:x} {perms} 00000000 00:00 0   {file}\nSize: {len_kib} kB\nRss: {rss} kB\n\
         Anonymous: {anon} kB\nVmFlags: rd wr mr\n",
        start + len_kib * 1024
    )
}

/// A mapping with the flags that QEMU sets for guest RAM.
fn ram(start: u64, len_kib: u64, perms: &str, file: &str, rss: u64, anon: u64) -> String {
    mapping(start, len_kib, perms, file, rss, anon).replace("VmFlags: rd", "VmFlags: dc rd")
}

fn overhead(smaps: &str, ram_mib: &[u64]) -> Result<Overhead, OverheadError> {
    let runs = read_runs(Path::new("smaps"), smaps.as_bytes())?;
    let sizes: Vec<Bytes> = ram_mib.iter().map(|&n| Bytes::mib(n)).collect();
    split(1, runs, &sizes, Instant::now())
}

/// The memory inside guest RAM and outside.
fn measure(smaps: &str, ram_mib: &[u64]) -> Result<(Bytes, Bytes), OverheadError> {
    overhead(smaps, ram_mib).map(|overhead| (overhead.guest, overhead.own))
}

#[test]
fn private_guest_ram_is_told_from_heap_and_program() {
    let smaps = mapping(0x1000_0000, 4096, "r-xp", "/usr/bin/qemu", 4000, 0)
        + &mapping(0x2000_0000, 8192, "rw-p", "[heap]", 6000, 6000)
        + &mapping(0x7000_0000, 262_144, "rw-p", "", 96_256, 96_256)
        + &mapping(0x9000_0000, 32_768, "rwxp", "", 32_000, 32_000);
    assert_eq!(measure(&smaps, &[256]).unwrap(), (Bytes::kib(96_256), Bytes::kib(38_000)));
}

#[test]
fn what_a_tracker_has_moved_aside_is_the_guests() {
    let staging = |start: u64, len_kib, resident| {
        ram(start, len_kib, "rw-p", "", resident, resident).replace("VmFlags:", "VmFlags: rr um")
    };
    let smaps = mapping(0x2000_0000, 8192, "rw-p", "[heap]", 6000, 6000)
        // The same length as guest RAM, and before it; another one next to it.
        + &staging(0x6000_0000, 262_144, 30_000)
        + &ram(0x7000_0000, 200_000, "rw-p", "", 60_000, 60_000)
        + &ram(0x7c35_0000, 62_144, "rw-p", POOL, 700, 500)
        + &staging(0x8000_0000, 4096, 1000)
        + &mapping(0x9000_0000, 4096, "rw-p", "", 100, 100);
    assert_eq!(measure(&smaps, &[256]).unwrap(), (Bytes::kib(91_500), Bytes::kib(6_100)));
}

#[test]
fn guest_ram_on_a_memfd_is_found_by_its_size() {
    let smaps = mapping(0x7000_0000, 262_144, "rw-s", "/memfd:ram (deleted)", 5000, 0)
        + &mapping(0x9000_0000, 1024, "rw-p", "", 300, 300);
    assert_eq!(measure(&smaps, &[256]).unwrap(), (Bytes::kib(5000), Bytes::kib(300)));
}

#[test]
fn guest_ram_that_was_split_is_put_together_again() {
    let smaps = mapping(0x7000_0000, 131_072, "rw-p", "", 1000, 1000)
        + &mapping(0x7800_0000, 131_072, "rw-p", "", 2000, 2000)
        + &mapping(0x9000_0000, 131_072, "---p", "", 0, 0);
    assert_eq!(measure(&smaps, &[256]).unwrap(), (Bytes::kib(3000), Bytes::ZERO));
}

#[test]
fn a_neighbour_is_no_part_of_guest_ram_nor_is_a_translation_buffer_of_its_size() {
    let smaps = mapping(0x4000_0000, 262_144, "rwxp", "", 7000, 7000)
        + &mapping(0x6000_0000, 262_144, "rw-p", "", 500, 500)
        + &ram(0x7000_0000, 262_144, "rw-p", "", 3000, 3000);
    let (guest, own) = measure(&smaps, &[256]).unwrap();
    assert_eq!((guest, own), (Bytes::kib(3000), Bytes::kib(7500)));
}

#[test]
fn two_pieces_of_one_size_are_two_mappings() {
    let smaps = mapping(0x4000_0000, 131_072, "rw-s", "/memfd:a (deleted)", 10, 0)
        + &mapping(0x7000_0000, 131_072, "rw-s", "/memfd:b (deleted)", 20, 0);
    assert_eq!(measure(&smaps, &[128, 128]).unwrap(), (Bytes::kib(30), Bytes::ZERO));
}

#[test]
fn a_reservation_is_never_taken_for_guest_ram() {
    let smaps = mapping(0x7000_0000, 262_144, "---p", "", 0, 0);
    let error = measure(&smaps, &[256]).unwrap_err();
    assert!(error.to_string().contains("guest RAM of 256 MiB"), "{error}");
}

#[test]
fn a_pool_interrupts_guest_ram_and_only_copies_of_its_pages_are_the_guests() {
    let smaps = mapping(0x6000_0000, 262_144, "rw-p", "", 500, 500)
        // The first page of guest RAM, mapped a moment ago: its advice is not given yet.
        + &mapping(0x7000_0000, 64, "rw-p", POOL, 64, 0)
        + &ram(0x7001_0000, 131_008, "rw-p", "", 1000, 1000)
        + &ram(0x7800_0000, 128, "rw-p", POOL, 100, 20)
        + &ram(0x7802_0000, 130_944, "rw-p", "", 2000, 2000)
        + &mapping(0x9000_0000, 128, "rw-s", "/memfd:ring (deleted)", 40, 0);
    let found = overhead(&smaps, &[256]).unwrap();
    assert_eq!((found.guest, found.own), (Bytes::kib(3020), Bytes::kib(500)));
    let counters = Counters { anonymous: Bytes::kib(3520), ..Counters::default() };
    for shared in [204, 9999].map(Bytes::kib) {
        assert_eq!(found.guest_used(&Counters { shared, ..counters }), Bytes::kib(3020));
    }
}

#[test]
fn with_ram_of_both_kinds_the_pools_pages_are_overhead() {
    let smaps = ram(0x6000_0000, 131_072, "rw-s", "/memfd:ram (deleted)", 700, 0)
        + &ram(0x7000_0000, 131_008, "rw-p", "", 1000, 1000)
        + &ram(0x77ff_0000, 64, "rw-p", POOL, 60, 20)
        + &mapping(0x9000_0000, 128, "rw-s", "/memfd:ring (deleted)", 5, 0);
    let found = overhead(&smaps, &[128, 128]).unwrap();
    assert_eq!((found.guest, found.own), (Bytes::kib(1720), Bytes::kib(45)));
    let (anonymous, shared) = (Bytes::kib(1020), Bytes::kib(745));
    let counters = Counters { anonymous, shared, ..Counters::default() };
    assert_eq!(found.guest_used(&counters), found.guest);
}

#[test]
fn a_mapping_that_grew_between_two_reads_does_not_end_guest_ram() {
    let smaps = ram(0x7000_0000, 65_536, "rw-p", "", 1000, 1000)
        + &ram(0x7000_0000, 262_144, "rw-p", "", 4000, 4000)
        + &mapping(0x9000_0000, 128, "rw-p", "", 7, 7);
    assert_eq!(measure(&smaps, &[256]).unwrap(), (Bytes::kib(4000), Bytes::kib(7)));
}

#[test]
fn garbage_is_an_error_and_an_endless_line_no_trouble() {
    assert!(matches!(measure("nonsense\n", &[1]), Err(OverheadError::Proc(_))));
    let endless = "x".repeat(1 << 20);
    assert!(matches!(measure(&endless, &[1]), Err(OverheadError::Proc(_))));
    assert!(measure("", &[1]).is_err());
}

#[test]
fn touched_memory_shows_in_counters_and_in_the_measurement() {
    const SIZE: usize = 64 << 20;
    let _alone = alone();
    let before = Counters::of(std::process::id()).unwrap();
    let mut block = vec![0_u8; SIZE];
    for page in block.chunks_mut(4096).take(SIZE / 4096 / 2) {
        page[0] = 1;
    }
    let after = Counters::of(std::process::id()).unwrap();
    let grown = after.anonymous.minus(before.anonymous);
    assert!(grown.0.abs_diff(32 << 20) < 3 << 20, "grew by {grown}");
    let measured = Overhead::measure(std::process::id(), &[Bytes(64 << 20)]).unwrap();
    assert!(measured.guest.0.abs_diff(32 << 20) < 3 << 20, "measured {}", measured.guest);
    std::hint::black_box(&block);
}

#[test]
fn mapping_a_pool_over_memory_leaves_what_is_ones_own() {
    const SIZE: Bytes = Bytes::mib(48);
    let _alone = alone();
    let memory = Reserved::new(SIZE.0).unwrap();
    let start = memory.range().start;
    let page = |index: u64| -> *mut u8 {
        let address = start + index * PAGE_BYTES;
        std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
    };
    let pages = SIZE.0 / PAGE_BYTES;
    // SAFETY: fresh memory of ours.
    unsafe {
        memory.advise(Advice::LinuxNoHugepage).unwrap();
        memory.advise(Advice::LinuxDontFork).unwrap();
        (0..pages).for_each(|index| page(index).write_volatile(1));
    }
    let measure = || Overhead::measure(std::process::id(), &[SIZE]).unwrap();
    let before = measure();
    assert_eq!((before.guest, before.ram_is_shared), (SIZE, false));

    let pool = PoolFile::create("overbook-pool-test", 16).unwrap();
    (0..16).for_each(|slot| pool.write(slot, &[7; PAGE_LEN]).unwrap());
    let view = PoolView::open(pool.reader().unwrap(), 16).unwrap();
    for first in (0..pages).step_by(32) {
        let range = Range { start: start + first * PAGE_BYTES, len: 16 * PAGE_BYTES };
        // SAFETY: memory of ours, whose content no code needs.
        unsafe {
            view.map_over(0, Over { range, reserve: false }).unwrap();
            (first..first + 4).for_each(|index| page(index).write_volatile(2));
            (first + 4..first + 16).for_each(|index| assert_eq!(page(index).read_volatile(), 7));
        }
    }
    let after = measure();
    // Of 32 pages 16 are unchanged, and 4 are copies.
    assert_eq!((after.guest, after.ram_is_shared), (Bytes(SIZE.0 / 32 * 20), false));
    let counters = Counters::of(std::process::id()).unwrap();
    assert!(counters.shared >= Bytes::mib(17), "there are no pages of the pool: {counters:?}");
    for overhead in [before, after] {
        let used = overhead.guest_used(&counters).minus(counters.page_tables);
        assert!(used.0.abs_diff(after.guest.0) < 3 << 20, "{used}, not {}", after.guest);
    }
}

#[test]
fn shared_guest_ram_is_counted_by_its_pages() {
    const SIZE: usize = 40 << 20;
    let _alone = alone();
    let (memory, _fd) = SharedMemory::create("ram", 0, SIZE).unwrap();
    memory.bytes().iter().step_by(PAGE_LEN).take(6144).for_each(|byte| byte.store(1, Relaxed));
    let overhead = Overhead::measure(std::process::id(), &[Bytes(SIZE as u64)]).unwrap();
    assert_eq!((overhead.guest, overhead.ram_is_shared), (Bytes::mib(24), true));
    let counters = Counters::of(std::process::id()).unwrap();
    let used = overhead.guest_used(&counters).minus(counters.page_tables);
    assert!(used.0.abs_diff(24 << 20) < 3 << 20, "{used}");
}

#[test]
fn a_vanished_process_and_a_zombie_are_errors_not_zeroes() {
    assert!(Counters::of(u32::MAX).is_err());
    assert!(Overhead::measure(u32::MAX, &[Bytes::mib(1)]).is_err());
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let identity = crate::process::Identity::of(child.id()).unwrap();
    assert!(identity.wait_for(Duration::from_secs(60)).unwrap());
    let error = Counters::of(child.id()).unwrap_err();
    child.wait().unwrap();
    assert!(matches!(error, ProcError::Missing { .. }), "{error}");
}

#[test]
fn counters_that_are_read_again_follow_the_process_to_its_end() {
    let _alone = alone();
    let mut file = CounterFile::open(std::process::id()).unwrap();
    let before = file.read().unwrap();
    let block = std::hint::black_box(vec![1_u8; 64 << 20]);
    let after = file.read().unwrap();
    assert!(after.anonymous >= before.anonymous.plus(Bytes::mib(48)), "{before:?} {after:?}");
    drop(block);

    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut file = CounterFile::open(child.id()).unwrap();
    for _ in 0..3 * CounterFile::MOST_KEPT {
        file.read().unwrap();
    }
    child.kill().unwrap();
    let identity = crate::process::Identity::of(child.id()).unwrap();
    assert!(identity.wait_for(Duration::from_secs(60)).unwrap());
    assert!(matches!(file.read(), Err(ProcError::Missing { .. })), "a zombie has no memory");
    child.wait().unwrap();
    assert!(matches!(file.read(), Err(ProcError::Gone { .. })));
}

#[test]
fn status_with_absurd_values_is_refused() {
    let path = Path::new("/proc/1/status");
    let text = "RssAnon: -5 kB\nRssShmem: 0 kB\nVmPTE: 1 kB\n";
    assert!(matches!(Counters::parse(path, text), Err(ProcError::Malformed { .. })));
}
