//! State of the screen: the latest page, the selected VM, a question that waits for its answer.

use ratatui::crossterm::event::{KeyCode, KeyModifiers};

use super::{
    order::{self, SortKey},
    watch::{Page, PollerEvent},
};
use api::wire::{Explanation, VmStatus};

/// Everything that the screen depends on.
#[derive(Debug, Default)]
pub(super) struct ScreenState {
    /// The latest page; its VMs are sorted.
    pub(super) page: Option<Box<Page>>,
    /// The selected VM by name, because rows move.
    pub(super) selected: Option<String>,
    /// The request that waits for confirmation.
    pub(super) asking: Option<PauseRequest>,
    /// The daemon's answer to the last request.
    pub(super) said: Option<String>,
    /// Why the figures are old.
    pub(super) lost: Option<String>,
    /// The order of the VMs.
    pub(super) sort: SortKey,
    /// Whether that order is reversed.
    pub(super) is_reversed: bool,
    /// Only VMs that match it are shown; all if it is empty.
    pub(super) filter: String,
    /// Whether keys go into the filter.
    pub(super) is_typing: bool,
    /// The part that the keys scroll.
    pub(super) focus: ScreenPart,
    /// The first shown line of the explanation or the help.
    pub(super) first_line: usize,
    /// The room that the last painting found.
    pub(super) room: ScreenRoom,
    /// Whether colours may be used.
    pub(super) has_colour: bool,
}

/// A part of the screen that scrolls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ScreenPart {
    /// The table of VMs.
    #[default]
    Vms,
    /// The explanation of the selected VM.
    Explanation,
    /// The list of keys.
    Help,
}

/// Sizes that depend on the terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ScreenRoom {
    /// Rows of VMs that fit.
    pub(super) rows: usize,
    /// The first row that was shown.
    pub(super) first_row: usize,
    /// Lines of the focused text that fit.
    pub(super) lines: usize,
    /// All its lines.
    pub(super) all_lines: usize,
}

/// A request that changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PauseRequest {
    /// Stop all changes.
    Pause,
    /// End the pause.
    Resume,
}

/// The action of a key outside of the state.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KeyAction {
    /// No action.
    Stay,
    /// End the view.
    Quit,
    /// Post this path.
    Send(&'static str),
    /// Explain this VM from now on.
    Select(Option<String>),
}

impl ScreenState {
    /// Applies news from the daemon.
    pub(super) fn learn(&mut self, news: PollerEvent) {
        match news {
            PollerEvent::Page(page) => {
                self.page = Some(page);
                self.lost = None;
                self.arrange();
            }
            PollerEvent::Said(words) => self.said = Some(words),
            PollerEvent::Lost(verdict) => {
                self.lost = verdict.troubles.first().map(|trouble| trouble.text.clone());
                // The old verdict may be a good one.
                self.page.iter_mut().for_each(|page| page.verdict = verdict.clone());
            }
        }
    }

    /// Applies a key.
    pub(super) fn press(&mut self, key: KeyCode, modifiers: KeyModifiers) -> KeyAction {
        if key == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL) {
            return KeyAction::Quit;
        }
        if let Some(request) = self.asking.take() {
            return match key {
                KeyCode::Char('y' | 'Y') => KeyAction::Send(request.path()),
                _ => KeyAction::Stay,
            };
        }
        if self.is_typing {
            return self.type_filter(key);
        }
        match (self.focus, key) {
            (_, KeyCode::Char('q')) => return KeyAction::Quit,
            (ScreenPart::Vms, _) => return self.press_in_table(key),
            (ScreenPart::Help, KeyCode::Esc | KeyCode::Enter | KeyCode::Char('?'))
            | (ScreenPart::Explanation, KeyCode::Esc | KeyCode::Enter) => {
                self.look_at(ScreenPart::Vms);
            }
            (ScreenPart::Explanation, KeyCode::Char('?')) => self.look_at(ScreenPart::Help),
            _ => {
                let ScreenRoom { lines, all_lines, .. } = self.room;
                let last = all_lines.saturating_sub(lines);
                if let Some(line) = moved(key, self.first_line.min(last), last, lines) {
                    self.first_line = line;
                }
            }
        }
        KeyAction::Stay
    }

    fn press_in_table(&mut self, key: KeyCode) -> KeyAction {
        match key {
            KeyCode::Esc if self.selected.is_some() => return self.select(None),
            KeyCode::Esc if self.filter.is_empty() => return KeyAction::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Enter if self.row().is_some() => self.look_at(ScreenPart::Explanation),
            KeyCode::Char('?') => self.look_at(ScreenPart::Help),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('p') => self.asking = self.request(),
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.arrange();
            }
            KeyCode::Char('r') => {
                self.is_reversed = !self.is_reversed;
                self.arrange();
            }
            _ => return self.step(key),
        }
        KeyAction::Stay
    }

    fn type_filter(&mut self, key: KeyCode) -> KeyAction {
        match key {
            KeyCode::Char(letter) => self.filter.push(letter),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Esc => {
                self.filter.clear();
                self.is_typing = false;
            }
            KeyCode::Enter => self.is_typing = false,
            _ => {}
        }
        KeyAction::Stay
    }

    /// The VMs that match the filter, in their order.
    pub(super) fn shown(&self) -> Vec<&VmStatus> {
        let vms = self.page.iter().flat_map(|page| &page.vms);
        vms.filter(|vm| order::matches(vm, &self.filter)).collect()
    }

    /// The current row of the selected VM.
    pub(super) fn row(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.shown().iter().position(|vm| vm.name == *selected)
    }

    /// The explanation of the selected VM, if it has arrived.
    pub(super) fn explanation(&self) -> Option<&Explanation> {
        let explanation = self.page.as_ref()?.explanation.as_ref()?;
        (self.selected.as_ref() == Some(&explanation.vm)).then_some(explanation)
    }

    fn look_at(&mut self, part: ScreenPart) {
        (self.focus, self.first_line) = (part, 0);
    }

    fn arrange(&mut self) {
        let (sort, is_reversed) = (self.sort, self.is_reversed);
        self.page.iter_mut().for_each(|page| sort.sort(&mut page.vms, is_reversed));
    }

    fn request(&self) -> Option<PauseRequest> {
        let paused = self.page.as_ref()?.host.paused;
        Some(if paused { PauseRequest::Resume } else { PauseRequest::Pause })
    }

    fn step(&mut self, key: KeyCode) -> KeyAction {
        let shown = self.shown();
        let Some(last) = shown.len().checked_sub(1) else { return KeyAction::Stay };
        let row = match self.row() {
            Some(row) => moved(key, row, last, self.room.rows),
            None if key == KeyCode::End => Some(last),
            None => moved(key, 0, 0, 0),
        };
        let Some(row) = row else { return KeyAction::Stay };
        let name = shown[row].name.clone();
        self.select(Some(name))
    }

    fn select(&mut self, name: Option<String>) -> KeyAction {
        self.selected.clone_from(&name);
        KeyAction::Select(name)
    }
}

/// The place after a key that moves, between 0 and `last`. `None`: the key does not move.
fn moved(key: KeyCode, from: usize, last: usize, page: usize) -> Option<usize> {
    let place = match key {
        KeyCode::Down | KeyCode::Char('j') => from.saturating_add(1),
        KeyCode::Up | KeyCode::Char('k') => from.saturating_sub(1),
        KeyCode::PageDown => from.saturating_add(page.max(1)),
        KeyCode::PageUp => from.saturating_sub(page.max(1)),
        KeyCode::Home => 0,
        KeyCode::End => last,
        _ => return None,
    };
    Some(place.min(last))
}

impl PauseRequest {
    const fn path(self) -> &'static str {
        match self {
            Self::Pause => "/v1/pause",
            Self::Resume => "/v1/resume",
        }
    }

    /// The question before the request is sent.
    pub(super) const fn question(self) -> &'static str {
        match self {
            Self::Pause => {
                "Pause: change nothing any more until `resume`?  y: yes, any other key: no"
            }
            Self::Resume => "Resume: let Overbook change memory again?  y: yes, any other key: no",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::draw::tests::page;

    fn press(state: &mut ScreenState, key: KeyCode) -> KeyAction {
        state.press(key, KeyModifiers::NONE)
    }

    fn ready() -> ScreenState {
        let mut state = ScreenState::default();
        state.learn(PollerEvent::Page(Box::new(page())));
        state
    }

    #[test]
    fn a_pause_is_sent_only_after_a_yes() {
        let mut state = ready();
        assert_eq!(press(&mut state, KeyCode::Char('p')), KeyAction::Stay);
        assert_eq!(press(&mut state, KeyCode::Char('q')), KeyAction::Stay, "any other key says no");
        press(&mut state, KeyCode::Char('p'));
        assert_eq!(press(&mut state, KeyCode::Char('y')), KeyAction::Send("/v1/pause"));
        assert_eq!(press(&mut state, KeyCode::Char('y')), KeyAction::Stay, "asked once, sent once");
    }

    #[test]
    fn p_resumes_a_paused_host() {
        let mut state = ready();
        state.page.as_mut().unwrap().host.paused = true;
        press(&mut state, KeyCode::Char('p'));
        assert_eq!(press(&mut state, KeyCode::Char('y')), KeyAction::Send("/v1/resume"));
    }

    #[test]
    fn the_selection_stays_with_its_vm_when_rows_move() {
        let mut state = ready();
        assert_eq!(state.page.as_ref().unwrap().vms[0].name, "web-1", "it swaps most");
        assert_eq!(press(&mut state, KeyCode::Down), KeyAction::Select(Some("web-1".to_owned())));
        let mut moved = page();
        moved.vms.iter_mut().for_each(|vm| vm.swap_bytes_per_second = None);
        state.learn(PollerEvent::Page(Box::new(moved)));
        assert_eq!(state.row(), Some(1), "sorted by name now: db-1, web-1, web-2");
    }

    #[test]
    fn the_selection_ends_at_the_last_row() {
        let mut state = ready();
        for _ in 0..9 {
            press(&mut state, KeyCode::Down);
        }
        assert_eq!(state.row(), Some(2));
        for _ in 0..9 {
            press(&mut state, KeyCode::Up);
        }
        assert_eq!(state.row(), Some(0));
    }

    #[test]
    fn pages_and_ends_of_a_long_table_are_reached() {
        let mut long = page();
        let vm = long.vms[0].clone();
        let named = |n: u32| VmStatus { name: format!("vm-{n:03}"), ..vm.clone() };
        long.vms = (0..100).map(named).collect();
        let mut state = ready();
        state.learn(PollerEvent::Page(Box::new(long)));
        state.room.rows = 10;
        let mut row_after = |key| {
            press(&mut state, key);
            state.row().unwrap()
        };
        assert_eq!(row_after(KeyCode::Down), 0);
        assert_eq!(row_after(KeyCode::PageDown), 10);
        assert_eq!(row_after(KeyCode::PageDown), 20);
        assert_eq!(row_after(KeyCode::PageUp), 10);
        assert_eq!(row_after(KeyCode::End), 99);
        assert_eq!(row_after(KeyCode::PageDown), 99);
        assert_eq!(row_after(KeyCode::Home), 0);
    }

    #[test]
    fn a_filter_is_typed_and_cleared() {
        let mut state = ready();
        let names = |state: &ScreenState| -> Vec<String> {
            state.shown().iter().map(|vm| vm.name.clone()).collect()
        };
        "/web-2".chars().for_each(|letter| {
            press(&mut state, KeyCode::Char(letter));
        });
        assert_eq!(names(&state), ["web-2"]);
        press(&mut state, KeyCode::Backspace);
        assert_eq!(names(&state), ["web-1", "web-2"]);
        press(&mut state, KeyCode::Enter);
        assert_eq!(press(&mut state, KeyCode::End), KeyAction::Select(Some("web-2".to_owned())));
        assert_eq!(press(&mut state, KeyCode::Esc), KeyAction::Select(None), "the selection first");
        assert_eq!(press(&mut state, KeyCode::Esc), KeyAction::Stay, "then the filter");
        assert_eq!(names(&state).len(), 3);
        assert_eq!(press(&mut state, KeyCode::Esc), KeyAction::Quit);
    }

    #[test]
    fn letters_in_a_filter_are_no_commands() {
        let mut state = ready();
        for letter in ['/', 'q', 'p', 's', '?'] {
            assert_eq!(press(&mut state, KeyCode::Char(letter)), KeyAction::Stay);
        }
        assert_eq!((state.filter.as_str(), state.asking), ("qps?", None));
        press(&mut state, KeyCode::Esc);
        assert_eq!((state.filter.as_str(), state.is_typing), ("", false));
    }

    #[test]
    fn s_and_r_change_the_order() {
        let mut state = ready();
        press(&mut state, KeyCode::Char('s'));
        assert_eq!(state.sort, SortKey::State);
        assert_eq!(state.shown()[0].name, "web-2");
        press(&mut state, KeyCode::Char('r'));
        assert_eq!(state.shown()[0].name, "web-1");
        let mut again = page();
        again.vms.reverse();
        state.learn(PollerEvent::Page(Box::new(again)));
        assert_eq!(state.shown()[0].name, "web-1", "a new page has the same order");
    }

    #[test]
    fn enter_scrolls_the_explanation_to_its_end_and_escape_returns() {
        let mut state = ready();
        press(&mut state, KeyCode::Enter);
        assert_eq!(state.focus, ScreenPart::Vms, "no VM is selected");
        press(&mut state, KeyCode::Down);
        press(&mut state, KeyCode::Enter);
        assert_eq!(state.focus, ScreenPart::Explanation);
        (state.room.lines, state.room.all_lines) = (5, 14);
        press(&mut state, KeyCode::PageDown);
        assert_eq!(state.first_line, 5);
        press(&mut state, KeyCode::End);
        assert_eq!(state.first_line, 9);
        press(&mut state, KeyCode::Down);
        assert_eq!(state.first_line, 9);
        press(&mut state, KeyCode::Up);
        assert_eq!((state.first_line, state.row()), (8, Some(0)), "the selection stays");
        press(&mut state, KeyCode::Esc);
        assert_eq!((state.focus, state.first_line), (ScreenPart::Vms, 0));
    }

    #[test]
    fn the_help_opens_and_closes() {
        let mut state = ready();
        press(&mut state, KeyCode::Char('?'));
        assert_eq!(state.focus, ScreenPart::Help);
        press(&mut state, KeyCode::Char('?'));
        assert_eq!(state.focus, ScreenPart::Vms);
    }

    #[test]
    fn control_c_ends_it_even_while_a_question_is_open() {
        let mut state = ready();
        press(&mut state, KeyCode::Char('p'));
        assert_eq!(state.press(KeyCode::Char('c'), KeyModifiers::CONTROL), KeyAction::Quit);
    }
}
