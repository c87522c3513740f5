//! Sweeps: known pages are looked for before all others.
//!
//! A sweep goes through a VM as a pass does, but reads less. It reads one word of each page that
//! has come since the last sweep. It reads three more words if the first is known, and the whole
//! page only if all four are ([`pages::dedup::KnownPages`]). Findings are proposed in the usual
//! way. A program that starts loads its code page by page, so the next sweep comes soon, and a
//! little later if this one has found nothing.
//!
//! **A page has come when it has content.** The guest's first touch maps a whole huge page of
//! zeros, which it fills later. So each sweep samples a page of zeros until it has content. Of
//! [`TOGETHER`] adjacent pages none of which has come, one is sampled, in turn, and the others
//! only if that one has content.
//!
//! **Memory is reused.** A program's code comes into pages that had other content before. So one
//! of [`SWEEPS`] pages that have come is sampled again, in turn. If one is known now and was not
//! before, the next sweep samples all pages of its window. It also samples pages whose merge
//! broke or was refused, and pages that change, until they have settled.

use std::time::{Duration, Instant};

use pages::dedup::KnownPages;
use pages::offline::Sampled;

use super::super::tracked::Tracked;
use super::vm::Vm;
use super::window::Look;
use super::window::Window;
use super::{Dedup, MOST_QUEUED};

/// The pauses between two sweeps of a VM.
const SOON: Duration = Duration::from_millis(100);
const LATE: Duration = Duration::from_secs(1);
/// The number of sweeps in which all pages are sampled again.
const SWEEPS: u32 = 64;
/// The number of pages that are sampled in the time of reading one.
const SAMPLED_AT_ONCE: usize = 8;
/// Adjacent pages that a guest usually fills together.
const TOGETHER: usize = 16;
/// The charge for a window without new pages, in pages: the kernel is asked which pages exist.
const WINDOW_CHARGED: usize = 2;
const BITS: u32 = u64::BITS;

/// The progress of sweeping a VM.
#[derive(Debug)]
pub(super) struct Sweep {
    /// The next page.
    cursor: u32,
    /// A bit for each page that was sampled, had content, and still exists.
    sampled: Vec<u64>,
    /// The number of completed sweeps.
    number: u32,
    has_found: bool,
    begun: Instant,
    due: Instant,
    pause: Duration,
}

impl Default for Sweep {
    fn default() -> Self {
        let now = Instant::now();
        let sampled = Vec::new();
        let begun = now;
        let (cursor, number, has_found, pause) = (0, 0, false, SOON);
        Self { cursor, sampled, number, has_found, begun, due: now, pause }
    }
}

impl Sweep {
    pub(super) fn cursor(&self) -> u32 {
        self.cursor
    }

    /// Continues at this page; `None`: the sweep is complete.
    pub(super) fn goes_to(&mut self, page: Option<u32>) {
        if let Some(page) = page {
            if self.cursor == 0 {
                self.begun = Instant::now();
            }
            self.cursor = page;
            return;
        }
        let now = Instant::now();
        self.pause = if self.has_found { SOON } else { (self.pause * 2).min(LATE) };
        // A long sweep is followed by an equally long pause.
        let due = now + self.pause.max(now - self.begun);
        (self.cursor, self.has_found, self.due) = (0, false, due);
        self.number = self.number.wrapping_add(1);
    }

    /// The page no longer exists, or has other content.
    pub(super) fn forget(&mut self, page: u32) {
        if let Some(word) = self.sampled.get_mut((page / BITS) as usize) {
            *word &= !(1 << (page % BITS));
        }
    }

    /// Whether a page has come since the last sweep.
    fn is_new(&self, page: u32) -> bool {
        self.sampled.get((page / BITS) as usize).is_none_or(|word| word & 1 << (page % BITS) == 0)
    }

    /// Whether a page is due to be sampled again.
    fn is_turn(&self, page: u32) -> bool {
        (page ^ self.number).is_multiple_of(SWEEPS)
    }

    /// Of the wanted pages, keeps those to be sampled. Returns those of them that had come
    /// before: they show whether memory is reused.
    fn keep_due(&self, window: &mut Window) -> Vec<u32> {
        let mut again = Vec::new();
        for (page, wanted) in window.pages().zip(&mut window.wanted) {
            let is_new = self.is_new(page);
            *wanted &= is_new || self.is_turn(page);
            if *wanted && !is_new {
                again.push(page);
            }
        }
        again
    }

    /// The page was sampled and has content.
    fn has_come(&mut self, page: u32) {
        let at = (page / BITS) as usize;
        if at >= self.sampled.len() {
            self.sampled.resize(at + 1, 0);
        }
        self.sampled[at] |= 1 << (page % BITS);
    }
}

impl Dedup {
    /// Looks for known pages in the next window of a VM that is due; `None`: no VM is due.
    pub(super) fn sweep_next(
        &mut self,
        vms: &mut [&mut Tracked],
        known: &KnownPages,
    ) -> Option<u32> {
        let is_due = |(pid, vm): &(&u32, &Vm)| {
            let is_ready =
                vm.is_here && vm.requests.merges() < MOST_QUEUED && !self.is_to_unshare(**pid);
            is_ready && Instant::now() >= vm.sweep.due
        };
        let after = self.vms.range(self.sweep_turn..).find(is_due);
        let (&pid, _) = after.or_else(|| self.vms.iter().find(is_due))?;
        self.sweep_turn = pid + 1;
        let tracked = vms.iter_mut().find(|tracked| tracked.pid() == pid)?;
        let vm = self.vms.get_mut(&pid)?;
        let Some(mut window) = vm.next_swept() else { return Some(1) };
        let states = tracked.with_shim(|linked, _| linked.link().page_states(window.pages()));
        vm.is_here = states.is_some();
        let left = vm.look(&mut window, &states?, Look::Sweep);
        let mut again = vm.sweep.keep_due(&mut window);
        let sampled = keep_known(vm, &mut window, known);
        let before = vm.requests.merges();
        again.retain(|page| window.wanted[(page - window.first) as usize]);
        let mut is_used_again = again.iter().any(|page| vm.book.is_unread(*page));
        self.leave_all(left);
        // Revoked twins wait for a pass.
        self.propose(pid, &window, vms);
        let vm = self.vms.get_mut(&pid)?;
        is_used_again |= again.iter().any(|page| vm.book.is_restless(*page));
        for (page, is_read) in window.pages().zip(&window.wanted) {
            // It is offered when the next sweeps have found it unchanged.
            if is_used_again || *is_read && vm.book.is_restless(page) {
                vm.sweep.forget(page);
            }
        }
        vm.sweep.has_found |= is_used_again || vm.requests.merges() > before;
        let read = window.runs().map(|run| run.len()).sum::<usize>();
        self.looked += read as u64;
        let charged = WINDOW_CHARGED + sampled / SAMPLED_AT_ONCE + read;
        u32::try_from(charged).ok()
    }
}

/// Of the wanted pages, keeps the known ones. Returns the number of sampled pages.
fn keep_known(vm: &mut Vm, window: &mut Window, known: &KnownPages) -> usize {
    let [first, rest @ ..] = known.sampling().offsets().map(u64::from);
    let asked = leave_out_empty(vm, window, first);
    let wanted = std::mem::replace(&mut window.wanted, vec![false; window.count as usize]);
    let sampled: Vec<usize> = (0..).zip(wanted).filter_map(|(at, is)| is.then_some(at)).collect();
    let addresses: Vec<u64> = sampled.iter().map(|at| window.address_at(*at) + first).collect();
    let mut begun = Vec::new();
    for (&at, word) in sampled.iter().zip(vm.memory.read_words(&addresses)) {
        if word == 0 || known.may_begin_with(word) {
            begun.push((at, word));
        } else {
            vm.sweep.has_come(window.page_at(at));
        }
    }
    let of_rest = |(at, _): &(usize, u64)| rest.map(|offset| window.address_at(*at) + offset);
    let addresses: Vec<u64> = begun.iter().flat_map(of_rest).collect();
    let words = vm.memory.read_words(&addresses);
    for (&(at, first), [second, third, fourth]) in begun.iter().zip(words.as_chunks().0) {
        let words = [first, *second, *third, *fourth];
        if words != [0; 4] {
            vm.sweep.has_come(window.page_at(at));
            window.wanted[at] = known.may_have(&Sampled(words));
        }
    }
    asked + sampled.len()
}

/// Of adjacent pages none of which has come, samples one, and leaves out all of them if it has no
/// content. Returns the number of sampled pages.
fn leave_out_empty(vm: &Vm, window: &mut Window, first: u64) -> usize {
    let turn = vm.sweep.number as usize % TOGETHER;
    let groups = window.wanted.chunks_exact(TOGETHER).enumerate();
    let are_new = groups.filter(|(_, group)| group.iter().all(|is_new| *is_new));
    let asked: Vec<usize> = are_new.map(|(group, _)| group * TOGETHER + turn).collect();
    let addresses: Vec<u64> = asked.iter().map(|at| window.address_at(*at) + first).collect();
    for (at, word) in asked.iter().zip(vm.memory.read_words(&addresses)) {
        if word == 0 {
            window.wanted[at - turn..][..TOGETHER].fill(false);
        }
    }
    asked.len()
}

#[cfg(test)]
mod tests {
    use pages::offline::Sampling;
    use protocol::Region;
    use sys::memory_map::PAGE_LEN;

    use super::*;

    const PAGES: usize = 64;

    /// A VM whose memory is `memory` of this process.
    fn vm(memory: &[u8]) -> Vm {
        let address = memory.as_ptr().addr() as u64;
        let region = Region { first_page: 0, pages: u32::try_from(PAGES).unwrap(), address };
        Vm::open(sys::process::Identity::own().unwrap(), &[region]).unwrap()
    }

    /// The pages that a sweep reads if all new ones are sampled; the sweep then ends.
    fn sweep(vm: &mut Vm, known: &KnownPages) -> Vec<usize> {
        let mut window = vm.next_swept().unwrap();
        window.wanted = window.pages().map(|page| vm.sweep.is_new(page)).collect();
        keep_known(vm, &mut window, known);
        assert!(vm.next_swept().is_none());
        (0..).zip(window.wanted).filter_map(|(at, is_read)| is_read.then_some(at)).collect()
    }

    #[test]
    fn a_page_has_come_when_it_has_content_and_is_read_once() {
        let mut known = KnownPages::new(Sampling::default(), 1);
        known.add(&Sampled([7, 0, 0, 0]));
        let mut memory = vec![0_u8; PAGES * PAGE_LEN];
        let mut vm = vm(&memory);
        let mut write = |page: usize, word: u8| memory[page * PAGE_LEN] = word;
        // A group without other content is sampled by one page, which depends on the number of
        // the sweep.
        assert_eq!(sweep(&mut vm, &known), [0_usize; 0]);
        write(20, 7);
        let sweeps = (0..TOGETHER).map(|_| sweep(&mut vm, &known)).collect::<Vec<_>>();
        assert_eq!(sweeps.concat(), [20]);
        write(21, 7);
        write(22, 9);
        assert_eq!(sweep(&mut vm, &known), [21], "one beside it has come");
        write(22, 7);
        assert_eq!(sweep(&mut vm, &known), [0_usize; 0], "it had another content when it came");
        vm.sweep.forget(22);
        assert_eq!(sweep(&mut vm, &known), [22]);
    }

    #[test]
    fn each_page_has_one_turn_to_be_sampled_again() {
        let mut sweep = Sweep::default();
        let mut turns = [0; 2 * SWEEPS as usize];
        for _ in 0..SWEEPS {
            (0..)
                .zip(&mut turns)
                .for_each(|(page, turns)| *turns += u32::from(sweep.is_turn(page)));
            sweep.goes_to(None);
        }
        assert!(turns.iter().all(|turns| *turns == 1), "{turns:?}");
    }
}
