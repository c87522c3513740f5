//! Guests and QEMUs that attack the merging of their group: no other VM loses a byte, no memory
//! leaks, and nothing blocks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod floods;
mod group;
mod identity;
mod liar;
mod page_server;
mod ram_liar;

use std::time::{Duration, Instant};

use group::{AttackedGroup, GroupStandIn};
use liar::Liar;
use model::Bytes;
use overbook_tests::take_turn;
use protocol::layout::PageState;
use protocol::{Answer, Merged, Region};
use worker::State;

/// The smallest mapping that a shim takes for guest RAM.
const MIB: u32 = 32;
const PAGES: u32 = MIB * 256;
/// Expected amount of shared memory: nearly all. Huge pages that are split late, and pages that
/// were just written, come later.
const NEARLY: Bytes = Bytes::mib(30);
/// Working time where there is no condition to wait for.
const A_WHILE: Duration = Duration::from_secs(2);

/// Two VMs that share all of their memory.
fn two_that_share(group: &mut AttackedGroup) -> [GroupStandIn; 2] {
    let both = [(); 2].map(|()| GroupStandIn::with_ram(&[MIB]));
    both.iter().for_each(|vm| group.add(vm.pid()));
    group.until("both share", || (), |group| both.iter().all(|vm| shares(group, vm)));
    both
}

fn shares(group: &AttackedGroup, vm: &GroupStandIn) -> bool {
    group.reading(vm.pid()).shared >= NEARLY
}

/// Ends the VMs and checks that the pool is empty.
fn end(mut group: AttackedGroup, vms: impl IntoIterator<Item = GroupStandIn>) {
    drop(vms.into_iter().collect::<Vec<_>>());
    group.until("nothing is left in the pool", || (), |group| group.dedup.pool_bytes() == 0);
}

#[test]
fn a_group_of_one_shares_with_itself() {
    let Some(_turn) = take_turn() else { return };
    let mut group = AttackedGroup::new();
    let mut vm = GroupStandIn::with_ram(&[MIB, MIB]);
    group.add(vm.pid());
    group.until("it shares", || (), |group| group.reading(vm.pid()).saved >= NEARLY);
    assert!(group.dedup.pool_bytes() <= Bytes::mib(MIB.into()).0);
    vm.expect("check 0 1");
    vm.expect("fill 1 2");
    vm.expect("check 0 1");
    vm.expect("check 1 2");
    end(group, [vm]);
}

#[test]
fn guests_that_rewrite_what_is_being_merged_lose_nothing_and_do_not_grow_the_pool() {
    let Some(_turn) = take_turn() else { return };
    let mut group = AttackedGroup::new();
    let mut both = [(); 2].map(|()| GroupStandIn::with_ram(&[MIB]));
    both.iter().for_each(|vm| group.add(vm.pid()));
    let mut most = 0;
    for round in 0..30 {
        let seed = round % 2 + 1;
        both.iter_mut().for_each(|vm| vm.begin(&format!("fill 0 {seed}")));
        group.work(Duration::from_millis(100), || ());
        for vm in &mut both {
            vm.finish();
            vm.expect(&format!("check 0 {seed}"));
        }
        most = most.max(group.dedup.pool_bytes());
        // The pages can then be merged once more.
        if round % 5 == 4 {
            both.iter_mut().for_each(|vm| vm.expect(&format!("discard 0 0 {PAGES}")));
        }
    }
    assert!(most > 0 && most <= Bytes::mib(2 * u64::from(MIB)).0, "{most}");
    end(group, both);
}

#[test]
fn pages_that_are_freed_and_filled_again_behind_the_engines_back_leak_no_slot() {
    let Some(_turn) = take_turn() else { return };
    let mut group = AttackedGroup::new();
    let mut both = [(); 2].map(|()| GroupStandIn::with_ram(&[MIB]));
    // The index knows pages where one VM had another content …
    both[0].expect("fill 0 2");
    group.add(both[0].pid());
    group.work(A_WHILE, || ());
    both[0].expect("fill 0 1");
    group.add(both[1].pid());
    group.until("both share", || (), |group| both.iter().all(|vm| shares(group, vm)));
    // … and finds that content there again, before it knows that the pages are no longer shared.
    for vm in &mut both {
        vm.expect(&format!("discard 0 0 {PAGES}"));
        vm.expect("fill 0 2");
    }
    group.until("both share", || (), |group| both.iter().all(|vm| shares(group, vm)));
    group.work(A_WHILE, || ());
    let pool = group.dedup.pool_bytes();
    assert!(pool <= Bytes::mib(MIB.into()).0, "{pool}");
    both.iter_mut().for_each(|vm| vm.expect("check 0 2"));
    end(group, both);
}

#[test]
fn vms_come_and_go_while_they_are_looked_at() {
    let Some(_turn) = take_turn() else { return };
    let mut group = AttackedGroup::new();
    let mut both = two_that_share(&mut group);
    for round in 0..12 {
        let mut guest = GroupStandIn::with_ram(&[MIB]);
        group.add(guest.pid());
        group.work(Duration::from_millis(20 * round), || ());
        if round % 2 == 0 {
            // The other VM leaves the group and keeps running: its shared pages have to stay.
            group.remove_newest();
            group.work(Duration::from_millis(50), || ());
            both[0].expect("fill 0 7");
            guest.expect("check 0 1");
            both[0].expect("check 0 7");
            both[0].expect(&format!("discard 0 0 {PAGES}"));
            both[0].expect("fill 0 1");
        }
        drop(guest);
    }
    group.until("both share", || (), |group| both.iter().all(|vm| shares(group, vm)));
    both.iter_mut().for_each(|vm| vm.expect("check 0 1"));
    end(group, both);
}

#[test]
fn a_qemu_that_answers_out_of_order_or_counts_backwards_holds_nobody_up() {
    let Some(_turn) = take_turn() else { return };
    let mut group = AttackedGroup::new();
    let mut liar = Liar::with_ram(PAGES);
    liar.fill(1);
    let mut random = fastrand::Rng::with_seed(7);
    liar.lie = Box::new(move |_| match random.u8(0..12) {
        0 => Some(Answer::Done { count: random.u32(..) }),
        1 => Some(Answer::Merged(Merged { shared: random.u32(..), ..Merged::default() })),
        _ => None,
    });
    group.add(std::process::id());
    let mut both = [(); 2].map(|()| GroupStandIn::with_ram(&[MIB]));
    both.iter().for_each(|vm| group.add(vm.pid()));
    let mut longest = Duration::ZERO;
    let mut last = Instant::now();
    let act = || {
        longest = longest.max(last.elapsed());
        liar.serve();
        liar.count_nonsense();
        last = Instant::now();
    };
    group.until("the others share", act, |group| both.iter().all(|vm| shares(group, vm)));
    assert!(liar.greetings > 0 && longest < Duration::from_secs(5), "{longest:?}");
    both.iter_mut().for_each(|vm| vm.expect("check 0 1"));
    drop((liar, both));
    // Pages of an unanswered request are kept as long as the liar's process, this one, lives.
    let own = Bytes::mib(MIB.into()).0;
    group.until("the others leave nothing", || (), |group| group.dedup.pool_bytes() <= own / 2);
}

#[test]
fn memory_that_a_qemu_claims_and_has_not_is_not_believed_or_harms_nobody() {
    let Some(_turn) = take_turn() else { return };
    let region = |first_page, pages, address| Region { first_page, pages, address };
    let mut group = AttackedGroup::new();
    let mut both = two_that_share(&mut group);
    let own = std::process::id();
    let gigantic = region(0, u32::MAX / 512 * 512, 0);
    let mut liar = Liar::claiming(vec![gigantic]);
    group.add(own);
    let refused = |group: &AttackedGroup| match group.states()[2] {
        State::Waiting { why } | State::Unsupported { why } => why.contains("are believed"),
        _ => false,
    };
    group.until("it is refused", || liar.serve(), refused);
    assert_eq!(group.dedup.reading(own), None);
    group.remove_newest();
    // Nothing is mapped there; the region crosses the end of user space; the regions change with
    // each greeting.
    let claims = [
        vec![region(0, 4096, 0), region(8192, 512, 1 << 47)],
        vec![region(0, 1 << 20, (1 << 47) - (1 << 20))],
        vec![region(512, 1, 4096), region(1024, 1, (1 << 63) - 4096)],
    ];
    for claim in claims {
        liar.claim(claim);
        liar.say(PageState::Merged);
        group.add(own);
        let has_looked = |group: &AttackedGroup| group.reading(own).passes > 0;
        group.until("it is looked at", || liar.serve(), has_looked);
        liar.say(PageState::Plain);
        group.work(Duration::from_millis(200), || liar.serve());
        group.remove_newest();
    }
    both.iter_mut().for_each(|vm| vm.expect("check 0 1"));
    drop(liar);
    end(group, both);
}
