//! The state of a host and of its VMs in words, for people and for monitoring: a pure function of a
//! page.
//!
//! The API sends it with each page, and every view shows it. Only this file decides which
//! condition is a trouble, and how grave it is.

use std::cmp::Reverse;

use model::{Bytes, Millis, Reason};
use policy::tuning;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::client::ClientError;
use crate::wire::{GroupStatus, HostStatus, VmStatus, Words};

/// A tick comes every second. After this time without one, the daemon's loop stands still.
const SILENT: Millis = Millis::secs(10);
/// Why nothing is done on any VM while the whole host is paused.
pub const HOST_PAUSED: &str = "Overbook is paused";
/// Names in a sentence about several VMs.
const NAMES: usize = 3;
/// Refusals that do not end by themselves: Overbook cannot work on the VM.
const UNUSABLE: [&str; 8] = [
    "no_balloon",
    "no_stats",
    "implausible_stats",
    "moved_by_others",
    "managers_balloon",
    "gives_nothing_back",
    "not_paged",
    "uncooperative",
];

/// How grave a state is. The discriminants are the exit codes of a monitoring plugin (Nagios Plugin
/// API, "Return Code").
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum StateLevel {
    /// Nothing is wrong.
    Ok = 0,
    /// Something needs attention.
    Warning = 1,
    /// Memory is short, or Overbook does not work.
    Critical = 2,
    /// The state cannot be found out.
    #[default]
    Unknown = 3,
}

impl StateLevel {
    /// The exit code.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        self as u8
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warning => "WARNING",
            Self::Critical => "CRITICAL",
            Self::Unknown => "UNKNOWN",
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostTrouble {
    /// How grave it is.
    pub level: StateLevel,
    /// The sentence for the operator.
    pub text: String,
    /// The VMs that it is about, the gravest first; empty: it is about something else.
    pub vms: Vec<String>,
}

/// The state of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostVerdict {
    /// The level of the worst trouble.
    pub level: StateLevel,
    /// The state in one line, which begins with the level.
    pub text: String,
    /// All troubles, the worst first.
    pub troubles: Vec<HostTrouble>,
}

/// The gravest condition of a VM that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmTrouble {
    /// How grave it is; `ok`: it is looked after, and is no trouble of the host.
    pub level: StateLevel,
    /// Whether the VM has less memory than it needs.
    pub lacks_memory: bool,
    /// The condition in words.
    pub text: String,
}

/// A kind of trouble with VMs.
struct VmTroubleKind {
    level: StateLevel,
    lacks_memory: bool,
    /// The words about several VMs.
    several: &'static str,
    /// The words about one VM. `None`: it has no such trouble.
    why: fn(&VmStatus, &[GroupStatus]) -> Option<String>,
}

/// The kinds for want of memory, the gravest first. The last one is looked after.
const SHORTAGES: [VmTroubleKind; 5] = [
    VmTroubleKind {
        level: StateLevel::Critical,
        lacks_memory: true,
        several: "ran out of memory",
        why: killed,
    },
    VmTroubleKind {
        level: StateLevel::Critical,
        lacks_memory: true,
        several: "are overloaded",
        why: overloaded,
    },
    VmTroubleKind {
        level: StateLevel::Warning,
        lacks_memory: true,
        several: "wait for pages that are out",
        why: waiting,
    },
    VmTroubleKind {
        level: StateLevel::Warning,
        lacks_memory: true,
        several: "are short of memory, and their groups have nothing to hand out",
        why: |vm, _| refused(vm, &["no_surplus"]),
    },
    VmTroubleKind {
        level: StateLevel::Ok,
        lacks_memory: true,
        several: "are short of memory now",
        why: short,
    },
];

/// The kinds for which Overbook cannot work on a VM though it should.
const OBSTACLES: [VmTroubleKind; 3] = [
    VmTroubleKind {
        level: StateLevel::Warning,
        lacks_memory: false,
        several: "are unreachable",
        why: unreachable,
    },
    VmTroubleKind {
        level: StateLevel::Warning,
        lacks_memory: false,
        several: "cannot be given or relieved of memory",
        why: |vm, _| refused(vm, &UNUSABLE),
    },
    VmTroubleKind {
        level: StateLevel::Warning,
        lacks_memory: false,
        several: "cannot be tracked",
        why: untracked,
    },
];

impl VmTrouble {
    /// The trouble of this VM. `None`: it has all that it should.
    #[must_use]
    pub fn of(vm: &VmStatus, groups: &[GroupStatus]) -> Option<Self> {
        kinds().find_map(|VmTroubleKind { level, lacks_memory, why, .. }| {
            Some(Self { level: *level, lacks_memory: *lacks_memory, text: why(vm, groups)? })
        })
    }
}

/// All kinds, the gravest first; those that are looked after come last.
fn kinds() -> impl Iterator<Item = &'static VmTroubleKind> {
    let is_trouble = |kind: &&VmTroubleKind| kind.level > StateLevel::Ok;
    let of_shortage = SHORTAGES.iter().filter(is_trouble);
    of_shortage.chain(&OBSTACLES).chain(SHORTAGES.iter().filter(move |kind| !is_trouble(kind)))
}

fn kind_of(vm: &VmStatus, groups: &[GroupStatus]) -> Option<usize> {
    kinds().position(|kind| (kind.why)(vm, groups).is_some())
}

/// Sorts VMs: the one with the gravest trouble first, those without trouble by name.
pub fn sort_by_gravity(vms: &mut [VmStatus], groups: &[GroupStatus]) {
    vms.sort_by_cached_key(|vm| match kind_of(vm, groups) {
        Some(kind) => (kind, urgency(vm)),
        None => (usize::MAX, (Reverse(0), Reverse(0), vm.name.clone())),
    });
}

/// The order within a kind: the VM that waits longest first, then by name.
fn urgency(vm: &VmStatus) -> (Reverse<u64>, Reverse<u64>, String) {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of time that is not negative"
    )]
    let waits = (vm.cold.as_ref().map_or(0.0, |cold| cold.wait_ratio) * 1e6) as u64;
    (Reverse(waits), Reverse(vm.swap_bytes_per_second.unwrap_or(0)), vm.name.clone())
}

impl Default for HostVerdict {
    /// The verdict of a daemon that sends none.
    fn default() -> Self {
        Self::unknown("the daemon is of another version and tells no verdict".to_owned())
    }
}

impl HostVerdict {
    /// The verdict on a host, its groups and its VMs.
    #[must_use]
    pub fn judge(host: &HostStatus, groups: &[GroupStatus], vms: &[VmStatus]) -> Self {
        let mut by_urgency: Vec<&VmStatus> = vms.iter().collect();
        by_urgency.sort_by_cached_key(|vm| urgency(vm));
        let about = |kind: &VmTroubleKind| about(kind, &by_urgency, groups);
        // Within a level, this order is the order of urgency.
        let mut troubles = silence(host);
        troubles.extend(SHORTAGES.iter().filter_map(about));
        troubles.extend(of_host(host));
        troubles.extend(of_configuration(host));
        troubles.extend(groups.iter().filter_map(of_worker));
        troubles.extend(OBSTACLES.iter().filter_map(about));
        troubles.extend(groups.iter().filter_map(of_budget));
        troubles.extend(of_services(host));
        troubles.sort_by_key(|trouble| Reverse(trouble.level));
        match troubles.as_slice() {
            [] => Self {
                level: StateLevel::Ok,
                text: format!("OK: {}", summary(host, groups, vms)),
                troubles,
            },
            [HostTrouble { level, text, .. }, others @ ..] => {
                let more = match others.len() {
                    0 => String::new(),
                    n => format!(" (and {n} more)"),
                };
                Self { level: *level, text: format!("{}: {text}{more}", level.word()), troubles }
            }
        }
    }

    /// The verdict where there is no page. A daemon that does not answer is critical: its VMs are
    /// not looked after. Any other failure leaves the state unknown.
    #[must_use]
    pub fn of_failure(error: &ClientError) -> Self {
        let level = match error {
            ClientError::NoDaemon(_) | ClientError::Silent { .. } => StateLevel::Critical,
            _ => StateLevel::Unknown,
        };
        Self::because(level, error.to_string())
    }

    /// The verdict where the daemon cannot even be asked.
    #[must_use]
    pub fn unknown(why: String) -> Self {
        Self::because(StateLevel::Unknown, why)
    }

    fn because(level: StateLevel, why: String) -> Self {
        let text = format!("{}: {why}", level.word());
        Self { level, text, troubles: vec![HostTrouble { level, text: why, vms: Vec::new() }] }
    }
}

const fn critical(text: String) -> HostTrouble {
    HostTrouble { level: StateLevel::Critical, text, vms: Vec::new() }
}

const fn warning(text: String) -> HostTrouble {
    HostTrouble { level: StateLevel::Warning, text, vms: Vec::new() }
}

/// The line of a host without troubles.
fn summary(host: &HostStatus, groups: &[GroupStatus], vms: &[VmStatus]) -> String {
    let outside = vms.iter().filter(|vm| vm.group.is_none()).count();
    let lacks = |vm: &&VmStatus| VmTrouble::of(vm, groups).is_some_and(|it| it.lacks_memory);
    let short = vms.iter().filter(lacks).count();
    let parts = [(outside, "in no group"), (short, "short of memory now")];
    let parts = parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}"));
    let parts = parts.collect::<Vec<_>>().join(", ");
    let parts = if parts.is_empty() { parts } else { format!(" ({parts})") };
    let memory = match (host.available_bytes, host.total_bytes) {
        (Some(available), Some(total)) => {
            format!("{} of {} available", Bytes(available), Bytes(total))
        }
        _ => "the host's memory is not known".to_owned(),
    };
    let (vms, groups) = (count(vms.len(), "VM"), count(groups.len(), "group"));
    format!("{vms}{parts}, {groups}, {memory}, mode {}", host.mode)
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("{n} {what}") } else { format!("{n} {what}s") }
}

fn silence(host: &HostStatus) -> Vec<HostTrouble> {
    let age = Millis(host.tick_age_ms);
    let text = || format!("the daemon stands still: its last tick was {age} ago");
    (age > SILENT).then(|| critical(text())).into_iter().collect()
}

fn killed(vm: &VmStatus, _: &[GroupStatus]) -> Option<String> {
    let change = vm.change.iter().map(|change| &change.reason);
    let mut reasons = change.chain(&vm.refusals);
    let it = reasons.find(|words| ["killed", "killed_give_back"].contains(&&*words.code))?;
    Some(it.text.clone())
}

fn overloaded(vm: &VmStatus, _: &[GroupStatus]) -> Option<String> {
    let overload = vm.overload.as_ref().filter(|overload| overload.severity == "sustained")?;
    Some(format!("{}: {}", paging(vm)?, overload.reason.text))
}

fn waiting(vm: &VmStatus, _: &[GroupStatus]) -> Option<String> {
    let ratio = vm.cold.as_ref()?.wait_ratio;
    let words = || format!("it waits {:.0} % of its time for pages that are out", ratio * 100.0);
    (ratio >= tuning::SUFFERS_WAITS).then(words)
}

fn short(vm: &VmStatus, _: &[GroupStatus]) -> Option<String> {
    let is_overloaded = vm.overload.as_ref().is_some_and(|it| it.severity == "transient");
    let is_paging = is_overloaded || swapping(vm).is_some();
    paging(vm).filter(|_| is_paging).or_else(|| refused(vm, &["under_pressure"]))
}

fn swapping(vm: &VmStatus) -> Option<Bytes> {
    let rate = vm.swap_bytes_per_second.map(Bytes);
    rate.filter(|rate| *rate >= tuning::DEMAND_PER_SECOND)
}

/// The VM's paging and its rate.
fn paging(vm: &VmStatus) -> Option<String> {
    match (swapping(vm), &vm.overload) {
        (Some(rate), _) => Some(format!("it waits for its swap ({rate}/s)")),
        (None, Some(overload)) => {
            Some(format!("it waits for its pages ({}/s)", overload.pages_per_second))
        }
        (None, None) => None,
    }
}

fn unreachable(vm: &VmStatus, _: &[GroupStatus]) -> Option<String> {
    let why = vm.link_error.clone()?;
    Some(Reason::Unreachable { why }.to_string())
}

/// Why a VM that is to be tracked is not. A pause is the operator's choice, and a rest ends by
/// itself.
fn untracked(vm: &VmStatus, groups: &[GroupStatus]) -> Option<String> {
    let why = vm.unsupported.get("tracking")?;
    if !vm.link_up || vm.paused || why == HOST_PAUSED || why.starts_with("resting: ") {
        return None;
    }
    let name = vm.group.as_ref()?;
    let group = groups.iter().find(|group| group.name == *name)?;
    (group.tracking != "off").then(|| format!("it cannot be tracked: {why}"))
}

/// The first refusal with one of these codes.
fn refused(vm: &VmStatus, codes: &[&str]) -> Option<String> {
    let refusal = vm.refusals.iter().find(|words| codes.contains(&&*words.code))?;
    Some(refusal.text.clone())
}

/// Conditions of the whole host.
fn of_host(host: &HostStatus) -> Vec<HostTrouble> {
    let trouble = |words: &Words| match words.code.as_str() {
        "host_short" => critical(words.text.clone()),
        _ => warning(words.text.clone()),
    };
    host.reasons.iter().map(trouble).collect()
}

fn of_configuration(host: &HostStatus) -> Vec<HostTrouble> {
    let unused = host.config_error.iter();
    let unused = unused.map(|why| format!("the newest configuration is not used: {why}"));
    unused.chain(host.waits_for_restart.clone()).map(warning).collect()
}

/// The group needs a worker and has none.
fn of_worker(group: &GroupStatus) -> Option<HostTrouble> {
    let worker = group.worker.as_ref().filter(|worker| worker.pid.is_none())?;
    let why = worker.last_error.as_ref().map(|why| format!(": the last one {why}"));
    let (name, why) = (&group.name, why.unwrap_or_default());
    Some(warning(format!("the worker of group {name} is not running{why}")))
}

fn of_budget(group: &GroupStatus) -> Option<HostTrouble> {
    let why = group.stays_over.as_ref()?;
    Some(warning(format!("group {}: {}", group.name, why.text)))
}

fn of_services(host: &HostStatus) -> Vec<HostTrouble> {
    let paused =
        host.paused.then(|| "paused: nothing is changed until `overbook resume`".to_owned());
    let groups = host.paused_groups.iter().map(|group| format!("group {group}"));
    let alone: Vec<_> = groups.chain(host.paused_vms.iter().cloned()).collect();
    let alone = (!alone.is_empty()).then(|| {
        let names = alone.join(", ");
        format!("paused by name: {names}: `overbook resume NAME` goes on")
    });
    let history = host.history_error.iter().map(|why| format!("history is not being kept: {why}"));
    let pool = host.pool_trouble.iter().map(|why| format!("the pool: {why}"));
    let all =
        paused.into_iter().chain(alone).chain(history).chain(pool).chain(host.ksm_trouble.clone());
    all.map(warning).collect()
}

/// A trouble about the VMs of a kind: the reason of one VM, or the names of several.
fn about(kind: &VmTroubleKind, vms: &[&VmStatus], groups: &[GroupStatus]) -> Option<HostTrouble> {
    if kind.level == StateLevel::Ok {
        return None;
    }
    let of_them: Vec<_> =
        vms.iter().filter_map(|vm| Some((&vm.name, (kind.why)(vm, groups)?))).collect();
    let text = match of_them.as_slice() {
        [] => return None,
        [(name, why)] => format!("{name}: {why}"),
        several => {
            let mut names: Vec<&str> =
                several.iter().take(NAMES).map(|(name, _)| name.as_str()).collect();
            let rest = several.len().saturating_sub(names.len());
            let more = format!("{rest} more");
            names.extend((rest > 0).then_some(more.as_str()));
            format!("{} VMs {}: {}", several.len(), kind.several, names.join(", "))
        }
    };
    let vms = of_them.into_iter().map(|(name, _)| name.clone()).collect();
    Some(HostTrouble { level: kind.level, text, vms })
}

#[cfg(test)]
mod tests;
