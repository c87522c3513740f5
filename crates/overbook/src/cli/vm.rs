//! `overbook vm [NAME]`: all VMs in a table, one VM in full, or one VM's miss-ratio curve.
//!
//! The host's view and the guest's are labelled, because they never agree and both are right.

use std::path::PathBuf;

use api::client::path_of;
use api::wire::{
    ColdStatus, DedupStatus, DiskStatus, FreePagesStatus, MissRatioCurve, OverloadStatus,
    ShimStatus, TrackingStatus, VmStatus,
};
use clap::Args;
use model::{Bytes, Millis, date::utc, view::SWITCHED_OFF};

use super::{
    Format,
    context::Context,
    error::CliError,
    output::Output,
    screen, status,
    table::{Column, TextTable, rate, size},
};
use crate::curve_chart::{Curve, CurveChart};
use crate::line_plot::PlotScale;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Its name; all without one
    #[arg(add = super::names::vms())]
    name: Option<String>,
    /// Draw its miss-ratio curve: which share of its memory references would miss with less memory
    #[arg(long, requires = "name")]
    mrc: bool,
    /// Write the curve as a plot, too
    #[arg(long, value_name = "FILE.svg", requires = "mrc")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// A column of a table of VMs: its title, whether it is aligned to the right, and its cells.
pub(crate) type VmColumn = (&'static str, bool, fn(&VmStatus) -> String);

/// All columns, from left to right.
pub(crate) const COLUMNS: [VmColumn; 11] = [
    ("VM", false, |vm| vm.name.clone()),
    ("GROUP", false, |vm| vm.group.clone().unwrap_or_else(|| "-".to_owned())),
    ("MAY USE", true, |vm| size(vm.balloon_bytes)),
    ("TARGET", true, |vm| size(vm.target_bytes)),
    ("HOST:USED", true, |vm| size(vm.used_bytes)),
    ("WSS", true, |vm| size(vm.working_set_bytes())),
    ("SAVED", true, |vm| size(vm.saved_bytes())),
    ("GUEST:AVAIL", true, |vm| size(vm.guest_available_bytes)),
    ("GUEST:SWAP", true, |vm| rate(vm.swap_bytes_per_second)),
    ("STATE", false, |vm| vm.state().to_owned()),
    ("REASON", false, VmStatus::headline),
];
/// Left out of a narrow table, in this order.
const DROPPABLE: [&str; 9] = [
    "SAVED",
    "GUEST:AVAIL",
    "WSS",
    "GUEST:SWAP",
    "GROUP",
    "TARGET",
    "HOST:USED",
    "MAY USE",
    "STATE",
];

const NO_VM: &str = "no VM was found; `host.qmp` in the configuration says where to look\n";

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let json = arguments.format.json;
    let client = context.client()?;
    let Some(name) = &arguments.name else {
        let vms: Vec<VmStatus> = client.get("/v1/vms")?;
        if json {
            return Output::json(&vms);
        }
        return Ok(Output::text(&table_of(&vms, screen::width())));
    };
    if arguments.mrc {
        let curve: MissRatioCurve = client.get(&format!("{}/curve", path_of("vms", name)))?;
        return show_curve(&curve, arguments);
    }
    let vm: VmStatus = client.get(&path_of("vms", name))?;
    if json { Output::json(&vm) } else { Ok(Output::text(&in_full(&vm))) }
}

/// All VMs in a table. With a `width` no line is longer.
pub(super) fn table_of(vms: &[VmStatus], width: Option<usize>) -> String {
    if vms.is_empty() {
        return status::fitted(NO_VM, width);
    }
    let vms: Vec<&VmStatus> = vms.iter().collect();
    fitted(&vms, &COLUMNS, &DROPPABLE, width).text()
}

/// These columns of the VMs, of which those in `droppable` are left out where there is no room.
pub(crate) fn fitted(
    vms: &[&VmStatus],
    columns: &[VmColumn],
    droppable: &[&str],
    width: Option<usize>,
) -> TextTable {
    let titles: Vec<Column> = columns.iter().map(|(title, right, _)| (*title, *right)).collect();
    let row = |vm: &&VmStatus| columns.iter().map(|(_, _, cell)| cell(vm)).collect();
    let rows: Vec<Vec<String>> = vms.iter().map(row).collect();
    TextTable::fitted(&titles, &rows, droppable, width)
}

fn in_full(vm: &VmStatus) -> String {
    let mut lines = vec![
        ("name", vm.name.clone()),
        (
            "group",
            vm.group
                .clone()
                .unwrap_or_else(|| "none: it is watched, and its memory is left alone".to_owned()),
        ),
        ("state", vm.state().to_owned()),
        ("ram", size(Some(vm.ram_bytes))),
        ("min", size(vm.min_bytes)),
        ("base", size(vm.base_bytes)),
        ("max", size(vm.max_bytes)),
        ("may use", size(vm.balloon_bytes)),
        ("target", size(vm.target_bytes)),
        ("migration", vm.migration.clone()),
        ("shim", vm.shim.as_ref().map_or_else(|| "-".to_owned(), ShimStatus::words)),
        ("host view: occupied", size(vm.used_bytes)),
        ("host view: working set", working_set(vm.tracking.as_ref())),
        ("host view: shared", vm.dedup.as_ref().map_or_else(|| "-".to_owned(), shared)),
        ("host view: freed", vm.free_pages.as_ref().map_or_else(|| "-".to_owned(), freed)),
        ("host view: paging", vm.cold.as_ref().map_or_else(|| "-".to_owned(), ColdStatus::words)),
        ("guest view: total", size(vm.guest_total_bytes)),
        ("guest view: available", size(vm.guest_available_bytes)),
        ("guest view: free", size(vm.guest_free_bytes)),
        ("guest view: page cache", size(vm.guest_disk_caches_bytes)),
        ("guest view: swapping", rate(vm.swap_bytes_per_second)),
        ("guest view: OOM kills", kills(vm.guest_oom_kills_total)),
        ("deflate-on-oom", on_or_off(vm.deflates_on_oom).to_owned()),
    ];
    if !vm.labels.is_empty() {
        lines.insert(1, ("labels", vm.labels.join(", ")));
    }
    lines.splice(1..1, vm.title.iter().map(|title| ("title", title.clone())));
    let age = vm.stats_age_ms.map_or_else(|| "none".to_owned(), |ms| Millis(ms).to_string());
    lines.push(("guest view: age", age));
    lines.extend(vm.memory_limits.iter().map(|limit| ("its cgroup", limit.words())));
    if vm.devices_bytes > 0 {
        let devices = Bytes(vm.devices_bytes);
        lines.push(("other memory", format!("{devices} of devices that its balloon cannot reach")));
    }
    lines.extend(vm.tracking.iter().map(|tracking| ("tracking", cost(tracking))));
    lines.extend(vm.dedup.iter().map(|dedup| ("dedup", merged(dedup))));
    lines.extend(vm.free_pages.iter().map(|free| ("free pages", taken(free))));
    lines.extend(vm.disks.iter().map(|(name, of)| ("disk", disk(name, of))));
    lines.extend(vm.overload.iter().map(|overload| ("overload", overloaded(overload))));
    lines.extend(vm.link_error.iter().map(|why| ("no connection", why.clone())));
    let (off, cannot): (Vec<_>, Vec<_>) =
        vm.unsupported.iter().partition(|(_, why)| why.starts_with(SWITCHED_OFF));
    lines.extend(cannot.iter().map(|(what, why)| ("unsupported", format!("{what}: {why}"))));
    if !off.is_empty() {
        let names: Vec<&str> = off.iter().map(|(what, _)| what.as_str()).collect();
        lines.push(("switched off", names.join(", ")));
    }
    lines.extend(vm.last_error.iter().map(|why| ("QEMU refused", why.clone())));
    lines.extend(vm.change.iter().map(|_| ("now", vm.headline())));
    lines.extend(vm.refusals.iter().map(|words| ("refused", words.text.clone())));
    let last = vm.last_change.iter();
    lines.extend(last.map(|last| ("last change", format!("{} {}", utc(last.wall_ms), last.text))));
    lines.iter().map(|(label, value)| format!("{label:<24}{value}\n")).collect()
}

fn kills(count: Option<u64>) -> String {
    count.map_or_else(|| "its kernel does not tell".to_owned(), |count| count.to_string())
}

const fn on_or_off(is_on: Option<bool>) -> &'static str {
    match is_on {
        Some(true) => "on: the guest takes memory back by itself before its kernel kills a program",
        Some(false) => "off",
        None => "-",
    }
}

fn working_set(tracking: Option<&TrackingStatus>) -> String {
    match tracking {
        None => "-".to_owned(),
        Some(tracking) if tracking.working_set_bytes.is_none() => "not known yet".to_owned(),
        Some(tracking) if tracking.swapped_bytes > 0 => {
            let swapped = Bytes(tracking.swapped_bytes);
            format!("{}, {swapped} of it in its swap", size(tracking.working_set_bytes))
        }
        Some(tracking) => size(tracking.working_set_bytes),
    }
}

fn cost(tracking: &TrackingStatus) -> String {
    let seen = tracking.seen_through_bytes;
    let from = seen.map(|seen| format!("from outside, through {} of its memory: ", Bytes(seen)));
    format!(
        "{}{:.2} % of one vCPU and {:.0} traps/s in the last half minute; {:.0} references/s, known {} before the tick",
        from.unwrap_or_default(),
        tracking.cost_ratio * 100.0,
        tracking.traps_per_second,
        tracking.references_per_second,
        Millis(tracking.age_ms),
    )
}

fn shared(dedup: &DedupStatus) -> String {
    format!("{}, which saves {}", Bytes(dedup.shared_bytes), Bytes(dedup.saved_bytes))
}

fn merged(dedup: &DedupStatus) -> String {
    format!(
        "{} merged, {} of it written since, {} of zeros dropped, {} passes; {} before the tick",
        Bytes(dedup.merged_bytes_total),
        Bytes(dedup.broken_bytes_total),
        Bytes(dedup.dropped_bytes_total),
        dedup.passes_total,
        Millis(dedup.age_ms),
    )
}

fn freed(free: &FreePagesStatus) -> String {
    let taken = free
        .take
        .as_ref()
        .map(|reason| format!("; all but {} is taken: {}", size(free.keep_bytes), reason.text));
    let (freed, lazy) = (Bytes(free.freed_bytes), Bytes(free.lazy_bytes));
    format!("{freed}, of which the host can take {lazy}{}", taken.unwrap_or_default())
}

fn taken(free: &FreePagesStatus) -> String {
    format!(
        "{} handed over, {} taken, {} dropped by the kernel, {} touched since, {} in use again; {} before the tick",
        Bytes(free.handed_over_bytes_total),
        Bytes(free.taken_bytes_total),
        Bytes(free.dropped_bytes_total),
        Bytes(free.refaulted_bytes_total),
        Bytes(free.taken_back_bytes_total),
        Millis(free.age_ms),
    )
}

fn overloaded(overload: &OverloadStatus) -> String {
    format!(
        "{}: {}; {} transient and {} sustained ones in {} intervals",
        overload.severity,
        overload.reason.text,
        overload.transient_overloads_total,
        overload.sustained_overloads_total,
        overload.intervals_total,
    )
}

fn disk(name: &str, disk: &DiskStatus) -> String {
    let far = disk.repositories.map_or_else(String::new, |far| {
        format!(
            "; {} in {} repositories, which answered {} of its reads ({} they did not have, {} came \
             too late, {} were forged){}",
            Bytes(far.held_bytes),
            far.connected,
            far.reads_total,
            far.misses_total,
            far.late_total,
            far.forged_total,
            if far.admits { "" } else { ", and get nothing more while the VM has its maximum" },
        )
    });
    format!(
        "{name}: {} reads (half below {} us, 99 % below {} us), {} written, {} errors{far}; {} before \
         the tick; {}",
        disk.reads_total,
        disk.read_median_us,
        disk.read_p99_us,
        Bytes(disk.written_bytes_total),
        disk.errors_total,
        Millis(disk.age_ms),
        disk.made_of,
    )
}

fn show_curve(curve: &MissRatioCurve, arguments: &Arguments) -> Result<Output, CliError> {
    let chart = chart_of(curve);
    if let Some(path) = &arguments.plot {
        std::fs::write(path, chart.svg())
            .map_err(|error| CliError::File { path: path.clone(), error })?;
    }
    if arguments.format.json { Output::json(curve) } else { Ok(Output::text(&chart.terminal())) }
}

#[expect(clippy::cast_precision_loss, reason = "a chart needs three digits")]
fn chart_of(curve: &MissRatioCurve) -> CurveChart {
    let points = curve.points.iter().map(|p| (p.memory_bytes as f64, p.miss_ratio)).collect();
    let words = match curve.swapped_bytes {
        0 => "working set".to_owned(),
        swapped => format!("working set, {} of it in its swap", Bytes(swapped)),
    };
    let working_set = curve.working_set_bytes.map(|bytes| (bytes as f64, words));
    let target = curve.resident_target_bytes;
    let target = target.map(|bytes| (bytes as f64, "in memory at most".to_owned()));
    CurveChart {
        title: format!(
            "miss ratio of {} by memory, {:.0} references/s",
            curve.vm, curve.references_per_second
        ),
        x_axis: "memory",
        x_text: |bytes| format!("{:.0} MiB", bytes / f64::from(1 << 20)),
        x_scale: PlotScale::Binary,
        curves: vec![Curve { name: curve.vm.clone(), points }],
        marks: [working_set, target].into_iter().flatten().collect(),
    }
}
