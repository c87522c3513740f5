//! The host's state in one line, for people and for monitoring: a pure function of a page.
//!
//! `overbook status` and `overbook top` show it. Only this file decides which condition is a
//! trouble, and how grave it is.

use model::{Bytes, Millis, Reason};
use serde::Serialize;

use api::client::ClientError;
use api::wire::{GroupStatus, HostStatus, StatusPage, VmStatus, Words};

/// A tick comes every second. After this time without one, the daemon's loop stands still.
const SILENT: Millis = Millis::secs(10);
/// Names in a sentence about several VMs.
const NAMES: usize = 3;
/// Refusals that do not end by themselves: Overbook cannot work on the VM.
const UNUSABLE: [&str; 7] = [
    "no_balloon",
    "no_stats",
    "implausible_stats",
    "moved_by_others",
    "gives_nothing_back",
    "not_paged",
    "uncooperative",
];

/// How grave a state is. The discriminants are the exit codes of a monitoring plugin (Nagios Plugin
/// API, "Return Code").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub(crate) enum StateLevel {
    /// Nothing is wrong.
    Ok = 0,
    /// Something needs attention.
    Warning = 1,
    /// Memory is short, or Overbook does not work.
    Critical = 2,
    /// The state cannot be found out.
    Unknown = 3,
}

impl StateLevel {
    /// The exit code.
    pub(crate) const fn exit_code(self) -> u8 {
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostTrouble {
    /// How grave it is.
    pub(crate) level: StateLevel,
    /// The sentence for the operator.
    pub(crate) text: String,
}

/// The state of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostVerdict {
    /// The level of the worst trouble.
    pub(crate) level: StateLevel,
    /// The state in one line, which begins with the level.
    pub(crate) text: String,
    /// All troubles, the worst first.
    pub(crate) troubles: Vec<HostTrouble>,
}

impl HostVerdict {
    /// The verdict on a page.
    pub(crate) fn of(page: &StatusPage) -> Self {
        Self::judge(&page.host, &page.groups, &page.vms)
    }

    /// The verdict on a host, its groups and its VMs.
    pub(crate) fn judge(host: &HostStatus, groups: &[GroupStatus], vms: &[VmStatus]) -> Self {
        // Within a level, this order is the order of urgency.
        let mut troubles = silence(host);
        troubles.extend(shortages(vms));
        troubles.extend(of_host(host));
        troubles.extend(of_configuration(host));
        troubles.extend(groups.iter().filter_map(of_worker));
        troubles.extend(of_vms(groups, vms));
        troubles.extend(groups.iter().filter_map(of_budget));
        troubles.extend(of_services(host));
        troubles.sort_by_key(|trouble| std::cmp::Reverse(trouble.level));
        match troubles.as_slice() {
            [] => Self {
                level: StateLevel::Ok,
                text: format!("OK: {}", summary(host, groups, vms)),
                troubles,
            },
            [HostTrouble { level, text }, others @ ..] => {
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
    pub(crate) fn of_failure(error: &ClientError) -> Self {
        let level = match error {
            ClientError::NoDaemon(_) | ClientError::Silent { .. } => StateLevel::Critical,
            _ => StateLevel::Unknown,
        };
        Self::because(level, error.to_string())
    }

    /// The verdict where the daemon cannot even be asked.
    pub(crate) fn unknown(why: String) -> Self {
        Self::because(StateLevel::Unknown, why)
    }

    fn because(level: StateLevel, why: String) -> Self {
        let text = format!("{}: {why}", level.word());
        Self { level, text, troubles: vec![HostTrouble { level, text: why }] }
    }
}

const fn critical(text: String) -> HostTrouble {
    HostTrouble { level: StateLevel::Critical, text }
}

const fn warning(text: String) -> HostTrouble {
    HostTrouble { level: StateLevel::Warning, text }
}

/// The line of a host without troubles.
fn summary(host: &HostStatus, groups: &[GroupStatus], vms: &[VmStatus]) -> String {
    let outside = vms.iter().filter(|vm| vm.group.is_none()).count();
    let outside = if outside > 0 { format!(" ({outside} in no group)") } else { String::new() };
    let memory = match (host.available_bytes, host.total_bytes) {
        (Some(available), Some(total)) => {
            format!("{} of {} available", Bytes(available), Bytes(total))
        }
        _ => "the host's memory is not known".to_owned(),
    };
    let (vms, groups) = (count(vms.len(), "VM"), count(groups.len(), "group"));
    format!("{vms}{outside}, {groups}, {memory}, mode {}", host.mode)
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("{n} {what}") } else { format!("{n} {what}s") }
}

fn silence(host: &HostStatus) -> Vec<HostTrouble> {
    let age = Millis(host.tick_age_ms);
    let text = || format!("the daemon stands still: its last tick was {age} ago");
    (age > SILENT).then(|| critical(text())).into_iter().collect()
}

/// VMs that stall for want of memory.
fn shortages(vms: &[VmStatus]) -> Vec<HostTrouble> {
    let killed = |vm: &VmStatus| {
        let change = vm.change.iter().map(|change| &change.reason);
        let mut reasons = change.chain(&vm.refusals);
        let it = reasons.find(|words| ["killed", "killed_give_back"].contains(&&*words.code))?;
        Some(it.text.clone())
    };
    let overloaded = |vm: &VmStatus| {
        let overload = vm.overload.as_ref().filter(|overload| overload.severity == "sustained")?;
        Some(overload.reason.text.clone())
    };
    let starved = |vm: &VmStatus| refused(vm, &["no_surplus"]);
    let mut troubles = Vec::new();
    troubles.extend(about(vms, "ran out of memory", killed).map(critical));
    troubles.extend(about(vms, "are overloaded", overloaded).map(critical));
    let words = "are short of memory, and their groups have nothing to hand out";
    troubles.extend(about(vms, words, starved).map(warning));
    troubles
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

fn of_worker(group: &GroupStatus) -> Option<HostTrouble> {
    let worker = group.worker.as_ref().filter(|worker| worker.pid.is_none())?;
    let why = worker.last_error.as_ref().map(|why| format!(": the last one {why}"));
    let (name, why) = (&group.name, why.unwrap_or_default());
    Some(warning(format!("the worker of group {name} is not running{why}")))
}

/// VMs that Overbook cannot work on though it should.
fn of_vms(groups: &[GroupStatus], vms: &[VmStatus]) -> Vec<HostTrouble> {
    let unreachable = |vm: &VmStatus| {
        let why = vm.link_error.clone()?;
        Some(Reason::Unreachable { why }.to_string())
    };
    let unusable = |vm: &VmStatus| refused(vm, &UNUSABLE);
    let untracked = |vm: &VmStatus| {
        let name = vm.group.as_ref()?;
        let group = groups.iter().find(|group| group.name == *name)?;
        let why =
            vm.unsupported.get("tracking").filter(|_| group.tracking != "off" && vm.link_up)?;
        Some(format!("it cannot be tracked: {why}"))
    };
    let mut troubles = Vec::new();
    troubles.extend(about(vms, "are unreachable", unreachable).map(warning));
    troubles.extend(about(vms, "cannot be given or relieved of memory", unusable).map(warning));
    troubles.extend(about(vms, "cannot be tracked", untracked).map(warning));
    troubles
}

fn of_budget(group: &GroupStatus) -> Option<HostTrouble> {
    let why = group.stays_over.as_ref()?;
    Some(warning(format!("group {}: {}", group.name, why.text)))
}

fn of_services(host: &HostStatus) -> Vec<HostTrouble> {
    let paused =
        host.paused.then(|| "paused: nothing is changed until `overbook resume`".to_owned());
    let history = host.history_error.iter().map(|why| format!("history is not being kept: {why}"));
    let pool = host.pool_trouble.iter().map(|why| format!("the pool: {why}"));
    let all = paused.into_iter().chain(history).chain(pool).chain(host.ksm_trouble.clone());
    all.map(warning).collect()
}

/// The first refusal with one of these codes.
fn refused(vm: &VmStatus, codes: &[&str]) -> Option<String> {
    let refusal = vm.refusals.iter().find(|words| codes.contains(&&*words.code))?;
    Some(refusal.text.clone())
}

/// A sentence about the VMs for which `why` gives a reason: the reason of one VM, or the names of
/// several.
fn about(
    vms: &[VmStatus],
    what: &str,
    why: impl Fn(&VmStatus) -> Option<String>,
) -> impl Iterator<Item = String> {
    let of_them: Vec<_> = vms.iter().filter_map(|vm| Some((&vm.name, why(vm)?))).collect();
    let text = match of_them.as_slice() {
        [] => None,
        [(name, why)] => Some(format!("{name}: {why}")),
        several => {
            let mut names: Vec<&str> =
                several.iter().take(NAMES).map(|(name, _)| name.as_str()).collect();
            let rest = several.len().saturating_sub(names.len());
            let more = format!("{rest} more");
            names.extend((rest > 0).then_some(more.as_str()));
            Some(format!("{} VMs {what}: {}", several.len(), names.join(", ")))
        }
    };
    text.into_iter()
}

#[cfg(test)]
mod tests {
    use api::shown::TickView;
    use api::wire::{OverloadStatus, WorkerStatus};
    use std::sync::Arc;

    use super::*;
    use crate::fixture;

    /// The fixture's page without its troubles.
    fn fine() -> StatusPage {
        let mut page = StatusPage::of(&TickView::first(Arc::new(fixture::published())));
        page.host.tick_age_ms = 300;
        for vm in &mut page.vms {
            (vm.link_up, vm.link_error) = (true, None);
            vm.refusals.clear();
            vm.unsupported.clear();
        }
        page
    }

    fn text(page: &StatusPage) -> String {
        HostVerdict::of(page).text
    }

    #[test]
    fn a_host_in_good_order_is_ok() {
        let verdict = HostVerdict::of(&fine());
        assert_eq!(
            verdict.text,
            "OK: 3 VMs (1 in no group), 1 group, 6 GiB of 16 GiB available, mode enforce"
        );
        assert_eq!((verdict.level, verdict.troubles.len()), (StateLevel::Ok, 0));
    }

    #[test]
    fn the_exit_codes_are_those_of_a_monitoring_plugin() {
        let levels =
            [StateLevel::Ok, StateLevel::Warning, StateLevel::Critical, StateLevel::Unknown];
        assert_eq!(levels.map(StateLevel::exit_code), [0, 1, 2, 3]);
    }

    #[test]
    fn each_trouble_is_named_and_the_worst_stands_first() {
        let mut page = fine();
        let mut worst = Vec::new();
        let mut expect = |page: &StatusPage, begin: &str| {
            worst.push(begin.to_owned());
            assert!(text(page).starts_with(begin), "{}", text(page));
            assert_eq!(HostVerdict::of(page).troubles.len(), worst.len(), "{page:#?}");
        };
        page.host.ksm_trouble = Some("KSM is set by another program".to_owned());
        expect(&page, "WARNING: KSM is set by another program");
        page.host.pool_trouble = Some("the store is away".to_owned());
        expect(&page, "WARNING: the pool: the store is away (and 1 more)");
        page.host.history_error = Some("disk full".to_owned());
        expect(&page, "WARNING: history is not being kept: disk full (and 2 more)");
        page.host.paused = true;
        expect(&page, "WARNING: paused");
        let over = Reason::StaysOver { deficit: Bytes::mib(9) };
        page.groups[0].stays_over = Some(Words::of(&over));
        expect(&page, "WARNING: group web: ");
        page.vms[2].unsupported.insert("tracking".to_owned(), "an old shim".to_owned());
        expect(&page, "WARNING: web-2: it cannot be tracked: an old shim");
        page.vms[2].refusals.push(Words::of(&Reason::NoStats));
        expect(&page, "WARNING: web-2: its guest sends no usable statistics");
        (page.vms[0].link_up, page.vms[0].link_error) = (false, Some("no such socket".to_owned()));
        expect(&page, "WARNING: db-1: no connection to its QEMU: no such socket");
        let last_error = Some("ended (signal: 9)".to_owned());
        page.groups[0].worker = Some(WorkerStatus { last_error, ..WorkerStatus::default() });
        expect(&page, "WARNING: the worker of group web is not running: the last one ended");
        page.host.waits_for_restart = Some("the change of [api] waits".to_owned());
        expect(&page, "WARNING: the change of [api] waits");
        page.host.config_error = Some("overbook.toml:3: unknown key".to_owned());
        expect(&page, "WARNING: the newest configuration is not used: overbook.toml:3");
        let sign = model::reason::Pressure::Swapping { per_second: Bytes::mib(3) };
        page.vms[1].refusals.push(Words::of(&Reason::NoSurplus { sign }));
        expect(&page, "WARNING: web-1: it is short of memory (it swaps 3 MiB/s) but its group");
        let (available, reserve) = (Bytes::mib(9), Bytes::mib(99));
        page.host.reasons.push(Words::of(&Reason::HostShort { available, reserve }));
        expect(&page, "CRITICAL: the host has 9 MiB left, less than its reserve of 99 MiB");
        page.vms[1].overload =
            Some(OverloadStatus { severity: "sustained".to_owned(), ..OverloadStatus::default() });
        expect(&page, "CRITICAL: web-1: ");
        let sign = model::reason::KillSign::Counted { kills: 2 };
        page.vms[1].refusals.push(Words::of(&Reason::Killed { sign, wait: Millis::secs(60) }));
        expect(&page, "CRITICAL: web-1: its kernel has killed 2 programs");
        page.host.tick_age_ms = 11_000;
        expect(
            &page,
            "CRITICAL: the daemon stands still: its last tick was 11 s ago (and 15 more)",
        );
    }

    #[test]
    fn several_vms_with_one_trouble_are_one_sentence() {
        let mut page = fine();
        let vm = page.vms[0].clone();
        let down = |n: u32| VmStatus {
            name: format!("vm-{n}"),
            link_up: false,
            link_error: Some("no such socket".to_owned()),
            ..vm.clone()
        };
        page.vms = (0..100).map(down).collect();
        assert_eq!(text(&page), "WARNING: 100 VMs are unreachable: vm-0, vm-1, vm-2, 97 more");
    }

    #[test]
    fn tracking_that_is_switched_off_is_no_trouble() {
        let mut page = fine();
        page.vms[2].unsupported.insert("tracking".to_owned(), "switched off".to_owned());
        page.groups[0].tracking = "off".to_owned();
        assert_eq!(HostVerdict::of(&page).level, StateLevel::Ok);
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_critical_and_any_other_failure_unknown() {
        let (socket, limit) = ("/s".into(), std::time::Duration::from_secs(5));
        let verdict = HostVerdict::of_failure(&ClientError::NoDaemon("/s".into()));
        assert!(verdict.text.starts_with("CRITICAL: no daemon answers at /s"), "{verdict:?}");
        let verdict = HostVerdict::of_failure(&ClientError::Silent { socket, limit });
        assert_eq!(verdict.level, StateLevel::Critical);
        let verdict = HostVerdict::of_failure(&ClientError::NotPermitted("/s".into()));
        assert!(verdict.text.starts_with("UNKNOWN: not permitted"), "{verdict:?}");
    }
}
