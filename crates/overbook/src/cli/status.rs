//! `overbook status`: the host, its groups and its VMs on one page.

use super::{context::Context, error::CliError, group, output::Output, table::size, vm};
use api::wire::{HostStatus, StatusPage};

pub(super) fn run(context: &Context, json: bool) -> Result<Output, CliError> {
    let page: StatusPage = context.client()?.get("/v1/status")?;
    if json {
        return Output::json(&page);
    }
    let groups = group::table_of(&page.groups);
    let vms = vm::table_of(&page.vms);
    Ok(Output::text(&format!("{}\n{groups}\n{vms}", host(&page.host))))
}

/// The host in a few lines, with a line for each trouble.
fn host(host: &HostStatus) -> String {
    let paused = if host.paused { ", PAUSED" } else { "" };
    let mut text = format!(
        "host    {} of {} available, {} of {} swap free; mode {}{paused}; tick {} ago\n",
        size(host.available_bytes),
        size(host.total_bytes),
        size(host.swap_free_bytes),
        size(host.swap_total_bytes),
        host.mode,
        model::Millis(host.tick_age_ms),
    );
    if let (Some(some), Some(full)) = (host.psi_some_avg10_percent, host.psi_full_avg10_percent) {
        text += &format!("        memory pressure in 10 s: some {some:.1} %, full {full:.1} %\n");
    }
    let (found, silent, stuck) = (host.vms, host.unreachable_vms, host.uncooperative_vms);
    text += &format!("        {found} VMs, {silent} unreachable, {stuck} uncooperative\n");
    if let Some(name) = &host.pool_host {
        let moving = match host.pool_moving.as_slice() {
            [] => "no migrations in progress".to_owned(),
            moving => format!("{} come or go", moving.join(", ")),
        };
        text += &format!("        in the pool as {name}: {moving}\n");
    }
    let reasons = host.reasons.iter().map(|words| words.text.clone());
    let config =
        host.config_error.iter().map(|e| format!("the newest configuration is not used: {e}"));
    let waits = host.waits_for_restart.iter().cloned();
    let history = host.history_error.iter().map(|e| format!("history is not being kept: {e}"));
    let pool = host.pool_trouble.iter().map(|e| format!("the pool: {e}"));
    for trouble in reasons
        .chain(config)
        .chain(waits)
        .chain(history)
        .chain(pool)
        .chain(host.ksm_trouble.clone())
    {
        text += &format!("  !     {trouble}\n");
    }
    text
}
