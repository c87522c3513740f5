//! The host's headroom: memory that may still be granted to all groups together.
//!
//! A group's surplus needs memory of the host behind it. Where more was sold than there is, or
//! another program on the host grew, the ledgers add up to more than exists. So every grant also
//! has to fit between `MemAvailable` and the host's reserve. When the reserve itself is touched,
//! every grant of every group comes back at once.

use model::{Bytes, HostReading, Reading, Reason, Time};

use crate::{Rule, Rules, tuning};

/// Memory of the host that is never granted: as configured, or a share of its `total`.
#[must_use]
pub fn host_reserve(configured: Option<Bytes>, total: Bytes) -> Bytes {
    configured.unwrap_or(total.percent(tuning::HOST_RESERVE_PERCENT))
}

/// Memory left to grant on the host in this tick.
#[derive(Debug)]
pub(crate) struct Headroom {
    left: Bytes,
    /// Set when the host is short.
    pub(crate) short: Option<Reason>,
    refusal: Reason,
}

impl Headroom {
    /// Measures the host. `promised` is memory that all groups were granted and have not touched;
    /// `cached` is memory in caches, which can be freed at once.
    pub(crate) fn measure(
        host: Option<Reading<HostReading>>,
        reserve: Option<Bytes>,
        promised: Bytes,
        cached: Bytes,
        rules: Rules,
        now: Time,
    ) -> Self {
        let unknown = Self { left: Bytes::ZERO, short: None, refusal: Reason::HostUnknown };
        let Some(host) = host.filter(|h| h.age(now) <= tuning::STALE_AFTER) else {
            return unknown;
        };
        let HostReading { total, available, .. } = host.value;
        let available = available.plus(cached);
        let reserve = host_reserve(reserve, total);
        if !rules.has(Rule::HostReserve) {
            return Self { left: Bytes(u64::MAX), ..unknown };
        }
        Self {
            left: available.minus(reserve.plus(promised)),
            short: (available < reserve).then_some(Reason::HostShort { available, reserve }),
            refusal: Reason::HostReserve { available, reserve },
        }
    }

    /// The unclaimed rest.
    pub(crate) fn left(&self) -> Bytes {
        self.left
    }

    /// The reason for no more.
    pub(crate) fn refusal(&self) -> Reason {
        self.refusal.clone()
    }

    /// Reserves up to `wanted`. Returns the reserved amount, or the reason for none.
    pub(crate) fn claim(&mut self, wanted: Bytes) -> Result<Bytes, Reason> {
        let granted = wanted.min(self.left);
        if granted < tuning::STEP_MIN.min(wanted) {
            return Err(self.refusal());
        }
        self.left = self.left.minus(granted);
        Ok(granted)
    }
}
