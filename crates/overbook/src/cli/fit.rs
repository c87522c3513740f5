//! Makes text fit a width: names shortened in the middle, sentences cut at the end or wrapped.
//!
//! A name that is cut at its end loses the part that tells it from the others
//! (`web-customer-0016`, `web-customer-0017`). So all names of a column are shortened together: the
//! mark stands where the most of them stay distinct.

use std::collections::BTreeSet;

/// Stands for text that was left out.
const MARK: char = '…';

/// The text, cut at its end to `width` characters.
pub(crate) fn clip(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let Some(kept) = width.checked_sub(1) else { return String::new() };
    text.chars().take(kept).chain([MARK]).collect()
}

/// The names, each at most `width` characters long.
pub(crate) fn shorten<'a>(names: impl Iterator<Item = &'a str>, width: usize) -> Vec<String> {
    let names: Vec<Vec<char>> = names.map(|name| name.chars().collect()).collect();
    if width < 3 {
        return names.iter().map(|name| name.iter().take(width).collect()).collect();
    }
    let at = |head: usize| -> Vec<String> {
        names.iter().map(|name| in_the_middle(name, head, width)).collect()
    };
    let distinct = |short: &[String]| short.iter().collect::<BTreeSet<_>>().len();
    // The usual place keeps the beginning, which names the kind, and four digits at the end.
    let usual = width.saturating_sub(5).max(width / 2);
    let mut best = at(usual);
    if distinct(&best) < names.len() {
        for other in (1..width - 1).rev().map(at) {
            if distinct(&other) > distinct(&best) {
                best = other;
            }
        }
    }
    best
}

/// The name with its first `head` characters and as much of its end as fits.
fn in_the_middle(name: &[char], head: usize, width: usize) -> String {
    if name.len() <= width {
        return name.iter().collect();
    }
    let tail = name.len() - (width - 1 - head);
    name[..head].iter().chain([&MARK]).chain(&name[tail..]).collect()
}

/// The text in lines of at most `width` characters, broken at spaces where that is possible. Lines
/// after the first of each paragraph begin with `indent` spaces.
pub(crate) fn wrap(text: &str, width: usize, indent: usize) -> Vec<String> {
    let width = width.max(indent + 1);
    text.lines().flat_map(|line| wrap_line(line, width, indent)).collect()
}

fn wrap_line(line: &str, width: usize, indent: usize) -> Vec<String> {
    let mut rest: Vec<char> = line.chars().collect();
    let mut lines = Vec::new();
    while rest.len() > width {
        // A space within the indentation is no place to break at.
        let from = if lines.is_empty() { 1 } else { indent + 1 };
        let space = (from..=width).rev().find(|&at| rest[at] == ' ' && rest[at - 1] != ' ');
        let at = space.unwrap_or(width);
        lines.push(rest[..at].iter().collect());
        let words = rest[at..].iter().skip_while(|c| **c == ' ').copied();
        rest = std::iter::repeat_n(' ', indent).chain(words).collect();
    }
    lines.push(rest.iter().collect());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(names: &[&str], width: usize) -> Vec<String> {
        shorten(names.iter().copied(), width)
    }

    #[test]
    fn names_stay_distinct_wherever_they_differ() {
        let at_the_end: Vec<String> =
            (0..100).map(|n| format!("web-customer-frontend-{n:04}")).collect();
        let names: Vec<&str> = at_the_end.iter().map(String::as_str).collect();
        assert_eq!(short(&names, 13)[17], "web-cust…0017");
        let in_front = ["alpha-production-server", "beta-production-server"];
        assert_eq!(short(&in_front, 12), ["alpha-p…rver", "beta-pr…rver"]);
        let within = ["shop-0016-production-web", "shop-0017-production-web"];
        assert_eq!(short(&within, 12), ["shop-0016-…b", "shop-0017-…b"]);
        for width in 8..30 {
            let all = short(&names, width);
            assert!(all.iter().all(|name| name.chars().count() <= width), "{all:?}");
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 100, "{width}");
        }
    }

    #[test]
    fn a_name_that_fits_is_left_as_it_is() {
        assert_eq!(short(&["web-1", "a-rather-long-name"], 10), ["web-1", "a-rat…name"]);
        assert_eq!(short(&["web-1"], 0), [""]);
    }

    #[test]
    fn text_is_cut_at_its_end() {
        assert_eq!(clip("nothing calls for a change", 10), "nothing c…");
        assert_eq!(clip("ok", 2), "ok");
        assert_eq!(clip("ok", 0), "");
    }

    #[test]
    fn lines_are_broken_at_spaces_and_indented() {
        assert_eq!(wrap("one two three", 8, 2), ["one two", "  three"]);
        assert_eq!(
            wrap("Label   a word and more", 12, 8),
            ["Label   a", "        word", "        and", "        more"]
        );
        assert_eq!(wrap("abcdefgh", 3, 0), ["abc", "def", "gh"], "a word longer than the line");
        assert_eq!(wrap("a\n\nb", 9, 0), ["a", "", "b"]);
        assert_eq!(wrap("abc", 0, 0), ["a", "b", "c"]);
    }
}
