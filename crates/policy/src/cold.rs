//! VMs whose memory the host pages out: their state, and paging ahead of need.
//!
//! **Problem.** Of a VM with a balloon, only the guest tells which memory it leaves unused and
//! whether it suffers; some guests lie, and some have no swap and cannot give anything. **Idea.**
//! Where the host pages out, it sees both itself: memory that was not touched for a minute, and
//! refaults ([`guest`]). So such a VM takes part in all policies as one with a perfect balloon,
//! whose statistics are the host's own.
//!
//! **Ahead of need** ([`may_go`]): memory is paged out as long as refaults in a minute stay below
//! a share of the working set, the bound of Google's far memory (Lagar-Cavilla 2019 §4.3). Beyond
//! the bound, the VM gets a minute's refaults back as memory. Its waits ([`waits`]) are refaults
//! times the measured duration of one: the pressure that paging causes. The kernel's PSI of
//! QEMU's cgroup would also count QEMU's other waits, and is not available everywhere.
//!
//! Physical memory is charged: a page that is out counts as its memory in the host's swap.

use model::{Bytes, Cold, Reading, Reason, Time, Tracking, reason::Pressure};

use crate::{statistics::GuestMemory, tuning};

/// The host's view of a guest, in the form of statistics. The guest's total is its resident
/// limit; memory not touched for a minute is free.
pub(crate) fn guest(cold: Option<Reading<Cold>>, now: Time) -> Result<GuestMemory, Reason> {
    let cold = cold.ok_or(Reason::NotPaged)?;
    let age = cold.age(now);
    if age > tuning::USED_STALE_AFTER {
        return Err(Reason::NotPaged);
    }
    let Reading { value: cold, at } = cold;
    // The unfilled part of the resident limit is free, too.
    let total = cold.target.map_or(cold.resident, |target| target.max(cold.resident));
    let free =
        total.minus(cold.resident).plus(cold.untouched[1].minus(cold.out).min(cold.resident));
    let waits = waits(&cold);
    // A VM that has not yet filled its resident limit lacks no memory.
    let is_filling = cold.target.is_some_and(|target| target.minus(cold.resident) >= tuning::UNIT);
    let sign = |least: f64| {
        (waits >= least && !is_filling)
            .then_some(Pressure::Refaults { per_second: cold.refaulted_per_s })
    };
    let (demand, pressure) = (sign(tuning::WAITS_FOR_MORE), sign(tuning::SUFFERS_WAITS));
    Ok(GuestMemory { at, total, free, available: free, demand, pressure })
}

/// Duration of a refault, in seconds.
pub(crate) fn refault_s(cold: &Cold) -> f64 {
    let ns = if cold.refault_ns == 0 { tuning::REFAULT_NS } else { cold.refault_ns as f64 };
    ns / 1e9
}

/// The share of one vCPU's time for which the VM waits for refaults.
#[must_use]
pub fn waits(cold: &Cold) -> f64 {
    let waits = cold.refaults_per_s * refault_s(cold);
    // An implausible rate is no reason to take memory from the VM.
    if waits.is_finite() { waits.max(0.0) } else { 1.0 }
}

/// Memory that the host's swap takes for the pages that are out.
pub(crate) fn charged(cold: &Cold, swap_cost: f32) -> Bytes {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a percentage that is bounded"
    )]
    let percent = (f64::from(swap_cost) * 100.0).round().clamp(0.0, 200.0) as u64;
    cold.out.percent(percent)
}

/// Whether more of a VM may be paged out ahead of need, where `points` hundredths of a percent of
/// its working set may refault in a minute. If not: the amount by which the VM is to grow.
pub(crate) fn may_go(cold: &Cold, tracking: Option<&Tracking>, points: u16) -> Result<(), Bytes> {
    let set = tracking.and_then(|tracking| tracking.working_set).unwrap_or_default();
    let per_minute = cold.refaulted_per_s.share(60, 1);
    // A few refaults in a minute are ignored.
    let bound = set.share(points.into(), 10_000).max(tuning::FEW_REFAULTS);
    if per_minute <= bound { Ok(()) } else { Err(per_minute) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cold(resident: u64, out: u64, untouched: u64, refaults_per_s: f64) -> Cold {
        Cold {
            resident: Bytes::mib(resident),
            out: Bytes::mib(out),
            untouched: [untouched, untouched, 0].map(Bytes::mib),
            refaults_per_s,
            refaulted_per_s: Bytes::kib(128),
            refault_ns: 100_000,
            ..Cold::default()
        }
    }

    fn of(cold: Cold) -> GuestMemory {
        guest(Some(Reading::new(cold, Time(0))), Time(0)).unwrap()
    }

    #[test]
    fn what_was_not_touched_for_a_minute_and_is_in_memory_is_free() {
        let guest = of(cold(300, 100, 180, 0.0));
        assert_eq!((guest.total, guest.free), (Bytes::mib(300), Bytes::mib(80)));
        assert_eq!((guest.demand, guest.pressure), (None, None));
        assert_eq!(of(cold(50, 0, 180, 0.0)).free, Bytes::mib(50));
    }

    #[test]
    fn who_waits_for_what_is_out_wants_more_and_who_waits_long_suffers() {
        let signs = |per_s| {
            let guest = of(cold(300, 100, 180, per_s));
            (guest.demand.is_some(), guest.pressure.is_some())
        };
        assert_eq!(
            [1.0, 60.0, 600.0, f64::NAN].map(signs),
            [(false, false), (true, false), (true, true), (true, true)]
        );
    }

    #[test]
    fn what_is_not_known_of_late_is_not_believed() {
        let reading = Reading::new(cold(300, 0, 0, 0.0), Time(0));
        let late = Time(0).after(tuning::USED_STALE_AFTER).after(model::Millis(1));
        assert_eq!(guest(Some(reading), late), Err(Reason::NotPaged));
        assert_eq!(guest(None, Time(0)), Err(Reason::NotPaged));
    }

    #[test]
    fn more_goes_ahead_until_too_much_comes_back() {
        let tracking = Tracking { working_set: Some(Bytes::mib(1_000)), ..Tracking::default() };
        let refaulting = |kib| Cold { refaulted_per_s: Bytes::kib(kib), ..Cold::default() };
        assert_eq!(may_go(&refaulting(30), Some(&tracking), 20), Ok(()));
        assert_eq!(may_go(&refaulting(50), Some(&tracking), 20), Err(Bytes::kib(3_000)));
        assert_eq!(may_go(&refaulting(0), None, 20), Ok(()));
    }

    #[test]
    fn what_is_out_is_charged_with_what_its_swap_takes() {
        let cold = cold(300, 100, 0, 0.0);
        assert_eq!(charged(&cold, 0.0), Bytes::ZERO);
        assert_eq!(charged(&cold, 0.35), Bytes::mib(35));
        assert_eq!(charged(&cold, f32::INFINITY), Bytes::mib(200));
    }
}
