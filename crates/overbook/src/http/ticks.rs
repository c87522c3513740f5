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
use api::verdict::{self, HostVerdict, VmTrouble};
use api::wire::{GroupStatus, HostStatus, LastChange, PoolStatus, VmStatus};
use axum::response::sse;
use futures_util::{Stream, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

/// The host, its groups and the most important of each VM, all of one tick.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct DashboardTick {
    /// The state in one line, and all troubles.
    verdict: HostVerdict,
    /// The host and the daemon.
    host: HostStatus,
    /// The host's reserve.
    reserve_bytes: Option<u64>,
    /// The pool of hosts; absent: the host is in none.
    pool: Option<PoolStatus>,
    /// Every group.
    groups: Vec<GroupStatus>,
    /// Every VM, the one with the gravest trouble first, those without trouble by name.
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
    /// Its gravest trouble; absent: it has none.
    trouble: Option<VmTrouble>,
    /// Share of one vCPU's time for which it waits for pages that are out; absent: not known.
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
        let (host, groups) = (HostStatus::of(shown), GroupStatus::all(shown));
        let mut vms = VmStatus::all(shown);
        let verdict = HostVerdict::judge(&host, &groups, &vms);
        verdict::sort_by_gravity(&mut vms, &groups);
        Self {
            verdict,
            host,
            reserve_bytes: total.map(|it| policy::host_reserve(spec.host.reserve, it).0),
            pool: PoolStatus::of(shown),
            vms: vms.into_iter().map(|vm| DashboardVm::of(vm, &groups)).collect(),
            groups,
        }
    }
}

impl DashboardVm {
    fn of(vm: VmStatus, groups: &[GroupStatus]) -> Self {
        Self {
            state: vm.state().to_owned(),
            trouble: VmTrouble::of(&vm, groups),
            wait_ratio: vm.cold.as_ref().map(|cold| cold.wait_ratio),
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
        let names: Vec<&str> = tick.vms.iter().map(|vm| vm.name.as_str()).collect();
        assert_eq!(names, ["db-1", "web-2", "web-1"], "the gravest first");
        let text = |at: usize| tick.vms[at].trouble.as_ref().unwrap().text.as_str();
        assert_eq!(text(2), "it waits for its pages (812/s)");
        assert!(tick.verdict.text.starts_with("WARNING: db-1: "), "{}", tick.verdict.text);
        assert!(tick.verdict.text.ends_with(&format!("{} (and 2 more)", text(0))));
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
