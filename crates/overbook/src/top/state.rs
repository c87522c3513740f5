//! State of the screen: the latest page, the selected VM, a question that waits for its answer.

use std::cmp::Reverse;

use ratatui::crossterm::event::{KeyCode, KeyModifiers};

use super::watch::{Page, PollerEvent};

/// Everything that the screen depends on.
#[derive(Debug, Default)]
pub(super) struct ScreenState {
    /// The latest page; the VMs that swap most come first.
    pub(super) page: Option<Box<Page>>,
    /// The selected VM by name, because rows move.
    pub(super) selected: Option<String>,
    /// The request that waits for confirmation.
    pub(super) asking: Option<PauseRequest>,
    /// The daemon's answer to the last request.
    pub(super) said: Option<String>,
    /// Why the figures are old.
    pub(super) lost: Option<String>,
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
            PollerEvent::Page(mut page) => {
                let swaps = |vm: &api::wire::VmStatus| vm.swap_bytes_per_second.unwrap_or(0);
                page.vms.sort_by(|a, b| {
                    (Reverse(swaps(a)), &a.name).cmp(&(Reverse(swaps(b)), &b.name))
                });
                self.page = Some(page);
                self.lost = None;
            }
            PollerEvent::Said(words) => self.said = Some(words),
            PollerEvent::Lost(why) => self.lost = Some(why),
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
        match key {
            KeyCode::Char('q') => return KeyAction::Quit,
            KeyCode::Esc if self.selected.is_none() => return KeyAction::Quit,
            KeyCode::Esc => return self.select(None),
            KeyCode::Char('p') => self.asking = self.request(),
            KeyCode::Down | KeyCode::Char('j') => return self.step(1),
            KeyCode::Up | KeyCode::Char('k') => return self.step(-1),
            _ => {}
        }
        KeyAction::Stay
    }

    /// The current row of the selected VM.
    pub(super) fn row(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.page.as_ref()?.vms.iter().position(|vm| vm.name == *selected)
    }

    fn request(&self) -> Option<PauseRequest> {
        let paused = self.page.as_ref()?.host.paused;
        Some(if paused { PauseRequest::Resume } else { PauseRequest::Pause })
    }

    fn step(&mut self, by: isize) -> KeyAction {
        let Some(last) = self.page.as_ref().and_then(|page| page.vms.len().checked_sub(1)) else {
            return KeyAction::Stay;
        };
        let row = self.row().map_or(0, |row| row.saturating_add_signed(by).min(last));
        let name = self.page.as_ref().map(|page| page.vms[row].name.clone());
        self.select(name)
    }

    fn select(&mut self, name: Option<String>) -> KeyAction {
        self.selected.clone_from(&name);
        KeyAction::Select(name)
    }
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
    fn control_c_ends_it_even_while_a_question_is_open() {
        let mut state = ready();
        press(&mut state, KeyCode::Char('p'));
        assert_eq!(state.press(KeyCode::Char('c'), KeyModifiers::CONTROL), KeyAction::Quit);
    }
}
