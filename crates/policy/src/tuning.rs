//! All numbers of the policy, each with its origin. None of them is an option.

use model::{Bytes, Millis, PagesPerMs};

/// The loop's period (Kim 2014 §6.1: shorter costs CPU, longer reacts late).
pub const PERIOD: Millis = Millis::secs(1);

/// A VM's grant or loss of memory per tick (Kim 2014 §6.1, Fig. 4b).
pub const UNIT: Bytes = Bytes::mib(10);

/// A smaller change is not worth a balloon's work.
pub const STEP_MIN: Bytes = Bytes::mib(2);

/// Statistics older than this are stale. The guest is asked every second and answers with whole
/// seconds; Proxmox polls every 2 s.
pub const STALE_AFTER: Millis = Millis::secs(5);

/// The host's own counters older than this count as unknown.
pub const USED_STALE_AFTER: Millis = Millis::secs(10);

/// The same limit for freed memory. The kernel's page tables are walked for only a part of a CPU,
/// so a large guest is counted less often.
pub const FREED_STALE_AFTER: Millis = Millis::secs(30);

/// Swap traffic per second from which a VM counts as in demand. Kim 2014 takes any; an occasional
/// page is housekeeping, not demand.
pub const DEMAND_PER_SECOND: Bytes = Bytes::kib(64);

/// Swap-in per second from which a guest counts as suffering.
pub const SUFFERING_PER_SECOND: Bytes = Bytes::kib(64);

/// A VM that waits for refaults for this share of a vCPU's time could use more memory …
pub const WAITS_FOR_MORE: f64 = 0.005;

/// … and at this share it suffers (TMO bounds memory pressure at 0.1 % of all tasks' time, of
/// which one vCPU's wait is a part).
pub const SUFFERS_WAITS: f64 = 0.02;

/// The assumed duration of a refault until it was measured, in nanoseconds.
pub const REFAULT_NS: f64 = 100_000.0;

/// Refaults in a minute up to this amount count as none.
pub const FEW_REFAULTS: Bytes = Bytes::mib(1);

/// Swap traffic per second that no device delivers: such counters are false.
pub const SWAP_PER_SECOND_MAX: Bytes = Bytes::mib(64 * 1024);

/// The total number of profiles up to which profiles of absent VMs are kept.
pub const MOST_PROFILES: usize = 10_000;

/// A guest with less than this share of its memory available is under pressure, in percent.
pub const LOW_AVAILABLE_PERCENT: u64 = 5;

/// The margin that a guest always keeps free, in percent of its memory …
pub const MARGIN_PERCENT: u64 = 10;

/// … and its minimum.
pub const MARGIN_MIN: Bytes = Bytes::mib(12);

/// Time from a guest's statistics to the arrival of the granted memory: they come once a second,
/// the loop runs once a second, and a balloon deflates within a second.
pub const REACTION: Millis = Millis::secs(3);

/// Assumed allocation rate of a guest without swap, per second, until it has shown a lower one.
pub const FIRST_PACE: Bytes = Bytes::mib(32);

/// Half-life of a guest's fastest allocation rate and of its peak use …
pub const PACE_FADES: Millis = Millis::secs(60);

/// … and of those of a guest without swap, whose programs die where others wait.
pub const PACE_FADES_SWAPLESS: Millis = Millis::secs(15 * 60);

/// A guest without swap gives up memory that it has left free for this time …
pub const LASTING: Millis = Millis::secs(60);

/// … observed in slices of this length …
pub const LASTING_SLICE: Millis = Millis::secs(10);

/// … without a gap longer than this.
pub const WATCH_GAP: Millis = Millis::secs(10);

/// Memory that was taken from a guest without swap comes back when less than this part of the
/// guest's margin is available, in percent.
pub const NEEDS_PERCENT: u64 = 75;

/// One step's take from a guest without swap, in percent of its memory (at least [`UNIT`]).
pub const SWAPLESS_STEP_PERCENT: u64 = 2;

/// An abrupt gain of free memory in a guest that was short shows a kill from this share of its
/// memory, in percent.
pub const JUMP_PERCENT: u64 = 10;

/// Time for which nothing is taken from a guest whose kernel has killed a program; it doubles
/// with each further kill …
pub const KILLED_FIRST: Millis = Millis::secs(300);

/// … up to this. After this time without a kill, the guest starts afresh.
pub const KILLED_MAX: Millis = Millis::secs(3600);

/// A guest must have been calm for this time before memory is taken for another VM.
pub const CALM: Millis = Millis::secs(10);

/// Pressure within this time after taking memory means that it was a mistake.
pub const WATCH: Millis = Millis::secs(60);

/// The pause after the first mistake; it doubles with each further one (arcbox: 10 minutes to 60).
pub const BACK_OFF_FIRST: Millis = Millis::secs(60);

/// The longest back-off.
pub const BACK_OFF_MAX: Millis = Millis::secs(3600);

/// A balloon that has not moved towards its target for this long is stuck (squeezed: 5 s).
pub const STUCK_AFTER: Millis = Millis::secs(5);

/// A balloon that withholds less than this from the host is not suspected: readings are a second
/// apart, and QEMU's own memory varies.
pub const WITHHELD_MIN: Bytes = Bytes::mib(32);

/// A balloon that withholds memory for this long gives nothing back: by then QEMU's own memory,
/// which is measured separately every 15 s, has been measured again.
pub const WITHHELD_FOR: Millis = Millis::secs(20);

/// The pause before a stuck balloon is asked again; it doubles with each failure.
pub const RETRY_FIRST: Millis = Millis::secs(30);

/// The longest pause before a retry.
pub const RETRY_MAX: Millis = Millis::secs(600);

/// A target that is not reached is repeated after this long, in case the command was lost.
pub const REPEAT_AFTER: Millis = Millis::secs(3);

/// A balloon that another program moved is left alone for this long.
pub const LEFT_ALONE: Millis = Millis::secs(60);

/// Base is restored once no VM of the group was short of memory for this long. Bursts of demand
/// must not move it to and fro; a guest that needs its base does not wait for this.
pub const RESTORE_AFTER: Millis = Millis::secs(300);

/// One step's take from a VM for another VM, in percent of its memory (at least [`UNIT`]).
pub const STEP_PERCENT: u64 = 5;

/// The same for a group over its budget.
pub const DEFICIT_STEP_PERCENT: u64 = 15;

/// The same for a host short of memory.
pub const EMERGENCY_STEP_PERCENT: u64 = 25;

/// How often `balance` makes a plan (Wang 2016 §4).
pub const BALANCE_PERIOD: Millis = Millis::secs(5);

/// The largest loss of a VM by `balance` in a period, in percent (Wang 2016 §4) …
pub const SHRINK_PERCENT: u64 = 10;

/// … and the largest correction of a VM's curve upwards, because shortage is more urgent.
pub const GROW_PERCENT: u64 = 30;

/// `balance` tries at most this many sizes of a VM, and none that differ by less than a mebibyte
/// (Wang 2016 §4: eight granules).
pub const MOST_SIZES: u64 = 256;

/// A VM that occupies almost nothing of its allowance is charged this share of it.
pub const LEAST_CHARGE: f64 = 0.01;

/// The weight of a VM's loss against another VM's gain, in percent: curves are estimates.
pub const CLEAR_GAIN_PERCENT: u64 = 150;

/// Extra weight of a VM that has recently waited all the time. Waiting for a fifth of the time
/// makes up for [`CLEAR_GAIN_PERCENT`], so that equal VMs take turns.
pub const WAITED_COUNTS: f64 = 4.0;

/// Time for which a VM's waiting counts.
pub const WAITED_WITHIN: Millis = Millis::secs(300);

/// Linux's read-ahead from swap around a missed page (`vm.page-cluster`): one major fault.
pub const READ_AHEAD: Bytes = Bytes::kib(32);

/// The guest's wait for such a read from its own swap, in seconds: some disks take less.
pub const SWAP_READ_S: f64 = 0.001;

/// Time after a move until its saving shows: three periods.
pub const JUDGED_AFTER: Millis = Millis::secs(15);

/// Surplus that a group had to take back is not handed out again for this long at first; it
/// doubles each time …
pub const DEFICIT_FIRST: Millis = Millis::secs(30);

/// … up to this.
pub const DEFICIT_MAX: Millis = Millis::secs(600);

/// The group's largest reserve, in percent of its budget. It covers copy-on-write bursts and fast
/// refaults, and keeps surplus and deficit apart so that neither chases the other.
pub const RESERVE_PERCENT: u64 = 4;

/// Time without a short VM in a group before its surplus counts as idle. Kim 2014 §7.1 names no
/// time. It equals the calm that a guest needs before anything is taken from it, so that a burst
/// of demand is not followed by a loan that the next burst revokes.
pub const LEND_AFTER: Millis = CALM;

/// The host's reserve where none is configured, in percent of its memory.
pub const HOST_RESERVE_PERCENT: u64 = 5;

/// Freed memory is taken when the host has less than this without it, in percent of its reserve.
/// That is before the reserve is touched, because then every grant comes back.
pub const TAKE_FREED_PERCENT: u64 = 150;

/// The host is under pressure when its tasks wait for memory for this share of the time, in
/// percent (PSI `some`) …
pub const PRESSED_PERCENT: f32 = 10.0;

/// … and then this share of the host's memory is taken from freed memory in each tick, in
/// percent.
pub const PRESSED_STEP_PERCENT: u64 = 1;

/// The slowest adaptive scan rate (Kim 2014 §6.1) …
pub const SCAN_RATE_MIN: PagesPerMs = PagesPerMs(5);

/// … and the fastest.
pub const SCAN_RATE_MAX: PagesPerMs = PagesPerMs(50);

/// The increase of the scan rate in a period (Kim 2014 §6.1).
pub const SCAN_STEP: PagesPerMs = PagesPerMs(5);

/// CPU utilization from which CPUs count as busy (Kim 2014 §6.1).
pub const SCAN_BUSY: f32 = 0.9;

/// The saving per VM in a period that makes scanning worth more CPU time (Kim 2014 §6.1).
pub const SCAN_PRODUCTIVE: Bytes = Bytes::mib(1);

/// Time for which the set of VMs that the kernel's KSM may merge must be unchanged before KSM
/// starts or is put back. A daemon that has just started finds its VMs within this time, and a
/// new VM shows its name and its shim; KSM rests meanwhile.
pub const KSM_SETTLED: Millis = Millis::secs(10);
/// The shortest pause between two scans for processes with mergeable memory. A new process may be
/// merged with the rest for up to this time, and at most for [`KSM_LOOK_FRESH`].
pub const KSM_LOOK_PAUSE: Millis = Millis::secs(5);
/// The longest pause, on hosts where one scan takes long.
pub const KSM_LOOK_PAUSE_MOST: Millis = Millis::secs(30);
/// An older scan is ignored: the next one hangs in the kernel.
pub const KSM_LOOK_FRESH: Millis = Millis::secs(60);

/// The error bound of the host's count of a VM: page tables, and QEMU's own memory, which is
/// measured separately every 15 s. 1/64 of the VM's RAM.
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

/// The tolerance within which a balloon counts as at its target: 0.5 % of its RAM, from 1 to 16
/// MiB (xapi squeezed learned that 1 MiB is too strict for large machines).
#[must_use]
pub fn tolerance(ram: Bytes) -> Bytes {
    Bytes(ram.0 / 200).clamp(Bytes::mib(1), Bytes::mib(16))
}
