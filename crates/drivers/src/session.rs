//! One session with one QEMU: identifies it, queries it in every period, and commands it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::view::Mechanism;
use model::{Bytes, Migration, Reading, VmName};
use serde_json::Value;
use sys::clock::{boot_now, wall_now_ms};
use sys::log;
use sys::memory_of::Counters;
use sys::peer::PeerError;
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::guest_stats::{self, Dating, StatsError};
use super::identity::{self, QemuPeer};
use super::memory::Meter;
use super::qmp::{Command, QmpClient, QmpError};
use super::questions;
use super::ram::{self, Ram};
use super::shared::{DriverState, TwoNames, name_of_socket, name_of_stranger};
use super::slot::{self, BalloonRequest, Restore, Slot, VmOrder};
use super::tenant::managers::Managed;
use super::tenant::{Evidence, Rules, Stranger};
use super::undo::{self, RestoreError, Undo};
use super::vm::{OF_A_GROUP, OF_THE_BALLOON};
use crate::journal::UndoRecord;

/// Interval at which the evidence about a VM of no group is checked again.
const JUDGED_AGAIN: Duration = Duration::from_secs(10);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    /// Talking to QEMU failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The socket has outlived QEMU.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// QEMU has reported two names.
    #[error(transparent)]
    TwoNames(#[from] TwoNames),
    /// The configuration has changed, and with it the VM's group.
    #[error("its group has changed, it is met anew")]
    Rejudged,
    /// Reading the files about it has failed altogether.
    #[error("the files that tell whose it is cannot be read: {0}")]
    Files(#[from] JoinError),
    /// The VM is known through another socket already.
    #[error("two sockets name this VM: `{name}` is known through {}", .other.display())]
    TwoSockets { name: VmName, other: PathBuf },
}

/// A connection to an identified QEMU.
pub(super) struct Session<'a> {
    shared: &'a DriverState,
    slot: &'a Slot,
    client: QmpClient,
    peer: QemuPeer,
    /// The name that QEMU reports.
    told: VmName,
    /// The rules by which it was judged.
    rules: Arc<Rules>,
    /// The record of a VM manager about it.
    managed: Option<Managed>,
    /// Why it does not get the reported name.
    stranger: Option<Stranger>,
    judged_at: Instant,
    /// The recorded changes of this incarnation of the VM.
    undo: UndoRecord,
    /// The balloon's path in QEMU's object tree.
    device: Option<String>,
    /// Memory that QEMU reported at the last query.
    ram: Ram,
    meter: Option<Meter>,
    /// Its process's memory at the last reading; `None`: it could not be read.
    counters: Option<Counters>,
    dating: Dating,
    /// Whether QEMU polls the guest's statistics as often as we need them.
    is_polling: bool,
    periods: u64,
}

/// The evidence about a VM's identity, read on a blocking thread.
async fn evidence(
    shared: &DriverState,
    slot: &Slot,
    peer: &QemuPeer,
    managed: Option<Managed>,
) -> Result<Evidence, JoinError> {
    let (path, process, uid) = (slot.path.clone(), peer.process(), peer.uid);
    let proxmox = Arc::clone(&shared.proxmox);
    spawn_blocking(move || Evidence::of(&path, process, uid, managed, &proxmox)).await
}

impl<'a> Session<'a> {
    /// Connects, and reads the properties that do not change while QEMU lives.
    pub(super) async fn open(
        shared: &'a DriverState,
        slot: &'a Slot,
    ) -> Result<Self, SessionError> {
        let mut client = QmpClient::connect(&slot.path).await?;
        let peer = identity::of(&client, &slot.path)?;
        let told = questions::name(&mut client).await?.map(VmName::from);
        let told = told.unwrap_or_else(|| name_of_socket(&slot.path));
        if let Some(record) = shared.records.of_life(peer.incarnation).await
            && record.vm != name_of_stranger(&record.socket)
        {
            shared.note_name(peer.incarnation, &record.vm)?;
        }
        shared.note_name(peer.incarnation, &told)?;
        let rules = shared.rules();
        let evidence = evidence(shared, slot, &peer, None).await?;
        let stranger = rules.admit(&told, &evidence).err();
        let name = match &stranger {
            None => told.clone(),
            Some(_) => name_of_stranger(&slot.path),
        };
        if let Some(why) = &stranger {
            log::warn(&format!("{}: {why}", slot.path.display()));
        }
        let pid = peer.qemu.as_ref().ok().copied();
        let claimed = shared.claim(&name, &slot.path, pid);
        claimed.map_err(|other| SessionError::TwoSockets { name: name.clone(), other })?;
        let ram = ram::ram(&mut client).await?;
        let device = questions::find_balloon(&mut client).await?;
        let fresh = UndoRecord::untouched(name.clone(), slot.path.clone(), peer.incarnation);
        let undo = shared.records.adopt(fresh).await;
        let (dating, is_polling, periods) = (Dating::default(), false, 0);
        let mut session = Self {
            shared,
            slot,
            client,
            peer,
            told,
            rules,
            managed: evidence.managed,
            stranger,
            judged_at: Instant::now(),
            undo,
            device,
            ram,
            meter: None,
            counters: None,
            dating,
            is_polling,
            periods,
        };
        session.begin();
        if session.stranger.is_some() {
            session.let_go().await?;
        }
        session.find_memory().await?;
        session.show_ram();
        session.find_reporting().await?;
        session.find_deflation().await?;
        Ok(session)
    }

    /// Starts the view of this incarnation of the VM; keeps the view if the incarnation is known.
    fn begin(&self) {
        let mut state = self.slot.state();
        state.ended = None;
        if state.view.incarnation != self.peer.incarnation {
            state.view = slot::unknown_vm(slot::NOT_ASKED.to_owned());
            state.view.incarnation = self.peer.incarnation;
        }
        state.view.pid = self.peer.qemu.as_ref().ok().copied();
        state.view.limits.clear();
        if let Some(why) = &self.stranger {
            for mechanism in OF_A_GROUP {
                state.view.limits.insert(mechanism, why.to_string());
            }
        }
        if self.device.is_none() {
            let why = "QEMU was started without a virtio-balloon device";
            state.view.balloon = None;
            for mechanism in OF_THE_BALLOON {
                state.view.limits.insert(mechanism, why.to_owned());
            }
        }
    }

    async fn find_memory(&mut self) -> Result<(), QmpError> {
        let found = match self.peer.qemu.clone() {
            Err(why) => Err(why),
            Ok(pid) => match questions::ram_sizes(&mut self.client).await {
                // An existing meter is kept while the RAM blocks are the same.
                Ok(sizes) if self.meter.as_ref().is_some_and(|m| m.ram_sizes() == sizes) => {
                    return Ok(());
                }
                Ok(sizes) => Ok(Meter::new(pid, sizes)),
                Err(error) if error.is_fatal() => return Err(error),
                Err(error) => Err(error.to_string()),
            },
        };
        match found {
            Ok(meter) => self.meter = Some(meter),
            Err(why) => self.slot.limit(Mechanism::HostMemory, Some(why)),
        }
        Ok(())
    }

    async fn find_reporting(&mut self) -> Result<(), QmpError> {
        let Some(device) = &self.device else { return Ok(()) };
        let question = questions::property(device, "free-page-reporting");
        let why = match self.client.execute(question).await {
            Ok(Value::Bool(true)) => None,
            Ok(_) => Some("the balloon device was started without free-page-reporting=on".into()),
            Err(error) if error.is_fatal() => return Err(error),
            Err(error) => Some(error.to_string()),
        };
        self.slot.limit(Mechanism::FreePageReporting, why);
        Ok(())
    }

    /// Reads whether the balloon deflates on OOM. A QEMU without the property cannot negotiate
    /// that feature with the driver either.
    async fn find_deflation(&mut self) -> Result<(), QmpError> {
        let Some(device) = &self.device else { return Ok(()) };
        let question = questions::property(device, "deflate-on-oom");
        let deflates = match self.client.execute(question).await {
            Ok(answer) => answer.as_bool(),
            Err(error) if error.is_fatal() => return Err(error),
            Err(_) => None,
        };
        self.slot.state().view.deflates_on_oom = deflates;
        Ok(())
    }

    /// Works until the connection fails, and returns the error.
    pub(super) async fn run(&mut self, orders: &mut mpsc::Receiver<VmOrder>) -> SessionError {
        let mut period = steady(self.shared.period);
        loop {
            // If its process has ended, another process may hold the other end of the connection.
            if !self.peer.is_alive() {
                return QmpError::Closed.into();
            }
            if let Err(error) = self.is_still_itself().await {
                return error;
            }
            let outcome = tokio::select! {
                _ = period.tick() => self.look().await,
                () = self.slot.wished.notified() => self.grant_wish().await,
                Some(order) = orders.recv() => match order {
                    VmOrder::Restore(restore) => self.obey(restore).await,
                    VmOrder::Move(turn) => turn.take(&mut self.client, self.peer.incarnation).await,
                },
                size = self.client.balloon_change() => size.map(|size| self.note_size(size)),
            };
            match outcome {
                Ok(()) => {}
                Err(error) if error.is_fatal() => return error.into(),
                Err(error) => self.slot.down(error.to_string(), false),
            }
        }
    }

    /// Restores the balloon of a VM that was in a group under an earlier configuration.
    async fn let_go(&mut self) -> Result<(), QmpError> {
        if self.undo.balloon.is_none() {
            return Ok(());
        }
        let outcome = undo::restore(&mut self.client, &self.slot.path, &self.undo, Undo::Now).await;
        match undo::strike_out(&self.shared.records, self.undo.clone(), outcome, Undo::Now).await {
            Ok(_) => (self.undo.balloon, self.undo.stats_interval_s) = (None, None),
            Err(RestoreError::Qmp(error)) if error.is_fatal() => return Err(error),
            // The record stays, and `overbook release` tries again.
            Err(error) => self.slot.failed(error.to_string()),
        }
        Ok(())
    }

    /// Checks that QEMU has reported no other name through another socket, and that the current
    /// configuration still puts it into the same group. Proof may come late: Proxmox moves a VM's
    /// file to the target of a migration at its end. So the evidence about a stranger is checked
    /// again now and then.
    async fn is_still_itself(&mut self) -> Result<(), SessionError> {
        self.shared.has_one_name(self.peer.incarnation)?;
        let rules = self.shared.rules();
        let is_due = self.stranger.is_some() && self.judged_at.elapsed() >= JUDGED_AGAIN;
        if is_due || !Arc::ptr_eq(&rules, &self.rules) {
            self.judged_at = Instant::now();
            let managed = self.managed.take();
            let evidence = evidence(self.shared, self.slot, &self.peer, managed).await?;
            self.managed.clone_from(&evidence.managed);
            if rules.admit(&self.told, &evidence).err() != self.stranger {
                return Err(SessionError::Rejudged);
            }
            self.rules = rules;
        }
        Ok(())
    }

    /// Sends the queries of every period.
    async fn look(&mut self) -> Result<(), QmpError> {
        self.count_memory().await;
        if let Ok(pid) = self.peer.qemu {
            self.slot.read_limits(pid);
        }
        let migrate = Command::new("query-migrate");
        let status = Command::new("query-status");
        let (migrate, status) = if let Some(device) = &self.device {
            let stats = questions::property(device, "guest-stats");
            let balloon = Command::new("query-balloon");
            let ([before, devices], [after, _]) = (ram::commands(), ram::commands());
            let commands = [before, devices, balloon, stats, after, migrate, status];
            let [before, devices, balloon, stats, after, migrate, status] =
                self.client.batch(commands).await?;
            let (before, after) = (before?, after?);
            // The two figures belong together only if no memory was plugged between them.
            if before == after {
                self.note_ram(ram::ram_in(&before, devices.as_ref().ok())?).await?;
                self.note_balloon(balloon)?;
            }
            self.note_stats(stats);
            (migrate, status)
        } else {
            let [summary, devices] = ram::commands();
            let commands = [summary, devices, migrate, status];
            let [summary, devices, migrate, status] = self.client.batch(commands).await?;
            self.note_ram(ram::ram_in(&summary?, devices.as_ref().ok())?).await?;
            (migrate, status)
        };
        {
            let mut state = self.slot.state();
            state.up();
            let view = &mut state.view;
            view.migration = Migration::Unknown;
            if let (Ok(migrate), Ok(status)) = (migrate, status) {
                view.migration = questions::migration_in(&migrate, &status);
                view.suspended = questions::is_suspended(&status);
                view.immovable = questions::immovable_in(&migrate);
            }
        }
        if self.periods.is_multiple_of(slot::CPU_EVERY)
            && let Ok(pid) = self.peer.qemu
        {
            self.slot.count_cpu(pid);
        }
        self.periods += 1;
        self.ensure_polling().await
    }

    /// Memory may be plugged and unplugged while the guest runs.
    async fn note_ram(&mut self, ram: Ram) -> Result<(), QmpError> {
        if ram != self.ram {
            self.ram = ram;
            self.find_memory().await?;
        }
        self.show_ram();
        Ok(())
    }

    /// Shows the RAM that QEMU reports, but at most the memory that QEMU has mapped according to
    /// the kernel.
    fn show_ram(&mut self) {
        let said = self.ram;
        // Memory may have been plugged since the last reading.
        if self.counters.is_none_or(|seen| said.within(seen.mapped) != said)
            && let Ok(pid) = self.peer.qemu
        {
            self.counters = Counters::of(pid).ok();
        }
        let ram = self.counters.map_or(said, |seen| said.within(seen.mapped));
        {
            let view = &mut self.slot.state().view;
            (view.ram, view.hotplugged, view.devices) = (ram.reach, ram.hotplugged, ram.devices);
        }
        if ram != said {
            let (said, seen) = (said.reach.plus(said.devices), ram.reach.plus(ram.devices));
            let why = format!("QEMU says that it has {said} of RAM, and the kernel sees {seen}");
            self.slot.limit(Mechanism::HostMemory, Some(why));
        }
    }

    async fn count_memory(&mut self) {
        let Some(meter) = &mut self.meter else { return };
        let counters = meter.counters();
        self.counters = counters.as_ref().ok().copied();
        let outcome = meter.read(counters).await;
        let now = boot_now();
        match outcome {
            Ok(Some(used)) => {
                let own = meter.own();
                {
                    let view = &mut self.slot.state().view;
                    view.used = Some(Reading::new(used, now));
                    view.own = own;
                }
                self.slot.limit(Mechanism::HostMemory, None);
            }
            Ok(None) => {}
            Err(error) => self.slot.limit(Mechanism::HostMemory, Some(error.to_string())),
        }
    }

    /// A refusal is a limit of this VM: for example, this host cannot use balloons at all.
    fn note_balloon(&self, answer: Result<Value, QmpError>) -> Result<(), QmpError> {
        match answer.and_then(|answer| questions::balloon_in(&answer)) {
            Ok(size) => self.note_size(size),
            Err(error) => {
                self.slot.state().view.balloon = None;
                self.slot.limit(Mechanism::Balloon, Some(error.to_string()));
            }
        }
        Ok(())
    }

    fn note_size(&self, size: Bytes) {
        // A size beyond the known RAM means that a DIMM was plugged and is not known yet.
        if size > self.ram.reach {
            return;
        }
        self.slot.state().view.balloon = Some(Reading::new(size, boot_now()));
        self.slot.limit(Mechanism::Balloon, None);
    }

    /// Bad statistics leave the last good ones in place, which then age.
    fn note_stats(&mut self, answer: Result<Value, QmpError>) {
        let outcome = match answer {
            Ok(answer) => self.date_stats(&answer).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match outcome {
            Ok(reading) => {
                self.slot.state().view.stats = Some(reading);
                self.slot.limit(Mechanism::Statistics, None);
            }
            Err(why) => self.slot.limit(Mechanism::Statistics, Some(why)),
        }
    }

    fn date_stats(&mut self, answer: &Value) -> Result<Reading<model::GuestStats>, StatsError> {
        let (stats, date) = guest_stats::parse(answer)?;
        let at = self.dating.moment(date, boot_now(), wall_now_ms())?;
        Ok(Reading::new(stats, at))
    }

    /// Makes QEMU poll the guest's statistics once in a period; the original interval is recorded
    /// first.
    async fn ensure_polling(&mut self) -> Result<(), QmpError> {
        if self.is_polling && !self.shared.is_hands_off(self.slot) {
            return Ok(());
        }
        self.is_polling = false;
        let (false, Some(device)) = (self.shared.is_hands_off(self.slot), &self.device) else {
            return Ok(());
        };
        let wanted = self.shared.period.as_secs().max(1);
        let found = questions::polling(&mut self.client, device).await?;
        if found == 0 || found > wanted {
            let device = device.clone();
            let original = self.undo.stats_interval_s.or(Some(found));
            if !self.record(UndoRecord { stats_interval_s: original, ..self.undo.clone() }).await {
                return Ok(());
            }
            self.client.execute(questions::set_polling(&device, wanted)).await?;
        }
        self.is_polling = true;
        Ok(())
    }

    /// Records the original of a setting before it is changed. `false`: recording failed, so the
    /// setting must not be changed.
    async fn record(&mut self, undo: UndoRecord) -> bool {
        if undo == self.undo {
            return true;
        }
        match self.shared.records.keep(undo.clone()).await {
            Ok(()) => {
                self.undo = undo;
                true
            }
            Err(why) => {
                let what = format!("not changed, as the original could not be recorded: {why}");
                self.slot.failed(what);
                false
            }
        }
    }

    async fn grant_wish(&mut self) -> Result<(), QmpError> {
        let Some(wish) = self.slot.take_wish() else { return Ok(()) };
        if wish.incarnation != self.peer.incarnation || self.shared.is_hands_off(self.slot) {
            return Ok(());
        }
        self.set_balloon(wish).await
    }

    /// Restores the changes on record for this socket.
    async fn obey(&mut self, Restore { undo, reply }: Restore) -> Result<(), QmpError> {
        let records = &self.shared.records;
        let Some(record) = records.at(&self.slot.path).await else {
            // The caller may have stopped waiting.
            drop(reply.send(None));
            return Ok(());
        };
        let outcome = undo::restore(&mut self.client, &self.slot.path, &record, undo).await;
        let outcome = undo::strike_out(records, record, outcome, undo).await;
        if undo == Undo::Now {
            self.is_polling = false;
        }
        if outcome.is_ok() && undo == Undo::Now {
            (self.undo.balloon, self.undo.ram) = (None, None);
            self.undo.stats_interval_s = None;
        }
        match reply.send(Some(outcome)) {
            Err(Some(Err(RestoreError::Qmp(error)))) => Err(error),
            _ => Ok(()),
        }
    }

    /// Sets the balloon; the view shows a refusal to the operator.
    async fn set_balloon(&mut self, wish: BalloonRequest) -> Result<(), QmpError> {
        let refusal = match self.try_set_balloon(wish).await {
            Ok(None) => {
                self.slot.state().view.last_error = None;
                return Ok(());
            }
            Ok(Some(refusal)) => refusal,
            Err(error) if error.is_fatal() => return Err(error),
            Err(error) => error.to_string(),
        };
        let target = wish.target.map_or_else(|| "all".to_owned(), |target| target.to_string());
        self.slot.failed(format!("balloon to {target}: {refusal}"));
        Ok(())
    }

    /// `Some`: the reason why it was not tried.
    async fn try_set_balloon(&mut self, wish: BalloonRequest) -> Result<Option<String>, QmpError> {
        let migration = questions::migration(&mut self.client).await?;
        self.slot.state().view.migration = migration;
        if migration != Migration::None {
            return Ok(Some("not while a migration is, or may be, under way".to_owned()));
        }
        if let Ok(pid) = self.peer.qemu
            && let Err(why) = self.slot.check_limits(pid)
        {
            return Ok(Some(why));
        }
        if self.undo.balloon.is_none() {
            let (ram, balloon) = ram::with_balloon(&mut self.client).await?;
            let record =
                UndoRecord { balloon: Some(balloon), ram: Some(ram.reach), ..self.undo.clone() };
            if !self.record(record).await {
                return Ok(Some("the balloon's original size could not be recorded".to_owned()));
            }
        }
        // A DIMM that was plugged since then belongs to the guest, and one that was unplugged is
        // gone.
        let ram = ram::ram(&mut self.client).await?.reach;
        let target = wish.target.map(|target| target.plus(ram).minus(wish.ram));
        self.client.execute(questions::set_balloon(target)).await?;
        Ok(None)
    }
}

/// A ticker that does not catch up: after a delay the next tick comes a whole period later.
fn steady(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
