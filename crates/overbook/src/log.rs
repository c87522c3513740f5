//! Lines that the daemon writes to standard error, in journald's form.

use std::io::{self, Write};

/// An ordinary line.
pub(crate) fn info(text: &str) {
    say(6, text);
}

/// A warning for the operator.
pub(crate) fn warn(text: &str) {
    say(4, text);
}

/// journald reads each line separately, so each line has its level.
fn say(level: u8, text: &str) {
    for line in text.lines() {
        // A failure of standard error must not end a daemon.
        let _ = writeln!(io::stderr(), "<{level}>overbook: {line}");
    }
}
