//! Names of VMs and groups, and the patterns that assign VMs to groups.
//!
//! A pattern has two wildcards, `*` (any run of characters) and `?` (one character). Their small
//! number is deliberate: whether two patterns can match the same name is then decidable. So
//! overlapping groups are found when the configuration is read, not when a VM with a matching
//! name appears.

use std::{fmt, str::Chars, sync::Arc};

use serde::{Deserialize, Serialize};

macro_rules! name {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $type(Arc<str>);

        impl $type {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $type {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $type {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name! {
    /// A virtual machine's name in QEMU (`-name`) or libvirt.
    VmName
}
name! {
    /// A group's name: one tenant, the unit of isolation (Kim 2014 §4.1).
    GroupName
}
name! {
    /// A host's name in its pool.
    HostName
}

/// A pattern over VM names or labels: literal characters, `*` and `?`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NamePattern(String);

impl NamePattern {
    /// The kinds of labels that a VM may have from its manager. A pattern that begins with one is
    /// compared with labels, and never with names: VMs' owners choose names.
    pub const LABELS: [&str; 4] = ["vmid:", "pool:", "tag:", "project:"];

    /// Takes any text; every text is a pattern.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The pattern as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the pattern matches `name`. Wildcards in the name are literal characters. A path
    /// as a name stands for a socket whose VM has no trusted name, and matches nothing. The match
    /// allocates nothing: the policy runs it for every VM and group in every tick.
    #[must_use]
    pub fn matches(&self, name: &VmName) -> bool {
        !name.as_str().starts_with('/') && !self.is_of_labels() && self.fits(name.as_str())
    }

    /// Whether the pattern is about labels, which VMs have from their managers.
    #[must_use]
    pub fn is_of_labels(&self) -> bool {
        Self::LABELS.iter().any(|kind| self.0.starts_with(kind))
    }

    /// Whether the pattern matches a label such as `pool:web`.
    #[must_use]
    pub fn matches_label(&self, label: &str) -> bool {
        self.is_of_labels() && self.fits(label)
    }

    fn fits(&self, text: &str) -> bool {
        let (mut pattern, mut rest) = (self.0.chars(), text.chars());
        // The position to resume from when a star has to match one more character. Only the
        // latest star is kept, because an earlier one that matches more cannot help a later one.
        let mut retry: Option<(Chars<'_>, Chars<'_>)> = None;
        loop {
            let mut ahead = pattern.clone();
            let fits = match (ahead.next(), rest.clone().next()) {
                (Some('*'), _) => {
                    retry = Some((ahead.clone(), rest.clone()));
                    pattern = ahead;
                    continue;
                }
                (None, None) => return true,
                (Some(p), Some(c)) => p == '?' || p == c,
                _ => false,
            };
            if fits {
                pattern = ahead;
                rest.next();
            } else if let Some((after_star, swallowed)) = &mut retry {
                if swallowed.next().is_none() {
                    return false;
                }
                (pattern, rest) = (after_star.clone(), swallowed.clone());
            } else {
                return false;
            }
        }
    }

    /// Whether some name matches both patterns. Cost O(length × length).
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let a: Vec<char> = self.0.chars().collect();
        let b: Vec<char> = other.0.chars().collect();
        // meets[i][j]: some text is matched by both a[i..] and b[j..].
        let mut meets = vec![vec![false; b.len() + 1]; a.len() + 1];
        for i in (0..=a.len()).rev() {
            for j in (0..=b.len()).rev() {
                meets[i][j] = match (a.get(i), b.get(j)) {
                    (None, None) => true,
                    (Some('*'), other) => meets[i + 1][j] || (other.is_some() && meets[i][j + 1]),
                    (other, Some('*')) => meets[i][j + 1] || (other.is_some() && meets[i + 1][j]),
                    (Some(x), Some(y)) => (x == y || *x == '?' || *y == '?') && meets[i + 1][j + 1],
                    _ => false,
                };
            }
        }
        meets[0][0]
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        NamePattern::new(pattern).matches(&name.into())
    }

    #[test]
    fn stars_and_question_marks_match_as_in_a_shell() {
        assert!(matches("web-*", "web-1"));
        assert!(matches("web-*", "web-"));
        assert!(matches("*-db-?", "eu-db-7"));
        assert!(!matches("web-?", "web-10"));
        assert!(!matches("web", "web-1"));
        assert!(matches("a**b", "ab"));
        assert!(!matches("", "x"));
        assert!(matches("*a?c*", "xxabcabd"));
        assert!(!matches("*a?d", "abdabc"));
        assert!(matches("*ü?", "grün"));
    }

    #[test]
    fn a_pattern_of_labels_matches_no_name_and_one_of_names_no_label() {
        let pool = NamePattern::new("pool:web*");
        assert!(pool.matches_label("pool:web/eu") && !pool.matches_label("tag:web"));
        assert!(!matches("pool:web*", "pool:web"), "a VM may call itself so");
        assert!(!NamePattern::new("*").matches_label("pool:web"));
    }

    #[test]
    fn overlap_is_found_without_a_witness() {
        let overlaps = |a: &str, b: &str| NamePattern::new(a).overlaps(&NamePattern::new(b));
        assert!(overlaps("web-*", "*-1"));
        assert!(overlaps("web-1", "web-?"));
        assert!(overlaps("*", "anything"));
        assert!(!overlaps("web-*", "db-*"));
        assert!(!overlaps("a?", "a"));
        assert!(overlaps("*a*", "*b*"));
    }

    proptest! {
        #[test]
        fn patterns_that_share_a_name_overlap(a in "[ab*?]{0,6}", b in "[ab*?]{0,6}", n in "[ab]{0,6}") {
            let (a, b) = (NamePattern::new(a), NamePattern::new(b));
            let name = VmName::from(n.as_str());
            if a.matches(&name) && b.matches(&name) {
                prop_assert!(a.overlaps(&b));
            }
            prop_assert_eq!(a.overlaps(&b), b.overlaps(&a));
        }
    }
}
