//! A tick with the data that only shows between two ticks: swap rates, the last change of each VM.
//!
//! The loop publishes single ticks and forgets them. [`TickView`] keeps the little state that needs
//! an earlier tick, so every reader of the API sees one consistent tick. A missed tick (on a busy
//! machine) never makes a wrong figure: a rate divides by the time between two statistics.
//!
//! Cost: O(VMs) per tick. Two numbers and one sentence are kept for each existing VM.

use std::{collections::BTreeMap, sync::Arc};

use model::{Bytes, Millis, Mode, VmName};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::{published::Published, swap_meter::SwapMeter};

/// A change that was carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LastChange {
    /// Time in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// The change and its reason.
    pub text: String,
}

/// A change of a target and its reason, in the words used everywhere.
#[must_use]
pub fn change_words(is_take: bool, target: Bytes, reason: &str) -> String {
    let direction = if is_take { "lowered" } else { "raised" };
    format!("target {direction} to {target}: {reason}")
}

/// A tick, with data from earlier ticks.
#[derive(Clone, Debug)]
pub struct TickView {
    /// The latest tick.
    pub published: Arc<Published>,
    /// The time at which it arrived here.
    pub seen: Instant,
    /// The last change of each VM that was carried out before this tick.
    pub last_changes: BTreeMap<VmName, LastChange>,
    meters: BTreeMap<VmName, SwapMeter>,
    swap_rates: BTreeMap<VmName, Bytes>,
}

impl TickView {
    /// The first tick.
    #[must_use]
    pub fn first(published: Arc<Published>) -> Self {
        Self::with(published, BTreeMap::new(), &BTreeMap::new())
    }

    /// The tick after this one.
    #[must_use]
    pub fn next(&self, published: Arc<Published>) -> Self {
        let mut last_changes = self.last_changes.clone();
        last_changes.extend(carried_out(&self.published));
        last_changes.retain(|vm, _| published.view.vms.contains_key(vm));
        Self::with(published, last_changes, &self.meters)
    }

    fn with(
        published: Arc<Published>,
        last_changes: BTreeMap<VmName, LastChange>,
        before: &BTreeMap<VmName, SwapMeter>,
    ) -> Self {
        let (mut meters, mut swap_rates) = (BTreeMap::new(), BTreeMap::new());
        for (vm, view) in &published.view.vms {
            let mut meter = before.get(vm).copied().unwrap_or_default();
            swap_rates.extend(meter.rate(view, published.at).map(|rate| (vm.clone(), rate)));
            meters.insert(vm.clone(), meter);
        }
        Self { published, seen: Instant::now(), last_changes, meters, swap_rates }
    }

    /// Time since the tick arrived.
    #[must_use]
    pub fn tick_age(&self) -> Millis {
        Millis(u64::try_from(self.seen.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Bytes per second that the guest swaps in and out. `None`: fewer than two statistics of the
    /// same incarnation.
    #[must_use]
    pub fn swap_rate(&self, vm: &VmName) -> Option<Bytes> {
        self.swap_rates.get(vm).copied()
    }
}

fn carried_out(tick: &Published) -> impl Iterator<Item = (VmName, LastChange)> + '_ {
    let enforced = tick.plan.mode == Mode::Enforce;
    tick.plan.vms.iter().filter(move |_| enforced).filter_map(|(vm, decision)| {
        let change = decision.change.as_ref().filter(|change| !change.is_repeat)?;
        let model::Action::Resize { target, .. } = &change.action;
        let reason = change.reason.to_string();
        let text = change_words(change.is_take, *target, &reason);
        Some((vm.clone(), LastChange { wall_ms: tick.wall_ms, text }))
    })
}

#[cfg(test)]
mod tests {
    use model::{GuestStats, Reading, Time};

    use super::*;
    use crate::fixture;

    fn swapped(at_ms: u64, swap_in: u64) -> Arc<Published> {
        seen(at_ms + 500, at_ms, swap_in)
    }

    /// A tick at `now_ms` with statistics of `at_ms`.
    fn seen(now_ms: u64, at_ms: u64, swap_in: u64) -> Arc<Published> {
        let mut tick = fixture::published();
        tick.at = Time(now_ms);
        let vm = tick.view.vms.get_mut(&"web-1".into()).unwrap();
        let value = GuestStats {
            swap_in: Some(Bytes::mib(swap_in)),
            swap_out: Some(Bytes::ZERO),
            ..GuestStats::default()
        };
        vm.stats = Some(Reading::new(value, Time(at_ms)));
        Arc::new(tick)
    }

    #[test]
    fn a_swap_rate_divides_by_the_time_between_two_statistics() {
        let shown = TickView::first(swapped(1_000, 10)).next(swapped(3_000, 14));
        assert_eq!(shown.swap_rate(&"web-1".into()), Some(Bytes::mib(2)));
        let same = shown.next(swapped(3_000, 14));
        assert_eq!(same.swap_rate(&"web-1".into()), Some(Bytes::mib(2)), "no new statistics");
        let late = same.next(seen(8_001, 3_000, 14));
        assert_eq!(late.swap_rate(&"web-1".into()), None, "they are too old to count");
        let again = late.next(swapped(13_000, 24));
        assert_eq!(again.swap_rate(&"web-1".into()), Some(Bytes::mib(1)));
    }

    #[test]
    fn counters_that_ran_backwards_give_no_rate() {
        let shown = TickView::first(swapped(1_000, 10)).next(swapped(2_000, 3));
        assert_eq!(shown.swap_rate(&"web-1".into()), None);
    }

    #[test]
    fn the_last_change_is_older_than_the_tick_and_was_carried_out() {
        let tick = Arc::new(fixture::published());
        let first = TickView::first(Arc::clone(&tick));
        assert!(first.last_changes.is_empty());
        let second = first.next(tick);
        let change = &second.last_changes[&"web-1".into()];
        assert!(
            change.text.starts_with("target raised to 202 MiB: it is short"),
            "{}",
            change.text
        );

        let mut observed = fixture::published();
        observed.plan.mode = Mode::Recommend;
        let observed = Arc::new(observed);
        let shown = TickView::first(Arc::clone(&observed)).next(observed);
        assert!(shown.last_changes.is_empty(), "a recommendation changed nothing");
    }
}
