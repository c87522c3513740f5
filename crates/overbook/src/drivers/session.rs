//! One life of the connection to one QEMU: who it is, what it says in every period, what it is
//! told.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::view::Mechanism;
use model::{Bytes, Migration, Reading, VmName};
use serde_json::Value;
use sys::clock::{boot_now, wall_now_ms};
use sys::memory_of::Counters;
use sys::peer::PeerError;
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::guest_stats::{self, Dating, StatsError};
use super::identity::{self, Peer};
use super::memory::Meter;
use super::qmp::{Client, Command, QmpError};
use super::questions;
use super::ram::{self, Ram};
use super::shared::{Shared, TwoNames, name_of_socket, name_of_stranger};
use super::slot::{self, Order, Restore, Slot, Wish};
use super::tenant::managers::Managed;
use super::tenant::{Evidence, Rules, Stranger};
use super::undo::{self, RestoreError};
use super::vm::{OF_A_GROUP, OF_THE_BALLOON};
use crate::journal::UndoRecord;
use crate::log;

/// How often it is looked whether a VM of no group can be confirmed by now.
const JUDGED_AGAIN: Duration = Duration::from_secs(10);
/// Disks are asked for once in so many periods.
const BLOCK_EVERY: u64 = 5;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    /// QEMU cannot be talked to.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The socket has outlived QEMU.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// It has told two names.
    #[error(transparent)]
    TwoNames(#[from] TwoNames),
    /// The configuration has changed, and with it the group that it is of.
    #[error("its group has changed, it is met anew")]
    Rejudged,
    /// Reading files about it has failed altogether.
    #[error("the files that tell whose it is cannot be read: {0}")]
    Files(#[from] JoinError),
    /// The VM is managed through another socket already.
    #[error("two sockets name this VM: `{name}` is managed through {}", .other.display())]
    TwoSockets { name: VmName, other: PathBuf },
}

/// A connection to a QEMU that is known.
pub(super) struct Session<'a> {
    shared: &'a Shared,
    slot: &'a Slot,
    client: Client,
    peer: Peer,
    /// The name that QEMU tells.
    told: VmName,
    /// By what it was judged.
    rules: Arc<Rules>,
    /// The word of a manager of VMs about it.
    managed: Option<Managed>,
    /// Why that is not its name.
    stranger: Option<Stranger>,
    judged_at: Instant,
    /// What was changed on this life of the VM, as it is on record.
    undo: UndoRecord,
    /// The balloon's path in QEMU's tree.
    device: Option<String>,
    /// Memory that QEMU says it has, as it was last asked.
    ram: Ram,
    meter: Option<Meter>,
    dating: Dating,
    /// Whether QEMU asks the guest for statistics as often as we want them.
    is_polling: bool,
    periods: u64,
}

/// The evidence about a VM's identity, read on a thread that may wait for the files.
async fn evidence(
    slot: &Slot,
    peer: &Peer,
    managed: Option<Managed>,
) -> Result<Evidence, JoinError> {
    let (path, process, uid) = (slot.path.clone(), peer.process(), peer.uid);
    spawn_blocking(move || Evidence::of(&path, process, uid, managed)).await
}

impl<'a> Session<'a> {
    /// Connects, and finds out what does not change while QEMU lives.
    pub(super) async fn open(shared: &'a Shared, slot: &'a Slot) -> Result<Self, SessionError> {
        let mut client = Client::connect(&slot.path).await?;
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
        let evidence = evidence(slot, &peer, None).await?;
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
        let undo = on_record(shared, slot, &peer, &name).await;
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

    /// Starts the view of this life of the VM; keeps it when it is the life that was known.
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
                // A meter goes on as long as it looks for the right thing.
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

    /// A QEMU that does not know the property has a driver's promise neither.
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

    /// Works until the connection fails, and says how.
    pub(super) async fn run(&mut self, orders: &mut mpsc::Receiver<Order>) -> SessionError {
        let mut period = steady(self.shared.period);
        loop {
            // QEMU does not have the other end any more, whichever process has it.
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
                    Order::Restore(restore) => self.obey(restore).await,
                    Order::Move(turn) => turn.take(&mut self.client, self.peer.incarnation).await,
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

    /// A VM that was of a group before, by another configuration, gets its balloon back.
    async fn let_go(&mut self) -> Result<(), QmpError> {
        if self.undo.balloon.is_none() {
            return Ok(());
        }
        let outcome = undo::restore(&mut self.client, &self.slot.path, &self.undo).await;
        match undo::strike_out(&self.shared.records, self.undo.clone(), outcome).await {
            Ok(_) => (self.undo.balloon, self.undo.stats_interval_s) = (None, None),
            Err(RestoreError::Qmp(error)) if error.is_fatal() => return Err(error),
            // It stays on record, and `overbook release` tries again.
            Err(error) => self.slot.failed(error.to_string()),
        }
        Ok(())
    }

    /// Whether it has told no other name by another socket, and is of the same group by the
    /// configuration that is in force now. Proof may come late: Proxmox moves a VM's file to the
    /// target of a migration at its end. So a stranger is judged again now and then.
    async fn is_still_itself(&mut self) -> Result<(), SessionError> {
        self.shared.has_one_name(self.peer.incarnation)?;
        let rules = self.shared.rules();
        let is_due = self.stranger.is_some() && self.judged_at.elapsed() >= JUDGED_AGAIN;
        if is_due || !Arc::ptr_eq(&rules, &self.rules) {
            self.judged_at = Instant::now();
            let evidence = evidence(self.slot, &self.peer, self.managed.take()).await?;
            self.managed.clone_from(&evidence.managed);
            if rules.admit(&self.told, &evidence).err() != self.stranger {
                return Err(SessionError::Rejudged);
            }
            self.rules = rules;
        }
        Ok(())
    }

    /// What is asked in every period.
    async fn look(&mut self) -> Result<(), QmpError> {
        self.count_memory().await;
        self.read_limits();
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
            // The two figures belong together only if nothing was plugged between them.
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
            let view = &mut self.slot.state().view;
            view.migration = Migration::Unknown;
            if let (Ok(migrate), Ok(status)) = (migrate, status) {
                view.migration = questions::migration_in(&migrate, &status);
                view.immovable = questions::immovable_in(&migrate);
            }
        }
        self.slot.up();
        if self.periods.is_multiple_of(BLOCK_EVERY) {
            self.count_blocks().await?;
            if let Ok(pid) = self.peer.qemu {
                self.slot.count_cpu(pid);
            }
        }
        self.periods += 1;
        self.ensure_polling().await
    }

    /// Memory is plugged and unplugged while the guest runs.
    async fn note_ram(&mut self, ram: Ram) -> Result<(), QmpError> {
        if ram != self.ram {
            self.ram = ram;
            self.find_memory().await?;
        }
        self.show_ram();
        Ok(())
    }

    /// Shows the RAM that QEMU reports, at most what the kernel sees mapped by it.
    fn show_ram(&self) {
        let said = self.ram;
        let counters = self.peer.qemu.as_ref().ok().and_then(|pid| Counters::of(*pid).ok());
        let seen = counters.map(|counters| counters.mapped);
        let ram = seen.map_or(said, |seen| said.within(seen));
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
        let outcome = meter.read().await;
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

    /// A limit may come, change or go at any time.
    fn read_limits(&self) {
        let Ok(pid) = self.peer.qemu else { return };
        if let Ok(limits) = sys::memory_limits::of_process(pid) {
            self.slot.state().view.memory_limits = Some(Reading::new(limits, boot_now()));
        }
    }

    async fn count_blocks(&mut self) -> Result<(), QmpError> {
        let answer = self.client.execute(Command::new("query-blockstats")).await?;
        let disks = questions::block_stats_in(&answer);
        self.slot.state().view.block = Some(Reading::new(disks, boot_now()));
        Ok(())
    }

    /// A refusal is a limit of this VM: no balloon can be used on this host, for example.
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
        // With more than its RAM the guest has a DIMM that is not known yet.
        if size > self.ram.reach {
            return;
        }
        self.slot.state().view.balloon = Some(Reading::new(size, boot_now()));
        self.slot.limit(Mechanism::Balloon, None);
    }

    /// Bad statistics leave the last good ones in place, to grow old.
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

    /// Has QEMU ask the guest for statistics once in a period; the interval it had is recorded
    /// first.
    async fn ensure_polling(&mut self) -> Result<(), QmpError> {
        if self.is_polling && !self.shared.is_hands_off() {
            return Ok(());
        }
        self.is_polling = false;
        let (false, Some(device)) = (self.shared.is_hands_off(), &self.device) else {
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

    /// Records the original of what is about to be changed. `false`: it could not be, so hands off.
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
        if wish.incarnation != self.peer.incarnation || self.shared.is_hands_off() {
            return Ok(());
        }
        self.set_balloon(wish).await
    }

    /// Puts back whatever is on record for this socket.
    async fn obey(&mut self, Restore { reply }: Restore) -> Result<(), QmpError> {
        let records = &self.shared.records;
        let Some(undo) = records.at(&self.slot.path).await else {
            // Whoever asked may have stopped waiting.
            drop(reply.send(None));
            return Ok(());
        };
        let outcome = undo::restore(&mut self.client, &self.slot.path, &undo).await;
        let outcome = undo::strike_out(records, undo, outcome).await;
        self.is_polling = false;
        if outcome.is_ok() {
            (self.undo.balloon, self.undo.ram) = (None, None);
            self.undo.stats_interval_s = None;
        }
        match reply.send(Some(outcome)) {
            Err(Some(Err(RestoreError::Qmp(error)))) => Err(error),
            _ => Ok(()),
        }
    }

    /// Asks for the balloon; what QEMU refuses, the operator reads in the view.
    async fn set_balloon(&mut self, wish: Wish) -> Result<(), QmpError> {
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

    /// `Some`: why it was not even tried.
    async fn try_set_balloon(&mut self, wish: Wish) -> Result<Option<String>, QmpError> {
        let migration = questions::migration(&mut self.client).await?;
        self.slot.state().view.migration = migration;
        if migration != Migration::None {
            return Ok(Some("not while a migration is, or may be, under way".to_owned()));
        }
        if self.undo.balloon.is_none() {
            let (ram, balloon) = ram::with_balloon(&mut self.client).await?;
            let record =
                UndoRecord { balloon: Some(balloon), ram: Some(ram.reach), ..self.undo.clone() };
            if !self.record(record).await {
                return Ok(Some("the balloon's original size could not be recorded".to_owned()));
            }
        }
        // A DIMM that came since is the guest's, and one that went is gone.
        let ram = ram::ram(&mut self.client).await?.reach;
        let target = wish.target.map(|target| target.plus(ram).minus(wish.ram));
        self.client.execute(questions::set_balloon(target)).await?;
        Ok(None)
    }
}

/// What is on record of this life of the VM, taken over where it was known by another socket or
/// name.
async fn on_record(shared: &Shared, slot: &Slot, peer: &Peer, name: &VmName) -> UndoRecord {
    let fresh = UndoRecord::untouched(name.clone(), slot.path.clone(), peer.incarnation);
    let Some(old) = shared.records.of_life(peer.incarnation).await else { return fresh };
    let undo = UndoRecord { vm: fresh.vm, socket: fresh.socket, ..old.clone() };
    if undo != old && shared.records.keep(undo.clone()).await.is_ok() && undo.socket != old.socket {
        // If it cannot be, the next release finds nobody there and strikes it out.
        let _ = shared.records.strike(old).await;
    }
    undo
}

/// Ticks that are never made up for: after a pause the next comes a whole period later.
fn steady(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
