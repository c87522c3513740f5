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

/// A guest with less than this share of its memory available is under pressure, in percent.
pub const LOW_AVAILABLE_PERCENT: u64 = 5;

/// What a guest keeps free in any case, in percent of its memory …
pub const MARGIN_PERCENT: u64 = 10;

/// … and at least.
pub const MARGIN_MIN: Bytes = Bytes::mib(12);

/// From the moment that a guest's statistics show until what it is given has arrived: they come
/// once a second, the loop runs once a second, and a balloon deflates within a second.
pub const REACTION: Millis = Millis::secs(3);

/// How fast a guest without swap may be, per second, until it has shown that it is not.
pub const FIRST_PACE: Bytes = Bytes::mib(32);

/// After so long half of a guest's fastest pace, and of the most that it had in use, is forgotten
/// …
pub const PACE_FADES: Millis = Millis::secs(60);

/// … and of a guest without swap, whose programs die where others wait.
pub const PACE_FADES_SWAPLESS: Millis = Millis::secs(15 * 60);

/// A guest without swap gives what it has left free for so long …
pub const LASTING: Millis = Millis::secs(60);

/// … as seen in slices of this length …
pub const LASTING_SLICE: Millis = Millis::secs(10);

/// … and watched without a gap longer than this.
pub const WATCH_GAP: Millis = Millis::secs(10);

/// Memory that was taken from a guest without swap comes back when it has less available than this
/// part of its margin, in percent.
pub const NEEDS_PERCENT: u64 = 75;

/// How much of the memory of a guest without swap one step takes, in percent (at least [`UNIT`]).
pub const SWAPLESS_STEP_PERCENT: u64 = 2;

/// Memory that becomes free at once in a guest that was short shows a kill from this share of its
/// memory, in percent.
pub const JUMP_PERCENT: u64 = 10;

/// How long nothing is taken from a guest whose kernel has killed a program; it doubles with each
/// further kill …
pub const KILLED_FIRST: Millis = Millis::secs(300);

/// … up to this. A guest that stays so long without one begins anew.
pub const KILLED_MAX: Millis = Millis::secs(3600);

/// How long a guest must have been calm before anything is taken for somebody else.
pub const CALM: Millis = Millis::secs(10);

/// For how long nothing is taken after the operator has let Overbook act, or act again: time to
/// read what it would do, and to take that back.
pub const GRACE: Millis = Millis::secs(60);

/// Pressure within this time after taking memory means that it was a mistake.
pub const WATCH: Millis = Millis::secs(60);

/// The pause after the first mistake; it doubles with each further one (arcbox: 10 minutes to 60).
pub const BACK_OFF_FIRST: Millis = Millis::secs(60);

/// The longest such pause.
pub const BACK_OFF_MAX: Millis = Millis::secs(3600);

/// A balloon that has not moved towards its target for this long is stuck (squeezed: 5 s).
pub const STUCK_AFTER: Millis = Millis::secs(5);

/// A balloon that withholds less than this from the host is not suspected: readings are a second
/// apart, and QEMU's memory in addition to its guest's goes up and down.
pub const WITHHELD_MIN: Bytes = Bytes::mib(32);

/// A balloon that withholds memory for this long gives nothing back: by then QEMU's own memory,
/// which is told apart from its guest's every 15 s, has been measured anew.
pub const WITHHELD_FOR: Millis = Millis::secs(20);

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

/// … and by how much more than its curve a VM may want, for being short is more urgent.
pub const GROW_PERCENT: u64 = 30;

/// `balance` tries so many sizes of a VM at most, and none that differ by less than a mebibyte
/// (Wang 2016 §4: eight granules).
pub const MOST_SIZES: u64 = 256;

/// A VM that occupies next to nothing of what it may use is counted with this share of it.
pub const LEAST_CHARGE: f64 = 0.01;

/// What a VM loses counts so much more than what another gains, in percent: curves are estimates.
pub const CLEAR_GAIN_PERCENT: u64 = 150;

/// Who has waited all the time of late counts so many times more than who has not: a fifth of the
/// time makes up for [`CLEAR_GAIN_PERCENT`], so that equal VMs take turns.
pub const WAITED_COUNTS: f64 = 4.0;

/// For how long it counts that a VM has waited.
pub const WAITED_WITHIN: Millis = Millis::secs(300);

/// What Linux reads from swap at once around a page that is missed (`vm.page-cluster`): one major
/// fault.
pub const READ_AHEAD: Bytes = Bytes::kib(32);

/// What a guest waits for such a read from its own swap, in seconds: some disks take less.
pub const SWAP_READ_S: f64 = 0.001;

/// How long after a move it shows what it has saved: three periods.
pub const JUDGED_AFTER: Millis = Millis::secs(15);

/// What a group had to take back is not handed out again for this long at first; it doubles each
/// time …
pub const DEFICIT_FIRST: Millis = Millis::secs(30);

/// … up to this.
pub const DEFICIT_MAX: Millis = Millis::secs(600);

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

/// How far what the host counts of a VM may be off: page tables, and QEMU's own memory, which is
/// told apart from its guest's every 15 s. 1/64 of its RAM.
#[must_use]
pub fn uncounted(ram: Bytes) -> Bytes {
    ram.share(1, 64)
}

/// The margin below a limit of QEMU's cgroup: QEMU's own memory grows with the requests of its
/// disks and clients. 2 % of the limit, at least 16 MiB.
#[must_use]
pub fn cgroup_margin(limit: Bytes) -> Bytes {
    limit.percent(2).max(Bytes::mib(16))
}

/// How far a balloon may stand from its target and still count as there: 0.5 % of its RAM, from 1
/// to 16 MiB (xapi squeezed learned that 1 MiB is too strict for large machines).
#[must_use]
pub fn tolerance(ram: Bytes) -> Bytes {
    Bytes(ram.0 / 200).clamp(Bytes::mib(1), Bytes::mib(16))
}
