//! `overbook top`: the host live in a terminal.
//!
//! **Idea.** Three parts that know nothing of each other: a thread asks the daemon once a second
//! ([`watch`]), [`state`] turns what it brings and the keys into what is to be seen, and [`draw`]
//! paints that, a pure function that is tested letter by letter. So a stuck daemon freezes the
//! figures, says so, and never the keys.
//!
//! The terminal is put back whatever happens: at the end, on an error, on a panic and on a signal.
//! When the terminal itself has gone, the view ends ([`ending`]).

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
use state::{State, Step};
use watch::Watch;

/// How long a key may wait for its effect at most.
const PATIENCE: Duration = Duration::from_millis(100);

/// Shows the daemon at `socket` until the user has seen enough.
///
/// # Errors
/// When no daemon answers at the start, or the terminal cannot be used.
pub fn run(socket: &Path) -> Result<(), CliError> {
    let watch = Watch::start(socket)?;
    let ending = Ending::watch().map_err(CliError::Terminal)?;
    // Puts the terminal back on a panic too.
    let terminal = ratatui::try_init().map_err(CliError::Terminal)?;
    let outcome = turn(terminal, &watch, &ending);
    ratatui::restore();
    outcome.map_err(CliError::Terminal)
}

fn turn(mut terminal: DefaultTerminal, watch: &Watch, ending: &Ending) -> io::Result<()> {
    let mut state = State::default();
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
            Step::Stay => {}
            Step::Quit => return Ok(()),
            Step::Send(request) => watch.send(request),
            Step::Select(vm) => watch.select(vm),
        }
    }
    Ok(())
}
