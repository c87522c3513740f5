//! The overhead budget: how often tracking may make a guest trap, independent of its behaviour.
//!
//! Problem: a trap costs the vCPU tens of microseconds, and the guest decides how many traps a
//! set of revoked granules causes. A random pattern behind a small hot set traps 55,000 times a
//! second.
//!
//! Idea: an account in nanoseconds of CPU time. It earns the budget (1 % of a vCPU: 10 ms a
//! second). It pays for each trap and for the tracker's own work: revoking, reading traps,
//! computing. A revoked granule traps at most once, so the guest's debt grows at most by one trap
//! for each granule that is revoked at that moment.
//!
//! * While there is credit, granules are revoked up to `AHEAD` times faster than the budget would
//!   bear if each trapped at once, but no more of them than the credit covers. Revoking idle
//!   memory costs next to nothing, and finding it quickly makes a shrinking guest visible.
//! * The tracker's own CPU time is smoothed and reserved; the rest of the budget is for traps. If
//!   nothing is left, a tenth of the budget is still for traps, so probing goes on slowly.
//! * In debt (a guest woke up and touched much revoked memory) probes go on at half speed, and
//!   the other half repays. So the tracker is not blind right after a change. Deep in debt (traps
//!   wait for a CPU for milliseconds, or the guest wakes up again and again) there are no probes
//!   until most of the debt is paid.
//!
//! The estimated cost of a trap decides how many probes there may be. The account pays the
//! measured cost once it is known ([`Governor::measured`]), also for traps that no probe has
//! caused, such as those of memory that was never there. An account starts empty, so a tracker
//! that restarts again and again has no credit to spend.
//!
//! Invariant: over any span, traps × cost ≤ budget × span + `CREDIT` + one trap per tracked
//! granule. The shim measures the trap cost, and the governor smooths it. The first observation
//! counts in full; each later one moves the estimate by a tenth and is first clamped to between
//! half and twice the estimate. So one preempted handler changes little, and a slower machine is
//! recognized within a few seconds. Left out: colder caches after a trap, which cannot be
//! counted; a quarter of the budget is reserved for them.

use model::{Millis, Time};

/// The default budget: 1 % of one vCPU.
pub const DEFAULT_SHARE: f64 = 0.01;
/// The share of the budget that is planned for; the rest is for costs of a trap beyond its time
/// (cold caches, a split huge page).
const PLANNED: f64 = 0.75;
/// The least share of the planned budget that stays for traps, however much the tracker itself
/// takes.
const LEAST_FOR_TRAPS: f64 = 0.1;
/// Time constant for smoothing the tracker's own CPU time.
const SMOOTHING: Millis = Millis(3_000);
/// The most revocations per trap that the budget could pay.
const AHEAD: f64 = 4.0;
/// The most credit that is kept.
const CREDIT: Millis = Millis(200);
/// Cost of a trap before it was measured: a wake-up across idle CPUs.
const FIRST_TRAP_NS: f64 = 50_000.0;
/// Measurements below this are raised to it.
const LEAST_TRAP_NS: f64 = 5_000.0;
/// Measurements above this are cut to it: they mean a stopped machine. Where many threads compete
/// for each CPU, every trap waits for milliseconds.
const MOST_TRAP_NS: f64 = 20_000_000.0;
/// Beyond this debt, in earnings, nothing is revoked.
const DEEP_DEBT: Millis = Millis::secs(10);
/// A debt above this, in earnings, is remitted: tracking alone cannot have held the guest so
/// long.
const MOST_DEBT: Millis = Millis::secs(30);
/// How far one observation moves the cost.
const LEARN: f64 = 0.1;
/// A constant part of the fuse: the traps in a second that are always tolerated.
const FUSE_FLOOR: u32 = 1_000;

/// One VM's account.
#[derive(Clone, Debug)]
pub struct Governor {
    budget_ns_per_s: f64,
    trap_ns: f64,
    is_measured: bool,
    balance_ns: f64,
    /// The amount already paid for traps that are not measured yet.
    presumed_ns: f64,
    /// The tracker's own CPU time since the last allowance, and its smoothed rate per second.
    spent_ns: f64,
    own_ns_per_s: f64,
    last: Option<Time>,
    /// Revocations that are allowed now; the fraction carries over.
    allowed: f64,
}

impl Default for Governor {
    fn default() -> Self {
        Self::new(DEFAULT_SHARE)
    }
}

impl Governor {
    /// An account that earns this share of one vCPU; a share outside 0 to 1 counts as the nearer
    /// end.
    #[must_use]
    pub fn new(share_of_vcpu: f64) -> Self {
        Self {
            budget_ns_per_s: share_of_vcpu.clamp(0.0, 1.0) * 1e9 * PLANNED,
            trap_ns: FIRST_TRAP_NS,
            is_measured: false,
            balance_ns: 0.0,
            presumed_ns: 0.0,
            spent_ns: 0.0,
            own_ns_per_s: 0.0,
            last: None,
            allowed: 0.0,
        }
    }

    /// Takes in a measured cost of a trap: the mean of the shim's latest traps.
    pub fn observe_trap_ns(&mut self, ns: u64) {
        if std::mem::replace(&mut self.is_measured, true) {
            let seen = (ns as f64).clamp(self.trap_ns / 2.0, self.trap_ns * 2.0);
            self.trap_ns += LEARN * (seen - self.trap_ns);
        } else {
            self.trap_ns = ns as f64;
        }
        self.trap_ns = self.trap_ns.clamp(LEAST_TRAP_NS, MOST_TRAP_NS);
    }

    /// The estimated cost of a trap to the vCPU, in nanoseconds.
    #[must_use]
    pub fn trap_ns(&self) -> f64 {
        self.trap_ns
    }

    /// Probes per second that the budget bears if every one of them traps.
    #[must_use]
    pub fn rate_per_s(&self) -> f64 {
        let least = LEAST_FOR_TRAPS * self.budget_ns_per_s;
        (self.budget_ns_per_s - self.own_ns_per_s).max(least) / self.trap_ns
    }

    /// Earns the budget for the time since the last call, and returns how many granules may be
    /// revoked now.
    pub fn allowance(&mut self, now: Time) -> u32 {
        let elapsed = self.last.map_or(Millis(0), |last| now.since(last)).min(CREDIT);
        self.last = Some(self.last.map_or(now, |last| last.max(now)));
        let seconds = elapsed.0 as f64 / 1e3;
        let credit = CREDIT.0 as f64 / 1e3 * self.budget_ns_per_s;
        // The tracker's own time never pushes the account into a lasting debt.
        let own = self.spent_ns.min(self.balance_ns + credit).max(0.0);
        self.balance_ns = (self.balance_ns + seconds * self.budget_ns_per_s - own).min(credit);
        self.smooth_own(elapsed);
        let share = self.rate_per_s() * seconds;
        if self.balance_ns > 0.0 {
            let covered = self.balance_ns / self.trap_ns;
            self.allowed = (self.allowed.fract() + AHEAD * share).min(covered);
        } else if self.balance_ns >= self.debt(DEEP_DEBT) {
            self.allowed = self.allowed.fract() + share / 2.0;
        } else {
            self.allowed = 0.0;
        }
        whole(self.allowed)
    }

    fn smooth_own(&mut self, elapsed: Millis) {
        if elapsed > Millis(0) {
            let per_s = self.spent_ns * 1e3 / elapsed.0 as f64;
            let share = -(-(elapsed.0 as f64) / SMOOTHING.0 as f64).exp_m1();
            self.own_ns_per_s += share * (per_s - self.own_ns_per_s);
            self.spent_ns = 0.0;
        }
    }

    /// Records that `count` granules are revoked now.
    pub fn revoked(&mut self, count: u32) {
        self.allowed = (self.allowed - f64::from(count)).max(0.0);
    }

    /// Pays for CPU time of the tracker itself, in addition to the traps.
    pub fn spent(&mut self, ns: u64) {
        self.spent_ns += ns as f64;
    }

    /// Pays the estimated cost of `count` traps.
    pub fn trapped(&mut self, count: u32) {
        let ns = f64::from(count) * self.trap_ns;
        self.presumed_ns += ns;
        self.balance_ns -= ns;
    }

    /// All traps since the last call have held the guest's threads for `held_ns`. The account
    /// pays that instead of their estimated cost.
    pub fn measured(&mut self, held_ns: u64) {
        let paid = std::mem::take(&mut self.presumed_ns);
        let after = self.balance_ns + paid - held_ns as f64;
        self.balance_ns = after.max(self.debt(MOST_DEBT).min(self.balance_ns));
    }

    /// Charges for the time before this account: tracking took this share of a vCPU for `length`,
    /// and the part over the budget is still to be paid.
    pub fn begin_after(&mut self, share: f64, length: Millis) {
        let over = (share * 1e9 - self.budget_ns_per_s).max(0.0) * length.0 as f64 / 1e3;
        self.balance_ns = (self.balance_ns - over).max(self.debt(MOST_DEBT));
    }

    /// The balance that is a debt of `earnings`.
    fn debt(&self, earnings: Millis) -> f64 {
        -(earnings.0 as f64) / 1e3 * self.budget_ns_per_s
    }

    /// The shim's fuse. More traps in a second than the `revoked` granules and the probes of that
    /// second can cause mean that something is wrong.
    #[must_use]
    pub fn fuse(&self, revoked: u32) -> u32 {
        revoked.saturating_add(whole(2.0 * AHEAD * self.rate_per_s())).saturating_add(FUSE_FLOOR)
    }

    /// For tracking a sample (SHARDS): the next sampling share, given that the present one caused
    /// `traps_per_s`. One step at most halves or doubles it; it stays between 1/1024 and 1.
    #[must_use]
    pub fn sample(&self, present: f64, traps_per_s: f64) -> f64 {
        let cost = (traps_per_s * self.trap_ns).max(1.0);
        let change = (self.budget_ns_per_s / cost).clamp(0.5, 2.0);
        (present * change).clamp(1.0 / 1024.0, 1.0)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped just before")]
fn whole(x: f64) -> u32 {
    x.clamp(0.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRANULES: u32 = 2000;
    const STEP_MS: u64 = 20;

    /// Traps in each step of a guest that touches `share` of the revoked granules at the given
    /// moments.
    fn traps(moments: &[(u64, f64)], steps: u64) -> Vec<u32> {
        let mut governor = Governor::default();
        let mut revoked = 0;
        (0..steps)
            .map(|step| {
                let more = governor.allowance(Time(step * STEP_MS)).min(GRANULES - revoked);
                governor.revoked(more);
                revoked += more;
                let touched = moments
                    .iter()
                    .filter(|m| step % m.0.max(1) == 0)
                    .map(|m| whole(f64::from(revoked) * m.1))
                    .max()
                    .unwrap_or(0);
                revoked -= touched;
                governor.trapped(touched);
                touched
            })
            .collect()
    }

    proptest! {
        #[test]
        fn traps_stay_inside_the_budget_whatever_the_guest_does(
            moments in proptest::collection::vec((1_u64..2000, 0.0..=1.0_f64), 1..4),
        ) {
            let governor = Governor::default();
            let traps = traps(&moments, 5_000);
            for length in [500, 5_000] {
                let seconds = (length as u64 * STEP_MS) as f64 / 1e3;
                let most = traps.windows(length).map(|w| w.iter().sum::<u32>()).max().unwrap_or(0);
                let cost = f64::from(most) * governor.trap_ns();
                let burst = (f64::from(GRANULES) + 1.0) * governor.trap_ns()
                    + 0.2 * governor.budget_ns_per_s;
                prop_assert!(cost <= seconds * governor.budget_ns_per_s + burst);
            }
        }
    }

    #[test]
    fn a_guest_that_touches_everything_at_once_traps_at_the_budgets_rate() {
        let traps = traps(&[(1, 1.0)], 5_000);
        let per_s = f64::from(traps.iter().sum::<u32>()) / 100.0;
        let rate = Governor::default().rate_per_s();
        assert!((0.95 * rate..=1.05 * rate).contains(&per_s), "{per_s} of {rate}");
    }

    #[test]
    fn idle_memory_is_revoked_faster_than_it_could_trap() {
        let mut governor = Governor::default();
        let mut count = 0;
        for step in 0..50 {
            let more = governor.allowance(Time(step * STEP_MS));
            governor.revoked(more);
            count += more;
        }
        assert!(f64::from(count) > 2.5 * governor.rate_per_s(), "{count}");
    }

    #[test]
    fn what_the_tracker_takes_itself_is_set_aside() {
        let mut governor = Governor::default();
        let free = governor.rate_per_s();
        let half_ns = u64::from(whole(governor.budget_ns_per_s / 2.0)) * STEP_MS / 1000;
        for step in 0..2_000 {
            governor.spent(half_ns);
            let more = governor.allowance(Time(step * STEP_MS));
            governor.revoked(more);
            governor.trapped(more);
        }
        assert!((0.45..0.55).contains(&(governor.rate_per_s() / free)));
        let before = governor.balance_ns;
        assert!(before > -governor.trap_ns() * 10.0, "{before}");
    }

    #[test]
    fn a_tracker_that_takes_more_than_the_budget_still_probes_and_recovers() {
        let mut governor = Governor::default();
        let free = governor.rate_per_s();
        let mut at = 0;
        let mut seconds = |governor: &mut Governor, seconds: u64, spent_ns: u64| {
            let mut count = 0;
            for _ in 0..seconds * 1000 / STEP_MS {
                at += STEP_MS;
                governor.spent(spent_ns);
                let more = governor.allowance(Time(at));
                governor.revoked(more);
                governor.trapped(more);
                count += more;
            }
            f64::from(count) / seconds as f64
        };
        let starved = seconds(&mut governor, 60, 10_000_000);
        assert!((0.03..0.11).contains(&(starved / free)), "{starved} of {free}");
        seconds(&mut governor, 20, 0);
        let recovered = seconds(&mut governor, 20, 0);
        assert!((0.9..1.1).contains(&(recovered / free)), "{recovered} of {free}");
    }

    #[test]
    fn one_preempted_handler_changes_the_cost_little() {
        let mut governor = Governor::default();
        for _ in 0..100 {
            governor.observe_trap_ns(20_000);
        }
        assert!((20_000.0..20_100.0).contains(&governor.trap_ns()));
        governor.observe_trap_ns(80_000_000);
        assert!(governor.trap_ns() < 22_500.0);
        governor.observe_trap_ns(0);
        assert!(governor.trap_ns() > 19_000.0);
    }

    #[test]
    fn what_was_measured_is_paid_and_not_what_was_presumed() {
        let mut governor = Governor::default();
        governor.observe_trap_ns(20_000);
        assert!((governor.trap_ns() - 20_000.0).abs() < 1e-9, "the first is believed");
        governor.trapped(100);
        assert!((governor.balance_ns + 2e6).abs() < 1e-6);
        governor.measured(500_000);
        assert!((governor.balance_ns + 5e5).abs() < 1e-6);
        governor.measured(7_000_000);
        assert!((governor.balance_ns + 7.5e6).abs() < 1e-6, "no probe caused these");
        governor.measured(u64::MAX);
        assert!((governor.balance_ns + 30.0 * governor.budget_ns_per_s).abs() < 1.0);
    }

    #[test]
    fn what_was_taken_before_over_the_budget_is_paid_off() {
        let begun = |share| {
            let mut governor = Governor::new(0.01);
            governor.begin_after(share, Millis(10_000));
            governor.balance_ns
        };
        assert!((begun(0.0175) + 1e8).abs() < 1.0, "ten seconds of one per cent");
        assert_eq!((begun(0.007), begun(f64::NAN)), (0.0, 0.0));
        assert!((begun(9.0) + 30.0 * 0.0075e9).abs() < 1.0);
    }

    #[test]
    fn deep_in_debt_nothing_is_revoked_until_the_most_of_it_is_paid() {
        let mut governor = Governor::default();
        governor.measured(u64::MAX);
        let seconds = (0..600).find(|step| {
            let more = governor.allowance(Time(step * 100));
            governor.revoked(more);
            more > 0
        });
        let seconds = seconds.unwrap() / 10;
        assert!((19..=21).contains(&seconds), "twenty of thirty seconds' debt: {seconds} s");
    }

    #[test]
    fn who_begins_anew_every_second_spends_no_more_than_who_does_not() {
        let mut traps = 0;
        for _ in 0..60 {
            let mut governor = Governor::default();
            for step in 0..10 {
                let more = governor.allowance(Time(step * 100));
                governor.revoked(more);
                governor.trapped(more);
                traps += more;
            }
        }
        let per_s = f64::from(traps) / 60.0;
        assert!(per_s <= Governor::default().rate_per_s(), "{per_s}");
    }

    #[test]
    fn a_stalled_worker_does_not_save_up_a_burst() {
        let mut governor = Governor::default();
        governor.allowance(Time(0));
        let after_an_hour = governor.allowance(Time(3_600_000));
        assert!(f64::from(after_an_hour) <= 0.2 * governor.rate_per_s() + 1.0);
    }

    #[test]
    fn the_sample_shrinks_in_proportion_to_the_cost() {
        let governor = Governor::new(0.01);
        assert!((governor.sample(0.5, 1e6) - 0.25).abs() < 1e-9);
        assert!((governor.sample(0.8, 1.0) - 1.0).abs() < 1e-9);
    }
}
