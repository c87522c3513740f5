//! The rate of scanning a group's memory for identical pages (Kim 2014 §4.2.1, Algorithm 1).
//!
//! Scanning takes CPU time, and merged pages free memory of the group. So scanning is fast while
//! CPU time is spare. Without spare CPU time it is as slow as possible, unless the group's VMs
//! swap and scanning does find pages: a page from swap costs more than the CPU time to merge one.
//! The rate rises by steps and falls by halves, as in congestion control, once in each
//! [`tuning::PERIOD`].
//!
//! The paper measures the CPU time of a group's container; here it is the whole host's CPU
//! utilization, because spare CPU time belongs to no group. Swap activity comes from the guests'
//! own statistics, where they are plausible. A guest that swaps without need costs its host at
//! most the time for real merges, because the worker counts the merges.
//!
//! The paper's line 13 prints MIN where MAX is meant.

use model::{Bytes, DedupSpec, PagesPerMs, Reason, Scan};

use crate::{member::GroupVm, tuning};

/// The controllers of the paper. The adaptive ones differ in their inputs (Kim 2014 §6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// Static-X: a fixed rate.
    Static(PagesPerMs),
    /// Adaptive-C: CPU utilization.
    Cpu,
    /// Adaptive-CS: CPU utilization and swap activity.
    CpuSwap,
    /// Adaptive-CSD: in addition, the saving by deduplication. The setting `adaptive` selects it.
    CpuSwapDedup,
}

/// Events of the last period.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Period {
    /// CPU utilization of the host, 0 to 1; `None`: unknown, which counts as fully busy.
    pub cpu_busy: Option<f32>,
    /// Swap traffic, in and out, of the VMs for which the group is scanned: the group's, or its
    /// borrower's.
    pub swapped: Bytes,
    /// Memory that was merged.
    pub merged: Bytes,
    /// Memory that was merged earlier, then written and unshared.
    pub broken: Bytes,
    /// Number of VMs whose pages are being merged.
    pub vms: u64,
}

impl Period {
    /// The last period of a group with these members. It is scanned for the memory of `for_whom`:
    /// its own members, or those of a group that borrows its idle memory (Kim 2014 §7.2).
    pub(crate) fn of(cpu_busy: Option<f32>, members: &[GroupVm], for_whom: &[GroupVm]) -> Self {
        let merging = || members.iter().filter_map(|member| member.merging);
        Self {
            cpu_busy,
            swapped: for_whom.iter().map(GroupVm::swapped).sum(),
            merged: merging().map(|vm| vm.merged).sum(),
            broken: merging().map(|vm| vm.broken).sum(),
            vms: merging().map(|_| 1).sum(),
        }
    }
}

/// Decides one group's rate until the next period.
pub(crate) fn decide(spec: DedupSpec, last_rate: Option<PagesPerMs>, last: &Period) -> Scan {
    let controller = match spec {
        DedupSpec::Off => return Scan { rate: None, reason: Reason::DedupOff, payer: None },
        DedupSpec::AdaptiveC => Controller::Cpu,
        DedupSpec::AdaptiveCs => Controller::CpuSwap,
        DedupSpec::Adaptive => Controller::CpuSwapDedup,
        DedupSpec::Fixed(rate) => Controller::Static(rate),
    };
    let (rate, reason) = controller.next(last_rate.unwrap_or(tuning::SCAN_RATE_MIN), last);
    Scan { rate: Some(rate), reason, payer: None }
}

impl Controller {
    /// The rate after a period with `rate`, and the reason.
    #[must_use]
    pub fn next(self, rate: PagesPerMs, last: &Period) -> (PagesPerMs, Reason) {
        let faster = PagesPerMs(rate.0.saturating_add(tuning::SCAN_STEP.0));
        let slower = PagesPerMs(rate.0 / 2);
        let is_productive = |saved: Bytes| saved.0 / last.vms.max(1) > tuning::SCAN_PRODUCTIVE.0;
        let (swapped, saved) = (last.swapped, last.merged.minus(last.broken));
        let (next, reason) = match (self, cpu(last.cpu_busy)) {
            (Self::Static(fixed), _) => return (fixed, Reason::ScanFixed),
            (_, Ok(idle)) => (faster, idle),
            (Self::Cpu, Err(busy)) => (slower, busy),
            (_, Err(busy)) if swapped.is_zero() => (slower, busy),
            (Self::CpuSwap, _) => (faster, Reason::ScanForSwapping { swapped }),
            (Self::CpuSwapDedup, _) if saved.is_zero() => {
                (slower, Reason::ScanUnproductive { swapped })
            }
            (Self::CpuSwapDedup, _) if is_productive(saved) => {
                (faster, Reason::ScanProductive { swapped, saved })
            }
            (Self::CpuSwapDedup, _) => (rate, Reason::ScanSlow { swapped, saved }),
        };
        (next.clamp(tuning::SCAN_RATE_MIN, tuning::SCAN_RATE_MAX), reason)
    }
}

/// `Ok`: CPU time is spare; `Err`: it is not.
fn cpu(busy: Option<f32>) -> Result<Reason, Reason> {
    let Some(share) = busy else { return Err(Reason::CpuUnknown) };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 100")]
    let busy_percent = (share.clamp(0.0, 1.0) * 100.0) as u8;
    if share < tuning::SCAN_BUSY {
        Ok(Reason::CpuIdle { busy_percent })
    } else {
        Err(Reason::CpuBusy { busy_percent })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDLE: Period = Period {
        cpu_busy: Some(0.2),
        swapped: Bytes::ZERO,
        merged: Bytes::ZERO,
        broken: Bytes::ZERO,
        vms: 4,
    };
    const BUSY: Period = Period { cpu_busy: Some(0.975), ..IDLE };
    const SWAPPING: Period = Period { swapped: Bytes::mib(3), ..BUSY };
    const HELPED: Period = Period { merged: Bytes::mib(5), ..SWAPPING };

    fn next(controller: Controller, rate: u32, last: Period) -> (u32, Reason) {
        let (rate, reason) = controller.next(PagesPerMs(rate), &last);
        (rate.0, reason)
    }

    #[test]
    fn algorithm_1_line_by_line() {
        let csd = Controller::CpuSwapDedup;
        let (idle, busy) =
            (Reason::CpuIdle { busy_percent: 20 }, Reason::CpuBusy { busy_percent: 97 });
        assert_eq!(next(csd, 20, IDLE), (25, idle.clone()));
        assert_eq!(next(csd, 48, IDLE), (50, idle));
        assert_eq!(next(csd, 20, BUSY), (10, busy.clone()));
        assert_eq!(next(csd, 8, BUSY), (5, busy));
        let swapped = Bytes::mib(3);
        let unproductive = Reason::ScanUnproductive { swapped };
        assert_eq!(next(csd, 20, SWAPPING), (10, unproductive.clone()));
        let breaks = Period { broken: Bytes::mib(6), ..HELPED };
        assert_eq!(next(csd, 20, breaks), (10, unproductive));
        let productive = Reason::ScanProductive { swapped, saved: Bytes::mib(5) };
        assert_eq!(next(csd, 20, HELPED), (25, productive));
        let saved = Bytes::mib(4);
        let a_mib_each = Period { merged: saved, ..HELPED };
        assert_eq!(next(csd, 20, a_mib_each), (20, Reason::ScanSlow { swapped, saved }));
    }

    #[test]
    fn the_simpler_controllers_look_at_less() {
        let busy = Reason::CpuBusy { busy_percent: 97 };
        assert_eq!(next(Controller::Cpu, 20, HELPED), (10, busy.clone()));
        let swapping = Reason::ScanForSwapping { swapped: Bytes::mib(3) };
        assert_eq!(next(Controller::CpuSwap, 20, SWAPPING), (25, swapping));
        assert_eq!(next(Controller::CpuSwap, 20, BUSY), (10, busy));
        assert_eq!(next(Controller::Static(PagesPerMs(700)), 20, BUSY), (700, Reason::ScanFixed));
    }

    #[test]
    fn cpus_of_which_nothing_is_known_count_as_busy() {
        let unknown = Period { cpu_busy: None, ..IDLE };
        assert_eq!(next(Controller::CpuSwapDedup, 20, unknown), (10, Reason::CpuUnknown));
        let unknown = Period { cpu_busy: None, ..HELPED };
        assert_eq!(next(Controller::CpuSwapDedup, 20, unknown).0, 25);
    }

    #[test]
    fn the_configuration_says_who_decides() {
        let off = Scan { rate: None, reason: Reason::DedupOff, payer: None };
        assert_eq!(decide(DedupSpec::Off, Some(PagesPerMs(20)), &IDLE), off);
        let rate = |spec, last| decide(spec, last, &HELPED).rate;
        assert_eq!(rate(DedupSpec::Fixed(PagesPerMs(1)), None), Some(PagesPerMs(1)));
        assert_eq!(rate(DedupSpec::Adaptive, None), Some(PagesPerMs(10)), "it begins slowly");
        assert_eq!(rate(DedupSpec::Adaptive, Some(PagesPerMs(20))), Some(PagesPerMs(25)));
        assert_eq!(rate(DedupSpec::AdaptiveCs, Some(PagesPerMs(20))), Some(PagesPerMs(25)));
        assert_eq!(rate(DedupSpec::AdaptiveC, Some(PagesPerMs(20))), Some(PagesPerMs(10)));
    }

    proptest! {
        #[test]
        fn the_rate_stays_between_its_bounds_whatever_is_reported(
            rate in 0..u32::MAX,
            cpu_busy in proptest::option::of(proptest::num::f32::ANY),
            sizes in proptest::array::uniform3(0..u64::MAX),
            vms in 0..u64::MAX,
        ) {
            let [swapped, merged, broken] = sizes.map(Bytes);
            let last = Period { cpu_busy, swapped, merged, broken, vms };
            for controller in [Controller::Cpu, Controller::CpuSwap, Controller::CpuSwapDedup] {
                let (next, _) = next(controller, rate, last);
                prop_assert!((5..=50).contains(&next));
            }
        }
    }
}
