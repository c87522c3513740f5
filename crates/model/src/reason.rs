//! Why: one enum for every action and every refusal, with the words that everybody reads.
//!
//! CLI, API, log and dashboard print [`Reason`]'s `Display`; tests assert the variant. A reason
//! holds the figures that led to it, because "not enough memory" without the amount explains
//! nothing.

mod signs;

use serde::{Deserialize, Serialize};

pub use signs::{KillSign, Pressure, StatField};

use crate::{Bytes, Millis, VmName};

/// Why something was done, or was not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "code")]
pub enum Reason {
    // --- why memory is given -------------------------------------------------------------------
    /// The `demand` policy hands out surplus.
    #[error("it is short of memory ({sign}) and the group has {surplus} to hand out")]
    Demand {
        /// What shows the demand.
        sign: Pressure,
        /// The group's surplus before this grant.
        surplus: Bytes,
    },
    /// `balance` moves memory to where it saves most.
    #[error("expected to save {saves} page faults a minute")]
    Balance {
        /// Misses per minute.
        saves: u64,
    },
    /// `fair` or `entitlement` move a VM towards its share.
    #[error("its share of the group's surplus is {share}")]
    Share {
        /// Its share, above base.
        share: Bytes,
    },
    /// A guest below base is under pressure.
    #[error(
        "it is under pressure ({pressure}) with less than its guaranteed {base}: all of it back at once"
    )]
    GiveBack {
        /// What shows the pressure.
        pressure: Pressure,
        /// Its base.
        base: Bytes,
    },
    /// A guest below base sends no statistics that can be trusted.
    #[error(
        "its statistics cannot be relied on and it has less than its guaranteed {base}: all of it back at once"
    )]
    BlindGiveBack {
        /// Its base.
        base: Bytes,
    },
    /// A guest without swap takes memory faster than what was left to it allows.
    #[error(
        "it is not known to have swap, has {available} available, and needs {margin}: what was taken from it comes back"
    )]
    Returned {
        /// By the guest's own estimate.
        available: Bytes,
        /// Its margin of available memory.
        margin: Bytes,
    },
    /// A guest's kernel has killed a program.
    #[error("{sign}: its base and what was taken from it come back at once")]
    KilledGiveBack {
        /// The sign of it.
        sign: KillSign,
    },
    /// From now on the host pages out what the VM does not touch.
    #[error("the host pages out what it does not touch from now on; its balloon is deflated")]
    Paged,
    /// It has memory that it did not touch for a minute, and little of what was paged out comes
    /// back.
    #[error("{spare} idle for 60 s; {refaults} of refaults a minute")]
    Ahead {
        /// Beyond what it keeps in any case.
        spare: Bytes,
        /// In a minute.
        refaults: Bytes,
    },
    /// More of what was paged out comes back than the group allows.
    #[error("it touched {more} of what was paged out in a minute, more than its group allows")]
    Returns {
        /// In a minute.
        more: Bytes,
    },
    /// The host has not got what the balloon took.
    #[error(
        "its balloon holds {withheld} that the host has not got back: what was taken goes back to the guest"
    )]
    Withheld {
        /// Counted on the host beyond what the balloon leaves the guest.
        withheld: Bytes,
    },
    /// Nobody in the group needs what was taken any more.
    #[error("no VM of the group needs the rest of its guaranteed {base} any more")]
    Restore {
        /// Its base.
        base: Bytes,
    },

    /// What nobody needs serves as the group's second-level cache.
    #[error("the group has {surplus} that no VM needs now")]
    Spare {
        /// What is left of its surplus.
        surplus: Bytes,
    },
    /// Nothing is left for the group's second-level cache.
    #[error("the group has nothing to spare")]
    NothingSpare,

    // --- whether a VM is overloaded -----------------------------------------------------------
    /// It pages little.
    #[error("it pages {pages_per_s} pages a second, and an overload is more than {above}")]
    OverloadNone {
        /// In the latest interval, in and out.
        pages_per_s: u64,
        /// More than so many are an overload.
        above: u64,
    },
    /// It pages much, and has all that it was promised.
    #[error(
        "it pages {pages_per_s} pages a second with all the memory that it was promised: it needs \
         a larger `max`"
    )]
    OverloadItsOwn {
        /// In the latest interval, in and out.
        pages_per_s: u64,
    },
    /// It is overloaded, and that may end soon.
    #[error(
        "it was overloaded in {intervals} of its last {window} intervals; {sustained} of them \
         would make it sustained{}", learned(*learned_from)
    )]
    OverloadTransient {
        /// Overloaded ones among the last ones.
        intervals: u32,
        /// So many are looked at.
        window: u32,
        /// From so many on it is sustained.
        sustained: u32,
        /// Transient overloads that the two were learned from; 0: they are configured.
        learned_from: u32,
    },
    /// It is overloaded, and there is no end of it.
    #[error(
        "it was overloaded in {intervals} of its last {window} intervals of {seconds} s, with more \
         than {above} pages a second: no transient overload{}", learned(*learned_from)
    )]
    OverloadSustained {
        /// Overloaded ones among the last ones.
        intervals: u32,
        /// So many are looked at.
        window: u32,
        /// Length of an interval.
        seconds: u32,
        /// More than so many pages a second are an overload.
        above: u64,
        /// Transient overloads that the window was learned from; 0: it is configured.
        learned_from: u32,
    },

    // --- why memory is taken -------------------------------------------------------------------
    /// The group occupies more than its budget.
    #[error("the group is {deficit} over its budget: grants come back, the cheapest first")]
    Deficit {
        /// How much over.
        deficit: Bytes,
    },
    /// The host is short, and what VMs have freed is taken from this group first, for it occupies
    /// more than its budget.
    #[error(
        "the host needs memory, and its group is {deficit} over its budget: what it has freed is taken first"
    )]
    FreedOverBudget {
        /// How much over.
        deficit: Bytes,
    },
    /// What VMs have freed is taken, for the host would be short without it.
    #[error(
        "without what VMs have freed the host has {left} left, less than {wanted}: as much is taken, the oldest first"
    )]
    FreedHostShort {
        /// `MemAvailable` without what has been freed.
        left: Bytes,
        /// What there is to be.
        wanted: Bytes,
    },
    /// What VMs have freed is taken, for the host's tasks wait for memory.
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
        /// What its guest has free.
        free: Bytes,
        /// Who needs it.
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
    /// What a move by `balance` has saved.
    #[error("expected to save it {expected} misses a minute, this saved {saved}")]
    Saved {
        /// Misses per minute; negative: it was to cost so many.
        expected: i64,
        /// Major faults per minute that it had less afterwards; negative: more.
        saved: i64,
    },
    /// All that may be touched does not fit below a limit of QEMU's cgroup.
    #[error(
        "its QEMU's cgroup {cgroup} may have {limit}, and {over} more than that may be touched there: its grant comes back"
    )]
    CgroupExceeded {
        /// The cgroup.
        cgroup: String,
        /// Its limit.
        limit: Bytes,
        /// How much more may be touched.
        over: Bytes,
    },
    /// Its balloon is above its maximum.
    #[error("it holds more than its maximum of {max}")]
    AboveMax {
        /// Its maximum.
        max: Bytes,
    },

    // --- why memory is lent, and comes back ----------------------------------------------------
    /// A group's idle surplus goes to a group that is short.
    #[error("{needed_by} is short of memory ({sign}), and the lender leaves {idle} idle")]
    Lend {
        /// The borrower's VM that is shortest.
        needed_by: VmName,
        /// What shows it.
        sign: Pressure,
        /// What the lender can lend in all.
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
        /// What it can still lend.
        idle: Bytes,
    },
    /// The lender needs its memory.
    #[error("{needed_by} of the lender is short of memory itself ({sign}): all of it comes back")]
    LoanRecalled {
        /// The lender's VM that is short.
        needed_by: VmName,
        /// What shows it.
        sign: Pressure,
    },
    /// One of the two groups has withdrawn its consent, or is no more.
    #[error("one of the two groups takes no part in lending any more (`lend = true`)")]
    LoanNotConsented,

    // --- how fast identical pages are looked for -----------------------------------------------
    /// The group's `dedup` is `off`.
    #[error("switched off (`dedup = \"off\"`)")]
    DedupOff,
    /// The group's `dedup` is a number.
    #[error("the configuration fixes the rate")]
    ScanFixed,
    /// CPU time is left over.
    #[error("the host's CPUs are {busy_percent} % busy, so scanning slows no VM")]
    CpuIdle {
        /// How busy they were in the last period.
        busy_percent: u8,
    },
    /// CPU time is short, and memory is not.
    #[error("the host's CPUs are {busy_percent} % busy, and nothing calls for scanning faster")]
    CpuBusy {
        /// How busy they were in the last period.
        busy_percent: u8,
    },
    /// The same, for all that is known.
    #[error("how busy the host's CPUs are is not known, and nothing calls for scanning faster")]
    CpuUnknown,
    /// CPU time is short, but memory is shorter.
    #[error("its VMs swap {swapped}/s, and memory is missed more than CPU time")]
    ScanForSwapping {
        /// What its VMs swap per second, in and out.
        swapped: Bytes,
    },
    /// The same, and scanning helps.
    #[error("its VMs swap {swapped}/s, and scanning saves {saved}/s")]
    ScanProductive {
        /// What its VMs swap per second, in and out.
        swapped: Bytes,
        /// What was merged per second beyond what was written again.
        saved: Bytes,
    },
    /// The same, but it helps too little to be worth more.
    #[error("its VMs swap {swapped}/s, but scanning saves only {saved}/s")]
    ScanSlow {
        /// What its VMs swap per second, in and out.
        swapped: Bytes,
        /// What was merged per second beyond what was written again.
        saved: Bytes,
    },
    /// The same, but it does not help.
    #[error("its VMs swap {swapped}/s, but scanning saves nothing")]
    ScanUnproductive {
        /// What its VMs swap per second, in and out.
        swapped: Bytes,
    },

    // --- why not -------------------------------------------------------------------------------
    /// The VM fits no group's pattern.
    #[error("no group's pattern matches it: it is watched, not managed")]
    NoGroup,
    /// QEMU does not answer.
    #[error("QEMU does not answer: {why}")]
    Unreachable {
        /// The link's state.
        why: String,
    },
    /// The VM has no working balloon.
    #[error("its balloon cannot be used: {why}")]
    NoBalloon {
        /// What is missing.
        why: String,
    },
    /// A migration is under way, or may be.
    #[error("it is being migrated: its memory is left alone until that has ended")]
    Migrating,
    /// The guest's statistics are too old to act on.
    #[error("its statistics are {age} old; nothing is taken on statistics older than {limit}")]
    StaleStats {
        /// Their age.
        age: Millis,
        /// The limit.
        limit: Millis,
    },
    /// It is paged, and nothing is known of it just now.
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
        /// Which one.
        field: StatField,
        /// What it says.
        value: Bytes,
        /// What it may say at most.
        limit: Bytes,
    },
    /// The guest's counters ran backwards (it was rebooted, or it lies).
    #[error("its counters ran backwards, as after a reboot: nothing is taken until they settle")]
    CountersWentBack,
    /// The VM has no more to give.
    #[error("it is down to {floor}, below which nothing is taken from it")]
    AtFloor {
        /// Its minimum, or its base where that is protected.
        floor: Bytes,
    },
    /// The VM may have no more.
    #[error("it is at its maximum of {max}")]
    AtMax {
        /// Its maximum.
        max: Bytes,
    },
    /// The guest is short of memory itself.
    #[error("it is under pressure itself ({pressure})")]
    UnderPressure {
        /// What shows it.
        pressure: Pressure,
    },
    /// A guest without swap keeps what it uses, and what it may come to use.
    #[error(
        "it is not known to have swap: of the {lasting} that it left unused for a minute, and the {available} available, it keeps {margin}"
    )]
    Swapless {
        /// Left free for as long as that counts.
        #[serde(default)]
        lasting: Bytes,
        /// By the guest's own estimate.
        #[serde(default)]
        available: Bytes,
        /// Its margin of available memory.
        #[serde(default)]
        margin: Bytes,
    },
    /// Nothing lasting is known of a guest without swap yet.
    #[error(
        "it is not known to have swap and has been watched for {ago} only: what it left unused for {needed} can be taken"
    )]
    NotWatched {
        /// Since its statistics came without a gap.
        ago: Millis,
        /// How long they must.
        needed: Millis,
    },
    /// A guest's kernel has killed a program.
    #[error("{sign}: nothing is taken from it for {wait}")]
    Killed {
        /// The sign of it.
        sign: KillSign,
        /// Until memory may be taken from it again.
        wait: Millis,
    },
    /// A group occupies more than its budget, and its VMs need what they have.
    #[error(
        "the group is {deficit} over its budget and stays so: its VMs need what they have, and nothing more is taken"
    )]
    StaysOver {
        /// How much over.
        deficit: Bytes,
    },
    /// The guest has no idle memory.
    #[error("it uses what it has: {free} free, of which {margin} stay with it")]
    NothingIdle {
        /// What the guest has free.
        free: Bytes,
        /// What it keeps in any case.
        margin: Bytes,
    },
    /// A shrink failed lately.
    #[error("taking memory from it failed {failures} times in a row; next try in {wait}")]
    BackOff {
        /// How often in a row.
        failures: u32,
        /// Until the next try.
        wait: Millis,
    },
    /// The guest has not been calm for long enough.
    #[error("it has been seen calm for {ago} only; memory is taken after {needed} of calm")]
    NotCalm {
        /// Since it was last under pressure or not to be believed, or first seen at all.
        ago: Millis,
        /// How long it must be calm.
        needed: Millis,
    },
    /// The operator has just let Overbook act.
    #[error(
        "nothing is taken for another {left}: the mode was changed to `enforce`, or Overbook was \
         resumed, a moment ago"
    )]
    Grace {
        /// Until something may be taken.
        left: Millis,
    },
    /// An earlier change is still being carried out.
    #[error("its memory is on its way to {target}, or its statistics do not show it yet")]
    InFlight {
        /// Where it is going.
        target: Bytes,
    },
    /// The balloon does not move.
    #[error(
        "uncooperative: its balloon stands at {actual} and has not moved towards {target} for {stuck}; next try in {wait}"
    )]
    Uncooperative {
        /// Where it stands.
        actual: Bytes,
        /// Where it should be.
        target: Bytes,
        /// For how long it has not moved.
        stuck: Millis,
        /// When it is asked again.
        wait: Millis,
    },
    /// The host does not get what the balloon takes.
    #[error(
        "its balloon gives the host nothing back ({amount} of what it took were still occupied; locked, pinned or preallocated memory stays); next try in {wait}"
    )]
    GivesNothingBack {
        /// Counted on the host beyond what the balloon left the guest.
        amount: Bytes,
        /// Until the next try.
        wait: Millis,
    },
    /// Somebody else moved the balloon.
    #[error("another program moved its balloon from {target} to {actual}: left alone for {wait}")]
    MovedByOthers {
        /// Where it stands.
        actual: Bytes,
        /// Where it was put.
        target: Bytes,
        /// For how long it is left alone.
        wait: Millis,
    },
    /// The group has nothing to hand out.
    #[error("it is short of memory ({sign}) but its group has nothing to hand out")]
    NoSurplus {
        /// What shows the demand.
        sign: Pressure,
    },
    /// `balance` has better use for the group's memory.
    #[error("it is short of memory, but what others have of the group's saves more misses there")]
    BestElsewhere,
    /// The group takes part in lending, but nobody lends.
    #[error("no group that lends has anything idle for it")]
    NoLender,
    /// The host has nothing to hand out.
    #[error("the host has {available} left; {reserve} of it are never handed out")]
    HostReserve {
        /// `MemAvailable`.
        available: Bytes,
        /// The reserve.
        reserve: Bytes,
    },
    /// No more fits below a limit of QEMU's cgroup.
    #[error(
        "its QEMU's cgroup {cgroup} may have {limit} and has {used}: what its guest may still touch fits below that, and no more"
    )]
    CgroupLimit {
        /// The cgroup.
        cgroup: String,
        /// Its limit.
        limit: Bytes,
        /// Memory that is charged there.
        used: Bytes,
    },
    /// The host's own memory could not be read lately.
    #[error("the host's own memory was not readable lately: nothing is handed out")]
    HostUnknown,
    /// The operator paused Overbook.
    #[error("paused by the operator: nothing is changed until `overbook resume`")]
    Paused,
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
