//! The guest's own statistics, which are untrusted until checked.
//!
//! **Values.** A guest omits statistics that it does not have; QEMU shows 2^64−1 for them, older
//! versions −1. Every other value must be a whole number of at most [`LIMIT`]. One bad field
//! invalidates the set, because a guest that lies in one is not trusted in the others. Whether
//! the values fit together (free ≤ total, counters that grow) is checked by the policy.
//!
//! **Dates.** QEMU dates a set by the wall clock, in whole seconds ([`Dating`]). The wall clock
//! jumps, so a date is only trusted within bounds from the boot clock: a set whose date has
//! changed since our last reading arrived after that reading. In doubt a set is dated too old,
//! never too new.

use model::{Bytes, GuestStats, Millis, Time};
use serde_json::Value;

/// Largest valid statistic: an exbibyte.
pub const LIMIT: u64 = 1 << 60;

/// How much QEMU's wall clock may seem ahead of ours.
const AHEAD_MS: u64 = 2_000;

/// Why a guest's statistics were rejected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatsError {
    /// The balloon driver has not reported.
    #[error("the guest has sent no statistics yet: does it have the virtio-balloon driver loaded?")]
    NoneYet,
    /// A field is not a valid number.
    #[error("the guest's statistics are not usable: {field} is {value}, valid is 0 to {LIMIT}")]
    BadValue {
        /// QEMU's name of the field.
        field: String,
        /// Its value.
        value: String,
    },
    /// QEMU's answer has another structure.
    #[error("the guest's statistics are not usable: QEMU's answer lacks `{0}`")]
    Missing(&'static str),
    /// The date lies in the future.
    #[error("the guest's statistics are not usable: dated {0} s in the future")]
    Future(u64),
    /// The date lies before this host was booted.
    #[error("the guest's statistics are not usable: dated {0} before this host was booted")]
    BeforeBoot(Millis),
}

/// Parses QEMU's answer to `qom-get guest-stats`: the statistics and their date in epoch seconds.
///
/// # Errors
/// There are none yet, or a value is invalid.
pub fn parse(answer: &Value) -> Result<(GuestStats, u64), StatsError> {
    let date = answer.get("last-update").ok_or(StatsError::Missing("last-update"))?;
    // No clock shows 2^64-1.
    let date = number("last-update", date)?.ok_or_else(|| bad_value("last-update", date))?;
    if date == 0 {
        return Err(StatsError::NoneYet);
    }
    let stats = answer.get("stats").and_then(Value::as_object);
    let stats = stats.ok_or(StatsError::Missing("stats"))?;
    let count = |field| stats.get(field).map_or(Ok(None), |value| number(field, value));
    let bytes = |field| count(field).map(|value| value.map(Bytes));
    let stats = GuestStats {
        total: bytes("stat-total-memory")?,
        free: bytes("stat-free-memory")?,
        available: bytes("stat-available-memory")?,
        disk_caches: bytes("stat-disk-caches")?,
        swap_in: bytes("stat-swap-in")?,
        swap_out: bytes("stat-swap-out")?,
        major_faults: count("stat-major-faults")?,
        minor_faults: count("stat-minor-faults")?,
        // QEMU 10.0 and Linux 6.12 have it, Linux 6.1 does not.
        oom_kills: count("stat-oom-kills")?,
    };
    Ok((stats, date))
}

/// Checks statistics that are no text of QEMU's: their date is in epoch seconds, and 0 if there are
/// none.
///
/// # Errors
/// There are none yet, or a value is invalid.
pub fn check(stats: &GuestStats, date: u64) -> Result<(), StatsError> {
    if date == 0 {
        return Err(StatsError::NoneYet);
    }
    let GuestStats { total, free, available, disk_caches, swap_in, swap_out, .. } = stats;
    let named = [
        ("available", total),
        ("unused", free),
        ("usable", available),
        ("disk_caches", disk_caches),
        ("swap_in", swap_in),
        ("swap_out", swap_out),
    ];
    let is_bad = |(_, size): &(&str, &Option<Bytes>)| size.is_some_and(|size| size.0 > LIMIT);
    match named.into_iter().find(is_bad) {
        Some((field, size)) => Err(bad_value(field, &Value::from(size.unwrap_or_default().0))),
        None => Ok(()),
    }
}

/// A statistic; `None`: the guest omits it.
fn number(field: &str, value: &Value) -> Result<Option<u64>, StatsError> {
    match (value.as_u64(), value.as_i64()) {
        (Some(u64::MAX), _) | (_, Some(-1)) => Ok(None),
        (Some(n), _) if n <= LIMIT => Ok(Some(n)),
        _ => Err(bad_value(field, value)),
    }
}

fn bad_value(field: &str, value: &Value) -> StatsError {
    let value = value.to_string().chars().take(40).collect();
    StatsError::BadValue { field: field.to_owned(), value }
}

/// Converts the wall-clock dates of one VM's statistics to the boot clock.
#[derive(Debug, Default)]
pub struct Dating {
    last: Option<Last>,
}

#[derive(Debug)]
struct Last {
    date: u64,
    looked: Time,
    at: Option<Time>,
}

impl Dating {
    /// Time at which the set with this `date` was made, if it is read at `now` (`wall_ms` on the
    /// wall clock).
    ///
    /// # Errors
    /// The first date ever read lies in the future, or before this host was booted. The time is
    /// then unknown until the date changes.
    pub fn moment(&mut self, date: u64, now: Time, wall_ms: u64) -> Result<Time, StatsError> {
        let date_ms = date.saturating_mul(1000);
        let ahead_ms = date_ms.saturating_sub(wall_ms);
        let age_ms = wall_ms.saturating_sub(date_ms);
        let by_wall = Time(now.0.saturating_sub(age_ms));
        let is_possible = ahead_ms <= AHEAD_MS && age_ms <= now.0;
        let at = match &self.last {
            Some(last) if last.date == date => last.at,
            Some(last) => Some(by_wall.clamp(last.looked, now.max(last.looked))),
            None => is_possible.then_some(by_wall),
        };
        self.last = Some(Last { date, looked: now, at });
        at.ok_or(match ahead_ms {
            0 => StatsError::BeforeBoot(Millis(age_ms.saturating_sub(now.0))),
            _ => StatsError::Future(ahead_ms / 1000),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(field: &str, value: Value) -> Result<(GuestStats, u64), StatsError> {
        let mut stats = json!({"stat-free-memory": 4096, "stat-swap-in": u64::MAX});
        stats[field] = value;
        parse(&json!({"stats": stats, "last-update": 1_795_177_579}))
    }

    #[test]
    fn what_a_guest_leaves_out_is_absent() {
        let (stats, date) = with("stat-total-memory", json!(-1)).unwrap();
        assert_eq!((stats.free, stats.swap_in, stats.total), (Some(Bytes(4096)), None, None));
        assert_eq!((stats.major_faults, date), (None, 1_795_177_579));
    }

    #[test]
    fn kills_are_counted_where_guest_and_qemu_tell_them() {
        let kills = |value| with("stat-oom-kills", value).unwrap().0.oom_kills;
        assert_eq!(kills(json!(3)), Some(3));
        assert_eq!(kills(json!(u64::MAX)), None, "an older kernel");
        assert_eq!(with("stat-free-memory", json!(1)).unwrap().0.oom_kills, None, "an older QEMU");
    }

    #[test]
    fn negative_absurd_and_wordy_values_are_refused_by_name() {
        for bad in
            [json!(-2), json!("lots"), json!(1.5), json!(1_u64 << 61), json!({}), json!(null)]
        {
            let error = with("stat-free-memory", bad.clone()).unwrap_err();
            assert!(matches!(error, StatsError::BadValue { .. }), "{bad}: {error}");
            assert!(error.to_string().contains(&bad.to_string()), "{error}");
        }
    }

    #[test]
    fn answers_of_another_shape_are_refused() {
        for bad in [json!([]), json!(7), json!({"last-update": 5}), json!({"last-update": "now"})] {
            assert!(parse(&bad).is_err(), "{bad}");
        }
        assert_eq!(parse(&json!({"last-update": 0, "stats": {}})), Err(StatsError::NoneYet));
    }

    #[test]
    fn a_frozen_set_grows_old() {
        let mut dating = Dating::default();
        assert_eq!(dating.moment(1000, Time(50_000), 1_003_000), Ok(Time(47_000)));
        assert_eq!(dating.moment(1000, Time(90_000), 1_043_000), Ok(Time(47_000)));
    }

    #[test]
    fn a_jump_of_the_wall_clock_does_not_date_a_set_before_our_last_look_nor_after_now() {
        let mut dating = Dating::default();
        dating.moment(1000, Time(50_000), 1_000_500).unwrap();
        assert_eq!(dating.moment(1001, Time(51_000), 9_000_000), Ok(Time(50_000)));
        assert_eq!(dating.moment(9_000, Time(52_000), 1_000_000), Ok(Time(52_000)));
    }

    #[test]
    fn statistics_from_before_the_hosts_boot_are_told_as_they_are_and_date_nothing() {
        let mut dating = Dating::default();
        let years = 3 * 365 * 86_400;
        let (now, wall_ms) = (Time(60 * 60 * 1000), 1_795_177_579_000);
        let error = dating.moment(wall_ms / 1000 - years, now, wall_ms).unwrap_err();
        let told = "dated 1094 days before this host was booted";
        assert!(error.to_string().contains(told), "{error}");
        assert!(dating.moment(wall_ms / 1000 - years, now, wall_ms).is_err());
        let later = dating.moment(wall_ms / 1000, now.after(Millis(1000)), wall_ms + 1000);
        assert!(later.is_ok(), "a set that comes while we look was made since");
    }

    #[test]
    fn a_set_of_absent_fields_says_nothing_and_an_absent_date_is_none() {
        let absent = json!({"stat-free-memory": u64::MAX, "stat-total-memory": u64::MAX});
        let all = json!({"stats": absent, "last-update": 1_795_177_579});
        assert_eq!(parse(&all).unwrap().0, GuestStats::default());
        let error = parse(&json!({"stats": absent, "last-update": u64::MAX})).unwrap_err();
        assert!(error.to_string().contains("last-update is 18446744073709551615"), "{error}");
    }

    #[test]
    fn a_first_date_in_the_future_is_not_believed_until_it_changes() {
        let mut dating = Dating::default();
        assert_eq!(dating.moment(5000, Time(9_000), 1_000_000), Err(StatsError::Future(4000)));
        assert!(dating.moment(5000, Time(10_000), 1_001_000).is_err());
        assert_eq!(dating.moment(5001, Time(11_000), 1_002_000), Ok(Time(11_000)));
    }
}
