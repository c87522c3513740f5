//! Sweeps: known pages are looked for before all others.
//!
//! A sweep goes through a VM as a pass does, but reads of each page that has come since the last
//! one no more than a word, of those whose first word is known three more, and only of what is
//! known then all ([`pages::dedup::Known`]). What it finds is proposed as ever. A program that
//! starts brings its code page by page, so the next sweep comes soon, and a little later where this
//! one has found nothing. What was written in pages that were there before is seen once a minute,
//! when all are sampled again.

use std::time::{Duration, Instant};

use pages::dedup::Known;
use pages::offline::Sampled;

use super::super::granules::PAGE;
use super::super::tracked::Tracked;
use super::vm::Vm;
use super::window::Window;
use super::{Dedup, MOST_QUEUED};

/// Between two sweeps of a VM.
const SOON: Duration = Duration::from_millis(100);
const LATE: Duration = Duration::from_secs(1);
/// All pages are sampled again after so long.
const ANEW: Duration = Duration::from_secs(60);
/// So many pages are sampled in the time that one takes to be read.
const SAMPLED_AT_ONCE: usize = 8;
/// What a window counts for in which nothing is new, in pages: the kernel is asked what is there.
const WINDOW_CHARGED: usize = 2;
const BITS: u32 = u64::BITS;

/// How far a VM has been swept.
#[derive(Debug)]
pub(super) struct Sweep {
    /// The next page.
    cursor: u32,
    /// A bit for each page that was sampled, and has not gone since.
    sampled: Vec<u64>,
    anew: Instant,
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
        Self { cursor: 0, sampled, anew: now, has_found: false, begun, due: now, pause: SOON }
    }
}

impl Sweep {
    pub(super) fn cursor(&self) -> u32 {
        self.cursor
    }

    /// To this page; `None`: it is over.
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
        // A sweep that takes long is followed by as long a rest.
        let due = now + self.pause.max(now - self.begun);
        (self.cursor, self.has_found, self.due) = (0, false, due);
        if now - self.anew >= ANEW {
            self.sampled.clear();
            self.anew = now;
        }
    }

    /// There is no such page now.
    pub(super) fn forget(&mut self, page: u32) {
        if let Some(word) = self.sampled.get_mut((page / BITS) as usize) {
            *word &= !(1 << (page % BITS));
        }
    }

    /// A page is sampled now; `true`: for the first time.
    fn is_new(&mut self, page: u32) -> bool {
        let at = (page / BITS) as usize;
        if at >= self.sampled.len() {
            self.sampled.resize(at + 1, 0);
        }
        let bit = 1 << (page % BITS);
        let was_there = self.sampled[at] & bit != 0;
        self.sampled[at] |= bit;
        !was_there
    }
}

impl Dedup {
    /// Looks for known pages in the next window of a VM that is due for that; `None`: there is
    /// none.
    pub(super) fn sweep_next(&mut self, vms: &mut [&mut Tracked], known: &Known) -> Option<u32> {
        let is_due = |(pid, vm): &(&u32, &Vm)| {
            let is_ready = vm.is_here && vm.queued() < MOST_QUEUED && !self.is_to_unshare(**pid);
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
        let left = vm.look(&mut window, &states?, false);
        for (page, wanted) in window.pages().zip(&mut window.wanted) {
            *wanted = *wanted && vm.sweep.is_new(page);
        }
        let sampled = window.runs().map(|run| run.len()).sum::<usize>();
        keep_known(vm, &mut window, known);
        let before = vm.queued();
        self.leave_all(left);
        // What is out of reach waits for its turn in a pass.
        self.propose(pid, &window, vms);
        let vm = self.vms.get_mut(&pid)?;
        vm.sweep.has_found |= vm.queued() > before;
        let read = window.runs().map(|run| run.len()).sum::<usize>();
        self.looked += read as u64;
        let charged = WINDOW_CHARGED + sampled / SAMPLED_AT_ONCE + read;
        u32::try_from(charged).ok()
    }
}

/// Of the pages that are to be read, keeps those that are known.
fn keep_known(vm: &Vm, window: &mut Window, known: &Known) {
    let [first, rest @ ..] = known.sampling().offsets().map(u64::from);
    let wanted = std::mem::replace(&mut window.wanted, vec![false; window.count as usize]);
    let wanted: Vec<usize> = (0..).zip(wanted).filter_map(|(at, is)| is.then_some(at)).collect();
    let address = |at: &usize| window.address + *at as u64 * PAGE;
    let addresses: Vec<u64> = wanted.iter().map(|at| address(at) + first).collect();
    let words = vm.read_words(&addresses);
    let begun = wanted.into_iter().zip(words).filter(|(_, word)| known.may_begin_with(*word));
    let begun: Vec<(usize, u64)> = begun.collect();
    let of_rest = |(at, _): &(usize, u64)| rest.map(|offset| address(at) + offset);
    let addresses: Vec<u64> = begun.iter().flat_map(of_rest).collect();
    let words = vm.read_words(&addresses);
    for ((at, first), [second, third, fourth]) in begun.iter().zip(words.as_chunks().0) {
        window.wanted[*at] = known.may_have(&Sampled([*first, *second, *third, *fourth]));
    }
}
