//! Text inside HTML and SVG.

/// The text, fit to stand in an element or an attribute.
#[must_use]
pub fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '&' => "&amp;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\n' | '\t' => c.to_string(),
        // XML allows no other control character.
        c if c.is_control() => '\u{fffd}'.to_string(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

/// Contrast of two colours such as `#08306b`, by the Web Content Accessibility Guidelines.
#[cfg(test)]
pub(crate) fn contrast(one: [f64; 3], other: [f64; 3]) -> f64 {
    let light = |colour: [f64; 3]| {
        let linear = colour.map(|channel| match channel / 255.0 {
            low if low <= 0.04045 => low / 12.92,
            high => ((high + 0.055) / 1.055).powf(2.4),
        });
        0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05
    };
    let (one, other) = (light(one), light(other));
    one.max(other) / one.min(other)
}

/// The channels of a colour such as `08306b`.
#[cfg(test)]
pub(crate) fn channels(hex: &str) -> [f64; 3] {
    [0, 2, 4].map(|at| f64::from(u8::from_str_radix(&hex[at..at + 2], 16).unwrap()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_leaves_its_element() {
        assert_eq!(escaped("<b a=\"&\">\u{1b}\n"), "&lt;b a=&quot;&amp;&quot;&gt;\u{fffd}\n");
    }

    #[test]
    fn black_on_white_has_the_greatest_contrast() {
        assert!((contrast(channels("000000"), channels("ffffff")) - 21.0).abs() < 0.01);
    }
}
