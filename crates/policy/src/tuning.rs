//! Every number that the policy uses, with where it comes from. None of them is an option.

use model::{Bytes, Millis, PagesPerMs};

/// How often the loop runs (Kim 2014 §6.1: shorter costs CPU, longer reacts late).
pub const PERIOD: Millis = Millis::secs(1);

/// How much a VM is granted, or gives up, per tick (Kim 2014 §6.1, Fig. 4b).
pub const UNIT: Bytes = Bytes::mib(10);

/// Changes smaller than this are not worth a balloon's work.
pub const STEP_MIN: Bytes = Bytes::mib(2);

/// Statistics older than this are stale. The guest is asked every second and answers with whole
/// seconds; Proxmox polls every 2 s.
pub const STALE_AFTER: Millis = Millis::secs(5);

/// The host's own counters older than this count as unknown.
pub const USED_STALE_AFTER: Millis = Millis::secs(10);

/// And of what a guest has freed: the kernel's page tables are walked for no more than a part of a
/// CPU, so that of a large guest it is counted less often.
pub const FREED_STALE_AFTER: Millis = Millis::secs(30);

/// Swap traffic per second from which a VM counts as in demand. Kim 2014 takes any; a page now and
/// then is housekeeping, not demand.
pub const DEMAND_PER_SECOND: Bytes = Bytes::kib(64);

/// Swap-in per second from which a guest counts as suffering.
pub const SUFFERING_PER_SECOND: Bytes = Bytes::kib(64);

/// A VM that waits for what was paged out for this share of a vCPU's time could use more …
pub const WAITS_FOR_MORE: f64 = 0.005;

/// … and with this one it suffers (TMO's bound on memory pressure is 0.1 % of all tasks' time, of
/// which one vCPU's wait is a part).
pub const SUFFERS_WAITS: f64 = 0.02;

/// What a touch of a page that is out takes until it was measured, in nanoseconds.
pub const REFAULT_NS: f64 = 100_000.0;

/// What comes back in a minute counts as nothing up to this.
pub const FEW_REFAULTS: Bytes = Bytes::mib(1);

/// Swap traffic per second that no device delivers: such counters are a lie.
pub const SWAP_PER_SECOND_MAX: Bytes = Bytes::mib(64 * 1024);

/// Profiles of VMs that are not on the host any more are kept up to so many profiles in all.
pub const MOST_PROFILES: usize = 10_000;

/// The share of a disk's reads that a cache must find, or find more, to be worth memory.
pub const WORTH_CACHING: f32 = 0.01;

/// A guest with less than this share of its memory available is under pressure, in percent.
pub const LOW_AVAILABLE_PERCENT: u64 = 5;

/// What a guest keeps free in any case, in percent of its memory …
pub const MARGIN_PERCENT: u64 = 10;

/// … and at least.
pub const MARGIN_MIN: Bytes = Bytes::mib(12);

/// How long a guest must have been calm before anything is taken for somebody else.
pub const CALM: Millis = Millis::secs(10);

/// Pressure within this time after taking memory means that it was a mistake.
pub const WATCH: Millis = Millis::secs(60);

/// The pause after the first mistake; it doubles with each further one (arcbox: 10 minutes to 60).
pub const BACK_OFF_FIRST: Millis = Millis::secs(60);

/// The longest such pause.
pub const BACK_OFF_MAX: Millis = Millis::secs(3600);

/// A balloon that has not moved towards its target for this long is stuck (squeezed: 5 s).
pub const STUCK_AFTER: Millis = Millis::secs(5);

/// The pause before a stuck balloon is asked again; it doubles with each failure.
pub const RETRY_FIRST: Millis = Millis::secs(30);

/// The longest such pause.
pub const RETRY_MAX: Millis = Millis::secs(600);

/// A target that is not reached is said again after this long, in case the command was lost.
pub const REPEAT_AFTER: Millis = Millis::secs(3);

/// A balloon that somebody else moved is left alone for this long.
pub const LEFT_ALONE: Millis = Millis::secs(60);

/// Base is restored once nobody in the group was short of memory for this long: bursts of demand
/// must not shuttle it to and fro, and a guest that needs its base does not wait for this.
pub const RESTORE_AFTER: Millis = Millis::secs(300);

/// How much of a VM's memory one step may take for somebody else, in percent (at least [`UNIT`]).
pub const STEP_PERCENT: u64 = 5;

/// The same when the group is over its budget.
pub const DEFICIT_STEP_PERCENT: u64 = 15;

/// The same when the host is short of memory.
pub const EMERGENCY_STEP_PERCENT: u64 = 25;

/// How often `balance` makes a plan (Wang 2016 §4).
pub const BALANCE_PERIOD: Millis = Millis::secs(5);

/// How much `balance` takes from a VM in a period at most, in percent (Wang 2016 §4) …
pub const SHRINK_PERCENT: u64 = 10;

/// … and how much it gives, for being short is more urgent.
pub const GROW_PERCENT: u64 = 30;

/// No kernel sets more of a VM's memory apart at boot, in percent: page structures for eight times
/// what its balloon leaves it.
pub const SET_APART_PERCENT: u64 = 20;

/// `balance` goes by what is typical of a VM in the last one to two of these.
pub const TYPICAL_OF: Millis = Millis::secs(10);

/// Who was given memory reads back what lies in swap for about so long, and is not short any more.
pub const READ_BACK_WITHIN: Millis = Millis::secs(10);

/// … or for this long at most, while it still has some of it free. Large guests keep more free than
/// [`MARGIN_MIN`] even when they are short.
pub const FILLED_WITHIN: Millis = Millis::secs(30);

/// … but while it has so much more free than its kernel keeps in any case, in percent (at least
/// [`UNIT`]), it needs no more.
pub const UNFILLED_PERCENT: u64 = 2;

/// What was free for so long is not about to be used; where takes were mistakes, twice as long with
/// each, …
pub const IDLE_WITHIN: Millis = Millis::secs(5);

/// … up to this.
pub const IDLE_FOR_LONG_MAX: Millis = Millis::secs(120);

/// How much a VM missed with how much memory is remembered for this long, …
pub const REMEMBERED: Millis = Millis::secs(600);

/// … for so many sizes, …
pub const SIZES_REMEMBERED: usize = 16;

/// … or until its working set is less than this share of what it was since, in percent, …
pub const SAME_SET_PERCENT: u64 = 50;

/// … and it has freed memory of late. A working set is typical of 10 to 20 seconds.
pub const FREED_WITHIN: Millis = Millis::secs(30);

/// Who waits for the disk for this share of its time is short of memory.
pub const SHORT_WAITS: f64 = 0.05;

/// Who misses more than this share of its references shows by that not how much it lacks: it goes
/// through its data in turn.
pub const MISS_RATIO_MAX: f64 = 0.5;

/// What a guest writes to its swap is new there where it is this much of what it reads in the same
/// second, in percent.
pub const NEW_IN_SWAP_PERCENT: u64 = 25;

/// It works on what it wrote when it reads so much of that again before anything else is new, in
/// percent.
pub const READ_AGAIN_PERCENT: u64 = 25;

/// What lies in a guest's swap tells how much it lacks when it is not tracked for long enough, or
/// has lacked something for so long: tracking had its time, and a guest that waits for its disk
/// touches little.
pub const MISSED_FOR: Millis = Millis::secs(30);

/// What a guest's kernel uses and never swaps, beside what it has set apart and keeps free: that of
/// a small Linux guest.
pub const KERNEL: Bytes = Bytes::mib(24);

/// A VM that swaps in this much per second may be given all that it lacks at once, where that is
/// nobody's.
pub const HEAVY_SWAP_IN: Bytes = Bytes::mib(1);

/// What `balance` takes must save more than it may cost within this time: it is under way for some
/// of its periods.
pub const PAYS_WITHIN: Millis = Millis::secs(60);

/// … and so much of what it costs others, in percent: curves are estimates.
pub const CLEAR_GAIN_PERCENT: u64 = 150;

/// Of so many VMs that hope for the end of their misses by a little more memory, one is right.
pub const HOPE_DISCOUNT: f64 = 10.0;

/// What Linux reads from swap at once around a page that is missed (`vm.page-cluster`): one major
/// fault.
pub const READ_AHEAD: Bytes = Bytes::kib(32);

/// The largest piece of memory that a reference may stand for: a huge page.
pub const GRANULE_MAX: Bytes = Bytes::mib(2);

/// The pieces that curves are made of, as a rule: a granule of tracking.
pub const PIECE: Bytes = Bytes::kib(128);

/// … and what a VM has less than it needs is missed once within this time at least.
pub const MISSED_WITHIN: Millis = Millis::secs(3600);

/// The part of what a VM has from which is read how its misses go on beyond it, in percent: the
/// last quarter.
pub const LAST_PART_PERCENT: u64 = 25;

/// `balance` tries sizes in steps of this (Wang 2016 §4: eight granules) …
pub const SMALL_STEP: Bytes = Bytes::mib(1);

/// … and where a VM is larger than this, whose granules are huge pages, …
pub const LARGE_VM: Bytes = Bytes::mib(2048);

/// … in steps of this; …
pub const LARGE_STEP: Bytes = Bytes::mib(16);

/// … but so many sizes of a VM at most.
pub const MOST_SIZES: u64 = 256;

/// A VM that occupies next to nothing of what it may use is counted with this share of it.
pub const LEAST_CHARGE: f64 = 0.01;

/// How much the latest second counts in a VM's rate of major faults: about a period is remembered.
pub const FAULTS_SHARE: f64 = 0.2;

/// What a group had to take back is not handed out again for this long at first; it doubles each
/// time …
pub const DEFICIT_FIRST: Millis = Millis::secs(30);

/// … up to this.
pub const DEFICIT_MAX: Millis = Millis::secs(600);

/// No disk answers more major faults per second: what is said beyond is a lie …
pub const FAULTS_MAX: f64 = 100_000.0;

/// … and fewer than this are none.
pub const FAULTS_LEAST: f64 = 0.1;

/// A disk answers at least so many major faults per second …
pub const DISK_LEAST: f64 = 200.0;

/// … and what more it was seen to answer is forgotten by so much in a second in which somebody is
/// short: half of it in six minutes.
pub const DISK_FORGOTTEN: f64 = 0.998;

/// With this share of them a VM waits for the disk all the time: for each page that is read back,
/// another one may have to be written, …
pub const DISK_FULL: f64 = 0.5;

/// … and up to this one, only for what it reads.
pub const DISK_SHARED: f64 = 0.25;

/// How long after a move it shows what it has saved: three periods.
pub const JUDGED_AFTER: Millis = Millis::secs(15);

/// The group's reserve at most, in percent of its budget: covers copy-on-write bursts and fast
/// refaults, and keeps surplus and deficit apart so that neither chases the other.
pub const RESERVE_PERCENT: u64 = 4;

/// For how long nobody in a group may have been short before its surplus counts as idle. Kim 2014
/// §7.1 names no time; it is as long as a guest must have been calm before anything is taken from
/// it, so that a burst of demand is not followed by a loan that the next one revokes.
pub const LEND_AFTER: Millis = CALM;

/// The host's reserve where none is configured, in percent of its memory.
pub const HOST_RESERVE_PERCENT: u64 = 5;

/// What VMs have freed is taken when the host has less than this without it, in percent of its
/// reserve: before the reserve is touched, for then every grant comes back.
pub const TAKE_FREED_PERCENT: u64 = 150;

/// The host's tasks wait for memory when they do so for this share of the time, in percent (PSI
/// `some`) …
pub const PRESSED_PERCENT: f32 = 10.0;

/// … and then so much of the host's memory is taken of what VMs have freed, in percent, in each
/// tick.
pub const PRESSED_STEP_PERCENT: u64 = 1;

/// The slowest that identical pages are looked for by themselves (Kim 2014 §6.1) …
pub const SCAN_RATE_MIN: PagesPerMs = PagesPerMs(5);

/// … and the fastest.
pub const SCAN_RATE_MAX: PagesPerMs = PagesPerMs(50);

/// By how much scanning gets faster in a period (Kim 2014 §6.1).
pub const SCAN_STEP: PagesPerMs = PagesPerMs(5);

/// The share of their time that CPUs are used from which they count as busy (Kim 2014 §6.1).
pub const SCAN_BUSY: f32 = 0.9;

/// What a period must save, for each VM, for scanning to be worth more CPU time (Kim 2014 §6.1).
pub const SCAN_PRODUCTIVE: Bytes = Bytes::mib(1);

/// How long it must be settled whom the kernel's KSM may merge before it begins, or is put back. A
/// daemon that has just started finds its VMs within this time, and a new VM shows its name and its
/// shim; KSM rests meanwhile.
pub const KSM_SETTLED: Millis = Millis::secs(10);
/// The least pause between two looks at which processes have memory that KSM may merge. For at
/// least so long one that has just come may be merged with the rest; at most for
/// [`KSM_LOOK_FRESH`].
pub const KSM_LOOK_PAUSE: Millis = Millis::secs(5);
/// The longest, on hosts where one look takes long.
pub const KSM_LOOK_PAUSE_MOST: Millis = Millis::secs(30);
/// A look that is older says nothing: the next one hangs in the kernel.
pub const KSM_LOOK_FRESH: Millis = Millis::secs(60);

/// How far a balloon may stand from its target and still count as there: 0.5 % of its RAM, from 1
/// to 16 MiB (xapi squeezed learned that 1 MiB is too strict for large machines).
#[must_use]
pub fn tolerance(ram: Bytes) -> Bytes {
    Bytes(ram.0 / 200).clamp(Bytes::mib(1), Bytes::mib(16))
}
