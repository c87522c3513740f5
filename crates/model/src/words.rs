//! Text from outside, made safe to show, log and pass on.
//!
//! Names, reasons and error texts come from guests, QEMUs, shims, disk servers and other hosts. A
//! terminal obeys control characters, and an outsider that floods a log makes it useless. So each
//! decoder of such a text passes it through [`plain`] at once: all text behind the decoder is
//! clean.

use serde::{Deserialize, Deserializer};

/// The longest text from outside, in characters.
pub const MOST: usize = 200;

/// Removes control characters and characters that change a line's layout, and truncates the text
/// to [`MOST`] characters. Line ends and tabs become spaces.
#[must_use]
pub fn plain(text: &str) -> String {
    text.chars().filter_map(shown).take(MOST).collect()
}

/// Whether [`plain`] leaves the text as it is.
#[must_use]
pub fn is_plain(text: &str) -> bool {
    text.chars().count() <= MOST && text.chars().all(is_harmless)
}

/// For `#[serde(deserialize_with = "…")]`: a text from outside.
///
/// # Errors
/// When there is no text.
pub fn of_others<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(|text| plain(&text))
}

/// The same where the text may be missing.
///
/// # Errors
/// When there is something else.
pub fn maybe_of_others<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Option::<String>::deserialize(from).map(|text| text.map(|text| plain(&text)))
}

/// Whether a terminal shows this character, and does nothing else.
#[must_use]
pub fn is_harmless(c: char) -> bool {
    shown(c) == Some(c)
}

fn shown(c: char) -> Option<char> {
    match c {
        '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => Some(' '),
        // Some of these turn the direction of the text behind them, others are invisible.
        '\u{200b}'..='\u{200f}'
        | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{feff}' => None,
        c if c.is_control() => None,
        c => Some(c),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_gone() {
        assert_eq!(plain("\u{1b}[2Jred\u{9b}31m\u{7}\0"), "[2Jred31m");
        assert_eq!(plain("one\ntwo\tthree"), "one two three");
        assert_eq!(plain("abc\u{202e}cba\u{2066}"), "abccba");
        assert_eq!(plain("Grüße, 世界"), "Grüße, 世界");
    }

    #[test]
    fn a_long_text_is_cut_off_between_two_characters() {
        assert_eq!(plain(&"ü".repeat(10_000)).chars().count(), MOST);
    }

    #[test]
    fn what_is_plain_stays_as_it_is() {
        assert!(is_plain("web-1") && is_plain(&"x".repeat(MOST)));
        assert!(!is_plain("a\nb") && !is_plain(&"x".repeat(MOST + 1)));
    }

    #[test]
    fn texts_are_cleaned_where_they_are_read() {
        #[derive(Deserialize)]
        struct Said {
            #[serde(deserialize_with = "of_others")]
            why: String,
            #[serde(default, deserialize_with = "maybe_of_others")]
            more: Option<String>,
        }
        let said: Said = serde_json::from_str(r#"{"why": "a\u001bb"}"#).unwrap();
        assert_eq!((said.why.as_str(), said.more), ("ab", None));
    }
}
