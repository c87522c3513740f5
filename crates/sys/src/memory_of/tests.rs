//! Counting on invented `smaps`, on this very process, and on pids that vanish.

use super::*;

/// A mapping of `len_kib` at `start`, with what is resident in it.
fn mapping(start: u64, len_kib: u64, perms: &str, file: &str, rss: u64, anon: u64) -> String {
    format!(
        "{start:x}-{:x} {perms} 00000000 00:00 0   {file}\nSize: {len_kib} kB\nRss: {rss} kB\n\
         Anonymous: {anon} kB\nVmFlags: rd wr mr\n",
        start + len_kib * 1024
    )
}

fn measure(smaps: &str, ram_mib: &[u64]) -> Result<(Bytes, Bytes), OverheadError> {
    let runs = read_runs(Path::new("smaps"), smaps.as_bytes())?;
    let sizes: Vec<Bytes> = ram_mib.iter().map(|&n| Bytes::mib(n)).collect();
    split(1, runs, &sizes)
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
        + &mapping(0x7000_0000, 262_144, "rw-p", "", 3000, 3000)
            .replace("VmFlags: rd", "VmFlags: dc rd");
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
fn garbage_is_an_error_and_an_endless_line_no_trouble() {
    assert!(matches!(measure("nonsense\n", &[1]), Err(OverheadError::Proc(_))));
    let endless = "x".repeat(1 << 20);
    assert!(matches!(measure(&endless, &[1]), Err(OverheadError::Proc(_))));
    assert!(measure("", &[1]).is_err());
}

#[test]
fn touched_memory_shows_in_counters_and_in_the_measurement() {
    const SIZE: usize = 64 << 20;
    let before = Counters::of(std::process::id()).unwrap();
    let mut block = vec![0_u8; SIZE];
    for page in block.chunks_mut(4096).take(SIZE / 4096 / 2) {
        page[0] = 1;
    }
    let grown = Counters::of(std::process::id()).unwrap().total().minus(before.total());
    assert!(grown.0.abs_diff(32 << 20) < 3 << 20, "grew by {grown}");
    let measured = Overhead::measure(std::process::id(), &[Bytes(64 << 20)]).unwrap();
    assert!(measured.guest.0.abs_diff(32 << 20) < 3 << 20, "measured {}", measured.guest);
    std::hint::black_box(&block);
}

#[test]
fn a_vanished_process_and_a_zombie_are_errors_not_zeroes() {
    assert!(Counters::of(u32::MAX).is_err());
    assert!(Overhead::measure(u32::MAX, &[Bytes::mib(1)]).is_err());
    let mut child = std::process::Command::new("true").spawn().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let error = Counters::of(child.id()).unwrap_err();
    child.wait().unwrap();
    assert!(matches!(error, ProcError::Missing { .. }), "{error}");
}

#[test]
fn status_with_absurd_values_is_refused() {
    let path = Path::new("/proc/1/status");
    let text = "RssAnon: -5 kB\nRssShmem: 0 kB\nVmPTE: 1 kB\n";
    assert!(matches!(Counters::parse(path, text), Err(ProcError::Malformed { .. })));
}
