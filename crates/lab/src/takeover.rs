//! The way in which a host of the lab accepts VMs: the command for `incoming` of `[pool]`.
//!
//! It is a script with the command line of a QEMU that runs now. The paths of its files are moved
//! to the other host's directory, except its disks, which are on shared storage. QEMU outlives
//! the script and the daemon, as on a real host; [`Takeover`] ends it.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use sys::process::Identity;

/// Timeout for a QEMU to end.
const GRACE: Duration = Duration::from_secs(5);

/// The command, and the QEMUs that it has started.
#[derive(Debug)]
pub struct Takeover {
    script: PathBuf,
    pids: PathBuf,
}

impl Takeover {
    /// A command for a QEMU like `like`, whose files lie in `from`, on the host whose files lie
    /// in `to`.
    pub fn new(like: Identity, from: &Path, to: &Path) -> io::Result<Self> {
        for sub in ["qmp", "lab", "log", "disks", "trace"] {
            fs::create_dir_all(to.join(sub))?;
        }
        let read = |what: &str| fs::read(format!("/proc/{}/{what}", like.pid));
        let (script, pids) = (to.join("incoming"), to.join("pids"));
        let mut text = String::from("#!/bin/sh\nset -eu\n");
        for pair in words(&read("environ")?) {
            let _ = writeln!(text, "export {}", quoted(&pair));
        }
        let (from, to) = (from.display().to_string(), to.display().to_string());
        let moved = |word: &String| {
            let shared = word.replace(&format!("{from}/disks/"), "\u{1}");
            let moved = shared.replace(&format!("{from}/"), &format!("{to}/"));
            quoted(&moved.replace('\u{1}', &format!("{from}/disks/")))
        };
        let command: Vec<String> = words(&read("cmdline")?).iter().map(moved).collect();
        let (log, pids_file) = (format!("{to}/log/incoming"), quoted(&pids.display().to_string()));
        // A daemon that was restarted after a kill calls it again. A zombie has no `exe`.
        let _ = writeln!(
            text,
            "if [ -e {pids_file} ]; then while read -r pid; do\n\
             [ -e /proc/\"$pid\"/exe ] && exit 0\ndone <{pids_file}; fi"
        );
        let _ = writeln!(
            text,
            "setsid {} -incoming defer -S </dev/null >>{} 2>&1 &\necho $! >>{pids_file}",
            command.join(" "),
            quoted(&log),
        );
        fs::write(&script, text)?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        Ok(Self { script, pids })
    }

    /// The command.
    pub fn script(&self) -> &Path {
        &self.script
    }

    /// The live QEMUs that it has started.
    pub fn started(&self) -> Vec<Identity> {
        let text = fs::read_to_string(&self.pids).unwrap_or_default();
        let pids = text.lines().filter_map(|line| line.trim().parse().ok());
        let is_qemu = |found: &Identity| {
            let program = sys::procfs::program_of(found.pid);
            program.is_ok_and(|program| program.starts_with("qemu"))
        };
        pids.filter_map(Identity::of).filter(is_qemu).collect()
    }
}

impl Drop for Takeover {
    fn drop(&mut self) {
        for process in self.started() {
            // It may have ended by itself.
            let _ = process.end(GRACE);
        }
    }
}

fn words(bytes: &[u8]) -> Vec<String> {
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(words(b"a\0b c\0"), ["a", "b c"]);
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
