//! Lines that daemons write to standard error: the host daemon, and the processes that serve disks,
//! lend memory or control a pool.
//!
//! journald reads a level before each line, so each line has one where systemd says that standard
//! error is the journal (`JOURNAL_STREAM`).

use std::io::{self, Write};
use std::sync::LazyLock;

static IS_JOURNAL: LazyLock<bool> = LazyLock::new(|| std::env::var_os("JOURNAL_STREAM").is_some());

/// An ordinary line.
pub fn info(text: &str) {
    say(6, text);
}

/// A warning for the operator.
pub fn warn(text: &str) {
    say(4, text);
}

fn say(level: u8, text: &str) {
    for line in text.lines() {
        // A failure of standard error must not end a daemon.
        let _ = if *IS_JOURNAL {
            writeln!(io::stderr(), "<{level}>overbook: {line}")
        } else {
            writeln!(io::stderr(), "overbook: {line}")
        };
    }
}
