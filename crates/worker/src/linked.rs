//! A VM whose shim has answered the greeting: messages from the shim go to the strategy, and
//! requests of the strategy go to the shim.
//!
//! ```text
//!   traps, page states ──► strategy.touched, revoked      strategy.revoke, tracking ──► requests
//! ```
//!
//! When the shim gives everything back, tracking pauses and then starts again. The strategy keeps
//! its knowledge of the guest.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use model::tracking::TrackingCost;
use model::{Bytes, Reading, ShimVersion, Time, Tracking};
use pages::curve::MissRatioCurve;
use protocol::layout::GiveBack;
use protocol::{Merged, Refusal, State as ShimState};
use sys::meminfo::MemInfo;
use sys::process::Identity;

use super::clock::{moment, now_us, own_cpu_ns, time};
use super::cost::{Before, CostMeter};
use super::fault_thread::FaultThread;
use super::freed::{Freed, FreedOrder};
use super::granule_table::{GranuleEvent, GranuleTable};
use super::granules::{Granules, PAGE};
use super::link::{Link, LinkError, LinkEvent};
use super::mode::Settings;
use super::paging::Paging;
use super::strategy::Estimate;
use super::tracked::State;

/// How long tracking pauses after the shim has given everything back.
const PAUSE: Duration = Duration::from_secs(2);

/// A VM whose shim has answered the greeting.
#[derive(Debug)]
pub(super) struct Linked {
    link: Link,
    table: GranuleTable,
    /// The tracking that was last requested; `None`: none, or it must be requested again.
    asked: Option<protocol::Tracking>,
    resumes: Option<Instant>,
    given_back: u64,
    cost: CostMeter,
    /// CPU time that the last step took for freed pages and for paging.
    freeing_ns: u64,
    fault_thread: FaultThread,
    lost: u64,
    /// Results of merges that were not yet taken, with the number of the request.
    merged: VecDeque<(u32, Result<Merged, Refusal>)>,
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
            strategy.begin_after(before.share, before.unpaid(now));
        }
        Ok(Self {
            asked: None,
            resumes: None,
            given_back: counters.given_back,
            cost: CostMeter::new(counters, now, before),
            freeing_ns: 0,
            fault_thread: FaultThread::of(process.pid),
            lost: 0,
            merged: VecDeque::new(),
            freed: Freed::of(process),
            paging: Paging::of(process, link.regions(), granules.granule_pages()),
            is_leaving: false,
            is_to_read: false,
            table: GranuleTable::new(granules, strategy),
            link,
        })
    }

    /// The whole curve, sizes in bytes.
    pub(super) fn curve(&self) -> Option<MissRatioCurve> {
        let estimate = self.table.strategy().estimate(time(now_us()))?;
        Some(estimate.curve.scaled(self.granule_bytes()))
    }

    /// Guest RAM.
    pub(super) fn ram(&self) -> Bytes {
        self.table.granules().bytes()
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
        self.table.is_on() && self.table.strategy().is_following()
    }

    /// The event that intermittent tracking watches, as of the last interval.
    pub(super) fn event(&self) -> Option<f64> {
        self.table.strategy().event()
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
        self.table.granules().granule_bytes() as f64
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
            self.pause(&why.as_ref().map_or_else(String::new, GiveBack::to_string), state)?;
        }
        if let Some(taken) = self.cost.look(counters, now, || self.fault_thread.waited_ns()) {
            self.table.strategy_mut().observe(time(now), self.cost.trap_ns(), taken);
        }
        self.keep_in_touch()?;
        self.recall()?;
        let began_ns = own_cpu_ns();
        self.freed.step(&mut self.link)?;
        let Self { paging, table, .. } = self;
        paging.step(|| table.ages(time(now)));
        self.freeing_ns = own_cpu_ns().saturating_sub(began_ns);
        self.revoke(time(now))
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
    pub(super) fn recall_if_revoked(&mut self, page: u32) -> Result<bool, LinkError> {
        self.table.note_recall(page, time(now_us()), &self.link)
    }

    /// Requests the recall of the noted granules, once the shim has answered the recall before.
    pub(super) fn recall(&mut self) -> Result<(), LinkError> {
        if self.link.is_recalling() {
            return Ok(());
        }
        let granules = self.table.take_recalls();
        if granules.is_empty() { Ok(()) } else { self.link.recall(granules) }
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

    /// The shim's versions.
    pub(super) fn shim(&self) -> ShimVersion {
        self.link.shim()
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
            LinkEvent::Tracking if self.table.is_on() => {}
            LinkEvent::Tracking => {
                self.link.forget_traps()?;
                self.table.apply(GranuleEvent::Started, &self.link)?;
                *state = State::Tracking;
            }
            LinkEvent::Revoked(granules, at) => {
                self.table.apply(GranuleEvent::RevokeAnswered { granules, at }, &self.link)?;
            }
            LinkEvent::Refused(Refusal::NotTracking { why }) => self.pause(&why, state)?,
            LinkEvent::Refused(refusal @ Refusal::Kernel { .. }) => {
                self.pause(&refusal.to_string(), state)?;
            }
            LinkEvent::Refused(refusal) => return Err(refusal.into()),
            LinkEvent::Merged(id, outcome) => self.merged.push_back((id, outcome)),
            LinkEvent::Taken(runs, taken) => self.freed.taken(&runs, taken, &self.link),
            LinkEvent::NotTaken(refusal) => self.freed.refused(&refusal),
            LinkEvent::Kept(runs, pages) => self.freed.kept(&runs, pages),
            LinkEvent::Introduced
            | LinkEvent::HandingOver
            | LinkEvent::Recalled
            | LinkEvent::Released => {}
            LinkEvent::Status(is, staging) => {
                self.paging.set_staging(staging);
                match is {
                    ShimState::Off if self.asked.is_some() => {
                        self.pause("the shim is off", state)?
                    }
                    ShimState::Suspended { why } | ShimState::Unsupported { why } => {
                        self.pause(&why, state)?;
                    }
                    ShimState::On(_) | ShimState::Off => {}
                }
            }
        }
        Ok(())
    }

    /// Notes that no granule is revoked any more. Tracking starts again after [`PAUSE`].
    fn pause(&mut self, why: &str, state: &mut State) -> Result<(), LinkError> {
        if self.table.is_on() || self.resumes.is_none() {
            self.resumes = Some(Instant::now() + PAUSE);
        }
        self.asked = None;
        *state = State::Waiting { why: format!("resting: {why}") };
        self.table.apply(GranuleEvent::GivenBack { now: time(now_us()) }, &self.link)
    }

    /// Passes the traps on.
    fn drain(&mut self, now_us: u64) -> Result<(), LinkError> {
        let mut touches = Vec::new();
        let drained = self.link.drain(self.table.granules().end(), |trap| touches.push(trap))?;
        for trap in touches {
            let event =
                GranuleEvent::Touched { number: trap.granule, at: moment(trap.at_us, now_us) };
            self.table.apply(event, &self.link)?;
        }
        self.lost = self.lost.saturating_add(drained.lost);
        if drained.lost > 0 {
            self.table.apply(GranuleEvent::TouchesLost { now: time(now_us) }, &self.link)?;
        }
        Ok(())
    }

    /// Revokes the granules that are due.
    fn revoke(&mut self, now: Time) -> Result<(), LinkError> {
        // One revocation is in flight at a time.
        if self.link.is_revoking() {
            return Ok(());
        }
        let indexes = self.table.due_revocations(now);
        if indexes.is_empty() {
            return Ok(());
        }
        let granules = self.table.granules();
        let numbers = indexes.iter().map(|index| granules.number(*index)).collect();
        self.link.revoke(numbers, indexes, now)
    }

    /// Requests the tracking that the strategy wants, and the shim's status.
    fn keep_in_touch(&mut self) -> Result<(), LinkError> {
        let now = Instant::now();
        let is_due = self.resumes.is_none_or(|moment| now >= moment);
        let wanted = self.table.strategy().tracking().filter(|_| is_due && !self.link.is_busy());
        if let Some(wanted) = wanted.filter(|wanted| self.asked != Some(*wanted)) {
            self.resumes = None;
            // Granules that left the hot set would each trap once more, and tell nothing.
            if wanted.hot_set.is_none() && self.asked.is_some_and(|old| old.hot_set.is_some()) {
                self.link.release()?;
            }
            self.asked = Some(wanted);
            self.link.track(wanted)?;
        }
        self.link.keep_alive()
    }

    /// The reading of the guest's memory, without its swap; `None`: too little is known.
    pub(super) fn reading(&self) -> Option<Reading<Tracking>> {
        let estimate: Estimate = self.table.strategy().estimate(time(now_us()))?;
        let granule = Bytes(self.table.granules().granule_bytes());
        Some(estimate.reading(self.granule_bytes(), granule, None, self.cost()))
    }
}
