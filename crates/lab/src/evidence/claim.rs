//! The claims of a scenario: a figure's name, its sentence, unit, target, and the paper's value.

use crate::figures::Target;

/// One figure that CLAIMS.md shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    pub figure: &'static str,
    /// Its unit: `s`, `MiB`, `ops/s`, `ratio`, `count`.
    pub unit: &'static str,
    /// Its target; without one it is told, not claimed.
    pub target: Option<Target>,
    pub sentence: &'static str,
    /// The result in the paper, in the paper's form.
    pub paper: Option<&'static str>,
}

/// A list of claims, one a row: `"figure" >= 3.0 => "unit", "Sentence", "the paper's value";`
///
/// Target and paper's value may be absent. The operators are `>=`, `<=`, `<` and `==`.
macro_rules! claims {
    ($($row:tt)*) => { $crate::evidence::claim::rows!([] $($row)*) };
}

/// Takes the first row of [`claims!`] off, until none is left.
macro_rules! rows {
    ([$($done:expr,)*]) => { &[$($done),*] };
    ([$($done:expr,)*] $figure:literal => $unit:literal, $text:literal
        $(, $paper:literal)?; $($rest:tt)*) => {
        $crate::evidence::claim::rows!([
            $($done,)*
            $crate::evidence::claim::Claim::of($figure, $unit, None, $text, &[$($paper)?]),
        ] $($rest)*)
    };
    ([$($done:expr,)*] $figure:literal $op:tt $limit:expr => $unit:literal, $text:literal
        $(, $paper:literal)?; $($rest:tt)*) => {
        $crate::evidence::claim::rows!([
            $($done,)*
            $crate::evidence::claim::Claim::of(
                $figure,
                $unit,
                Some($crate::evidence::claim::target!($op $limit)),
                $text,
                &[$($paper)?],
            ),
        ] $($rest)*)
    };
}

/// The target that an operator and a limit make.
macro_rules! target {
    (>= $limit:expr) => {
        $crate::figures::Target::AtLeast($limit)
    };
    (<= $limit:expr) => {
        $crate::figures::Target::AtMost($limit)
    };
    (< $limit:expr) => {
        $crate::figures::Target::Below($limit)
    };
    (== $limit:expr) => {
        $crate::figures::Target::Equals($limit)
    };
}

pub(crate) use {claims, rows, target};

impl Claim {
    /// A claim; `paper` holds one value at most.
    pub const fn of(
        figure: &'static str,
        unit: &'static str,
        target: Option<Target>,
        sentence: &'static str,
        paper: &[&'static str],
    ) -> Self {
        let paper = if paper.is_empty() { None } else { Some(paper[0]) };
        Self { figure, unit, target, sentence, paper }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_it_says_and_nothing_else() {
        const ROWS: &[Claim] = claims! {
            "told" => "s", "It is told";
            "least" >= 3.0 => "ratio", "It is at least that", "about 4";
            "exact" == 0.0 => "B", "It is none";
        };
        let targets: Vec<_> = ROWS.iter().map(|row| row.target).collect();
        assert_eq!(targets, [None, Some(Target::AtLeast(3.0)), Some(Target::Equals(0.0))]);
        assert_eq!(ROWS[1].paper, Some("about 4"));
        assert_eq!((ROWS[2].figure, ROWS[2].unit, ROWS[2].paper), ("exact", "B", None));
    }
}
