//! Lines that daemons write: the host daemon, and the processes that serve disks, lend memory or
//! control a pool.
//!
//! Where standard error is the journal, lines go to journald's socket with fields of their own, so
//! that `journalctl OVERBOOK_VM=web-1` finds them. A process that may not connect writes lines with
//! a level, which journald reads from standard error. Everywhere else a line begins with the time.
//! (systemd.exec(5), `JOURNAL_STREAM`; "Native Journal Protocol" of systemd.)

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use model::date;

/// journald's socket.
const JOURNAL: &str = "/run/systemd/journal/socket";
const INFO: u8 = 6;
const WARNING: u8 = 4;

/// A field of a line, for example `("VM", "web-1")`; journald has it as `OVERBOOK_VM`.
pub type LogField<'a> = (&'static str, &'a str);

/// The reader of the lines.
enum LogReader {
    /// journald, by its own protocol.
    Journal(UnixDatagram),
    /// journald, by standard error.
    JournalText,
    /// A terminal or a file.
    Text,
}

static READER: OnceLock<LogReader> = OnceLock::new();

fn reader() -> &'static LogReader {
    READER.get_or_init(|| match is_journal() {
        true => journal(Path::new(JOURNAL)).map_or(LogReader::JournalText, LogReader::Journal),
        false => LogReader::Text,
    })
}

/// Has this process write to standard error alone, before it gives up its rights.
pub(crate) fn keep_to_stderr() {
    let reader = if is_journal() { LogReader::JournalText } else { LogReader::Text };
    // A process that has logged before keeps the reader that it has.
    drop(READER.set(reader));
}

fn is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let stderr = rustix::fs::fstat(io::stderr().as_fd()).map(|it| (it.st_dev, it.st_ino));
    stderr.is_ok_and(|(device, inode)| is_stream(&stream, device, inode))
}

/// An ordinary line.
pub fn info(text: &str) {
    say(INFO, text, &[]);
}

/// A warning for the operator.
pub fn warn(text: &str) {
    say(WARNING, text, &[]);
}

/// An ordinary line with fields.
pub fn info_with(text: &str, fields: &[LogField<'_>]) {
    say(INFO, text, fields);
}

/// A warning for the operator, with fields.
pub fn warn_with(text: &str, fields: &[LogField<'_>]) {
    say(WARNING, text, fields);
}

fn say(level: u8, text: &str, fields: &[LogField<'_>]) {
    for line in text.lines() {
        let whole = match reader() {
            LogReader::Journal(socket) if socket.send(&entry(level, line, fields)).is_ok() => {
                continue;
            }
            LogReader::Journal(_) | LogReader::JournalText => {
                format!("<{level}>overbook: {line}\n")
            }
            LogReader::Text => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let now = date::utc(u64::try_from(now.as_millis()).unwrap_or_default());
                format!("{now} overbook: {line}\n")
            }
        };
        // One write, because other processes write to the same file. A failure of standard error
        // must not end a daemon.
        let _ = io::stderr().write_all(whole.as_bytes());
    }
}

/// Whether the stream that `JOURNAL_STREAM` names has this device and inode. A child whose standard
/// error was redirected has the variable all the same.
fn is_stream(named: &str, device: u64, inode: u64) -> bool {
    named
        .split_once(':')
        .is_some_and(|(of, at)| of.parse() == Ok(device) && at.parse() == Ok(inode))
}

fn journal(path: &Path) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(path)?;
    // A line must not wait for journald.
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A line in journald's protocol.
fn entry(level: u8, line: &str, fields: &[LogField<'_>]) -> Vec<u8> {
    let mut entry = format!("PRIORITY={level}\nSYSLOG_IDENTIFIER=overbook\nMESSAGE={line}\n");
    for (name, value) in fields {
        // A line break would begin another field.
        entry += &format!("OVERBOOK_{name}={}\n", value.replace('\n', " "));
    }
    entry.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_known_by_device_and_inode() {
        assert!(is_stream("8:12345", 8, 12345));
        for other in ["", "8", "8:1", "9:12345", "8:12345:0", "x:y"] {
            assert!(!is_stream(other, 8, 12345), "{other}");
        }
    }

    #[test]
    fn a_line_for_the_journal_has_its_fields_and_no_forged_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let theirs = UnixDatagram::bind(&path).unwrap();
        let ours = journal(&path).unwrap();
        let fields = [("VM", "web-1\nPRIORITY=0"), ("REASON", "idle")];
        ours.send(&entry(INFO, "web-1 gets 384 MiB", &fields)).unwrap();
        let mut bytes = [0; 512];
        let length = theirs.recv(&mut bytes).unwrap();
        let text = "PRIORITY=6\nSYSLOG_IDENTIFIER=overbook\nMESSAGE=web-1 gets 384 MiB\n\
                    OVERBOOK_VM=web-1 PRIORITY=0\nOVERBOOK_REASON=idle\n";
        assert_eq!(std::str::from_utf8(&bytes[..length]).unwrap(), text);
        assert!(journal(&dir.path().join("none")).is_err());
    }
}
