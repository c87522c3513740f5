//! The only place that writes to standard output.
//!
//! Names of VMs and error texts come from guests and from QEMU. On a terminal a control character
//! in them could move the cursor or worse, so all of them but line breaks are replaced. JSON
//! escapes control characters by itself.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use serde::Serialize;

use super::error::CliError;

/// The output of a command.
pub(crate) struct Output {
    bytes: Vec<u8>,
    code: u8,
}

impl Output {
    /// No output.
    pub(super) const fn nothing() -> Self {
        Self::raw(Vec::new())
    }

    /// Text for people.
    pub(crate) fn text(text: &str) -> Self {
        Self::raw(clean(text).into_bytes())
    }

    /// Bytes as they are.
    pub(super) const fn raw(bytes: Vec<u8>) -> Self {
        Self { bytes, code: 0 }
    }

    /// JSON for programs.
    pub(super) fn json(value: &impl Serialize) -> Result<Self, CliError> {
        let mut bytes = serde_json::to_vec_pretty(value).map_err(CliError::Json)?;
        bytes.push(b'\n');
        Ok(Self::raw(bytes))
    }

    /// The same output with another exit code.
    pub(super) fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// The same output after `begin`.
    pub(super) fn after(self, begin: &[u8]) -> Self {
        Self { bytes: [begin, &self.bytes].concat(), ..self }
    }

    /// Writes the output and returns the exit code. A closed pipe (`| head`) is no error.
    pub(super) fn print(self) -> Result<ExitCode, CliError> {
        self.write()?;
        Ok(ExitCode::from(self.code))
    }

    /// Writes the output. `false`: the pipe is closed.
    pub(crate) fn write(&self) -> Result<bool, CliError> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(&self.bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(CliError::Print(error)),
            Ok(()) => Ok(true),
        }
    }
}

/// The text without control characters that a terminal would obey.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_can_steer_the_terminal() {
        assert_eq!(clean("a\u{1b}[2Jb\u{9b}31m\nc\r"), "a\u{fffd}[2Jb\u{fffd}31m\nc\u{fffd}");
    }
}
