//! `overbook vm [NAME]`: the VMs in a table, or one in full.
//!
//! Host view and guest view are labelled: the two never agree, and each is right in its own way.

use model::Millis;

use super::{
    context::Context,
    error::CliError,
    output::Output,
    table::{Column, rate, size, table},
    when,
};
use crate::{client::path_of, http::wire::VmStatus};

const COLUMNS: [Column; 9] = [
    ("VM", false),
    ("GROUP", false),
    ("MAY USE", true),
    ("TARGET", true),
    ("HOST:USED", true),
    ("GUEST:AVAIL", true),
    ("GUEST:SWAP", true),
    ("STATE", false),
    ("NEWEST REASON", false),
];

pub(super) fn run(context: &Context, name: Option<&str>, json: bool) -> Result<Output, CliError> {
    let client = context.client()?;
    let Some(name) = name else {
        let vms: Vec<VmStatus> = client.get("/v1/vms")?;
        return if json { Output::json(&vms) } else { Ok(Output::text(&table_of(&vms))) };
    };
    let vm: VmStatus = client.get(&path_of("vms", name))?;
    if json { Output::json(&vm) } else { Ok(Output::text(&in_full(&vm))) }
}

/// All VMs in a table.
pub(super) fn table_of(vms: &[VmStatus]) -> String {
    if vms.is_empty() {
        return "no VM was found; `host.qmp` in the configuration says where to look\n".to_owned();
    }
    let row = |vm: &VmStatus| {
        vec![
            vm.name.clone(),
            vm.group.clone().unwrap_or_else(|| "-".to_owned()),
            size(vm.balloon_bytes),
            size(vm.target_bytes),
            size(vm.used_bytes),
            size(vm.guest_available_bytes),
            rate(vm.swap_bytes_per_second),
            vm.state().to_owned(),
            vm.headline(),
        ]
    };
    table(&COLUMNS, &vms.iter().map(row).collect::<Vec<_>>())
}

fn in_full(vm: &VmStatus) -> String {
    let mut lines = vec![
        ("name", vm.name.clone()),
        ("group", vm.group.clone().unwrap_or_else(|| "none: watched, not managed".to_owned())),
        ("state", vm.state().to_owned()),
        ("ram", size(Some(vm.ram_bytes))),
        ("min", size(vm.min_bytes)),
        ("base", size(vm.base_bytes)),
        ("max", size(vm.max_bytes)),
        ("may use", size(vm.balloon_bytes)),
        ("target", size(vm.target_bytes)),
        ("migration", vm.migration.clone()),
        ("host view: occupied", size(vm.used_bytes)),
        ("guest view: total", size(vm.guest_total_bytes)),
        ("guest view: available", size(vm.guest_available_bytes)),
        ("guest view: free", size(vm.guest_free_bytes)),
        ("guest view: page cache", size(vm.guest_disk_caches_bytes)),
        ("guest view: swapping", rate(vm.swap_bytes_per_second)),
    ];
    let age = vm.stats_age_ms.map_or_else(|| "none".to_owned(), |ms| Millis(ms).to_string());
    lines.push(("guest view: age", age));
    lines.extend(vm.link_error.iter().map(|why| ("unreachable", why.clone())));
    lines
        .extend(vm.unsupported.iter().map(|(what, why)| ("unsupported", format!("{what}: {why}"))));
    lines.extend(vm.last_error.iter().map(|why| ("QEMU refused", why.clone())));
    lines.extend(vm.change.iter().map(|_| ("now", vm.headline())));
    lines.extend(vm.refusals.iter().map(|words| ("refused", words.text.clone())));
    let last = vm.last_change.iter();
    lines.extend(
        last.map(|last| ("last change", format!("{} {}", when::utc(last.wall_ms), last.text))),
    );
    lines.iter().map(|(label, value)| format!("{label:<24}{value}\n")).collect()
}
