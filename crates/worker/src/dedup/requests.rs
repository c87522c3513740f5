//! The requests to the shim of one VM, and the references that wait for its answers.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use pages::dedup::{Run, runs};
use protocol::layout::PageState;
use protocol::{Content, MAX_MERGE, Merge, Merged, Refusal};

use super::super::link::{Link, LinkError};
use super::mappings::Mappings;
use super::window::Window;

/// Requests in flight: while one is processed, the next is queued there. Each has at most
/// `MAX_MERGE` pages, so no more runs, and takes a millisecond or two of the shim's control
/// thread.
const MOST_SENT: usize = 2;
/// The pause after the shim has refused.
const PAUSE: Duration = Duration::from_secs(2);

/// The replacement of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Zeros,
    Slot(u32),
}

/// A page and its replacement.
pub(super) type MergeRequest = (u32, Target);

/// A request to the shim.
#[derive(Debug)]
enum DedupRequest {
    Pool,
    Merge(Vec<MergeRequest>),
    Unshare,
}

impl DedupRequest {
    fn merges(&self) -> &[MergeRequest] {
        match self {
            Self::Pool | Self::Unshare => &[],
            Self::Merge(merges) => merges,
        }
    }

    fn into_merges(self) -> Vec<MergeRequest> {
        match self {
            Self::Pool | Self::Unshare => Vec::new(),
            Self::Merge(merges) => merges,
        }
    }
}

/// The slot that a page is to share.
pub(super) fn slot_of((_, target): &MergeRequest) -> Option<u32> {
    match target {
        Target::Zeros => None,
        Target::Slot(slot) => Some(*slot),
    }
}

/// An answer of the shim.
#[derive(Debug)]
pub(super) enum DedupAnswer {
    /// It has the pool.
    HasPool,
    /// It has no pool, and cannot be asked for merges.
    NoPool,
    /// It has done these merges, or some of them; `dropped` pages of zeros exist no more.
    Merged { merges: Vec<MergeRequest>, dropped: u64 },
    /// It has done none of these merges.
    Refused(Vec<MergeRequest>),
    /// Nothing is to be noted.
    Other,
}

/// The queued merges and the requests in flight.
#[derive(Debug)]
pub(super) struct Requests {
    /// Whether the shim has accepted the pool.
    has_pool: bool,
    queued: Vec<MergeRequest>,
    /// By their numbers on the connection.
    sent: BTreeMap<u32, DedupRequest>,
    /// The end of the pause after a refusal, and the reason.
    pause: Option<(Instant, String)>,
    mappings: Mappings,
}

impl Requests {
    /// Requests to the shim in this process.
    pub(super) fn of(pid: u32) -> Self {
        let mappings = Mappings::of(pid);
        Self { has_pool: false, queued: Vec::new(), sent: BTreeMap::new(), pause: None, mappings }
    }

    /// Begins anew on a new connection. Returns the merges that were in flight.
    pub(super) fn restart(&mut self) -> Vec<MergeRequest> {
        self.has_pool = false;
        self.pause = None;
        std::mem::take(&mut self.sent).into_values().flat_map(DedupRequest::into_merges).collect()
    }

    /// The slots of all merges that are queued or in flight.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        let merges = self.queued.iter().chain(self.sent.values().flat_map(DedupRequest::merges));
        merges.filter_map(slot_of)
    }

    /// The number of merges that are queued or in flight.
    pub(super) fn merges(&self) -> usize {
        self.queued.len() + self.sent.values().map(|sent| sent.merges().len()).sum::<usize>()
    }

    /// Whether no request is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    pub(super) fn awaits_answer(&self) -> bool {
        !self.is_idle() && !self.is_paused()
    }

    /// Whether the shim has the pool and accepts merges.
    pub(super) fn is_ready(&self) -> bool {
        self.has_pool && !self.is_paused()
    }

    /// Whether the shim is left alone after a refusal.
    pub(super) fn is_paused(&self) -> bool {
        self.pause.as_ref().is_some_and(|(until, _)| Instant::now() < *until)
    }

    /// The reason why no merge is requested now.
    pub(super) fn why_not(&self) -> Option<String> {
        let pause = self.pause.as_ref().filter(|_| self.is_paused());
        let pause = pause.map(|(_, why)| format!("resting: {why}"));
        pause.or_else(|| self.mappings.why_not())
    }

    pub(super) fn pause(&mut self, why: &impl ToString) {
        self.pause = Some((Instant::now() + PAUSE, why.to_string()));
    }

    /// Gives the shim the pool.
    pub(super) fn use_pool(
        &mut self,
        link: &mut Link,
        file: BorrowedFd<'_>,
        slots: u32,
    ) -> Result<(), LinkError> {
        self.sent.insert(link.next_id(), DedupRequest::Pool);
        link.use_pool(file, slots)
    }

    /// Handles the answer to this request.
    pub(super) fn answered(&mut self, id: u32, outcome: Result<Merged, Refusal>) -> DedupAnswer {
        let Some(request) = self.sent.remove(&id) else {
            // A request of an earlier connection.
            return DedupAnswer::Other;
        };
        if let Err(why) = &outcome {
            self.pause(why);
        }
        match (request, outcome) {
            (DedupRequest::Merge(merges), Ok(merged)) => {
                // No more can have been dropped, for any answer of a shim.
                let zeros = merges.iter().filter(|(_, target)| *target == Target::Zeros).count();
                DedupAnswer::Merged { dropped: u64::from(merged.dropped).min(zeros as u64), merges }
            }
            (DedupRequest::Merge(merges), Err(_)) => DedupAnswer::Refused(merges),
            (DedupRequest::Pool, Ok(_)) => {
                self.has_pool = true;
                DedupAnswer::HasPool
            }
            (DedupRequest::Pool, Err(_)) => DedupAnswer::NoPool,
            // The next scan sees which pages have copies now.
            (DedupRequest::Unshare, _) => DedupAnswer::Other,
        }
    }

    /// Queues a merge.
    pub(super) fn push(&mut self, merge: MergeRequest) {
        self.queued.push(merge);
    }

    /// Drops the queued merges, and returns them.
    pub(super) fn drop_queue(&mut self) -> Vec<MergeRequest> {
        std::mem::take(&mut self.queued)
    }

    /// Requests copies of the shared pages of this window, if the shim is not busy.
    pub(super) fn unshare(&mut self, window: &Window, link: &mut Link) -> Result<(), LinkError> {
        if self.sent.len() >= MOST_SENT {
            return Ok(());
        }
        self.sent.insert(link.next_id(), DedupRequest::Unshare);
        link.unshare(window.first, window.count)
    }

    /// Whether a merge is in flight.
    pub(super) fn is_merging(&self) -> bool {
        self.sent.values().any(|sent| !sent.merges().is_empty())
    }

    /// Sends the queued merges, if the shim is not busy; `shared` pages of the VM are shared now.
    /// Adds merges that are not sent to `left`: their runs are too short for the mappings that
    /// QEMU has left, or their pages have changed.
    pub(super) fn send(
        &mut self,
        shared: u32,
        link: &mut Link,
        left: &mut Vec<MergeRequest>,
    ) -> Result<(), LinkError> {
        if self.sent.len() >= MOST_SENT || self.queued.is_empty() {
            return Ok(());
        }
        // Sorted by page, so that neighbours become one mapping.
        self.queued.sort_by_key(|(page, _)| *page);
        let rest = self.queued.split_off(self.queued.len().min(MAX_MERGE));
        let queued = std::mem::replace(&mut self.queued, rest);
        // A page that is merged already and was written since would look as if it were merged
        // now.
        let (queued, changed): (Vec<_>, Vec<_>) = queued
            .into_iter()
            .partition(|(page, _)| matches!(link.page_state(*page), Ok(PageState::Plain)));
        left.extend(changed);
        let slots: Vec<_> =
            queued.iter().filter_map(|merge| Some((merge.0, slot_of(merge)?))).collect();
        let (mut asked, mut merges) = (Vec::new(), Vec::new());
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let runs: Vec<Run> = runs(&slots).collect();
        let shared = shared.saturating_add(count(slots.len()));
        let least = self.mappings.least_run(count(runs.len()), shared).unwrap_or(u32::MAX);
        for Run { page, slot, len } in runs {
            let of_run = (page..page + len).zip((slot..slot + len).map(Target::Slot));
            if len >= least {
                self.mappings.more(2);
                merges.extend(of_run);
                asked.push(Merge { page, pages: len, content: Content::Slot(slot) });
            } else {
                left.extend(of_run);
            }
        }
        let zeros: Vec<_> = queued.into_iter().filter(|merge| merge.1 == Target::Zeros).collect();
        for run in zeros.chunk_by(|merge, next| merge.0 + 1 == next.0) {
            asked.push(Merge { page: run[0].0, pages: count(run.len()), content: Content::Zeros });
        }
        merges.extend(zeros);
        if asked.is_empty() {
            return Ok(());
        }
        self.sent.insert(link.next_id(), DedupRequest::Merge(merges));
        link.merge(asked)
    }
}
