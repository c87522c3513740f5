//! Each tick as the dashboard shows it, as a stream of server-sent events.
//!
//! A tick is encoded once, when the first reader asks for it, and not at all without readers. A
//! reader that is slow gets the latest tick and misses those before it. One that reads nothing
//! loses its connection ([`prompt`](super::prompt)). So a reader costs a copy of the latest tick.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
};

use api::shown::TickView;
use api::wire::{GroupStatus, HostStatus, LastChange, VmStatus};
use axum::response::sse;
use futures_util::{Stream, stream};
use model::Bytes;
use policy::tuning;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

/// The host, its groups and the most important of each VM, all of one tick.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct DashboardTick {
    /// The host and the daemon.
    host: HostStatus,
    /// The host's reserve.
    reserve_bytes: Option<u64>,
    /// Every group.
    groups: Vec<GroupStatus>,
    /// Every VM.
    vms: Vec<DashboardVm>,
}

/// The most important of a VM.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
struct DashboardVm {
    /// Its name.
    name: String,
    /// Its group; absent: watched, not managed.
    group: Option<String>,
    /// Its state in one word.
    state: String,
    /// Why it lacks memory or cannot be reached; absent: it has the memory that it needs.
    trouble: Option<String>,
    /// Part of its time for which it waits for pages that are out; absent: not known.
    wait_ratio: Option<f64>,
    /// RAM that its balloon covers.
    ram_bytes: u64,
    /// Minimum size.
    min_bytes: Option<u64>,
    /// Guaranteed size.
    base_bytes: Option<u64>,
    /// Maximum size.
    max_bytes: Option<u64>,
    /// The memory that it is meant to have.
    target_bytes: Option<u64>,
    /// Memory that the balloon leaves the guest.
    balloon_bytes: Option<u64>,
    /// Memory that it occupies on the host.
    used_bytes: Option<u64>,
    /// The part of it that is shared.
    shared_bytes: u64,
    /// The memory that sharing saves it.
    saved_bytes: u64,
    /// Memory that it has freed and the host can take at once.
    freed_bytes: u64,
    /// Memory in the host's swap.
    paged_out_bytes: u64,
    /// Its working set.
    working_set_bytes: Option<u64>,
    /// Bytes that its guest swaps in and out per second.
    swap_bytes_per_second: Option<u64>,
    /// Its overload: `none`, `transient` or `sustained`; absent: not measured.
    overload: Option<String>,
    /// Whether this tick changes its target.
    is_changing: bool,
    /// The change of this tick, or why there is none.
    decision: String,
    /// The last change that was carried out before this tick.
    last_change: Option<LastChange>,
}

impl DashboardTick {
    fn of(shown: &TickView) -> Self {
        let (view, spec) = (&shown.published.view, &shown.published.spec);
        let total = view.host.map(|reading| reading.value.total);
        let usual = || total.map(|it| it.percent(tuning::HOST_RESERVE_PERCENT));
        Self {
            host: HostStatus::of(shown),
            reserve_bytes: spec.host.reserve.or_else(usual).map(|reserve| reserve.0),
            groups: GroupStatus::all(shown),
            vms: VmStatus::all(shown).into_iter().map(DashboardVm::from).collect(),
        }
    }
}

impl From<VmStatus> for DashboardVm {
    fn from(vm: VmStatus) -> Self {
        let wait_ratio = wait_ratio(&vm);
        Self {
            state: vm.state().to_owned(),
            trouble: trouble(&vm, wait_ratio),
            wait_ratio,
            ram_bytes: vm.ram_bytes,
            min_bytes: vm.min_bytes,
            base_bytes: vm.base_bytes,
            max_bytes: vm.max_bytes,
            target_bytes: vm.target_bytes,
            balloon_bytes: vm.balloon_bytes,
            used_bytes: vm.used_bytes,
            shared_bytes: vm.dedup.map_or(0, |dedup| dedup.shared_bytes),
            saved_bytes: vm.dedup.map_or(0, |dedup| dedup.saved_bytes),
            freed_bytes: vm.free_pages.as_ref().map_or(0, |free| free.lazy_bytes),
            paged_out_bytes: vm.cold.as_ref().map_or(0, |cold| cold.out_bytes),
            working_set_bytes: vm.working_set_bytes(),
            swap_bytes_per_second: vm.swap_bytes_per_second,
            overload: vm.overload.as_ref().map(|overload| overload.severity.clone()),
            is_changing: vm.change.is_some(),
            decision: decision(&vm),
            last_change: vm.last_change,
            name: vm.name,
            group: vm.group,
        }
    }
}

/// The change of this tick, or why there is none. A VM that lacks memory is not told so again: the
/// reason is why it gets no more.
fn decision(vm: &VmStatus) -> String {
    let why_not = vm.refusals.iter().find(|words| words.code != "under_pressure");
    let why_not = why_not.filter(|_| vm.link_up && vm.change.is_none());
    why_not.map_or_else(|| vm.headline(), |words| words.text.clone())
}

/// Refaults per second times the time of one. `None`: the host does not page it, or no refault
/// was timed.
fn wait_ratio(vm: &VmStatus) -> Option<f64> {
    let cold = vm.cold.as_ref().filter(|cold| cold.refault_us > 0.0)?;
    Some((cold.refaults_per_second * cold.refault_us / 1e6).min(1.0))
}

/// The VM's gravest lack, in words that follow its name.
fn trouble(vm: &VmStatus, wait_ratio: Option<f64>) -> Option<String> {
    if !vm.link_up {
        return Some("does not answer".to_owned());
    }
    if let Some(ratio) = wait_ratio.filter(|ratio| *ratio >= tuning::SUFFERS_WAITS) {
        return Some(format!("waits {:.0} % of its time for pages that are out", ratio * 100.0));
    }
    let swaps = vm.swap_bytes_per_second.map(Bytes);
    let swaps = swaps.filter(|rate| *rate >= tuning::DEMAND_PER_SECOND);
    let overload = vm.overload.as_ref().filter(|overload| overload.severity != "none");
    let is_short = vm.refusals.iter().find(|words| words.code == "under_pressure");
    match (overload, swaps, is_short) {
        (Some(overload), Some(rate), _) => {
            Some(format!("waits for its swap ({} overload): {rate}/s", overload.severity))
        }
        (Some(overload), None, _) => {
            let pages = overload.pages_per_second;
            Some(format!("waits for its pages ({} overload): {pages}/s", overload.severity))
        }
        (None, Some(rate), _) => Some(format!("waits for its swap: {rate}/s")),
        (None, None, Some(words)) => Some(format!("is short of memory: {}", words.text)),
        (None, None, None) => None,
    }
}

/// The latest tick, encoded for all readers.
#[derive(Clone, Debug)]
pub(super) struct EncodedTicks {
    shown: watch::Receiver<Arc<TickView>>,
    latest: Arc<Mutex<Option<Encoded>>>,
}

/// A tick and its JSON.
type Encoded = (Arc<TickView>, Arc<str>);

impl EncodedTicks {
    pub(super) fn new(shown: watch::Receiver<Arc<TickView>>) -> Self {
        Self { shown, latest: Arc::default() }
    }

    /// The latest tick as JSON.
    fn encoded(&mut self) -> Arc<str> {
        let shown = Arc::clone(&self.shown.borrow_and_update());
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, text)) = latest.as_ref()
            && Arc::ptr_eq(of, &shown)
        {
            return Arc::clone(text);
        }
        let text = serde_json::to_string(&DashboardTick::of(&shown)).unwrap_or_default();
        let text: Arc<str> = text.into();
        *latest = Some((shown, Arc::clone(&text)));
        text
    }

    /// The latest tick at once, and then each tick, for one reader.
    pub(super) fn stream(mut self) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        self.shown.mark_changed();
        stream::unfold(self, |mut ticks| async move {
            ticks.shown.changed().await.ok()?;
            let text = ticks.encoded();
            Some((Ok(sse::Event::default().event("tick").data(&*text)), ticks))
        })
    }
}

#[cfg(test)]
mod tests {
    use model::{Cold, Reading};

    use super::*;
    use crate::fixture;

    fn shown() -> TickView {
        TickView::first(Arc::new(fixture::published()))
    }

    #[test]
    fn a_tick_has_every_group_and_vm_and_the_hosts_reserve() {
        let tick = DashboardTick::of(&shown());
        assert_eq!(tick.reserve_bytes, Some(2048 << 20));
        assert_eq!((tick.groups.len(), tick.vms.len()), (1, 3));
        let trouble: Vec<_> = tick.vms.iter().map(|vm| vm.trouble.as_deref()).collect();
        let overloaded = "waits for its pages (transient overload): 812/s";
        assert_eq!(trouble, [Some("does not answer"), Some(overloaded), None]);
    }

    #[test]
    fn a_vm_waits_for_its_refaults() {
        let mut tick = fixture::published();
        let cold = Cold { refaults_per_s: 200.0, refault_ns: 600_000, ..Cold::default() };
        let vm = tick.view.vms.get_mut(&"web-2".into()).unwrap();
        vm.cold = Some(Reading::new(cold, fixture::NOW));
        let tick = DashboardTick::of(&TickView::first(Arc::new(tick)));
        let vm = tick.vms.iter().find(|vm| vm.name == "web-2").unwrap();
        let words = "waits 12 % of its time for pages that are out";
        assert_eq!(vm.trouble.as_deref(), Some(words));
    }

    #[tokio::test]
    async fn a_tick_is_encoded_once_for_all_and_a_slow_reader_gets_the_latest() {
        use futures_util::StreamExt;

        let (show, shown) = watch::channel(Arc::new(shown()));
        let ticks = EncodedTicks::new(shown);
        let (mut one, mut other) = (ticks.clone(), ticks.clone());
        assert!(Arc::ptr_eq(&one.encoded(), &other.encoded()));
        let mut slow = Box::pin(ticks.stream());
        for _ in 0..3 {
            show.send_replace(Arc::new(self::shown()));
        }
        assert!(slow.next().await.is_some());
        drop(show);
        assert!(slow.next().await.is_none(), "the ticks between were left out");
    }
}
