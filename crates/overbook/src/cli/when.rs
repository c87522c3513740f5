//! Moments and durations, as the command line writes them.

use model::Millis;

/// A moment as UTC, to the second (RFC 3339). The date is Howard Hinnant's `civil_from_days`.
pub(super) fn utc(wall_ms: u64) -> String {
    let seconds = wall_ms / 1000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Reads `90s`, `15min`, `2h` or `7d`.
pub(super) fn length(text: &str) -> Result<Millis, String> {
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
    fn moments_are_written_as_utc() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400_000), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_780_000_000_999), "2026-05-28T20:26:40Z");
        assert_eq!(utc(4_102_444_799_000), "2099-12-31T23:59:59Z");
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
