//! The messages of QMP (QEMU's docs/interop/qmp-spec.rst). Fields that are not used are parsed
//! leniently, all others strictly.

use std::borrow::Cow;

use model::Bytes;
use model::words;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::QmpError;
use super::error::excerpt;
use super::framing::{MAX_LARGE, MAX_LINE};

/// A command with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    /// For example `query-balloon`.
    pub name: &'static str,
    /// An object, or null.
    pub arguments: Value,
}

impl Command {
    /// A command without arguments.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self { name, arguments: Value::Null }
    }

    /// A command with arguments.
    #[must_use]
    pub const fn with(name: &'static str, arguments: Value) -> Self {
        Self { name, arguments }
    }

    /// The longest answer that is accepted.
    pub(crate) fn longest_answer(&self) -> usize {
        match self.name {
            // A VM may have hundreds of the items in these lists.
            "query-memdev" | "query-memory-devices" => MAX_LARGE,
            _ => MAX_LINE,
        }
    }

    /// The command in its wire format, with its end of line.
    #[must_use]
    pub fn to_line(&self, id: u64) -> String {
        let message = JsonCommand { execute: self.name, arguments: &self.arguments, id };
        // Text, numbers and their containers always have a form in JSON.
        serde_json::to_string(&message).unwrap_or_default() + "\n"
    }
}

/// A command as QEMU reads it.
#[derive(Serialize)]
struct JsonCommand<'a> {
    execute: &'static str,
    #[serde(skip_serializing_if = "Value::is_null")]
    arguments: &'a Value,
    id: u64,
}

/// One line from QEMU. An answer's value is parsed later ([`outcome`]), because as text it is
/// small.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    /// The balloon's size has changed.
    BalloonChange(Bytes),
    /// An event that is not used.
    Event,
    /// The answer to command `id`.
    Answer {
        /// The command's ID.
        id: u64,
    },
}

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    _qmp: IgnoredAny,
}

/// The fields of a line that tell its type. The rest is skipped.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow)]
    event: Option<Cow<'a, str>>,
    id: Option<u64>,
}

#[derive(Deserialize)]
struct BalloonChange {
    data: Actual,
}

#[derive(Deserialize)]
struct Actual {
    actual: u64,
}

#[derive(Deserialize)]
struct RawResponse {
    #[serde(default, rename = "return", with = "present")]
    value: Option<Value>,
    error: Option<RawError>,
}

#[derive(Deserialize)]
struct RawError {
    #[serde(deserialize_with = "words::of_others")]
    desc: String,
}

/// Distinguishes `"return": null` from a missing `return`.
mod present {
    use serde::{Deserialize, Deserializer};
    use serde_json::Value;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Value>, D::Error> {
        Value::deserialize(d).map(Some)
    }
}

/// Whether this is QEMU's greeting.
///
/// # Errors
/// It is something else.
pub fn check_greeting(line: &[u8]) -> Result<(), QmpError> {
    match serde_json::from_slice::<Greeting>(line) {
        Ok(_) => Ok(()),
        Err(_) => Err(QmpError::NotQmp(excerpt(line))),
    }
}

/// Determines the type of a line, and keeps only the fields that are used.
///
/// # Errors
/// The line is no message of QMP.
pub fn parse(line: &[u8]) -> Result<Message, QmpError> {
    let garbage = || QmpError::Garbage(excerpt(line));
    let head: Head = serde_json::from_slice(line).map_err(|_| garbage())?;
    match (head.event.as_deref(), head.id) {
        (Some("BALLOON_CHANGE"), _) => {
            let change: BalloonChange = serde_json::from_slice(line).map_err(|_| garbage())?;
            Ok(Message::BalloonChange(Bytes(change.data.actual)))
        }
        (Some(_), _) => Ok(Message::Event),
        (None, Some(id)) => Ok(Message::Answer { id }),
        (None, None) => Err(garbage()),
    }
}

/// Parses an answer: its value, or QEMU's words of refusal.
///
/// # Errors
/// The line has neither.
pub fn outcome(line: &[u8]) -> Result<Result<Value, String>, QmpError> {
    let garbage = || QmpError::Garbage(excerpt(line));
    match serde_json::from_slice(line).map_err(|_| garbage())? {
        RawResponse { error: Some(RawError { desc }), .. } => Ok(Err(desc)),
        RawResponse { value: Some(value), .. } => Ok(Ok(value)),
        RawResponse { .. } => Err(garbage()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_shown_shortened_and_harmless() {
        let line = format!("\x1b[2J{}", "y".repeat(500));
        let text = parse(line.as_bytes()).unwrap_err().to_string();
        assert!(text.starts_with("not QMP: `\\u{1b}[2Jyy"), "{text}");
        assert!(text.ends_with("(truncated)") && text.len() < 120, "{text}");
    }

    #[test]
    fn lines_without_id_value_or_shape_are_garbage() {
        let deep = "[".repeat(100_000);
        for bad in ["", "{}", "[]", "7", r#"{"return": {}}"#, r#"{"id": -1, "return": 1}"#, &deep] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(outcome(br#"{"id": 1}"#).is_err());
        assert_eq!(outcome(br#"{"return": null, "id": 1}"#).unwrap(), Ok(Value::Null));
    }

    #[test]
    fn of_an_event_only_a_balloons_size_is_kept() {
        let change = br#"{"event": "BALLOON_CHANGE", "data": {"actual": 7, "x": [[[]]]}}"#;
        assert_eq!(parse(change).unwrap(), Message::BalloonChange(Bytes(7)));
        let other = br#"{"event": "STOP", "data": {"actual": 7}, "id": 3}"#;
        assert_eq!(parse(other).unwrap(), Message::Event);
        assert!(parse(br#"{"event": "BALLOON_CHANGE", "data": {"actual": -7}}"#).is_err());
    }
}
