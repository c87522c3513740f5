//! Memory that a host lends to others ([`need`]): when it has to come back.
//!
//! While more than the reserve is available, no memory is taken back. Below it, lent memory is
//! given notice. Below half of the reserve there is no time for a notice. Above twice the reserve
//! there is memory to lend more.
//!
//! A daemon on the host knows more: the host's share of its pool's excess space, and the memory
//! that its VMs want. By its word the repository holds no more than [`may`](Holding::may), and that
//! much as soon as the host has it.
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
    /// Nothing, and memory to lend is wanted of the repository.
    Lacks,
}

/// The memory of a repository, in the daemon's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The memory that it holds, lent or free.
    pub holds: Bytes,
    /// The memory that it may hold.
    pub may: Bytes,
}

/// Memory that stays available on a host which lends: the same as for grants.
#[must_use]
pub fn reserve(total: Bytes) -> Bytes {
    total.percent(tuning::HOST_RESERVE_PERCENT)
}

/// The need of a host with `total` memory, of which `available` is left; `leaving` has notice
/// already. `holding`: the daemon's word, if there is a daemon.
#[must_use]
pub fn need(total: Bytes, available: Bytes, leaving: Bytes, holding: Option<Holding>) -> Need {
    let reserve = reserve(total);
    let short = reserve.minus(available);
    if available < reserve.share(1, 2) {
        return Need::Now(short);
    }
    let beyond = holding.map_or(Bytes::ZERO, |holding| holding.holds.minus(holding.may));
    match (short.max(beyond).minus(leaving), holding) {
        (more, _) if !more.is_zero() => Need::Soon(more),
        (_, Some(holding)) if holding.holds >= holding.may => Need::Nothing,
        (_, Some(_)) if available > reserve => Need::Lacks,
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
            need(Bytes::mib(100 * 1024), Bytes::mib(available), Bytes::mib(leaving), None)
        };
        // The reserve is 5 GiB.
        assert_eq!(need(50_000, 0), Need::HasRoom);
        assert_eq!(need(6_000, 0), Need::Nothing);
        assert_eq!(need(5_100, 0), Need::Soon(Bytes::mib(20)));
        assert_eq!(need(5_100, 12), Need::Soon(Bytes::mib(8)));
        assert_eq!(need(5_100, 20), Need::Nothing);
        assert_eq!(need(2_000, 20), Need::Now(Bytes::mib(3_120)));
    }

    #[test]
    fn a_daemon_says_how_much_is_held() {
        let need = |available, leaving, holds, may| {
            let (total, leaving) = (Bytes::mib(100 * 1024), Bytes::mib(leaving));
            let holding = Holding { holds: Bytes::mib(holds), may: Bytes::mib(may) };
            super::need(total, Bytes::mib(available), leaving, Some(holding))
        };
        assert_eq!(need(6_000, 0, 1_000, 400), Need::Soon(Bytes::mib(600)));
        assert_eq!(need(6_000, 600, 1_000, 400), Need::Nothing);
        assert_eq!(need(6_000, 0, 400, 1_000), Need::Lacks);
        assert_eq!(need(50_000, 0, 1_000, 1_000), Need::Nothing, "it holds no more than it may");
        assert_eq!(need(5_000, 0, 400, 1_000), Need::Soon(Bytes::mib(120)), "the host comes first");
    }
}
