//! Memory that a host lends to others ([`need`]): when it has to come back.
//!
//! While more than the reserve is available, no memory is taken back. Below it, lent memory is
//! given notice. Below half of the reserve there is no time for a notice. Above twice the reserve
//! there is memory to lend more.
//!
//! Source: Williams 2011 (Overdriver) §4.3 for cooperative swap; the thresholds are ours.

use model::Bytes;

use crate::tuning;

/// The host's need for memory that it has lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// This much, at once.
    Now(Bytes),
    /// This much more, after notice.
    Soon(Bytes),
    /// Nothing.
    Nothing,
    /// Nothing, and there is memory to lend more.
    HasRoom,
}

/// Memory that stays available on a host which lends: the same as for grants.
#[must_use]
pub fn reserve(total: Bytes) -> Bytes {
    total.percent(tuning::HOST_RESERVE_PERCENT)
}

/// The need of a host with `total` memory, of which `available` is left; `leaving` has notice
/// already.
#[must_use]
pub fn need(total: Bytes, available: Bytes, leaving: Bytes) -> Need {
    let reserve = reserve(total);
    let short = reserve.minus(available);
    if available < reserve.share(1, 2) {
        return Need::Now(short);
    }
    match short.minus(leaving) {
        more if !more.is_zero() => Need::Soon(more),
        _ if available > reserve.plus(reserve) => Need::HasRoom,
        _ => Need::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_need_follows_from_the_available_memory() {
        let need = |available, leaving| {
            need(Bytes::mib(100 * 1024), Bytes::mib(available), Bytes::mib(leaving))
        };
        // The reserve is 5 GiB.
        assert_eq!(need(50_000, 0), Need::HasRoom);
        assert_eq!(need(6_000, 0), Need::Nothing);
        assert_eq!(need(5_100, 0), Need::Soon(Bytes::mib(20)));
        assert_eq!(need(5_100, 12), Need::Soon(Bytes::mib(8)));
        assert_eq!(need(5_100, 20), Need::Nothing);
        assert_eq!(need(2_000, 20), Need::Now(Bytes::mib(3_120)));
    }
}
