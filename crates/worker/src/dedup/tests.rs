//! Tests of a group's dedup with a shim that does not answer.

use protocol::{Region, Request};
use sys::memory_map::PAGE_LEN;
use sys::process::Identity;

use super::super::fake_shim::FakeShim;
use super::super::mode::{Mode, Settings};
use super::*;

const PAGES: u32 = 64;

/// Memory of this process whose second half is equal to its first, and the region of its pages.
fn equal_halves() -> (Vec<u8>, Region) {
    let mut memory = vec![0; (PAGES as usize + 1) * PAGE_LEN];
    let before = memory.as_ptr().addr().next_multiple_of(PAGE_LEN) - memory.as_ptr().addr();
    let address = (memory.as_ptr().addr() + before) as u64;
    let pages = memory[before..].chunks_exact_mut(PAGE_LEN);
    // Neighbours share neighbouring slots: pages alone would not be worth their mappings.
    (1..=PAGES / 2).cycle().zip(pages).for_each(|(n, page)| page.fill(u8::try_from(n).unwrap()));
    (memory, Region { first_page: 0, pages: PAGES, address })
}

#[test]
fn a_merge_in_flight_keeps_its_reference_while_its_vm_is_paused() {
    let (_memory, region) = equal_halves();
    let mut shim = FakeShim::of_region(region);
    shim.lie = Box::new(|_, request| matches!(request, Request::Merge { .. }).then(Vec::new));
    let process = Identity::own().unwrap();
    let mut tracked = Tracked::connect(process, Settings::new(Mode::Untracked)).unwrap();
    let mut dedup = Dedup::of_pool(format!("{NAME_PREFIX}-test-{}", process.pid));
    let mut turn = |dedup: &mut Dedup| {
        tracked.step();
        shim.serve();
        dedup.work(&mut [&mut tracked], Instant::now() + Duration::from_millis(5));
        dedup.vms.get(&process.pid).map_or(0, |vm| vm.requests.merges())
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut merges = 0;
    while merges == 0 || dedup.vms[&process.pid].requests.is_idle() {
        assert!(Instant::now() < deadline, "no merge is requested");
        merges = turn(&mut dedup);
    }
    let references = |dedup: &Dedup| dedup.vms[&process.pid].references();
    let before = references(&dedup);
    dedup.set_paused([process.pid].into());
    for _ in 0..10 {
        assert_eq!(turn(&mut dedup), merges, "nothing is merged while it is paused");
    }
    assert_eq!(references(&dedup), before);
    dedup.set_paused(BTreeSet::new());
    turn(&mut dedup);
    assert!(before.iter().all(|slot| references(&dedup).contains(slot)), "{before:?}");
}
