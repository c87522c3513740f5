//! Compares the values of a draft with each other and makes a [`Spec`] from them.
//!
//! The readers have checked single values. This module finds faults between values: limits out of
//! order, groups that overlap, a VM in no group, a promise above the budget.

mod disks;
mod pool;

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    DEFAULT_STATE, Fault,
    draft::{Draft, GroupDraft, LimitsDraft, OverloadDraft, VmDraft},
    table::{Located, SourceLocation, printable, too_long},
};
use crate::{
    Bytes, ColdSpec, GroupSpec, Millis, NamePattern, OverloadSpec, Policy, Spec, VmName,
    spec::{ApiSpec, HostSpec, LimitsSpec, Modes, ShareSpec, VmSpec},
};

/// Sockets of VMs, and sockets in the directories of groups.
pub(super) const DEFAULT_QMP: [&str; 2] =
    ["/run/overbook/qmp/*.sock", "/run/overbook/qmp/*/*.sock"];
const DEFAULT_SOCKET: &str = "/run/overbook/overbook.sock";

/// Longest path that fits into a unix socket's address (`sun_path`, unix(7)), without the final
/// zero.
const SOCKET_PATH_BYTES: usize = 107;

/// The cost of comparing patterns is quadratic; this number takes well under a second.
const MOST_PATTERNS: usize = 4096;

/// The finished configuration, which is valid only if `faults` stayed empty.
pub(super) fn finish(draft: Draft, faults: &mut Vec<Fault>) -> Spec {
    let host = host(&draft, faults);
    let api = api(&draft, faults);
    own_socket_is_no_vm(&host, &api, &draft, faults);
    patterns(&draft, faults);
    for (name, group) in &draft.groups {
        ordered(&group.limits, None, faults);
        if group.vms.is_none() {
            let name = printable(name);
            let message =
                format!("group `{name}` has no `vms`; write for example vms = [\"web-*\"]");
            faults.push(group.place.fault(message));
        }
        for table in group.tables.iter().flat_map(|list| &list.value) {
            absolute("static", table, faults);
        }
        budget_covers_promises(name, group, &draft, faults);
    }
    no_user_of_two_groups(&draft, faults);
    for (name, vm) in &draft.vms {
        vm_is_in_a_group(name, vm, &draft, faults);
    }
    let disks = disks::finish(&draft, &api, faults);
    let overload = overload(&draft.overload, faults);
    let pool = draft.pool.as_ref().and_then(|pool| pool::finish(pool, faults));
    Spec {
        host,
        modes: Modes { balloon: draft.balloon.unwrap_or_default() },
        api,
        overload,
        pool,
        groups: draft.groups.into_iter().map(|(name, g)| (name.into(), g.into())).collect(),
        vms: draft.vms.into_iter().map(|(name, v)| (name.into(), v.into())).collect(),
        disks,
    }
}

fn host(draft: &Draft, faults: &mut Vec<Fault>) -> HostSpec {
    let mut qmp = Vec::new();
    for glob in draft.qmp.iter().flat_map(|list| &list.value) {
        absolute("qmp", glob, faults);
        qmp.push(glob.value.clone());
    }
    if qmp.is_empty() {
        qmp.extend(DEFAULT_QMP.map(str::to_owned));
    }
    let state = path("state", draft.state.as_ref(), faults);
    HostSpec {
        reserve: draft.reserve.as_ref().map(|size| size.value),
        qmp,
        state: state.unwrap_or_else(|| DEFAULT_STATE.into()),
        ksm: draft.ksm.unwrap_or_default(),
        attach: draft.attach.unwrap_or_default(),
        grace: draft.grace_s.map_or(HostSpec::GRACE, |s| Millis::secs(s.into())),
    }
}

fn api(draft: &Draft, faults: &mut Vec<Fault>) -> ApiSpec {
    let socket = path("socket", draft.socket.as_ref(), faults);
    if let Some(at) = draft.socket.as_ref().filter(|at| at.value.len() > SOCKET_PATH_BYTES) {
        let (length, most) = (at.value.len(), SOCKET_PATH_BYTES);
        let message =
            format!("`socket` is {length} bytes long; a unix socket's path has at most {most}");
        faults.push(at.place.fault(message));
    }
    let tcp = draft.tcp.as_ref().and_then(|at| match at.value.parse::<core::net::SocketAddr>() {
        Ok(address) if address.port() != 0 => Some(address),
        _ => {
            let text = printable(&at.value);
            let message = format!(
                "`tcp` is \"{text}\"; write an address and a port such as \"127.0.0.1:7780\""
            );
            faults.push(at.place.fault(message));
            None
        }
    });
    let token_file = path("token_file", draft.token_file.as_ref(), faults);
    match (&draft.tcp_place, &draft.token_place) {
        (Some(place), None) => faults.push(place.fault(
            "`tcp` needs `token_file`: over TCP the API answers only to those who hold the token",
        )),
        (None, Some(place)) => {
            faults.push(place.fault("`token_file` has no effect without `tcp`"));
        }
        _ => {}
    }
    let read_token_file = path("read_token_file", draft.read_token_file.as_ref(), faults);
    if let (None, Some(place)) = (&draft.tcp_place, &draft.read_token_place) {
        faults.push(place.fault("`read_token_file` has no effect without `tcp`"));
    }
    let socket = socket.unwrap_or_else(|| DEFAULT_SOCKET.into());
    ApiSpec { socket, tcp, token_file, read_token_file }
}

fn overload(draft: &OverloadDraft, faults: &mut Vec<Fault>) -> OverloadSpec {
    let usual = OverloadSpec::default();
    let window = draft.window.unwrap_or(usual.window);
    let sustained = draft.sustained.unwrap_or(usual.sustained);
    if let Some(place) = draft.place.as_ref().filter(|_| sustained > window) {
        faults.push(place.fault(format!(
            "`sustained` is {sustained} and `window` {window}: of that many intervals no more can \
             be overloaded"
        )));
    }
    OverloadSpec {
        interval_s: draft.interval_s.unwrap_or(usual.interval_s),
        pages_per_s: draft.pages_per_s.unwrap_or(usual.pages_per_s),
        window,
        sustained,
    }
}

fn absolute(key: &str, at: &Located<String>, faults: &mut Vec<Fault>) {
    if !at.value.starts_with('/') {
        let text = printable(&at.value);
        faults.push(
            at.place.fault(format!("`{key}` is \"{text}\"; write a path that begins with /")),
        );
    }
}

fn path(key: &str, at: Option<&Located<String>>, faults: &mut Vec<Fault>) -> Option<PathBuf> {
    let at = at?;
    absolute(key, at, faults);
    Some(PathBuf::from(&at.value))
}

/// Without this check, the daemon could take its own API socket for a VM.
fn own_socket_is_no_vm(host: &HostSpec, api: &ApiSpec, draft: &Draft, faults: &mut Vec<Fault>) {
    let socket = api.socket.to_string_lossy();
    for glob in host.qmp.iter().filter(|glob| glob_matches(glob, &socket)) {
        let places = draft.qmp.iter().flat_map(|list| &list.value);
        let written = places.clone().find(|at| at.value == *glob).map(|at| &at.place);
        let Some(place) = written.or(draft.socket.as_ref().map(|at| &at.place)) else {
            continue;
        };
        let (glob, socket) = (printable(glob), printable(&socket));
        let message = format!("`qmp` \"{glob}\" matches the API's own socket, {socket}");
        faults.push(place.fault(message));
    }
}

/// Matches component by component, because a glob's `*` never matches a `/`.
fn glob_matches(glob: &str, path: &str) -> bool {
    glob.split('/').count() == path.split('/').count()
        && glob
            .split('/')
            .zip(path.split('/'))
            .all(|(part, name)| NamePattern::new(part).matches(&name.into()))
}

/// Checks `min ≤ base ≤ max` for the written values: of one table, or of a VM and its group
/// together.
fn ordered(own: &LimitsDraft, group: Option<&LimitsDraft>, faults: &mut Vec<Fault>) {
    let written = |own: &Option<Located<Bytes>>,
                   of_group: fn(&LimitsDraft) -> &Option<Located<Bytes>>| {
        let inherited = || group.and_then(|g| of_group(g).clone()).map(|at| (at, false));
        own.clone().map(|at| (at, true)).or_else(inherited)
    };
    let min = ("min", written(&own.min, |g| &g.min));
    let base = ("base", written(&own.base, |g| &g.base));
    let max = ("max", written(&own.max, |g| &g.max));
    // `min` is compared with `max` only without a `base` between them: one fault per mistake.
    let pairs = match (&min.1, &base.1, &max.1) {
        (Some(_), None, Some(_)) => vec![(&min, &max)],
        _ => vec![(&min, &base), (&base, &max)],
    };
    for ((low_key, low), (high_key, high)) in pairs {
        let (Some((low, low_own)), Some((high, high_own))) = (low, high) else {
            continue;
        };
        // A fault within the group has already been reported there.
        if low.value <= high.value || !(*low_own || *high_own) {
            continue;
        }
        let place = if *low_own { &low.place } else { &high.place };
        let from = |at: &Located<Bytes>, is_own: bool| {
            if is_own {
                String::new()
            } else {
                format!(" (from its group, {}:{})", at.place.file, at.place.line)
            }
        };
        faults.push(place.fault(format!(
            "`{low_key}` of {}{} is more than `{high_key}` of {}{}; needed: min ≤ base ≤ max",
            low.value,
            from(low, *low_own),
            high.value,
            from(high, *high_own),
        )));
    }
}

/// Checks that no VM can belong to two groups.
fn patterns(draft: &Draft, faults: &mut Vec<Fault>) {
    let mut earlier: Vec<(&str, NamePattern, &SourceLocation)> = Vec::new();
    for (group, group_draft) in &draft.groups {
        let mut own: BTreeMap<NamePattern, &SourceLocation> = BTreeMap::new();
        for at in group_draft.vms.iter().flat_map(|list| &list.value) {
            let text = printable(&at.value);
            if let Some(wrong) = too_long(&at.value) {
                faults.push(at.place.fault(format!("pattern \"{text}\" {wrong}")));
                continue;
            }
            if earlier.len() + own.len() == MOST_PATTERNS {
                let message =
                    format!("more than {MOST_PATTERNS} patterns; use wildcards: `*` and `?`");
                faults.push(at.place.fault(message));
                return;
            }
            let pattern = NamePattern::new(at.value.as_str());
            for (other_group, other, place) in &earlier {
                if may_meet(&pattern, other) && pattern.overlaps(other) {
                    faults.push(at.place.fault(format!(
                        "groups `{}` and `{}` overlap: a VM can match both \"{}\" ({}:{}) and \"{text}\"",
                        printable(other_group),
                        printable(group),
                        printable(other.as_str()),
                        place.file,
                        place.line
                    )));
                }
            }
            if own.insert(pattern, &at.place).is_some() {
                let group = printable(group);
                let message = format!("pattern \"{text}\" stands twice in group `{group}`");
                faults.push(at.place.fault(message));
            }
        }
        earlier.extend(own.into_iter().map(|(pattern, place)| (group.as_str(), pattern, place)));
    }
}

/// A cheap test that excludes most pairs: the texts before the first wildcard must agree.
fn may_meet(a: &NamePattern, b: &NamePattern) -> bool {
    let prefix = |p: &NamePattern| p.as_str().find(['*', '?']).unwrap_or(p.as_str().len());
    let shared = prefix(a).min(prefix(b));
    a.as_str().as_bytes()[..shared] == b.as_str().as_bytes()[..shared]
}

fn group_of<'d>(vm: &str, draft: &'d Draft) -> Option<(&'d String, &'d GroupDraft)> {
    let vm = VmName::from(vm);
    draft.groups.iter().find(|(_, group)| {
        let patterns = group.vms.iter().flat_map(|list| &list.value);
        patterns.map(|at| NamePattern::new(at.value.as_str())).any(|p| p.matches(&vm))
    })
}

/// A user that two groups name does not distinguish their VMs.
fn no_user_of_two_groups(draft: &Draft, faults: &mut Vec<Fault>) {
    let mut known: BTreeMap<&str, (&str, &SourceLocation)> = BTreeMap::new();
    for (name, group) in &draft.groups {
        for user in group.users.iter().flat_map(|list| &list.value) {
            match known.get(user.value.as_str()) {
                Some((other, place)) if other != name => {
                    let (shown, line) = (printable(&user.value), place.line);
                    faults.push(user.place.fault(format!(
                        "user {shown} is of group `{}` already (line {line}): a user that two \
                         groups share tells their VMs not apart; give each group a directory of \
                         its own for its QMP sockets instead",
                        printable(other)
                    )));
                }
                _ => drop(known.insert(&user.value, (name, &user.place))),
            }
        }
    }
}

fn vm_is_in_a_group(name: &str, vm: &VmDraft, draft: &Draft, faults: &mut Vec<Fault>) {
    let shown = printable(name);
    if name.contains(['*', '?']) {
        let message =
            format!("[vm.\"{shown}\"] names one VM; limits for many belong in their [group.…]");
        faults.push(vm.place.fault(message));
        return;
    }
    if let Some((_, group)) = group_of(name, draft) {
        ordered(&vm.limits, Some(&group.limits), faults);
        return;
    }
    ordered(&vm.limits, None, faults);
    // A missing or faulty list might contain the VM, and so might one with labels.
    let is_known = |list: &Located<Vec<Located<String>>>| {
        let mut patterns = list.value.iter().map(|at| NamePattern::new(at.value.as_str()));
        !list.value.is_empty() && !patterns.any(|pattern| pattern.is_of_labels())
    };
    let lists_are_known = draft.groups.values().all(|g| g.vms.as_ref().is_some_and(is_known));
    if lists_are_known {
        let message =
            format!("no group's `vms` match \"{shown}\": this table would have no effect");
        faults.push(vm.place.fault(message));
    }
}

/// The guarantees to VMs that are named one by one must fit into the tenant's budget.
fn budget_covers_promises(name: &str, group: &GroupDraft, draft: &Draft, faults: &mut Vec<Fault>) {
    let Some(budget) = &group.budget else { return };
    let literal = group.vms.iter().flat_map(|list| &list.value).map(|at| at.value.as_str());
    let mut named: Vec<&str> = literal
        .filter(|text| !text.contains(['*', '?']) && !NamePattern::new(*text).is_of_labels())
        .collect();
    let own = draft.vms.keys().filter(|vm| !vm.contains(['*', '?']));
    named.extend(
        own.map(String::as_str)
            .filter(|vm| group_of(vm, draft).is_some_and(|(found, _)| found == name)),
    );
    named.sort_unstable();
    named.dedup();
    let base = |vm: &&str| {
        let own = draft.vms.get(*vm).and_then(|vm| vm.limits.base.as_ref());
        own.or(group.limits.base.as_ref()).map(|at| at.value)
    };
    let promised: Bytes = named.iter().filter_map(base).sum();
    if promised > budget.value {
        faults.push(budget.place.fault(format!(
            "`budget` of {} is less than the {promised} that its named VMs are guaranteed (the sum of \
             their `base`)",
            budget.value
        )));
    }
}

impl From<GroupDraft> for GroupSpec {
    fn from(draft: GroupDraft) -> Self {
        let patterns = draft.vms.into_iter().flat_map(|list| list.value);
        let users = draft.users.into_iter().flat_map(|list| list.value);
        let tables = draft.tables.into_iter().flat_map(|list| list.value);
        let policy = draft.policy.unwrap_or_default();
        // `balance` knows the value of memory only for VMs that the host pages out.
        let is_paged = policy == Policy::Balance;
        let usual_cold = if is_paged { ColdSpec::WhenNeeded } else { ColdSpec::Off };
        Self {
            policy,
            vms: patterns.map(|at| NamePattern::new(at.value)).collect(),
            users: users.map(|at| at.value).collect(),
            budget: draft.budget.map(|at| at.value),
            limits: draft.limits.into(),
            tracking: draft.tracking.unwrap_or_default(),
            attach: draft.attach.unwrap_or_default(),
            dedup: draft.dedup.unwrap_or_default(),
            tables: tables.map(|at| at.value.into()).collect(),
            free_pages: draft.free_pages.unwrap_or_default(),
            cold: draft.cold.unwrap_or(usual_cold),
            lend: draft.lend.unwrap_or_default(),
        }
    }
}

impl From<VmDraft> for VmSpec {
    fn from(draft: VmDraft) -> Self {
        let usual = ShareSpec::default();
        let share = ShareSpec {
            weight: draft.weight.unwrap_or(usual.weight),
            priority: draft.priority.unwrap_or(usual.priority),
        };
        Self { limits: draft.limits.into(), swap: draft.swap, share }
    }
}

impl From<LimitsDraft> for LimitsSpec {
    fn from(draft: LimitsDraft) -> Self {
        let value = |at: Option<Located<Bytes>>| at.map(|at| at.value);
        Self { min: value(draft.min), base: value(draft.base), max: value(draft.max) }
    }
}
