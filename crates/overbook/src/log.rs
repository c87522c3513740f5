//! What the daemon writes to standard error, in journald's form.

use std::io::{self, Write};

/// An ordinary line.
pub(crate) fn info(text: &str) {
    say(6, text);
}

/// Something for the operator to look at.
pub(crate) fn warn(text: &str) {
    say(4, text);
}

/// journald takes each line for itself, so each has its level.
fn say(level: u8, text: &str) {
    for line in text.lines() {
        // Nothing that becomes of standard error ends a daemon.
        let _ = writeln!(io::stderr(), "<{level}>overbook: {line}");
    }
}
