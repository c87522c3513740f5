//! The only place that writes to standard output.
//!
//! Names of VMs and error texts come from guests and from QEMU. On a terminal a control character
//! in them could move the cursor or worse, and another one could turn the direction of a line. So
//! all of them but line breaks are replaced, or escaped in JSON.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use model::words::is_harmless;
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
        let text = serde_json::to_string_pretty(value).map_err(CliError::Json)?;
        Ok(Self::raw((escaped(&text) + "\n").into_bytes()))
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
    text.chars().map(|c| if c == '\n' || is_harmless(c) { c } else { '\u{fffd}' }).collect()
}

/// The JSON with such characters escaped. `serde_json` escapes only those below U+0020, and all
/// others stand within strings.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || is_harmless(c) {
            text.push(c);
        } else {
            let mut units = [0; 2];
            let units = c.encode_utf16(&mut units).iter();
            text.extend(units.map(|unit| format!("\\u{unit:04x}")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_can_steer_the_terminal() {
        assert_eq!(clean("a\u{1b}[2Jb\u{9b}31m\nc\r"), "a\u{fffd}[2Jb\u{fffd}31m\nc\u{fffd}");
        assert_eq!(clean("abc\u{202e}cba"), "abc\u{fffd}cba", "nor the direction of its line");
    }

    #[test]
    fn json_has_the_name_and_no_such_character() {
        let name = "a\u{1b}[2Jb\u{9b}31m\u{202e}ü";
        let output = Output::json(&[name]).unwrap();
        let text = String::from_utf8(output.bytes).unwrap();
        assert!(text.chars().all(|c| c == '\n' || is_harmless(c)));
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name]);
    }
}
