//! A host's part in a pool: it reports its state, and carries out the intents that concern it.
//!
//! The member is a task of the daemon next to the loop. It reads the published ticks; the VMs' own
//! tasks take the turns of a migration. State of migrations that it must not forget is written to
//! the store before it acts ([`policy::handover`]); everything else is learned again. The lease is
//! also kept in a file, so that a restarted daemon need not wait for the old lease to expire.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::published::{Latest, MemberState, Published};
use cluster::records::{self, Records, Written};
use cluster::store::{Change, SEAT_TTL, Snapshot, Still, Store, StoreError, WriterLease};
use drivers::hands::Hands;
use drivers::migration::{Limits, Secured, Turn, source_turn_without, target_turn_without};
use drivers::move_turn::{IntentSnapshot, Terms};
use model::cluster::{HostReport, Intent};
use model::spec::{PoolSpec, ReceiveSpec, Spec};
use model::{HostName, Reading, Severity, Time, VmName, VmView};
use policy::handover::{self, SourceQemu, SourceStep, TargetQemu, TargetStep};
use serde::Serialize;
use sys::clock::boot_now;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};

use super::launch::Launch;
use super::move_news::Teller;
use super::{manager, report, view};
use crate::pki::Purpose;

/// Interval at which the lease is renewed.
const STAY: Duration = Duration::from_secs(3);
/// Minimum interval between two reports.
const REPORT: Duration = Duration::from_secs(5);
/// Interval at which the records of all hosts are read, to be shown.
const LOOK: Duration = Duration::from_secs(5);
/// Polling interval during a move.
const BUSY: Duration = Duration::from_millis(100);
/// Another host that has had no lease for this long is not waited for.
const ALONE: Duration = Duration::from_secs(5);
/// Maximum time until a QEMU is found, after the start of the QEMU or of the daemon.
const FOUND: Duration = Duration::from_secs(30);
/// How long the memory that is kept for overloads is open to a VM that has come for one. Then the
/// VM has what it needs, or is in an overload of its own.
const ARRIVED: Duration = Duration::from_secs(600);
const SEAT_FILE: &str = "pool-seat.json";

/// A QEMU whose start was requested.
enum Launched {
    Starting(JoinHandle<Result<(), String>>),
    /// The time of the start.
    Started(Instant),
    Failed(String),
}

/// A host in its pool.
pub struct Member {
    spec: PoolSpec,
    store: Arc<dyn Store>,
    latest: Latest,
    hands: Hands,
    /// The directory with the certificates for QEMUs.
    shown: PathBuf,
    /// The directory for the output of the command that starts QEMUs.
    logs: PathBuf,
    state: watch::Sender<MemberState>,
    seat_file: PathBuf,
    seat: Option<WriterLease>,
    stayed: Instant,
    begun: Instant,
    reported: Option<(HostReport, Instant)>,
    /// Pages that each VM has paged since its overload began, and the time of the count.
    paged: BTreeMap<VmName, (u64, Time)>,
    launched: BTreeMap<(VmName, u64), Launched>,
    /// The manager that has started each QEMU, by incarnation.
    managers: BTreeMap<u64, Option<&'static str>>,
    /// The time since when other hosts have had no lease.
    absent: BTreeMap<HostName, Instant>,
    /// VMs that have come to this host, and when.
    arrived: BTreeMap<VmName, Instant>,
    teller: Teller,
}

impl Member {
    /// A member; [`run`](Self::run) starts it.
    #[must_use]
    pub fn new(
        whole: &Spec,
        spec: PoolSpec,
        store: Arc<dyn Store>,
        latest: Latest,
        hands: Hands,
    ) -> (Self, watch::Receiver<MemberState>) {
        let first = MemberState { host: spec.host.to_string(), ..MemberState::default() };
        let (state, receiver) = watch::channel(first);
        let seat_file = whole.host.state.join(SEAT_FILE);
        let seat = std::fs::read(&seat_file).ok().and_then(|t| serde_json::from_slice(&t).ok());
        let now = Instant::now();
        let member = Self {
            spec,
            store,
            latest,
            hands,
            shown: whole.runtime_directory().join("migration"),
            logs: whole.runtime_directory().join("incoming"),
            state,
            seat_file,
            seat,
            stayed: now.checked_sub(STAY).unwrap_or(now),
            begun: now,
            reported: None,
            paged: BTreeMap::new(),
            launched: BTreeMap::new(),
            managers: BTreeMap::new(),
            absent: BTreeMap::new(),
            arrived: BTreeMap::new(),
            teller: Teller::default(),
        };
        (member, receiver)
    }

    /// Works for as long as it is polled.
    pub async fn run(self) {
        // A flood of another host's values must not delay a lease or a move.
        let look = look(Arc::clone(&self.store), self.state.clone());
        tokio::join!(look, self.work());
    }

    async fn work(mut self) {
        loop {
            let pause = match self.turn().await {
                Ok(pause) => {
                    self.say(true, None);
                    pause
                }
                Err(error) => {
                    if matches!(error, StoreError::Unseated(_)) {
                        self.seat = None;
                    }
                    let is_seated = self.seat.is_some() && self.stayed.elapsed() < SEAT_TTL;
                    self.say(is_seated, Some(error.to_string()));
                    Duration::from_secs(1)
                }
            };
            sleep(pause).await;
        }
    }

    fn say(&self, is_seated: bool, trouble: Option<String>) {
        self.state.send_if_modified(|state| {
            let is_news = (state.is_seated, &state.trouble) != (is_seated, &trouble);
            (state.is_seated, state.trouble) = (is_seated, trouble);
            is_news
        });
    }

    async fn turn(&mut self) -> Result<Duration, StoreError> {
        let seat = self.sit().await?;
        self.report(&seat).await?;
        let intents = self.store.read(records::INTENTS).await?;
        let own = self.store.read(&records::of_host(&self.spec.host)).await?;
        let (Records { intents: all, unreadable, .. }, written) =
            (Records::of(&intents), Records::of(&own));
        let concerns = |intent: &Intent| [&intent.from, &intent.to].contains(&&self.spec.host);
        let mine: BTreeMap<VmName, Intent> =
            all.iter().filter(|(_, i)| concerns(i)).map(|(n, i)| (n.clone(), i.clone())).collect();
        let excess = Records::of(&self.store.read(records::EXCESS).await?).excess;
        let share = excess.shares.get(&self.spec.host).copied().unwrap_or_default();
        for ((_, vm), written) in &written.targets {
            if written.step == TargetStep::Runs {
                self.arrived.entry(vm.clone()).or_insert_with(Instant::now);
            }
        }
        self.arrived.retain(|_, at| at.elapsed() < ARRIVED);
        self.state.send_modify(|state| {
            self.teller.look(&mut state.moves, &self.spec.host, &mine, &written);
            state.share = share;
            state.arrived = self.arrived.keys().cloned().collect();
        });
        let mut is_busy = false;
        let mut trouble = None;
        for (vm, intent) in &mine {
            match self.carry_out(&seat, vm, intent, &own).await {
                Ok(is_more) => is_busy |= is_more,
                Err(error @ StoreError::Unseated(_)) => return Err(error),
                // A faulty record of another host must not block other VMs.
                Err(error) => trouble = Some(error),
            }
        }
        self.launched.retain(|(vm, n), _| {
            mine.get(vm).is_some_and(|i| i.generation == *n) || unreadable.contains(vm)
        });
        is_busy |= self.clear(&seat, &written, &mine, &unreadable).await?;
        if let Some(error) = trouble {
            return Err(error);
        }
        if is_busy {
            return Ok(BUSY);
        }
        // Wait until an intent changes, or the lease needs renewal.
        let changed = self.store.changed(records::INTENTS, intents.revision);
        match timeout(STAY, changed).await {
            Ok(heard) => heard.map(|()| Duration::ZERO),
            Err(_) => Ok(Duration::ZERO),
        }
    }

    async fn sit(&mut self) -> Result<WriterLease, StoreError> {
        if let Some(seat) = self.seat.clone() {
            if self.stayed.elapsed() >= STAY {
                self.store.stay(&seat).await?;
                self.stayed = Instant::now();
            }
            return Ok(seat);
        }
        let (key, who) = (records::host_seat(&self.spec.host), self.spec.host.as_str());
        let Some(seat) = self.store.sit(&key, who).await? else {
            let why = format!("another daemon is {who} in this pool, or was a moment ago");
            return Err(StoreError::Refused(why));
        };
        // Without the file, the next daemon waits for the lease to expire.
        let _ = serde_json::to_vec(&seat).map(|text| std::fs::write(&self.seat_file, text));
        (self.seat, self.stayed, self.reported) = (Some(seat.clone()), Instant::now(), None);
        Ok(seat)
    }

    async fn report(&mut self, seat: &WriterLease) -> Result<(), StoreError> {
        let tick = self.latest.borrow().clone();
        self.count(&tick);
        self.know_managers(&tick);
        let paged = |vm: &VmName| self.paged.get(vm).map_or(0, |(pages, _)| *pages);
        let new = report::of(&tick, &self.spec, paged, |view| self.manager(view));
        let is_due = self
            .reported
            .as_ref()
            .is_none_or(|(old, at)| report::is_news(old, &new) && at.elapsed() >= REPORT);
        if is_due {
            let put = Change::put(records::report(&self.spec.host), &new);
            self.store.write(seat, Vec::new(), vec![put]).await?;
            self.reported = Some((new, Instant::now()));
        }
        Ok(())
    }

    /// Looks up the manager of each QEMU, once per incarnation.
    fn know_managers(&mut self, tick: &Published) {
        let lives: BTreeMap<u64, u32> =
            tick.view.vms.values().filter_map(|view| Some((view.incarnation, view.pid?))).collect();
        self.managers.retain(|life, _| lives.contains_key(life));
        for (life, pid) in lives {
            self.managers.entry(life).or_insert_with(|| manager::of(pid));
        }
    }

    /// The manager of a QEMU. One that has not been looked up yet is looked up now, because no
    /// move may begin before that.
    fn manager(&self, view: &VmView) -> Option<&'static str> {
        let known = self.managers.get(&view.incarnation);
        known.copied().unwrap_or_else(|| view.pid.and_then(manager::of))
    }

    /// Counts the pages that each overloaded VM has paged.
    fn count(&mut self, tick: &Published) {
        self.paged.retain(|vm, _| report::severity(tick, vm) != Severity::None);
        for (vm, overload) in &tick.plan.overloads {
            if overload.severity != Severity::None {
                let (pages, at) = self.paged.entry(vm.clone()).or_insert((0, tick.at));
                *pages += overload.pages_per_s * tick.at.since(*at).0 / 1000;
                *at = tick.at;
            }
        }
    }

    /// Takes the next turn of an intent. Returns whether another one is due soon.
    async fn carry_out(
        &mut self,
        seat: &WriterLease,
        vm: &VmName,
        intent: &Intent,
        own: &Snapshot,
    ) -> Result<bool, StoreError> {
        let is_source = intent.from == self.spec.host;
        let other = if is_source { &intent.to } else { &intent.from };
        let theirs = self.store.read(&records::of_host(other)).await?;
        let (ours_read, theirs_read) = (Records::of(own), Records::of(&theirs));
        let is_there = theirs_read.seated.contains(other);
        if is_there {
            self.absent.remove(other);
        }
        let absent = (!is_there)
            .then(|| self.absent.entry(other.clone()).or_insert_with(Instant::now).elapsed());
        let (sources, targets) =
            if is_source { (&ours_read, &theirs_read) } else { (&theirs_read, &ours_read) };
        let (source, target) = (sources.source_of(vm, intent), targets.target_of(vm, intent));
        // After the move, QEMU is its operator's responsibility.
        let is_over = if is_source {
            source.is_some_and(|written| written.is_over)
        } else {
            target.is_some_and(|written| written.is_over)
        };
        if is_over {
            return Ok(false);
        }
        let known = IntentSnapshot {
            source: source.map(|written| written.step.clone()),
            target: target.map(|written| written.step.clone()),
            life: None,
            is_late: intent.is_withdrawn,
            is_alone: absent.is_some_and(|absent| absent >= ALONE),
            bar: self.barred(vm, intent),
        };
        // The write succeeds only if the other host's step has not changed since it was read.
        if is_source {
            let still = theirs.still(records::target(other, vm));
            let key = records::source(&self.spec.host, vm);
            let (turn, life) = self.source_turn(vm, intent, known, source).await;
            self.follow((seat, still, key), intent.generation, source, turn, life).await
        } else {
            let still = theirs.still(records::source(other, vm));
            let key = records::target(&self.spec.host, vm);
            let (turn, life) = self.target_turn(vm, intent, known, target).await;
            self.follow((seat, still, key), intent.generation, target, turn, life).await
        }
    }

    /// Writes the step of a turn. Returns whether another turn is due soon.
    async fn follow<Step: Clone + Serialize>(
        &self,
        (seat, still, key): (&WriterLease, Still, String),
        generation: u64,
        written: Option<&Written<Step>>,
        turn: Turn<Step>,
        life: u64,
    ) -> Result<bool, StoreError> {
        let next = match (turn, written) {
            (Turn::Write(step), _) => {
                Written { generation, step, incarnation: life, is_over: false }
            }
            (Turn::Over, Some(written)) if !written.is_over => {
                Written { is_over: true, ..written.clone() }
            }
            (Turn::Over, _) => return Ok(false),
            (Turn::Did | Turn::Waits | Turn::Launch, _) => return Ok(true),
        };
        match self.store.write(seat, vec![still], vec![Change::put(key, &next)]).await {
            Ok(()) | Err(StoreError::Changed) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Why this host's own configuration forbids the move.
    fn barred(&self, vm: &VmName, intent: &Intent) -> Option<String> {
        let tick = self.latest.borrow();
        let own = tick.spec.group_of(vm).map(|(group, _)| group);
        let bar = handover::barred(vm, &intent.group, &self.spec.movable, own);
        let is_source = intent.from == self.spec.host;
        let view = tick.view.vms.get(vm).filter(|_| is_source);
        bar.or_else(|| view.and_then(|view| self.manager(view)).map(report::managed))
    }

    /// The TLS files for a migration to or from that host.
    fn secured(&self, peer: &HostName) -> Option<Secured> {
        let files = self.spec.tls.as_ref()?.join(Purpose::Migration.directory());
        let peer_name = Purpose::Migration.common_name(peer.as_str());
        Some(Secured { files, shown: self.shown.clone(), peer_name })
    }

    fn limits(&self) -> Limits {
        let PoolSpec { bandwidth, downtime, precopy, .. } = self.spec;
        Limits { bandwidth, downtime, precopy }
    }

    async fn source_turn(
        &self,
        vm: &VmName,
        intent: &Intent,
        known: IntentSnapshot,
        written: Option<&Written<SourceStep>>,
    ) -> (Turn<SourceStep>, u64) {
        let life = written.map_or(0, |written| written.incarnation);
        let known = IntentSnapshot { life: Some(life).filter(|life| *life != 0), ..known };
        let is_found = self.hands.life(vm).is_some();
        let qemu = match life {
            0 if is_found => None,
            0 if self.begun.elapsed() < FOUND => Some(SourceQemu::Unknown),
            0 => Some(SourceQemu::Gone),
            life => self.hands.has_ended(life).then_some(SourceQemu::Gone),
        };
        if let Some(qemu) = qemu {
            let turn = source_turn_without(&qemu, known.seen());
            // A move is over once the store no longer lists the VM on this host.
            let is_reported = self.reported.as_ref().is_some_and(|(r, _)| r.vms.contains_key(vm));
            let is_other = self.hands.life(vm).is_some_and(|found| found != life);
            return match turn {
                Turn::Over if is_reported && !is_other => (Turn::Waits, life),
                turn => (turn, life),
            };
        }
        let terms = Terms { own: self.limits(), secured: self.secured(&intent.to) };
        match self.hands.source(vm, intent.generation, known, terms).await {
            Some((Ok(turn), found)) => (turn, found),
            // Another VM with this name, or a QEMU that does not answer: both are waited for.
            _ => (Turn::Waits, life),
        }
    }

    async fn target_turn(
        &mut self,
        vm: &VmName,
        intent: &Intent,
        known: IntentSnapshot,
        written: Option<&Written<TargetStep>>,
    ) -> (Turn<TargetStep>, u64) {
        let generation = intent.generation;
        let life = written.map_or(0, |written| written.incarnation);
        let known = IntentSnapshot { life: Some(life).filter(|life| *life != 0), ..known };
        let has_ended = match life {
            0 => self.launch_failed(vm, generation).await,
            life => self.hands.has_ended(life).then(|| "its QEMU has ended".to_owned()),
        };
        let Some(ReceiveSpec { address, command }) = &self.spec.receive else {
            let why = "this host takes no VMs in: [pool] has no `incoming`".to_owned();
            return (target_turn_without(&TargetQemu::Gone(why), known.seen()), life);
        };
        if let Some(why) = has_ended {
            return (target_turn_without(&TargetQemu::Gone(why), known.seen()), life);
        }
        let listen = match address {
            std::net::IpAddr::V6(address) => format!("tcp:[{address}]:0"),
            std::net::IpAddr::V4(address) => format!("tcp:{address}:0"),
        };
        if self.hands.life(vm).is_some() {
            let terms = Terms { own: listen, secured: self.secured(&intent.from) };
            return match self.hands.target(vm, known, terms).await {
                // A QEMU that is refused before it was prepared is not known later.
                Some((Ok(turn @ Turn::Write(TargetStep::Refused { .. })), _)) => (turn, life),
                Some((Ok(turn), found)) => (turn, found),
                _ => (Turn::Waits, life),
            };
        }
        let is_launched = self.launched.contains_key(&(vm.clone(), generation));
        // A daemon that has just started has not found all of its VMs yet.
        if is_launched || life != 0 || self.begun.elapsed() < STAY {
            return (Turn::Waits, life);
        }
        let turn = target_turn_without(&TargetQemu::Absent, known.seen());
        if turn == Turn::Launch {
            let (command, vm, logs) = (command.clone(), vm.clone(), self.logs.clone());
            let launch = Launch { command, vm: vm.clone(), generation, logs };
            let task = spawn_blocking(move || launch.run());
            self.launched.insert((vm, generation), Launched::Starting(task));
        }
        (turn, life)
    }

    /// Why a requested QEMU is not running.
    async fn launch_failed(&mut self, vm: &VmName, generation: u64) -> Option<String> {
        let is_found = self.hands.life(vm).is_some();
        let launch = self.launched.get_mut(&(vm.clone(), generation))?;
        if let Launched::Starting(task) = launch
            && task.is_finished()
        {
            *launch = match task.await {
                Ok(Ok(())) => Launched::Started(Instant::now()),
                Ok(Err(why)) => Launched::Failed(why),
                Err(error) => Launched::Failed(error.to_string()),
            };
        }
        match launch {
            Launched::Failed(why) => Some(why.clone()),
            Launched::Started(at) if !is_found && at.elapsed() >= FOUND => {
                Some("a QEMU was started for it, and no socket of `qmp` names it".to_owned())
            }
            Launched::Started(_) | Launched::Starting(_) => None,
        }
    }

    /// Ends moves whose intents are gone, and removes records that are over. A VM whose intent
    /// cannot be read is left as it is.
    async fn clear(
        &mut self,
        seat: &WriterLease,
        written: &Records,
        mine: &BTreeMap<VmName, Intent>,
        unreadable: &BTreeSet<VmName>,
    ) -> Result<bool, StoreError> {
        let is_current = |vm: &VmName, generation: u64| {
            let is_mine = mine.get(vm).is_some_and(|intent| intent.generation == generation);
            is_mine || unreadable.contains(vm)
        };
        let mut changes = Vec::new();
        for ((_, vm), step) in &written.sources {
            if !is_current(vm, step.generation) && step.is_over {
                changes.push(Change::Delete { key: records::source(&self.spec.host, vm) });
            }
        }
        let mut is_busy = false;
        for ((_, vm), step) in &written.targets {
            if is_current(vm, step.generation) {
                continue;
            }
            let key = records::target(&self.spec.host, vm);
            if step.is_over || self.hands.has_ended(step.incarnation) {
                changes.push(Change::Delete { key });
            } else if matches!(step.step, TargetStep::Prepared { .. } | TargetStep::Refused { .. })
            {
                // Without an intent, no host will send it a guest.
                is_busy = true;
                let why = "its intent is gone".to_owned();
                let step_seen = Some(TargetStep::Refused { why });
                let life = Some(step.incarnation);
                let known =
                    IntentSnapshot { life, target: step_seen.clone(), ..IntentSnapshot::default() };
                let Some(refused) = step_seen else { continue };
                let next = Written { step: refused, ..step.clone() };
                self.store.write(seat, Vec::new(), vec![Change::put(key, &next)]).await?;
                if self.hands.life(vm) == Some(step.incarnation) {
                    let terms = Terms { own: String::new(), secured: None };
                    let _ = self.hands.target(vm, known, terms).await;
                }
            }
        }
        if !changes.is_empty() {
            self.store.write(seat, Vec::new(), changes).await?;
        }
        Ok(is_busy)
    }
}

/// Reads all hosts' records again and again, for the API. Where that fails, the old ones stay, with
/// their age.
async fn look(store: Arc<dyn Store>, state: watch::Sender<MemberState>) {
    loop {
        if let Ok(snapshot) = store.read("").await {
            let records = view::of(&Records::of(&snapshot));
            let read = Some(Reading::new(records, boot_now()));
            state.send_modify(|state| state.records = read);
        }
        sleep(LOOK).await;
    }
}
