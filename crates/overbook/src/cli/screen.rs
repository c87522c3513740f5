//! The terminal that a command writes to, if it does.

use std::{env, io, io::IsTerminal};

use rustix::termios::{Winsize, tcgetwinsize};

/// Columns that output may have; `None`: any number. A pipe has no width, unless its reader states
/// one as watch(1) does (`COLUMNS`). So a script gets whole lines.
pub(crate) fn width() -> Option<usize> {
    let terminal = winsize().map(|size| usize::from(size.ws_col)).filter(|width| *width > 0);
    terminal.or_else(|| stated(env::var("COLUMNS").ok().as_deref()))
}

/// Columns and rows of the terminal on standard output. `None`: there is none.
pub(crate) fn size() -> Option<(usize, usize)> {
    let size = winsize()?;
    // A serial line may have no size.
    let known = size.ws_col > 0 && size.ws_row > 0;
    known.then(|| (size.ws_col.into(), size.ws_row.into()))
}

fn winsize() -> Option<Winsize> {
    let stdout = io::stdout();
    stdout.is_terminal().then(|| tcgetwinsize(&stdout).ok())?
}

/// Whether colours may be used (<https://no-color.org>).
pub(crate) fn has_colour() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn stated(columns: Option<&str>) -> Option<usize> {
    columns?.parse().ok().filter(|width| *width > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stated_width_has_to_be_a_number() {
        assert_eq!(stated(Some("80")), Some(80));
        for none in [None, Some(""), Some("0"), Some("wide")] {
            assert_eq!(stated(none), None, "{none:?}");
        }
    }
}
