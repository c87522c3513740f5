//! One VM being tracked: its connection, its strategy, and the readings.
//!
//! ```text
//!   apart ──connect──► greeting ──welcome──► starting ──done──► tracking
//!     ▲                                         ▲  given back, refused  │
//!     └── any error: back-off                   └─── a pause ◄──────────┘
//! ```
//!
//! Every [`step`](Tracked::step) handles the messages that have come and sends the requests that
//! are due; it never blocks. [`Tracked::state`] shows failures, and the worker retries. The VM's
//! size bounds the memory used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use model::{Bytes, FreePages, Reading, ShimVersion, Tracking};
use pages::curve::MissRatioCurve;
use pages::working_set;
use protocol::{Refusal, State as ShimState};
use sys::clock::boot_now;
use sys::process::Identity;

use super::clock::{now_us, own_cpu_ns};
use super::cost::Before;
use super::freed::FreedOrder;
use super::holdings::Holdings;
use super::link::{Link, LinkError, LinkEvent};
use super::linked::Linked;
use super::mode::Settings;
use super::outside::{Outside, OutsideError};

/// How often a step is due.
pub const STEP: Duration = Duration::from_millis(100);
/// How often a reading is made: as often as the probes renew it.
const READING_EVERY: Duration = Duration::from_millis(200);
/// The interval of steps until all memory is read back.
const RELEASE_STEP: Duration = Duration::from_millis(2);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(64);
/// The shortest pause before a VM that could not be tracked from outside is checked again.
const UNFIT_RETRY: Duration = Duration::from_secs(10);
const LAST_UNFIT_RETRY: Duration = Duration::from_secs(600);
/// How often a reading is made of a VM that is tracked from outside: its curve changes slowly.
const OUTSIDE_READING_EVERY: Duration = Duration::from_secs(1);

static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// The state of a VM's tracking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The shim has not answered yet, or the VM was not inspected yet.
    Connecting,
    /// The VM is tracked.
    Tracking,
    /// The VM is not tracked now; the worker retries.
    Waiting {
        /// The reason.
        why: String,
    },
    /// The VM cannot be tracked as it was started; the worker retries rarely.
    Unsupported {
        /// The reason.
        why: String,
    },
}

/// A VM that is tracked, or is about to be.
#[derive(Debug)]
pub struct Tracked {
    process: Identity,
    settings: Settings,
    swapped: Bytes,
    /// The memory that the guest may use; `None`: all its RAM.
    memory: Option<Bytes>,
    freed: FreedOrder,
    /// The most that it may have in memory.
    resident: Option<Bytes>,
    state: State,
    phase: Phase,
    retry: Duration,
    reading: Option<Reading<Tracking>>,
    /// The cost of tracking before the present connection.
    before: Option<Before>,
    /// The RAM of a VM that is tracked from outside; `None`: its shim tracks it.
    attach: Option<Bytes>,
    /// The memory that QEMU occupies besides its guest's.
    own: Option<Bytes>,
    /// The host memory of the VM when the reading was made; `None`: not known.
    held: Option<Bytes>,
    reading_due: Instant,
    /// The number of the connection, unique in this process.
    session: u64,
}

#[derive(Debug)]
enum Phase {
    Apart { next: Instant },
    Greeting(Box<Link>),
    Linked(Box<Linked>),
    Outside(Box<Outside>),
}

impl Tracked {
    /// Will track the VM of this QEMU process once its shim accepts a connection.
    #[must_use]
    pub fn new(process: Identity, settings: Settings) -> Self {
        Self {
            process,
            settings,
            swapped: Bytes::ZERO,
            memory: None,
            freed: FreedOrder::default(),
            resident: None,
            state: State::Connecting,
            phase: Phase::Apart { next: Instant::now() },
            retry: FIRST_RETRY,
            reading: None,
            before: None,
            attach: None,
            own: None,
            held: None,
            reading_due: Instant::now(),
            session: 0,
        }
    }

    /// Will track the VM of this QEMU process, which has `ram` of RAM, from outside: nothing is
    /// loaded into it.
    #[must_use]
    pub fn attached(process: Identity, ram: Bytes, settings: Settings) -> Self {
        Self { attach: Some(ram), ..Self::new(process, settings) }
    }

    /// Connects to the shim of this QEMU process.
    ///
    /// # Errors
    /// When the connection fails; later failures are retried instead.
    pub fn connect(process: Identity, settings: Settings) -> Result<Self, LinkError> {
        let link = Box::new(Link::connect(process)?);
        Ok(Self { phase: Phase::Greeting(link), ..Self::new(process, settings) })
    }

    /// Handles the messages that have come, and sends the requests that are due. Never blocks.
    pub fn step(&mut self) {
        // A VM that cannot be tracked yet costs no system call.
        if matches!(self.phase, Phase::Apart { next } if Instant::now() < next) {
            return;
        }
        let began = own_cpu_ns();
        if let Some(ram) = self.attach {
            if let Err(error) = self.step_outside(ram) {
                self.leave(&error);
            }
        } else if let Err(error) = self.try_step() {
            self.part(&error);
        }
        let spent = own_cpu_ns().saturating_sub(began);
        match &mut self.phase {
            Phase::Linked(linked) => linked.spent(spent),
            Phase::Outside(outside) => outside.spent(spent),
            Phase::Apart { .. } | Phase::Greeting(_) => {}
        }
    }

    /// The state of its tracking.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The last reading, with its time; `None`: there is none yet. Its cost is of the last step.
    #[must_use]
    pub fn reading(&self) -> Option<Reading<Tracking>> {
        let Reading { value: known, at } = self.reading.as_ref()?;
        let memory = self.memory.or(self.ram())?;
        let held = self.held.unwrap_or(Bytes(u64::MAX));
        let inside = known.working_set.map(|set| set.min(held));
        let set = inside.map(|set| working_set::demand(set, Some(self.swapped), memory));
        let swapped = set.unwrap_or_default().minus(inside.unwrap_or_default());
        let cost = match &self.phase {
            Phase::Linked(linked) => linked.cost(),
            Phase::Outside(outside) => outside.cost(),
            Phase::Apart { .. } | Phase::Greeting(_) => known.cost,
        };
        Some(Reading::new(Tracking { working_set: set, swapped, cost, ..known.clone() }, *at))
    }

    /// The whole curve, sizes in bytes.
    #[must_use]
    pub fn curve(&self) -> Option<MissRatioCurve> {
        match &self.phase {
            Phase::Linked(linked) => linked.curve(),
            Phase::Outside(outside) => outside.curve(),
            Phase::Apart { .. } | Phase::Greeting(_) => None,
        }
    }

    /// The number of traps on this connection that the shim overwrote before they were read.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.linked().map_or(0, Linked::lost)
    }

    /// Whether all granules are tracked now; intermittent tracking pauses.
    #[must_use]
    pub fn is_following(&self) -> bool {
        self.linked().is_some_and(Linked::is_following)
    }

    /// The event that intermittent tracking watches, as of the last interval.
    #[must_use]
    pub fn event(&self) -> Option<f64> {
        self.linked()?.event()
    }

    /// QEMU's process.
    pub(super) fn process(&self) -> Identity {
        self.process
    }

    /// The number of QEMU's process.
    pub(super) fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Handles the messages that have come, and calls `work` with the shim, if it is connected, and
    /// the number of the connection. An error ends the connection.
    pub(super) fn with_shim<T>(
        &mut self,
        work: impl FnOnce(&mut Linked, u64) -> Result<T, LinkError>,
    ) -> Option<T> {
        let Phase::Linked(linked) = &mut self.phase else { return None };
        let done = linked.listen(&mut self.state).and_then(|()| work(linked, self.session));
        done.map_err(|error| self.part(&error)).ok()
    }

    fn linked(&self) -> Option<&Linked> {
        match &self.phase {
            Phase::Linked(linked) => Some(linked),
            _ => None,
        }
    }

    /// The size of guest RAM, from the shim or the kernel.
    #[must_use]
    pub fn ram(&self) -> Option<Bytes> {
        match &self.phase {
            Phase::Linked(linked) => Some(linked.ram()),
            Phase::Outside(outside) => Some(outside.ram()),
            Phase::Apart { .. } | Phase::Greeting(_) => None,
        }
    }

    /// The shim's versions; `None`: it has not answered yet, or there is none.
    #[must_use]
    pub fn shim(&self) -> Option<ShimVersion> {
        self.linked().map(Linked::shim)
    }

    /// Sets the guest's swap in use. It is added to a working set that fills the guest's memory
    /// (`pages::working_set`).
    pub fn set_swapped(&mut self, swapped: Bytes) {
        self.swapped = swapped;
    }

    /// Sets the RAM of a VM that is tracked from outside.
    pub fn set_ram(&mut self, ram: Bytes) {
        if let Some(known) = &mut self.attach {
            *known = ram;
        }
        if let Phase::Outside(outside) = &mut self.phase {
            outside.set_ram(ram);
        }
    }

    /// Sets the memory that the guest may use: less than its RAM if a balloon holds the rest.
    pub fn set_memory(&mut self, memory: Bytes) {
        self.memory = Some(memory);
    }

    /// Sets the memory that QEMU occupies besides its guest's. Without it, the VM's host memory
    /// does not bound the working set.
    pub fn set_own(&mut self, own: Option<Bytes>) {
        self.own = own;
        self.pass_on_resident();
    }

    /// Sets the most that it may have in memory. The rest is paged out, the longest untouched
    /// first. `None`: all of it is read back.
    pub fn set_resident(&mut self, resident: Option<Bytes>) {
        self.resident = resident;
        self.pass_on_resident();
    }

    fn pass_on_resident(&mut self) {
        match &mut self.phase {
            Phase::Linked(linked) => linked.set_resident(self.resident, self.own),
            Phase::Outside(outside) => outside.set_resident(self.resident, self.own),
            Phase::Apart { .. } | Phase::Greeting(_) => {}
        }
    }

    /// The state of its paging; `None`: there is no target, or it is not known.
    #[must_use]
    pub fn cold(&self) -> Option<Reading<model::Cold>> {
        match &self.phase {
            Phase::Linked(linked) => linked.paging().reading(),
            Phase::Outside(outside) => outside.pager().reading(),
            Phase::Apart { .. } | Phase::Greeting(_) => None,
        }
    }

    /// The reason why nothing is paged out, although there is a target.
    #[must_use]
    pub fn why_not_paged_out(&self) -> Option<&str> {
        match &self.phase {
            Phase::Linked(linked) => linked.paging().why_not(),
            Phase::Outside(outside) => outside.pager().why_not(),
            Phase::Apart { .. } | Phase::Greeting(_) => None,
        }
    }

    /// Sets the cost of an earlier worker: the share of a vCPU's time, and the end of the window of
    /// half a minute in which it was taken.
    #[must_use]
    pub fn after(self, spent: Option<Reading<f64>>) -> Self {
        let before = |spent: Reading<f64>| {
            let ago_us = spent.age(boot_now()).0.saturating_mul(1_000);
            Before { share: spent.value, until_us: now_us().saturating_sub(ago_us) }
        };
        Self { before: spent.map(before), ..self }
    }

    /// Sets how pages are handled that the guest frees.
    pub fn set_freed(&mut self, order: FreedOrder) {
        self.freed = order;
        if let Phase::Linked(linked) = &mut self.phase {
            linked.set_freed(order);
        }
    }

    /// The pages that the guest has freed; `None`: not known.
    #[must_use]
    pub fn freed(&self) -> Option<Reading<FreePages>> {
        self.linked()?.freed().reading()
    }

    /// Whether its next step is due at once: freed pages are being taken, or memory is read back.
    pub(super) fn is_busy(&self) -> bool {
        match &self.phase {
            Phase::Linked(linked) => linked.is_taking() || linked.paging().is_busy(),
            Phase::Outside(outside) => outside.pager().is_busy(),
            Phase::Apart { .. } | Phase::Greeting(_) => false,
        }
    }

    /// The reason why no freed pages are taken now, although they should be.
    #[must_use]
    pub fn why_not_taken(&self) -> Option<&str> {
        self.linked()?.freed().why_not()
    }

    /// Starts to give everything back. Closing the connection would give back revoked pages too,
    /// but only this reads back paged-out memory.
    pub fn begin_release(&mut self) {
        match &mut self.phase {
            Phase::Linked(linked) => linked.release(),
            Phase::Outside(outside) => outside.recall(),
            Phase::Apart { .. } | Phase::Greeting(_) => {}
        }
    }

    /// Whether paged-out memory is still being read back since [`Self::begin_release`].
    #[must_use]
    pub fn is_releasing(&self) -> bool {
        match &self.phase {
            Phase::Linked(linked) => linked.is_releasing(),
            Phase::Outside(outside) => outside.pager().is_busy(),
            Phase::Apart { .. } | Phase::Greeting(_) => false,
        }
    }

    /// Gives everything back, and waits until it is done.
    pub fn release(mut self) {
        self.begin_release();
        while self.is_releasing() {
            self.step();
            std::thread::sleep(RELEASE_STEP);
        }
    }

    fn try_step(&mut self) -> Result<(), LinkError> {
        match &mut self.phase {
            Phase::Apart { .. } => {
                self.phase = Phase::Greeting(Box::new(Link::connect(self.process)?));
                Ok(())
            }
            Phase::Greeting(link) => match link.poll()? {
                Some(LinkEvent::Welcome(state)) => self.welcome(state),
                Some(_) => Err(LinkError::Unexpected("it was only greeted")),
                None => Ok(()),
            },
            Phase::Linked(linked) => {
                linked.step(&mut self.state)?;
                if matches!(self.state, State::Tracking) {
                    self.retry = FIRST_RETRY;
                }
                if Instant::now() >= self.reading_due {
                    self.reading_due = Instant::now() + READING_EVERY;
                    // Without a new reading, the old one stays.
                    self.reading = linked.reading().or(self.reading.take());
                    let shared = linked.shared();
                    let holdings = self.own.and_then(|own| Holdings::of(self.process, own));
                    self.held = holdings.map(|it| it.all().plus(shared));
                }
                Ok(())
            }
            // There is no shim.
            Phase::Outside(_) => Ok(()),
        }
    }

    fn step_outside(&mut self, ram: Bytes) -> Result<(), OutsideError> {
        match &mut self.phase {
            Phase::Outside(outside) => {
                outside.step()?;
                self.retry = FIRST_RETRY;
                if Instant::now() >= self.reading_due {
                    self.reading_due = Instant::now() + OUTSIDE_READING_EVERY;
                    self.reading = outside.reading().or(self.reading.take());
                    let holdings = self.own.and_then(|own| Holdings::of(self.process, own));
                    self.held = holdings.map(Holdings::all);
                }
            }
            Phase::Apart { .. } | Phase::Greeting(_) | Phase::Linked(_) => {
                let outside = Outside::of(self.process, ram, &self.settings, self.before)?;
                self.phase = Phase::Outside(Box::new(outside));
                self.pass_on_resident();
                self.state = State::Tracking;
            }
        }
        Ok(())
    }

    /// Stops tracking the VM. Paged-out memory comes back when the guest touches it.
    fn leave(&mut self, error: &OutsideError) {
        let why = error.to_string();
        let is_lasting = matches!(error, OutsideError::Unfit(_));
        self.state = if is_lasting { State::Unsupported { why } } else { State::Waiting { why } };
        self.reading = None;
        if let Phase::Outside(outside) = &self.phase {
            let share = outside.cost().vcpu_share;
            self.before = Some(Before { share, until_us: now_us() });
        }
        // Another check takes milliseconds per GiB of RAM.
        let pause = if is_lasting { self.retry.max(UNFIT_RETRY) } else { self.retry };
        self.phase = Phase::Apart { next: Instant::now() + pause };
        self.retry = (self.retry * 2).min(if is_lasting { LAST_UNFIT_RETRY } else { LAST_RETRY });
    }

    fn welcome(&mut self, state: ShimState) -> Result<(), LinkError> {
        if let ShimState::Unsupported { why } = state {
            self.state = State::Unsupported { why };
            self.phase = Phase::Apart { next: Instant::now() + LAST_RETRY };
            return Ok(());
        }
        let apart = Phase::Apart { next: Instant::now() };
        let Phase::Greeting(link) = std::mem::replace(&mut self.phase, apart) else {
            return Err(LinkError::Unexpected("it was not greeted"));
        };
        self.phase =
            Phase::Linked(Box::new(Linked::new(*link, self.process, &self.settings, self.before)?));
        self.set_freed(self.freed);
        self.pass_on_resident();
        self.session = SESSIONS.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Drops the connection, whereupon the shim gives everything back.
    fn part(&mut self, error: &LinkError) {
        let why = error.to_string();
        let is_lasting =
            matches!(error, LinkError::NoShim { .. } | LinkError::Refused(Refusal::Version { .. }));
        self.state = if is_lasting { State::Unsupported { why } } else { State::Waiting { why } };
        self.reading = None;
        if let Phase::Linked(linked) = &self.phase {
            let share = linked.cost().vcpu_share;
            self.before = Some(Before { share, until_us: now_us() });
        }
        self.phase = Phase::Apart { next: Instant::now() + self.retry };
        self.retry = (self.retry * 2).min(LAST_RETRY);
    }
}
