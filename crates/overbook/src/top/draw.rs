//! Paints a [`ScreenState`]: a pure function onto a buffer of any size.
//!
//! Every line is laid out for its width first, so that nothing is cut before its important part.
//! [`lines`] has the same lines without a screen.

use api::verdict::StateLevel;
use api::wire::{GroupStatus, HostStatus, LastChange, VmStatus};
use model::{Bytes, Millis};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph},
};

use super::{
    order,
    state::{ScreenPart, ScreenRoom, ScreenState},
    watch::Page,
};
use crate::cli::{
    fit, status,
    table::TextTable,
    vm::{self, VmColumn},
};

/// A screen lower than this has no lines but those that it cannot do without.
const LOW: u16 = 16;
/// Groups on a screen that is not low.
const GROUPS: usize = 6;
/// Last changes on a screen.
const CHANGES: usize = 4;
/// Space below a label of an explanation.
const LABEL: usize = 13;

/// Columns of a table of VMs that this view leaves out.
const LEFT_OUT: [&str; 2] = ["SAVED", "GUEST:AVAIL"];
/// Left out of a narrow table, in this order; the column that decides the order stays.
const DROPPABLE: [&str; 7] =
    ["GROUP", "WSS", "TARGET", "GUEST:SWAP", "HOST:USED", "MAY USE", "STATE"];

const KEYS: &str = "\
↑ ↓ j k         select a VM, which is then explained
PageUp PageDown select one a page further
Home End        select the first or the last one
Enter           read its whole explanation; the same keys scroll that
/               show only VMs whose name, group, state or reason contains a text
s               sort by another column
r               reverse the order
p               pause or resume Overbook (asks first)
Esc             back: end the selection, then the filter, then the view
q               quit

MAY USE is the memory that the balloon leaves the guest, TARGET the memory that it is meant to have.
HOST:USED is the memory that the guest occupies on the host, WSS its working set.
A group's bar: █ used, ▒ granted and not touched yet, ░ its reserve, · surplus.
";

/// Paints everything, and tells how much room it found.
pub(super) fn draw(frame: &mut Frame<'_>, state: &ScreenState) -> ScreenRoom {
    let room = match &state.page {
        Some(page) => draw_page(frame, state, page),
        None => {
            frame.render_widget("waiting for the daemon …", frame.area());
            ScreenRoom::default()
        }
    };
    if !state.has_colour {
        without_colours(frame);
    }
    room
}

fn draw_page(frame: &mut Frame<'_>, state: &ScreenState, page: &Page) -> ScreenRoom {
    let area = frame.area();
    let (width, is_low) = (usize::from(area.width), area.height < LOW);
    let head = head(page, Some(width), is_low);
    let groups = groups(page, Some(width), if is_low { 1 } else { GROUPS });
    let below = below(state, page, width, is_low);
    let length = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
    // Two lines of a box are its border.
    let box_lines = below.as_ref().map_or(0, |(_, lines)| lines.len() + 2);
    let box_height = match state.focus {
        ScreenPart::Vms => length(box_lines.min(usize::from(area.height) * 2 / 5)),
        ScreenPart::Explanation | ScreenPart::Help => Constraint::Fill(1),
    };
    let (group_lines, table) = match state.focus {
        ScreenPart::Vms => (groups.len() + usize::from(!is_low), Constraint::Fill(1)),
        _ => (0, Constraint::Length(0)),
    };
    let rows = [length(head.len()), length(group_lines), table, box_height, Constraint::Length(1)];
    let [top, ledgers, vms, words, bottom] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(head), top);
    frame.render_widget(Paragraph::new(groups), ledgers);
    let mut room = draw_vms(frame, vms, state);
    if let Some((title, lines)) = below {
        room.all_lines = lines.len();
        room.lines = usize::from(words.height.saturating_sub(2));
        draw_box(frame, words, state, title, lines, room);
    }
    frame.render_widget(Clear, bottom);
    frame.render_widget(status_line(state, width, room), bottom);
    room
}

/// The page as lines without a screen. With a `width` no line is longer.
pub(super) fn lines(state: &ScreenState, width: Option<usize>) -> Vec<Line<'static>> {
    let Some(page) = &state.page else { return Vec::new() };
    let mut lines = head(page, width, false);
    lines.extend(groups(page, width, usize::MAX));
    lines.push(Line::default());
    let table = table(state, width);
    lines.push(Line::from(table.header));
    lines.extend(table.rows.into_iter().map(Line::from));
    lines
}

/// The verdict and the host.
fn head(page: &Page, width: Option<usize>, is_low: bool) -> Vec<Line<'static>> {
    let text = &page.verdict.text;
    let text = width.map_or_else(|| text.clone(), |width| fit::clip(text, width));
    let style = match page.verdict.level {
        StateLevel::Ok => Style::new().fg(Color::Green),
        StateLevel::Warning => Style::new().fg(Color::Yellow),
        StateLevel::Critical | StateLevel::Unknown => Style::new().fg(Color::Red),
    };
    let mut lines = vec![Line::styled(text, style.add_modifier(Modifier::BOLD))];
    if !is_low {
        lines.push(Line::from(join(host(&page.host), "   ", width)));
    }
    lines
}

fn host(host: &HostStatus) -> Vec<String> {
    let mut parts = vec![status::available(host), status::mode(host), status::last_tick(host)];
    parts.extend(host.psi_some_avg10_percent.map(|share| format!("pressure {share:.1} %")));
    parts.push(status::vms(host));
    // A pause is never cut off.
    if host.paused {
        parts.swap(0, 1);
    }
    parts
}

/// The parts that fit, each of them whole; the first one is cut if it must be.
fn join(parts: Vec<String>, between: &str, width: Option<usize>) -> String {
    let width = width.unwrap_or(usize::MAX);
    let mut parts = parts.into_iter();
    let mut text = fit::clip(&parts.next().unwrap_or_default(), width);
    for part in parts {
        if text.chars().count() + between.len() + part.chars().count() <= width {
            text += &format!("{between}{part}");
        }
    }
    text
}

/// A line for each group, groups over their budget first; the last line counts groups that have
/// none.
fn groups(page: &Page, width: Option<usize>, most: usize) -> Vec<Line<'static>> {
    let mut all: Vec<&GroupStatus> = page.groups.iter().collect();
    all.sort_by_key(|group| std::cmp::Reverse(group.deficit_bytes));
    let shown = if all.len() > most { most.saturating_sub(1).max(1) } else { all.len() };
    let width = width.unwrap_or(usize::MAX);
    let longest = all.iter().map(|group| group.name.chars().count()).max().unwrap_or(0);
    let names = fit::shorten(
        all.iter().map(|group| group.name.as_str()),
        longest.min(if width < 60 { 8 } else { 16 }),
    );
    let column = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let named = all.iter().zip(&names).take(shown);
    let mut lines: Vec<Line<'static>> =
        named.map(|(of, name)| group(of, &format!("{name:<column$} "), width)).collect();
    if most > 1 && shown < all.len() {
        lines.push(Line::from(format!("… {} more groups", all.len() - shown)));
    }
    lines
}

/// `web  ████████▒▒░░···· used 480 MiB of 640 MiB`: used, untouched grants, reserve, surplus.
fn group(group: &GroupStatus, name: &str, width: usize) -> Line<'static> {
    let bar_width = match width {
        0..60 => 0,
        60..100 => 10,
        _ => 24,
    };
    let over = group.used_bytes.saturating_add(group.promised_bytes);
    let entitled = group.budget_bytes.saturating_add(group.borrowed_bytes);
    let whole = entitled.max(over).max(1);
    let cells = |bytes: u64| {
        let share = Bytes(bar_width as u64).share(bytes, whole).0;
        usize::try_from(share).unwrap_or(bar_width).min(bar_width)
    };
    let used = cells(group.used_bytes);
    let untouched = cells(group.promised_bytes).min(bar_width - used);
    let reserve = cells(group.reserve_bytes).min(bar_width - used - untouched);
    let rest = bar_width - used - untouched - reserve;
    let color = if group.deficit_bytes > 0 { Color::Red } else { Color::Green };
    let mut line = vec![
        name.to_owned().bold(),
        "█".repeat(used).fg(color),
        "▒".repeat(untouched).fg(Color::Yellow),
        "░".repeat(reserve).fg(Color::Blue),
        "·".repeat(rest).into(),
    ];
    let mut taken: usize = line.iter().map(Span::width).sum();
    let mut separator = if bar_width > 0 { " " } else { "" };
    for part in parts(group) {
        let text = format!("{separator}{part}");
        if taken + text.chars().count() <= width {
            taken += text.chars().count();
            let is_alarm = part.starts_with("OVER");
            line.push(if is_alarm { text.fg(Color::Red) } else { text.into() });
            separator = ", ";
        }
    }
    Line::from(line)
}

/// A group's figures, the most important one first.
fn parts(group: &GroupStatus) -> Vec<String> {
    let amount = |words: &str, bytes: u64| (bytes > 0).then(|| format!("{words} {}", Bytes(bytes)));
    let mut parts = Vec::new();
    parts.extend(amount("OVER by", group.deficit_bytes));
    parts.push(format!("used {} of {}", Bytes(group.used_bytes), Bytes(group.budget_bytes)));
    parts.extend(amount("untouched grants", group.promised_bytes));
    parts.push(format!("surplus {}", Bytes(group.surplus_bytes)));
    parts.extend(amount("lends", group.lent_bytes));
    parts.extend(amount("borrows", group.borrowed_bytes));
    parts.push(group.policy.clone());
    parts.extend(amount("sharing saves", group.dedup.saved_bytes));
    parts.extend(amount("freed", group.free_pages.lazy_bytes));
    parts.extend(amount("cache", group.cache.as_ref().map_or(0, |cache| cache.held_bytes)));
    parts
}

/// The VMs that match the filter.
fn table(state: &ScreenState, width: Option<usize>) -> TextTable {
    let droppable: Vec<&str> =
        DROPPABLE.into_iter().filter(|title| *title != state.sort.title()).collect();
    let columns: Vec<VmColumn> =
        vm::COLUMNS.into_iter().filter(|(title, ..)| !LEFT_OUT.contains(title)).collect();
    vm::fitted(&state.shown(), &columns, &droppable, width)
}

fn draw_vms(frame: &mut Frame<'_>, area: Rect, state: &ScreenState) -> ScreenRoom {
    let rows = usize::from(area.height.saturating_sub(1));
    let TextTable { header, rows: all } = table(state, Some(area.width.into()));
    let last_first = all.len().saturating_sub(rows);
    let selected = state.row();
    let first_row = match selected {
        Some(row) if row < state.room.first_row => row,
        Some(row) if row >= state.room.first_row + rows => row + 1 - rows.min(row + 1),
        _ => state.room.first_row,
    };
    let first_row = first_row.min(last_first);
    let line = |(at, (vm, text)): (usize, (&VmStatus, String))| {
        let mut style = if order::is_well(vm) { Style::new() } else { Style::new().fg(Color::Red) };
        if selected == Some(at) {
            style = style.add_modifier(Modifier::REVERSED);
        }
        // The mark of the selection reaches to the edge.
        Line::styled(format!("{text:<width$}", width = usize::from(area.width)), style)
    };
    let shown = state.shown().into_iter().zip(all).enumerate().skip(first_row).take(rows).map(line);
    let lines: Vec<Line<'_>> = std::iter::once(Line::from(header.bold())).chain(shown).collect();
    frame.render_widget(Paragraph::new(lines), area);
    ScreenRoom { rows, first_row, ..ScreenRoom::default() }
}

/// The title and the wrapped lines of the box below the table. `None`: there is no box.
fn below(
    state: &ScreenState,
    page: &Page,
    width: usize,
    is_low: bool,
) -> Option<(String, Vec<String>)> {
    let inside = width.saturating_sub(2).max(1);
    if state.focus == ScreenPart::Help {
        return Some(("keys".to_owned(), fit::wrap(KEYS, inside, 16.min(inside / 2))));
    }
    if state.focus == ScreenPart::Explanation {
        let vm = state.selected.clone().unwrap_or_default();
        let text = state.explanation().map_or("waiting for its explanation …", |it| &it.text);
        return Some((vm, fit::wrap(text, inside, LABEL.min(inside / 2))));
    }
    if is_low {
        return None;
    }
    if let Some(explanation) = state.explanation().filter(|_| state.row().is_some()) {
        let lines = fit::wrap(&explanation.text, inside, LABEL.min(inside / 2));
        return Some((explanation.vm.clone(), lines));
    }
    let changes = page.vms.iter().filter_map(|vm| Some((vm.last_change.as_ref()?, &vm.name)));
    let mut changes: Vec<_> = changes.collect();
    changes.sort_by_key(|(change, _)| std::cmp::Reverse(change.wall_ms));
    let line = |(change, name): (&LastChange, &String)| {
        let ago = Millis(page.host.wall_ms.saturating_sub(change.wall_ms));
        fit::clip(&format!("{ago} ago  {name}: {}", change.text), inside)
    };
    let lines: Vec<String> = changes.into_iter().take(CHANGES).map(line).collect();
    (!lines.is_empty()).then(|| ("last changes, the newest first".to_owned(), lines))
}

fn draw_box(
    frame: &mut Frame<'_>,
    area: Rect,
    state: &ScreenState,
    title: String,
    lines: Vec<String>,
    room: ScreenRoom,
) {
    let is_focused = state.focus != ScreenPart::Vms;
    let last = room.all_lines.saturating_sub(room.lines);
    let first = if is_focused { state.first_line.min(last) } else { 0 };
    let more = match (is_focused, last) {
        (_, 0) => String::new(),
        (true, _) => {
            format!(" lines {}-{} of {}", first + 1, first + room.lines, room.all_lines)
        }
        (false, last) => format!(" {last} more lines: Enter"),
    };
    let title = if more.is_empty() { format!(" {title} ") } else { format!(" {title},{more} ") };
    let shown = lines.into_iter().skip(first).take(room.lines).map(Line::from);
    let text = Paragraph::new(shown.collect::<Vec<_>>()).block(Block::bordered().title(title));
    frame.render_widget(text, area);
}

fn status_line(state: &ScreenState, width: usize, room: ScreenRoom) -> Line<'static> {
    if let Some(request) = state.asking {
        return Line::from(fit::clip(request.question(), width)).black().on_yellow();
    }
    if state.is_typing {
        return Line::from(format!("/{}█", state.filter));
    }
    if let Some(why) = &state.lost {
        let text = format!("these figures are old: {why}");
        return Line::from(fit::clip(&text, width)).white().on_red();
    }
    if state.focus != ScreenPart::Vms {
        let keys = ["Esc back", "↑↓ PageUp PageDown Home End scroll", "q quit"];
        return Line::from(join(keys.map(str::to_owned).into(), "  ", Some(width)));
    }
    let mut parts: Vec<String> = state.said.iter().cloned().collect();
    parts.push("? help".to_owned());
    let (all, shown) = (state.page.as_ref().map_or(0, |page| page.vms.len()), state.shown().len());
    if !state.filter.is_empty() {
        parts.push(format!("/{}: {shown} of {all} VMs", state.filter));
    }
    if shown > room.rows {
        let last = (room.first_row + room.rows).min(shown);
        parts.push(format!("rows {}-{last} of {shown}", room.first_row + 1));
    }
    let order = if state.is_reversed { "reversed" } else { "sorted" };
    parts.push(format!("{order} by {}", state.sort.title()));
    for keys in ["q quit", "↑↓ explain a VM", "/ filter", "s sort", "p pause or resume"] {
        parts.push(keys.to_owned());
    }
    Line::from(join(parts, "  ", Some(width)))
}

/// Colours become attributes that every terminal has.
fn without_colours(frame: &mut Frame<'_>) {
    for cell in &mut frame.buffer_mut().content {
        if cell.bg != Color::Reset {
            cell.modifier.insert(Modifier::REVERSED);
        }
        (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
    }
}

#[cfg(test)]
pub(super) mod tests;
