//! Pages a VM's memory out and reads it back, from outside, to keep it within a target.
//!
//! **Problem.** The policy sets how much of a VM may be in memory. The kernel knows best which
//! pages to evict, but it can be asked only for a cgroup. Elsewhere, repeatedly paging out memory
//! in use costs more than it saves.
//!
//! **Idea.** A VM that is alone in a cgroup of its own is paged by `memory.reclaim` (Linux 5.19):
//! the kernel chooses by the accessed bits of KVM's page tables ([`Means::Reclaim`]). Any other VM
//! is paged by *trial* ([`Means::Trial`]), in blocks of 2 MiB. The block that tracking has seen
//! idle for longest is first ([`Pager::learn`]). A block is checked [`TRIAL`] after it was paged
//! out, and once more before its next trial. A block of which little stayed out is left alone, for
//! twice as long each time. So pages in use are seldom paged out, also under a low target.
//!
//! **Rate** ([`Pager::quota`]): the quota doubles after each second in which the VM waited little
//! for paged-out memory, and halves after each in which it waited for more than [`MOST_WAITS`].
//!
//! **Refaults.** The kernel reads a page when it is touched. A VM that touches many at once has
//! woken ([`WAKES`]): the blocks that were paged out last are read back in bulk, and nothing is
//! paged out until the policy has learned of it ([`AWAKE`]). Without a target all memory is read
//! back, a part in each step.
//!
//! **Small steps.** A call pages out [`PIECE`] at most, since it holds QEMU's mmap lock.
//!
//! **Leaves out.** The policy sets the target.
//!
//! Source: Weiner 2022 (TMO) for small steps of reclaim; Lagar-Cavilla 2019 for refaults as the
//! measure.

mod blocks;
mod recall;

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use model::cold::UNTOUCHED_FOR;
use model::{Bytes, Cold, Reading};
use sys::clock::boot_now;
use sys::kernel_version::KernelVersion;
use sys::outside::{LEAST_SWAP, Outside as Memory, Place};
use sys::process::{Identity, waited_for_pages};
use sys::swap::Swap;
use sys::userfaultfd::Range;

pub(super) use blocks::BLOCK;
use blocks::{
    AGAIN, Block, BlockSample, PIECE, block_of, block_range, count_out, leaves_enough, pieces,
    seconds,
};
use recall::{BATCH, LONGEST, Recall, read_blocks, room};
pub(super) use recall::{is_swapped, recall_all};

use super::granules::PAGE;
use super::holdings::Holdings;

/// A block with fewer resident pages is not worth a trial.
const FEW_PAGES: usize = 32;
/// The time after which a block that was paged out is checked.
const TRIAL: Duration = Duration::from_secs(10);
/// The memory that one step pages out: at first, at least and at most.
const QUOTA: [Bytes; 3] = [Bytes::mib(4), Bytes::kib(256), Bytes::mib(16)];
/// The memory that one write to `memory.reclaim` asks for.
const AT_ONCE: Bytes = Bytes::mib(4);
/// The share of a vCPU's time above which waits for paged-out memory halve the quota.
const MOST_WAITS: f64 = 0.02;
/// A VM that waits for this number of pages in one step has woken: it waited some milliseconds.
const WAKES: u64 = 512;
/// The time for which a woken VM is not paged out: the policy learns of it within two seconds.
const AWAKE: Duration = Duration::from_secs(2);
/// The shortest time between two wakes: a VM with too little memory waits all the time.
const AWAKE_AGAIN: Duration = Duration::from_secs(30);
/// The number of pages that are read back for each page touched.
const READ_AHEAD: u64 = 16;
/// How often rates are computed.
const LOOK: Duration = Duration::from_secs(1);
/// The weight of the latest second in a smoothed rate.
const SMOOTHING: f64 = 0.3;
/// The unit of the ages from tracking, in milliseconds.
const TICK_MS: u64 = 100;

/// The way to page out memory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Means {
    /// By this `memory.reclaim` file of the VM's cgroup.
    Reclaim(PathBuf),
    /// Block by block, each on trial.
    Trial,
}

/// The pager of one VM.
#[derive(Debug)]
pub(super) struct Pager {
    process: Identity,
    means: Means,
    version: KernelVersion,
    /// Guest RAM, then the memory in which a shim keeps revoked pages.
    ranges: Vec<Range>,
    /// The number of ranges that are guest RAM.
    ram_ranges: usize,
    has_huge_pages: bool,
    blocks: Vec<Block>,
    /// The blocks in the order of their trials.
    order: Vec<usize>,
    /// The position of the next block in that order.
    hand: usize,
    /// Blocks that were paged out and will be checked, the oldest first.
    trials: VecDeque<(usize, Instant)>,
    /// No block is due before this time, in seconds since the pager began.
    rests_until_s: u32,
    began: Instant,
    /// The most that the VM may have in memory; `None`: all is read back.
    target: Option<Bytes>,
    /// The memory that QEMU has besides its guest; `None`: not known yet.
    own: Option<Bytes>,
    holdings: Option<Holdings>,
    quota: Bytes,
    /// The progress of reading back all memory.
    recall: Option<Recall>,
    /// Pages that the VM has waited for since its start, including the probes'.
    waited: Option<u64>,
    in_look: u64,
    per_s: f64,
    looked: Option<Instant>,
    woke: Option<Instant>,
    returned: u64,
    /// Memory that was out when the pager began.
    out_before: Bytes,
    /// The shares of RAM that were not touched for the times in [`UNTOUCHED_FOR`].
    untouched: Option<[f64; 3]>,
    /// The time of a touch of a page that is out, in nanoseconds.
    refault_ns: u64,
    is_swap_full: bool,
    /// Memory was read back that the guest may not have touched.
    has_read: bool,
    /// The last reclaim paged out an unknown amount.
    looks_again: bool,
    /// Probes that came back, and for which no wait has been counted yet.
    unmatched: u64,
}

impl Pager {
    /// The pager of this QEMU process, whose guest RAM is in these ranges.
    pub(super) fn of(process: Identity, ranges: Vec<Range>, has_huge_pages: bool) -> Self {
        let blocks = blocks_in(&ranges);
        Self {
            process,
            means: means_for(process.pid),
            version: KernelVersion::of_host(),
            ram_ranges: ranges.len(),
            ranges,
            has_huge_pages,
            blocks: vec![Block::default(); blocks],
            order: (0..blocks).collect(),
            hand: 0,
            trials: VecDeque::new(),
            rests_until_s: 0,
            began: Instant::now(),
            target: None,
            own: None,
            holdings: None,
            quota: QUOTA[0],
            recall: None,
            waited: None,
            in_look: 0,
            per_s: 0.0,
            looked: None,
            woke: None,
            returned: 0,
            out_before: Bytes::ZERO,
            untouched: None,
            refault_ns: 0,
            is_swap_full: false,
            has_read: false,
            looks_again: false,
            unmatched: 0,
        }
    }

    /// Sets the memory in which a shim keeps the guest's revoked pages; it is as long as the
    /// guest's RAM.
    pub(super) fn set_staging(&mut self, staging: &[Range]) {
        if self.ranges[self.ram_ranges..] == *staging {
            return;
        }
        let ram_blocks = blocks_in(&self.ranges[..self.ram_ranges]);
        self.ranges.truncate(self.ram_ranges);
        self.ranges.extend(staging);
        self.blocks.truncate(ram_blocks);
        self.blocks.resize(blocks_in(&self.ranges), Block::default());
        self.trials.retain(|(block, _)| *block < ram_blocks);
        (self.order, self.hand) = ((0..self.blocks.len()).collect(), 0);
    }

    /// Sets the most that the VM may have in memory, and the memory that QEMU has besides.
    pub(super) fn order(&mut self, target: Option<Bytes>, own: Option<Bytes>) {
        if self.target.is_some() && target.is_none() {
            self.recall();
        } else if target.is_some() {
            self.recall = None;
        }
        (self.target, self.own) = (target, own);
    }

    /// Reads everything back from now on, and drops the target.
    pub(super) fn recall(&mut self) {
        self.target = None;
        // A process that cannot be inspected has ended.
        self.recall = Recall::of(self.process).ok();
    }

    /// Whether memory is still being read back.
    pub(super) fn is_busy(&self) -> bool {
        self.recall.is_some()
    }

    /// The reason why nothing is paged out, although there is a target.
    pub(super) fn why_not(&self) -> Option<&'static str> {
        (self.target.is_some() && self.is_swap_full).then_some("the host's swap is full")
    }

    /// Whether memory was read back since the last call that the guest may not have touched.
    pub(super) fn take_has_read(&mut self) -> bool {
        std::mem::take(&mut self.has_read)
    }

    /// Chooses the way to page out again: other processes may have joined the VM's cgroup.
    pub(super) fn review(&mut self) {
        self.means = means_for(self.process.pid);
    }

    /// Whether [`Self::learn`] is due.
    pub(super) fn is_looking(&self) -> bool {
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= LOOK);
        self.target.is_some() && self.recall.is_none() && is_due
    }

    /// Learns from tracking: `pages` are the addresses of the pages that stand for the VM, each
    /// with the tenths of a second since its last touch; `None`: it may be in use.
    pub(super) fn learn(&mut self, pages: impl Iterator<Item = (u64, Option<u32>)>) {
        let (mut known, mut untouched) = (0_u32, [0_u32; 3]);
        // Sorting the blocks of a large VM takes milliseconds.
        let mut seen = match self.tries_blocks() {
            true => vec![BlockSample::default(); self.blocks.len()],
            false => Vec::new(),
        };
        for (address, age) in pages {
            known += 1;
            for (count, length) in untouched.iter_mut().zip(UNTOUCHED_FOR) {
                let is_so = age.is_some_and(|ticks| u64::from(ticks) * TICK_MS >= length.0);
                *count += u32::from(is_so);
            }
            if let Some(block) = block_of(&self.ranges, address).and_then(|it| seen.get_mut(it)) {
                block.take(age);
            }
        }
        self.untouched = Some(untouched.map(|count| f64::from(count) / f64::from(known.max(1))));
        if !seen.is_empty() {
            self.order.sort_by_cached_key(|block| seen[*block].rank());
            self.hand = 0;
        }
    }

    /// Whether the VM has more in memory than its target, and is paged by trial.
    fn tries_blocks(&self) -> bool {
        let resident = self.holdings.map_or(Bytes::ZERO, |holdings| holdings.resident);
        self.means == Means::Trial && self.target.is_some_and(|target| resident > target)
    }

    /// Does the work that is due. `probed`: the probed pages that came back since the last step,
    /// for which the VM waited as well; `refault_ns`: the time of a touch of a page that is out.
    pub(super) fn step(&mut self, memory: &Memory, probed: u64, refault_ns: u64) -> io::Result<()> {
        if let Some(recall) = &mut self.recall {
            self.has_read = true;
            // Memory for which the host has no room stays out until it is touched.
            if room().is_zero() || recall.step(memory)? {
                self.recall = None;
            }
            return Ok(());
        }
        let (Some(target), Some(own)) = (self.target, self.own) else { return Ok(()) };
        self.refault_ns = refault_ns;
        let back = self.count_back(probed)?;
        self.look(own)?;
        let moment = Instant::now();
        if back >= WAKES && self.woke.is_none_or(|woke| moment - woke > AWAKE_AGAIN) {
            self.woke = Some(moment);
        }
        if std::mem::take(&mut self.looks_again) {
            self.holdings = Holdings::of(self.process, own);
        }
        let Some(holdings) = self.holdings else { return Ok(()) };
        if self.woke.is_some_and(|woke| moment - woke < AWAKE) {
            return self.read_ahead(memory, back);
        }
        self.judge(memory)?;
        let excess = holdings.resident.minus(target).min(self.quota);
        if excess.0 < PIECE || self.is_swap_full {
            return Ok(());
        }
        let went = match self.means.clone() {
            Means::Reclaim(file) => self.reclaim(&file, excess)?,
            Means::Trial => self.try_blocks(memory, excess)?,
        };
        if let Some(holdings) = &mut self.holdings {
            holdings.resident = holdings.resident.minus(went);
        }
        Ok(())
    }

    /// Pages that the VM has waited for since the last step, without the probes'.
    fn count_back(&mut self, probed: u64) -> io::Result<u64> {
        let waited = self.process.still(waited_for_pages(self.process.pid)?)?;
        let last = self.waited.replace(waited).unwrap_or(waited);
        let new = waited.saturating_sub(last);
        // The kernel counts a wait at once; a probe is seen to be back later.
        let probed = self.unmatched.saturating_add(probed);
        let back = new.saturating_sub(probed);
        self.unmatched = probed.saturating_sub(new);
        self.in_look += back;
        self.returned += back;
        Ok(back)
    }

    /// Updates the holdings, the rate of waits and the quota, if that is due.
    fn look(&mut self, own: Bytes) -> io::Result<()> {
        let passed = self.looked.map(|looked| looked.elapsed());
        if passed.is_some_and(|passed| passed < LOOK) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let holdings = Holdings::of(self.process, own)
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.holdings = Some(holdings);
        self.is_swap_full = Swap::read().is_ok_and(|swap| swap.free_first() < LEAST_SWAP);
        let Some(passed) = passed else {
            self.out_before = holdings.swapped;
            return Ok(());
        };
        #[expect(clippy::cast_precision_loss, reason = "a rate needs three digits")]
        let latest = std::mem::take(&mut self.in_look) as f64 / passed.as_secs_f64();
        self.per_s += SMOOTHING * (latest - self.per_s);
        // The kernel does not count every wait: a probe without one must not hide others forever.
        self.unmatched /= 2;
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of one fault")]
        let waits = latest * self.refault_ns as f64 / 1e9;
        let [_, least, most] = QUOTA;
        self.quota = if waits > MOST_WAITS {
            Bytes(self.quota.0 / 2).max(least)
        } else {
            Bytes(self.quota.0 * 2).min(most)
        };
        Ok(())
    }

    /// Lets the kernel choose the pages to evict, a small amount at a time. It may find less than
    /// requested.
    fn reclaim(&mut self, file: &PathBuf, excess: Bytes) -> io::Result<Bytes> {
        // File pages in its cgroup are the host's page cache, and no part of the guest.
        let first = if self.version.reclaims_by_swappiness() { " swappiness=200" } else { "" };
        let (mut went, begun) = (Bytes::ZERO, Instant::now());
        while went < excess && begun.elapsed() < LONGEST {
            let some = excess.minus(went).min(AT_ONCE);
            let words = format!("{}{first}", some.0);
            let opened = OpenOptions::new().write(true).open(file);
            match opened.and_then(|mut file| file.write_all(words.as_bytes())) {
                Ok(()) => went = went.plus(some),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // A part was paged out; the next step reads how much.
                    self.looks_again = true;
                    break;
                }
                // The cgroup has changed, or the kernel is older than its files say.
                Err(_) if self.process.is_alive() => {
                    self.means = Means::Trial;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(went)
    }

    /// Pages out blocks that are due, those first that were untouched for longest.
    fn try_blocks(&mut self, memory: &Memory, excess: Bytes) -> io::Result<Bytes> {
        let (mut went, begun, now_s) = (Bytes::ZERO, Instant::now(), self.seconds());
        if now_s < self.rests_until_s {
            return Ok(went);
        }
        let mut soonest_s = u32::MAX;
        for _ in 0..self.order.len() {
            if went >= excess || begun.elapsed() > LONGEST {
                return Ok(went);
            }
            let block = self.order[self.hand];
            self.hand = (self.hand + 1) % self.order.len();
            if self.blocks[block].due_s <= now_s {
                went = went.plus(self.try_block(memory, block, now_s)?);
            }
            soonest_s = soonest_s.min(self.blocks[block].due_s);
        }
        // All blocks were checked.
        self.rests_until_s = soonest_s;
        Ok(went)
    }

    /// Pages out a block that is due, unless most of what its last trial paged out is back.
    fn try_block(&mut self, memory: &Memory, block: usize, now_s: u32) -> io::Result<Bytes> {
        let range = self.range(block);
        let places = memory.places(range)?;
        let here = places.iter().filter(|it| **it == Place::Here).count();
        let out_before = count_out(&places);
        let it = &mut self.blocks[block];
        let is_back = it.out > 0 && !it.judge(out_before, now_s);
        it.out = 0;
        if here < FEW_PAGES || is_back {
            it.due_s = it.due_s.max(now_s + seconds(AGAIN));
            return Ok(Bytes::ZERO);
        }
        for piece in pieces(range) {
            memory.page_out(&[piece]).map_err(io::Error::from)?;
        }
        let out = count_out(&memory.places(range)?);
        let left = out.saturating_sub(out_before);
        let it = &mut self.blocks[block];
        if leaves_enough(left, here) {
            it.out = u16::try_from(out).unwrap_or(u16::MAX);
            it.is_asked = false;
            it.due_s = now_s + seconds(AGAIN);
            it.out_s = now_s.max(1);
            self.trials.push_back((block, Instant::now()));
        } else if self.version.has_second_chance() && !it.is_asked {
            // The kernel only cleared the accessed bits; the next request pages out.
            (it.is_asked, it.due_s) = (true, now_s + 1);
        } else {
            it.judge(0, now_s);
            it.is_asked = false;
        }
        Ok(Bytes(left as u64 * PAGE))
    }

    /// Checks the blocks that were paged out some time ago: whether their trial has paid.
    fn judge(&mut self, memory: &Memory) -> io::Result<()> {
        let begun = Instant::now();
        while let Some((block, since)) = self.trials.front().copied() {
            if since.elapsed() < TRIAL || begun.elapsed() > LONGEST {
                break;
            }
            self.trials.pop_front();
            let (range, now_s) = (self.range(block), self.seconds());
            let out = count_out(&memory.places(range)?);
            let pays = self.blocks[block].judge(out, now_s);
            if !pays && self.has_huge_pages && range.len == BLOCK {
                self.has_read = true;
                // The block is in use, and may have been a huge page. A failure does no harm.
                let _ = memory.make_huge(&[range]);
            }
        }
        Ok(())
    }

    /// Reads back some blocks, those that were paged out last.
    fn read_ahead(&mut self, memory: &Memory, back: u64) -> io::Result<()> {
        let wanted = Bytes(back.saturating_mul(READ_AHEAD * PAGE)).min(BATCH).min(room());
        // Under `memory.reclaim`, it is not known which pages were paged out last.
        if wanted.0 < PIECE || self.means != Means::Trial {
            return Ok(());
        }
        self.has_read = true;
        let mut order: Vec<usize> = (0..self.blocks.len()).collect();
        order.retain(|block| self.blocks[*block].out_s > 0);
        order.sort_by_key(|block| Reverse(self.blocks[*block].out_s));
        let ranges: Vec<Range> = order.iter().map(|block| self.range(*block)).collect();
        for done in &order[..read_blocks(memory, &ranges, wanted)?] {
            self.blocks[*done].out_s = 0;
        }
        Ok(())
    }

    /// The state of the VM's memory; `None`: there is no target, or it is not known.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "shares of a VM's memory, and its rates"
    )]
    pub(super) fn reading(&self) -> Option<Reading<Cold>> {
        self.target?;
        let (holdings, untouched) = (self.holdings?, self.untouched?);
        let ram: u64 = self.ranges[..self.ram_ranges].iter().map(|range| range.len).sum();
        let content = holdings.resident.plus(holdings.swapped);
        let touched = |share: f64| Bytes(((1.0 - share) * ram as f64) as u64);
        let returned = Bytes(self.returned.saturating_mul(PAGE));
        let reading = Cold {
            resident: holdings.resident,
            out: holdings.swapped,
            target: self.target,
            untouched: untouched.map(|share| content.minus(touched(share))),
            refaulted_per_s: Bytes((self.per_s * PAGE as f64) as u64),
            refaults_per_s: self.per_s,
            refault_ns: self.refault_ns,
            paged_out: holdings.swapped.plus(returned).minus(self.out_before),
            returned,
        };
        Some(Reading::new(reading, boot_now()))
    }

    fn range(&self, block: usize) -> Range {
        block_range(&self.ranges, block as u64)
    }

    fn seconds(&self) -> u32 {
        seconds(self.began.elapsed())
    }
}

/// The number of blocks in these ranges.
fn blocks_in(ranges: &[Range]) -> usize {
    let blocks: u64 = ranges.iter().map(|range| range.len.div_ceil(BLOCK)).sum();
    usize::try_from(blocks).unwrap_or(0)
}

/// The way to page out a VM: reclaim, if it is alone in a cgroup that supports it.
fn means_for(pid: u32) -> Means {
    match sys::cgroup::reclaim_file(pid) {
        Ok(Some(file)) => Means::Reclaim(file),
        Ok(None) | Err(_) => Means::Trial,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_touched_for_longest_is_tried_first_and_what_is_in_use_last() {
        let ram = Range { start: 0, len: 4 * BLOCK };
        let own = Identity::own().unwrap();
        let mut pager = Pager::of(own, vec![ram], false);
        pager.means = Means::Trial;
        pager.target = Some(Bytes::ZERO);
        pager.holdings = Some(Holdings { resident: Bytes(ram.len), swapped: Bytes::ZERO });
        let pages = [(0, Some(50)), (PAGE, None), (BLOCK, Some(900)), (BLOCK + PAGE, Some(200))];
        let more = [(3 * BLOCK, Some(700)), (3 * BLOCK + PAGE, Some(7_000))];
        pager.learn(pages.into_iter().chain(more));
        assert_eq!(pager.order, [3, 1, 0, 2], "0 is in use by half, of 2 nothing is known");
        let [ten_s, minute, ten_minutes] = pager.untouched.unwrap().map(|share| share * 6.0);
        assert!((ten_s - 4.0).abs() < 1e-9 && (minute - 3.0).abs() < 1e-9, "{ten_s} {minute}");
        assert!((ten_minutes - 1.0).abs() < 1e-9);
    }
}
