//! A VM whose shim has answered the greeting: messages from the shim go to the strategy, and
//! requests of the strategy go to the shim.
//!
//! ```text
//!   traps, page states ──► strategy.touched, revoked      strategy.revoke, tracking ──► requests
//! ```
//!
//! **Revoked granules.** Only the shim knows to which granules access is revoked: I/O may pin a
//! page. The page states show it after each answer to a revocation. A granule that is still
//! accessible was touched before the answer came (its trap tells), or could not be revoked.
//!
//! When the shim gives everything back, tracking pauses and then starts again. The strategy keeps
//! its knowledge of the guest.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use model::tracking::TrackingCost;
use model::{Bytes, Reading, Time, Tracking};
use pages::curve::MissRatioCurve;
use protocol::layout::{GiveBack, PageState};
use protocol::{MAX_REVOKE, Merged, Refusal, State as ShimState};
use sys::meminfo::MemInfo;
use sys::process::Identity;
use sys::threads::Thread;

use super::clock::{moment, now_us, own_cpu_ns, time};
use super::cost::{Before, CostMeter, WINDOW};
use super::freed::{Freed, FreedOrder};
use super::granules::{Granules, PAGE};
use super::link::{Link, LinkError, LinkEvent};
use super::mode::Settings;
use super::paging::Paging;
use super::strategy::{Estimate, Strategy};
use super::tracked::State;

/// How often the shim's status is requested; it gives everything back after two seconds of silence.
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// How long a recalled granule stays accessible: until its identical pages are merged.
const RECALLED: Duration = Duration::from_secs(1);
/// The name of the shim's thread that handles faults.
const FAULT_THREAD: &str = "overbook-fault";
/// How long tracking pauses after the shim has given everything back.
const PAUSE: Duration = Duration::from_secs(2);

/// A VM whose shim has answered the greeting.
#[derive(Debug)]
pub(super) struct Linked {
    link: Link,
    granules: Granules,
    strategy: Box<dyn Strategy>,
    /// The tracking that was last requested; `None`: none, or it must be requested again.
    asked: Option<protocol::Tracking>,
    is_on: bool,
    resumes: Option<Instant>,
    status_due: Instant,
    given_back: u64,
    cost: CostMeter,
    /// CPU time that the last step took for freed pages and for paging.
    freeing_ns: u64,
    fault_thread: FaultThread,
    lost: u64,
    /// Results of merges that were not yet taken, with the number of the request.
    merged: VecDeque<(u32, Result<Merged, Refusal>)>,
    /// Granules, by index, that were recalled, and until when they stay accessible: the strategy is
    /// not told.
    recalled: BTreeMap<u32, Instant>,
    /// Granules to recall, by number.
    to_recall: Vec<u32>,
    freed: Freed,
    paging: Paging,
    is_leaving: bool,
    /// Paged-out memory must be read back once the shim has given everything back.
    is_to_read: bool,
}

impl Linked {
    /// Tracks the guest memory that the shim's greeting has named.
    pub(super) fn new(
        link: Link,
        process: Identity,
        settings: &Settings,
        before: Option<Before>,
    ) -> Result<Self, LinkError> {
        // If the host's memory is unknown, only the fixed bound of `Granules` holds.
        let host = MemInfo::read().map_or(Bytes(u64::MAX), |host| host.total);
        let granules = Granules::new(link.regions(), settings.granule_pages, host)?;
        let (now, counters) = (now_us(), link.counters()?);
        let mut strategy = settings.strategy(&granules, time(now));
        if let Some(before) = before {
            // The cost before the window is paid.
            let ago = Duration::from_micros(now.saturating_sub(before.until_us));
            strategy.begin_after(before.share, WINDOW.saturating_sub(ago));
        }
        Ok(Self {
            strategy,
            asked: None,
            is_on: false,
            resumes: None,
            status_due: Instant::now() + STATUS_EVERY,
            given_back: counters.given_back,
            cost: CostMeter::new(counters, now, before),
            freeing_ns: 0,
            fault_thread: FaultThread::of(process.pid),
            lost: 0,
            merged: VecDeque::new(),
            recalled: BTreeMap::new(),
            to_recall: Vec::new(),
            freed: Freed::of(process),
            paging: Paging::of(process, link.regions(), granules.granule_pages()),
            is_leaving: false,
            is_to_read: false,
            granules,
            link,
        })
    }

    /// The whole curve, sizes in bytes.
    pub(super) fn curve(&self) -> Option<MissRatioCurve> {
        let estimate = self.strategy.estimate(time(now_us()))?;
        Some(estimate.curve.scaled(self.granule_bytes()))
    }

    /// Guest RAM.
    pub(super) fn ram(&self) -> Bytes {
        self.granules.bytes()
    }

    /// The number of traps that were overwritten before they were read.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Sets how pages are handled that the guest frees.
    pub(super) fn set_freed(&mut self, order: FreedOrder) {
        self.freed.set_order(order);
    }

    /// The pages that the guest has freed, and the reason why none is taken.
    pub(super) fn freed(&self) -> &Freed {
        &self.freed
    }

    /// Whether all granules are tracked now.
    pub(super) fn is_following(&self) -> bool {
        self.is_on && self.strategy.is_following()
    }

    /// The event that intermittent tracking watches, as of the last interval.
    pub(super) fn event(&self) -> Option<f64> {
        self.strategy.event()
    }

    /// Asks the shim to give everything back. If that fails, it does so when the connection closes.
    pub(super) fn release(&mut self) {
        self.is_leaving = true;
        let _ = self.link.release();
        self.is_to_read = self.paging.has_out();
    }

    /// Whether memory is still being read back since [`Self::release`].
    pub(super) fn is_releasing(&self) -> bool {
        self.is_to_read || self.paging.is_busy()
    }

    /// Sets the most that the VM may have in memory, and the memory that QEMU has besides.
    pub(super) fn set_resident(&mut self, target: Option<Bytes>, own: Option<Bytes>) {
        self.paging.order(target, own);
    }

    /// The paging of the VM's memory.
    pub(super) fn paging(&self) -> &Paging {
        &self.paging
    }

    #[expect(clippy::cast_precision_loss, reason = "a granule has at most 2 MiB")]
    fn granule_bytes(&self) -> f64 {
        self.granules.granule_bytes() as f64
    }

    /// Handles the messages that have come, and sends the requests that are due.
    pub(super) fn step(&mut self, state: &mut State) -> Result<(), LinkError> {
        self.listen(state)?;
        if self.is_leaving {
            if self.is_to_read && !self.link.is_releasing() {
                self.is_to_read = false;
                self.paging.recall();
            }
            self.paging.step(Vec::new);
            return Ok(());
        }
        let now = now_us();
        self.drain(now)?;
        let counters = self.link.counters()?;
        if counters.given_back != self.given_back {
            self.given_back = counters.given_back;
            let why = self.link.last_given_back();
            self.pause(&why.as_ref().map_or_else(String::new, GiveBack::to_string), state);
        }
        if let Some(taken) = self.cost.look(counters, now, || self.fault_thread.waited_ns()) {
            self.strategy.observe(time(now), self.cost.trap_ns(), taken);
        }
        self.keep_in_touch()?;
        self.recall()?;
        let began_ns = own_cpu_ns();
        self.freed.step(&mut self.link)?;
        let Self { paging, granules, strategy, .. } = self;
        paging.step(|| {
            let ages = strategy.ages(time(now)).into_iter();
            ages.map(|(index, age)| (granules.number(index), age)).collect()
        });
        self.freeing_ns = own_cpu_ns().saturating_sub(began_ns);
        if self.is_on { self.revoke(time(now)) } else { Ok(()) }
    }

    /// Handles the messages that have come.
    pub(super) fn listen(&mut self, state: &mut State) -> Result<(), LinkError> {
        while let Some(news) = self.link.poll()? {
            self.hear(news, state)?;
        }
        Ok(())
    }

    /// The connection, for requests to merge pages; [`Self::take_merged`] returns their answers.
    pub(super) fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    /// Whether access to this page is revoked. If so, its granule is noted for a
    /// [recall](Self::recall).
    pub(super) fn is_out_of_reach(&mut self, page: u32) -> Result<bool, LinkError> {
        let is_staged = self.link.page_state(page)? == PageState::Staged;
        let number = page / self.granules.granule_pages();
        if is_staged
            && let Some(granule) = self.granules.index(number)
            && self.to_recall.len() < MAX_REVOKE
            && !self.recalled.contains_key(&granule)
        {
            self.recalled.insert(granule, Instant::now() + RECALLED);
            self.to_recall.push(number);
        }
        Ok(is_staged)
    }

    /// Requests the recall of the noted granules, once the shim has answered the recall before.
    /// The strategy need not be told: a recall is no touch, and causes no trap.
    pub(super) fn recall(&mut self) -> Result<(), LinkError> {
        if self.to_recall.is_empty() || self.link.is_recalling() {
            return Ok(());
        }
        self.link.recall(std::mem::take(&mut self.to_recall))
    }

    /// The next answer to a request for a pool, a merge or private copies, with its number.
    pub(super) fn take_merged(&mut self) -> Option<(u32, Result<Merged, Refusal>)> {
        self.merged.pop_front()
    }

    /// Adds the CPU time `ns` of the last step. Its part for freed pages and paging is not a cost
    /// of tracking.
    pub(super) fn spent(&mut self, ns: u64) {
        let freeing_ns = std::mem::take(&mut self.freeing_ns);
        self.cost.spent(ns.saturating_sub(freeing_ns));
    }

    /// The cost of tracking, as of the last step.
    pub(super) fn cost(&self) -> TrackingCost {
        self.cost.cost()
    }

    /// Whether a request to take or keep freed pages is in flight.
    pub(super) fn is_taking(&self) -> bool {
        self.link.is_taking()
    }

    /// The guest memory that is shared with other VMs.
    pub(super) fn shared(&self) -> Bytes {
        Bytes(self.link.merged_pages().unwrap_or(0).saturating_mul(PAGE))
    }

    fn hear(&mut self, news: LinkEvent, state: &mut State) -> Result<(), LinkError> {
        match news {
            LinkEvent::Welcome(_) => return Err(LinkError::Unexpected("it greets twice")),
            LinkEvent::Tracking if self.is_on => {}
            LinkEvent::Tracking => {
                self.link.forget_traps()?;
                self.is_on = true;
                *state = State::Tracking;
            }
            LinkEvent::Revoked(granules, at) => self.note_revoked(granules, at)?,
            LinkEvent::Refused(Refusal::NotTracking { why }) => self.pause(&why, state),
            LinkEvent::Refused(refusal @ Refusal::Kernel { .. }) => {
                self.pause(&refusal.to_string(), state);
            }
            LinkEvent::Refused(refusal) => return Err(refusal.into()),
            LinkEvent::Merged(id, outcome) => self.merged.push_back((id, outcome)),
            LinkEvent::Taken(runs, taken) => self.freed.taken(&runs, taken, &self.link),
            LinkEvent::NotTaken(refusal) => self.freed.refused(&refusal),
            LinkEvent::Kept(runs, pages) => self.freed.kept(&runs, pages),
            LinkEvent::HandingOver | LinkEvent::Recalled | LinkEvent::Released => {}
            LinkEvent::Status(is, staging) => {
                self.paging.set_staging(staging);
                self.note_status(is, state);
            }
        }
        Ok(())
    }

    fn note_status(&mut self, is: ShimState, state: &mut State) {
        match is {
            ShimState::On(_) => {}
            ShimState::Off if self.asked.is_none() => {}
            ShimState::Off => self.pause("the shim is off", state),
            ShimState::Suspended { why } | ShimState::Unsupported { why } => {
                self.pause(&why, state)
            }
        }
    }

    /// Notes that no granule is revoked any more. Tracking starts again after [`PAUSE`].
    fn pause(&mut self, why: &str, state: &mut State) {
        if self.is_on || self.resumes.is_none() {
            self.resumes = Some(Instant::now() + PAUSE);
        }
        if self.is_on {
            self.strategy.given_back(time(now_us()));
        }
        self.is_on = false;
        self.asked = None;
        self.recalled.clear();
        self.to_recall.clear();
        *state = State::Waiting { why: format!("resting: {why}") };
    }

    /// Handles the answer to a revocation: finds which of these granules are revoked.
    fn note_revoked(&mut self, granules: Vec<u32>, at: Time) -> Result<(), LinkError> {
        if !self.is_on {
            // The shim has given everything back in between.
            return Ok(());
        }
        let granule_pages = self.granules.granule_pages();
        for granule in granules {
            let number = self.granules.number(granule);
            let is_staged = self.link.is_staged(number, granule_pages)?;
            match self.recalled.remove(&granule) {
                None if is_staged => self.strategy.revoked(granule, at),
                None => {
                    let first = number.saturating_mul(granule_pages);
                    let states =
                        self.link.page_states(first..first.saturating_add(granule_pages))?;
                    // A plain page was touched, which its trap tells, or I/O pins it for a moment.
                    if !states.contains(&PageState::Plain) {
                        let is_given_up = states.contains(&PageState::Freed);
                        self.strategy.cannot_be_revoked(granule, at, is_given_up);
                    }
                }
                // All of its pages were merged, or it was touched.
                Some(_) if !is_staged => self.strategy.called_back(granule, at),
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn drain(&mut self, now_us: u64) -> Result<(), LinkError> {
        let Self { link, granules, strategy, is_on, lost, recalled, .. } = self;
        let drained = link.drain(granules.end(), |trap| {
            if let Some(granule) = granules.index(trap.granule).filter(|_| *is_on) {
                recalled.remove(&granule);
                strategy.touched(granule, moment(trap.at_us, now_us));
            }
        })?;
        *lost = lost.saturating_add(drained.lost);
        if drained.lost > 0 && *is_on {
            let mut failed = None;
            strategy.resync(time(now_us), &mut |granule| {
                let number = granules.number(granule);
                let staged = link.is_staged(number, granules.granule_pages());
                recalled.contains_key(&granule)
                    || staged.unwrap_or_else(|error| {
                        failed = Some(error);
                        false
                    })
            });
            return failed.map_or(Ok(()), Err);
        }
        Ok(())
    }

    /// Revokes the granules that are due.
    fn revoke(&mut self, now: Time) -> Result<(), LinkError> {
        // One revocation is in flight at a time.
        if self.link.is_revoking() {
            return Ok(());
        }
        let mut granules = self.strategy.revoke(now);
        let moment = Instant::now();
        granules
            .extend(self.recalled.iter().filter(|(_, until)| **until <= moment).map(|(it, _)| it));
        granules.truncate(MAX_REVOKE);
        if granules.is_empty() {
            return Ok(());
        }
        let numbers = granules.iter().map(|index| self.granules.number(*index)).collect();
        self.link.revoke(numbers, granules, now)
    }

    /// Requests the tracking that the strategy wants, and the shim's status.
    fn keep_in_touch(&mut self) -> Result<(), LinkError> {
        let now = Instant::now();
        let is_due = self.resumes.is_none_or(|moment| now >= moment);
        let wanted = self.strategy.tracking().filter(|_| is_due && !self.link.is_busy());
        if let Some(wanted) = wanted.filter(|wanted| self.asked != Some(*wanted)) {
            self.resumes = None;
            // Granules that left the hot set would each trap once more, and tell nothing.
            if wanted.hot_set.is_none() && self.asked.is_some_and(|old| old.hot_set.is_some()) {
                self.link.release()?;
            }
            self.asked = Some(wanted);
            self.link.track(wanted)?;
        }
        if now >= self.status_due && !self.link.is_asked_for_status() {
            self.status_due = now + STATUS_EVERY;
            self.link.status()?;
        }
        Ok(())
    }

    /// The reading of the guest's memory, without its swap; `None`: too little is known.
    pub(super) fn reading(&self) -> Option<Reading<Tracking>> {
        let estimate: Estimate = self.strategy.estimate(time(now_us()))?;
        let granule = Bytes(self.granules.granule_bytes());
        Some(estimate.reading(self.granule_bytes(), granule, None, self.cost()))
    }
}

/// The shim's fault thread: while it waits for a CPU, so do the guest's threads that trapped.
#[derive(Debug)]
struct FaultThread {
    pid: u32,
    thread: Option<Thread>,
    waited_ns: Option<u64>,
}

impl FaultThread {
    fn of(pid: u32) -> Self {
        Self { pid, thread: None, waited_ns: None }
    }

    /// The time for which it has waited for a CPU since the last call; 0: unknown.
    fn waited_ns(&mut self) -> u64 {
        if self.thread.is_none() {
            // The shim starts it when tracking starts.
            self.thread = Thread::named(self.pid, FAULT_THREAD);
        }
        let waited_ns = self.thread.as_ref().and_then(Thread::waited_ns);
        let before_ns = std::mem::replace(&mut self.waited_ns, waited_ns);
        waited_ns.zip(before_ns).map_or(0, |(now, before)| now.saturating_sub(before))
    }
}
