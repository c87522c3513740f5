//! The reason for every action and every refusal, in one enum, with its message to users.
//!
//! CLI, API, log and dashboard print [`Reason`]'s `Display`; tests assert the variant. A reason
//! holds the figures that led to it.

mod signs;
use serde::{Deserialize, Serialize};
pub use signs::{KillSign, Pressure, StatField};

use crate::{Bytes, Millis, VmName};

/// The reason why something was done or not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "code")]
pub enum Reason {
    // --- why memory is given -------------------------------------------------------------------
    /// The `demand` policy hands out surplus.
    #[error("it is short of memory ({sign}) and the group has {surplus} to hand out")]
    Demand {
        /// The sign of the demand.
        sign: Pressure,
        /// The group's surplus before this grant.
        surplus: Bytes,
    },
    /// `balance` moves memory to where it saves most.
    #[error("expected to save {saves} page faults a minute")]
    Balance {
        /// Page faults saved per minute.
        saves: u64,
    },
    /// `fair` or `entitlement` move a VM towards its share.
    #[error("its share of the group's surplus is {share}")]
    Share {
        /// The VM's share, above base.
        share: Bytes,
    },
    /// A guest below base is under pressure.
    #[error(
        "it is under pressure ({pressure}) with less than its guaranteed {base}: all of it back at once"
    )]
    GiveBack {
        /// The sign of the pressure.
        pressure: Pressure,
        /// The VM's base.
        base: Bytes,
    },
    /// A guest below base sends no statistics that can be trusted.
    #[error(
        "its statistics cannot be relied on and it has less than its guaranteed {base}: all of it back at once"
    )]
    BlindGiveBack {
        /// The VM's base.
        base: Bytes,
    },
    /// A guest without swap takes memory faster than its margin allows.
    #[error(
        "it is not known to have swap, has {available} available, and needs {margin}: what was taken from it comes back"
    )]
    Returned {
        /// Available memory by the guest's own estimate.
        available: Bytes,
        /// The guest's margin of available memory.
        margin: Bytes,
    },
    /// A guest's kernel has killed a program.
    #[error("{sign}: its base and what was taken from it come back at once")]
    KilledGiveBack {
        /// The sign of the kill.
        sign: KillSign,
    },
    /// From now on the host pages out memory that the VM does not touch.
    #[error("the host pages out what it does not touch from now on; its balloon is deflated")]
    Paged,
    /// The VM has memory that it did not touch for a minute, and its refaults are few.
    #[error("{spare} idle for 60 s; {refaults} of refaults a minute")]
    Ahead {
        /// Idle memory beyond the VM's margin.
        spare: Bytes,
        /// Refaults in a minute.
        refaults: Bytes,
    },
    /// The VM refaults more memory than its group allows.
    #[error("it touched {more} of what was paged out in a minute, more than its group allows")]
    Returns {
        /// Refaults in a minute.
        more: Bytes,
    },
    /// The host has not received the memory that the balloon took.
    #[error(
        "its balloon holds {withheld} that the host has not got back: what was taken goes back to the guest"
    )]
    Withheld {
        /// Counted on the host beyond what the balloon leaves the guest.
        withheld: Bytes,
    },
    /// No VM of the group needs the taken memory any more.
    #[error("no VM of the group needs the rest of its guaranteed {base} any more")]
    Restore {
        /// The VM's base.
        base: Bytes,
    },

    /// Memory that no VM needs serves as the group's second-level cache.
    #[error("the group has {surplus} that no VM needs now")]
    Spare {
        /// The rest of the group's surplus.
        surplus: Bytes,
    },
    /// No memory is left for the group's second-level cache.
    #[error("the group has nothing to spare")]
    NothingSpare,

    // --- whether a VM is overloaded -----------------------------------------------------------
    /// The VM pages little.
    #[error("it pages {pages_per_s} pages a second, and an overload is more than {above}")]
    OverloadNone {
        /// Pages a second in the latest interval, in and out.
        pages_per_s: u64,
        /// More pages a second than this are an overload.
        above: u64,
    },
    /// The VM pages much with all the memory that it was promised.
    #[error(
        "it pages {pages_per_s} pages a second with all the memory that it was promised: it needs \
         a larger `max`"
    )]
    OverloadItsOwn {
        /// Pages a second in the latest interval, in and out.
        pages_per_s: u64,
    },
    /// The VM is overloaded, and that may end soon.
    #[error(
        "it was overloaded in {intervals} of its last {window} intervals; {sustained} of them \
         would make it sustained{}", learned(*learned_from)
    )]
    OverloadTransient {
        /// Overloaded intervals in the window.
        intervals: u32,
        /// Length of the window in intervals.
        window: u32,
        /// The number of overloaded intervals at which an overload is sustained.
        sustained: u32,
        /// The number of transient overloads from which `window` and `sustained` were learned; 0:
        /// they are configured.
        learned_from: u32,
    },
    /// The VM is overloaded, and the overload lasts.
    #[error(
        "it was overloaded in {intervals} of its last {window} intervals of {seconds} s, with more \
         than {above} pages a second: no transient overload{}", learned(*learned_from)
    )]
    OverloadSustained {
        /// Overloaded intervals in the window.
        intervals: u32,
        /// Length of the window in intervals.
        window: u32,
        /// Length of an interval.
        seconds: u32,
        /// More pages a second than this are an overload.
        above: u64,
        /// The number of transient overloads from which the window was learned; 0: it is
        /// configured.
        learned_from: u32,
    },

    // --- why memory is taken -------------------------------------------------------------------
    /// The group occupies more than its budget, or will when its VMs touch what they were granted.
    #[error(
        "the group with its untouched grants is {deficit} over its budget: grants come back, the cheapest first"
    )]
    Deficit {
        /// The excess: memory in use and untouched grants, less the budget and what is borrowed.
        deficit: Bytes,
    },
    /// The host is short. Memory that VMs have freed is taken from this group first, because it
    /// occupies more than its budget.
    #[error(
        "the host needs memory, and its group with its untouched grants is {deficit} over its budget: what it has freed is taken first"
    )]
    FreedOverBudget {
        /// The excess.
        deficit: Bytes,
    },
    /// Memory that VMs have freed is taken, because the host would be short without it.
    #[error(
        "without what VMs have freed the host has {left} left, less than {wanted}: as much is taken, the oldest first"
    )]
    FreedHostShort {
        /// `MemAvailable` without what has been freed.
        left: Bytes,
        /// Memory that should be available.
        wanted: Bytes,
    },
    /// Memory that VMs have freed is taken, because the host's tasks wait for memory.
    #[error(
        "the host's tasks wait for memory for {percent} % of the time: what VMs have freed is taken"
    )]
    FreedHostPressed {
        /// Share of the last 10 s, in percent.
        percent: u32,
    },
    /// The host is short of memory.
    #[error(
        "the host has {available} left, less than its reserve of {reserve}: every grant comes back"
    )]
    HostShort {
        /// `MemAvailable`.
        available: Bytes,
        /// The configured reserve.
        reserve: Bytes,
    },
    /// Idle memory moves to a VM that swaps.
    #[error("it leaves {free} unused while {needed_by} is short of memory")]
    Idle {
        /// Free memory in the guest.
        free: Bytes,
        /// The VM that needs it.
        needed_by: VmName,
    },
    /// `balance` moves memory to where it saves more.
    #[error(
        "losing it is expected to cost {costs} misses a minute, and the whole plan saves its group {saves}"
    )]
    WorthLess {
        /// Misses per minute of this VM.
        costs: u64,
        /// Misses per minute that the group's round saves in all.
        saves: u64,
    },
    /// The saving by a move of `balance`.
    #[error("expected to save it {expected} misses a minute, this saved {saved}")]
    Saved {
        /// Misses saved per minute; negative: the move was expected to cost misses.
        expected: i64,
        /// Major faults per minute that the VM had less afterwards; negative: more.
        saved: i64,
    },
    /// The guest may touch more memory than a limit of QEMU's cgroup allows.
    #[error(
        "its QEMU's cgroup {cgroup} may have {limit}, and {over} more than that may be touched there: its grant comes back"
    )]
    CgroupExceeded {
        /// The cgroup.
        cgroup: String,
        /// The cgroup's limit.
        limit: Bytes,
        /// The excess.
        over: Bytes,
    },
    /// The VM's balloon is above the VM's maximum.
    #[error("it holds more than its maximum of {max}")]
    AboveMax {
        /// The VM's maximum.
        max: Bytes,
    },

    // --- why memory is lent, and comes back ----------------------------------------------------
    /// A group's idle surplus goes to a group that is short.
    #[error("{needed_by} is short of memory ({sign}), and the lender leaves {idle} idle")]
    Lend {
        /// The borrower's VM that is shortest.
        needed_by: VmName,
        /// The sign of the shortage.
        sign: Pressure,
        /// The amount that the lender can lend in all.
        idle: Bytes,
    },
    /// A loan stands.
    #[error("the borrower uses it, and the lender does not need it")]
    LoanUsed,
    /// The borrower uses less of its loan, or nothing.
    #[error("the borrower does not need the rest any more")]
    LoanUnneeded,
    /// The lender's idle surplus fell.
    #[error("the lender has only {idle} left idle")]
    LoanCut {
        /// The amount that the lender can still lend.
        idle: Bytes,
    },
    /// The lender needs its memory.
    #[error("{needed_by} of the lender is short of memory itself ({sign}): all of it comes back")]
    LoanRecalled {
        /// The lender's VM that is short.
        needed_by: VmName,
        /// The sign of the shortage.
        sign: Pressure,
    },
    /// One of the two groups has withdrawn its consent, or no longer exists.
    #[error("one of the two groups takes no part in lending any more, or lends to others (`lend`)")]
    LoanNotConsented,

    // --- how fast identical pages are looked for -----------------------------------------------
    /// The group's `dedup` is `off`.
    #[error("switched off (`dedup = \"off\"`)")]
    DedupOff,
    /// The group's `dedup` is a number.
    #[error("the configuration fixes the rate")]
    ScanFixed,
    /// CPU time is spare.
    #[error("the host's CPUs are {busy_percent} % busy, so scanning slows no VM")]
    CpuIdle {
        /// CPU utilization in the last period.
        busy_percent: u8,
    },
    /// CPU time is short, and memory is not.
    #[error("the host's CPUs are {busy_percent} % busy, and nothing calls for scanning faster")]
    CpuBusy {
        /// CPU utilization in the last period.
        busy_percent: u8,
    },
    /// CPU utilization is unknown, and memory is not short.
    #[error("how busy the host's CPUs are is not known, and nothing calls for scanning faster")]
    CpuUnknown,
    /// CPU time is short, but memory is shorter.
    #[error("its VMs swap {swapped}/s, and memory is missed more than CPU time")]
    ScanForSwapping {
        /// Bytes that the group's VMs swap per second, in and out.
        swapped: Bytes,
    },
    /// CPU time is short, but memory is shorter, and scanning helps.
    #[error("its VMs swap {swapped}/s, and scanning saves {saved}/s")]
    ScanProductive {
        /// Bytes that the group's VMs swap per second, in and out.
        swapped: Bytes,
        /// Bytes merged per second, less merged bytes that were written again.
        saved: Bytes,
    },
    /// Memory is shorter than CPU time, but scanning helps too little for a faster rate.
    #[error("its VMs swap {swapped}/s, but scanning saves only {saved}/s")]
    ScanSlow {
        /// Bytes that the group's VMs swap per second, in and out.
        swapped: Bytes,
        /// Bytes merged per second, less merged bytes that were written again.
        saved: Bytes,
    },
    /// Memory is shorter than CPU time, but scanning does not help.
    #[error("its VMs swap {swapped}/s, but scanning saves nothing")]
    ScanUnproductive {
        /// Bytes that the group's VMs swap per second, in and out.
        swapped: Bytes,
    },

    // --- why not -------------------------------------------------------------------------------
    /// No group's pattern matches the VM.
    #[error("no group's pattern matches it: it is watched, and its memory is left alone")]
    NoGroup,
    /// No connection to QEMU: it does not answer, or Overbook must not trust what answers.
    #[error("no connection to its QEMU: {why}")]
    Unreachable {
        /// The reason in the link's state.
        why: String,
    },
    /// The VM has no working balloon.
    #[error("its balloon cannot be used: {why}")]
    NoBalloon {
        /// The missing part.
        why: String,
    },
    /// The VM's manager moves the balloon by itself.
    #[error("Proxmox (pvestatd) moves its balloon by itself; this ends that: {remedy}")]
    ManagersBalloon {
        /// The command that ends this.
        remedy: String,
    },
    /// A migration is active, or may be.
    #[error("it is being migrated: its memory is left alone until that has ended")]
    Migrating,
    /// The guest's statistics are too old to act on.
    #[error("its statistics are {age} old; nothing is taken on statistics older than {limit}")]
    StaleStats {
        /// The statistics' age.
        age: Millis,
        /// The limit.
        limit: Millis,
    },
    /// The host pages this VM, and the worker's report is missing.
    #[error("no report from its worker: memory is not reclaimed without one")]
    NotPaged,
    /// The guest sends no statistics.
    #[error("its guest sends no usable statistics: nothing is taken without them")]
    NoStats,
    /// The guest's statistics cannot be true.
    #[error(
        "its statistics cannot be true ({field} is {value}, which exceeds {limit}): nothing is taken on them"
    )]
    ImplausibleStats {
        /// The field.
        field: StatField,
        /// The field's value.
        value: Bytes,
        /// The largest plausible value.
        limit: Bytes,
    },
    /// The guest's counters ran backwards (it was rebooted, or its statistics are false).
    #[error("its counters ran backwards, as after a reboot: nothing is taken until they settle")]
    CountersWentBack,
    /// The VM is at its floor.
    #[error("it is down to {floor}, below which nothing is taken from it")]
    AtFloor {
        /// The VM's minimum, or its base where that is protected.
        floor: Bytes,
    },
    /// The VM is at its maximum.
    #[error("it is at its maximum of {max}")]
    AtMax {
        /// The VM's maximum.
        max: Bytes,
    },
    /// The guest is short of memory itself.
    #[error("it is under pressure itself ({pressure})")]
    UnderPressure {
        /// The sign of the pressure.
        pressure: Pressure,
    },
    /// A guest without swap keeps the memory that it uses, and a margin for growth.
    #[error(
        "it is not known to have swap: of the {lasting} that it left unused for a minute, and the {available} available, it keeps {margin}"
    )]
    Swapless {
        /// Memory that the guest left free for the observation period.
        #[serde(default)]
        lasting: Bytes,
        /// Available memory by the guest's own estimate.
        #[serde(default)]
        available: Bytes,
        /// The guest's margin of available memory.
        #[serde(default)]
        margin: Bytes,
    },
    /// A guest without swap has not been observed for long enough.
    #[error(
        "it is not known to have swap and has been watched for {ago} only: what it left unused for {needed} can be taken"
    )]
    NotWatched {
        /// Time for which statistics have come without a gap.
        ago: Millis,
        /// The required time.
        needed: Millis,
    },
    /// A guest's kernel has killed a program.
    #[error("{sign}: nothing is taken from it for {wait}")]
    Killed {
        /// The sign of the kill.
        sign: KillSign,
        /// Time until memory may be taken from the VM again.
        wait: Millis,
    },
    /// A group occupies more than its budget, and its VMs need their memory.
    #[error(
        "the group with its untouched grants is {deficit} over its budget and stays so: its VMs need what they have, and nothing more is taken"
    )]
    StaysOver {
        /// The excess.
        deficit: Bytes,
    },
    /// The guest has no idle memory.
    #[error("it uses what it has: {free} free, of which {margin} stay with it")]
    NothingIdle {
        /// Free memory in the guest.
        free: Bytes,
        /// The guest's margin.
        margin: Bytes,
    },
    /// A recent shrink failed.
    #[error("taking memory from it failed {failures} times in a row; next try in {wait}")]
    BackOff {
        /// Consecutive failures.
        failures: u32,
        /// Time until the next try.
        wait: Millis,
    },
    /// The guest has not been calm for long enough.
    #[error("it has been seen calm for {ago} only; memory is taken after {needed} of calm")]
    NotCalm {
        /// Time since the guest was first seen, or last under pressure or implausible.
        ago: Millis,
        /// The required time of calm.
        needed: Millis,
    },
    /// The operator has just changed the configuration, or resumed.
    #[error(
        "nothing is taken for another {left}: the configuration was changed, or Overbook was \
         resumed, a moment ago"
    )]
    Grace {
        /// Time until memory may be taken.
        left: Millis,
    },
    /// The VM was found a moment ago.
    #[error("nothing is taken for another {left}: the VM was found a moment ago")]
    NewVm {
        /// Time until memory may be taken.
        left: Millis,
    },
    /// An earlier change is still being carried out.
    #[error("its memory is on its way to {target}, or its statistics do not show it yet")]
    InFlight {
        /// The target of that change.
        target: Bytes,
    },
    /// The balloon does not move.
    #[error(
        "uncooperative: its balloon stands at {actual} and has not moved towards {target} for {stuck}; next try in {wait}"
    )]
    Uncooperative {
        /// The balloon's size.
        actual: Bytes,
        /// The balloon's target.
        target: Bytes,
        /// Time for which the balloon has not moved.
        stuck: Millis,
        /// Time until the next try.
        wait: Millis,
    },
    /// The host does not receive the memory that the balloon takes.
    #[error(
        "its balloon gives the host nothing back ({amount} of what it took were still occupied; locked, pinned or preallocated memory stays); next try in {wait}"
    )]
    GivesNothingBack {
        /// Memory counted on the host beyond the balloon's size.
        amount: Bytes,
        /// Time until the next try.
        wait: Millis,
    },
    /// Another program moved the balloon.
    #[error("another program moved its balloon from {target} to {actual}: left alone for {wait}")]
    MovedByOthers {
        /// The balloon's size.
        actual: Bytes,
        /// The last target that Overbook set.
        target: Bytes,
        /// Time for which the balloon is left alone.
        wait: Millis,
    },
    /// The group has nothing to hand out.
    #[error("it is short of memory ({sign}) but its group has nothing to hand out")]
    NoSurplus {
        /// The sign of the demand.
        sign: Pressure,
    },
    /// `balance` uses the group's memory better elsewhere.
    #[error("it is short of memory, but what others have of the group's saves more misses there")]
    BestElsewhere,
    /// The group takes part in lending, but no group lends.
    #[error("no group that lends has anything idle for it")]
    NoLender,
    /// The host has no memory to hand out.
    #[error("the host has {available} left; {reserve} of it are never handed out")]
    HostReserve {
        /// `MemAvailable`.
        available: Bytes,
        /// The reserve.
        reserve: Bytes,
    },
    /// The host keeps its last memory for overloads of its pool.
    #[error("the host has {available} left, and keeps {kept} of it for overloads in its pool")]
    KeptForOverloads {
        /// `MemAvailable`, without the reserve.
        available: Bytes,
        /// Memory for VMs in sustained overload.
        kept: Bytes,
    },
    /// A limit of QEMU's cgroup leaves no room for more memory.
    #[error(
        "its QEMU's cgroup {cgroup} may have {limit} and has {used}: what its guest may still touch fits below that, and no more"
    )]
    CgroupLimit {
        /// The cgroup.
        cgroup: String,
        /// Its limit.
        limit: Bytes,
        /// Memory that is charged to the cgroup.
        used: Bytes,
    },
    /// The host's own memory could not be read recently.
    #[error("the host's own memory was not readable lately: nothing is handed out")]
    HostUnknown,
    /// The operator paused Overbook.
    #[error("paused by the operator: nothing is changed until `overbook resume`")]
    Paused,
    /// The operator paused this VM or its group.
    #[error("paused by the operator: nothing is changed on it until `overbook resume {name}`")]
    PausedAlone {
        /// The paused VM or group.
        name: String,
    },
    /// The mechanism's mode is `observe`.
    #[error("mode `observe`: measured, not planned")]
    Observing,
    /// Nothing calls for a change.
    #[error("nothing calls for a change")]
    Content,
}

fn learned(from: u32) -> String {
    if from == 0 {
        return String::new();
    }
    format!(" (learned from {from} transient ones)")
}
