//! The messages of QMP (QEMU's docs/interop/qmp-spec.rst), read leniently in what we do not use and
//! strictly in what we do.

use serde::Deserialize;
use serde_json::{Value, json};

use super::QmpError;
use super::error::excerpt;

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

    /// As it goes over the wire, with its end of line.
    pub(crate) fn to_line(&self, id: u64) -> String {
        let mut message = json!({"execute": self.name, "id": id});
        if !self.arguments.is_null() {
            message["arguments"] = self.arguments.clone();
        }
        format!("{message}\n")
    }
}

/// Something that QEMU tells unasked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Event {
    /// For example `BALLOON_CHANGE`.
    #[serde(rename = "event")]
    pub name: String,
    /// Depends on the event.
    #[serde(default)]
    pub data: Value,
}

/// One line from QEMU.
#[derive(Debug)]
pub(crate) enum Message {
    Event(Event),
    /// The answer to command `id`: its value, or QEMU's words of refusal.
    Answer {
        id: u64,
        outcome: Result<Value, String>,
    },
}

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    _qmp: serde::de::IgnoredAny,
}

#[derive(Deserialize)]
struct Raw {
    event: Option<String>,
    #[serde(default)]
    data: Value,
    #[serde(default, rename = "return", with = "present")]
    value: Option<Value>,
    error: Option<RawError>,
    id: Option<u64>,
}

#[derive(Deserialize)]
struct RawError {
    desc: String,
}

/// Tells `"return": null` from no `return` at all.
mod present {
    use serde::{Deserialize, Deserializer};
    use serde_json::Value;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Value>, D::Error> {
        Value::deserialize(d).map(Some)
    }
}

/// Whether this is how QEMU says hello.
pub(crate) fn check_greeting(line: &[u8]) -> Result<(), QmpError> {
    match serde_json::from_slice::<Greeting>(line) {
        Ok(_) => Ok(()),
        Err(_) => Err(QmpError::NotQmp(excerpt(line))),
    }
}

/// Reads one line.
pub(crate) fn parse(line: &[u8]) -> Result<Message, QmpError> {
    let garbage = || QmpError::Garbage(excerpt(line));
    let raw: Raw = serde_json::from_slice(line).map_err(|_| garbage())?;
    match raw {
        Raw { event: Some(name), data, .. } => Ok(Message::Event(Event { name, data })),
        Raw { error: Some(RawError { desc }), id: Some(id), .. } => {
            let message = desc.chars().filter(|c| !c.is_control()).take(200).collect();
            Ok(Message::Answer { id, outcome: Err(message) })
        }
        Raw { value: Some(value), id: Some(id), .. } => {
            Ok(Message::Answer { id, outcome: Ok(value) })
        }
        _ => Err(garbage()),
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
    fn answers_without_id_value_or_shape_are_garbage() {
        let deep = "[".repeat(100_000);
        for bad in [
            "",
            "{}",
            "[]",
            "7",
            r#"{"return": {}}"#,
            r#"{"id": 1}"#,
            r#"{"id": -1, "return": 1}"#,
            &deep,
        ] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(matches!(
            parse(br#"{"return": null, "id": 1}"#),
            Ok(Message::Answer { id: 1, .. })
        ));
    }
}
