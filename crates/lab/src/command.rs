//! Runs a helper program (`apt-get`, `dpkg`, `xz`) to its end: output captured, Ctrl-C obeyed.

use std::io::{self, Read, Seek};
use std::path::PathBuf;
use std::time::Duration;

use sys::process::{Signal, Spawn};

use crate::interrupt::{Interrupted, interrupted};

/// Why a helper program gave no result.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The program could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// Its name.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The program failed.
    #[error("{program} failed ({status}): {output}")]
    Failed {
        /// Its name.
        program: String,
        /// Exit code or signal.
        status: String,
        /// The last lines that it wrote to standard error.
        output: String,
    },
    /// Ctrl-C.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// The environment variable that names the directory of Overbook's own programs. Programs that
/// are not installed among them (tests) need it.
pub const PROGRAMS_VARIABLE: &str = "OVERBOOK_BIN";

/// The directory next to Overbook's own programs with those of the release before (`make older`).
pub const OLDER: &str = "older";

/// The environment variable that names another directory for [`OLDER`], for example with the
/// unpacked package of an earlier release.
pub const OLDER_VARIABLE: &str = "OVERBOOK_OLDER_BIN";

/// The expected path of program or library `name` of the release before.
pub fn older_program(name: &str) -> io::Result<PathBuf> {
    match std::env::var_os(OLDER_VARIABLE).filter(|value| !value.is_empty()) {
        Some(directory) => Ok(PathBuf::from(directory).join(name)),
        None => Ok(own_program(OLDER)?.join(name)),
    }
}

/// The expected path of Overbook's own program `name`: in the directory that
/// [`PROGRAMS_VARIABLE`] names, else next to this program.
pub fn own_program(name: &str) -> io::Result<PathBuf> {
    match std::env::var_os(PROGRAMS_VARIABLE).filter(|value| !value.is_empty()) {
        Some(directory) => Ok(PathBuf::from(directory).join(name)),
        None => Ok(std::env::current_exe()?.with_file_name(name)),
    }
}

/// Runs `program` and returns what it wrote to standard output.
pub fn run(program: &str, spawn: Spawn) -> Result<Vec<u8>, CommandError> {
    let failed = |source| CommandError::Start { program: program.to_owned(), source };
    // Files, not pipes: nothing has to be read in parallel, and nothing blocks.
    let (mut out, mut err) =
        (tempfile::tempfile().map_err(failed)?, tempfile::tempfile().map_err(failed)?);
    let spawn = spawn
        .stdout(out.try_clone().map_err(failed)?)
        .stderr(err.try_clone().map_err(failed)?)
        .die_with_parent();
    let mut child = spawn.spawn().map_err(failed)?;
    let status = loop {
        if let Some(status) = child.wait_for(Duration::from_millis(50)).map_err(failed)? {
            break status;
        }
        if interrupted() {
            child.signal(Signal::TERM).map_err(failed)?;
            child.end(Duration::from_secs(2)).map_err(failed)?;
            return Err(Interrupted.into());
        }
    };
    if status.success() {
        return content(&mut out).map_err(failed);
    }
    let output = content(&mut err).map_err(failed)?;
    let output = last_lines(&String::from_utf8_lossy(&output), 6);
    Err(CommandError::Failed { program: program.to_owned(), status: status.to_string(), output })
}

fn content(file: &mut std::fs::File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The last `count` lines of `text`.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_failing_program_holds_its_last_words() {
        let spawn = Spawn::new("sh").args(["-c", "echo no such thing >&2; exit 3"]);
        let error = run("sh", spawn).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no such thing"), "{error}");
    }
}
