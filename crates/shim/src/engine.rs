//! The engine's lock, and the state that it guards: guest RAM with its pages, QEMU's operations
//! that forbid moving them, and the reason why tracking has ended.
//!
//! A thread that moves a page holds this lock: the fault thread, the thread that serves requests,
//! or QEMU's thread that discards memory. No thread holds it for longer than a turn, and none
//! waits for it for long ([`Turns`]).
//!
//! Reasons against tracking are kept apart by when they end. An objection never ends. A hold ends
//! when QEMU has finished an operation. A pause ends with the next [`protocol::Request::Track`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use protocol::layout::GiveBack;
use protocol::{Refusal, State, Tracking};
use sys::memory_map::Range;
use sys::userfaultfd::{PageFault, Userfaultfd};

use crate::channel::{Channel, is_anything_merged};
use crate::cuts::{self, Cuts};
use crate::holes::fill_stray;
use crate::inhibitors::Inhibitors;
use crate::merge::AttachedPool;
use crate::page_ops::PageOps;
use crate::process::userfaultfd;
use crate::ram::page_of;
use crate::time::{Nanos, now};
use crate::tracker::{ReleaseTurn, Served, Tracker};
use crate::turns::{Turn, Turns, turn};
use crate::waiters::wake;
use crate::{alerts, freed, retries};

/// The state that the lock guards.
pub(crate) struct Engine {
    pub(crate) ops: PageOps,
    pub(crate) inhibitors: Inhibitors,
    pub(crate) cuts: Cuts,
    pub(crate) pool: Option<AttachedPool>,
    /// Memory that the guest frees is handed over to the kernel instead of being discarded.
    pub(crate) is_lazy: bool,
    paused: Option<GiveBack>,
}

pub(crate) static ENGINE: Turns<Engine> = Turns::new(Engine {
    ops: PageOps::new(),
    inhibitors: Inhibitors::new(),
    cuts: Cuts::new(),
    pool: None,
    is_lazy: false,
    paused: None,
});

/// Whether tracking is on, for threads that may not wait for the lock.
static IS_TRACKING: AtomicBool = AtomicBool::new(false);

/// Locks for work that can wait; see [`Turns::lock`].
pub(crate) fn lock() -> Turn<'static, Engine> {
    ENGINE.lock()
}

/// Locks for QEMU's threads; see [`Turns::lock_first`].
pub(crate) fn lock_first() -> Turn<'static, Engine> {
    ENGINE.lock_first()
}

/// The same, once every page is where its state says and the buffer is empty. It waits while a
/// page cannot be moved back, up to the limit of [`transitions`](crate::transitions).
pub(crate) fn lock_settled() -> Turn<'static, Engine> {
    loop {
        let mut engine = lock_first();
        if engine.ops.settle() {
            return engine;
        }
        let seen = retries::seen();
        drop(engine);
        retries::wait(seen);
    }
}

/// Whether a thread may have to wait for the fault thread. Takes no lock.
pub(crate) fn is_watched() -> bool {
    IS_TRACKING.load(Ordering::Acquire) || is_anything_merged()
}

impl Engine {
    /// Why no page can be moved now.
    pub(crate) fn obstacle(&self) -> Option<String> {
        self.ops.obstacle(&self.inhibitors).map(Into::into)
    }

    /// The state that the worker is told.
    pub(crate) fn state(&self) -> State {
        if let Some(why) = self.ops.objection(&self.inhibitors) {
            return State::Unsupported { why: why.into_owned() };
        }
        match &self.ops.tracker {
            Some(tracker) if !tracker.is_releasing() => State::On(tracker.tracking()),
            _ => self.suspension().map_or(State::Off, |why| State::Suspended { why }),
        }
    }

    fn suspension(&self) -> Option<String> {
        // Tracking that ended by itself or with the worker is no reason to wait.
        let pause = || match self.paused? {
            reason @ (GiveBack::Fuse | GiveBack::SlowFault | GiveBack::KernelRefused) => {
                Some(reason.words())
            }
            _ => None,
        };
        self.ops.hold(&self.inhibitors).or_else(pause).map(str::to_owned)
    }

    /// Resolves a fault; see [`Tracker::serve`].
    pub(crate) fn serve(
        &mut self,
        uffd: &'static Userfaultfd,
        fault: PageFault,
        received: Nanos,
    ) -> Served {
        let PageFault { address, is_protected } = fault;
        let Self { ops, inhibitors, cuts, .. } = self;
        let page = page_of(address);
        let is_merged = |channel: &Channel| channel.merged(page).next().is_some();
        let is_merged = ops.channel.as_ref().is_some_and(is_merged);
        // A page could not be moved back when its turn ended. A thread that waits for the
        // faulting page continues, or traps again.
        if !ops.settle() {
            wake(uffd, page);
            return Served::Yes;
        }
        if is_merged && is_protected {
            let served = match (&mut ops.tracker, &mut ops.channel) {
                (Some(tracker), Some(channel)) => tracker.touched(channel, address, received),
                _ => Served::Yes,
            };
            cuts.break_sharing(ops, inhibitors, uffd, address, received);
            return served;
        } else if is_merged || is_protected {
            // The page was touched while it was in the buffer, and is the pool's page now; or the
            // reverse. A protected page that is not recorded as merged is unprotected here:
            // nothing else would let the write through.
            if is_protected && !inhibitors.are_qemus(page) {
                // SAFETY: no code relies on the protection.
                let _ = unsafe { uffd.unprotect(page) };
            }
            wake(uffd, page);
        } else if let (Some(tracker), Some(channel)) = (&mut ops.tracker, &mut ops.channel) {
            return tracker.serve(channel, address, received);
        } else if inhibitors.are_qemus(page) {
            wake(uffd, page);
        } else {
            fill_stray(uffd, address);
        }
        Served::Yes
    }

    /// Serving a fault has failed; see [`cuts::let_go_on`].
    pub(crate) fn let_go_on(&self, uffd: &Userfaultfd, page: Range) {
        cuts::let_go_on(&self.ops, &self.inhibitors, uffd, page);
    }

    /// Lets all later writes to merged pages go on; see [`cuts::let_all_write`].
    pub(crate) fn let_all_write(&self, range: Range) {
        cuts::let_all_write(&self.ops, &self.inhibitors, range);
    }

    /// Whether memory that the guest frees is to be handed over now, and can be.
    pub(crate) fn hands_over(&self) -> bool {
        self.is_lazy && self.ops.obstacle(&self.inhibitors).is_none()
    }

    /// Discards `range`, or hands it over; see [`freed::discard`].
    pub(crate) fn discard(
        &mut self,
        range: Range,
        lazily: bool,
        call: impl Fn(Range, bool) -> c_int,
    ) -> (c_int, Vec<Range>) {
        freed::discard(&mut self.ops, &mut self.cuts, &self.inhibitors, range, lazily, call)
    }

    /// Starts tracking; nothing is revoked yet.
    ///
    /// # Errors
    /// Nothing can be tracked now, with the reason; or the kernel's.
    pub(crate) fn begin_tracking(&mut self, tracking: Tracking) -> Result<(), Refusal> {
        let not_tracking = |why: String| Refusal::NotTracking { why };
        if let Some(why) = self.obstacle() {
            return Err(not_tracking(why));
        }
        let uffd = userfaultfd().map_err(|error| not_tracking(error.to_string()))?;
        // A range registered for a turn must not be unregistered while the tracker uses it.
        if !self.ops.settle() {
            return Err(not_tracking("a page that was compared is not back yet".to_owned()));
        }
        let channel =
            self.ops.channel.as_ref().ok_or_else(|| not_tracking("say Hello first".to_owned()))?;
        let tracker = Tracker::start(uffd, &self.ops.ram.regions(), channel, tracking).map_err(
            |(call, errno)| Refusal::Kernel { call: call.to_owned(), errno: errno.raw_os_error() },
        )?;
        self.paused = None;
        self.ops.tracker = Some(tracker);
        IS_TRACKING.store(true, Ordering::Release);
        // Not before: the watchdog would check, see nothing to watch, and sleep on.
        alerts::ring();
        Ok(())
    }

    /// Gives back until all is done, or the turn is over; adds the number of granules to `total`.
    /// Once all is done, the second result is the tracker that has ended.
    fn give_back_turn(
        &mut self,
        reason: Option<GiveBack>,
        total: &mut u32,
    ) -> (ReleaseTurn, Option<Tracker>) {
        if !self.ops.settle() {
            return (ReleaseTurn::Stuck, None);
        }
        let PageOps { tracker: Some(tracker), channel: Some(channel), .. } = &mut self.ops else {
            return (ReleaseTurn::Done, None);
        };
        if tracker.begin_release() {
            self.paused = reason;
            if let Some(reason) = reason {
                channel.shared().note_given_back(reason);
            }
        }
        let (count, turn) = tracker.give_back_some(channel, turn());
        *total += count;
        if turn != ReleaseTurn::Done {
            return (turn, None);
        }
        tracker.unregister(channel);
        IS_TRACKING.store(false, Ordering::Release);
        retries::came_back();
        (turn, self.ops.tracker.take())
    }
}

/// Gives everything back and ends tracking; returns the number of granules that came back.
/// `reason` is `None` when the worker asked for it. Any number of threads may call this at once:
/// each helps.
pub(crate) fn give_back(reason: Option<GiveBack>) -> u32 {
    let mut total = 0;
    loop {
        let mut engine = lock_first();
        let (turn, ended) = engine.give_back_turn(reason, &mut total);
        let seen = retries::seen();
        drop(engine);
        // Staging is unmapped without the lock: this may take a while.
        drop(ended);
        match turn {
            ReleaseTurn::Done => return total,
            // A thread that serves faults goes first between two turns.
            ReleaseTurn::TurnOver => {}
            ReleaseTurn::Stuck => retries::wait(seen),
        }
    }
}

/// The same for one of QEMU's threads, which waits for it.
pub(crate) fn give_back_to_qemu(reason: GiveBack) {
    let began = now();
    give_back(Some(reason));
    ENGINE.waited(began);
}
