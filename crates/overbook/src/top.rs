//! `overbook top`: the host live in a terminal.
//!
//! **Idea.** Three independent parts. A thread asks the daemon once a second ([`watch`]).
//! [`state`] turns the answers and the keys into the state of the view. [`draw`] paints that
//! state, as a pure function that is tested letter by letter. So a stuck daemon freezes the
//! figures, and the view says so, but keys still work.
//!
//! The terminal is restored at the end, on an error, on a panic and on a signal. When the
//! terminal itself has gone, the view ends ([`ending`]). Without a terminal, [`batch`] writes the
//! same lines as text.

mod batch;
mod draw;
mod ending;
mod order;
mod state;
mod watch;

use std::{
    io::{self, IsTerminal},
    path::Path,
    time::Duration,
};

use clap::{Args, value_parser};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEventKind},
};

use crate::cli::{CliError, screen};
use ending::Ending;
use state::{KeyAction, ScreenState};
use watch::StatusPoller;

/// Maximum delay between a key and its effect.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Write one page a second to standard output; needs no terminal
    #[arg(short, long)]
    batch: bool,
    /// Pages to write; without it they come until the pipe is closed
    #[arg(
        short = 'n',
        long,
        value_name = "COUNT",
        requires = "batch",
        value_parser = value_parser!(u64).range(1..)
    )]
    count: Option<u64>,
}

/// Shows the daemon at `socket` until the user quits.
///
/// # Errors
/// No daemon answers at the start, or the terminal cannot be used.
pub(crate) fn run(socket: &Path, arguments: &Arguments) -> Result<(), CliError> {
    if arguments.batch {
        return batch::run(socket, arguments.count);
    }
    let watch = StatusPoller::start(socket)?;
    if !io::stdout().is_terminal() {
        let why = "standard output is none (`overbook top --batch` writes to a pipe or file)";
        return Err(CliError::Terminal(io::Error::other(why)));
    }
    let ending = Ending::watch().map_err(CliError::Terminal)?;
    // Also restores the terminal on a panic.
    let mut terminal = ratatui::try_init().map_err(CliError::Terminal)?;
    let outcome = turn(&mut terminal, &watch, &ending);
    // Where the terminal has gone, standard error has gone with it. The library would panic on its
    // own messages: when it drops the terminal, and in `restore`.
    if terminal.show_cursor().is_err() {
        std::mem::forget(terminal);
    }
    let _ = ratatui::try_restore();
    outcome.map_err(CliError::Terminal)
}

fn turn(terminal: &mut DefaultTerminal, watch: &StatusPoller, ending: &Ending) -> io::Result<()> {
    let mut state = ScreenState { has_colour: screen::has_colour(), ..ScreenState::default() };
    while !ending.is_due() {
        watch.news().for_each(|news| state.learn(news));
        let mut room = state.room;
        terminal.draw(|frame| room = draw::draw(frame, &state))?;
        state.room = room;
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
