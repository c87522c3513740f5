//! Moments and durations, as the command line writes them.

use model::{Millis, date::utc};

/// Reads a moment as [`utc`] writes it, in milliseconds since the Unix epoch.
pub(super) fn moment(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is no moment; write one as `2026-05-28T20:23:40Z` (UTC)");
    let digits = |at: std::ops::Range<usize>| {
        let part = text.get(at).filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
        part.and_then(|part| part.parse::<u64>().ok()).ok_or_else(wrong)
    };
    let (year, month, day) = (digits(0..4)?, digits(5..7)?, digits(8..10)?);
    let (hour, minute, second) = (digits(11..13)?, digits(14..16)?, digits(17..19)?);
    // Hinnant's `days_from_civil`.
    let shifted_year = if month > 2 { year } else { year.checked_sub(1).ok_or_else(wrong)? };
    let (era, year_of_era) = (shifted_year / 400, shifted_year % 400);
    let shifted_month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted_month + 2) / 5 + day.checked_sub(1).ok_or_else(wrong)?;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = (era * 146_097 + day_of_era).checked_sub(719_468).ok_or_else(wrong)?;
    let wall_ms = (days * 86_400 + hour * 3600 + minute * 60 + second) * 1000;
    // This also refuses a 30 February, a 25th hour and other separators.
    if utc(wall_ms) == text { Ok(wall_ms) } else { Err(wrong()) }
}

/// Reads `90s`, `15min`, `2h` or `7d`.
pub fn length(text: &str) -> Result<Millis, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let seconds = match unit {
        "s" => 1,
        "min" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err("write a number and s, min, h or d, for example `15min`".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| format!("`{digits}` is no whole number"))?;
    if number == 0 {
        return Err("nothing lies in no time; valid: `1s` and more".to_owned());
    }
    Ok(Millis(number.saturating_mul(seconds).saturating_mul(1000)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_read_as_they_are_written() {
        for at in [0, 951_782_400_000, 1_780_000_000_000, 4_102_444_799_000] {
            assert_eq!(moment(&utc(at)), Ok(at));
        }
        for wrong in [
            "",
            "now",
            "2026-05-28",
            "2026-02-30T00:00:00Z",
            "2026-05-28T25:00:00Z",
            "2026-05-28 20:23:40Z",
            "2026-00-00T00:00:00Z",
            "0000-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "+026-05-28T20:23:40Z",
        ] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lengths_need_a_unit() {
        assert_eq!(length("15min"), Ok(Millis::secs(900)));
        assert_eq!(length("2h"), Ok(Millis::secs(7200)));
        for wrong in ["15", "h", "-1h", "1y", "0s", "0min", "99999999999999999999s"] {
            assert!(length(wrong).is_err(), "{wrong}");
        }
    }
}
