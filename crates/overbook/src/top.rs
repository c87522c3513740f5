//! `overbook top`: the host live in a terminal.
//!
//! **Idea.** Three independent parts. A thread asks the daemon once a second ([`watch`]).
//! [`state`] turns the answers and the keys into the state of the view. [`draw`] paints that
//! state, as a pure function that is tested letter by letter. So a stuck daemon freezes the
//! figures, and the view says so, but keys still work.
//!
//! The terminal is restored at the end, on an error, on a panic and on a signal. When the
//! terminal itself has gone, the view ends ([`ending`]).

mod draw;
mod ending;
mod state;
mod watch;

use std::{io, path::Path, time::Duration};

use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEventKind},
};

use crate::cli::CliError;
use ending::Ending;
use state::{KeyAction, ScreenState};
use watch::StatusPoller;

/// Maximum delay between a key and its effect.
const PATIENCE: Duration = Duration::from_millis(100);

/// Shows the daemon at `socket` until the user quits.
///
/// # Errors
/// No daemon answers at the start, or the terminal cannot be used.
pub fn run(socket: &Path) -> Result<(), CliError> {
    let watch = StatusPoller::start(socket)?;
    let ending = Ending::watch().map_err(CliError::Terminal)?;
    // Also restores the terminal on a panic.
    let terminal = ratatui::try_init().map_err(CliError::Terminal)?;
    let outcome = turn(terminal, &watch, &ending);
    ratatui::restore();
    outcome.map_err(CliError::Terminal)
}

fn turn(mut terminal: DefaultTerminal, watch: &StatusPoller, ending: &Ending) -> io::Result<()> {
    let mut state = ScreenState::default();
    while !ending.is_due() {
        watch.news().for_each(|news| state.learn(news));
        terminal.draw(|frame| draw::draw(frame, &state))?;
        if !event::poll(PATIENCE)? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        if key.kind != KeyEventKind::Press {
            continue;
        }
        match state.press(key.code, key.modifiers) {
            KeyAction::Stay => {}
            KeyAction::Quit => return Ok(()),
            KeyAction::Send(request) => watch.send(request),
            KeyAction::Select(vm) => watch.select(vm),
        }
    }
    Ok(())
}
