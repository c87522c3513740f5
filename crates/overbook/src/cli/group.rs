//! `overbook group [NAME]`: the groups' memory accounts.

use api::client::path_of;
use api::wire::{CacheSize, CacheStatus, GroupDedup, GroupFreePages, GroupStatus, WorkerStatus};
use model::Bytes;

use super::{
    context::Context,
    error::CliError,
    output::Output,
    screen, status,
    table::{Column, TextTable, size},
};

const COLUMNS: [Column; 9] = [
    ("GROUP", false),
    ("POLICY", false),
    ("BUDGET", true),
    ("USED", true),
    ("UNTOUCHED", true),
    ("RESERVE", true),
    ("SURPLUS", true),
    ("DEFICIT", true),
    ("VMS", true),
];
/// Left out of a narrow table, in this order.
const DROPPABLE: [&str; 6] = ["RESERVE", "POLICY", "SURPLUS", "UNTOUCHED", "VMS", "DEFICIT"];

const NO_GROUP: &str = "no group is configured: every VM is watched, and no memory is moved\n";

pub(super) fn run(context: &Context, name: Option<&str>, json: bool) -> Result<Output, CliError> {
    let client = context.client()?;
    let groups: Vec<GroupStatus> = match name {
        Some(name) => {
            let group: GroupStatus = client.get(&path_of("groups", name))?;
            if json {
                return Output::json(&group);
            }
            let names = match group.vms.as_slice() {
                [] => "none".to_owned(),
                names => names.join(", "),
            };
            let members = format!("VMs of {name}: {names}\n");
            let width = screen::width();
            let text = table_of(&[group], width) + &status::fitted(&members, width);
            return Ok(Output::text(&text));
        }
        None => client.get("/v1/groups")?,
    };
    if json {
        return Output::json(&groups);
    }
    Ok(Output::text(&table_of(&groups, screen::width())))
}

/// All groups in a table. With a `width` no line is longer.
pub(super) fn table_of(groups: &[GroupStatus], width: Option<usize>) -> String {
    if groups.is_empty() {
        return status::fitted(NO_GROUP, width);
    }
    let row = |group: &GroupStatus| {
        vec![
            group.name.clone(),
            group.policy.clone(),
            size(Some(group.budget_bytes)),
            size(Some(group.used_bytes)),
            size(Some(group.promised_bytes)),
            size(Some(group.reserve_bytes)),
            size(Some(group.surplus_bytes)),
            size(Some(group.deficit_bytes)),
            group.vms.len().to_string(),
        ]
    };
    let workers = groups
        .iter()
        .filter_map(|group| Some(worker(&group.name, group.worker.as_ref()?, &group.tracking)));
    let dedup = groups.iter().map(|group| dedup(&group.name, &group.dedup));
    let freed = groups.iter().filter_map(|group| freed(&group.name, group.free_pages));
    let caches = groups.iter().filter_map(|group| Some(cache(&group.name, group.cache.as_ref()?)));
    let below: String = over(groups)
        .chain(loans(groups))
        .chain(workers)
        .chain(dedup)
        .chain(freed)
        .chain(caches)
        .collect();
    let rows: Vec<_> = groups.iter().map(row).collect();
    TextTable::fitted(&COLUMNS, &rows, &DROPPABLE, width).text() + &status::fitted(&below, width)
}

/// Lines for the groups that stay over their budget.
fn over(groups: &[GroupStatus]) -> impl Iterator<Item = String> {
    groups.iter().filter_map(|group| {
        let why = group.stays_over.as_ref()?;
        Some(format!("{}: {}\n", group.name, why.text))
    })
}

/// The loans of these groups; a loan between two of them is listed under its lender.
fn loans(groups: &[GroupStatus]) -> impl Iterator<Item = String> {
    let is_shown = |lender: &str| groups.iter().any(|group| group.name == lender);
    groups.iter().flat_map(move |group| {
        let loans = group.loans.iter();
        let own = loans.filter(move |loan| loan.lender == group.name || !is_shown(&loan.lender));
        own.map(|loan| loan.words() + "\n")
    })
}

/// Memory that the group's VMs share, and what KSM does for VMs without the shim.
fn dedup(group: &str, dedup: &GroupDedup) -> String {
    let ksm = dedup.ksm.as_ref();
    let ksm = ksm.map(|ksm| format!("VMs of {group} without the shim: {}\n", ksm.words()));
    pool(group, dedup).into_iter().chain(ksm).collect()
}

/// Memory that its VMs have freed. `None`: free pages were never handed over.
fn freed(group: &str, free: GroupFreePages) -> Option<String> {
    let [lazy, handed_over, taken, refaulted] = [
        free.lazy_bytes,
        free.handed_over_bytes_total,
        free.taken_bytes_total,
        free.refaulted_bytes_total,
    ]
    .map(Bytes);
    (!handed_over.is_zero()).then(|| {
        format!(
            "freed memory of {group}: the host can take {lazy}; {handed_over} was freed, {taken} taken, of which VMs touched {refaulted} again\n"
        )
    })
}

/// The group's spare memory that caches pages of its disks.
fn cache(group: &str, cache: &CacheStatus) -> String {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let hits = cache.hit_ratio().map_or_else(
        || "nothing was read yet".to_owned(),
        |ratio| format!("{} of the pages read were found in it", percent(ratio)),
    );
    let more = cache.twice().map(|CacheSize { bytes, hit_ratio }| {
        format!(", and {} would be in {}", percent(hit_ratio.into()), Bytes(bytes))
    });
    let quota = match (cache.quota_bytes, &cache.quota) {
        (Some(bytes), Some(why)) => format!("it may hold {}: {}", Bytes(bytes), why.text),
        _ => "it may hold nothing: Overbook is paused".to_owned(),
    };
    let (held, more) = (Bytes(cache.held_bytes), more.unwrap_or_default());
    format!("cache of {group}: it holds {held}, {hits}{more}; {quota}\n")
}

/// The pool of shared pages. `None`: no pages are shared, and none are to be.
fn pool(group: &str, dedup: &GroupDedup) -> Option<String> {
    let scan = dedup.scan.as_ref()?;
    let (pool, saved) = (Bytes(dedup.pool_bytes), Bytes(dedup.saved_bytes));
    let is_used = scan.pages_per_ms.is_some() || !pool.is_zero() || !saved.is_zero();
    let words = scan.words();
    let known = match (&dedup.why_not_known, dedup.known_pages) {
        (Some(why), _) => format!("; its page tables cannot be used: {why}"),
        (None, 0) => String::new(),
        (None, pages) => format!("; {pages} pages are known before a VM runs"),
    };
    is_used.then(|| {
        format!(
            "shared pages of {group}: the pool takes {pool} and saves {saved}; {words}{known}\n"
        )
    })
}

/// The memory and CPU time of the group's worker, and its faults.
fn worker(group: &str, worker: &WorkerStatus, tracking: &str) -> String {
    let state = match worker.pid {
        Some(pid) => format!("process {pid}, {}", Bytes(worker.resident_bytes)),
        None => "not running".to_owned(),
    };
    let restarts = match worker.restarts {
        0 => String::new(),
        1 => ", started again once".to_owned(),
        n => format!(", started again {n} times"),
    };
    let error = worker.last_error.iter().map(|why| format!("; the last one {why}"));
    let error: String = error.collect();
    let cpu = worker.cpu_seconds;
    let payer = worker.charged_to.iter().map(|payer| format!(", now charged to group {payer}"));
    let payer: String = payer.collect();
    format!(
        "worker of {group}: {state}, {cpu:.1} s of CPU time{payer}{restarts}{error}; \
         tracking may take {tracking} of a vCPU of each VM\n"
    )
}
