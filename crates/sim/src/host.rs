//! The simulated host: the world outside the policy, behind the three ports.
//!
//! Its memory is conserved: `available = total − Σ used of its guests − memory that others
//! occupy`. Some actions are lost on their way, as when QEMU dies in the middle of a command.

use fastrand::Rng;
use model::{
    Action, Bytes, HostReading, HostView, Millis, Reading, Time,
    ports::{Act, Clock, Sense},
};

use crate::{fake::Load, guest::Guest};

/// The second in which a run begins, on the host's boot clock: it has been up for a while.
const BOOTED: Time = Time(1_000_000);

/// The host's clock in one second of a run.
#[derive(Clone, Copy, Debug)]
pub struct SimClock(Time);

impl SimClock {
    /// The clock in `second` of the run.
    #[must_use]
    pub const fn at(second: u64) -> Self {
        Self(BOOTED.after(Millis(second.saturating_mul(1000))))
    }
}

impl Clock for SimClock {
    fn now(&self) -> Time {
        self.0
    }
}

/// A host and its guests.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its memory.
    pub total: Bytes,
    /// Memory that processes other than guests occupy, over time.
    pub others: Load,
    /// Its guests, dead ones included.
    pub guests: Vec<Guest>,
    /// Percentage of actions that are lost on their way.
    pub lost_percent: u8,
    second: u64,
    rng: Rng,
}

impl Host {
    /// A host of `total` memory; `seed` decides everything random.
    #[must_use]
    pub fn new(total: Bytes, guests: Vec<Guest>, seed: u64) -> Self {
        let (others, rng) = (Load::steady(Bytes::ZERO), Rng::with_seed(seed));
        Self { total, others, guests, lost_percent: 0, second: 0, rng }
    }

    /// Simulates `second` in every guest.
    pub fn live(&mut self, second: u64) {
        self.second = second;
        let now = SimClock::at(second).now();
        for guest in &mut self.guests {
            guest.live(second, now, &mut self.rng);
        }
    }

    /// The remaining memory: `MemAvailable`.
    #[must_use]
    pub fn available(&self) -> Bytes {
        let used: Bytes = self.guests.iter().map(|guest| guest.used).sum();
        self.total.minus(used.plus(self.others.at(self.second)))
    }
}

impl Sense for Host {
    fn view(&mut self) -> HostView {
        let now = SimClock::at(self.second).now();
        let (total, available) = (self.total, self.available());
        let reading = HostReading { total, available, ..HostReading::default() };
        let seen = |guest: &Guest| guest.view(now).map(|view| (guest.name.clone(), view));
        HostView {
            host: Some(Reading::new(reading, now)),
            vms: self.guests.iter().filter_map(seen).collect(),
            ..HostView::default()
        }
    }
}

impl Act for Host {
    fn act(&mut self, action: &Action) {
        if self.rng.u8(0..100) < self.lost_percent {
            return;
        }
        let Action::Resize { vm, incarnation, target, by } = action;
        if let Some(guest) = self.guests.iter_mut().find(|guest| guest.name == *vm) {
            guest.ask(*incarnation, *target, *by);
        }
    }
}
