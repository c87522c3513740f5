//! Paints a [`ScreenState`]: a pure function onto a buffer of any size.

use api::wire::{GroupStatus, HostStatus, VmStatus};
use model::{Bytes, Millis};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    text::{Line, Span},
    widgets::{Block, Paragraph, Row, Table, TableState, Wrap},
};

use super::{state::ScreenState, watch::Page};

/// Width of a ledger's bar.
const BAR: usize = 24;

/// Paints everything.
pub(super) fn draw(frame: &mut Frame<'_>, state: &ScreenState) {
    let Some(page) = &state.page else {
        frame.render_widget("waiting for the daemon …", frame.area());
        return;
    };
    let groups = u16::try_from(page.groups.len()).unwrap_or(u16::MAX).clamp(1, 6) + 1;
    let rows = [
        Constraint::Length(2),
        Constraint::Length(groups),
        Constraint::Min(4),
        Constraint::Percentage(40),
        Constraint::Length(1),
    ];
    let [top, ledgers, vms, words, bottom] = Layout::vertical(rows).areas(frame.area());
    frame.render_widget(host(&page.host), top);
    frame.render_widget(Paragraph::new(page.groups.iter().map(group).collect::<Vec<_>>()), ledgers);
    draw_vms(frame, vms, page, state.row());
    frame.render_widget(below(page, state), words);
    frame.render_widget(status_line(state), bottom);
}

fn host(host: &HostStatus) -> Paragraph<'_> {
    let mut first = vec![
        Span::from("host ").bold(),
        format!("{} of {} available", size(host.available_bytes), size(host.total_bytes)).into(),
        format!("   mode {}   tick {} ago", host.mode, Millis(host.tick_age_ms)).into(),
    ];
    if host.paused {
        first.push("   PAUSED".yellow().bold());
    }
    let pressure = host.psi_some_avg10_percent.unwrap_or(0.0);
    let counts = format!(
        "     {} VMs, {} unreachable, {} uncooperative   pressure {pressure:.1} %",
        host.vms, host.unreachable_vms, host.uncooperative_vms
    );
    let trouble = host
        .reasons
        .iter()
        .map(|words| &words.text)
        .chain(&host.config_error)
        .chain(&host.waits_for_restart);
    let trouble: Vec<&str> = trouble.chain(&host.history_error).map(String::as_str).collect();
    let second = vec![counts.into(), "   ".into(), trouble.join("; ").red()];
    Paragraph::new(vec![Line::from(first), Line::from(second)])
}

/// `web   ████████▒▒░░···· used 480 MiB of 640 MiB`: used, promised, reserve, surplus.
fn group(group: &GroupStatus) -> Line<'_> {
    let over = group.used_bytes.saturating_add(group.promised_bytes);
    let entitled = group.budget_bytes.saturating_add(group.borrowed_bytes);
    let whole = entitled.max(over).max(1);
    let cells = |bytes: u64| {
        let share = Bytes(BAR as u64).share(bytes, whole).0;
        usize::try_from(share).unwrap_or(BAR).min(BAR)
    };
    let used = cells(group.used_bytes);
    let promised = cells(group.promised_bytes).min(BAR - used);
    let reserve = cells(group.reserve_bytes).min(BAR - used - promised);
    let rest = BAR - used - promised - reserve;
    let color = if group.deficit_bytes > 0 { Color::Red } else { Color::Green };
    let mut spans = vec![
        format!("{:<12.12} ", group.name).bold(),
        "█".repeat(used).fg(color),
        "▒".repeat(promised).fg(Color::Yellow),
        "░".repeat(reserve).fg(Color::Blue),
        "·".repeat(rest).into(),
        format!(" used {} of {}", Bytes(group.used_bytes), Bytes(group.budget_bytes)).into(),
        format!(", surplus {}, {}", Bytes(group.surplus_bytes), group.policy).into(),
    ];
    for (verb, bytes) in [("lends", group.lent_bytes), ("borrows", group.borrowed_bytes)] {
        if bytes > 0 {
            spans.push(format!(", {verb} {}", Bytes(bytes)).into());
        }
    }
    if group.dedup.saved_bytes > 0 {
        spans.push(format!(", sharing saves {}", Bytes(group.dedup.saved_bytes)).into());
    }
    if group.free_pages.lazy_bytes > 0 {
        spans.push(format!(", freed {}", Bytes(group.free_pages.lazy_bytes)).into());
    }
    if let Some(cache) = group.cache.as_ref().filter(|cache| cache.held_bytes > 0) {
        spans.push(format!(", cache {}", Bytes(cache.held_bytes)).into());
    }
    if group.deficit_bytes > 0 {
        spans.push(format!(", OVER by {}", Bytes(group.deficit_bytes)).red());
    }
    Line::from(spans)
}

fn draw_vms(frame: &mut Frame<'_>, area: Rect, page: &Page, selected: Option<usize>) {
    let titles =
        ["VM", "GROUP", "MAY USE", "TARGET", "HOST:USED", "WSS", "GUEST:SWAP", "STATE", "REASON"];
    let widths = [16, 10, 10, 10, 10, 10, 12, 13].map(Constraint::Length);
    let widths = widths.into_iter().chain([Constraint::Min(10)]);
    let table = Table::new(page.vms.iter().map(row), widths)
        .header(Row::new(titles).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut place = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, area, &mut place);
}

fn row(vm: &VmStatus) -> Row<'_> {
    let swap =
        vm.swap_bytes_per_second.map_or_else(|| "-".to_owned(), |b| format!("{}/s", Bytes(b)));
    let cells = [
        vm.name.clone(),
        vm.group.clone().unwrap_or_else(|| "-".to_owned()),
        size(vm.balloon_bytes),
        size(vm.target_bytes),
        size(vm.used_bytes),
        size(vm.working_set_bytes()),
        swap,
        vm.state().to_owned(),
        vm.headline(),
    ];
    let style = match vm.state() {
        "ok" | "unmanaged" => Style::new(),
        _ => Style::new().fg(Color::Red),
    };
    Row::new(cells).style(style)
}

/// The selected VM's explanation, else the newest changes of all VMs.
fn below<'a>(page: &'a Page, state: &ScreenState) -> Paragraph<'a> {
    let explained = page.explanation.as_ref().filter(|e| state.selected.as_ref() == Some(&e.vm));
    if let Some(explanation) = explained {
        let block = Block::bordered().title(format!(" {} ", explanation.vm));
        return Paragraph::new(explanation.text.as_str()).wrap(Wrap { trim: false }).block(block);
    }
    let changes = page.vms.iter().filter_map(|vm| Some((vm.last_change.as_ref()?, &vm.name)));
    let mut changes: Vec<_> = changes.collect();
    changes.sort_by_key(|(change, _)| std::cmp::Reverse(change.wall_ms));
    let line = |(change, name): &(&api::wire::LastChange, &String)| {
        let ago = Millis(page.host.wall_ms.saturating_sub(change.wall_ms));
        Line::from(format!("{ago} ago  {name}: {}", change.text))
    };
    let lines: Vec<Line<'_>> = changes.iter().map(line).collect();
    let block = Block::bordered().title(" last changes, the newest first ");
    Paragraph::new(lines).wrap(Wrap { trim: false }).block(block)
}

fn status_line(state: &ScreenState) -> Line<'_> {
    if let Some(request) = state.asking {
        return Line::from(request.question()).black().on_yellow();
    }
    if let Some(why) = &state.lost {
        return Line::from(format!("these figures are old: {why}")).white().on_red();
    }
    let keys = "q quit   ↑↓ explain a VM   Esc back   p pause or resume";
    let said = state.said.as_deref().map(|words| format!("   {words}")).unwrap_or_default();
    Line::from(vec![keys.into(), said.green()])
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string())
}

#[cfg(test)]
pub(super) mod tests;
