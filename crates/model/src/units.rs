//! Amounts with their units in the type, so that no bare integer crosses a module border.
//!
//! Sizes are bytes; people write them with a binary unit (`"512MiB"`). A size without a unit is
//! refused, because `base = 512` is ambiguous and has caused outages in other tools. Arithmetic
//! saturates: an absurd reading from a hostile guest may give an absurd sum, never a wrap or a
//! panic.

use std::{fmt, iter::Sum, str::FromStr};

use serde::{Deserialize, Serialize};

/// An amount of memory in bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// `n` binary megabytes.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` binary kilobytes.
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// The difference, or zero where `other` is larger.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The sum, at most `u64::MAX`.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// This amount times `part / whole`, rounded down; zero where `whole` is zero.
    #[must_use]
    pub fn share(self, part: u64, whole: u64) -> Self {
        if whole == 0 {
            return Self::ZERO;
        }
        let exact = u128::from(self.0) * u128::from(part) / u128::from(whole);
        Self(u64::try_from(exact).unwrap_or(u64::MAX))
    }

    /// `n` percent of this amount, rounded down.
    #[must_use]
    pub fn percent(self, n: u64) -> Self {
        self.share(n, 100)
    }

    /// Rounds down to whole mebibytes. Balloon targets are rounded so that they read well.
    #[must_use]
    pub const fn floor_mib(self) -> Self {
        Self(self.0 & !((1 << 20) - 1))
    }

    /// Whether the amount is zero.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The amount in mebibytes, for charts and tables.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a chart needs three digits")]
    pub fn as_mib(self) -> f64 {
        self.0 as f64 / f64::from(1 << 20)
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Self::plus)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [largest, ..] = UNITS;
        // 1023.97 MiB is 1 GiB.
        let fits = |(_, size): &&(&str, u64)| tenths(self.0, *size) < 10_240;
        let (unit, size) = UNITS.iter().rev().find(fits).unwrap_or(&largest);
        let tenths = tenths(self.0, *size);
        let text = match (tenths / 10, tenths % 10) {
            (whole, 0) => format!("{whole} {unit}"),
            (whole, tenth) => format!("{whole}.{tenth} {unit}"),
        };
        f.pad(&text)
    }
}

/// Tenths of this unit, rounded.
const fn tenths(bytes: u64, unit: u64) -> u64 {
    (bytes / unit).saturating_mul(10).saturating_add((bytes % unit * 10 + unit / 2) / unit)
}

/// Why a text is not a size. The message says what would be valid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SizeError {
    /// A number without a unit.
    #[error("`{0}` has no unit; write for example \"512MiB\" (B, KiB, MiB, GiB, TiB)")]
    NoUnit(String),
    /// Neither a number nor a known unit.
    #[error("`{0}` is no size; write a whole number and a unit, for example \"512MiB\"")]
    Malformed(String),
    /// More than 64 bits of bytes.
    #[error("`{0}` is larger than the 16 EiB that a size can hold")]
    TooLarge(String),
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (digits, unit) = (&trimmed[..split], trimmed[split..].trim());
        if digits.is_empty() {
            return Err(SizeError::Malformed(text.to_owned()));
        }
        if unit.is_empty() {
            return Err(SizeError::NoUnit(text.to_owned()));
        }
        let (_, size) = UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(|| SizeError::Malformed(text.to_owned()))?;
        digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(*size))
            .map(Self)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

/// A length of time in milliseconds.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Millis(pub u64);

impl Millis {
    /// `n` seconds.
    pub const fn secs(n: u64) -> Self {
        Self(n * 1000)
    }

    /// `n` times this length, saturating.
    #[must_use]
    pub const fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            ms @ 0..1_000 => format!("{ms} ms"),
            ms @ 1_000..120_000 if ms % 1000 < 100 => format!("{} s", ms / 1000),
            ms @ 1_000..120_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
            ms @ 120_000..172_800_000 => format!("{} min", ms / 60_000),
            ms => format!("{} days", ms / 86_400_000),
        };
        f.pad(&text)
    }
}

/// A time in milliseconds on the host's boot clock, which does not jump and continues across
/// restarts of the daemon.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// Time since `earlier`; zero when `earlier` is in the future.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }

    /// The time `length` later.
    #[must_use]
    pub const fn after(self, length: Millis) -> Self {
        Self(self.0.saturating_add(length.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_back_what_people_write() {
        assert_eq!("512MiB".parse(), Ok(Bytes::mib(512)));
        assert_eq!(" 2 GiB ".parse(), Ok(Bytes::mib(2048)));
        assert_eq!("0B".parse(), Ok(Bytes::ZERO));
        assert_eq!(Bytes::mib(1536).to_string(), "1.5 GiB");
        assert_eq!(Bytes(0).to_string(), "0 B");
    }

    #[test]
    fn sizes_are_rounded_to_a_tenth_of_their_unit() {
        let shown = |bytes: u64| Bytes(bytes).to_string();
        assert_eq!(shown(1200 << 20), "1.2 GiB");
        assert_eq!(shown((1 << 30) - 1), "1 GiB");
        assert_eq!(shown((1023 << 20) + (900 << 10)), "1023.9 MiB");
        assert_eq!(
            (shown(1023), shown(1024), shown(1075)),
            ("1023 B".into(), "1 KiB".into(), "1 KiB".into())
        );
        assert_eq!(shown(1076), "1.1 KiB");
        assert_eq!(shown(u64::MAX), "16777216 TiB");
    }

    #[test]
    fn a_size_without_a_unit_is_refused_with_advice() {
        let error = "512".parse::<Bytes>().unwrap_err();
        assert_eq!(error, SizeError::NoUnit("512".into()));
        assert!(error.to_string().contains("512MiB"));
    }

    #[test]
    fn sizes_that_are_no_sizes_are_refused() {
        for text in ["", "MiB", "-1MiB", "1.5GiB", "12MB", "1 KiB x"] {
            assert!(matches!(text.parse::<Bytes>(), Err(SizeError::Malformed(_))), "{text}");
        }
        assert!(matches!("99999999999TiB".parse::<Bytes>(), Err(SizeError::TooLarge(_))));
    }

    #[test]
    fn shares_never_overflow() {
        assert_eq!(Bytes(u64::MAX).share(u64::MAX, 1), Bytes(u64::MAX));
        assert_eq!(Bytes::mib(100).share(1, 3), Bytes(34_952_533));
        assert_eq!(Bytes::mib(1).share(1, 0), Bytes::ZERO);
    }

    #[test]
    fn time_reads_naturally() {
        assert_eq!(Millis(250).to_string(), "250 ms");
        assert_eq!(Millis(5_500).to_string(), "5.5 s");
        assert_eq!(Millis::secs(600).to_string(), "10 min");
        assert_eq!(Millis::secs(3 * 86_400).to_string(), "3 days");
        assert_eq!(Time(5).since(Time(9)), Millis(0));
    }
}
