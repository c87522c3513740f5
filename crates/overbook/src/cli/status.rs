//! `overbook status`: the host, its groups and its VMs on one page, after a verdict in one line.
//!
//! With `--exit-code` the command is a monitoring plugin. These exit codes need the flag, because
//! scripts rely on exit code 0 while the daemon answers.

use std::{thread, time::Duration};

use clap::{Args, value_parser};
use serde::Serialize;

use super::{
    Format, context::Context, error::CliError, fit, group, output::Output, screen, table::size, vm,
};
use api::client::{ApiClient, ClientError};
use api::verdict::HostVerdict;
use api::wire::{HostStatus, SHIM_ADVICE, StatusPage, VmStatus};

/// Indentation of continued lines.
const INDENT: usize = 8;
/// The most VMs that a line names.
const MOST_NAMES: usize = 5;
/// Puts the cursor into the first place of an empty screen.
const CLEAR: &[u8] = b"\x1b[H\x1b[J";

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Show the page again every SECONDS, 2 by default
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "2",
        value_parser = value_parser!(u64).range(1..=86_400),
        conflicts_with_all = ["json", "exit_code"]
    )]
    pub(super) watch: Option<u64>,
    /// Exit as a monitoring plugin does: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN
    #[arg(long)]
    pub(super) exit_code: bool,
    #[command(flatten)]
    pub(super) format: Format,
}

/// The JSON where the daemon did not answer: only the verdict of the page.
#[derive(Serialize)]
struct JudgedFailure {
    verdict: HostVerdict,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    if let Some(seconds) = arguments.watch {
        return watch(&context.client()?, Duration::from_secs(seconds));
    }
    let page = context.client().and_then(|client| Ok(ask(&client)?));
    let verdict = match page {
        Ok(page) => {
            let code = page.verdict.level.exit_code();
            let output = if arguments.format.json {
                Output::json(&page)?
            } else {
                Output::text(&text(&page, screen::width()))
            };
            return Ok(output.with_code(if arguments.exit_code { code } else { 0 }));
        }
        Err(error) if !arguments.exit_code => return Err(error),
        Err(CliError::Client(error)) => HostVerdict::of_failure(&error),
        Err(error) => HostVerdict::unknown(error.to_string()),
    };
    let code = verdict.level.exit_code();
    let output = if arguments.format.json {
        Output::json(&JudgedFailure { verdict })?
    } else {
        Output::text(&fitted(&format!("{}\n", verdict.text), screen::width()))
    };
    Ok(output.with_code(code))
}

fn ask(client: &ApiClient) -> Result<StatusPage, ClientError> {
    client.get("/v1/status")
}

/// Shows the page again and again, until the user ends it or the reader closes the pipe.
///
/// A daemon that no longer answers does not end it: it may be restarting.
fn watch(client: &ApiClient, pause: Duration) -> Result<Output, CliError> {
    let mut answer = Ok(ask(client)?);
    loop {
        let shown = match &answer {
            Ok(page) => text(page, screen::width()),
            Err(error) => {
                let verdict = HostVerdict::of_failure(error).text;
                fitted(&format!("{verdict}\n"), screen::width())
            }
        };
        let output = match screen::size() {
            Some((_, rows)) => Output::text(&first(&shown, rows)).after(CLEAR),
            None => Output::text(&format!("{shown}\n")),
        };
        if !output.write()? {
            return Ok(Output::nothing());
        }
        thread::sleep(pause);
        answer = ask(client);
    }
}

/// The first lines, as many as a screen of `rows` rows holds.
fn first(text: &str, rows: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() < rows {
        return text.to_owned();
    }
    let shown = rows.saturating_sub(2);
    let more = lines.len() - shown;
    lines[..shown].join("\n") + &format!("\n… {more} more lines; `overbook top` scrolls")
}

/// The page in words. With a `width` no line is longer.
fn text(page: &StatusPage, width: Option<usize>) -> String {
    let StatusPage { verdict, host: of_host, groups, vms: all } = page;
    let mut lines = format!("{}\n{}", verdict.text, host(of_host));
    // The verdict's line has the first one.
    for trouble in verdict.troubles.iter().skip(1) {
        lines += &format!("  !     {}\n", trouble.text);
    }
    lines.extend(of_shims(all));
    let tables = format!("\n{}\n{}", group::table_of(groups, width), vm::table_of(all, width));
    fitted(&lines, width) + &tables
}

/// The VMs whose shims are of another release.
fn of_shims(vms: &[VmStatus]) -> Option<String> {
    let differs = |vm: &&VmStatus| vm.shim.as_ref().is_some_and(|shim| shim.differs.is_some());
    let names: Vec<&str> = vms.iter().filter(differs).map(|vm| vm.name.as_str()).collect();
    let (first, more) = names.split_at(names.len().min(MOST_NAMES));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let names = first.join(", ") + &more;
    (!first.is_empty())
        .then(|| format!("        the shim is of another release in {names}: {SHIM_ADVICE}\n"))
}

/// The lines, wrapped at `width`.
pub(super) fn fitted(lines: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return lines.to_owned() };
    fit::wrap(lines, width, INDENT).iter().map(|line| format!("{line}\n")).collect()
}

/// The memory that the host has left.
pub(crate) fn available(host: &HostStatus) -> String {
    format!("{} of {} available", size(host.available_bytes), size(host.total_bytes))
}

/// The mode, and whether Overbook is paused.
pub(crate) fn mode(host: &HostStatus) -> String {
    format!("mode {}{}", host.mode, if host.paused { ", PAUSED" } else { "" })
}

/// The age of the last tick.
pub(crate) fn last_tick(host: &HostStatus) -> String {
    format!("tick {} ago", model::Millis(host.tick_age_ms))
}

/// The number of VMs, and of those in trouble.
pub(crate) fn vms(host: &HostStatus) -> String {
    let (found, silent, stuck) = (host.vms, host.unreachable_vms, host.uncooperative_vms);
    format!("{found} VMs, {silent} unreachable, {stuck} uncooperative")
}

/// The host in a few lines.
fn host(host: &HostStatus) -> String {
    let mut text = format!(
        "host    {}, {} of {} swap free; {}; {}\n",
        available(host),
        size(host.swap_free_bytes),
        size(host.swap_total_bytes),
        mode(host),
        last_tick(host),
    );
    if let (Some(some), Some(full)) = (host.psi_some_avg10_percent, host.psi_full_avg10_percent) {
        text += &format!("        memory pressure in 10 s: some {some:.1} %, full {full:.1} %\n");
    }
    text += &format!("        {}\n", vms(host));
    if let Some(name) = &host.pool_host {
        let moving = match host.pool_moving.as_slice() {
            [] => "no migrations in progress".to_owned(),
            moving => format!("{} come or go", moving.join(", ")),
        };
        text += &format!("        in the pool as {name}: {moving}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fixture;
    use api::shown::TickView;

    /// The fixture's page with 100 VMs in a group.
    fn crowded() -> StatusPage {
        let mut page = StatusPage::of(&TickView::first(Arc::new(fixture::published())));
        page.host.tick_age_ms = 300;
        let vm = page.vms[1].clone();
        let named = |n: u32| format!("web-customer-frontend-{n:04}");
        page.vms = (0..100).map(|n| api::wire::VmStatus { name: named(n), ..vm.clone() }).collect();
        page.groups[0].vms = (0..100).map(named).collect();
        page.verdict = HostVerdict::judge(&page.host, &page.groups, &page.vms);
        page
    }

    fn shown(width: Option<usize>) -> String {
        text(&crowded(), width)
    }

    #[test]
    fn a_hundred_vms_fit_a_terminal_and_stay_distinct() {
        for width in [40, 80, 132] {
            let text = shown(Some(width));
            let long: Vec<&str> =
                text.lines().filter(|line| line.chars().count() > width).collect();
            assert!(long.is_empty(), "{width}: {long:#?}");
            let names = text.lines().filter(|line| line.starts_with("web-cust"));
            let names: std::collections::BTreeSet<_> =
                names.map(|line| line.split_whitespace().next()).collect();
            assert_eq!(names.len(), 100, "{text}");
        }
        assert!(shown(Some(80)).lines().count() < 130, "{}", shown(Some(80)));
    }

    #[test]
    fn a_page_of_80_columns_letter_by_letter() {
        let page = StatusPage::of(&TickView::first(Arc::new(fixture::published())));
        let mut page = page;
        page.host.tick_age_ms = 300;
        let text = text(&page, Some(80));
        let expected = "\
WARNING: db-1: no connection to its QEMU: no such socket (and 2 more)
host    6 GiB of 16 GiB available, 1000 MiB of 1 GiB swap free; mode enforce;
        tick 300 ms ago
        memory pressure in 10 s: some 0.5 %, full 0.0 %
        3 VMs, 1 unreachable, 1 uncooperative
  !     web-2: uncooperative: its balloon stands at 384 MiB and has not moved
        towards 128 MiB for 40 s; next try in 60 s
  !     web-2: it cannot be tracked: QEMU was started without Overbook's shim

GROUP  POLICY   BUDGET     USED  UNTOUCHED  RESERVE  SURPLUS  DEFICIT  VMS
web    demand  580 MiB  480 MiB     12 MiB   48 MiB  100 MiB      0 B    2
group shop lends group web 60 MiB: web-1 is short of memory (it swaps 3.1
        MiB/s), and the lender leaves 300 MiB idle
worker of web: process 4711, 6 MiB, 1.5 s of CPU time, started again once; the
        last one the worker ended (signal: 9); tracking may take 1 % of a vCPU
        of each VM
shared pages of web: the pool takes 10 MiB and saves 30 MiB; scanned at 25
        pages/ms: the host's CPUs are 40 % busy, so scanning slows no VM
VMs of web without the shim: kernel KSM merges them and saves 200 MiB on this
        host
freed memory of web: the host can take 50 MiB; 300 MiB was freed, 215 MiB taken,
        of which VMs touched 40 MiB again
cache of web: it holds 60 MiB, 75 % of the pages read were found in it, and 90 %
        would be in 128 MiB; it may hold 70 MiB: the group has 70 MiB that no VM
        needs now

VM     GROUP  MAY USE   TARGET  HOST:USED  STATE          REASON
db-1   -            -        -          -  unreachable    no connection to its …
web-1  web    192 MiB  202 MiB    180 MiB  ok             target raised to 202 …
web-2  web    384 MiB  128 MiB    300 MiB  uncooperative  uncooperative: its ba…
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_group_counts_its_vms_instead_of_naming_them() {
        let text = shown(None);
        let row = text.lines().find(|line| line.starts_with("web ")).unwrap();
        assert!(row.ends_with(" 100"), "{row}");
    }

    #[test]
    fn a_pipe_gets_whole_sentences() {
        let text = shown(None);
        assert!(text.contains("web-customer-frontend-0017"), "{text}");
        assert!(text.contains("and the group has 100 MiB to hand out"), "{text}");
    }

    #[test]
    fn shims_of_another_release_are_named_and_are_no_trouble() {
        let mut page = crowded();
        let before = page.verdict.text.clone();
        assert_eq!(of_shims(&page.vms), None);
        for vm in &mut page.vms[..7] {
            let differs = Some("its shim is of release 0.0.1, and this Overbook is 1".to_owned());
            vm.shim = Some(api::wire::ShimStatus { differs, ..Default::default() });
        }
        page.verdict = HostVerdict::judge(&page.host, &page.groups, &page.vms);
        let shown = text(&page, None);
        let line = shown.lines().find(|line| line.contains("the shim is of another release in"));
        let line = line.unwrap_or_else(|| panic!("{shown}"));
        assert!(
            line.ends_with("frontend-0004 and 2 more: restart the VM when convenient"),
            "{line}"
        );
        assert_eq!(page.verdict.text, before);
    }

    #[test]
    fn a_screen_shows_the_first_lines_and_counts_the_rest() {
        let text = "a\nb\nc\nd\n";
        assert_eq!(first(text, 5), text);
        assert_eq!(first(text, 4), "a\nb\n… 2 more lines; `overbook top` scrolls");
    }
}
