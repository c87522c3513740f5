//! The host's headroom: memory that may still be granted to all groups together.
//!
//! A group's surplus needs memory of the host behind it. Where more was sold than there is, or
//! another program on the host grew, the ledgers add up to more than exists. So every grant also
//! has to fit between `MemAvailable` and the host's reserve. When the reserve itself is touched,
//! every grant of every group comes back at once.
//!
//! Memory that the host keeps for overloads of its pool ([`crate::excess`]) is granted only to VMs
//! in sustained overload and to VMs that have moved here for one. It makes no grant come back.

use std::collections::BTreeSet;

use model::{Bytes, HostReading, Reading, Reason, Time, VmName};
use serde::{Deserialize, Serialize};

use crate::{Rule, Rules, tuning};

/// Memory of the host that is never granted: as configured, or a share of its `total`.
#[must_use]
pub fn host_reserve(configured: Option<Bytes>, total: Bytes) -> Bytes {
    configured.unwrap_or(total.percent(tuning::HOST_RESERVE_PERCENT))
}

/// Memory that a host keeps for overloads of its pool ([`crate::excess`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// For VMs in sustained overload.
    pub targets: Bytes,
    /// VMs that have come for it from other hosts.
    pub arrived: BTreeSet<VmName>,
}

/// Memory left to grant on the host in this tick.
#[derive(Debug)]
pub(crate) struct Headroom {
    left: Bytes,
    /// Memory left for VMs in sustained overload only.
    kept: Bytes,
    /// Whether the host has all the memory that it is to keep.
    pub(crate) covers_kept: bool,
    /// Set when the host is short.
    pub(crate) short: Option<Reason>,
    refusal: Reason,
}

impl Headroom {
    /// Measures the host. `promised` is memory that all groups were granted and have not touched;
    /// `cached` is memory in caches, which can be freed at once; `kept` is for overloads.
    pub(crate) fn measure(
        host: Option<Reading<HostReading>>,
        reserve: Option<Bytes>,
        (promised, cached, kept): (Bytes, Bytes, Bytes),
        rules: Rules,
        now: Time,
    ) -> Self {
        let nothing = Bytes::ZERO;
        let unknown = Self {
            left: nothing,
            kept: nothing,
            covers_kept: true,
            short: None,
            refusal: Reason::HostUnknown,
        };
        let Some(host) = host.filter(|h| h.age(now) <= tuning::STALE_AFTER) else {
            return unknown;
        };
        let HostReading { total, available, .. } = host.value;
        let available = available.plus(cached);
        let reserve = host_reserve(reserve, total);
        if !rules.has(Rule::HostReserve) {
            return Self { left: Bytes(u64::MAX), ..unknown };
        }
        let beyond = available.minus(reserve.plus(promised));
        let covers_kept = kept <= beyond;
        let kept = kept.min(beyond);
        let refusal = match kept {
            Bytes::ZERO => Reason::HostReserve { available, reserve },
            kept => Reason::KeptForOverloads { available: available.minus(reserve), kept },
        };
        let short = (available < reserve).then_some(Reason::HostShort { available, reserve });
        Self { left: beyond.minus(kept), kept, covers_kept, short, refusal }
    }

    /// The unclaimed rest, without the memory that is kept for overloads.
    pub(crate) fn left(&self) -> Bytes {
        self.left
    }

    /// Memory that VMs may be granted, overloaded ones (`is_relieved`) also of the kept memory.
    /// Nothing is known to be lacking on a host whose memory is unknown.
    pub(crate) fn grantable(&self, is_relieved: bool) -> Bytes {
        match self.refusal {
            Reason::HostUnknown => Bytes(u64::MAX),
            _ if is_relieved => self.left.plus(self.kept),
            _ => self.left,
        }
    }

    /// The reason for no more.
    pub(crate) fn refusal(&self) -> Reason {
        self.refusal.clone()
    }

    /// Reserves up to `wanted`, for a VM in sustained overload also of the kept memory. Returns the
    /// reserved amount, or the reason for none.
    pub(crate) fn claim_for(&mut self, is_relieved: bool, wanted: Bytes) -> Result<Bytes, Reason> {
        let kept = if is_relieved { self.kept } else { Bytes::ZERO };
        let granted = wanted.min(self.left.plus(kept));
        if granted < tuning::STEP_MIN.min(wanted) {
            return Err(self.refusal());
        }
        let of_kept = granted.min(kept);
        self.kept = self.kept.minus(of_kept);
        self.left = self.left.minus(granted.minus(of_kept));
        Ok(granted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_memory_goes_to_overloaded_vms_alone() {
        let host = HostReading {
            total: Bytes::mib(10_000),
            available: Bytes::mib(3_500),
            ..HostReading::default()
        };
        let mut headroom = Headroom::measure(
            Some(Reading::new(host, Time(0))),
            Some(Bytes::mib(500)),
            (Bytes::mib(1_000), Bytes::ZERO, Bytes::mib(1_500)),
            Rules::ALL,
            Time(0),
        );
        assert_eq!((headroom.left(), headroom.short.is_none()), (Bytes::mib(500), true));
        assert_eq!(headroom.claim_for(true, Bytes::mib(800)), Ok(Bytes::mib(800)));
        assert_eq!(headroom.claim_for(false, Bytes::mib(900)), Ok(Bytes::mib(500)));
        assert!(matches!(
            headroom.claim_for(false, Bytes::mib(100)),
            Err(Reason::KeptForOverloads { kept, .. }) if kept == Bytes::mib(1_500)
        ));
        assert_eq!(headroom.claim_for(true, Bytes::mib(2_000)), Ok(Bytes::mib(700)));
        assert!(headroom.claim_for(true, Bytes::mib(100)).is_err());
    }

    #[test]
    fn a_host_at_its_reserve_keeps_nothing_and_says_so() {
        let host = HostReading {
            total: Bytes::mib(10_000),
            available: Bytes::mib(500),
            ..HostReading::default()
        };
        let (host, reserve) = (Some(Reading::new(host, Time(0))), Some(Bytes::mib(500)));
        let amounts = (Bytes::ZERO, Bytes::ZERO, Bytes::mib(1_500));
        let headroom = Headroom::measure(host, reserve, amounts, Rules::ALL, Time(0));
        assert!(!headroom.covers_kept);
        assert!(matches!(headroom.refusal(), Reason::HostReserve { .. }));
    }
}
